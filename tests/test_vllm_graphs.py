"""Which graphs are captured under which guards, kept, flipped and let go."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fakes_vllm import BatchDescriptor, CUDAGraphMode, FakeWorker, GraphedRunner, capturing
from fakes_vllm import fake_vllm as fake_vllm

from engines.inside.forward import Calls, Fault, Loaded
from engines.inside.source import Guard
from engines.inside.vllm_graphs import Graphs
from engines.inside.vllm_runner import V1, V2, GraphSet, runner_of

pytestmark = pytest.mark.usefixtures("fake_vllm")

SIZES = (1, 2, 4, 8)
Serves = Callable[[int, int], bool]
SERIALS = {"": 0, "a": 1, "b": 2, "c": 3}  # of bindings, by a name


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that were asked for."""
    made: list[str] = []

    def graph_pool_handle() -> str:
        made.append(f"pool {len(made)}")
        return made[-1]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", graph_pool_handle)
    return made


class Engine:
    """Graphs beside a runner; each step of a portfolio runs three forwards, one through ORIG."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.runner, self.calls = GraphedRunner(FakeWorker(), sizes), Calls()
        self.ran: list[int] = []  # sizes of the steps that a capture or a check made
        self.runner.worker.model.register_forward_pre_hook(lambda *_: self.count())
        self.graphs = Graphs(self.runner, self.running, self.calls)
        self.serves = serves()

    @contextmanager
    def running(self, num_tokens: int) -> Iterator[None]:
        self.ran.append(num_tokens)
        yield

    def count(self) -> None:
        self.calls.candidate += 3
        self.calls.orig += 1

    def select(self, digest: str, *guards: tuple[int, int]) -> None:
        self.serves = serves(*guards)
        self.graphs.select(SERIALS[digest], self.serves)

    def decode(self, *num_requests: int) -> None:
        """One step each."""
        for num in num_requests:
            self.graphs.before_step({str(i): 1 for i in range(num)})

    def counted(self) -> tuple[int, int]:
        """Calls since the last time."""
        found = self.calls.candidate, self.calls.orig
        self.calls.candidate = self.calls.orig = 0
        return found


def serves(*guards: tuple[int, int]) -> Serves:
    return Loaded(guards=tuple(Guard(*g) for g in guards)).serves


# --- what is captured -----------------------------------------------------------------------------


def test_at_first_stock_s_graphs_are_installed() -> None:
    engine = Engine()
    assert engine.runner.names == dict.fromkeys(SIZES, "stock")
    assert engine.graphs.sizes == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("guard", "captured"),
    [
        ((1, 100), [8, 4, 2, 1]),  # inside
        ((1, 8), [8, 4, 2, 1]),
        ((9, 100), []),  # outside
        ((1, 4), [4, 2, 1]),
        ((3, 8), [8, 4]),
        ((1, 3), [2, 1]),  # 4 straddles: it serves 3 and 4
        ((4, 8), [8]),
        ((5, 7), []),
    ],
)
def test_a_graph_is_captured_when_the_guard_lets_in_all_batches_that_it_serves(
    guard: tuple[int, int], captured: list[int]
) -> None:
    engine = Engine()
    engine.select("a", guard)
    assert engine.runner.captured == captured
    assert {n for n, name in engine.runner.names.items() if name == "stock"} == {*SIZES} - {
        *captured
    }


def test_each_of_several_guards_gets_its_graphs() -> None:
    engine = Engine()
    engine.select("a", (1, 2), (5, 8))
    assert engine.runner.captured == [8, 2, 1]


def test_a_portfolio_s_graphs_live_in_a_pool_of_their_own(pools: list[str]) -> None:
    engine = Engine()
    for digest in ("a", "b"):
        engine.select(digest, (1, 8))
        assert engine.runner.installed.pool == pools[-1]
    assert len(pools) == 2


def test_stock_s_own_set_is_not_written_to() -> None:
    engine = Engine()
    stock = engine.runner.installed
    engine.select("a", (1, 8))
    engine.decode(1, 2)
    assert (stock.pool, set(stock.graphs.values())) == ("stock's", {"stock"})


def test_what_was_captured_is_told() -> None:
    engine = Engine()
    engine.select("a", (1, 4))
    assert (engine.graphs.last_num_captured, engine.graphs.last_capture_s > 0) == (3, True)
    engine.select("")
    assert (engine.graphs.last_num_captured, engine.graphs.last_capture_s) == (0, 0.0)


# --- sizes in use ---------------------------------------------------------------------------------


def test_sizes_in_use_come_first_and_the_others_when_they_come() -> None:
    engine = Engine()
    engine.decode(3, 3, 1)
    engine.select("a", (1, 8))
    assert engine.runner.captured == [4, 1]
    engine.decode(4, 2, 2, 1)
    assert engine.runner.captured == [4, 1, 2]
    assert set(engine.runner.names) == {1, 2, 4}


def test_a_size_to_be_captured_later_has_no_graph_of_stock_s() -> None:
    engine = Engine()
    engine.decode(1)
    engine.select("a", (1, 4))
    assert engine.runner.names == {8: "stock", 1: "capture 0"}


def test_a_step_with_a_prefill_is_of_no_size() -> None:
    engine = Engine()
    engine.decode(1)
    engine.select("a", (1, 8))
    engine.graphs.before_step({"a": 5, "b": 1})
    assert engine.runner.captured == [1]


def test_a_step_over_the_largest_graph_is_of_no_size() -> None:
    engine = Engine()
    engine.decode(1)
    engine.select("a", (1, 100))
    engine.decode(9)
    assert engine.runner.captured == [1]


def test_a_graph_captured_later_stays_for_the_next_time() -> None:
    engine = Engine()
    engine.decode(1)
    engine.select("a", (1, 8))
    engine.decode(2)
    engine.select("")
    engine.select("a", (1, 8))
    engine.decode(2)
    assert engine.runner.captured == [1, 2]


# --- failures -------------------------------------------------------------------------------------


def test_a_capture_that_fails_leaves_what_ran() -> None:
    engine = Engine()
    engine.select("a", (1, 8))
    before = engine.runner.installed
    engine.runner.breaks = {2}
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.select("b", (1, 8))
    engine.select("a", (1, 8))
    assert engine.runner.installed is before


def test_after_a_failed_capture_the_next_try_captures_all() -> None:
    engine = Engine()
    engine.runner.breaks = {2}
    with pytest.raises(RuntimeError):
        engine.select("a", (1, 8))
    engine.runner.breaks = set()
    engine.select("a", (1, 8))
    assert engine.runner.captured == [8, 4, 8, 4, 2, 1]


@pytest.mark.parametrize("size", [1, 8])
def test_a_graph_that_says_something_else_than_its_step_is_refused(size: int) -> None:
    engine = Engine()
    engine.runner.is_off_by = {size: 1.0}
    with pytest.raises(Fault, match=f"its graph of {size} tokens is off by 1"):
        engine.select("a", (1, 8))


@pytest.mark.parametrize("off", [float("nan"), float("inf")])
def test_a_graph_without_numbers_is_refused(off: float) -> None:
    engine = Engine()
    engine.runner.is_off_by = {8: off}
    with pytest.raises(Fault, match="its graph of 8 tokens"):
        engine.select("a", (1, 8))


def test_a_graph_s_rounding_is_let_pass() -> None:
    engine = Engine()
    engine.runner.is_off_by = {8: 1e-4}
    engine.select("a", (1, 8))


def test_a_refused_set_is_let_go() -> None:
    engine = Engine()
    engine.runner.is_off_by = {8: 1.0}
    with pytest.raises(Fault):
        engine.select("a", (1, 8))
    engine.select("")
    engine.graphs.keep(())
    engine.runner.is_off_by = {}
    engine.select("a", (1, 8))
    assert engine.graphs.last_num_captured == 4


def test_a_capture_that_fails_in_a_live_step_leaves_the_step_without_a_graph() -> None:
    engine = Engine()
    engine.decode(1)
    engine.select("a", (1, 8))
    engine.runner.breaks = {2}
    engine.decode(2)
    assert 2 not in engine.runner.names


# --- kept and let go ------------------------------------------------------------------------------


def test_going_back_installs_without_capturing() -> None:
    engine = Engine()
    engine.select("a", (1, 8))
    a = engine.runner.installed
    engine.select("b", (1, 8))
    engine.runner.captured.clear()
    engine.select("a", (1, 8))
    assert (engine.runner.installed, engine.runner.captured) == (a, [])
    engine.select("")
    assert engine.runner.names == dict.fromkeys(SIZES, "stock")


def test_keep_lets_go_of_every_other() -> None:
    engine = Engine()
    for digest in ("a", "b", "c"):
        engine.select(digest, (1, 8))
    engine.graphs.keep((SERIALS["c"], SERIALS["b"]))
    engine.runner.captured.clear()
    for digest in ("c", "b", ""):
        engine.select(digest, (1, 8))
    assert engine.runner.captured == []
    engine.select("a", (1, 8))
    assert engine.runner.captured == [8, 4, 2, 1]


def test_keep_lets_go_of_cut_sets_with_their_portfolio() -> None:
    engine = Engine()
    engine.select("a", (1, 8))
    with engine.graphs.cut(1):
        engine.decode(8)
    engine.select("")
    engine.graphs.keep(())
    engine.runner.captured.clear()
    engine.select("a", (1, 8))
    with engine.graphs.cut(1):
        engine.decode(8)
    assert engine.runner.captured == [8, 8]


# --- the first layers only ------------------------------------------------------------------------


def test_a_cut_model_s_graphs_are_of_its_own_and_captured_by_use() -> None:
    engine = Engine()
    engine.select("a", (1, 8))
    whole = engine.runner.installed
    with engine.graphs.cut(1):
        assert engine.runner.names == {}
        engine.decode(3, 3, 4)
        assert engine.runner.names == {4: "capture 4"}
    assert engine.runner.installed is whole


def test_a_cut_stock_has_graphs_of_every_size() -> None:
    engine = Engine()
    with engine.graphs.cut(1):
        engine.decode(1, 2, 4, 8)
        assert set(engine.runner.names) == set(SIZES)


def test_a_cut_set_has_none_of_a_size_that_two_forwards_share() -> None:
    engine = Engine()
    engine.select("a", (1, 3))
    with engine.graphs.cut(1):
        engine.decode(1, 2, 4, 8)
        assert set(engine.runner.names) == {1, 2, 8}


def test_a_cut_set_is_kept_for_the_next_time_and_each_depth_has_its_own() -> None:
    engine = Engine()
    for num_layers in (1, 2, 1, 2):
        with engine.graphs.cut(num_layers):
            engine.decode(8)
    assert engine.runner.captured == [8, 8]


def test_a_cut_that_ends_with_an_error_puts_the_whole_model_s_graphs_back() -> None:
    engine = Engine()
    with pytest.raises(KeyError), engine.graphs.cut(1):
        raise KeyError
    assert engine.runner.names == dict.fromkeys(SIZES, "stock")


# --- calls ----------------------------------------------------------------------------------------


def test_a_replayed_graph_counts_the_calls_that_are_in_it() -> None:
    engine = Engine()
    engine.select("a", (1, 4))
    engine.counted()
    engine.decode(3)
    assert engine.counted() == (3, 1)
    engine.decode(8)
    assert engine.counted() == (0, 0), "stock's graph"


def test_stock_counts_nothing() -> None:
    engine = Engine()
    engine.decode(1, 2, 4)
    assert engine.counted() == (0, 0)


def test_a_capture_by_use_counts_no_more_than_its_step() -> None:
    engine = Engine()
    engine.decode(1)
    engine.select("a", (1, 8))
    engine.counted()
    engine.decode(4)
    assert engine.counted() == (3, 1)


# --- looking at them ------------------------------------------------------------------------------


def test_a_check_says_how_far_every_graph_is_off() -> None:
    engine = Engine()
    engine.runner.is_off_by = {4: 0.5}
    gaps = engine.graphs.check()
    assert gaps.keys() == {"1", "2", "4", "8"}
    assert gaps["2"][0] == 0
    assert gaps["4"][0] == pytest.approx(0.5)


def test_each_capture_runs_as_a_step_of_its_size() -> None:
    engine = Engine()
    engine.select("a", (1, 4))
    assert engine.ran[:3] == [4, 2, 1]


def test_without_full_graphs_there_is_nothing_to_do(pools: list[str]) -> None:
    engine = Engine(sizes=())
    engine.select("a", (1, 8))
    engine.decode(1)
    with engine.graphs.cut(1):
        engine.decode(2)
    assert (engine.runner.captured, pools, engine.graphs.check()) == ([], [], {})


# --- vLLM's two runners ---------------------------------------------------------------------------

ONE, TWO = BatchDescriptor(1), BatchDescriptor(2)
PIECES = BatchDescriptor(2, CUDAGraphMode.PIECEWISE)
DONE = ["unlocked", "locked"]  # what a capture switches, and switches back


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def v1(on_a_device: None) -> tuple[V1, Any]:
    """The runner with graphs of one and of two tokens, and the wrapper that keeps them."""
    worker: Any = FakeWorker()
    worker.device = SimpleNamespace(type="cuda")
    wrapper = SimpleNamespace(
        concrete_cudagraph_entries={ONE: "one", TWO: "two"}, graph_pool="stock's"
    )
    model, runner = worker.model_runner.model, worker.model_runner
    runner.get_model, runner.model = lambda: model, wrapper
    runner.cudagraph_dispatcher.cudagraph_keys = {CUDAGraphMode.FULL: {ONE, TWO}}

    def capture(desc: Any, cudagraph_runtime_mode: Any, num_warmups: int) -> None:
        assert desc in runner.cudagraph_dispatcher.cudagraph_keys[cudagraph_runtime_mode]
        assert (capturing.log, gc.isenabled()) == (["enabled", "unlocked"], False)
        wrapper.concrete_cudagraph_entries[desc] = f"new {desc.num_tokens}"

    runner._warmup_and_capture = capture
    return V1(worker), wrapper


class FakeManager:
    """V2's."""

    def __init__(self) -> None:
        self.graphs: dict[Any, str] = {ONE: "one", TWO: "two"}
        self.pool = "stock's"
        self._graphs_captured = True
        self._capture_descs = {CUDAGraphMode.FULL: [TWO, ONE]}
        self._candidates = {1: [ONE, PIECES], 2: [TWO, PIECES]}
        self.fails = False

        self.ran: list[str] = []

    def capture_model(self) -> None:
        assert not self._graphs_captured
        assert gc.isenabled() is False
        if self.fails:
            raise RuntimeError("CUDA error: out of memory")

        def forward_of(descriptor: Any, warmup: bool) -> Callable[[Any], None]:
            what = "warm-up" if warmup else "captured"
            return lambda mode: self.ran.append(f"{what} {descriptor.num_tokens}")

        self.capture(forward_of, "Capturing")

    def capture(self, create_forward_fn: Any, progress_bar_desc: str) -> None:
        for descriptor in self._capture_descs[CUDAGraphMode.FULL]:
            for warmup in (True, False):
                create_forward_fn(descriptor, warmup=warmup)(CUDAGraphMode.NONE)
            self.graphs[descriptor] = f"new {descriptor.num_tokens}"


