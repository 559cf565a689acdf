"""`VllmEngine` and a door that answers as it is told; and the real one, on a fake vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fakes_vllm import KEY, ExtendedWorker, FakeEngineClient
from fakes_vllm import fake_vllm as fake_vllm

from engines import vllm_adapter
from engines.checks import check_engine
from engines.engine import (
    CandidateError,
    EngineGone,
    ForwardPass,
    ModuleInfo,
    Portfolio,
    Scope,
    SwapReport,
    sign,
)
from engines.inside import wire
from engines.inside.vllm_server import Door
from engines.vllm_adapter import VllmEngine, VllmUnsupported
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest

INFO = {
    "model": "tiny",
    "dtype": "bfloat16",
    "device": "cpu",
    "num_layers": 2,
    "vocab_size": 32,
    "max_model_len": 48,
    "digest": "d1",
    "previous_digest": None,
    "modules": [["model.norm", "RMSNorm", 16]],
    "runner": "vllm.v1.worker.gpu_model_runner",
}
SWAPPED = {"digest": "d1", "num_modules": 5, "num_preempted": 2, "load_s": 0.5, "swap_s": 0.25}
WORKLOAD = Workload(
    WorkloadKind.REAL, (WorkloadRequest((1, 2), (3,)), WorkloadRequest((4,), (5, 6))), 7
)
DOUBLE = 'TARGETS = {"cls:RMSNorm": "norm"}\ndef norm(self, x, residual=None):\n    return x\n'


class FakeDoor:
    """Answers each connection's one message, by what it asks for."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked = path, list[wire.Message]()
        self.answers: dict[str, wire.Message | bytes] = {
            "attach": INFO,
            "info": INFO,
            "pending": {"num_pending": 0},
        }
        self.hangs = threading.Event()  # set: nobody is answered
        self._ends = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                to, _ = self._listener.accept()
            except OSError:
                return
            with to, to.makefile("rb") as stream:
                head = stream.read(wire.LENGTHS.size)
                message = wire.unpack(head + stream.read(sum(wire.lengths(head))))
                self.asked.append(message)
                if self.hangs.is_set():
                    self._ends.wait(10)
                answer = self.answers.get(message["do"], {})
                with contextlib.suppress(BrokenPipeError):
                    to.sendall(answer if isinstance(answer, bytes) else wire.pack(answer))

    def close(self) -> None:
        self._ends.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[FakeDoor]:
    door = FakeDoor(tmp_path / "inside.sock")
    yield door
    door.close()


def attach(door: FakeDoor, timeout_s: float = 60.0) -> VllmEngine:
    return VllmEngine(door.path, KEY, Scope.SERVE, start_to_ready_s=3.5, timeout_s=timeout_s)


def error(kind: str) -> wire.Message:
    return {"error": kind, "text": f"this is {kind}"}


# --- attaching ------------------------------------------------------------------------------------


def test_attaching_gives_key_and_scope(door: FakeDoor) -> None:
    engine = attach(door, 12.5)
    assert door.asked == [{"do": "attach", "deadline_s": 12.5, "key": KEY, "scope": "serve"}]
    assert engine.about() == INFO
    assert engine.is_lost is False


def test_a_vllm_that_lacks_what_is_needed_is_named(door: FakeDoor) -> None:
    door.answers["attach"] = error("engine")
    with pytest.raises(VllmUnsupported, match="this is engine"):
        attach(door)


def test_an_engine_of_somebody_else_s_key_is_not_ours(door: FakeDoor) -> None:
    door.answers["attach"] = error("permission")
    with pytest.raises(PermissionError, match="this is permission"):
        attach(door)


def test_where_nobody_listens_there_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineGone, match="vLLM, attach: FileNotFoundError"):
        VllmEngine(tmp_path / "nobody.sock", KEY, Scope.SERVE, 0.0)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "raised", "is_lost"),
    [
        ("candidate", CandidateError, False),
        ("permission", PermissionError, False),
        ("deadline", EngineGone, True),
        ("engine", RuntimeError, False),
        ("something new", RuntimeError, False),
    ],
)
def test_what_the_inside_says_is_raised(
    door: FakeDoor, kind: str, raised: type[Exception], is_lost: bool
) -> None:
    engine = attach(door)
    door.answers["revert"] = error(kind)
    with pytest.raises(raised, match=f"this is {kind}"):
        engine.revert()
    assert engine.is_lost is is_lost


