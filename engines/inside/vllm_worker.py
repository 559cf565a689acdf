"""What a stock vLLM worker becomes an engine by: `--worker-extension-cls` names `Extension`.

vLLM mixes the class into its worker, where one method answers every request of ours between two
steps. Nothing of vLLM is patched: modules of the model get a `forward` of their own beside their
class's, the runner an `execute_model` that says how many tokens a step has.

**Compiled models** keep their compiled code. A step that a portfolio serves runs the model
uncompiled (vLLM's own `do_not_compile` switch) and, where vLLM has full CUDA graphs, from graphs
captured under the portfolio; every other step runs what stock vLLM runs. So an engine without a
portfolio answers as the stock engine does, bit for bit.

**Faults.** A forward that raises or hangs in Python is answered by stock in the same step, and the
server is told, which takes the portfolio back. On several ranks the others may meanwhile wait in a
collective; and no signal reaches a hang inside a kernel. Both are for whoever watches from outside.
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.inside import vllm_hooks, vllm_view, wire
from engines.inside.alarm import Alarm
from engines.inside.fingerprint import fingerprint
from engines.inside.forward import Fault, Forwards, as_array
from engines.inside.source import CandidateError, ForwardPass, Portfolio, Scope, sign
from engines.inside.step import running
from engines.inside.vllm_graphs import Graphs
from engines.inside.vllm_replay import Replayer, again
from engines.inside.vllm_routed import Routed
from engines.inside.vllm_runner import runner_of
from engines.inside.vllm_uncompiled import Uncompiled

STEP_DEADLINE = "TRIMTAB_STEP_DEADLINE_S"  # of a live step under a portfolio
SAMPLE_EVERY = 8  # live steps on a device, where the host's microseconds are the engine's
KEPT_STEPS = 4096
SMOKE_TOKENS = 16


class Extension:
    """Mixed into vLLM's worker, whose own names it must not touch."""

    def trimtab(self, request: bytes) -> bytes:
        """Answer one `wire` message. Never raises: an exception here could end the engine."""
        try:
            inside = self.__dict__.get("_trimtab_inside")
            if inside is None:
                inside = self.__dict__["_trimtab_inside"] = Inside(self)
            message = wire.unpack(request)
            reply = inside.answer(message)
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            reply = {"error": _kind(e), "text": _text(e)}
        return wire.pack(reply)


def _kind(e: BaseException) -> str:
    if isinstance(e, Fault | CandidateError):
        return "candidate"
    return "permission" if isinstance(e, PermissionError) else "engine"


def _text(e: BaseException) -> str:
    return (
        str(e)
        if isinstance(e, Fault | CandidateError | PermissionError)
        else f"{type(e).__name__}: {e}"
    )


