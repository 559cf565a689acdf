"""The demo, as `make demo` runs it."""

from __future__ import annotations

import os
import subprocess

import pytest

from sidecar.supervisor import our_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_search_that_cannot_win_ends_with_three_and_says_why() -> None:
    command = our_command("demo", "--agent", "no-effect", "--budget", "15s")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=dict(os.environ)
    )
    assert done.returncode == 3, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert "no winner, the old forward pass stays" in last
    assert " 0 failed, 0 cut" in done.stdout
