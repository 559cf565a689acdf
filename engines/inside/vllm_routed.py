"""Which experts vLLM's routers choose, counted on the device in every n-th live step.

Counted where vLLM offers it (`BaseRouter.set_capture_fn`: logical ids, before any load balancing),
beside whoever counts there already. Two small kernels a layer; `vllm_graphs` keeps decode graphs
that hold them for the steps that are counted, so that all others cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch


class Routed:
    """`start` before a step, `take` after it. Prompt tokens that came from the prefix cache were
    not routed again and are not counted; nor is padding."""

    def __init__(self, model: torch.nn.Module, every: int, max_num_tokens: int) -> None:
        """Every `every`-th step is counted; 0 leaves the routers alone."""
        self._every = every
        self._is_on = False
        routers = _routers(model) if every else []
        self._seen = [False] * len(routers)
        if not routers:
            return
        device = next(model.parameters()).device
        num_experts = max(r.global_num_experts for r in routers)
        self._counts = torch.zeros(len(routers), num_experts, dtype=torch.int64, device=device)
        most = max_num_tokens * max(r.top_k for r in routers)
        self._weights = torch.zeros(most, dtype=torch.int64, device=device)  # 1 within the step
        self._top_k = routers[0].top_k
        for i, router in enumerate(routers):
            self._listen(i, router)

    def _listen(self, layer: int, router: Any) -> None:
        other = router.capture_fn

        def capture(ids: torch.Tensor) -> None:
            if other is not None:
                other(ids)
            if self._is_on:
                self._count(layer, ids)

        router.set_capture_fn(capture)

    @property
    def num_layers(self) -> int:
        return len(self._seen)

    def is_due(self, step: int) -> bool:
        """Whether the `step`-th live step is to be counted."""
        return bool(self._seen) and step % self._every == 0

    def start(self, num_tokens: int) -> None:
        """A step of so many tokens, padding not included, is counted."""
        self._is_on = True
        self._seen = [False] * len(self._seen)
        self._counts.zero_()
        self._weights.zero_()
        self._weights[: num_tokens * self._top_k] = 1

    def _count(self, layer: int, ids: torch.Tensor) -> None:
        """int[num_tokens, top_k], padding behind. Legal within a graph's capture."""
        flat = ids.reshape(-1).to(torch.int64)
        self._counts[layer].scatter_add_(0, flat, self._weights[: len(flat)])
        self._seen[layer] = True

    def take(self, from_graph: bool = False) -> torch.Tensor | None:
        """int64[num_moe_layers, num_experts] of this step, on the device. None when some layer was
        not counted; in a graph that holds the counters all were."""
        self._is_on = False
        return self._counts.clone() if from_graph or all(self._seen) else None


def _routers(model: torch.nn.Module) -> list[Any]:
    """Of every MoE layer, in order. Empty where this vLLM has no such hook."""
    try:
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    except ImportError:
        return []
    found = {}
    for module in model.modules():
        router = module.__dict__.get("router") or module._modules.get("router")
        if isinstance(router, BaseRouter):
            found[id(router)] = router
    return list(found.values())
