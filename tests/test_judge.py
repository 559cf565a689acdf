"""Who gets which verdict: honest rewrites pass, cheats fail by what they do."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fakes_engine import (
    HONEST,
    HONEST_MLP,
    KEY,
    FakeEngines,
    connect_fake,
    edited,
    portfolio,
    workload,
)

from compiler.gate import GatePolicy, Trial, ValidationReport
from compiler.judge import Court, Judge, Setup, VerdictVoid, Workloads
from engines.embedded.engine import EmbeddedEngine, EngineSettings
from engines.engine import EngineGone, Portfolio, Scope
from engines.host import Host
from engines.remote import RemoteEngine

POLICY = GatePolicy(deadline_s=10.0)
WORKLOADS = Workloads(screen=workload(0), confirm=workload(1), held_out=workload(2))
Y = "y * self.weight"


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def court(engines: FakeEngines) -> Court:
    return _court(engines)


def _court(engines: FakeEngines, policy: GatePolicy = POLICY) -> Court:
    setup = Setup(engines.connect, "tuning", "reference", KEY, WORKLOADS, policy)
    seeds = iter(range(1000))
    return Court(setup, clock=engines.ticks, mint=lambda: next(seeds))


def _norm(body: str, head: str = "") -> Portfolio:
    """The honest norm with `body` before it returns: `y` is the output, `x` the sum."""
    return edited(head + HONEST, "    return y *", f"    {body}\n    return y *")


@pytest.mark.parametrize("source", [HONEST, HONEST_MLP])
def test_an_honest_rewrite_passes(court: Court, source: str) -> None:
    report = court.validate(portfolio(source))
    assert report.failures == ()
    assert report.passed


def test_an_honest_rewrite_is_faster_on_few_layers_and_on_all(court: Court) -> None:
    screened, confirmed = court.screen(portfolio(HONEST)), court.confirm(portfolio(HONEST))
    assert screened.faster, screened.reason
    assert confirmed.faster, confirmed.reason
    assert confirmed.held_out_gain == pytest.approx(confirmed.gain, abs=0.1)


def test_two_honest_forward_passes_pass_as_one_portfolio(court: Court) -> None:
    assert court.validate(portfolio(HONEST, HONEST_MLP)).passed


def test_stock_is_what_every_verdict_leaves_behind(court: Court, engines: FakeEngines) -> None:
    court.validate(portfolio(HONEST))
    court.screen(portfolio(HONEST))
    assert engines.by_address["tuning"].info().digest == ""


CHEATS = {
    "wrong": _norm("y = y * 1.01"),
    "nan": _norm("y = y * np.float32('nan')"),
    "shape": _norm("y = y[:-1]"),
    "dtype": _norm("y = y.astype(np.float64)"),
    "half": _norm("y = y.astype(np.float16).astype(np.float32)"),
    "half weights": edited(HONEST, Y, "y * self.weight.astype(np.float16).astype(np.float32)"),
    "constant": _norm("y = np.full_like(x, 0.1)"),
    "mean": _norm("y = np.broadcast_to(y.mean(-1, keepdims=True), y.shape)"),
    "no epsilon": edited(HONEST, "self.variance_epsilon", "0"),
    "one bad size": _norm("y = y * (1.001 if len(x) == 127 else 1)"),
    "large inputs only": _norm("y = np.where(abs(x).max() > 20, y * 1.001, y)"),
    "cache by shape": _norm("y = KEPT.setdefault(x.shape, y)", head="KEPT = {}\n"),
    "skips the second half": edited(
        HONEST_MLP, "@ self.down.T", "* (np.arange(48) < 40) @ self.down.T"
    ),
    "no residual": edited(HONEST, "x = x + residual", "pass"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_does_not_pass(court: Court, cheat: str) -> None:
    report = court.validate(CHEATS[cheat])
    assert not report.passed
    assert report.failures


def test_a_cheat_that_knows_a_lone_call_fails_at_the_model_level(court: Court) -> None:
    report = court.validate(_norm("y = y * (1.001 if len(x) == 4 else 1)"))
    assert any("nats" in f or "tokens" in f for f in report.failures)


def test_a_candidate_that_raises_is_at_fault(court: Court) -> None:
    report = court.validate(_norm("raise ZeroDivisionError"))
    assert report.faulted
    assert not report.recycle


def test_a_candidate_that_does_not_load_is_at_fault(court: Court) -> None:
    assert court.validate(edited(HONEST, "COST_S = 0.0002", "import nowhere")).faulted


def test_state_left_behind_condemns_the_engine(court: Court) -> None:
    report = court.validate(_norm("self.weight *= 1.0000001"))
    assert report.recycle
    with pytest.raises(EngineGone, match="recycle"):
        court.validate(portfolio(HONEST))


def test_a_setting_left_behind_condemns_the_engine(court: Court) -> None:
    report = court.validate(
        portfolio(
            "import threading\n"
            + HONEST
            + "\nthreading.Thread(target=lambda: __import__('time').sleep(2), daemon=True).start()"
        )
    )
    assert report.recycle


def test_a_slower_one_is_not_faster(court: Court) -> None:
    trial = court.screen(edited(HONEST, "COST_S = 0.0002", "COST_S = 0.002"))
    assert trial.agrees
    assert not trial.faster
    assert trial.stock.num_repeats < POLICY.min_pairs  # clear at once


def test_one_that_costs_the_same_is_not_faster(court: Court) -> None:
    assert not court.screen(edited(HONEST, "COST_S = 0.0002", "")).faster


def test_one_that_lives_on_orig_has_no_effect(court: Court) -> None:
    source = 'TARGETS = {"cls:LlamaMLP": "mlp"}\nCOST_S = -0.0005\n'
    trial = court.screen(portfolio(source + "def mlp(self, x): return ORIG(self, x)\n"))
    assert not trial.faster
    assert trial.reason.startswith("no effect")


def test_one_that_no_batch_reaches_has_no_effect(court: Court) -> None:
    trial = court.screen(edited(HONEST_MLP, "(1, 16)", "(5000, 6000)"))
    assert trial.reason.startswith("no effect")


def test_a_wrong_answer_in_the_timed_runs_alone_is_not_faster(court: Court) -> None:
    cheat = _norm("COUNT.append(1); y = y * (1.01 if len(COUNT) > 40 else 1)", head="COUNT = []\n")
    trial = court.screen(cheat)
    assert not trial.agrees
    assert not trial.faster


def test_a_gain_only_on_the_tuned_slice_is_not_confirmed(engines: FakeEngines) -> None:
    confirm, later = workload(1, num_requests=2), workload(2, num_requests=6)
    setup = Setup(
        engines.connect, "tuning", "reference", KEY, Workloads(confirm, confirm, later), POLICY
    )
    slow = edited(HONEST, "COST_S = 0.0002", "COST_S = 0.0008").forwards[0].source
    trick = slow.replace(
        "    if residual is not None:\n",
        "    spend(0.05 * (len(x) > 20))\n    if residual is not None:\n",
        1,
    )
    trial = Court(setup, clock=engines.ticks).confirm(portfolio(trick))
    assert trial.held_out_gain is None or trial.held_out_gain <= 0.0
    assert not trial.faster


def test_a_time_under_the_roofline_is_not_believed(engines: FakeEngines) -> None:
    court = _court(engines, replace(POLICY, bytes_per_s=1e3))
    trial = court.screen(portfolio(HONEST))
    assert not trial.faster
    assert trial.reason.startswith("impossible")


def test_one_that_makes_stock_slow_is_not_faster(court: Court) -> None:
    slow = "def prepare(m):\n    f = m.stock\n    m.stock = lambda *a: (spend(0.02), f(*a))[1]\n"
    trial = court.screen(portfolio(HONEST + slow))
    assert trial.recycle
    assert not trial.faster


def test_a_candidate_that_hangs_is_an_engine_gone(engines: FakeEngines) -> None:
    court = _court(engines, replace(POLICY, deadline_s=0.3))
    hang = "import threading\n" + HONEST + "\nthreading.Event().wait(5)\n"
    with pytest.raises(EngineGone, match="silent"):
        court.validate(portfolio(hang))


def test_a_wrong_key_is_refused_as_such(engines: FakeEngines) -> None:
    setup = Setup(engines.connect, "tuning", "reference", b"other", WORKLOADS, POLICY)
    with pytest.raises(PermissionError):
        Court(setup).validate(portfolio(HONEST))


def test_a_reference_that_is_broken_gives_no_verdict(engines: FakeEngines) -> None:
    engines.by_address["reference"]._head[:] = float("nan")
    with pytest.raises(ValueError, match="reference"):
        _court(engines).validate(portfolio(HONEST))


def _judge(policy: GatePolicy = POLICY, tuning: str = "float32") -> Judge:
    return Judge(
        connect=connect_fake,
        tuning_address=tuning,
        reference_address="float64",
        trial_key=KEY,
        workloads=WORKLOADS,
        policy=policy,
    )


def test_the_judge_answers_from_a_process_of_its_own() -> None:
    judge = _judge()
    try:
        report, trial = judge.validate(portfolio(HONEST)), judge.screen(portfolio(HONEST))
    finally:
        judge.close()
    assert isinstance(report, ValidationReport)
    assert isinstance(trial, Trial)
    assert report.passed


def test_a_judge_whose_process_dies_gives_no_verdict_and_comes_back() -> None:
    judge = _judge()
    try:
        with pytest.raises(VerdictVoid):
            judge.validate(portfolio("import os\n" + HONEST + "\nos._exit(0)\n"))
        judge.use("float32")
        assert judge.validate(portfolio(HONEST)).passed
    finally:
        judge.close()


def test_a_silent_judge_is_killed() -> None:
    judge = _judge(replace(POLICY, verdict_deadline_s=2.0, deadline_s=60.0))
    try:
        with pytest.raises(VerdictVoid, match="silent"):
            judge.validate(portfolio(HONEST + "\nimport time\ntime.sleep(30)\n"))
    finally:
        judge.close()


# --- on the real engine ---------------------------------------------------------------------------

NORM = """
import torch.nn.functional as F
TARGETS = {"cls:RMSNorm": "norm"}
def norm(self, x, residual=None):
    x = x if residual is None else x + residual
    y = F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)
    return y if residual is None else (y, x)
