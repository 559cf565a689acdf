"""The engine within a vLLM worker: keys, flips, faults, hangs, compiled code, graphs, ranks."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes_vllm import (
    DOUBLE,
    EXPERTS,
    HIDDEN,
    KEY,
    LAYERS,
    SMALL,
    TOP_K,
    VOCAB,
    ExtendedWorker,
    FakeEngineClient,
    GraphedRunner,
    MakeWorker,
    serve,
    swap_message,
)
from fakes_vllm import fake_vllm as fake_vllm
from fakes_vllm import make_worker as make_worker

from engines.engine import ForwardPass, Portfolio, Scope, sign
from engines.inside import vllm_hooks, vllm_worker, wire
from engines.inside.vllm_server import Door
from engines.inside.vllm_worker import STEP_DEADLINE
from engines.inside.wire import EXPERT_COUNTS, SOCKET

pytestmark = pytest.mark.timeout(60, method="thread")  # a signal of its own would be ours

NORM = 'TARGETS = {"path:model.layers.0.input_layernorm": "norm"}\n'
STOCK_NORM = NORM + "def norm(self, x, residual):\n    return ORIG(self, x, residual)\n"
NAN = DOUBLE.replace("* 2", "* float('nan')")
# a step of three tokens is what they fail in
FAILS = NORM + (
    "def norm(self, x, residual):\n"
    "    if len(x) == 3:\n        WHAT\n"
    "    return ORIG(self, x, residual)\n"
)
RAISES, EXITS, HANGS, SLEEPS = (
    FAILS.replace("WHAT", what)
    for what in (
        "raise KeyError('lost')",
        "raise SystemExit",
        "while True: pass",
        "import time; time.sleep(30)",
    )
)
SHORT, LONG = [1, 2, 3], [1, 2, 3, 4, 5, 6]  # prompts: one fails in, one does not


@pytest.fixture(autouse=True)
def _alarm_is_given_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def worker(make_worker: MakeWorker) -> ExtendedWorker:
    return make_worker()


@pytest.fixture
def stock(fake_vllm: None) -> ExtendedWorker:
    """Another one, whose extension nobody ever asks."""
    return ExtendedWorker()


class FakeServer:
    """The server inside, which is told of faults."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._notes: queue.Queue[wire.Message] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                to, _ = self._listener.accept()
            except OSError:
                return
            with to:
                self._notes.put(wire.unpack(to.recv(1 << 16)))

    def note(self) -> wire.Message:
        return self._notes.get(timeout=5)

    def is_told_no_more(self) -> bool:
        time.sleep(0.1)
        return self._notes.empty()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv(SOCKET, str(tmp_path / "inside.sock"))
    server = FakeServer(tmp_path / "inside.sock")
    yield server
    server.close()


def tables(reply: wire.Message) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = reply["outputs"][0]["logprobs"]
    return found


def same(a: wire.Message, b: wire.Message) -> bool:
    return np.array_equal(tables(a), tables(b))


# --- keys -----------------------------------------------------------------------------------------


def test_attaching_says_what_the_engine_is(fake_vllm: None) -> None:
    worker = ExtendedWorker()
    about = worker.attach()
    worker.close()
    assert (about["num_layers"], about["vocab_size"], about["dtype"]) == (LAYERS, VOCAB, "float32")
    assert ["model.norm", "RMSNorm", 4 * HIDDEN] in about["modules"]


@pytest.mark.parametrize(
    ("key", "scope", "digest"),
    [(b"wrong", "serve", None), (KEY, "trial", None), (KEY, "serve", ""), (KEY, "serve", "ab")],
)
def test_a_signature_of_another_key_scope_or_portfolio_is_refused(
    worker: ExtendedWorker, key: bytes, scope: str, digest: str | None
) -> None:
    right = worker.swap(DOUBLE)["digest"]
    worker.ask("revert")
    signature = sign(key, Scope(scope), right if digest is None else digest)
    assert worker.swap(DOUBLE, signature=signature)["error"] == "permission"
    assert worker.ask("info")["digest"] == ""


def test_nothing_unsigned_is_taken(worker: ExtendedWorker) -> None:
    assert worker.swap(DOUBLE, signature="")["error"] == "permission"


