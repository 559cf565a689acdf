"""The engines that the demo can be played with: how one is started, and how long things take."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.embedded import SHIPPED_MODEL
from sidecar.config import ConfigError

VLLM_DEFAULT = Path(".venv-vllm/bin/vllm")  # what `make demo-vllm` builds
VLLM_ENVIRONMENT = (
    *("HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1"),
    *("VLLM_ENABLE_V1_MULTIPROCESSING=0", "OMP_NUM_THREADS=1"),  # for `uni` below
)
VLLM_FLAGS = """
--enforce-eager --distributed-executor-backend uni --kv-cache-memory-bytes 128M
--max-model-len 2048 --max-num-seqs 16 --max-num-batched-tokens 2048
--enable-prompt-tokens-details
"""


@dataclass(frozen=True, slots=True)
class Troupe:
    """One kind of engine. Whatever it is, it serves the model that Trimtab ships."""

    name: str
    baseline: str  # what the old forward pass is
    launch: Callable[[int], str]  # launch command for an engine on that CPU; it names no port
    search_budget: str
    search_s: float  # no search takes longer, its two engines' start included
    ready_s: float  # nor two engines that start at once
    grace_s: float


def troupe_named(name: str, vllm: Path | None) -> Troupe:
    """`embedded` or `vllm`; for the latter, `vllm` is its program. Raises `ConfigError`."""
    match name:
        case "embedded":
            return EMBEDDED
        case "vllm":
            return _vllm(_found(vllm))
    raise ConfigError(f"there is no engine {name!r} for the demo; write embedded or vllm")


EMBEDDED = Troupe(
    name="embedded",
    baseline="the embedded engine's own forward pass",
    launch=lambda cpu: f"trimtab engine embedded --num-threads 1 --cpu {cpu}",
    search_budget="65s",
    search_s=120.0,
    ready_s=120.0,
    grace_s=5.0,
)


def _vllm(program: str) -> Troupe:
    """Stock vLLM servers: primary and shadow, and the search's two beside them.

    All four stay up, since an idle one takes a hundredth of a core; 1.5 GB each. That is so because
    the worker runs within the engine's process (`uni`): one of its own would spin on shared memory
    for a second after each question, and the controller asks each second whether the shadow is
    well. Two cores are short only while servers start, which is importing: the search's two take a
    minute then, on the last core, and the primary keeps its own. What is measured has the last
    core to itself, as the shadow gets no request before the search is over.
    """
    return Troupe(
        name="vllm",
        baseline="stock vLLM with --enforce-eager; its compiler, which it uses by default, is not "
        "in this comparison (see bench/results/demo_vllm.md)",
        launch=lambda cpu: _vllm_line(program, cpu),
        search_budget="120s",
        search_s=420.0,
        ready_s=240.0,
        grace_s=20.0,
    )


def _vllm_line(program: str, cpu: int) -> str:
    """Without `taskset` the system chooses the core."""
    taskset = ("taskset", "-c", str(cpu)) if shutil.which("taskset") else ()
    return shlex.join(
        (
            *("trimtab", "engine", "vllm", "--"),
            *VLLM_ENVIRONMENT,
            *(*taskset, program, "serve", str(SHIPPED_MODEL)),
            *("--served-model-name", SHIPPED_MODEL.name, *VLLM_FLAGS.split()),
        )
    )


def _found(program: Path | None) -> str:
    wanted = program or (VLLM_DEFAULT if VLLM_DEFAULT.exists() else Path("vllm"))
    found = shutil.which(wanted)
    if found is None:
        raise ConfigError(
            f"{wanted} is no program; `make demo-vllm` builds an environment with vLLM for the "
            "CPU, or name yours as in --vllm /path/to/venv/bin/vllm"
        )
    return str(Path(found).absolute())
