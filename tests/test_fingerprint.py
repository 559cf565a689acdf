"""What a forward pass must leave alone, what shows when it did not, and what a fault costs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.inside import fingerprint as module
from engines.inside.fingerprint import fingerprint
from engines.inside.forward import Fault, Forwards
from engines.inside.source import ForwardPass, Guard


class Scale(nn.Module):
    """Stock: twice its input."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((1,), 2.0), persistent=False)
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.top_k, self.kind, self.heads = 2, "silu", (4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


TENFOLD = "def scale(self, x):\n    return x * 10\n"
RAISES = "def scale(self, x):\n    raise KeyError('lost')\n"
PACKED = (
    "def prepare(m):\n    m.packed = torch.ones(2)\n"
    "    m.register_buffer('ten', torch.tensor(10.0))\n"
    "def scale(self, x):\n    return x * self.ten\n"
)
TARGET = (("cls:Scale", "scale"),)


@pytest.fixture
def model() -> Model:
    return Model()


def source(text: str, targets: tuple[tuple[str, str], ...] = TARGET) -> ForwardPass:
    return ForwardPass("import torch\n" + text, targets, Guard(), "ab" * 32)


def install(forwards: Forwards, *texts: str) -> None:
    forwards.install(forwards.bind("digest", forwards.read([source(t) for t in texts])))


def run(model: Model) -> float:
    """4 when stock runs."""
    return float(model(torch.ones(1, 1))[0, 0])


def stock_print(model: Model) -> str:
    return fingerprint(model, lambda path: set())


# --- the fingerprint ------------------------------------------------------------------------------


def test_it_stays_the_same_while_the_model_serves(model: Model) -> None:
    before = stock_print(model)
    run(model)
    assert stock_print(model) == before
    assert len(before) == 32


def flip_a_bit(model: Model) -> None:
    model.second.gain.data.view(torch.int16)[1] ^= 1


def write_to_a_buffer(model: Model) -> None:
    model.first.factor += 1


def another_dtype(model: Model) -> None:
    model.first.factor = model.first.factor.double()


def another_shape(model: Model) -> None:
    model.first.factor = model.first.factor[None]


def hook(model: Model) -> None:
    model.second.register_forward_hook(lambda *_: None)


def setting(model: Model) -> None:
    model.second.top_k = 3


def setting_in_a_tuple(model: Model) -> None:
    model.first.heads = (4, 4)


def new_attribute(model: Model) -> None:
    model.first.__dict__["hidden"] = object()


def forward_on_the_instance(model: Model) -> None:
    model.first.__dict__["forward"] = lambda x: x


def mode(model: Model) -> None:
    model.second.eval()


def other_module(model: Model) -> None:
    model.second = nn.Identity()  # type: ignore[assignment]


CHANGES = (
    flip_a_bit,
    write_to_a_buffer,
    another_dtype,
    another_shape,
    hook,
    setting,
    setting_in_a_tuple,
    new_attribute,
    forward_on_the_instance,
    mode,
    other_module,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_model_shows(model: Model, change: Callable[[Model], None]) -> None:
    before = stock_print(model)
    change(model)
    assert stock_print(model) != before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scale, "forward"),
        (nn.Module, "__call__"),
        (torch, "matmul"),
        (torch.nn.functional, "rms_norm"),
        (torch.Tensor, "sum"),
        (time, "perf_counter"),
    ],
)
def test_a_function_put_in_another_s_place_shows(
    model: Model, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, stock = stock_print(model), getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *a, **k: stock(*a, **k))
        assert stock_print(model) != before
    assert stock_print(model) == before


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def matmul_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def thread() -> Iterator[None]:
    done = threading.Event()
    waits = threading.Thread(target=done.wait)
    waits.start()
    try:
        yield
    finally:
        done.set()
        waits.join()


@contextmanager
def global_hook() -> Iterator[None]:
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        yield


