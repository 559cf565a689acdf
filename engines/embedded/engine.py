"""The embedded engine: one thread that runs steps, and between two steps whatever it is asked.

`EmbeddedEngine` keeps `engines.engine.Engine` and adds what its HTTP server needs: `submit` and
`abort`. All torch work happens on the engine's thread, so a swap lands between two steps and needs
no lock. A swap or revert preempts running requests, which recompute their KV under the new forward
pass, and salts the prefix cache by digest: KV belongs to the forward pass that wrote it.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engines.embedded import sampling
from engines.embedded.blocks import BlockPool
from engines.embedded.runner import Runner
from engines.embedded.scheduler import (
    Finish,
    Request,
    SamplingParams,
    Scheduler,
    TokenEvent,
    Work,
)
from engines.embedded.weights import DTYPES, SHIPPED_MODEL, ModelError, load_model
from engines.engine import (
    Array,
    CandidateError,
    EngineInfo,
    ModuleInfo,
    Portfolio,
    Replay,
    RequestOutput,
    Scope,
    SwapReport,
    sign,
)
from engines.inside.forward import Fault, Forwards, Loaded, Source
from profiler.reservoir import Workload
from profiler.samples import StepSample

log = logging.getLogger(__name__)
T = TypeVar("T")

COUNT_EVERY = 4  # steps of live traffic between two expert counts
KEPT_STEPS = 4096


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with. `key` lets in portfolios signed for `scope`."""

    model_dir: Path = SHIPPED_MODEL
    dtype: str = "float32"
    num_threads: int = 1
    num_kv_blocks: int = 2048
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    scope: Scope = Scope.SERVE
    key: bytes = field(default=b"", repr=False)


