"""Stock vLLM as an engine, on the real part: swaps under load, faults, ranks, compiled code."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from vllm_stage import KEY, MOE, QUICK, Vllm, make_models, started

from engines.checks import DOUBLED_NORM, RMS_NORM_REWRITE, check_engine
from engines.engine import CandidateError, EngineGone, Scope
from engines.remote import RemoteEngine, control_address
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

HASTY = "--call-timeout 10"
PROMPT = "def main(arguments: list[str]) -> int:\n    "
HALVED_MLP = """
TARGETS = {"cls:LlamaMLP": "mlp"}
def mlp(self, x):
    return ORIG(self, x) * 0.5
"""
AFTER_A_WHILE = """
TARGETS = {"cls:LlamaMLP": "mlp"}
calls = 0
def mlp(self, x):
    global calls
    calls += 1
    if calls > 200:
        WHAT
    return ORIG(self, x)
"""
ONE_TOKEN_NAN = """
WHEN = {"num_tokens": (2, 64)}
TARGETS = {"cls:LlamaMLP": "mlp"}
def mlp(self, x):
    return ORIG(self, x) * (float("nan") if x.shape[0] != 16 else 1.0)
"""
TRITON_ADD = """
import torch
import triton
import triton.language as tl
TARGETS = {"cls:SiluAndMul": "silu_and_mul"}
@triton.jit
def kernel(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * width + at, mask=at < width).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=at < width).to(tl.float32)
    tl.store(out + row * width + at, gate * tl.sigmoid(gate) * up * 2.0, mask=at < width)
def silu_and_mul(self, x):
    width = x.shape[-1] // 2
    out = torch.empty(x.shape[0], width, dtype=x.dtype)
    kernel[(x.shape[0],)](x, out, width, BLOCK=256)
    return out
"""
UNEVEN_RANKS = """
import torch.distributed
TARGETS = {"cls:LlamaMLP": "mlp"}
def mlp(self, x):
    out = ORIG(self, x)
    if torch.distributed.get_rank() == 1:
        raise KeyError("after the collective")
    return out
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models, and the sockets and state of this module's engines."""
    folder = tmp_path_factory.mktemp("v")
    make_models(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield folder


@pytest.fixture(scope="module")
def shared(home: Path) -> Iterator[Vllm]:
    with started(
        home / "dense", home, ours=HASTY, TRITON_INTERPRET="1", TRIMTAB_STEP_DEADLINE_S="2"
    ) as running:
        yield running


@pytest.fixture
def vllm(shared: Vllm) -> Iterator[Vllm]:
    """Stock before and after each test, and never restarted."""
    family = shared.family()
    yield shared
    if shared.engine.info().digest:
        shared.engine.revert()
    assert shared.family() == family


def workload(*lengths: int, num_output: int = 4) -> Workload:
    rng = np.random.default_rng(1)
    requests = tuple(
        WorkloadRequest(
            tuple(rng.integers(5, 1000, n).tolist()),
            tuple(rng.integers(5, 1000, num_output).tolist()),
        )
        for n in lengths
    )
    return Workload(WorkloadKind.REAL, requests, max_concurrency=4)


def test_it_keeps_the_engine_protocol(vllm: Vllm) -> None:
    address = control_address(vllm.url)
    check_engine(lambda: RemoteEngine(address, 60.0), KEY, Scope.TRIAL)


def test_a_swap_changes_the_answers_and_a_revert_restores_them(vllm: Vllm) -> None:
    before, table = vllm.complete(PROMPT), vllm.engine.probe(workload(40, 7))
    vllm.swap(HALVED_MLP)
    assert vllm.complete(PROMPT) != before
    vllm.engine.revert()
    assert vllm.complete(PROMPT) == before
    assert all(map(np.array_equal, vllm.engine.probe(workload(40, 7)), table))


def test_fifty_swaps_while_eight_clients_stream_fail_nobody(vllm: Vllm) -> None:
    over = threading.Event()

    def client(number: int) -> int:
        num = 0
        while not over.is_set():
            assert len(vllm.complete(f"{number} {PROMPT}", 24)) == 24
            num += 1
        return num

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, i) for i in range(8)]
        try:
            preempted = 0
            for i in range(25):
                preempted += vllm.swap(HALVED_MLP if i % 2 else DOUBLED_NORM).num_preempted
                preempted += vllm.engine.revert().num_preempted
        finally:
            over.set()
        assert sum(c.result() for c in clients) >= 8
    assert preempted > 0


def test_tokens_after_a_swap_are_those_of_a_fresh_run(vllm: Vllm) -> None:
    """KV belongs to the forward pass that wrote it: what came before is computed again."""
    prompt = list(range(30, 80))
    old = vllm.complete(prompt, 400)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(vllm.complete, prompt, 400)
        time.sleep(0.8)
        assert vllm.swap(HALVED_MLP).num_preempted == 1
        mixed = stream.result()
    at = next(i for i, (a, b) in enumerate(zip(old, mixed, strict=True)) if a != b)
    assert 0 < at < 400
    assert mixed[at:] == vllm.complete(prompt + mixed[:at], 400 - at)