def test_an_engine_that_is_not_heard_of_is_lost(
    door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_adapter, "GRACE_S", 0.1)
    engine = attach(door, timeout_s=0.1)
    door.hangs.set()
    with pytest.raises(EngineGone, match="vLLM, revert: TimeoutError"):
        engine.revert()
    assert engine.is_lost


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400\r\n\r\n", wire.pack(SWAPPED)[:-9]])
def test_an_answer_that_is_none_is_a_gone_engine(door: FakeDoor, answer: bytes) -> None:
    engine = attach(door)
    door.answers["revert"] = answer
    with pytest.raises(EngineGone, match="vLLM, revert"):
        engine.revert()
    assert engine.is_lost is False


def test_an_engine_that_ended_is_gone_and_not_lost(tmp_path: Path) -> None:
    door = FakeDoor(tmp_path / "inside.sock")
    engine = attach(door)
    door.close()
    with pytest.raises(EngineGone, match="ConnectionRefusedError"):
        engine.info()
    assert engine.is_lost is False


def test_once_lost_it_stays_lost(door: FakeDoor) -> None:
    engine = attach(door)
    door.answers["revert"] = error("deadline")
    with pytest.raises(EngineGone):
        engine.revert()
    engine.info()
    assert engine.is_lost


def test_the_inside_has_time_to_give_up_first() -> None:
    """A pause and the workers' deadline, one after the other, before the connection is cut."""
    from engines.inside.vllm_server import PAUSE_DEADLINE_S, SLACK_S

    assert vllm_adapter.GRACE_S > PAUSE_DEADLINE_S + SLACK_S


# --- there and back -------------------------------------------------------------------------------


def test_info_is_the_engine_s_own_with_ours(door: FakeDoor) -> None:
    door.answers["pending"] = {"num_pending": 4}
    info = attach(door).info()
    assert (info.engine, info.model, info.dtype, info.scope) == (
        "vllm",
        "tiny",
        "bfloat16",
        Scope.SERVE,
    )
    assert (info.num_running, info.start_to_ready_s, info.previous_digest) == (4, 3.5, None)
    assert info.modules == (ModuleInfo("model.norm", "RMSNorm", 16),)


def test_a_swap_sends_text_and_signature(door: FakeDoor) -> None:
    engine, change = attach(door), Portfolio((ForwardPass.from_source(DOUBLE),))
    door.answers["swap"] = SWAPPED
    report = engine.swap(change, sign(KEY, Scope.SERVE, change.digest))
    assert report == SwapReport("d1", 5, 2, 0.5, 0.25)
    assert door.asked[-1]["sources"] == [DOUBLE]
    assert door.asked[-1]["signature"] == sign(KEY, Scope.SERVE, change.digest)


def test_arrays_go_to_a_call_and_come_back(door: FakeDoor) -> None:
    engine, x = attach(door), np.arange(6, dtype=np.float32).reshape(2, 3)
    door.answers["call"] = {"outputs": [2 * x, x[:1]]}
    twice, cut = engine.call("model.norm", [x])
    assert np.array_equal(door.asked[-1]["inputs"][0], x)
    assert (np.array_equal(twice, 2 * x), cut.shape) == (True, (1, 3))


def test_a_measure_is_outputs_and_counts(door: FakeDoor) -> None:
    engine = attach(door)
    outputs = [
        {"logprobs": np.full(n, -0.5, np.float32), "top_token_ids": np.arange(n)} for n in (1, 2)
    ]
    counts = {"num_steps": 3, "num_tokens": 4, "num_orig_calls": 5, "num_candidate_calls": 6}
    door.answers["replay"] = {"outputs": outputs, **counts}
    replay = engine.measure(WORKLOAD, num_layers=1)
    assert (replay.num_steps, replay.num_tokens) == (3, 4)
    assert (replay.num_orig_calls, replay.num_candidate_calls) == (5, 6)
    assert [len(o.top_token_ids) for o in replay.outputs] == [1, 2]


