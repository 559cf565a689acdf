"""Replays requests with forced outputs, by steps shaped as vLLM's own scheduler shapes them.

The forced tokens stand behind the prompt, as if all were prompt: each decode step schedules one of
them, so that the runner reads the token it is to be fed and its sampler's choice is dropped. The
steps go through the worker's own `execute_model` and `sample_tokens`: input preparation, attention
over the paged cache, graphs, logits and sampler are those of live traffic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engines.inside.source import CandidateError
from engines.inside.vllm_runner import Runner

_serial = itertools.count()


@dataclass(slots=True, eq=False)
class _Request:
    id: str
    token_ids: list[int]  # prompt, then forced outputs but the last
    num_prompt: int
    forced: list[int]
    blocks: tuple[list[int], ...]
    num_computed: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)  # log-probabilities [vocab_size] each

    @property
    def is_done(self) -> bool:
        return self.num_computed == len(self.token_ids)

    @property
    def num_wanted(self) -> int:
        """The rest of the prompt; then one forced token a step."""
        return max(1, self.num_prompt - self.num_computed)


class Replayer:
    """Needs an engine without live requests, and leaves KV blocks behind that nobody may reuse: the
    prefix cache is cleared before traffic resumes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._worker = runner.worker

    def run(
        self, requests: Sequence[Mapping[str, Any]], max_concurrency: int, rows: bool
    ) -> dict[str, Any]:
        """Outputs at each forced position. `rows`: whole tables float32[num_output, vocab_size];
        else the forced token's log-probability and the most probable token's id. A rank that holds
        no logits answers with none. Raises `CandidateError` for a workload that does not fit."""
        if self._runner.num_live():
            raise CandidateError("the engine is serving; drain it first")
        made = [self._request(r) for r in requests]
        waiting, running = deque(made), list[_Request]()
        num_steps = num_tokens = 0
        free = _Blocks(self._runner.num_blocks)
        try:
            while waiting or running:
                works = self._next_step(waiting, running, max_concurrency, free)
                if not works:
                    raise CandidateError("the workload needs more KV blocks than the engine has")
                self._step(works)
                num_steps += 1
                num_tokens += sum(works.values())
                for request in [r for r in running if r.is_done]:
                    running.remove(request)
                    free.give(request.blocks)
        finally:
            self._finish([r.id for r in made])
        return {
            "outputs": [_outputs(r, rows) for r in made],
            "num_steps": num_steps,
            "num_tokens": num_tokens,
        }

    def _request(self, given: Mapping[str, Any]) -> _Request:
        prompt, forced = list(given["prompt"]), list(given["output"])
        config = self._worker.model_config
        if not prompt or not forced:
            raise CandidateError("a request needs a prompt and outputs to replay")
        ids, vocab_size = prompt + forced, config.get_vocab_size()
        if len(ids) > config.max_model_len:
            raise CandidateError(f"a request has {len(ids)} tokens, over {config.max_model_len}")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise CandidateError(f"a request has a token that is not within 0-{vocab_size - 1}")
        return _Request(f"trimtab-{next(_serial)}", ids[:-1], len(prompt), forced, ())

    def _next_step(
        self,
        waiting: deque[_Request],
        running: list[_Request],
        max_concurrency: int,
        free: _Blocks,
    ) -> dict[_Request, int]:
        """New tokens of each request: running ones first, then who waits, while budget lasts."""
        config = self._worker.vllm_config.scheduler_config
        budget = min(config.max_num_batched_tokens, self._runner.max_num_tokens)
        most = min(max_concurrency, config.max_num_seqs)
        works: dict[_Request, int] = {}
        for request in running:
            if num_new := min(request.num_wanted, budget):
                works[request] = num_new
                budget -= num_new
        while waiting and budget and len(running) < most:
            blocks = free.take(self._needs(waiting[0]))
            if blocks is None:
                break
            request = waiting.popleft()
            request.blocks = blocks
            running.append(request)
            works[request] = min(request.num_wanted, budget)
            budget -= works[request]
        return works

    def _needs(self, request: _Request) -> list[int]:
        """Blocks of each KV cache group."""
        return [-(-(len(request.token_ids) + 1) // size) for size in self._runner.block_sizes]

    def _step(self, works: Mapping[_Request, int]) -> None:
        output = self._scheduler_output(works)
        with self._grabbed_logits() as grabbed:
            ran = self._worker.execute_model(output)
            order = self._runner.batch_order(len(works))
            if ran is None:
                ran = self._worker.sample_tokens(None)
            if hasattr(ran, "get_output"):
                ran.get_output()
        by_id = {r.id: r for r in works}
        for request, num_new in works.items():
            request.num_computed += num_new
        if grabbed:
            self._keep([by_id[i] for i in order], grabbed[-1])

    def _keep(self, order: Sequence[_Request], logits: torch.Tensor) -> None:
        """A row of each request, that of its last scheduled token."""
        due = [i for i, r in enumerate(order) if r.num_computed >= r.num_prompt]
        if due:
            logprobs = logits[due].float().log_softmax(-1)
            for i, row in zip(due, logprobs, strict=True):
                order[i].rows.append(row)

    @contextmanager
    def _grabbed_logits(self) -> Iterator[list[torch.Tensor]]:
        """What the model's head gives in this step."""
        model: Any = self._runner.model
        grabbed: list[torch.Tensor] = []
        stock = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = stock(*args, **kwargs)
            if logits is not None:
                grabbed.append(logits)
            return logits

        model.__dict__["compute_logits"] = compute_logits
        try:
            yield grabbed
        finally:
            del model.__dict__["compute_logits"]

    def _scheduler_output(self, works: Mapping[_Request, int]) -> Any:
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {r.id: n for r, n in works.items()}
        output.total_num_scheduled_tokens = sum(works.values())
        output.num_common_prefix_blocks = [0] * len(self._runner.block_sizes)
        new = [r for r in works if not r.num_computed]
        output.scheduled_new_reqs = [self._new(r) for r in new]
        if hasattr(output, "new_block_ids_to_zero") and new:
            output.new_block_ids_to_zero = [b for r in new for g in r.blocks for b in g]
        cached = output.scheduled_cached_reqs
        for request in (r for r in works if r.num_computed):
            cached.req_ids.append(request.id)
            cached.num_computed_tokens.append(request.num_computed)
            cached.num_output_tokens.append(0)
            cached.new_block_ids.append(None)
        return output

    def _new(self, request: _Request) -> Any:
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        return NewRequestData(
            req_id=request.id,
            prompt_token_ids=request.token_ids,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
            pooling_params=None,
            block_ids=request.blocks,
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=request.token_ids,
        )

    def _finish(self, ids: Sequence[str]) -> None:
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(ids)
        self._runner.recover()
        self._worker.execute_model(output)


class _Blocks:
    """KV blocks that are free; 0 is vLLM's null block."""

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(1, num_blocks))

    def take(self, nums: Sequence[int]) -> tuple[list[int], ...] | None:
        if sum(nums) > len(self._free):
            return None
        return tuple([self._free.popleft() for _ in range(num)] for num in nums)

    def give(self, blocks: tuple[list[int], ...]) -> None:
        self._free.extend(b for group in blocks for b in group)


def _outputs(request: _Request, rows: bool) -> dict[str, Any] | None:
    if not request.rows:
        return None
    table = torch.stack(request.rows)
    if rows:
        return {"logprobs": table.cpu().numpy()}
    forced = torch.tensor(request.forced, device=table.device)[:, None]
    return {
        "logprobs": table.gather(1, forced)[:, 0].cpu().numpy(),
        "top_token_ids": table.argmax(-1).cpu().numpy().astype(np.int64),
    }


def again(scheduler_output: Any) -> Any:
    """A step that broke off within the model, to be run once more: what it told the runner of new
    requests, of blocks and of finished ones has been told."""
    from vllm.v1.core.sched.output import CachedRequestData

    told = {"preempted_req_ids": None, "new_block_ids_to_zero": None}
    return dataclasses.replace(
        scheduler_output,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        finished_req_ids=set(),
        **{name: value for name, value in told.items() if hasattr(scheduler_output, name)},
    )
