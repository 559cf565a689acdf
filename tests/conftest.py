"""What every test shares: one torch thread, and no blocking call on an event loop. Tests with a
real vLLM run where REAL_VLLM_ENV names its environment, as `make test-vllm` does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two cores, many engines


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[BlockBuster]:
    """A blocking call made by our code on an event loop fails the test that made it."""
    ours = ["sidecar", "profiler", "drift", "compiler", "engines"]
    with blockbuster_ctx(scanned_modules=ours) as blockbuster:
        yield blockbuster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("REAL_VLLM_ENV"):
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="REAL_VLLM_ENV is not set"))
