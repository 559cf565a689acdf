"""vLLM's two model runners, as far as Trimtab must tell them apart.

V1 (`vllm.v1.worker.gpu_model_runner`, also under the CPU's) wraps the whole model in one that keeps
a CUDA graph by batch shape; V2 (`vllm.v1.worker.gpu.model_runner`) has a manager that keeps them.
`vllm_hooks` lists every name used here.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch

Descriptor = Any  # vLLM's own key of a captured batch shape; has `num_tokens`


@dataclass(slots=True)
class GraphSet:
    """Full CUDA graphs of one forward pass, by batch shape, and the pool that they live in."""

    graphs: dict[Descriptor, Any]
    pool: Any
    choices: dict[Any, list[Descriptor]] | None = None  # V2's; None: to be worked out


class Runner(Protocol):
    """A model runner within its worker."""

    worker: Any
    model: torch.nn.Module
    num_blocks: int
    block_sizes: tuple[int, ...]  # of each KV cache group
    max_num_tokens: int

    def num_live(self) -> int:
        """Requests that hold state here, running or preempted."""

    def batch_order(self, num_requests: int) -> list[str]:
        """Request ids in the order of the step's rows, after `execute_model`."""

    def recover(self) -> None:
        """Forget a step that broke off in the middle."""

    def dummy_step(self, num_tokens: int, graph: bool | None = None) -> torch.Tensor:
        """Hidden states of a step that writes no KV, attention included. With `graph` a decode
        step of `num_tokens` requests, replayed (True) or run without its graph (False)."""

    def descriptors(self) -> list[Descriptor]:
        """Batch shapes that stock has full graphs for, largest first."""

    def graph_set(self) -> GraphSet:
        """The installed one."""

    def install(self, graphs: GraphSet) -> None:
        """Steps whose shape is in `graphs` replay it; others run without a full graph."""

    def ungraphed(self) -> AbstractContextManager[None]:
        """Steps within run without any graph, a compiled model's own piecewise ones included."""

    def capture(self, descriptor: Descriptor, warm: bool) -> int:
        """Add one to the installed set, which is to be installed again after the last one. How
        often the model's forward ran for it: a `warm` one runs eagerly first."""


def runner_of(worker: Any) -> Runner:
    """Raises `RuntimeError` for a runner that is neither."""
    runner = worker.model_runner
    if hasattr(runner, "req_states"):
        return V2(worker)
    if hasattr(runner, "input_batch"):
        return V1(worker)
    raise RuntimeError(f"{type(runner).__module__} is a model runner that Trimtab does not know")


class _Either:
    """What is the same in both."""

    def __init__(self, worker: Any) -> None:
        runner = worker.model_runner
        self.worker, self._runner = worker, runner
        self.model = runner.get_model()
        self.num_blocks = runner.kv_cache_config.num_blocks
        self.block_sizes = tuple(
            g.kv_cache_spec.block_size for g in runner.kv_cache_config.kv_cache_groups
        )
        self.max_num_tokens = runner.max_num_tokens

    def recover(self) -> None:
        self._runner.execute_model_state = None

    @torch.inference_mode()
    def _dummy_run(self, num_tokens: int, **options: Any) -> torch.Tensor:
        with self._configured():
            out = self._runner._dummy_run(num_tokens, skip_eplb=True, **options)
        hidden_states = out[0] if isinstance(out, tuple) else out
        return hidden_states[:num_tokens].clone()  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _configured(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.worker.vllm_config):
            yield

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """vLLM's own way of capturing while it starts, without the clean-up between two graphs:
        collecting garbage and emptying the allocator's cache take most of a capture's time."""
        from vllm.v1.worker.workspace import lock_workspace, unlock_workspace

        torch.cuda.synchronize()
        with contextlib.ExitStack() as stack:
            gc.disable()
            stack.callback(gc.enable)
            for name in ("gc.collect", "torch.cuda.empty_cache", "torch.accelerator.empty_cache"):
                stack.enter_context(patch(name, lambda *args: 0))
            unlock_workspace()
            stack.callback(lock_workspace)
            stack.enter_context(self._configured())
            yield
        torch.cuda.synchronize()


