"""The two engines of a search: one to try things on, and the exact one that knows the truth."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from compiler.launch import LaunchPlan
from engines.engine import EngineGone
from engines.host import socket_path
from engines.remote import RemoteEngine, control_address
from sidecar.supervisor import EngineProcess, ProcessFailed, as_command, free_port

TRIAL_KEY = "TRIMTAB_TRIAL_KEY"


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
            self._reference.wait_ready(plan.ready_s)
            self._tuning.wait_ready(plan.ready_s)
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
            self._tuning.wait_ready(self._plan.ready_s)
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
        command, log_file = as_command(plan.words), self._logs / f"{name}.log"
        control = socket_path(control_address(plan.url))
        return EngineProcess(command, plan.url, log_file, environment, control, plan.grace_s)


def _end(process: EngineProcess) -> None:
    process.close()
    socket_path(control_address(process.url)).unlink(missing_ok=True)  # if it was killed
