"""The running step as a forward pass may see it, read from vLLM's forward context when asked for.

Which KV layout a layer has, vLLM leaves to the attention backend. FlashAttention's and Triton's are
given as the contract has them (strided views); vLLM's CPU attention packs keys for its own
instructions, so there `kv_cache` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from engines.inside.step import StepView

Caches = tuple[torch.Tensor, torch.Tensor]


def view_of(runner: Any, num_tokens: int) -> Callable[[], StepView]:
    """What `step()` answers with in a step of `num_tokens`."""
    made: list[StepView] = []

    def view() -> StepView:
        if not made:
            made.append(_view(runner, num_tokens))
        return made[0]

    return view


def _view(runner: Any, num_tokens: int) -> StepView:
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    metadata = context.attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        raise RuntimeError("this step has no attention: it is a dummy")
    layers = context.no_compile_layers
    name = next(iter(metadata))
    one = metadata[name]
    starts, lens = one.query_start_loc, one.seq_lens
    return StepView(
        positions=_positions(runner)[:num_tokens],
        slot_mapping=one.slot_mapping,
        block_tables=one.block_table,
        query_start_loc=starts,
        seq_lens=lens,
        query_lens_list=tuple((starts[1:] - starts[:-1]).tolist()),
        seq_lens_list=tuple(lens.tolist()),
        num_tokens=num_tokens,
        num_requests=len(lens),
        block_size=runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        caches=_Caches({n: layers[n] for n in metadata if n in layers}),
    )


def _positions(runner: Any) -> torch.Tensor:
    buffers = getattr(runner, "input_buffers", runner)  # V2 keeps them apart
    positions = buffers.positions
    return getattr(positions, "gpu", positions)  # type: ignore[no-any-return]


class _Caches(Mapping[str, Caches]):
    """Views are made for the layer that is asked for."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers

    def __getitem__(self, layer_name: str) -> Caches:
        layer = self._layers[layer_name]
        cache = layer.kv_cache
        cache = cache[0] if isinstance(cache, list | tuple) else cache
        if cache.device.type == "cpu":
            raise RuntimeError("vLLM's CPU attention packs its keys; call ORIG for attention")
        return split(cache, layer.num_kv_heads, layer.head_size)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def split(cache: torch.Tensor, num_heads: int, head_size: int) -> Caches:
    """(keys, values) [num_blocks, block_size, num_heads, head_size] of one layer's cache. Raises
    `RuntimeError` for a layout that is not known here."""
    match tuple(cache.shape):
        case (_, heads, _, width) if (heads, width) == (num_heads, 2 * head_size):
            cache = cache.transpose(1, 2)  # FlashAttention from 0.26 on: [blocks, heads, rows, 2d]
            return cache[..., :head_size], cache[..., head_size:]
        case (_, _, heads, width) if (heads, width) == (num_heads, 2 * head_size):
            return cache[..., :head_size], cache[..., head_size:]
        case (2, _, _, heads, width) if (heads, width) == (num_heads, head_size):
            return cache[0], cache[1]
        case (_, 2, _, heads, width) if (heads, width) == (num_heads, head_size):
            return cache[:, 0], cache[:, 1]
    raise RuntimeError(f"a KV cache of shape {tuple(cache.shape)} is of an unknown layout")