@pytest.fixture
def v2(on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> tuple[V2, FakeManager]:
    module: Any = ModuleType("vllm.v1.worker.gpu.cudagraph_utils")
    module.CudaGraphManager = FakeManager
    monkeypatch.setitem(sys.modules, module.__name__, module)
    worker, manager = FakeWorker(), FakeManager()
    runner: Any = worker.model_runner
    runner.req_states, runner.cudagraph_manager = SimpleNamespace(req_id_to_index={}), manager
    runner.capture_model = manager.capture_model
    found = runner_of(worker)
    assert isinstance(found, V2)
    return found, manager


def test_a_runner_that_is_neither_is_refused() -> None:
    worker: Any = SimpleNamespace(model_runner=object())
    with pytest.raises(RuntimeError, match="a model runner that Trimtab does not know"):
        runner_of(worker)


def test_on_a_cpu_there_are_no_graphs() -> None:
    assert runner_of(FakeWorker()).descriptors() == []


def test_v1_dispatches_to_what_is_installed_only(v1: tuple[V1, Any]) -> None:
    runner, wrapper = v1
    runner.install(GraphSet({TWO: "mine"}, "my pool"))
    assert (wrapper.concrete_cudagraph_entries, wrapper.graph_pool) == ({TWO: "mine"}, "my pool")
    assert runner.worker.model_runner.cudagraph_dispatcher.cudagraph_keys == {
        CUDAGraphMode.FULL: {TWO}
    }
    assert runner.descriptors() == [TWO, ONE], "stock's"


def test_v1_captures_into_what_is_installed(v1: tuple[V1, Any]) -> None:
    runner, mine = v1[0], GraphSet({TWO: "mine"}, "my pool")
    runner.install(mine)
    runner.capture(ONE, warm=True)
    assert mine.graphs == {TWO: "mine", ONE: "new 1"}
    assert (capturing.log, gc.isenabled()) == (["enabled", *DONE, "disabled"], True)


def test_v1_switches_back_after_a_capture_that_failed(v1: tuple[V1, Any]) -> None:
    runner, _ = v1
    runner.worker.model_runner._warmup_and_capture = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.capture(ONE, warm=True)
    assert (capturing.log, gc.isenabled()) == (["enabled", *DONE, "disabled"], True)


def test_v1_runs_without_any_graph_when_told(v1: tuple[V1, Any]) -> None:
    dispatcher = v1[0].worker.model_runner.cudagraph_dispatcher
    with v1[0].ungraphed():
        assert dispatcher.keys_initialized is False
    assert dispatcher.keys_initialized is True


def test_v2_chooses_among_what_is_installed_and_pieces(v2: tuple[V2, FakeManager]) -> None:
    runner, manager = v2
    stock, choices = runner.graph_set(), manager._candidates
    runner.install(GraphSet({TWO: "mine"}, "my pool"))
    assert (manager.graphs, manager.pool) == ({TWO: "mine"}, "my pool")
    assert manager._candidates == {1: [PIECES], 2: [TWO, PIECES]}
    runner.install(stock)
    assert (manager.pool, manager._candidates) == ("stock's", choices)


def test_v2_captures_one_and_chooses_it_when_it_is_installed_again(
    v2: tuple[V2, FakeManager],
) -> None:
    (runner, manager), mine = v2, GraphSet({TWO: "mine"}, "my pool")
    runner.install(mine)
    runner.capture(ONE, warm=True)
    runner.install(mine)
    assert mine.graphs == {TWO: "mine", ONE: "new 1"}
    assert manager._candidates[1] == [ONE, PIECES]
    assert (manager._capture_descs[CUDAGraphMode.FULL], capturing.log) == ([TWO, ONE], DONE)


def test_v2_captures_without_a_warm_up_where_it_may(v2: tuple[V2, FakeManager]) -> None:
    runner, manager = v2
    runner.install(GraphSet({}, "my pool"))
    assert runner.capture(TWO, warm=True) == 2
    assert runner.capture(ONE, warm=False) == 1
    assert runner.capture(TWO, warm=True) == 2
    assert manager.ran == ["warm-up 2", "captured 2", "captured 1", "warm-up 2", "captured 2"]


def test_v2_goes_on_with_its_graphs_after_a_capture_that_failed(
    v2: tuple[V2, FakeManager],
) -> None:
    runner, manager = v2
    manager.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.capture(ONE, warm=True)
    assert manager._capture_descs == {CUDAGraphMode.FULL: [TWO, ONE]}
    assert (manager._graphs_captured, gc.isenabled(), capturing.log) == (True, True, DONE)


def test_v2_runs_an_eager_step_without_graphs(v2: tuple[V2, FakeManager]) -> None:
    runner, manager = v2
    seen = []

    def dummy_run(num_tokens: int, skip_eplb: bool, uniform_decode: bool) -> torch.Tensor:
        seen.append(manager._graphs_captured)
        return torch.zeros(num_tokens, 1)

    runner.worker.model_runner._dummy_run = dummy_run
    for graph in (None, False, True):
        runner.dummy_step(2, graph)
    assert seen == [False, False, True]
    assert manager._graphs_captured is True
