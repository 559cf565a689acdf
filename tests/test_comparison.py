"""When a shadow agrees with its primary."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sidecar.comparison import (
    Agreement,
    AgreementPolicy,
    Gap,
    MirrorResult,
    agreement,
    copied,
    forced,
    largest_gap,
    why_not,
)

POLICY = AgreementPolicy()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def results(num: int, outcome: str = "ok", **fields: Any) -> list[MirrorResult]:
    return [MirrorResult(outcome, "d", note=fields.pop("note", "same"), **fields)] * num


def position(actual: float, best: float | None = None) -> dict[str, Any]:
    entries = {"7": {"logprob": actual, "rank": 1 if best is None else 2}}
    return entries if best is None else entries | {"9": {"logprob": best, "rank": 1}}


# ---- one request


@pytest.mark.parametrize("key", ["store", "background", "previous_response_id"])
def test_what_leaves_something_behind_is_not_mirrored(key: str) -> None:
    assert why_not(CHAT, {"messages": [], key: True}) == "side_effect"


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/responses", {}, "route"),
        (CHAT, None, "body"),
        (CHAT, {"n": 2}, "choices"),
        (COMPLETIONS, {"best_of": 3}, "choices"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "batch"),
        (COMPLETIONS, {"prompt": [1, 2]}, None),
        (CHAT, {"n": 1, "store": False}, None),
    ],
)
def test_why_a_request_is_not_mirrored(path: str, body: object, why: str | None) -> None:
    assert why_not(path, body) == why


def test_a_forced_completion_is_prompt_and_answer() -> None:
    body = {"prompt": "1+1=", "max_tokens": 99, "stream": True, "stream_options": {}, "x": 1}
    assert forced(COMPLETIONS, body, "2") == {
        **{"prompt": "1+1=2", "max_tokens": 1, "stream": False, "x": 1},
        **{"prompt_logprobs": 1, "temperature": 0},
    }


def test_a_forced_chat_continues_the_answer() -> None:
    request = forced(CHAT, {"messages": [{"role": "user", "content": "a"}]}, "b")
    assert request is not None
    assert request["messages"][-1] == {"role": "assistant", "content": "b"}
    assert request["continue_final_message"] is True
    assert request["add_generation_prompt"] is False


def test_a_copied_stream_is_asked_for_its_usage_and_nothing_else_is_changed() -> None:
    body = {"stream": True, "seed": 7, "stream_options": {"x": 1}}
    assert copied(body) == body | {"stream_options": {"x": 1, "include_usage": True}}
    assert copied({"stream": True, "stream_options": {"include_usage": True}}) is None
    assert copied({"seed": 7}) is None


def test_a_prompt_of_token_ids_cannot_be_forced_as_text() -> None:
    assert forced(COMPLETIONS, {"prompt": [1, 2]}, "x") is None


@pytest.mark.parametrize("on_top", [True, False])
def test_the_largest_gap_is_over_the_answer_only(on_top: bool) -> None:
    listed = [None, position(-9, -0.1), position(-0.2), position(-0.75, -0.5)]
    inner = {"prompt_logprobs": listed}
    reply = inner if on_top else {"choices": [inner]}
    assert largest_gap(reply, num_prompt_tokens=2, num_answer=2) == Gap(0.25, 2)


def test_a_stop_token_that_is_in_no_text_is_not_missed() -> None:
    assert largest_gap({"prompt_logprobs": [None, position(-1)]}, 1, num_answer=2) == Gap(0.0, 1)


def test_text_that_came_back_as_other_tokens_says_nothing() -> None:
    assert largest_gap({"prompt_logprobs": [None, position(-1)]}, 1, num_answer=5) is None


@pytest.mark.parametrize(
    "reply",
    [{}, {"choices": []}, {"prompt_logprobs": [None, {}]}, {"prompt_logprobs": [None, 7]}]
    + [{"prompt_logprobs": [None, {"7": {"logprob": value}}]} for value in ("x", float("nan"))],
)
def test_a_reply_without_logprobs_is_an_error_not_agreement(reply: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs"):
        largest_gap(reply, 1, 1)


# ---- many requests


def test_no_traffic_is_insufficient_data() -> None:
    assert agreement([], POLICY) is Agreement.INSUFFICIENT_DATA
    unasked = results(500, "skipped:size") + results(500, "shed")
    assert agreement(unasked, POLICY) is Agreement.INSUFFICIENT_DATA


def test_enough_that_agree_agree() -> None:
    assert agreement(results(19), POLICY) is Agreement.INSUFFICIENT_DATA
    assert agreement(results(20), POLICY) is Agreement.AGREES


def test_one_early_diff_holds_and_does_not_condemn() -> None:
    early = results(1, "diff") + results(20)
    assert agreement(early, POLICY) is Agreement.INSUFFICIENT_DATA
    assert agreement(early + results(40), POLICY) is Agreement.AGREES


@pytest.mark.parametrize("outcome", ["diff", "error"])
def test_a_shadow_that_is_wrong_is_found_out_before_the_minimum(outcome: str) -> None:
    assert agreement(results(3, outcome), POLICY) is Agreement.DISAGREES


@pytest.mark.parametrize("note", ["longer", "shorter finish stop>length"])
def test_answers_that_are_always_longer_or_shorter_disagree(note: str) -> None:
    assert agreement(results(14, note=note), POLICY) is Agreement.DISAGREES


def test_a_slow_shadow_disagrees() -> None:
    slow = results(20, primary_e2e_s=1.0, shadow_e2e_s=2.5)
    assert agreement(slow, POLICY) is Agreement.DISAGREES


def _looked_at_each_time(seed: int, diff_rate: float, num: int) -> bool:
    """Whether a stream is ever condemned, looked at after every result."""
    draw, seen = random.Random(seed), list[MirrorResult]()
    for _ in range(num):
        outcome = "diff" if draw.random() < diff_rate else "ok"
        seen += results(1, outcome, note=draw.choice(["longer", "shorter", "same"]))
        if agreement(seen, POLICY) is Agreement.DISAGREES:
            return True
    return False


def test_near_ties_are_not_condemned_however_often_one_looks() -> None:
    alarms = sum(_looked_at_each_time(seed, POLICY.max_diff_rate, 150) for seed in range(100))
    assert alarms <= 4


def test_a_biased_shadow_is_found_out() -> None:
    assert all(_looked_at_each_time(seed, 0.25, 150) for seed in range(50))
