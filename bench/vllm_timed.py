"""The worker's side of `bench.vllm_gpu`: an event in front of every step, with Trimtab or without.

Runs inside vLLM. Until the bench attaches, none of Trimtab's own code has run in the worker: that
is the stock engine, with one event a step more.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import torch

from engines.inside import wire
from engines.inside.vllm_worker import Extension


class Timed(Extension):
    """Mixed into vLLM's worker in the place of `Extension`."""

    def trimtab(self, request: bytes) -> bytes:
        """As `Extension`'s, and what begins with `bench_`."""
        message = wire.unpack(request)
        if not message["do"].startswith("bench_"):
            return super().trimtab(request)
        bench = self.__dict__.setdefault("_trimtab_bench", None) or _Bench(self)
        self.__dict__["_trimtab_bench"] = bench
        try:
            return wire.pack(getattr(bench, message["do"])(message))
        except Exception as e:
            return wire.pack({"error": "engine", "text": f"{type(e).__name__}: {e}"})


class _Bench:
    def __init__(self, worker: Any) -> None:
        self._worker, self._runner = worker, worker.model_runner
        self._on_device = worker.device.type == "cuda"
        self._stock = self._runner.execute_model
        self._marks: list[tuple[int, int, Any, Any, bool]] = []
        self._with_it = False
        self._is_on = False
        self._runner.execute_model = self._execute

    def _execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_on or not scheduler_output.total_num_scheduled_tokens:
            return self._stock(scheduler_output, *args, **kwargs)
        begun = self._now()
        out = self._stock(scheduler_output, *args, **kwargs)
        num_scheduled = scheduler_output.num_scheduled_tokens
        self._marks.append(
            (
                len(num_scheduled),
                scheduler_output.total_num_scheduled_tokens,
                begun,
                self._now(),
                self._with_it,
            )
        )
        return out

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def bench_start(self, message: wire.Message) -> wire.Message:
        """Forget the steps so far and record from here on."""
        self._marks.clear()
        self._is_on = True
        return {}

    def bench_take(self, message: wire.Message) -> wire.Message:
        """(requests, tokens, ms in it, ms to the next one's begin, with Trimtab?) of each step."""
        self._is_on = False
        if self._on_device:
            torch.cuda.synchronize()
        rows = []
        for mark, after in itertools.pairwise(self._marks):
            num_requests, num_tokens, begun, ended, with_it = mark
            rows.append(
                [num_requests, num_tokens, _ms(begun, ended), _ms(begun, after[2]), with_it]
            )
        self._marks.clear()
        return {"steps": rows}

    def bench_alternate(self, message: wire.Message) -> wire.Message:
        """From here on every other `steps` steps run without Trimtab: stock's graphs and code, no
        wrapper. 0: all with it."""
        self._inside = self._worker.__dict__["_trimtab_inside"]
        self._every, self._num_steps = message["steps"], 0
        self._runner.execute_model = self._alternate if self._every else self._inside._execute_model
        return {}

    def _alternate(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens or kwargs.get("dummy_run"):
            return self._execute(scheduler_output, *args, **kwargs)
        with_it = (self._num_steps // self._every) % 2 == 0
        if self._num_steps % self._every == 0 and self._inside._graphs.sizes:
            serial = self._inside._forwards.current.serial if with_it else 0
            self._inside._graphs.select(serial, self._inside._serves)
        if not with_it:
            self._inside._uncompiled.set(False)  # Trimtab leaves them until another kind of step
        self._num_steps += 1
        self._with_it = with_it
        if with_it:
            return self._inside._execute_model(scheduler_output, *args, **kwargs)
        return self._execute(scheduler_output, *args, **kwargs)

    def bench_sizes(self, message: wire.Message) -> wire.Message:
        """As if live traffic had used these graph sizes; an empty list stands for all."""
        graphs = self._worker.__dict__["_trimtab_inside"]._graphs
        graphs._seen = Counter(message["sizes"])
        return {"sizes": graphs.sizes}

    def bench_first(self, message: wire.Message) -> wire.Message:
        """Replay one decode step of each captured size under what is installed."""
        inside = self._worker.__dict__["_trimtab_inside"]
        sums = {}
        for size in message["sizes"]:
            with inside._running(size):
                hidden_states = inside._vllm.dummy_step(size, graph=True)
            sums[str(size)] = float(hidden_states.float().abs().sum())
        return {"sums": sums}

    def bench_memory(self, message: wire.Message) -> wire.Message:
        if not self._on_device:
            return {"gib": 0.0}
        free, total = torch.cuda.mem_get_info()
        return {"gib": (total - free) / 2**30}


def _ms(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return 1e3 * float(ended - begun)
    return float(begun.elapsed_time(ended))
