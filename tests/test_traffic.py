"""Planned traffic: published shapes, exact lengths, the same plan for the same seed."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from drift.learned import LearnedDetector
from profiler.samples import Outcome, RequestSample
from profiler.window import Window
from sidecar.traffic import (
    AT,
    CODE,
    CONVERSATION,
    Domain,
    Phase,
    PlannedRequest,
    Quantiles,
    Shape,
    lengths,
    plan,
    tokenizer,
)

MODEL = Path(__file__).parent.parent / "engines/embedded/models/tiny-moe"
BOTH = (Phase(Domain.CHAT, 30, 10.0), Phase(Domain.CODE, 30, 5.0))


def words(text: str) -> range:
    """A tokenizer whose counts are easy to check: a token a word."""
    return range(len(text.split(" ")))


def planned(seed: int = 0, shape: Shape | None = None) -> list[PlannedRequest]:
    return list(plan(BOTH, "tiny", seed, shape))


@pytest.mark.parametrize(("domain", "table"), [(Domain.CHAT, CONVERSATION), (Domain.CODE, CODE)])
def test_lengths_follow_the_published_quantiles(domain: Domain, table: Quantiles) -> None:
    shape = Shape(divide_lengths_by=1.0)
    drawn = lengths(Phase(domain, 20_000, 1.0), shape, np.random.default_rng(0))
    for at in (0.1, 0.5, 0.9):
        place = AT.index(at)
        for made, published in (
            (drawn.prompt_tokens, table.prompt_tokens),
            (drawn.output_tokens, table.output_tokens),
        ):
            assert np.quantile(made, at * AT[-1]) == pytest.approx(published[place], rel=0.15)


def test_lengths_are_divided_and_never_empty() -> None:
    rng = np.random.default_rng(0)
    drawn = lengths(Phase(Domain.CODE, 5000, 1.0), Shape(divide_lengths_by=8.0), rng)
    assert drawn.output_tokens.min() == 1
    assert drawn.prompt_tokens.max() <= round(7436 / 8)


@pytest.mark.parametrize("domain", list(Domain))
def test_requests_arrive_at_the_asked_rate(domain: Domain) -> None:
    drawn = lengths(Phase(domain, 20_000, 2.5), Shape(), np.random.default_rng(0))
    assert 20_000 / drawn.arrivals_s[-1] == pytest.approx(2.5, rel=0.05)


def test_the_same_seed_plans_the_same_requests() -> None:
    assert planned(seed=3) == planned(seed=3)
    assert planned(seed=3) != planned(seed=4)


def test_requests_come_in_order_one_phase_after_the_other() -> None:
    made = planned()
    times = [r.arrival_s for r in made]
    assert times == sorted(times)
    assert [r.domain for r in made] == [Domain.CHAT] * 30 + [Domain.CODE] * 30


def test_each_domain_has_its_own_endpoint() -> None:
    for request in planned():
        is_chat = request.domain is Domain.CHAT
        assert request.path == ("/v1/chat/completions" if is_chat else "/v1/completions")
        assert ("messages" in request.body) == is_chat


def test_every_request_streams_its_usage_and_has_its_length_forced() -> None:
    for request in planned():
        body = request.body
        assert (body["model"], body["stream"], body["ignore_eos"]) == ("tiny", True, True)
        assert body["stream_options"] == {"include_usage": True}
        assert body["max_tokens"] >= 1
        json.dumps(body)


def test_some_requests_are_sampled_with_a_seed_and_the_others_greedy() -> None:
    temperatures = [r.body["temperature"] for r in planned(shape=Shape(sampled_share=0.25))]
    assert set(temperatures) == {0, 0.8}
    assert 5 <= temperatures.count(0.8) <= 25
    assert all(("seed" in r.body) == (r.body["temperature"] > 0) for r in planned())


def test_texts_have_the_planned_number_of_tokens() -> None:
    made = list(plan([Phase(Domain.CODE, 60, 1.0)], "tiny", encode=tokenizer(MODEL)))
    encode = tokenizer(MODEL)
    off = [len(encode(r.body["prompt"])) - r.num_prompt_tokens for r in made]
    assert np.percentile(np.abs(off), 90) <= 2


def test_any_callable_can_count_tokens() -> None:
    shape = Shape(prefix_share=0.0)
    made = list(plan([Phase(Domain.CODE, 30, 1.0)], "tiny", shape=shape, encode=words))
    off = [len(words(r.body["prompt"])) - r.num_prompt_tokens for r in made]
    assert np.median(np.abs(off)) <= 3


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_stated_share_of_requests_begins_with_a_common_text(share: float) -> None:
    code = list(plan([Phase(Domain.CODE, 60, 1.0)], "tiny", shape=Shape(prefix_share=share)))
    long = [r.body["prompt"][:200] for r in code if r.num_prompt_tokens > 200]
    assert (len(set(long)) <= 4) == (share == 1.0)


def test_a_plan_is_made_one_request_at_a_time() -> None:
    endless = plan([Phase(Domain.CHAT, 100_000, 1.0)], "tiny")
    assert len(list(islice(endless, 3))) == 3


def as_sample(request: PlannedRequest) -> RequestSample:
    """What a tap would say of a planned request that took 0.2 s."""
    num = request.num_prompt_tokens, 0, request.body["max_tokens"]
    return RequestSample(request.arrival_s + 0.2, Outcome.OK, *num, 0.1, 0.01, 0.2)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_switch_from_chat_to_code_is_seen_in_its_first_window_and_nothing_before(
    seed: int,
) -> None:
    window, detector = Window(num_requests=40, max_s=1e9), LearnedDetector()
    phases = (Phase(Domain.CHAT, 8 * 40, 4.0), Phase(Domain.CODE, 2 * 40, 4.0))
    profiles = [window.add(as_sample(r)) for r in plan(phases, "tiny", seed)]
    found = [detector.update(p).drifted for p in profiles if p is not None]
    assert found == [False] * 8 + [True] * 2
