"""Every rewrite, in every setting, on the shipped model: the same outputs as stock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from compiler.agents.rewrites import (
    ALL,
    ATTENTION,
    BF16,
    DECODE,
    DENSE,
    GATHER,
    GROUPED,
    HEADS,
    LOOP,
    MLP,
    NORM,
    NOTHING,
    PREFILL,
    REWRITES,
    Idea,
    Knobs,
    Rewrite,
    idea,
)
from engines.embedded.engine import EmbeddedEngine, EngineSettings
from engines.embedded.model import FusedMoE, LlamaMLP
from engines.engine import STOCK, Guard, Portfolio, Replay, Scope, sign
from engines.inside.forward import Forwards
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest

KEY = b"k" * 32
REORDERED = 1e-4  # nats: what float32 leaves when sums run in another order; bfloat16 leaves 1e-2


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    torch.set_num_threads(1)
    running = EmbeddedEngine(EngineSettings(scope=Scope.TRIAL, key=KEY))
    yield running
    running.close()


def workload(lengths: tuple[int, ...], concurrency: int, num_outputs: int = 5) -> Workload:
    rng = np.random.default_rng(7)
    shared = tuple(int(t) for t in rng.integers(4, 4096, 40))  # a prefix that the cache finds

    def request(n: int) -> WorkloadRequest:
        prompt = tuple(int(t) for t in rng.integers(4, 4096, n))
        outputs = tuple(int(t) for t in rng.integers(4, 4096, num_outputs))
        return WorkloadRequest(shared[: n // 2] + prompt, outputs)

    return Workload(WorkloadKind.REAL, tuple(request(n) for n in lengths), concurrency)


# Alone; four at once of other lengths; more than run at once, so prefill and decode share steps.
WORKLOADS = {
    "one": workload((9,), 1),
    "four": workload((1, 17, 40, 130), 4),
    "mixed": workload((60, 3, 90, 33, 120, 5, 70), 3),
}


def replayed(engine: EmbeddedEngine, portfolio: Portfolio, traffic: Workload) -> Replay:
    engine.swap(portfolio, sign(KEY, Scope.TRIAL, portfolio.digest))
    try:
        return engine.measure(traffic)
    finally:
        engine.swap(STOCK, sign(KEY, Scope.TRIAL, ""))


def gap(engine: EmbeddedEngine, portfolio: Portfolio, traffic: Workload) -> float:
    """Largest difference to stock, in nats; infinite when the portfolio never ran."""
    ours, stock = (replayed(engine, p, traffic) for p in (portfolio, STOCK))
    if not ours.num_candidate_calls:
        return float("inf")
    pairs = zip(ours.outputs, stock.outputs, strict=True)
    return max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in pairs)


def portfolio(*ideas: Idea) -> Portfolio:
    return Portfolio(tuple(i.forward_pass() for i in ideas))


FITTING = [r for r in REWRITES if r is not MLP and r is not BF16]
SETTINGS = [idea(r, k, ALL) for r in FITTING for k in r.settings()]


@pytest.mark.parametrize("traffic", WORKLOADS)
@pytest.mark.parametrize("one", SETTINGS, ids=lambda i: i.summary)
def test_a_rewrite_leaves_the_outputs_alone(
    engine: EmbeddedEngine, one: Idea, traffic: str
) -> None:
    assert gap(engine, portfolio(one), WORKLOADS[traffic]) < REORDERED


def test_everything_at_once_leaves_the_outputs_alone(engine: EmbeddedEngine) -> None:
    firsts = [idea(r, r.first(), ALL) for r in (HEADS, ATTENTION, NORM)]
    both = (idea(DENSE, DENSE.first(), DECODE), idea(GROUPED, GROUPED.first(), PREFILL))
    assert gap(engine, portfolio(*both, *firsts), WORKLOADS["mixed"]) < REORDERED


def test_one_rewrite_can_stand_in_a_portfolio_more_than_once(
    engine: EmbeddedEngine,
) -> None:
    guards = (Guard(1, 8), DECODE, PREFILL)
    thrice = (idea(GROUPED, GROUPED.first(), guard) for guard in guards)
    assert gap(engine, portfolio(*thrice), WORKLOADS["four"]) < REORDERED


@pytest.fixture(scope="module")
def rounding_engine() -> Iterator[EmbeddedEngine]:
    running = EmbeddedEngine(EngineSettings(dtype="bfloat16", scope=Scope.TRIAL, key=KEY))
    yield running
    running.close()


@pytest.mark.parametrize("rewrite", FITTING, ids=lambda r: r.name)
def test_a_rewrite_serves_an_engine_in_bfloat16(
    rounding_engine: EmbeddedEngine, rewrite: Rewrite
) -> None:
    ours = portfolio(idea(rewrite, rewrite.first(), ALL))
    assert gap(rounding_engine, ours, WORKLOADS["four"]) < 1.0  # a router's tie moves more


@pytest.mark.parametrize("knobs", list(MLP.settings()), ids=str)
def test_a_gated_mlp_is_the_same_module_by_module(tmp_path: Path, knobs: Knobs) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(LlamaMLP(32, 48)).requires_grad_(False)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    x = torch.randn(5, 32)
    want = model(x)
    one = idea(MLP, knobs, ALL).forward_pass()
    forwards = Forwards(model, tmp_path)
    forwards.install(forwards.bind("ab", forwards.read([one])))
    torch.testing.assert_close(model(x), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rewrite", [GROUPED, DENSE, LOOP, GATHER], ids=lambda r: r.name)
def test_experts_that_are_not_renormalised_stay_so(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, rewrite: Rewrite
) -> None:
    for experts in (m for m in engine.model.modules() if isinstance(m, FusedMoE)):
        monkeypatch.setattr(experts, "renormalize", False)
    assert gap(engine, portfolio(idea(rewrite, rewrite.first(), ALL)), WORKLOADS["four"]) < 1e-4


def test_a_rewrite_leaves_the_engine_as_it_was(engine: EmbeddedEngine) -> None:
    before = engine.fingerprint()
    firsts = [idea(r, r.first(), ALL) for r in (GROUPED, HEADS, ATTENTION, NORM)]
    replayed(engine, portfolio(*firsts), WORKLOADS["four"])
    assert engine.fingerprint() == before


def test_rounding_to_bfloat16_can_be_told_from_reordering(engine: EmbeddedEngine) -> None:
    rounded = portfolio(idea(BF16, {}, ALL))
    assert gap(engine, rounded, WORKLOADS["mixed"]) > 10 * REORDERED


def test_a_guard_keeps_the_rewrite_out_of_other_batches(engine: EmbeddedEngine) -> None:
    decode_only = portfolio(idea(GROUPED, GROUPED.first(), DECODE))
    replay = replayed(engine, decode_only, workload((40, 40), 2, num_outputs=1))
    assert replay.num_candidate_calls == 0


def test_the_rewrites_that_change_nothing_change_nothing(engine: EmbeddedEngine) -> None:
    same = [portfolio(idea(r, {}, ALL)) for r in NOTHING if r.cls != "LlamaMLP"]
    assert {gap(engine, p, WORKLOADS["four"]) for p in same} == {0.0}


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.name)
def test_every_setting_is_a_forward_pass_of_its_own(rewrite: Rewrite) -> None:
    passes = [idea(rewrite, k, g).forward_pass() for k in rewrite.settings() for g in (ALL, DECODE)]
    assert len({p.digest for p in passes}) == len(passes)
    assert {p.targets for p in passes} == {((f"cls:{rewrite.cls}", "forward"),)}
