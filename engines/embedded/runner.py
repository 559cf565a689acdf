"""One step on the model: scheduled tokens in, a row of logits a sampling request out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.embedded.model import CausalLM, Qwen3MoeSparseMoeBlock
from engines.embedded.scheduler import Work
from engines.inside.step import StepView, running


class Runner:
    """The model, its KV cache and its expert counts. Belongs to the engine's thread."""

    def __init__(self, model: CausalLM, num_blocks: int, block_size: int) -> None:
        config = model.config
        self.model = model
        self.block_size = block_size
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self._kv = torch.zeros(shape, dtype=model.lm_head.weight.dtype)
        self._caches = {
            f"model.layers.{i}.self_attn.attn": (keys, values)
            for i, (keys, values) in enumerate(self._kv)
        }
        self._routed = _Routed(model)

    def run(self, works: Sequence[Work], count_experts: bool = False) -> Tensor:
        """Hidden states of all scheduled tokens, [num_tokens, hidden_size], final norm included."""
        self._clear([w.request.blocks[-1] for w in works if w.starts_block])
        view, ids = self._view(works)
        self._routed.start(count_experts)
        with torch.inference_mode(), running(view.num_tokens, lambda: view):
            return self.model(ids, view.positions)  # type: ignore[no-any-return]

    def logits(self, hidden_states: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model.compute_logits(hidden_states)

    def expert_load(self) -> npt.NDArray[np.int64] | None:
        """[num_moe_layers, num_experts] of the last step. None when it was not counted, or a
        forward pass left a layer's block out, or there are no experts."""
        return self._routed.take()

    def _clear(self, blocks: list[int]) -> None:
        """A mask does not undo a NaN: what an earlier request left behind a sequence's end goes."""
        if blocks:
            self._kv.index_fill_(2, torch.tensor(blocks), 0.0)

    def _view(self, works: Sequence[Work]) -> tuple[StepView, Tensor]:
        size = self.block_size
        ids, positions, slots, starts = [], [], [], [0]
        for work in works:
            request = work.request
            for position in range(request.num_computed, request.num_computed + work.num_new):
                ids.append(request.token(position))
                positions.append(position)
                slots.append(request.blocks[position // size] * size + position % size)
            starts.append(len(ids))
        seq_lens = tuple(w.request.num_computed + w.num_new for w in works)
        longest = max(len(w.request.blocks) for w in works)
        tables = [b + b[-1:] * (longest - len(b)) for b in (w.request.blocks for w in works)]
        view = StepView(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_lens_list=tuple(w.num_new for w in works),
            seq_lens_list=seq_lens,
            num_tokens=len(ids),
            num_requests=len(works),
            block_size=size,
            caches=self._caches,
        )
        return view, torch.tensor(ids)


class _Routed:
    """Counts what the routers choose, before whatever forward pass serves the block.

    Routing is computed a second time for it, from the block's input: a forward pass may replace the
    whole block and route as it likes inside. So counting is off in replays and on in a share of
    live steps.
    """

    def __init__(self, model: CausalLM) -> None:
        self._on = False
        self._counts: dict[int, npt.NDArray[np.int64]] = {}  # by layer, of this step
        blocks = [m for m in model.modules() if isinstance(m, Qwen3MoeSparseMoeBlock)]
        self._num_layers = len(blocks)
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda m, args, i=i: self._count(i, m, args[0]))

    def start(self, on: bool) -> None:
        """A step begins; forget the last one's counts."""
        self._on = on
        self._counts.clear()

    def _count(self, index: int, block: Qwen3MoeSparseMoeBlock, hidden_states: Tensor) -> None:
        if self._on:
            logits = torch.nn.functional.linear(hidden_states, block.gate.weight)
            chosen = logits.topk(block.experts.top_k, dim=-1).indices.flatten()
            self._counts[index] = torch.bincount(
                chosen, minlength=block.experts.num_experts
            ).numpy()

    def take(self) -> npt.NDArray[np.int64] | None:
        if not self._counts or len(self._counts) < self._num_layers:
            return None
        return np.stack([self._counts[i] for i in range(self._num_layers)])
