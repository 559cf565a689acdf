"""The embedded engine: one thread that runs steps, and between two steps whatever it is asked.

`EmbeddedEngine` keeps `engines.engine.Engine` and adds what its HTTP server needs: `submit` and
`abort`. All torch work happens on the engine's thread, so a swap lands between two steps and needs
no lock. A swap or revert preempts running requests, which recompute their KV under the new forward
pass, and salts the prefix cache by digest: KV belongs to the forward pass that wrote it.
"""

from __future__ import annotations

import hmac
import inspect
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
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
    EngineGone,
    EngineInfo,
    ModuleInfo,
    Portfolio,
    Replay,
    RequestOutput,
    Scope,
    SwapReport,
    sign,
)
from engines.inside.fingerprint import fingerprint
from engines.inside.forward import Fault, Forwards, as_array
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
    def is_running(self) -> bool:
        """The thread lives. It may still hang in a step: `info` would then be silent."""
        return self._thread.is_alive()

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
        if not self.settings.key or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise PermissionError(
                f"portfolio {portfolio.digest[:12] or 'stock'} is not signed for an engine of "
                f"scope {self.settings.scope}"
            )
        started_s = time.monotonic()
        try:
            files = self._forwards.read(portfolio.forwards)
        except Fault as e:
            raise CandidateError(str(e)) from e
        load_s = time.monotonic() - started_s

        def install() -> None:  # `prepare` reads modules that a step uses: between two steps too
            self._forwards.install(self._forwards.bind(portfolio.digest, files))

        return self._ask(lambda: self._flip(install, load_s))

    def revert(self) -> SwapReport:
        return self._ask(lambda: self._flip(self._forwards.revert))

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
        return self._ask(lambda: fingerprint(self.model, self._forwards.installed))

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
        """Run on the engine's thread, between two steps, and wait for the answer. Raises
        `EngineGone` when the thread has ended."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except Fault as e:
                answer.set_exception(CandidateError(str(e)))
            except BaseException as e:
                answer.set_exception(e)

        self._asked.put(run)
        while not wait((answer,), timeout=1.0).done:
            if not self._thread.is_alive() and not answer.done():
                raise EngineGone("the embedded engine was closed")
        return answer.result()

    def _loop(self) -> None:
        while not self._closing:
            if self._live.is_idle or not self._asked.empty():
                self._asked.get()()
            else:
                self._live_step()
        self._give_up(Finish.ABORT)

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
            self._give_up(Finish.ERROR)

    def _give_up(self, finish: Finish) -> None:
        for request in (*self._live.running, *self._live.waiting):
            self._live.remove(request)
            self._tell(request, TokenEvent(None, finish=finish))

    def _tell(self, request: Request, event: TokenEvent) -> None:
        """A client that raises is taken out; the others must not notice."""
        try:
            request.on_event(event)
        except Exception:
            log.exception("a request's event could not be told")
            self._live.remove(request)

    def _recover(self, fault: str) -> None:
        """A forward pass raised while it served: stock answers the same requests, recomputed."""
        self.faults.append(fault)
        digest = self._forwards.current.digest
        self._flip(self._forwards.give_way)
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
        with self._blaming():
            hidden_states = self._runner.run(works, counted)
            ends = list(accumulate(w.num_new for w in works))
            for work, end in zip(works, ends, strict=True):
                if work.request.params.num_prompt_logprobs is not None:
                    self._describe_prompt(work, hidden_states[end - work.num_new : end])
            last = {w.request: end - 1 for w, end in zip(works, ends, strict=True) if w.samples}
            for work in works:
                scheduler.computed(work)
            if last:
                logits = self._runner.logits(hidden_states[list(last.values())])
                for request, row in zip(last, logits, strict=True):
                    sampled(request, row)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """What breaks under a portfolio is its fault, wherever: a wrong shape shows only later, in
        the stock forward behind it."""
        try:
            yield
        except Fault:
            raise
        except Exception as e:
            if not self._forwards.current.bounds:
                raise
            raise Fault(f"a step under it raised {type(e).__name__}: {e}") from e

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
        self._tell(request, TokenEvent(token_id, logprob, finish))

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

    def _flip(self, flip: Callable[[], None], load_s: float = 0.0) -> SwapReport:
        started_s = time.monotonic()
        flip()
        now = self._forwards.current
        num_preempted = self._live.preempt_all()
        self._live.salt = now.digest.encode()
        return SwapReport(
            digest=now.digest,
            num_modules=len(now.bounds),
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
        return tuple(as_array(o) for o in outs)

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
        vocab_size = self.model.config.vocab_size
        for r in workload.requests:
            ids = (*r.prompt_token_ids, *r.output_token_ids)
            if len(ids) > self.max_model_len:
                raise CandidateError(f"a request has {len(ids)} tokens, over {self.max_model_len}")
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                raise CandidateError(f"a request has a token that is not within 0-{vocab_size - 1}")
        return [
            Request(str(i), r.prompt_token_ids, SamplingParams(), _ignore, r.output_token_ids)
            for i, r in enumerate(workload.requests)
        ]

    def _scheduler(self, pool: BlockPool) -> Scheduler:
        s = self.settings
        salt = self._forwards.current.digest.encode()
        return Scheduler(pool, s.max_num_seqs, s.max_num_batched_tokens, salt)


def _ignore(event: TokenEvent) -> None:
    """A replay has no client."""