def test_before_a_key_was_given_nobody_s_signature_fits(fake_vllm: None) -> None:
    worker, digest = ExtendedWorker(), Portfolio((ForwardPass.from_source(DOUBLE),)).digest
    for key in (KEY, b""):
        signature = sign(key, Scope.SERVE, digest)
        assert worker.swap(DOUBLE, signature=signature)["error"] == "permission"
    worker.close()


@pytest.mark.parametrize(("key", "scope"), [(b"another", "serve"), (KEY, "trial")])
def test_the_first_key_stays(worker: ExtendedWorker, key: bytes, scope: str) -> None:
    assert worker.ask("attach", key=key, scope=scope)["error"] == "permission"
    assert "error" not in worker.swap(DOUBLE)


def test_the_same_key_may_attach_again(worker: ExtendedWorker) -> None:
    assert worker.attach()["digest"] == ""


def test_the_signature_is_over_what_came_not_over_what_was_said(worker: ExtendedWorker) -> None:
    said = swap_message(DOUBLE)["signature"]
    assert worker.swap(NAN, signature=said)["error"] == "permission"


# --- flips ----------------------------------------------------------------------------------------


def test_a_swap_changes_what_is_served_and_a_revert_restores_it(worker: ExtendedWorker) -> None:
    before = worker.replay()
    worker.swap(DOUBLE)
    assert not same(worker.replay(), before)
    worker.ask("revert")
    assert same(worker.replay(), before)


def test_clients_are_answered_by_what_runs(worker: ExtendedWorker, stock: ExtendedWorker) -> None:
    worker.swap(STOCK_NORM)
    assert serve(worker, LONG, 5) == serve(stock, LONG, 5)
    worker.swap(DOUBLE)
    assert serve(worker, LONG, 5) != serve(stock, LONG, 5)


def test_what_runs_and_what_ran_before_are_told(worker: ExtendedWorker) -> None:
    double = worker.swap(DOUBLE)
    info = worker.ask("info")
    assert (info["digest"], info["previous_digest"]) == (double["digest"], "")
    assert double["num_modules"] == 2 * LAYERS + 1


def test_a_revert_with_nothing_before_is_refused(worker: ExtendedWorker) -> None:
    assert worker.ask("revert") == {
        "error": "candidate",
        "text": "nothing to revert to: no portfolio was swapped in",
    }


def test_swapping_in_nothing_is_stock(worker: ExtendedWorker) -> None:
    before = worker.replay()
    worker.swap(DOUBLE)
    assert worker.swap()["digest"] == Portfolio().digest
    assert same(worker.replay(), before)


def test_the_guard_chooses_by_the_step_s_tokens(
    worker: ExtendedWorker, stock: ExtendedWorker
) -> None:
    worker.swap('WHEN = {"num_tokens": (7, 9)}\n' + DOUBLE)
    assert serve(worker, LONG, 5) == serve(stock, LONG, 5)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def norm(:", "the source does not parse"),
        ("import nothing_of_this_name\n" + STOCK_NORM, "nothing_of_this_name"),
        (STOCK_NORM.replace("path:", "path:no."), "no module of this model matches"),
        ("def prepare(m):\n    raise ValueError('not prepared')\n" + STOCK_NORM, "not prepared"),
        (NORM + "def norm(self, x, residual):\n    raise KeyError(1)\n", "raised KeyError: 1"),
        (NORM + "def norm(self, x, residual):\n    return x[:3], x\n", "IndexError"),
        (NAN, "a step of 16 tokens gives numbers that are not finite"),
        (SMALL + NAN, "a step of 4 tokens gives numbers that are not finite"),
    ],
)
def test_what_cannot_serve_is_refused_and_everything_is_as_before(
    worker: ExtendedWorker, source: str, why: str
) -> None:
    before, state = worker.replay(), worker.ask("fingerprint")
    signature = sign(KEY, Scope.SERVE, "0")
    if not source.startswith("def norm(:"):
        signature = swap_message(source)["signature"]
    reply = worker.ask("swap", sources=[source], signature=signature)
    assert (reply["error"], why in reply["text"]) == ("candidate", True), reply["text"]
    assert worker.ask("info")["previous_digest"] is None
    assert same(worker.replay(), before)
    assert worker.ask("fingerprint") == state


def test_a_refused_swap_leaves_the_portfolio_that_ran_and_the_one_before(
    worker: ExtendedWorker,
) -> None:
    worker.swap(STOCK_NORM)
    double = worker.swap(DOUBLE)["digest"]
    before = worker.replay()
    worker.swap(NAN)
    assert worker.ask("info")["digest"] == double
    assert same(worker.replay(), before)
    assert "error" not in worker.ask("revert")


