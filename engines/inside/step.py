"""What a forward pass may know of the running step, in every engine.

`step()` answers inside a step only. Tensors live on the model's device; the counts beside them are
plain integers, so that reading them costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepView:
    """One engine step: requests one after the other, each with its new tokens.

    The KV cache of a layer is two tensors [num_blocks, block_size, num_kv_heads, head_dim]; token
    `slot` lies in block `slot // block_size` at row `slot % block_size`. In the embedded engine the
    rows behind a sequence's end are zero, so that a mask is enough; elsewhere they hold anything.
    """

    positions: torch.Tensor  # int64[num_tokens]
    slot_mapping: torch.Tensor  # int64[num_tokens]: where a token's key and value belong
    block_tables: torch.Tensor  # int32[num_requests, max_blocks], padded by the last one
    query_start_loc: torch.Tensor  # int32[num_requests + 1]
    seq_lens: torch.Tensor  # int32[num_requests]: cached and new tokens
    query_lens_list: tuple[int, ...]  # new tokens of each request
    seq_lens_list: tuple[int, ...]
    num_tokens: int
    num_requests: int
    block_size: int
    caches: Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # by layer name

    def kv_cache(self, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of one attention layer, shared by all requests."""
        return self.caches[layer_name]


class _Running:
    """The step that the engine's one model thread is in."""

    num_tokens: int | None = None
    view: Callable[[], StepView] | None = None


_running = _Running()


def step() -> StepView:
    """The running step. Raises `RuntimeError` outside of one."""
    if _running.view is None:
        raise RuntimeError("no step is running: attention can only be called inside one")
    return _running.view()


def num_tokens(default: int) -> int:
    """Scheduled tokens of the running step, or `default` outside of one."""
    return default if _running.num_tokens is None else _running.num_tokens


@contextmanager
def running(num_tokens: int, view: Callable[[], StepView] | None = None) -> Iterator[None]:
    """For the engine's runner: a step of `num_tokens` runs, and `view` describes it when asked."""
    _running.num_tokens, _running.view = num_tokens, view
    try:
        yield
    finally:
        _running.num_tokens = _running.view = None
