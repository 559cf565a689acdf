"""The demo with stock vLLM servers, as `make demo-vllm` runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sidecar.supervisor import our_command

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    vllm = Path(environment.pop("REAL_VLLM_ENV")) / "bin" / "vllm"  # no setting of Trimtab's
    command = our_command("demo", "--engine", "vllm", "--vllm", str(vllm), *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=840, check=False, env=environment
    )


def test_a_winner_goes_live_on_vllm_and_is_taken_back() -> None:
    done = demo()
    said = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    assert "went live and was taken back; nothing failed" in done.stdout.splitlines()[-1]
    assert " 0 failed, 0 cut" in done.stdout


def test_a_search_that_cannot_win_on_vllm_ends_with_three() -> None:
    done = demo("--agent", "no-effect", "--budget", "30s")
    assert done.returncode == 3, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "no winner, the old forward pass stays" in done.stdout.splitlines()[-1]
    assert " 0 failed, 0 cut" in done.stdout