SETTINGS = (default_dtype, matmul_precision, thread, global_hook, torch.no_grad)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.__name__)
def test_a_setting_of_the_process_shows(model: Model, setting: Callable[[], Any]) -> None:
    before = stock_print(model)
    with setting():
        assert stock_print(model) != before
    assert stock_print(model) == before


def test_an_installed_portfolio_is_no_part_of_it(model: Model, tmp_path: Path) -> None:
    forwards = Forwards(model, tmp_path)
    before = fingerprint(model, forwards.installed)
    install(forwards, PACKED)
    assert run(model) == 100
    assert fingerprint(model, forwards.installed) == before
    forwards.revert()
    assert fingerprint(model, forwards.installed) == before


def test_beside_a_portfolio_a_weight_still_shows(model: Model, tmp_path: Path) -> None:
    forwards = Forwards(model, tmp_path)
    before = fingerprint(model, forwards.installed)
    install(forwards, PACKED)
    flip_a_bit(model)
    assert fingerprint(model, forwards.installed) != before


@pytest.mark.parametrize(
    "change", ["part[3] += 1", "part[[3, 9]] = part[[9, 3]]", "part[-1] ^= 128"]
)
def test_on_a_device_sums_move_with_a_bit_and_with_places(change: str) -> None:
    part = torch.arange(1, 100, dtype=torch.uint8)
    before = module._sums(part)
    exec(change, {"part": part})
    assert module._sums(part) != before


# --- a swap that is taken back --------------------------------------------------------------------


def state(model: Model) -> list[dict[str, Any]]:
    return [dict(m.__dict__) for m in model.modules()]


@pytest.mark.parametrize("error", [Fault("no"), KeyboardInterrupt(), SystemExit()])
def test_an_installing_that_raises_puts_everything_back(
    model: Model, tmp_path: Path, error: BaseException
) -> None:
    forwards = Forwards(model, tmp_path)
    install(forwards, TENFOLD)
    install(forwards, PACKED)
    before, files = state(model), sorted(tmp_path.glob("*.py"))
    loaded = forwards.bind("new", forwards.read([source(RAISES)]))
    with pytest.raises(type(error)), forwards.installing(loaded):
        raise error
    assert (run(model), state(model), sorted(tmp_path.glob("*.py"))) == (100, before, files)


def test_what_revert_would_restore_is_put_back_too(model: Model, tmp_path: Path) -> None:
    forwards = Forwards(model, tmp_path)
    install(forwards, "def scale(self, x):\n    return x * 3\n")
    install(forwards, TENFOLD)
    loaded = forwards.bind("new", forwards.read([source(RAISES)]))
    with pytest.raises(KeyError), forwards.installing(loaded):
        raise KeyError
    forwards.revert()
    assert run(model) == 9


def test_after_an_installing_that_raised_on_stock_there_is_nothing_to_revert_to(
    model: Model, tmp_path: Path
) -> None:
    forwards, before = Forwards(model, tmp_path), state(model)
    loaded = forwards.bind("new", forwards.read([source(PACKED)]))
    with pytest.raises(KeyError), forwards.installing(loaded):
        raise KeyError
    assert (state(model), forwards.previous, list(tmp_path.glob("*.py"))) == (before, None, [])


def test_a_module_that_the_engine_wraps_is_left_alone(model: Model, tmp_path: Path) -> None:
    wrapper = model.second.forward
    model.second.__dict__["forward"] = wrapper
    forwards = Forwards(model, tmp_path)
    with pytest.raises(Fault, match="itself wraps the forward of second; leave it alone"):
        forwards.bind("digest", forwards.read([source(TENFOLD)]))
    assert model.second.__dict__["forward"] is wrapper
    assert list(tmp_path.glob("*.py")) == []


def test_its_neighbour_may_be_replaced(model: Model, tmp_path: Path) -> None:
    model.second.__dict__["forward"] = model.second.forward
    forwards = Forwards(model, tmp_path)
    only_first = source(TENFOLD, (("path:first", "scale"),))
    forwards.install(forwards.bind("digest", forwards.read([only_first])))
    assert run(model) == 20