def test_one_refused_file_refuses_the_whole_portfolio(worker: ExtendedWorker) -> None:
    assert worker.swap(STOCK_NORM, SMALL + NAN)["error"] == "candidate"
    assert worker.ask("info")["digest"] == ""


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass\n" + STOCK_NORM,
        "import time; time.sleep(30)\n" + STOCK_NORM,
        "def prepare(m):\n    while True: pass\n" + STOCK_NORM,
        NORM + "def norm(self, x, residual):\n    while True: pass\n",
    ],
)
def test_a_hang_in_a_swap_is_broken_off(worker: ExtendedWorker, source: str) -> None:
    before = worker.replay()
    reply = worker.swap(source, deadline_s=0.2)
    assert (reply["error"], "did not end within 0.2 s" in reply["text"]) == ("candidate", True)
    assert same(worker.replay(), before)


def test_the_fingerprint_sees_no_portfolio_but_sees_a_weight(worker: ExtendedWorker) -> None:
    state = worker.ask("fingerprint")
    worker.swap(DOUBLE)
    assert worker.ask("fingerprint") == state
    with torch.no_grad():
        worker.model.lm_head.weight[0, 0] += 1
    assert worker.ask("fingerprint") != state


# --- looking at it --------------------------------------------------------------------------------


def test_the_source_of_a_class_is_given(worker: ExtendedWorker) -> None:
    assert worker.ask("source", target="cls:RMSNorm")["source"].startswith("class RMSNorm")
    assert worker.ask("source", target="cls:NoSuch")["error"] == "candidate"


def test_a_module_is_called_under_the_portfolio(worker: ExtendedWorker) -> None:
    x = np.ones((2, HIDDEN), np.float32)
    call = partial(worker.ask, "call", module="model.norm", inputs=[x])
    before = call()["outputs"][0]
    worker.swap(DOUBLE)
    assert np.array_equal(call()["outputs"][0], 2 * before)


@pytest.mark.parametrize(
    ("module", "why"),
    [("no.such.module", "no module"), ("model.layers.0.attn", "cannot be called")],
)
def test_a_module_that_cannot_be_called_is_told(
    worker: ExtendedWorker, module: str, why: str
) -> None:
    x = np.ones((2, HIDDEN), np.float32)
    reply = worker.ask("call", module=module, inputs=[x, x, x])
    assert (reply["error"], why in reply["text"]) == ("candidate", True)


def test_a_call_that_a_forward_raises_in_is_its_fault(worker: ExtendedWorker) -> None:
    worker.swap(RAISES)
    x = np.ones((3, HIDDEN), np.float32)
    reply = worker.ask("call", module="model.layers.0.input_layernorm", inputs=[x, x])
    assert reply["text"] == "model.layers.0.input_layernorm raised KeyError: 'lost'"


@pytest.mark.parametrize("request_", [b"", b"\0" * 40, wire.pack({"do": "no such thing"})])
def test_whatever_comes_is_answered(worker: ExtendedWorker, request_: bytes) -> None:
    assert wire.unpack(worker.trimtab(request_))["error"] == "engine"