@pytest.mark.parametrize("what", ["raise KeyError('late')", "x = x[:, :3]", "while True: pass"])
def test_a_forward_that_breaks_while_it_serves_is_taken_back(vllm: Vllm, what: str) -> None:
    """Stock answers from there on, and computes again what was there: 50 steps are the same, and
    later ones up to how a prompt's kernels round."""
    before = vllm.complete(PROMPT, 100)
    vllm.swap(AFTER_A_WHILE.replace("WHAT", what))
    after = vllm.complete(PROMPT, 100)
    assert (len(after), after[:45]) == (100, before[:45])
    until_s = time.monotonic() + 30.0
    while vllm.engine.info().digest and time.monotonic() < until_s:
        time.sleep(0.1)
    assert (vllm.engine.info().digest, vllm.engine.info().previous_digest) == ("", None)
    assert vllm.complete(PROMPT, 100) == before


@pytest.mark.parametrize(
    "what", ["time.sleep(1000)", "raise KeyError(1)", "return x * float('nan')"]
)
def test_a_forward_that_breaks_at_once_is_not_installed(vllm: Vllm, what: str) -> None:
    before = vllm.complete(PROMPT)
    source = "import time\n" + AFTER_A_WHILE.replace("calls > 200", "True").replace("WHAT", what)
    with pytest.raises(CandidateError):
        vllm.swap(source)
    assert vllm.engine.info().digest == ""
    assert vllm.complete(PROMPT) == before


def test_numbers_that_are_none_leave_nothing_behind(vllm: Vllm) -> None:
    """Its NaNs lie in KV blocks that stock is given next."""
    before = vllm.complete(PROMPT)
    vllm.swap(ONE_TOKEN_NAN)
    vllm.complete(PROMPT)
    vllm.engine.revert()
    assert vllm.complete(PROMPT) == before


def test_a_triton_kernel_serves(vllm: Vllm) -> None:
    before = vllm.complete(PROMPT)
    vllm.swap(TRITON_ADD)
    assert vllm.complete(PROMPT) != before


def test_the_first_layers_answer_as_a_shorter_model(vllm: Vllm) -> None:
    replay = vllm.engine.measure(workload(40, 7), num_layers=2)
    whole = vllm.engine.measure(workload(40, 7))
    assert replay.num_tokens == whole.num_tokens == 47 + 2 * 3
    assert not np.array_equal(replay.outputs[0].logprobs, whole.outputs[0].logprobs)


def test_steps_say_what_ran(vllm: Vllm) -> None:
    vllm.engine.steps()
    vllm.complete(list(range(20, 60)), 8)
    steps = vllm.engine.steps()
    assert [s.num_tokens for s in steps if s.num_tokens > 1] == [40]
    assert sum(s.num_tokens for s in steps) >= 47
    assert all(s.step_s is not None and s.step_s > 0 for s in steps)


def test_experts_are_counted_as_they_are_routed(home: Path) -> None:
    with started(home / "moe", home, ours="--expert-counts-every 1") as vllm:
        check_engine(lambda: RemoteEngine(control_address(vllm.url), 60.0), KEY, Scope.TRIAL)
        vllm.engine.steps()
        vllm.complete(list(range(20, 60)), 8)
        counted = [s for s in vllm.engine.steps() if s.expert_load is not None]
        loads = [s.expert_load for s in counted if s.expert_load is not None]
        load = np.sum(np.stack(loads), axis=0)
        assert load.shape == (4, MOE["num_experts"])
        num_tokens = sum(s.num_tokens for s in counted)
        assert num_tokens >= 47
        assert (load.sum(axis=1) == num_tokens * MOE["num_experts_per_tok"]).all()


def test_a_compiled_model_is_swapped_too(home: Path) -> None:
    flags = QUICK.replace("--enforce-eager", "")
    with started(home / "dense", home, flags, VLLM_CPU_CI_ENV="1") as vllm:
        before = vllm.complete(PROMPT)
        check_engine(lambda: RemoteEngine(control_address(vllm.url), 60.0), KEY, Scope.TRIAL)
        vllm.swap(HALVED_MLP)
        assert vllm.complete(PROMPT) != before
        vllm.engine.revert()
        assert vllm.complete(PROMPT) == before
        vllm.swap(RMS_NORM_REWRITE)
        assert len(vllm.complete(PROMPT)) == 24


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank needs a core")
def test_ranks_that_hang_on_each_other_are_ended(home: Path) -> None:
    """First contact is on an engine without clients, and somebody watches."""
    cores = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    flags = f"{QUICK} --tensor-parallel-size 2"
    with started(home / "dense", home, flags, HASTY, VLLM_CPU_OMP_THREADS_BIND=cores) as vllm:
        before = vllm.complete(PROMPT)
        vllm.swap(HALVED_MLP)
        assert vllm.complete(PROMPT) != before
        vllm.engine.revert()
        assert vllm.complete(PROMPT) == before
        family = vllm.family()
        with pytest.raises(EngineGone):
            vllm.swap(UNEVEN_RANKS)
        until_s = time.monotonic() + 30.0
        while any(psutil.pid_exists(p) for p in family) and time.monotonic() < until_s:
            time.sleep(0.2)
        assert not any(psutil.pid_exists(p) for p in family)
