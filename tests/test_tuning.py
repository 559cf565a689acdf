"""The engines of a search, with processes that answer for health and open a socket late."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from compiler.launch import LaunchPlan
from engines.engine import EngineGone
from engines.host import socket_path
from engines.remote import control_address
from sidecar.supervisor import ProcessFailed
from sidecar.tuning import TRIAL_KEY, TuningEngines

ENGINE = f"""
import http.server, os, pathlib, sys, threading
port, kind, control = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
def opened():
    control.parent.mkdir(parents=True, exist_ok=True)
    control.write_text(kind + " " + os.environ.get({TRIAL_KEY!r}, "no key"))
threading.Timer(0.5, opened).start()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class FakePlan:
    """An engine that is healthy half a second before its control socket is there."""

    port: int = 0
    kind: str = "user's"
    code: str = ENGINE
    ready_s: float = 20.0
    grace_s: float = 5.0

    @property
    def words(self) -> tuple[str, ...]:
        control = str(socket_path(control_address(self.url)))
        return sys.executable, "-c", self.code, str(self.port), self.kind, control

    @property
    def line(self) -> str:
        return " ".join(self.words)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tuning(self, port: int) -> LaunchPlan:
        return replace(self, port=port, kind="tuning")

    def reference(self, port: int) -> LaunchPlan:
        return replace(self, port=port, kind="reference")


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def said(address: str) -> str:
    return Path(address.removeprefix("unix:")).read_text()


def test_engines_are_ready_when_they_can_be_controlled(tmp_path: Path) -> None:
    with TuningEngines(FakePlan(), tmp_path) as engines:
        assert said(engines.reference_address) == "reference no key"
        assert said(engines.tuning_address) == f"tuning {engines.trial_key.hex()}"
        assert engines.start_to_ready_s > 0.5


def test_a_recycled_engine_is_another_one(tmp_path: Path) -> None:
    with TuningEngines(FakePlan(), tmp_path) as engines:
        before = engines.tuning_address
        assert engines.recycle() == engines.tuning_address != before
        assert not Path(before.removeprefix("unix:")).exists()


def test_an_engine_without_control_is_not_ready(tmp_path: Path) -> None:
    mute = FakePlan(code=ENGINE.replace("0.5, opened", "60.0, opened"), ready_s=1.5)
    with pytest.raises(ProcessFailed, match=r"not ready within 1\.5 s"):
        TuningEngines(mute, tmp_path)


def test_what_cannot_be_started_again_is_gone(tmp_path: Path) -> None:
    with TuningEngines(FakePlan(), tmp_path) as engines:
        engines._plan = FakePlan(code="import sys; sys.exit('no memory')")
        with pytest.raises(EngineGone, match="no memory"):
            engines.recycle()