class EmbeddedEngine:
    """A running engine; `close` ends its thread. Raises `ModelError` when it cannot start."""

    def __init__(self, settings: EngineSettings) -> None:
        started_s = time.monotonic()
        if settings.dtype not in DTYPES:
            raise ModelError(f"dtype {settings.dtype} is not one of {', '.join(DTYPES)}")
        self.settings = settings
        torch.set_num_threads(settings.num_threads)
        self.model = load_model(settings.model_dir, DTYPES[settings.dtype])
        self.max_model_len = min(
            self.model.config.max_model_len, settings.num_kv_blocks * settings.block_size
        )
        self._runner = Runner(self.model, settings.num_kv_blocks, settings.block_size)
        self._files = tempfile.TemporaryDirectory(prefix="trimtab-forward-")
        self._forwards = Forwards(self.model, Path(self._files.name))
        self._pool = BlockPool(settings.num_kv_blocks, settings.block_size)
        self._live = self._scheduler(self._pool)
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._steps: deque[StepSample] = deque(maxlen=KEPT_STEPS)
        self._num_steps = 0
        self.faults: deque[str] = deque(maxlen=16)
        self.start_to_ready_s = time.monotonic() - started_s
        self._thread = threading.Thread(target=self._loop, name="trimtab-engine", daemon=True)
        self._thread.start()

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a live request. Its events come on the engine's thread."""
        self._asked.put(lambda: self._live.add(request))

    def abort(self, request: Request) -> None:
        """Take a live request out, wherever it is; no further event comes after this was run."""
        self._asked.put(lambda: self._live.remove(request))

    @property
    def num_waiting(self) -> int:
        return len(self._live.waiting)

    @property
    def num_running(self) -> int:
        return len(self._live.running)

    @property
    def kv_cache_usage(self) -> float:
        return self._pool.usage

    @property
    def num_preemptions(self) -> int:
        return self._live.num_preemptions

    # --- engines.engine.Engine --------------------------------------------------------------------

    def info(self) -> EngineInfo:
        """Answered between two steps: an engine whose step hangs is silent here too."""
        return self._ask(self._info)

    def _info(self) -> EngineInfo:
        previous = self._forwards.previous
        return EngineInfo(
            engine="embedded",
            model=self.settings.model_dir.name,
            dtype=self.settings.dtype,
            device="cpu",
            num_layers=self.model.config.num_layers,
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            scope=self.settings.scope,
            digest=self._forwards.current.digest,
            previous_digest=None if previous is None else previous.digest,
            num_running=self.num_running + self.num_waiting,
            start_to_ready_s=self.start_to_ready_s,
            modules=tuple(
                ModuleInfo(path, type(m).__name__, sum(p.nbytes for p in m.parameters()))
                for path, m in self.model.named_modules()
                if path
            ),
        )

    def source(self, target: str) -> str:
        for module in self._forwards.find(target):
            return inspect.getsource(type(module))
        raise CandidateError(f"no module of {self.settings.model_dir.name} matches {target!r}")

    def swap(self, portfolio: Portfolio, signature: str) -> SwapReport:
        expected = sign(self.settings.key, self.settings.scope, portfolio.digest)
        if not self.settings.key or signature != expected:
            raise PermissionError(
                f"portfolio {portfolio.digest[:12] or 'stock'} is not signed for an engine of "
                f"scope {self.settings.scope}"
            )
        sources = [
            Source(f.source, f.targets, f.guard.min_tokens, f.guard.max_tokens, f.digest)
            for f in portfolio.forwards
        ]
        started_s = time.monotonic()
        # `prepare` reads modules that a step may be using, so it too runs between two steps.
        loaded = self._ask(lambda: self._forwards.load(portfolio.digest, sources))
        load_s = time.monotonic() - started_s
        return self._ask(lambda: self._flip(lambda: self._forwards.install(loaded), loaded, load_s))

    def revert(self) -> SwapReport:
        def flip() -> SwapReport:
            previous = self._forwards.previous or self._forwards.current
            return self._flip(self._forwards.revert, previous, 0.0)

        return self._ask(flip)

    def call(self, module: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
        return self._ask(lambda: self._call(module, inputs))

    def probe(
        self, workload: Workload, num_layers: int | None = None
    ) -> tuple[npt.NDArray[np.float32], ...]:
        rows: dict[str, list[npt.NDArray[np.float32]]] = {}

        def keep(request: Request, logprobs: torch.Tensor) -> None:
            rows.setdefault(request.id, []).append(logprobs.float().numpy())

        self._ask(lambda: self._replay(workload, num_layers, keep))
        return tuple(np.stack(rows[str(i)]) for i in range(len(workload.requests)))

    def measure(self, workload: Workload, num_layers: int | None = None) -> Replay:
        found: dict[str, list[tuple[float, int]]] = {}

        def keep(request: Request, logprobs: torch.Tensor) -> None:
            token = request.token(request.num_tokens - 1)
            found.setdefault(request.id, []).append(
                (float(logprobs[token]), int(logprobs.argmax()))
            )

        def run() -> Replay:
            calls = self._forwards.calls
            calls.candidate = calls.orig = 0
            num_steps, num_tokens = self._replay(workload, num_layers, keep)
            outputs = tuple(
                RequestOutput(
                    np.array([p for p, _ in found[str(i)]], np.float32),
                    np.array([t for _, t in found[str(i)]], np.int64),
                )
                for i in range(len(workload.requests))
            )
            return Replay(outputs, num_steps, num_tokens, calls.orig, calls.candidate)

        return self._ask(run)

    def fingerprint(self) -> str:
        return self._ask(self._fingerprint)

    def drain(self, deadline_s: float) -> bool:
        until_s = time.monotonic() + deadline_s
        while not self._ask(lambda: self._live.is_idle):
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.005)
        return True

    def steps(self) -> tuple[StepSample, ...]:
        def take() -> tuple[StepSample, ...]:
            taken = tuple(self._steps)
            self._steps.clear()
            return taken

        return self._ask(take)

    def close(self) -> None:
        """End the thread; unfinished requests end with an abort."""
        self._asked.put(self._end)
        self._thread.join()
        self._files.cleanup()

    # --- the engine's thread ----------------------------------------------------------------------

    def _ask(self, function: Callable[[], T]) -> T:
        """Run on the engine's thread, between two steps, and wait for the answer."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except Fault as e:
                answer.set_exception(CandidateError(str(e)))
            except BaseException as e:
                answer.set_exception(e)

        self._asked.put(run)
        return answer.result()

    def _loop(self) -> None:
        while not self._closing:
            if self._live.is_idle or not self._asked.empty():
                self._asked.get()()
            else:
                self._live_step()
        for request in (*self._live.running, *self._live.waiting):
            request.on_event(TokenEvent(None, finish=Finish.ABORT))

    def _end(self) -> None:
        self._closing = True

    def _live_step(self) -> None:
        try:
            works = self._live.next_step()
            self._num_steps += 1
            counted = self._num_steps % COUNT_EVERY == 0
            self._step(self._live, works, self._sampled, counted)
            self._note(works, counted)
        except Fault as e:
            self._recover(str(e))
        except Exception:
            log.exception("step failed")
            for request in (*self._live.running, *self._live.waiting):
                self._live.remove(request)
                request.on_event(TokenEvent(None, finish=Finish.ERROR))

    def _recover(self, fault: str) -> None:
        """A forward pass raised while it served: stock answers the same requests, recomputed."""
        self.faults.append(fault)
        digest = self._forwards.current.digest
        self._flip(lambda: self._forwards.install(Loaded()), Loaded(), 0.0)
        self._forwards.previous = None
        log.error("forward pass faulted, stock serves", extra={"digest": digest, "fault": fault})

    def _note(self, works: Sequence[Work], counted: bool) -> None:
        self._steps.append(
            StepSample(
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                num_tokens=sum(w.num_new for w in works),
                kv_cache_usage=self._pool.usage,
                expert_load=self._runner.expert_load() if counted else None,
            )
        )

    def _step(
        self,
        scheduler: Scheduler,
        works: Sequence[Work],
        sampled: Callable[[Request, torch.Tensor], None],
        counted: bool = False,
    ) -> None:
        """Run scheduled work; `sampled` gets each finished row of logits, in order."""
        hidden_states = self._runner.run(works, counted)
        ends = torch.tensor([w.num_new for w in works]).cumsum(0)
        for work, end in zip(works, ends.tolist(), strict=True):
            if work.request.params.num_prompt_logprobs is not None:
                self._describe_prompt(work, hidden_states[end - work.num_new : end])
        for work in works:
            scheduler.computed(work)
        sampling_works = [w for w in works if w.request.num_computed == w.request.num_tokens]
        if sampling_works:
            last = [
                end - 1
                for w, end in zip(works, ends.tolist(), strict=True)
                if w.request.num_computed == w.request.num_tokens
            ]
            logits = self._runner.logits(hidden_states[last])
            for work, row in zip(sampling_works, logits, strict=True):
                sampled(work.request, row)

    def _sampled(self, request: Request, logits: torch.Tensor) -> None:
        params = request.params
        token_id = sampling.sample(logits, params, request.num_tokens)
        request.output.append(token_id)
        logprob = None
        if params.num_logprobs is not None:
            logprob = sampling.describe(logits.log_softmax(-1), token_id, params.num_logprobs)
        finish = None
        if token_id in params.stop_token_ids:
            finish = Finish.STOP
        elif len(request.output) >= params.max_tokens or request.num_tokens >= self.max_model_len:
            finish = Finish.LENGTH
        if finish is not None:
            self._live.remove(request)
        request.on_event(TokenEvent(token_id, logprob, finish))

    def _describe_prompt(self, work: Work, hidden_states: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens; the first has none."""
        request = work.request
        num_top = request.params.num_prompt_logprobs or 0
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        first = request.num_computed + 1
        wanted = min(len(request.prompt) - first, work.num_new)
        if wanted <= 0:
            return
        rows = self._runner.logits(hidden_states[:wanted]).log_softmax(-1)
        for i, row in enumerate(rows):
            described = sampling.describe(row, request.prompt[first + i], num_top)
            request.prompt_logprobs.append(described)

    def _flip(self, flip: Callable[[], None], to: Loaded, load_s: float) -> SwapReport:
        started_s = time.monotonic()
        flip()
        num_preempted = self._live.preempt_all()
        self._live.salt = to.digest.encode()
        return SwapReport(
            digest=to.digest,
            num_modules=len(to.bounds),
            num_preempted=num_preempted,
            load_s=load_s,
            swap_s=time.monotonic() - started_s,
        )

    def _call(self, path: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
        module = dict(self.model.named_modules()).get(path)
        if module is None:
            raise CandidateError(f"no module {path!r} in {self.settings.model_dir.name}")
        dtype = DTYPES[self.settings.dtype]
        tensors = [torch.from_numpy(np.array(a)) for a in inputs]
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        try:
            with torch.inference_mode():
                out = module(*tensors)
        except Fault:
            raise
        except Exception as e:
            raise CandidateError(f"{path} cannot be called: {type(e).__name__}: {e}") from e
        outs = out if isinstance(out, tuple) else (out,)
        return tuple(_array(o) for o in outs)

    def _replay(
        self,
        workload: Workload,
        num_layers: int | None,
        keep: Callable[[Request, torch.Tensor], None],
    ) -> tuple[int, int]:
        """Run a workload with forced outputs on an idle engine; (steps, scheduled tokens).
        `keep` gets each request with its forced token appended, and the row before it."""
        if not self._live.is_idle:
            raise CandidateError("the engine is serving; drain it first")
        num_all = self.model.config.num_layers
        if num_layers is not None and not 1 <= num_layers <= num_all:
            raise CandidateError(f"{num_layers} layers were asked for; the model has {num_all}")
        scheduler = self._scheduler(BlockPool(self._pool.num_blocks, self._pool.block_size))
        waiting = deque(self._requests(workload))
        left = len(waiting)

        def sampled(request: Request, logits: torch.Tensor) -> None:
            nonlocal left
            assert request.forced is not None
            request.output.append(request.forced[len(request.output)])
            keep(request, logits.log_softmax(-1))
            if len(request.output) == len(request.forced):
                scheduler.remove(request)
                left -= 1

        num_steps = num_tokens = 0
        self.model.model.layer_limit = num_layers or num_all
        try:
            while left:
                busy = len(scheduler.running) + len(scheduler.waiting)
                for _ in range(min(len(waiting), workload.max_concurrency - busy)):
                    scheduler.add(waiting.popleft())
                works = scheduler.next_step()
                if not works:
                    raise CandidateError("the workload needs more KV blocks than the engine has")
                self._step(scheduler, works, sampled)
                num_steps += 1
                num_tokens += sum(w.num_new for w in works)
        finally:
            self.model.model.layer_limit = num_all
            self._pool.clear()  # the replay wrote over what it remembered
        return num_steps, num_tokens

    def _requests(self, workload: Workload) -> list[Request]:
        for r in workload.requests:
            num = len(r.prompt_token_ids) + len(r.output_token_ids)
            if num > self.max_model_len:
                raise CandidateError(f"a request has {num} tokens, over {self.max_model_len}")
        return [
            Request(str(i), r.prompt_token_ids, SamplingParams(), _ignore, r.output_token_ids)
            for i, r in enumerate(workload.requests)
        ]

    def _scheduler(self, pool: BlockPool) -> Scheduler:
        s = self.settings
        salt = self._forwards.current.digest.encode()
        return Scheduler(pool, s.max_num_seqs, s.max_num_batched_tokens, salt)

    def _fingerprint(self) -> str:
        h = hashlib.blake2b(digest_size=16)
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            h.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
        for path, module in self.model.named_modules():
            hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
            h.update(f"{path} {type(module).__qualname__} {hooks}".encode())
            h.update(repr(sorted(set(module.__dict__) - self._forwards.installed(path))).encode())
            h.update(str(id(type(module).forward)).encode())
        h.update(repr(_process_state()).encode())
        return h.hexdigest()


def _process_state() -> tuple[object, ...]:
    """Settings and functions that a forward pass has no business with."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        gc.isenabled(),
        threading.active_count(),
        *(id(f) for f in (time.time, time.monotonic, time.perf_counter)),
        *(id(f) for f in (torch.matmul, torch.nn.functional.linear, torch.Tensor.copy_)),
        len(torch.nn.modules.module._global_forward_hooks),
    )


def _array(out: object) -> Array:
    """A module's output as numpy. bfloat16 has no numpy type and travels as float32."""
    if type(out) is not torch.Tensor:
        raise CandidateError(f"a module returned {type(out).__name__}, not a plain tensor")
    if out.dtype is torch.bfloat16:
        out = out.float()
    return out.contiguous().numpy()


def _ignore(event: TokenEvent) -> None:
    """A replay has no client."""