class Inside:
    """The engine within one worker. Belongs to the worker's main thread."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._runner = worker, worker.model_runner
        self._version = _check_hooks(hasattr(self._runner, "req_states"))
        self._model: torch.nn.Module = self._runner.get_model()
        self._files = tempfile.TemporaryDirectory(prefix="trimtab-forward-")
        self._alarm = Alarm()
        self._forwards = Forwards(
            self._model, Path(self._files.name), self._faulted, self._alarm.inside
        )
        self._uncompiled = Uncompiled(self._model, worker.vllm_config)
        self._vllm = runner_of(worker)
        self._graphs = Graphs(self._vllm, self._running, self._forwards.calls)
        self._routed = Routed(
            self._model, int(os.environ.get(wire.EXPERT_COUNTS, "0")), self._vllm.max_num_tokens
        )
        self._replayer = Replayer(self._vllm)
        self._finite = Finite(worker.device)
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._num_steps = 0
        self._sample_every = SAMPLE_EVERY if worker.device.type == "cuda" else 1
        self._is_quiet = False  # a replay or a smoke run: no live step
        self._is_cut = False  # only the first layers run, which is nothing that was compiled
        self._step_deadline_s = float(os.environ.get(STEP_DEADLINE, "20"))
        self._swap_id: int | None = None  # the last one that this rank took
        self._key, self._scope = b"", Scope.SERVE
        self._execute = self._runner.execute_model
        self._runner.execute_model = self._execute_model

    def answer(self, message: Mapping[str, Any]) -> wire.Message:
        """One operation by name. Raises what `Extension` turns into a reply."""
        operation = OPERATIONS[message["do"]]
        if message["do"] != "undo":
            self._forwards.settle()
        with self._alarm.within(message["deadline_s"]):
            return {**operation(self, message), "num_live_steps": self._num_steps}

    # --- steps ------------------------------------------------------------------------------------

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the runner's own, for every step that is no dummy. On a device most steps of
        stock pass through: a host that is late is time lost."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if not num_tokens or kwargs.get("dummy_run"):
            return self._execute(scheduler_output, *args, **kwargs)
        if self._is_quiet:
            return self._quiet_step(scheduler_output, *args, **kwargs)
        self._num_steps += 1
        is_due = self._routed.is_due(self._num_steps)
        is_sampled = is_due or self._num_steps % self._sample_every == 0
        if not is_sampled and not self._forwards.current.bounds:
            return self._execute(scheduler_output, *args, **kwargs)
        step = Step(scheduler_output, self._worker.device) if is_sampled else None
        if step is not None:
            self._steps.append(step)
        if is_due:
            out, load = self._counted_step(scheduler_output, *args, **kwargs)
        else:
            out, load = self._plain_step(scheduler_output, *args, **kwargs), None
        if step is not None:
            step.end(load)
        return out

    def _quiet_step(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a replay."""
        self._prepare_graphs(scheduler_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        with self._running(num_tokens):
            out = self._execute(scheduler_output, *args, **kwargs)
        self._finite.note(self._runner, num_tokens)
        return out

    def _plain_step(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with self._deadline():
            self._prepare_graphs(scheduler_output)
            return self._live_step(scheduler_output, *args, **kwargs)

    def _counted_step(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Its output, and the experts' counts."""
        num_tokens, from_graph = scheduler_output.total_num_scheduled_tokens, False
        self._routed.start(num_tokens)
        try:
            with self._deadline():
                from_graph = self._prepare_graphs(scheduler_output, counted=True)
                self._routed.start(num_tokens)  # again: a capture counts its warm-up
                with contextlib.nullcontext() if from_graph else self._vllm.ungraphed():
                    out = self._live_step(scheduler_output, *args, **kwargs)
        finally:
            self._graphs.after_counted()
            load = self._routed.take(from_graph)
        return out, load

    def _prepare_graphs(self, scheduler_output: Any, counted: bool = False) -> bool:
        """Those of what answers this step. Whether it replays one that holds the counters."""
        if self._forwards.current.faults:
            self._graphs.fall_back()
        return self._graphs.before_step(scheduler_output.num_scheduled_tokens, counted)

    def _deadline(self) -> contextlib.AbstractContextManager[None]:
        """Of a live step; stock's cost nothing."""
        if not self._forwards.current.bounds:
            return contextlib.nullcontext()
        return self._alarm.within(self._step_deadline_s)

    def _live_step(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """What breaks under a portfolio is its fault, wherever: a wrong shape shows only later, in
        the stock forward behind it. Stock then answers the same step."""
        current = self._forwards.current
        if not current.bounds:
            return self._execute(scheduler_output, *args, **kwargs)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self._uncompiled.set(self._serves(num_tokens, num_tokens))
        try:
            with running(num_tokens, vllm_view.view_of(self._runner, num_tokens)):
                out = self._execute(scheduler_output, *args, **kwargs)
            self._finite.note(self._runner, num_tokens)
            return out
        except Exception as e:
            if current.faults or not self._serves(num_tokens, num_tokens):
                raise
            fault = Fault(f"a step under it raised {type(e).__name__}: {e}")
            current.faults.append(fault)
            self._faulted(fault)
            self._vllm.recover()
            self._graphs.fall_back()
            self._uncompiled.set(False)
            return self._execute(again(scheduler_output), *args, **kwargs)

    @contextlib.contextmanager
    def _running(self, num_tokens: int) -> Iterator[None]:
        """A step of so many scheduled tokens, compiled or not, with what it may be asked."""
        view = vllm_view.view_of(self._runner, num_tokens)
        is_uncompiled = self._is_cut or self._serves(num_tokens, num_tokens)
        with running(num_tokens, view), self._uncompiled(is_uncompiled):
            yield

    def _serves(self, low: int, high: int) -> bool:
        """Whether every step of `low` to `high` tokens runs some forward of the portfolio."""
        return self._forwards.current.serves(low, high)

    # --- faults -----------------------------------------------------------------------------------

    def _faulted(self, fault: Fault) -> None:
        """Stock answers from here on, in the same step; the server takes the portfolio back."""
        if not self._is_quiet:
            note = {"do": "fault", "digest": self._forwards.current.digest, "text": str(fault)}
            threading.Thread(target=_tell, args=(note,), daemon=True).start()

    def _give_way(self, message: Mapping[str, Any]) -> wire.Message:
        """Stock runs: what ran has raised, on this rank or another."""
        current = self._forwards.current
        if not current.bounds or current.digest != message["digest"]:
            return self._swapped(time.monotonic(), 0.0)
        started_s = time.monotonic()
        self._forwards.give_way()
        self._select()
        self._keep_graphs()
        return self._swapped(started_s, 0.0)

    # --- operations -------------------------------------------------------------------------------

    def _attach(self, message: Mapping[str, Any]) -> wire.Message:
        """Take the key that portfolios are signed with. The first one stays."""
        key, scope = bytes(message["key"]), Scope(message["scope"])
        if self._key and not (hmac.compare_digest(self._key, key) and scope is self._scope):
            raise PermissionError("this engine has been given another key already")
        if not self._key:
            self._warm_up()
        self._key, self._scope = key, scope
        return self._info(message)

    def _warm_up(self) -> None:
        """The first swap must not pay for kernels that eager mode loads when they first run."""
        if self._uncompiled:
            with self._quiet(), self._uncompiled():
                for num_tokens in (SMOKE_TOKENS, 1):
                    self._vllm.dummy_step(num_tokens)

    def _info(self, message: Mapping[str, Any]) -> wire.Message:
        config, previous = self._worker.model_config, self._forwards.previous
        return {
            "model": str(getattr(config, "model", "")),
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": self._worker.device.type,
            "num_layers": config.hf_text_config.num_hidden_layers,
            "vocab_size": config.get_vocab_size(),
            "max_model_len": config.max_model_len,
            "digest": self._forwards.current.digest,
            "previous_digest": None if previous is None else previous.digest,
            "has_graphs": self._graphs.sizes,
            "compiled": bool(self._uncompiled),
            "runner": type(self._runner).__module__,
            "counts_experts": self._routed.num_layers,
            "pid": os.getpid(),
            "version": self._version,
            "modules": [
                [path, type(m).__name__, sum(p.nbytes for p in m.parameters())]
                for path, m in self._model.named_modules()
                if path
            ],
        }

    def _source(self, message: Mapping[str, Any]) -> wire.Message:
        for module in self._forwards.find(message["target"]):
            return {"source": inspect.getsource(type(module))}
        raise CandidateError(f"no module of this model matches {message['target']!r}")

    def _swap(self, message: Mapping[str, Any]) -> wire.Message:
        """Load, bind, install, capture, try. On a failure everything is as it was."""
        portfolio = Portfolio(tuple(ForwardPass.from_source(s) for s in message["sources"]))
        self._check(portfolio, message["signature"])
        started_s = time.monotonic()
        files = self._forwards.read(portfolio.forwards)
        load_s = time.monotonic() - started_s
        started_s = time.monotonic()
        loaded = self._forwards.bind(portfolio.digest, files)
        try:
            with self._forwards.installing(loaded):
                self._try()
                self._select()
        except Exception as e:
            self._select()
            raise Fault(_text(e)) from e
        finally:
            self._keep_graphs()
        self._swap_id = message.get("swap_id")
        return self._swapped(started_s, load_s)

    def _check(self, portfolio: Portfolio, signature: str) -> None:
        expected = sign(self._key, self._scope, portfolio.digest)
        if not self._key or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise PermissionError(
                f"portfolio {portfolio.digest[:12] or 'stock'} is not signed for an engine of "
                f"scope {self._scope}"
            )

    def _try(self) -> None:
        """A dummy step, which writes no KV, of a size that each guard lets in."""
        current = self._forwards.current
        for guard in current.guards:
            num_tokens = max(guard.min_tokens, min(guard.max_tokens, SMOKE_TOKENS))
            if num_tokens > self._vllm.max_num_tokens:
                continue
            with self._quiet(), self._running(num_tokens):
                hidden_states = self._vllm.dummy_step(num_tokens)
            if current.faults:
                raise current.faults[0]
            if not bool(torch.isfinite(hidden_states).all()):
                raise Fault(f"a step of {num_tokens} tokens gives numbers that are not finite")

    def _select(self) -> None:
        """Graphs of what runs now; captured where they are missing. What ran before leaves no
        number in the KV cache that a mask does not undo."""
        self._finite.clean(self._worker.vllm_config)
        self._uncompiled.set(False)  # until a step is served
        with self._quiet():
            self._graphs.select(self._forwards.current.serial, self._serves)
        if faults := self._forwards.current.faults:
            raise faults[0]

    def _keep_graphs(self) -> None:
        previous = self._forwards.previous
        kept = {self._forwards.current.serial, 0 if previous is None else previous.serial}
        self._graphs.keep(kept)

    def _revert(self, message: Mapping[str, Any]) -> wire.Message:
        started_s = time.monotonic()
        self._forwards.revert()
        self._select()
        return self._swapped(started_s, 0.0)

    def _undo(self, message: Mapping[str, Any]) -> wire.Message:
        """A swap that another rank refused, if this one had taken it."""
        started_s = time.monotonic()
        if self._swap_id == message["swap_id"]:
            self._forwards.undo()
            self._select()
        return self._swapped(started_s, 0.0)

    def _swapped(self, started_s: float, load_s: float) -> wire.Message:
        current, previous = self._forwards.current, self._forwards.previous
        return {
            "digest": current.digest,
            "previous_digest": None if previous is None else previous.digest,
            "num_modules": len(current.bounds),
            "load_s": load_s,
            "swap_s": time.monotonic() - started_s,
            "capture_s": self._graphs.last_capture_s,
            "num_captured": self._graphs.last_num_captured,
        }

    def _call(self, message: Mapping[str, Any]) -> wire.Message:
        self._refuse_faulty()
        path = message["module"]
        module = dict(self._model.named_modules()).get(path)
        if module is None:
            raise CandidateError(f"no module {path!r} in this model")
        dtype, device = self._worker.model_config.dtype, self._worker.device
        tensors = [torch.from_numpy(np.array(a)).to(device) for a in message["inputs"]]
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        try:
            num_tokens = tensors[0].shape[0] if tensors else 1
            with self._quiet(), torch.inference_mode(), self._configured(num_tokens):
                out = module(*tensors)
        except Exception as e:
            raise CandidateError(f"{path} cannot be called: {type(e).__name__}: {e}") from e
        self._raise_fault()
        outs = out if isinstance(out, tuple) else (out,)
        return {"outputs": [as_array(o) for o in outs if o is not None]}

    def _replay(self, message: Mapping[str, Any]) -> wire.Message:
        """Forced outputs from an empty KV cache, by steps as vLLM's scheduler makes them."""
        self._refuse_faulty()
        num_layers = message.get("num_layers")
        calls = self._forwards.calls
        calls.candidate = calls.orig = 0
        with self._quiet(), self._first_layers(num_layers):
            try:
                result = self._replayer.run(
                    message["requests"], message["max_concurrency"], message["rows"]
                )
            except (Fault, CandidateError):
                raise
            except Exception as e:
                self._raise_fault()
                if not self._forwards.current.bounds:
                    raise
                raise Fault(f"a step under it raised {type(e).__name__}: {e}") from e
        self._raise_fault()
        return {**result, "num_candidate_calls": calls.candidate, "num_orig_calls": calls.orig}

    def _raise_fault(self) -> None:
        """What was answered by stock in a trial is a fault all the same; the portfolio stays, and
        the next trial meets it again."""
        if faults := self._forwards.current.faults:
            fault = faults[0]
            faults.clear()
            self._select()
            raise fault

    def _refuse_faulty(self) -> None:
        """It faulted in live traffic, and stock is on its way."""
        if faults := self._forwards.current.faults:
            raise faults[0]

    @contextlib.contextmanager
    def _first_layers(self, num_layers: int | None) -> Iterator[None]:
        """The fast tier: the model ends early, as a pipeline's rank does, and runs uncompiled."""
        if num_layers is None:
            yield
            return
        inner: Any = next((m for m in self._model.modules() if hasattr(m, "end_layer")), None)
        if inner is None:
            raise CandidateError("this model cannot be cut short; it has no end_layer")
        end = inner.end_layer
        if not 1 <= num_layers <= end:
            raise CandidateError(f"{num_layers} layers were asked for; the model has {end}")
        inner.end_layer, self._is_cut = num_layers, True
        try:
            with self._graphs.cut(num_layers):
                yield
        finally:
            inner.end_layer, self._is_cut = end, False

    def _fingerprint(self, message: Mapping[str, Any]) -> wire.Message:
        return {"fingerprint": fingerprint(self._model, self._forwards.installed)}

    def _take_steps(self, message: Mapping[str, Any]) -> wire.Message:
        """Live steps since the last call; on a device those that were sampled."""
        done = []
        while self._steps and self._steps[0].is_done:
            done.append(self._steps.popleft().as_message())
        return {"steps": done}

    def _graph_check(self, message: Mapping[str, Any]) -> wire.Message:
        """Each captured size, replayed and run eagerly: largest absolute difference by size."""
        with self._quiet():
            return {"gaps": self._graphs.check()}

    # --- what all need ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    @contextlib.contextmanager
    def _configured(self, num_tokens: int) -> Iterator[None]:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        config = self._worker.vllm_config
        with (
            set_current_vllm_config(config),
            set_forward_context(None, config, num_tokens=num_tokens),
        ):
            yield


def _check_hooks(is_v2: bool) -> str:
    """vLLM's version. Raises `RuntimeError` that names what this runner lacks."""
    findings = vllm_hooks.probe_live()
    mine = vllm_hooks.V2 if is_v2 else vllm_hooks.V1
    own = [v.lack for v in findings.verdicts if v.lack and v.hook.any_of == mine]
    if missing := dict.fromkeys((*findings.missing, *own)):
        raise RuntimeError(
            f"vLLM {findings.version} lacks what Trimtab hooks into: " + "; ".join(missing)
        )
    return findings.version


class Finite:
    """Whether all that a portfolio computed were numbers. Where they were not, the KV cache holds
    more of the kind, and behind a sequence's end a mask does not undo a NaN: it goes with it."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)

    def note(self, runner: Any, num_tokens: int) -> None:
        """After a step, padding left out: two small kernels, and nobody waits for them."""
        state = getattr(runner, "execute_model_state", None)
        hidden_states = getattr(state, "hidden_states", None)
        if isinstance(hidden_states, torch.Tensor):
            total = hidden_states[:num_tokens].sum(dtype=torch.float32)
            self._sum.add_(total, alpha=0.0)

    def clean(self, vllm_config: Any) -> None:
        """Before another forward runs, with nothing in the cache that is still needed."""
        if bool(torch.isfinite(self._sum)):
            return
        self._sum.zero_()
        for layer in vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            for part in cache if isinstance(cache, list | tuple) else [cache]:
                if isinstance(part, torch.Tensor):
                    part.zero_()


class Step:
    """One live step. On a device its time is known when the device got there."""

    __slots__ = ("_ended", "_events", "_load", "_num_running", "_num_tokens", "_step_s")

    def __init__(self, scheduler_output: Any, device: torch.device) -> None:
        self._num_running = len(scheduler_output.num_scheduled_tokens)
        self._num_tokens = scheduler_output.total_num_scheduled_tokens
        self._load: torch.Tensor | None = None
        self._ended, self._step_s = False, None if device.type == "cuda" else -time.perf_counter()
        self._events: list[Any] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def end(self, load: torch.Tensor | None = None) -> None:
        self._load, self._ended = load, True
        if self._events:
            self._events[1].record()
        if self._step_s is not None:
            self._step_s += time.perf_counter()

    @property
    def is_done(self) -> bool:
        return self._ended and all(e.query() for e in self._events)

    def as_message(self) -> wire.Message:
        if self._events:
            self._step_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        return {
            "num_running": self._num_running,
            "num_tokens": self._num_tokens,
            "step_s": self._step_s,
            "expert_load": None if self._load is None else self._load.cpu().numpy(),
        }


def _tell(note: Mapping[str, Any]) -> None:
    """Once, to the server inside; when it is gone, so is the engine."""
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_UNIX) as to:
        to.settimeout(5.0)
        to.connect(os.environ[wire.SOCKET])
        to.sendall(wire.pack(note))
        to.recv(1)


Operation = Callable[[Inside, Mapping[str, Any]], wire.Message]
OPERATIONS: Mapping[str, Operation] = {
    "attach": Inside._attach,
    "info": Inside._info,
    "source": Inside._source,
    "swap": Inside._swap,
    "revert": Inside._revert,
    "undo": Inside._undo,
    "give_way": Inside._give_way,
    "call": Inside._call,
    "replay": Inside._replay,
    "fingerprint": Inside._fingerprint,
    "steps": Inside._take_steps,
    "graph_check": Inside._graph_check,
}