"""
MOE = """
import torch
import torch.nn.functional as F
TARGETS = {"cls:Qwen3MoeSparseMoeBlock": "moe"}
WHEN = {"num_tokens": (1, 32)}
def moe(self, hidden_states):
    experts = self.experts
    weights, chosen = self.gate(hidden_states)[0].softmax(-1).topk(experts.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    both = torch.einsum("nh,nkih->nki", hidden_states, experts.w13_weight[chosen])
    gate, up = both.chunk(2, -1)
    each = torch.einsum("nki,nkhi->nkh", F.silu(gate) * up, experts.w2_weight[chosen])
    return (each * weights.unsqueeze(-1)).sum(1)
"""


def _serve(address: str, dtype: str) -> None:
    host = Host(EmbeddedEngine(EngineSettings(dtype=dtype, scope=Scope.TRIAL, key=KEY)), address)
    host.start()
    time.sleep(300)


@pytest.fixture(scope="module")
def real_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Over two real engines in processes of their own."""
    folder, spawn = tmp_path_factory.mktemp("real"), multiprocessing.get_context("spawn")
    sockets = {dtype: folder / f"{dtype}.sock" for dtype in ("float32", "float64")}
    engines = [spawn.Process(target=_serve, args=(f"unix:{s}", d)) for d, s in sockets.items()]
    for engine in engines:
        engine.start()
    while not all(s.exists() for s in sockets.values()):
        assert all(engine.is_alive() for engine in engines)
        time.sleep(0.1)
    judge = Judge(
        connect=RemoteEngine,
        tuning_address=f"unix:{sockets['float32']}",
        reference_address=f"unix:{sockets['float64']}",
        trial_key=KEY,
        workloads=WORKLOADS,
    )
    yield judge
    judge.close()
    for engine in engines:
        engine.kill()
        engine.join()


@pytest.mark.slow
@pytest.mark.parametrize("source", [NORM, MOE])
def test_an_honest_rewrite_passes_on_the_real_engine(real_judge: Judge, source: str) -> None:
    report = real_judge.validate(portfolio(source))
    assert report.failures == ()
    assert not report.recycle


LOW = "hidden_states.bfloat16().float(), experts"
KEPT = "    y = KEPT.setdefault(x.shape, y)\n    return"
REAL_CHEATS = {
    "low precision": edited(NORM, "    return", "    y = y.bfloat16().float()\n    return"),
    "low precision products": edited(MOE, "hidden_states, experts", LOW),
    "one expert": edited(MOE, "experts.top_k", "1"),
    "light experts skipped": edited(MOE, "    both", "    weights *= weights > 0.35\n    both"),
    "no epsilon": edited(NORM, "self.variance_epsilon", "0.0"),
    "kept outputs": edited("KEPT = {}" + NORM, "    return", KEPT),
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", REAL_CHEATS)
def test_a_cheat_does_not_pass_on_the_real_engine(real_judge: Judge, cheat: str) -> None:
    report = real_judge.validate(REAL_CHEATS[cheat])
    assert report.failures
    assert not report.faulted
