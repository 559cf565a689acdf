"""Hooks in made-up packages: what is said of one that is there, moved, changed or gone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.inside.vllm_hooks import HOOKS, Findings, Hook, main, probe_files, probe_live

Probe = Callable[..., Findings]  # (*hooks)
FILES = {
    "__init__.py": "__version__ = '0.40.1'",
    "_version.py": "__version__ = version = '0.40.1'",
    "engine.py": """
from typing import Literal
Mode = Literal["abort", "keep"]
class Engine:
    async def pause(self, *, mode: str, clear: bool = True) -> None: ...
    def run(self, step, **options): ...
def compiled(cls):
    def __call__(self, x):
        if self.off or x is None:
            return x
        self.count += 1
    cls.__call__ = __call__
""",
    "base.py": """
class Base:
    shared: int = 0
    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
    def model(self) -> int: return 1
""",
    "runners/__init__.py": "from .first import First as Runner",
    "runners/first.py": """
from fakellm.base import Base
try:
    import nowhere_to_be_found
except ImportError:
    pass
class First(Base):
    def start(self) -> None:
        self.graphs, self.pool = {}, 1
""",
    "broken.py": "def half(:\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / "fakellm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "fakellm"]:
        del sys.modules[name]


@pytest.fixture(params=["files", "live"])
def probe(request: pytest.FixtureRequest, site: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Both must say the same."""
    if request.param == "files":
        return lambda *hooks: probe_files(site, hooks)
    monkeypatch.syspath_prepend(site)
    return lambda *hooks: probe_live(hooks)


def hook(
    place: str,
    *,
    parameters: tuple[str, ...] = (),
    attributes: tuple[str, ...] = (),
    tests: tuple[str, ...] = (),
    strings: tuple[str, ...] = (),
    or_in: tuple[str, ...] = (),
    any_of: str = "",
    optional: bool = False,
) -> Hook:
    """`place` is `module:qualname`."""
    module, _, qualname = place.partition(":")
    return Hook(
        "group",
        f"fakellm.{module}",
        qualname,
        "swap",
        parameters,
        attributes,
        tests,
        strings,
        or_in,
        any_of,
        optional,
    )


def test_a_hook_that_is_there_is_not_missing(probe: Probe) -> None:
    found = probe(hook("engine:Engine.pause", parameters=("mode", "clear")))
    assert found.missing == ()
    assert found.version == "0.40.1"


@pytest.mark.parametrize("place", ["engine:Engine.stop", "engine:Motor", "motor:Engine"])
def test_a_missing_hook_is_named_with_what_it_is_for(probe: Probe, place: str) -> None:
    name = f"fakellm.{place.replace(':', '.')}"
    assert probe(hook(place)).missing == (f"{name} is missing; needed to swap",)


def test_a_missing_parameter_is_named(probe: Probe) -> None:
    found = probe(hook("engine:Engine.pause", parameters=("mode", "force", "wait")))
    assert found.missing == ("fakellm.engine.Engine.pause takes no force, wait; needed to swap",)


def test_keywords_take_any_parameter(probe: Probe) -> None:
    assert not probe(hook("engine:Engine.run", parameters=("step", "anything"))).missing


def test_attributes_are_found_in_methods_and_in_a_base_of_another_module(probe: Probe) -> None:
    names = ("graphs", "pool", "requests", "shared", "model")
    assert not probe(hook("runners.first:First", attributes=names)).missing
    found = probe(hook("runners.first:First", attributes=("pool", "keys")))
    assert found.missing == ("fakellm.runners.first.First has no keys; needed to swap",)


def test_a_method_of_a_base_is_found(probe: Probe) -> None:
    assert not probe(hook("runners.first:First.model")).missing


def test_a_name_is_found_where_it_is_exported_again(probe: Probe) -> None:
    assert not probe(hook("runners:Runner", attributes=("pool", "requests"))).missing


def test_a_function_within_a_function_tests_what_it_must(probe: Probe) -> None:
    assert not probe(hook("engine:compiled.__call__", tests=("self.off", "off"))).missing
    found = probe(hook("engine:compiled.__call__", tests=("self.count",)))
    assert found.missing == (
        "fakellm.engine.compiled.__call__ does not test self.count; needed to swap",
    )