def test_a_vllm_without_the_hooks_is_refused(
    fake_vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = vllm_hooks.Findings(("its scheduler is gone",), (), "9.0")
    monkeypatch.setattr(vllm_hooks, "probe_live", lambda: lacking)
    reply = ExtendedWorker().attach()
    assert reply["error"] == "engine"
    assert "vLLM 9.0 lacks what Trimtab hooks into: its scheduler is gone" in reply["text"]


# --- replays --------------------------------------------------------------------------------------


def test_a_replay_tells_its_own_steps(worker: ExtendedWorker) -> None:
    assert worker.replay()["num_steps"] == 3


def test_a_replay_counts_the_calls_of_each_step(worker: ExtendedWorker) -> None:
    worker.swap(SMALL + DOUBLE)
    reply = worker.replay()
    assert reply["num_tokens"] == 7
    assert reply["num_candidate_calls"] == reply["num_orig_calls"] == 2 * (2 * LAYERS + 1)


def test_a_replay_is_no_live_step(worker: ExtendedWorker) -> None:
    worker.replay()
    assert worker.ask("steps")["steps"] == []


def test_a_replay_is_refused_while_a_request_is_held(worker: ExtendedWorker) -> None:
    serve(worker, LONG, keep=True)
    assert worker.replay()["text"] == "the engine is serving; drain it first"


def test_a_fault_in_a_trial_is_told_each_time_and_the_portfolio_stays(
    worker: ExtendedWorker, server: FakeServer
) -> None:
    digest = worker.swap(RAISES.replace("== 3", "== 5"))["digest"]
    for _ in range(2):
        assert worker.replay()["text"].endswith("raised KeyError: 'lost'")
    assert worker.ask("info")["digest"] == digest
    assert server.is_told_no_more()


def test_a_shape_that_stock_trips_over_is_the_portfolio_s_fault(worker: ExtendedWorker) -> None:
    worker.swap(FAILS.replace("== 3", "== 5").replace("WHAT", "return x[:3], x"))
    reply = worker.replay()
    assert (reply["error"], "a step under it raised" in reply["text"]) == ("candidate", True)
    worker.ask("revert")
    assert "error" not in worker.replay()


def test_a_hang_in_a_replay_is_broken_off(worker: ExtendedWorker) -> None:
    worker.swap(HANGS.replace("== 3", "== 5"))
    request = {"prompt": [1] * 5, "output": [2]}
    reply = worker.ask(
        "replay", requests=[request], max_concurrency=1, rows=True, num_layers=None, deadline_s=0.2
    )
    assert (reply["error"], "did not end within 0.2 s" in reply["text"]) == ("candidate", True)


def test_the_first_layers_alone_say_something_else(worker: ExtendedWorker) -> None:
    whole = worker.replay()
    assert not same(worker.replay(num_layers=1), whole)
    assert same(worker.replay(num_layers=LAYERS), whole)
    assert same(worker.replay(), whole)


@pytest.mark.parametrize("num_layers", [0, LAYERS + 1])
def test_layers_that_there_are_not_are_refused(worker: ExtendedWorker, num_layers: int) -> None:
    assert worker.replay(num_layers=num_layers)["error"] == "candidate"
    assert worker.model.model.end_layer == LAYERS


# --- faults of live steps -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "why"), [(RAISES, "KeyError: 'lost'"), (EXITS, "SystemExit"), (HANGS, "0.2 s")]
)
def test_a_live_fault_is_answered_by_stock_and_told_once(
    make_worker: MakeWorker,
    stock: ExtendedWorker,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    why: str,
) -> None:
    monkeypatch.setenv(STEP_DEADLINE, "0.2")
    worker = make_worker()
    digest = worker.swap(source)["digest"]
    for _ in range(2):
        assert serve(worker, SHORT, 4) == serve(stock, SHORT, 4)
    note = server.note()
    assert (note["do"], note["digest"], why in note["text"]) == ("fault", digest, True)
    assert server.is_told_no_more()


def test_a_sleep_in_a_live_step_is_broken_off(
    make_worker: MakeWorker, stock: ExtendedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_DEADLINE, "0.2")
    worker = make_worker()
    worker.swap(SLEEPS)
    started_s = time.monotonic()
    assert serve(worker, SHORT) == serve(stock, SHORT)
    assert time.monotonic() - started_s < 5


def test_a_step_deadline_cuts_no_stock_forward(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_DEADLINE, "0.05")
    worker = make_worker()
    worker.swap(STOCK_NORM)
    worker.model.lm_head.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    assert serve(worker, LONG, 2)


def test_after_a_fault_the_engine_gives_way_to_stock(worker: ExtendedWorker) -> None:
    worker.swap(STOCK_NORM)
    worker.swap(RAISES)
    serve(worker, SHORT)
    assert worker.ask("give_way", digest=worker.ask("info")["digest"])["digest"] == ""
    assert worker.ask("info")["previous_digest"] is None
    assert worker.ask("revert")["error"] == "candidate"


def test_a_trial_before_the_note_does_not_make_the_fault_forgotten(worker: ExtendedWorker) -> None:
    digest = worker.swap(RAISES)["digest"]
    serve(worker, SHORT)
    worker.replay()
    assert worker.ask("give_way", digest=digest)["digest"] == ""


