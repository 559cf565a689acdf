"""Source to callable: guards, ORIG, faults, and a module that is left as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.inside.forward import Fault, Forwards
from engines.inside.source import ForwardPass, Guard
from engines.inside.step import step


class Scale(nn.Module):
    """Stock: twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


TARGET = (("cls:Scale", "scale"),)
TENFOLD = "def scale(self, x):\n    return x * 10\n"
THROUGH_ORIG = "def scale(self, x):\n    return ORIG(self, x) + 1\n"
RAISES = "def scale(self, x):\n    raise KeyError('lost')\n"
BUFFERED = (
    "def prepare(m):\n    m.register_buffer('factor', torch.tensor(10.0), persistent=False)\n"
    "def scale(self, x):\n    return x * self.factor\n"
)


@pytest.fixture
def forwards(tmp_path: Path) -> Forwards:
    return Forwards(Model(), tmp_path)


def source(
    text: str, low: int = 1, high: int = 1 << 30, targets: tuple[tuple[str, str], ...] = TARGET
) -> ForwardPass:
    return ForwardPass("import torch\n" + text, targets, Guard(low, high), "ab" * 32)


def install(forwards: Forwards, *sources: ForwardPass) -> None:
    forwards.install(forwards.bind("digest", forwards.read(sources)))


def run(forwards: Forwards, num_rows: int = 1) -> float:
    """The model's answer to ones: 4 when stock runs."""
    model = next(iter(forwards.find("path:")))
    return float(model(torch.ones(num_rows, 1))[0, 0])


def test_the_first_whose_guard_fits_serves(forwards: Forwards) -> None:
    install(forwards, source(TENFOLD, 1, 2), source(THROUGH_ORIG, 1, 4))
    assert [run(forwards, n) for n in (1, 2, 3, 4, 5)] == [100, 100, 7, 7, 4]


def test_a_path_chooses_one_module(forwards: Forwards) -> None:
    install(forwards, source(TENFOLD, targets=(("path:sec*", "scale"),)))
    assert run(forwards) == 20


def test_orig_is_stock_and_never_the_forward_before(forwards: Forwards) -> None:
    install(forwards, source(TENFOLD))
    install(forwards, source(THROUGH_ORIG))
    assert run(forwards) == 7


def test_calls_are_counted_within_the_guard_only(forwards: Forwards) -> None:
    install(forwards, source(THROUGH_ORIG, 1, 1))
    run(forwards, 1)
    run(forwards, 2)
    assert (forwards.calls.candidate, forwards.calls.orig) == (2, 2)


def test_a_fault_names_the_module_and_the_error(forwards: Forwards) -> None:
    install(forwards, source(RAISES, targets=(("path:second", "scale"),)))
    with pytest.raises(Fault, match="second raised KeyError: 'lost'"):
        run(forwards)


def test_leaving_the_process_is_a_fault_like_any_other(forwards: Forwards) -> None:
    install(forwards, source("def scale(self, x):\n    raise SystemExit\n"))
    with pytest.raises(Fault, match="first raised SystemExit"):
        run(forwards)


def test_arguments_by_name_reach_the_forward(forwards: Forwards) -> None:
    install(forwards, source(TENFOLD))
    module = next(iter(forwards.find("path:first")))
    assert module(x=torch.ones(1, 1)) == 10


def test_a_buffer_of_prepare_goes_with_its_portfolio(forwards: Forwards) -> None:
    module = next(iter(forwards.find("path:first")))
    install(forwards, source(BUFFERED))
    assert run(forwards) == 100
    forwards.revert()
    assert not hasattr(module, "factor")
    assert module.state_dict() == {}


def test_prepare_may_not_replace_what_the_module_has(forwards: Forwards) -> None:
    module = next(iter(forwards.find("path:first")))
    text = "def prepare(m):\n    m.training = 3\n" + TENFOLD
    with pytest.raises(Fault, match="sets 'training' on first, which is taken"):
        forwards.bind("digest", forwards.read([source(text)]))
    assert module.training is True


def test_loading_changes_nothing_until_the_flip(forwards: Forwards) -> None:
    loaded = forwards.bind("digest", forwards.read([source(BUFFERED)]))
    assert run(forwards) == 4
    forwards.install(loaded)
    assert run(forwards) == 100


def test_revert_goes_back_one_level_and_no_further(forwards: Forwards) -> None:
    install(forwards, source(TENFOLD))
    install(forwards, source(THROUGH_ORIG))
    forwards.revert()
    assert run(forwards) == 100
    with pytest.raises(Fault, match="nothing to revert to"):
        forwards.revert()


def test_only_what_can_run_again_stays_resident(forwards: Forwards, tmp_path: Path) -> None:
    before = set(sys.modules)
    for _ in range(5):
        install(forwards, source(TENFOLD))
    assert len(list(tmp_path.glob("*.py"))) == len(set(sys.modules) - before) == 2


def test_a_source_that_cannot_be_loaded_leaves_nothing(forwards: Forwards, tmp_path: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(Fault, match="loading it raised ModuleNotFoundError"):
        forwards.bind(
            "digest", forwards.read([source(TENFOLD), source("import nothing_of_this_name\n")])
        )
    assert (set(sys.modules) - before, list(tmp_path.glob("*.py"))) == (set(), [])


def test_there_is_no_step_outside_of_one() -> None:
    with pytest.raises(RuntimeError, match="no step is running"):
        step()