def test_a_choice_that_went_is_named(probe: Probe) -> None:
    found = probe(hook("engine:Mode", strings=("keep", "wait")))
    assert found.missing == ("fakellm.engine.Mode does not know wait; needed to swap",)


def test_what_moved_is_found_where_it_was(probe: Probe) -> None:
    found = probe(hook("motor:Engine", or_in=("fakellm.engine",)))
    assert found.missing == found.absent_options == ()
    assert found.verdicts[0].name == "fakellm.engine.Engine"


def test_one_whole_alternative_is_enough(probe: Probe) -> None:
    found = probe(
        hook("runners.first:First", any_of="V1"),
        hook("runners.first:First.model", any_of="V1"),
        hook("runners.first:First.start", any_of="V2"),
        hook("runners.second:Second", any_of="V2"),
    )
    assert found.missing == ()
    assert found.absent_options == (
        "fakellm.runners.second.Second is missing; needed to swap in V2",
    )


def test_two_half_alternatives_are_not(probe: Probe) -> None:
    found = probe(
        hook("runners.first:First", any_of="V1"),
        hook("runners.first:First.stop", any_of="V1"),
        hook("runners.second:Second", any_of="V2"),
    )
    assert len(found.missing) == 2


def test_an_option_is_never_missing(probe: Probe) -> None:
    found = probe(hook("engine:Counter", optional=True))
    assert found.missing == ()
    assert found.absent_options == ("fakellm.engine.Counter is missing; needed to swap",)


def test_a_file_that_does_not_parse_is_named_and_the_rest_is_still_read(probe: Probe) -> None:
    found = probe(hook("broken:half"), hook("engine:Engine"))
    assert [bool(v.lack) for v in found.verdicts] == [True, False]
    assert "broken.py" in found.missing[0]
    assert "line 1" in found.missing[0]


def test_an_old_version_is_named_only_when_something_is_missing(site: Path) -> None:
    (site / "fakellm" / "_version.py").write_text("__version__ = version = '0.25.1'")
    assert not probe_files(site, [hook("engine:Engine")]).missing
    first, _ = probe_files(site, [hook("engine:Motor")]).missing
    assert first == "vLLM 0.25.1 is older than 0.26, the first release that Trimtab supports"


def test_the_version_is_the_metadata_folder_s_where_the_package_says_none(site: Path) -> None:
    (site / "fakellm" / "_version.py").unlink()
    (site / "fakellm_cpu-0.31.0.dist-info").mkdir()
    assert probe_files(site, [hook("engine:Engine")]).version == "0.31.0"


def test_files_are_read_without_being_run(site: Path) -> None:
    (site / "fakellm" / "loud.py").write_text("class Loud: ...\nraise SystemExit('it ran')")
    assert not probe_files(site, [hook("loud:Loud")]).missing
    assert "fakellm" not in sys.modules


def test_a_module_that_raises_when_imported_is_a_missing_hook(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "fakellm" / "sour.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(site)
    (line,) = probe_live([hook("sour:Sour")]).missing
    assert line.startswith("fakellm.sour.Sour cannot be imported (No module named")


def test_without_the_package_that_is_all_there_is_to_say(tmp_path: Path) -> None:
    assert probe_files(tmp_path).missing == (f"{tmp_path} holds no folder vllm",)
    (line,) = probe_live([Hook("g", "nowhere_to_be_found.x", "X", "swap")]).missing
    assert line.startswith("nowhere_to_be_found cannot be imported")


def test_the_command_prints_every_hook_and_fails_when_one_is_missing(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "vllm").mkdir()
    assert main([str(site)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("lacks") == len(HOOKS)
    assert "missing: vllm.config.ParallelConfig is missing; needed to" in printed
    assert main([]) == 2


def test_the_table_names_no_hook_twice_and_nothing_outside_of_vllm() -> None:
    assert len({(h.module, h.qualname) for h in HOOKS}) == len(HOOKS)
    assert {m.partition(".")[0] for h in HOOKS for m in (h.module, *h.or_in)} == {"vllm"}