def test_a_note_that_comes_late_takes_nothing_back(worker: ExtendedWorker) -> None:
    late = worker.swap(RAISES)["digest"]
    serve(worker, SHORT)
    double = worker.swap(DOUBLE)["digest"]
    assert worker.ask("give_way", digest=late)["digest"] == double


def test_without_a_server_a_fault_is_answered_all_the_same(
    worker: ExtendedWorker, stock: ExtendedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    worker.swap(RAISES)
    assert serve(worker, SHORT, 4) == serve(stock, SHORT, 4)


# --- compiled code --------------------------------------------------------------------------------


def test_stock_runs_what_was_compiled(make_worker: MakeWorker) -> None:
    worker = make_worker(compiled=True)
    worker.model.model.was_compiled.clear()
    serve(worker, LONG, 3)
    assert worker.model.model.was_compiled == [True] * 3


def test_only_steps_that_the_portfolio_serves_run_uncompiled(make_worker: MakeWorker) -> None:
    worker = make_worker(compiled=True)
    worker.swap(SMALL + DOUBLE)
    worker.model.model.was_compiled.clear()
    serve(worker, LONG, 3)
    worker.ask("revert")
    serve(worker, LONG, 3)
    assert worker.model.model.was_compiled == [True, False, False, True, True, True]


def test_uncompiled_steps_take_the_kernels_of_eager_mode(make_worker: MakeWorker) -> None:
    worker, eager = make_worker(compiled=True), ("forward_cuda", "eager")
    compiled = ("forward_native", "for the compiler")
    worker.swap(SMALL + STOCK_NORM)
    worker.model.model.kernels.clear()
    serve(worker, LONG, 2)
    worker.ask("revert")
    serve(worker, LONG, 2)
    assert worker.model.model.kernels == [compiled, eager, compiled, compiled]


def test_attaching_to_a_compiled_engine_warms_its_eager_kernels_up_once(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker(compiled=True)
    worker.attach()
    assert worker.model.model.was_compiled == [False, False]
    assert worker.ask("steps")["steps"] == []


def test_after_a_fault_steps_are_compiled_again(make_worker: MakeWorker) -> None:
    worker = make_worker(compiled=True)
    worker.swap(RAISES)
    worker.model.model.was_compiled.clear()
    serve(worker, SHORT, 3)
    assert worker.model.model.was_compiled == [False, True, True]


def test_a_step_that_breaks_behind_a_forward_is_answered_by_stock(make_worker: MakeWorker) -> None:
    worker = make_worker(compiled=True)
    worker.swap(FAILS.replace("WHAT", "return x[:2], x"))
    assert serve(worker, SHORT, 4) == serve(make_worker(compiled=True), SHORT, 4)
    assert worker.model.model.do_not_compile is False


def test_a_compiled_engine_is_changed_and_restored_too(make_worker: MakeWorker) -> None:
    worker = make_worker(compiled=True)
    before, state = worker.replay(), worker.ask("fingerprint")
    worker.swap(DOUBLE)
    assert not same(worker.replay(), before)
    worker.ask("revert")
    assert same(worker.replay(), before)
    assert worker.ask("fingerprint") == state


# --- live steps -----------------------------------------------------------------------------------


def test_live_steps_are_told_once(worker: ExtendedWorker) -> None:
    serve(worker, LONG, 3)
    steps = worker.ask("steps")["steps"]
    assert [(s["num_running"], s["num_tokens"]) for s in steps] == [(1, 6), (1, 1), (1, 1)]
    assert all(s["step_s"] > 0 for s in steps)
    assert worker.ask("steps")["steps"] == []


def test_a_forward_sees_its_step(worker: ExtendedWorker) -> None:
    text = "from engines.inside.step import step\nSEEN = []\n" + NORM
    worker.swap(
        'WHEN = {"num_tokens": (1, 6)}\n'
        + text
        + "def norm(self, x, residual):\n"
        + "    if len(x) == 6: SEEN.append(step())\n    return ORIG(self, x, residual)\n"
    )
    files = (m for name, m in sys.modules.items() if name.startswith("trimtab_forward"))
    (seen,) = (file.SEEN for file in files if hasattr(file, "SEEN"))
    seen.clear()
    serve(worker, LONG)
    (view,) = seen
    assert (view.num_tokens, view.num_requests, view.block_size) == (6, 1, 4)
    assert (view.query_lens_list, view.seq_lens_list) == ((6,), (6,))
    assert view.positions.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="call ORIG for attention"):
        view.kv_cache("model.layers.0.attn")


def test_experts_are_counted_in_every_nth_step(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPERT_COUNTS, "2")
    worker = make_worker()
    serve(worker, LONG, 2)
    serve(worker, LONG, 2)
    loads = [s["expert_load"] for s in worker.ask("steps")["steps"]]
    assert [load is not None for load in loads] == [False, True, False, True]
    assert loads[1].shape == (LAYERS, EXPERTS)
    assert (loads[1].dtype, loads[1].sum(-1).tolist()) == (np.int64, [TOP_K] * LAYERS)


def test_experts_are_counted_once_for_each_token_of_a_prompt(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPERT_COUNTS, "1")
    worker = make_worker()
    worker.replay()
    serve(worker, LONG)
    (step,) = worker.ask("steps")["steps"]
    assert step["expert_load"].sum(-1).tolist() == [len(LONG) * TOP_K] * LAYERS


# --- graphs ---------------------------------------------------------------------------------------


@pytest.fixture
def graphed(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> ExtendedWorker:
    """As on a device, with graphs of 1, 2 and 4 tokens."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(vllm_worker, "runner_of", lambda w: GraphedRunner(w, (1, 2, 4)))
    return make_worker()


def graphs(worker: ExtendedWorker) -> GraphedRunner:
    found = worker.__dict__["_trimtab_inside"]._vllm
    assert isinstance(found, GraphedRunner)
    return found


def test_a_swap_captures_and_a_revert_does_not(graphed: ExtendedWorker) -> None:
    assert graphed.swap(DOUBLE)["num_captured"] == 3
    assert graphed.ask("revert")["num_captured"] == 0
    assert set(graphs(graphed).names.values()) == {"stock"}


def test_a_capture_that_fails_refuses_the_swap(graphed: ExtendedWorker) -> None:
    graphed.swap(STOCK_NORM)
    before = graphs(graphed).installed
    graphs(graphed).breaks = {2}
    reply = graphed.swap(DOUBLE)
    assert (reply["error"], "out of memory" in reply["text"]) == ("candidate", True)
    assert graphs(graphed).installed is before


def test_a_graph_that_is_off_refuses_the_swap(graphed: ExtendedWorker) -> None:
    graphs(graphed).is_off_by = {4: 1e6}
    assert "its graph of 4 tokens is off by" in graphed.swap(DOUBLE)["text"]
    assert set(graphs(graphed).names.values()) == {"stock"}
    assert graphed.ask("info")["digest"] == ""


def test_the_gaps_of_graphs_are_told(graphed: ExtendedWorker) -> None:
    gaps = graphed.ask("graph_check")["gaps"]
    assert {size: gap for size, (gap, _) in gaps.items()} == {"1": 0.0, "2": 0.0, "4": 0.0}


def test_a_cut_model_has_graphs_of_its_own(graphed: ExtendedWorker) -> None:
    graphed.swap(DOUBLE)
    whole = graphs(graphed).installed
    graphs(graphed).captured.clear()
    graphed.replay(num_layers=1)
    assert graphs(graphed).captured == [1]
    assert graphs(graphed).installed is whole


@pytest.mark.parametrize("between", [(), (STOCK_NORM,)])
def test_a_portfolio_that_comes_again_by_a_swap_is_captured_again(
    graphed: ExtendedWorker, between: tuple[str, ...]
) -> None:
    """What its graphs point to went with the modules' first forwards."""
    graphed.swap(DOUBLE)
    for source in between:
        graphed.swap(source)
    assert graphed.swap(DOUBLE)["num_captured"] == 3


def test_a_hang_in_a_live_step_s_capture_is_broken_off(
    graphed: ExtendedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed.__dict__["_trimtab_inside"]._step_deadline_s = 0.1
    twice = [{"prompt": [1, 2], "output": [3, 4]}] * 2  # only graphs of two tokens are in use
    graphed.ask("replay", requests=twice, max_concurrency=2, num_layers=None, rows=True)
    graphed.swap(SLEEPS.replace("== 3", "== 1").replace("30", "1"))
    started_s = time.monotonic()
    serve(graphed, [1])
    assert time.monotonic() - started_s < 1


def test_after_a_live_fault_no_graph_of_the_portfolio_s_runs(graphed: ExtendedWorker) -> None:
    graphed.swap(RAISES)
    serve(graphed, SHORT, keep=True)
    serve(graphed, [1])
    assert set(graphs(graphed).names.values()) == {"stock"}


def test_no_graph_is_captured_while_stock_answers_for_a_portfolio(
    graphed: ExtendedWorker,
) -> None:
    """It would be stock's, under the portfolio's name, for good."""
    serve(graphed, [1, 2], 2)  # size 1 is in use
    graphed.swap(RAISES.replace("== 3", "== 5"))
    graphs(graphed).captured.clear()
    two = [{"prompt": [1, 2, 3, 4, 5], "output": [1, 2, 3]}, {"prompt": [1], "output": [1, 2, 3]}]
    graphs(graphed).worker.vllm_config.scheduler_config.max_num_batched_tokens = 5
    reply = graphed.ask("replay", requests=two, max_concurrency=2, num_layers=None, rows=True)
    assert (reply["error"], graphs(graphed).captured) == ("candidate", [])


def test_a_graph_in_whose_capture_a_forward_faulted_is_not_kept(graphed: ExtendedWorker) -> None:
    serve(graphed, [1], 2)  # size 1 is in use; 2 is captured when it comes
    graphed.swap(RAISES.replace("== 3", "== 2"))
    two = [{"prompt": [1], "output": [1, 2, 3]}] * 2
    reply = graphed.ask("replay", requests=two, max_concurrency=2, num_layers=None, rows=True)
    assert (reply["error"], 2 in graphs(graphed).names) == ("candidate", False)


def test_a_counted_step_counts_its_own_tokens_only(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPERT_COUNTS, "2")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(vllm_worker, "runner_of", lambda w: GraphedRunner(w, (1, 2, 4)))
    worker = make_worker()
    serve(worker, LONG, 2)
    load = worker.ask("steps")["steps"][1]["expert_load"]
    assert load.sum(-1).tolist() == [TOP_K] * LAYERS


# --- ranks ----------------------------------------------------------------------------------------


async def through_the_door(
    path: Path, ranks: list[ExtendedWorker], what: str, **said: Any
) -> wire.Message:
    """One message to all ranks, as the server passes it on."""
    engine = FakeEngineClient(*(partial(_answer, rank) for rank in ranks))
    async with Door(engine, path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(wire.pack({"do": what, "deadline_s": 20.0, **said}))
        head = await reader.readexactly(wire.LENGTHS.size)
        reply = wire.unpack(head + await reader.readexactly(sum(wire.lengths(head))))
        writer.close()
    return reply


def _answer(rank: ExtendedWorker, message: wire.Message) -> wire.Message:
    return wire.unpack(rank.trimtab(wire.pack(message)))


@pytest.fixture
def ranks(make_worker: MakeWorker) -> list[ExtendedWorker]:
    """Two, which serve a portfolio that came after stock."""
    both = [make_worker(), make_worker()]
    for rank in both:
        rank.swap(RAISES)
    return both


def running(ranks: list[ExtendedWorker]) -> list[tuple[str, str | None]]:
    infos = [rank.ask("info") for rank in ranks]
    return [(info["digest"], info["previous_digest"]) for info in infos]


async def test_a_swap_that_fails_on_one_rank_leaves_all_as_they_were(
    tmp_path: Path, ranks: list[ExtendedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = running(ranks)
    monkeypatch.setattr(ranks[1].model_runner, "_dummy_run", lambda *_, **__: 1 / 0)
    reply = await through_the_door(tmp_path / "s", ranks, "swap", **swap_message(DOUBLE))
    assert reply["text"].endswith("(rank 1 of 2)")
    assert running(ranks) == before


async def test_the_same_swap_again_that_fails_on_one_rank_leaves_all_as_they_were(
    tmp_path: Path, ranks: list[ExtendedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks[1].model_runner, "_dummy_run", lambda *_, **__: 1 / 0)
    await through_the_door(tmp_path / "s", ranks, "swap", **swap_message(RAISES))
    assert len({digest for digest, _ in running(ranks)}) == 1


async def test_a_fault_on_one_rank_makes_all_give_way(
    tmp_path: Path, ranks: list[ExtendedWorker]
) -> None:
    serve(ranks[1], SHORT)
    digest = running(ranks)[1][0]
    await through_the_door(tmp_path / "s", ranks, "fault", digest=digest, text="rank 1 raised")
    assert running(ranks) == [("", None)] * 2
