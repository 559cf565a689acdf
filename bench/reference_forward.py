"""Is the stock forward fair? Ours beside transformers', same weights, same work, one thread.

`python -m bench.reference_forward [--out FILE]`. Prefill of 128 tokens and one decode step behind
them, batch 1 and 8, float32, logits of the last token only. Interleaved, medians with half the
distance between the quartiles. transformers runs twice: its plain experts ("eager") and the
implementation it picks by itself.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.embedded.blocks import BlockPool
from engines.embedded.runner import Runner
from engines.embedded.scheduler import Request, SamplingParams, Scheduler
from engines.embedded.weights import SHIPPED_MODEL, load_model

PROMPT, REPEATS = 128, 40


class Ours:
    """The embedded engine's scheduler and runner, without its thread."""

    def __init__(self) -> None:
        self._runner = Runner(load_model(SHIPPED_MODEL, torch.float32), 256, 16)

    def start(self, ids: torch.Tensor) -> None:
        pool = BlockPool(256, 16)
        self._scheduler = Scheduler(pool, 16, 2048)
        for i, row in enumerate(ids.tolist()):
            self._scheduler.add(Request(str(i), tuple(row), SamplingParams(), lambda e: None))

    def step(self, next_ids: torch.Tensor | None) -> torch.Tensor:
        if next_ids is not None:
            for request, token in zip(self._scheduler.running, next_ids.tolist(), strict=True):
                request.output.append(token)
        works = self._scheduler.next_step()
        hidden_states = self._runner.run(works)
        ends = np.cumsum([w.num_new for w in works]) - 1
        for work in works:
            self._scheduler.computed(work)
        return self._runner.logits(hidden_states[ends])


class Theirs:
    """`transformers`, with a dynamic cache."""

    def __init__(self, experts: str | None) -> None:
        from transformers import AutoModelForCausalLM

        extra = {} if experts is None else {"experts_implementation": experts}
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            SHIPPED_MODEL, dtype=torch.float32, **extra
        ).eval()
        self.experts = self._model.config._experts_implementation

    def start(self, ids: torch.Tensor) -> None:
        self._cache, self._ids = None, ids

    @torch.inference_mode()
    def step(self, next_ids: torch.Tensor | None) -> torch.Tensor:
        ids = self._ids if next_ids is None else next_ids[:, None]
        out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def timed(step: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    out = step()
    return time.perf_counter() - began, out


def compare(batch: int, sides: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of (prefill, decode) by side. Raises `AssertionError` when logits differ."""
    generator = torch.Generator().manual_seed(batch)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in sides}
    for repeat in range(REPEATS + 3):
        ids = torch.randint(4, 4096, (batch, PROMPT), generator=generator)
        first: dict[str, torch.Tensor] = {}
        for name, side in sides.items():
            side.start(ids)
            prefill_s, logits = timed(lambda side=side: side.step(None))  # type: ignore[misc]
            token = logits.argmax(-1)
            decode_s, last = timed(lambda side=side, token=token: side.step(token))  # type: ignore[misc]
            first[name] = last
            if repeat >= 3:
                times[name][0].append(prefill_s)
                times[name][1].append(decode_s)
        ours, *others = first.values()
        assert all(torch.allclose(ours, o, atol=1e-3) for o in others)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    sides = {"ours": Ours(), "eager": Theirs("eager"), "default": Theirs(None)}
    lines = [
        "# The stock forward beside transformers'",
        "",
        f"`python -m bench.reference_forward`, {datetime.date.today()}, "
        f"{platform.machine()}, one thread of 2 shared cores, torch {torch.__version__}; "
        f"transformers' own choice of experts is `{sides['default'].experts}`. "
        f"Median ms ± half the distance between the quartiles, {REPEATS} repeats, interleaved.",
        "",
        "| batch | step | ours | transformers, eager experts | transformers, its default | "
        "ours / eager | ours / default |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in (1, 8):
        times = compare(batch, sides)
        for i, step in enumerate(("prefill 128", "decode")):
            cells, medians = [], []
            for name in sides:
                low, middle, high = np.percentile(np.array(times[name][i]) * 1e3, [25, 50, 75])
                cells.append(f"{middle:.2f} ± {(high - low) / 2:.2f}")
                medians.append(middle)
            ratios = [f"{medians[0] / m:.2f}" for m in medians[1:]]
            lines.append(f"| {batch} | {step} | {' | '.join(cells)} | {' | '.join(ratios)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
