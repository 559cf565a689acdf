"""The two engines of a search: one to try things on, and the float64 one that knows the truth."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from compiler.launch import LaunchPlan
from engines.engine import EngineGone
from engines.remote import RemoteEngine, control_address
from sidecar.supervisor import EngineProcess, ProcessFailed, as_command, free_port

TRIAL_KEY = "TRIMTAB_TRIAL_KEY"
READY_S = 180.0


class TuningEngines:
    """Keeps `compiler.search.EngineSupply`. Blocks. Use it as a context: it ends its processes."""

    def __init__(self, plan: LaunchPlan, logs: Path) -> None:
        """Starts both and waits until they are ready. Raises `ProcessFailed`."""
        self.trial_key = secrets.token_bytes(32)
        self._plan, self._logs = plan, logs
        reference = plan.reference(free_port())
        self._reference = self._start(reference, "reference", {})
        self._tuning = self._start_tuning()
        try:
            self._reference.wait_ready(READY_S)
            self._tuning.wait_ready(READY_S)
        except ProcessFailed:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tuning_address(self) -> str:
        return control_address(self._tuning.url)

    @property
    def reference_address(self) -> str:
        return control_address(self._reference.url)

    @property
    def start_to_ready_s(self) -> float:
        """Of the present tuning engine: what a restart for each idea would cost."""
        return self._tuning.start_to_ready_s or 0.0

    def source(self, target: str) -> str:
        engine = RemoteEngine(self.tuning_address)
        try:
            return engine.source(target)
        finally:
            engine.close()

    def recycle(self) -> str:
        """A fresh tuning engine's address; the old one is gone. Raises `EngineGone`."""
        _end(self._tuning)
        self._tuning = self._start_tuning()
        try:
            self._tuning.wait_ready(READY_S)
        except ProcessFailed as e:
            raise EngineGone(str(e)) from e
        return self.tuning_address

    def close(self) -> None:
        for process in (self._tuning, self._reference):
            _end(process)

    def _start_tuning(self) -> EngineProcess:
        secret = {TRIAL_KEY: self.trial_key.hex()}
        return self._start(self._plan.tuning(free_port()), "tuning", secret)

    def _start(self, plan: LaunchPlan, name: str, environment: Mapping[str, str]) -> EngineProcess:
        log_file = self._logs / f"{name}.log"
        return EngineProcess(as_command(plan.words), plan.url, log_file, environment)


def _end(process: EngineProcess) -> None:
    process.close()
    Path(control_address(process.url).removeprefix("unix:")).unlink(missing_ok=True)  # if killed