def test_a_replay_is_asked_for_token_for_token(door: FakeDoor) -> None:
    engine = attach(door)
    door.answers["replay"] = {"outputs": [{"logprobs": np.zeros((1, 32), np.float32)}]}
    (table,) = engine.probe(WORKLOAD)
    asked = door.asked[-1]
    assert (table.shape, asked["rows"], asked["num_layers"]) == ((1, 32), True, None)
    assert asked["max_concurrency"] == 7
    assert asked["requests"] == [
        {"prompt": [1, 2], "output": [3]},
        {"prompt": [4], "output": [5, 6]},
    ]


def test_the_fingerprint_is_over_all_ranks(door: FakeDoor) -> None:
    engine, found = attach(door), set()
    for ranks in (["a"], ["a", "b"], ["b", "a"], ["a", "b", "b"]):
        door.answers["fingerprint"] = {"fingerprints": ranks}
        found.add(engine.fingerprint())
    assert len(found) == 4


def test_steps_are_samples_with_the_gauges_of_now(door: FakeDoor) -> None:
    engine, load = attach(door), np.ones((2, 4), np.int64)
    step = {"num_running": 2, "num_tokens": 9, "step_s": 0.5, "expert_load": load}
    door.answers["steps"] = {
        "steps": [step, step | {"expert_load": None, "step_s": None}],
        "gauges": {"num_waiting": 3.0, "num_running": 2.0, "kv_cache_usage": 0.25},
    }
    first, second = engine.steps()
    assert (first.num_running, first.num_waiting, first.num_tokens) == (2, 3, 9)
    assert (first.kv_cache_usage, first.step_s) == (0.25, 0.5)
    assert np.array_equal(first.expert_load, load)  # type: ignore[arg-type]
    assert (second.expert_load, second.step_s) == (None, None)


def test_gaps_of_graphs_come_by_size(door: FakeDoor) -> None:
    engine = attach(door)
    door.answers["graph_check"] = {"gaps": {"1": [0.0, 2.0], "8": [0.5, 3.0]}}
    assert engine.graph_gaps() == {1: (0.0, 2.0), 8: (0.5, 3.0)}


def test_the_source_is_text(door: FakeDoor) -> None:
    door.answers["source"] = {"source": "class RMSNorm: ..."}
    assert attach(door).source("cls:RMSNorm") == "class RMSNorm: ..."
    assert door.asked[-1]["target"] == "cls:RMSNorm"


def test_an_idle_engine_is_drained_at_once(door: FakeDoor) -> None:
    assert attach(door).drain(0.0)


def test_a_drain_waits_until_its_deadline(door: FakeDoor) -> None:
    engine = attach(door)
    door.answers["pending"] = {"num_pending": 1}
    assert engine.drain(0.1) is False
    assert len(door.asked) > 3


# --- the whole way, on a fake vLLM ----------------------------------------------------------------


@pytest.fixture
def vllm(fake_vllm: None, tmp_path: Path) -> Iterator[Path]:
    """The socket of a server with one worker, in a process of its own as far as it can tell."""
    path, worker = tmp_path / "vllm.sock", ExtendedWorker(max_num_batched_tokens=32)
    client = FakeEngineClient(lambda m: wire.unpack(worker.trimtab(wire.pack(m))))
    started, ends = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        loops[0].set_default_executor(ThreadPoolExecutor(1))  # the worker's
        async with Door(client, path):
            started.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(10)
    yield path
    loops[0].call_soon_threadsafe(ends.set)
    thread.join()
    worker.close()


def test_it_is_an_engine(vllm: Path) -> None:
    check_engine(lambda: VllmEngine(vllm, KEY, Scope.SERVE, 0.0), KEY, Scope.SERVE)


def test_a_second_key_is_refused_all_the_way(vllm: Path) -> None:
    VllmEngine(vllm, KEY, Scope.SERVE, 0.0)
    with pytest.raises(PermissionError, match="has been given another key already"):
        VllmEngine(vllm, b"another", Scope.SERVE, 0.0)


def test_a_workload_that_does_not_fit_is_refused_all_the_way(vllm: Path) -> None:
    engine = VllmEngine(vllm, KEY, Scope.SERVE, 0.0)
    too_long = WorkloadRequest(tuple(range(1, 31)) * 2, (1,))
    with pytest.raises(CandidateError, match="a request has 61 tokens, over 48"):
        engine.measure(Workload(WorkloadKind.REAL, (too_long,), 1))
