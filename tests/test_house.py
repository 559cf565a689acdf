"""The house itself: import names are ours, the committed gRPC code is what its .proto says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from protos.__main__ import generate

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["sidecar", "profiler", "drift", "compiler", "engines", "protos"])
def test_each_import_name_is_ours(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / name


def test_the_committed_grpc_code_is_what_its_proto_says(tmp_path: Path) -> None:
    generate(tmp_path)
    made = sorted((tmp_path / "protos").iterdir())
    assert len(made) == 12
    for path in made:
        assert path.read_text() == (ROOT / "protos" / path.name).read_text(), path.name


def test_what_runs_in_a_foreign_worker_needs_nothing_of_ours() -> None:
    for path in (ROOT / "engines" / "inside").glob("*.py"):
        for package in ("profiler", "drift", "compiler", "sidecar", "protos", "engines.engine"):
            assert f"import {package}" not in path.read_text()
            assert f"from {package}" not in path.read_text()
