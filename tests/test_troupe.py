"""Which engines the demo is played with."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler import launch
from sidecar.config import ConfigError
from sidecar.troupe import VLLM_DEFAULT, troupe_named


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path.absolute()


def test_each_can_be_launched_by_a_search_too() -> None:
    for troupe in (troupe_named("embedded", None), troupe_named("vllm", program(Path("v/vllm")))):
        plan = launch.parse(troupe.launch(1))
        assert plan.tuning(9001).url == "http://127.0.0.1:9001"
        assert launch.parse(plan.line) == plan


def test_vllm_is_the_one_that_make_builds() -> None:
    built = program(VLLM_DEFAULT)
    assert f"{built} serve" in troupe_named("vllm", None).launch(0)


def test_else_it_is_the_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path / "bin" / "vllm")
    monkeypatch.setenv("PATH", str(found.parent))
    assert f"{found} serve" in troupe_named("vllm", None).launch(0)


@pytest.mark.parametrize("vllm", [None, Path("no/such/vllm")])
def test_without_any_the_way_out_is_said(
    vllm: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"make demo-vllm.*--vllm /path/to/venv/bin/vllm"):
        troupe_named("vllm", vllm)


def test_another_engine_is_not_known() -> None:
    with pytest.raises(ConfigError, match="write embedded or vllm"):
        troupe_named("sglang", None)