def test_a_forward_of_our_own_is_no_wrapper(model: Model, tmp_path: Path) -> None:
    forwards = Forwards(model, tmp_path)
    install(forwards, TENFOLD)
    install(forwards, PACKED)
    assert run(model) == 100


# --- faults that stock answers --------------------------------------------------------------------


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def guarded(model: Model, tmp_path: Path, told: list[str]) -> Forwards:
    """Faults are told and not raised."""
    return Forwards(model, tmp_path, lambda fault: told.append(str(fault)))


@pytest.mark.parametrize("what", ["KeyError('lost')", "SystemExit", "RuntimeError()"])
def test_stock_answers_the_call_that_raised(
    model: Model, guarded: Forwards, told: list[str], what: str
) -> None:
    install(guarded, RAISES.replace("KeyError('lost')", what))
    assert run(model) == 4
    assert told[0].startswith(f"first raised {what.partition('(')[0]}")


def test_stock_answers_all_later_calls_and_the_fault_is_told_once(
    model: Model, guarded: Forwards, told: list[str]
) -> None:
    install(guarded, "def scale(self, x):\n    CALLS.append(1)\n    raise KeyError\nCALLS = []\n")
    assert [run(model) for _ in range(3)] == [4, 4, 4]
    assert (len(told), guarded.calls.candidate) == (1, 1)


def test_stock_answers_other_modules_of_the_portfolio_as_well(
    model: Model, guarded: Forwards
) -> None:
    broken = source(RAISES, (("path:first", "scale"),))
    fine = source(TENFOLD, (("path:second", "scale"),))
    guarded.install(guarded.bind("digest", guarded.read([broken, fine])))
    assert run(model) == 4


def test_a_portfolio_at_fault_serves_no_step(model: Model, guarded: Forwards) -> None:
    install(guarded, RAISES)
    assert guarded.current.serves(1, 4)
    run(model)
    assert not guarded.current.serves(1, 4)


def test_the_next_portfolio_starts_without_the_fault(model: Model, guarded: Forwards) -> None:
    install(guarded, RAISES)
    run(model)
    install(guarded, TENFOLD)
    assert run(model) == 100


def test_giving_way_is_stock_with_nothing_to_revert_to(
    model: Model, guarded: Forwards, tmp_path: Path
) -> None:
    before = state(model)
    install(guarded, PACKED)
    install(guarded, RAISES)
    run(model)
    guarded.give_way()
    assert (state(model), guarded.previous, list(tmp_path.glob("*.py"))) == (before, None, [])
    assert _files(tmp_path) == []


def _files(folder: Path) -> list[str]:
    """Names of loaded modules that came from `folder`."""
    loaded = [(n, getattr(m, "__file__", None)) for n, m in list(sys.modules.items())]
    return [name for name, file in loaded if file and str(file).startswith(str(folder))]


def test_an_interrupt_is_no_fault(model: Model, guarded: Forwards, told: list[str]) -> None:
    install(guarded, RAISES.replace("KeyError('lost')", "KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert told == []


def test_a_fault_that_a_forward_raises_by_name_is_answered_by_stock_too(
    model: Model, guarded: Forwards
) -> None:
    text = "from engines.inside.forward import Fault\n" + RAISES.replace("KeyError", "Fault")
    install(guarded, text)
    assert run(model) == 4


def test_what_a_forward_pass_brought_runs_inside(model: Model, tmp_path: Path) -> None:
    depths: list[int] = []

    class Inside:
        def __enter__(self) -> None:
            depths.append(1)

        def __exit__(self, *_: object) -> None:
            depths.append(-1)

    forwards = Forwards(model, tmp_path, inside=Inside())
    install(forwards, PACKED)
    num_loading = len(depths)
    run(model)
    assert (num_loading, len(depths)) == (2 * 3, 2 * 5), "the file, prepare twice; two calls"
    assert sum(depths) == 0
