"""Runs a model that vLLM compiled as if it had not been, with the kernels of vLLM's eager mode.

Under Inductor vLLM leaves norms, activations and rotary embeddings to the compiler; run eagerly,
each would be a chain of small kernels. So three of vLLM's own switches are thrown together: the
model's `do_not_compile`, each custom op's choice of kernel, and the priority of its IR ops. What
they are thrown to is what vLLM itself chooses for a configuration that is not compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


class Uncompiled:
    """Of one model. Where vLLM compiled nothing there is nothing to switch."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._models: list[Any] = [
            m for m in model.modules() if getattr(m, "do_not_compile", True) is False
        ]
        self._ops: list[tuple[Any, Any]] = []
        self._priority: Any = None
        self._is_on, self._stack = False, ExitStack()
        self._methods: list[Any] = []  # vLLM's own choice, while ours is on
        if self._models:
            eager = _eager(vllm_config)
            self._ops = list(_eager_ops(model, eager.compilation_config))
            self._priority = _priority(eager)

    def __bool__(self) -> bool:
        return bool(self._models)

    @contextmanager
    def __call__(self, on: bool = True) -> Iterator[None]:
        """Within, the model runs uncompiled, or as vLLM compiled it. May be nested."""
        before = self._is_on
        self.set(on)
        try:
            yield
        finally:
            self.set(before)

    def set(self, on: bool) -> None:
        """Throw the switches, where they are not so already: there are hundreds, and steps of the
        same kind follow each other."""
        if on == self._is_on or not self._models:
            return
        self._is_on = on
        if on:
            self._methods = [op.__dict__["_forward_method"] for op, _ in self._ops]
            if self._priority is not None:
                self._stack.enter_context(self._priority.set_priority())
        else:
            self._stack.close()
        for i, (op, method) in enumerate(self._ops):
            op.__dict__["_forward_method"] = method if on else self._methods[i]
        for model in self._models:
            model.__dict__["do_not_compile"] = on


def _eager(vllm_config: Any) -> Any:
    """The same configuration, as far as kernels are chosen by it, without compilation."""
    from vllm.config import CompilationMode

    eager, compilation = copy.copy(vllm_config), copy.copy(vllm_config.compilation_config)
    compilation.mode = CompilationMode.NONE
    compilation.custom_ops = ["all"]
    eager.compilation_config = compilation
    return eager


def _eager_ops(model: torch.nn.Module, compilation: Any) -> Iterator[tuple[Any, Any]]:
    """Each custom op with the kernel that eager mode takes."""
    from vllm.model_executor.custom_op import CustomOp

    compilation.enabled_custom_ops = compilation.enabled_custom_ops.copy()
    with patch("vllm.model_executor.custom_op.get_cached_compilation_config", lambda: compilation):
        for module in model.modules():
            if isinstance(module, CustomOp):
                yield module, module.dispatch_forward(compile_native=False)


def _priority(eager: Any) -> Any:
    """vLLM's IR ops (from 0.2x on; None before): a context, by `set_priority`."""
    from vllm.platforms import current_platform

    choose = getattr(current_platform, "get_default_ir_op_priority", None)
    return None if choose is None else choose(eager)
