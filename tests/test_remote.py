"""The same protocol over the wire, from another thread and from another process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes_engine import (
    HONEST,
    KEY,
    NORM_PATH,
    FakeEngine,
    edited,
    portfolio,
    workload,
)

from compiler.gate import GatePolicy
from compiler.judge import Judge, Workloads
from engines.engine import STOCK, CandidateError, EngineGone, Portfolio, Scope, sign
from engines.host import Host
from engines.remote import EngineFault, RemoteEngine, connect, control_address, swap_key


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'e.sock'}"


@pytest.fixture
def remote(address: str) -> Iterator[RemoteEngine]:
    host = Host(FakeEngine(), address)
    host.start()
    engine = connect(address)
    yield engine
    engine.close()
    host.stop()


def _signed(portfolio: Portfolio) -> str:
    return sign(KEY, Scope.TRIAL, portfolio.digest)


def test_info_travels_whole(remote: RemoteEngine) -> None:
    assert remote.info() == FakeEngine().info()


def test_source_travels(remote: RemoteEngine) -> None:
    assert remote.source("cls:RMSNorm") == FakeEngine().source("cls:RMSNorm")


def test_a_swap_and_its_way_back(remote: RemoteEngine) -> None:
    change = portfolio(HONEST)
    assert remote.swap(change, _signed(change)).digest == change.digest
    assert remote.info().previous_digest == ""
    assert remote.revert().digest == ""


def test_the_empty_portfolio_is_stock(remote: RemoteEngine) -> None:
    assert remote.swap(STOCK, _signed(STOCK)).digest == ""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_call_returns_what_the_engine_returns(remote: RemoteEngine, dtype: Any) -> None:
    x = np.linspace(-1, 1, 64, dtype=dtype).reshape(2, 32)
    wanted = FakeEngine().call(NORM_PATH, [x, x])
    for got, want in zip(remote.call(NORM_PATH, [x, x]), wanted, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


def test_a_probe_returns_what_the_engine_returns(remote: RemoteEngine) -> None:
    wanted = FakeEngine().probe(workload(), num_layers=2)
    for got, want in zip(remote.probe(workload(), num_layers=2), wanted, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


def test_a_measure_returns_what_the_engine_returns(remote: RemoteEngine) -> None:
    got, want = remote.measure(workload()), FakeEngine().measure(workload())
    assert (got.num_tokens, got.num_candidate_calls) == (want.num_tokens, want.num_candidate_calls)
    np.testing.assert_array_equal(got.outputs[3].logprobs, want.outputs[3].logprobs, strict=True)
    np.testing.assert_array_equal(got.outputs[3].top_token_ids, want.outputs[3].top_token_ids)


def test_steps_travel_with_and_without_expert_load(remote: RemoteEngine) -> None:
    first, second = remote.steps()
    assert first.expert_load is not None
    assert first.expert_load.tolist() == [[1, 1, 1, 1]] * 2
    assert second.expert_load is None


def test_fingerprint_and_drain_travel(remote: RemoteEngine) -> None:
    assert len(remote.fingerprint()) == 64
    assert remote.drain(0.1)


def test_a_wrong_signature_is_a_permission_error(remote: RemoteEngine) -> None:
    with pytest.raises(PermissionError, match="scope"):
        remote.swap(portfolio(HONEST), "00")


def test_a_candidates_fault_keeps_its_words(remote: RemoteEngine) -> None:
    broken = edited(HONEST, "COST_S = 0.0002", "1 / 0")
    with pytest.raises(CandidateError, match="ZeroDivisionError: division by zero"):
        remote.swap(broken, _signed(broken))


def test_a_revert_with_nothing_before_is_a_candidate_error(remote: RemoteEngine) -> None:
    with pytest.raises(CandidateError, match="nothing to revert"):
        remote.revert()


def test_an_engines_own_bug_is_neither_gone_nor_the_candidates(remote: RemoteEngine) -> None:
    with pytest.raises(EngineFault, match="KeyError"):
        remote.call("no.such.module", [np.ones((1, 32), np.float32)])


def test_nobody_there_is_an_engine_gone(address: str) -> None:
    with pytest.raises(EngineGone, match="info"):
        connect(address).info()


def test_silence_past_the_deadline_is_an_engine_gone(address: str) -> None:
    host = Host(FakeEngine(), address)
    host.start()
    slow = edited(HONEST, "COST_S = 0.0002", "import time; time.sleep(1)")
    try:
        with pytest.raises(EngineGone, match="deadline"):
            RemoteEngine(address, timeout_s=0.2).swap(slow, _signed(slow))
    finally:
        host.stop()


def test_the_socket_is_its_owners_alone(remote: RemoteEngine, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "e.sock").stat().st_mode) == 0o600


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        Host(FakeEngine(), f"unix:{tmp_path}/open/e.sock").start()


def test_a_missing_folder_is_made_private(tmp_path: Path) -> None:
    host = Host(FakeEngine(), f"unix:{tmp_path}/new/e.sock")
    host.start()
    host.stop()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_the_socket_of_a_dead_process_is_replaced(address: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "e.sock"))
    host = Host(FakeEngine(), address)
    host.start()
    assert connect(address).info().engine == "fake"
    host.stop()


def test_a_live_engine_keeps_its_socket(remote: RemoteEngine, address: str) -> None:
    with pytest.raises(OSError, match="in use by a running engine"):
        Host(FakeEngine(), address).start()
    assert remote.info().engine == "fake"


def test_an_address_that_is_no_socket_is_refused() -> None:
    with pytest.raises(ValueError, match="write unix:"):
        Host(FakeEngine(), "127.0.0.1:50051").start()


def test_connect_travels_by_pickle() -> None:
    assert pickle.loads(pickle.dumps(connect)) is connect


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://localhost:8000/", "127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "127.0.0.1:8000"),
        ("https://Engine.example", "engine.example:443"),
        ("http://[::1]:9", "::1:9"),
    ],
)
def test_a_url_says_where_its_engine_listens(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert control_address(url) == f"unix:/run/user/7/trimtab/{name}.sock"


def test_without_a_runtime_dir_it_is_the_users_own_under_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    wanted = f"unix:/tmp/trimtab-{os.getuid()}/h:1.sock"
    assert control_address("http://h:1") == wanted


def test_an_engine_answers_at_an_ipv6_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    host = Host(FakeEngine(), control_address("http://[::1]:9"))
    host.start()
    assert connect(control_address("http://[::1]:9")).info().engine == "fake"
    host.stop()


def test_the_serve_key_is_made_once_and_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert swap_key() == swap_key()
    (made,) = (tmp_path / "trimtab").iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert len(swap_key()) == 32


def test_a_serve_key_that_others_can_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    swap_key()
    (tmp_path / "trimtab" / "swap.key").chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        swap_key()


def _serve(address: str, dtype: str) -> None:
    host = Host(FakeEngine(dtype), address)
    host.start()
    time.sleep(60)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A tuning and a reference engine in processes of their own, by address."""
    context = multiprocessing.get_context("spawn")
    dtypes = {f"unix:{tmp_path}/t.sock": "float32", f"unix:{tmp_path}/r.sock": "float64"}
    started = {a: context.Process(target=_serve, args=(a, d)) for a, d in dtypes.items()}
    for process in started.values():
        process.start()
    while not all(Path(a.removeprefix("unix:")).exists() for a in started):
        time.sleep(0.05)
    yield started
    for process in started.values():
        process.kill()
        process.join()


def test_a_candidate_that_takes_its_engine_down_is_an_engine_gone(
    processes: dict[str, Any],
) -> None:
    address = next(iter(processes))
    deadly = edited(HONEST, "COST_S = 0.0002", "import os; os._exit(0)")
    engine = connect(address)
    assert engine.info().digest == ""
    with pytest.raises(EngineGone):
        engine.swap(deadly, _signed(deadly))


def test_the_judge_tries_engines_over_the_wire(processes: dict[str, Any]) -> None:
    tuning, reference = processes
    work = workload(num_requests=2, num_outputs=3)
    judge = Judge(
        connect=partial(RemoteEngine, timeout_s=20.0),
        tuning_address=tuning,
        reference_address=reference,
        trial_key=KEY,
        workloads=Workloads(work, work, work),
        policy=GatePolicy(min_pairs=2, max_pairs=2),
    )
    try:
        assert judge.validate(portfolio(HONEST)).passed
        assert judge.screen(portfolio(HONEST)).stock.num_repeats == 2
        with pytest.raises(EngineGone):
            judge.validate(edited(HONEST, "COST_S = 0.0002", "import os; os._exit(0)"))
    finally:
        judge.close()
