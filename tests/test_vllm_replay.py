"""Replayed steps on a fake V1 runner over a real paged cache: outputs, shapes, blocks, endings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fakes_vllm import HIDDEN, VOCAB, FakeWorker, SchedulerOutput, serve
from fakes_vllm import fake_vllm as fake_vllm

from engines.inside.source import CandidateError
from engines.inside.vllm_replay import Replayer
from engines.inside.vllm_runner import V1, runner_of

pytestmark = pytest.mark.usefixtures("fake_vllm")

Request = dict[str, list[int]]


def requests(*lengths: tuple[int, int]) -> list[Request]:
    """Of so many prompt and output tokens."""
    rng = np.random.default_rng(0)
    return [{"prompt": _ids(rng, num), "output": _ids(rng, forced)} for num, forced in lengths]


def _ids(rng: np.random.Generator, num: int) -> list[int]:
    return [int(i) for i in rng.integers(0, VOCAB, num)]


def replay(
    worker: FakeWorker, given: Sequence[Request], max_concurrency: int = 8, rows: bool = True
) -> dict[str, Any]:
    return Replayer(runner_of(worker)).run(given, max_concurrency, rows)


def expected(worker: FakeWorker, request: Request) -> npt.NDArray[np.float32]:
    """The request alone, in one step."""
    ids, first = request["prompt"] + request["output"][:-1], len(request["prompt"]) - 1
    return np.asarray(worker.model.logprobs(ids)[first:])


def agrees(worker: FakeWorker, given: Sequence[Request], result: dict[str, Any]) -> bool:
    return all(
        np.allclose(out["logprobs"], expected(worker, request), atol=1e-5)
        for request, out in zip(given, result["outputs"], strict=True)
    )


def steps(worker: FakeWorker) -> list[SchedulerOutput]:
    return [o for o in worker.model_runner.outputs if o.total_num_scheduled_tokens]


def sizes(worker: FakeWorker) -> list[list[int]]:
    """New tokens of each request in each step."""
    return [list(o.num_scheduled_tokens.values()) for o in steps(worker)]


def held_blocks(worker: FakeWorker) -> Iterator[list[int]]:
    """Of those who run, in each step."""
    blocks: dict[str, list[int]] = {}
    for output in steps(worker):
        blocks |= {n.req_id: [b for g in n.block_ids for b in g] for n in output.scheduled_new_reqs}
        yield [b for i in output.num_scheduled_tokens for b in blocks[i]]


# --- outputs --------------------------------------------------------------------------------------


def test_forced_outputs_get_the_log_probabilities_that_they_have_alone() -> None:
    worker, given = FakeWorker(), requests((5, 4), (1, 1), (9, 2), (3, 6))
    assert agrees(worker, given, replay(worker, given))


def test_tables_are_float32_of_one_row_for_each_output() -> None:
    table = replay(FakeWorker(), requests((5, 4)))["outputs"][0]["logprobs"]
    assert (table.shape, table.dtype) == ((4, VOCAB), np.float32)


def test_without_rows_it_is_the_forced_token_and_the_top_one() -> None:
    given = requests((5, 4), (2, 3))
    tables = [o["logprobs"] for o in replay(FakeWorker(), given)["outputs"]]
    found = replay(FakeWorker(), given, rows=False)["outputs"]
    for request, table, out in zip(given, tables, found, strict=True):
        at = np.arange(len(table))
        assert np.array_equal(out["logprobs"], table[at, request["output"]])
        assert np.array_equal(out["top_token_ids"], table.argmax(-1))


def test_what_the_sampler_chose_is_not_fed_back() -> None:
    worker, given = FakeWorker(), requests((3, 5))
    replay(worker, given)
    sampled = serve(worker, given[0]["prompt"], 5)
    assert sampled != given[0]["output"]
    assert agrees(worker, given, replay(worker, given))


@pytest.mark.parametrize("reorder", [lambda i: i[::-1], sorted, lambda i: i[1:] + i[:1]])
def test_rows_go_to_their_requests_however_the_runner_orders_the_batch(reorder: Any) -> None:
    worker, given = FakeWorker(), requests((4, 3), (7, 5), (2, 2), (6, 1))
    worker.model_runner.reorder = reorder
    assert agrees(worker, given, replay(worker, given))


def test_a_rank_without_logits_answers_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker()

    class Late(V1):
        """Of a first pipeline stage: `execute_model` has the whole answer."""

        def batch_order(self, num_requests: int) -> list[str]:
            return []

    monkeypatch.setattr(worker, "execute_model", lambda output: "sent on")
    result = Replayer(Late(worker)).run(requests((3, 2)), 1, True)
    assert (result["outputs"], result["num_steps"]) == ([None], 2)


def test_the_head_is_left_as_it_was() -> None:
    worker = FakeWorker()
    replay(worker, requests((3, 2)))
    assert "compute_logits" not in worker.model.__dict__


# --- steps ----------------------------------------------------------------------------------------


def test_a_prompt_over_the_budget_is_prefilled_in_pieces() -> None:
    worker, given = FakeWorker(max_num_batched_tokens=8), requests((19, 3))
    assert agrees(worker, given, replay(worker, given))
    assert sizes(worker) == [[8], [8], [3], [1], [1]]


def test_decodes_go_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    worker, given = FakeWorker(max_num_batched_tokens=8), requests((6, 3), (5, 2), (12, 1))
    assert agrees(worker, given, replay(worker, given))
    assert sizes(worker) == [[6, 2], [1, 3, 4], [1, 1, 6], [2]]


def test_the_runner_s_own_buffers_bound_a_step_too() -> None:
    worker = FakeWorker(max_num_batched_tokens=1000)
    worker.model_runner.max_num_tokens = 8
    replay(worker, requests((19, 1)))
    assert sizes(worker) == [[8], [8], [3]]


@pytest.mark.parametrize(("max_concurrency", "max_num_seqs", "most"), [(2, 8, 2), (8, 3, 3)])
def test_no_more_run_at_once_than_may(max_concurrency: int, max_num_seqs: int, most: int) -> None:
    worker, given = FakeWorker(max_num_seqs=max_num_seqs), requests(*[(2, 3)] * 7)
    assert agrees(worker, given, replay(worker, given, max_concurrency))
    assert max(map(len, sizes(worker))) == most


def test_steps_and_tokens_are_counted_exactly() -> None:
    worker, given = FakeWorker(max_num_batched_tokens=8), requests((6, 3), (5, 2), (12, 1))
    result = replay(worker, given)
    assert (result["num_steps"], result["num_tokens"]) == (4, 26)
    assert result["num_tokens"] == sum(o.total_num_scheduled_tokens for o in steps(worker))


def test_a_request_is_new_once_and_cached_from_then_on() -> None:
    worker = FakeWorker()
    replay(worker, requests((3, 3), (4, 2)))
    new = [[n.req_id for n in o.scheduled_new_reqs] for o in steps(worker)]
    cached = [o.scheduled_cached_reqs for o in steps(worker)]
    assert [c.num_computed_tokens for c in cached] == [[], [3, 4], [4]]
    assert [c.req_ids for c in cached] == [[], new[0], new[0][:1]]
    assert [len(n) for n in new] == [2, 0, 0]


def test_two_runs_schedule_the_same_steps() -> None:
    worker, given = FakeWorker(max_num_batched_tokens=8), requests((6, 3), (5, 2), (12, 1))
    replay(worker, given)
    half = len(sizes(worker))
    replay(worker, given)
    assert sizes(worker)[:half] == sizes(worker)[half:]


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_sizes", [(4,), (4, 2)])
def test_no_two_running_requests_share_a_block(block_sizes: tuple[int, ...]) -> None:
    worker, given = FakeWorker(num_blocks=16, block_sizes=block_sizes), requests(*[(5, 4)] * 9)
    assert agrees(worker, given, replay(worker, given))
    for blocks in held_blocks(worker):
        assert set(Counter(blocks).values()) == {1}
        assert set(blocks) <= set(range(1, 16)), "0 is the null block"


def test_blocks_come_back_when_a_request_is_done() -> None:
    worker, given = FakeWorker(num_blocks=4), requests(*[(5, 4)] * 6)
    assert agrees(worker, given, replay(worker, given))
    assert max(map(len, sizes(worker))) == 1


def test_each_group_of_layers_has_blocks_for_every_token() -> None:
    worker = FakeWorker(block_sizes=(4, 2))
    replay(worker, requests((5, 4)))
    blocks = steps(worker)[0].scheduled_new_reqs[0].block_ids
    assert [len(group) for group in blocks] == [3, 5]


def test_new_blocks_are_zeroed() -> None:
    worker = FakeWorker()
    replay(worker, requests((5, 4), (2, 1)))
    first = steps(worker)[0]
    assert first.new_block_ids_to_zero == [
        b for n in first.scheduled_new_reqs for g in n.block_ids for b in g
    ]
    assert steps(worker)[1].new_block_ids_to_zero is None


def test_a_request_over_all_blocks_is_refused() -> None:
    with pytest.raises(CandidateError, match="more KV blocks than the engine has"):
        replay(FakeWorker(num_blocks=4), requests((3, 2), (10, 4)))


# --- what cannot be replayed ----------------------------------------------------------------------


def test_a_request_over_the_model_s_length_is_refused() -> None:
    with pytest.raises(CandidateError, match="a request has 49 tokens, over 48"):
        replay(FakeWorker(), requests((45, 4)))


@pytest.mark.parametrize("where", ["prompt", "output"])
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_out_of_range_is_refused(where: str, token: int) -> None:
    given = requests((3, 2))
    given[0][where][1] = token
    with pytest.raises(CandidateError, match=f"not within 0-{VOCAB - 1}"):
        replay(FakeWorker(), given)


@pytest.mark.parametrize("lengths", [(3, 0), (0, 3), (0, 0)])
def test_a_request_without_a_prompt_or_outputs_is_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(CandidateError):
        replay(FakeWorker(), requests((3, 2), lengths))


def test_nothing_ran_when_a_request_was_refused() -> None:
    worker = FakeWorker()
    with pytest.raises(CandidateError):
        replay(worker, requests((3, 2), (45, 4)))
    assert worker.model_runner.outputs == []


def test_an_engine_with_a_live_request_is_refused() -> None:
    worker = FakeWorker()
    serve(worker, [1, 2, 3], keep=True)
    with pytest.raises(CandidateError, match="the engine is serving; drain it first"):
        replay(worker, requests((3, 2)))
    assert len(worker.model_runner.requests) == 1


# --- endings --------------------------------------------------------------------------------------


def test_every_request_is_finished_at_the_end() -> None:
    worker = FakeWorker()
    replay(worker, requests((3, 2), (4, 1)))
    last = worker.model_runner.outputs[-1]
    assert len(last.finished_req_ids) == 2
    assert worker.model_runner.requests == {}


@pytest.mark.parametrize("breaks_in_step", [1, 3])
def test_a_step_that_breaks_leaves_an_engine_that_serves(breaks_in_step: int) -> None:
    worker, given = FakeWorker(), requests((3, 4), (4, 4))
    worker.model_runner.breaks_in_step = breaks_in_step
    with pytest.raises(ZeroDivisionError):
        replay(worker, given)
    assert worker.model_runner.requests == {}
    assert agrees(worker, given, replay(worker, given))


def test_a_step_that_breaks_before_its_sampling_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, given = FakeWorker(), requests((3, 4))
    monkeypatch.setattr(worker, "sample_tokens", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replay(worker, given)
    monkeypatch.undo()
    assert worker.model_runner.execute_model_state is None


def test_a_replay_without_requests_has_no_steps() -> None:
    assert replay(FakeWorker(), [])["num_steps"] == 0


def test_the_fakes_attend_over_what_they_cached() -> None:
    """Or every other test here would pass without a cache."""
    worker = FakeWorker()
    a, b = (worker.model.logprobs([first, 2, 3])[-1] for first in (1, 7))
    assert not np.allclose(a, b, atol=1e-3)
    assert a.shape == (VOCAB,) != (HIDDEN,)