class V1(_Either):
    """`CUDAGraphWrapper` around the model keeps the graphs; a dispatcher says which there are."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        from vllm.config import CUDAGraphMode

        self._full = CUDAGraphMode.FULL
        self._none = CUDAGraphMode.NONE
        wrapper = self._runner.model
        has_graphs = worker.device.type == "cuda" and hasattr(wrapper, "concrete_cudagraph_entries")
        self._wrapper = wrapper if has_graphs else None
        self._keys = self._runner.cudagraph_dispatcher.cudagraph_keys if has_graphs else {}
        self._descriptors = sorted(
            self._keys.get(self._full, ()), key=lambda d: d.num_tokens, reverse=True
        )

    def num_live(self) -> int:
        return len(self._runner.requests)

    def batch_order(self, num_requests: int) -> list[str]:
        return list(self._runner.input_batch.req_ids[:num_requests])

    def dummy_step(self, num_tokens: int, graph: bool | None = None) -> torch.Tensor:
        if graph is None:
            return self._dummy_run(
                num_tokens, force_attention=True, cudagraph_runtime_mode=self._none
            )
        mode = self._full if graph else self._none
        return self._dummy_run(
            num_tokens, force_attention=True, uniform_decode=True, cudagraph_runtime_mode=mode
        )

    def descriptors(self) -> list[Descriptor]:
        return list(self._descriptors)

    def graph_set(self) -> GraphSet:
        assert self._wrapper is not None
        return GraphSet(self._wrapper.concrete_cudagraph_entries, self._wrapper.graph_pool)

    def install(self, graphs: GraphSet) -> None:
        assert self._wrapper is not None
        self._wrapper.concrete_cudagraph_entries = graphs.graphs
        self._wrapper.graph_pool = graphs.pool
        self._keys[self._full] = set(graphs.graphs)

    @contextlib.contextmanager
    def ungraphed(self) -> Iterator[None]:
        dispatcher = self._runner.cudagraph_dispatcher
        before, dispatcher.keys_initialized = dispatcher.keys_initialized, False
        try:
            yield
        finally:
            dispatcher.keys_initialized = before

    def capture(self, descriptor: Descriptor, warm: bool) -> int:
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled
        from vllm.distributed.parallel_state import graph_capture

        self._keys[self._full].add(descriptor)  # `install` says what stays
        set_cudagraph_capturing_enabled(True)
        try:
            with self._capturing(), graph_capture(device=self.worker.device):
                self._runner._warmup_and_capture(
                    descriptor, cudagraph_runtime_mode=self._full, num_warmups=int(warm)
                )
        finally:
            set_cudagraph_capturing_enabled(False)
        return 1 + int(warm)


class V2(_Either):
    """A `CudaGraphManager` keeps the graphs and the shapes that it may choose for a batch."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        from vllm.config import CUDAGraphMode

        self._full = CUDAGraphMode.FULL
        self._manager = self._runner.cudagraph_manager
        captured = self._manager._capture_descs if self._manager is not None else {}
        self._descriptors = list(captured.get(self._full, ()))
        self._choices = dict(self._manager._candidates) if self._manager is not None else {}

    def num_live(self) -> int:
        return len(self._runner.req_states.req_id_to_index)

    def batch_order(self, num_requests: int) -> list[str]:
        return list(self._runner.execute_model_state.input_batch.req_ids)

    def dummy_step(self, num_tokens: int, graph: bool | None = None) -> torch.Tensor:
        if graph:
            return self._dummy_run(num_tokens, uniform_decode=True)
        with self.ungraphed():
            return self._dummy_run(num_tokens, uniform_decode=graph is not None)

    @contextlib.contextmanager
    def ungraphed(self) -> Iterator[None]:
        if self._manager is None:
            yield
            return
        before, self._manager._graphs_captured = self._manager._graphs_captured, False
        try:
            yield
        finally:
            self._manager._graphs_captured = before

    def descriptors(self) -> list[Descriptor]:
        return list(self._descriptors)

    def graph_set(self) -> GraphSet:
        self._installed = GraphSet(self._manager.graphs, self._manager.pool)
        return self._installed

    def install(self, graphs: GraphSet) -> None:
        self._manager.graphs, self._manager.pool = graphs.graphs, graphs.pool
        self._installed = graphs
        if graphs.choices is None:
            graphs.choices = self._choices_among(graphs)
        self._manager._candidates = graphs.choices

    def _choices_among(self, graphs: GraphSet) -> dict[Any, list[Descriptor]]:
        """By batch size; sizes that round up to the same graph share one list."""
        if all(d in graphs.graphs for d in self._descriptors):
            return self._choices
        shared = {id(choices): choices for choices in self._choices.values()}
        left = {
            name: [d for d in choices if d.cg_mode != self._full or d in graphs.graphs]
            for name, choices in shared.items()
        }
        return {size: left[id(choices)] for size, choices in self._choices.items()}

    def capture(self, descriptor: Descriptor, warm: bool) -> int:
        manager = self._manager
        wanted = manager._capture_descs
        manager._capture_descs = {self._full: [descriptor]}
        manager._graphs_captured = False
        try:
            with self._capturing(), contextlib.nullcontext() if warm else _no_warm_up():
                self._runner.capture_model()
        finally:
            manager._capture_descs = wanted
            manager._graphs_captured = True
        self._installed.choices = None
        return 1 + int(warm)


def _no_warm_up() -> AbstractContextManager[Any]:
    """Within, V2's manager captures a shape without running it eagerly before."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    stock = CudaGraphManager.capture

    def capture(manager: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        def create(descriptor: Descriptor, warmup: bool) -> Any:
            if warmup:
                return lambda mode: None
            return create_forward_fn(descriptor, warmup=False)

        stock(manager, create, *args, **kwargs)

    return patch.object(CudaGraphManager, "capture", capture)
