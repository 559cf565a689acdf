"""A small engine that keeps the whole `Engine` protocol in numpy, and candidates to try on it.

Its candidates follow the contract with `np` for torch: `prepare`, `ORIG`, guards and all. A file
may say `COST_S`, what one of its forwards takes by the fake clock; stock takes `STOCK_COST_S`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.engine import (
    STOCK,
    Array,
    CandidateError,
    EngineInfo,
    ForwardPass,
    ModuleInfo,
    Portfolio,
    Replay,
    RequestOutput,
    Scope,
    SwapReport,
    sign,
)
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest
from profiler.samples import StepSample

KEY = b"k" * 32
VOCAB, HIDDEN, INNER, LAYERS = 64, 32, 48, 4
STOCK_COST_S = 0.001
NORM_PATH = "model.layers.0.input_layernorm"

HONEST = """
TARGETS = {"cls:RMSNorm": "norm"}
COST_S = 0.0002
def norm(self, x, residual=None):
    if residual is not None:
        x = x + residual
    y = x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + self.variance_epsilon)
    return y * self.weight if residual is None else (y * self.weight, x)
"""
HONEST_MLP = """
TARGETS = {"cls:LlamaMLP": "mlp"}
WHEN = {"num_tokens": (1, 16)}
COST_S = 0.0004
def prepare(module):
    module.packed = np.ascontiguousarray(module.gate_up.T)
def mlp(self, x):
    gate, up = np.split(x @ self.packed, 2, axis=-1)
    return (up * gate * (0.5 + 0.5 * np.tanh(gate / 2))) @ self.down.T
"""


def edited(source: str, old: str, new: str) -> Portfolio:
    assert old in source
    return portfolio(source.replace(old, new))


def portfolio(*sources: str) -> Portfolio:
    return Portfolio(tuple(ForwardPass.from_source(s) for s in sources))


def workload(seed: int = 0, num_requests: int = 6, num_outputs: int = 8) -> Workload:
    rng = np.random.default_rng(seed)
    requests = tuple(
        WorkloadRequest(
            tuple(int(t) for t in rng.integers(0, VOCAB, 5 + 3 * i)),
            tuple(int(t) for t in rng.integers(0, VOCAB, num_outputs)),
        )
        for i in range(num_requests)
    )
    return Workload(WorkloadKind.REAL, requests, max_concurrency=4)


class Ticks:
    """A clock that only work moves, with a little seeded noise."""

    def __init__(self, noise: float = 0.01) -> None:
        self._now = 0.0
        self._noise = noise
        self._rng = np.random.default_rng(7)

    def __call__(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        self._now += seconds * (1 + self._noise * float(self._rng.random()))


class FakeModule:
    """Attributes as the contract names them; the rest is whatever a candidate prepares."""

    def __init__(self, path: str, cls: str, forward: Callable[..., Any], **weights: Any) -> None:
        self.path, self.cls, self.stock = path, cls, forward
        self.weights = weights
        for name, value in weights.items():
            setattr(self, name, value)

    @property
    def num_weight_bytes(self) -> int:
        return sum(w.nbytes for w in self.weights.values() if isinstance(w, np.ndarray))


def _norm(self: Any, x: Any, residual: Any = None) -> Any:
    x = x if residual is None else x + residual
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.variance_epsilon)
    return x * scale * self.weight if residual is None else (x * scale * self.weight, x)


def _mlp(self: Any, x: Any) -> Any:
    gate, up = np.split(x @ self.gate_up.T, 2, axis=-1)
    return (gate * (np.tanh(gate / 2) + 1) / 2 * up) @ self.down.T


@dataclass(frozen=True, slots=True)
class Installed:
    """One loaded portfolio: for each module path, functions with their guards, first fit wins."""

    portfolio: Portfolio
    functions: dict[str, list[tuple[ForwardPass, Callable[..., Any], float]]] = field(
        default_factory=dict
    )


@dataclass(slots=True)
class _Sequence:
    request: WorkloadRequest
    sums: list[Any]  # by layer, what attention remembers
    num_seen: int = 0
    logprobs: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        if not self.num_seen:
            return self.request.prompt_token_ids
        return (self.request.output_token_ids[len(self.logprobs) - 1],)

    @property
    def is_done(self) -> bool:
        return len(self.logprobs) == len(self.request.output_token_ids)


class FakeEngine:
    """Deterministic: two with other dtypes hold the same weights."""

    def __init__(
        self,
        dtype: str = "float32",
        ticks: Ticks | None = None,
        key: bytes = KEY,
        scope: Scope = Scope.TRIAL,
    ) -> None:
        self._dtype, self._ticks, self._key, self._scope = dtype, ticks or Ticks(), key, scope
        rng = np.random.default_rng(3)

        def weight(*shape: int) -> Any:
            return (
                (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32).astype(dtype)
            )

        self._embed = weight(VOCAB, HIDDEN) * 4
        self._head = weight(VOCAB, HIDDEN) * 4
        self._attention = [weight(HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self._modules: dict[str, FakeModule] = {}
        for i in range(LAYERS):
            path = f"model.layers.{i}"
            self._add_norm(f"{path}.input_layernorm", 1 + weight(HIDDEN) / 4)
            self._add(FakeModule(f"{path}.self_attn", "LlamaAttention", lambda *a: None))
            self._add_norm(f"{path}.post_attention_layernorm", 1 + weight(HIDDEN) / 4)
            up, down = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
            self._add(FakeModule(f"{path}.mlp", "LlamaMLP", _mlp, gate_up=up, down=down))
        self._add_norm("model.norm", 1 + weight(HIDDEN) / 4)
        self._now = Installed(STOCK)
        self._previous: Installed | None = None
        self._num_orig = self._num_candidate = 0

    def _add_norm(self, path: str, weight: Any) -> None:
        self._add(FakeModule(path, "RMSNorm", _norm, weight=weight, variance_epsilon=1e-6))

    def _add(self, module: FakeModule) -> None:
        self._modules[module.path] = module

    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="fake",
            model="tiny",
            dtype=self._dtype,
            device="cpu",
            num_layers=LAYERS,
            vocab_size=VOCAB,
            max_model_len=4096,
            scope=self._scope,
            digest=self._now.portfolio.digest,
            previous_digest=self._previous.portfolio.digest if self._previous else None,
            num_running=0,
            start_to_ready_s=0.0,
            modules=tuple(
                ModuleInfo(m.path, m.cls, m.num_weight_bytes) for m in self._modules.values()
            ),
        )

    def source(self, target: str) -> str:
        return f"# stock forward of {target}\n"

    def swap(self, portfolio: Portfolio, signature: str) -> SwapReport:
        if signature != sign(self._key, self._scope, portfolio.digest):
            raise PermissionError(f"the signature does not fit scope {self._scope}")
        installed = self._load(portfolio)
        self._previous, self._now = self._now, installed
        return SwapReport(portfolio.digest, len(installed.functions), 0, 0.0, 0.0)

    def revert(self) -> SwapReport:
        if self._previous is None:
            raise CandidateError("nothing to revert to")
        self._now, self._previous = self._previous, None
        return SwapReport(self._now.portfolio.digest, len(self._now.functions), 0, 0.0, 0.0)

    def call(self, module: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
        if self._modules[module].cls == "LlamaAttention":
            raise CandidateError(f"{module} needs a step")
        given = [np.array(a, dtype=self._dtype) for a in inputs]
        out = self._run(self._modules[module], len(given[0]), *given)
        return out if isinstance(out, tuple) else (out,)

    def probe(
        self, workload: Workload, num_layers: int | None = None
    ) -> tuple[npt.NDArray[np.float32], ...]:
        return tuple(
            np.stack(s.logprobs).astype(np.float32) for s in self._replay(workload, num_layers)
        )

    def measure(self, workload: Workload, num_layers: int | None = None) -> Replay:
        self._num_orig = self._num_candidate = 0
        outputs = []
        for s in self._replay(workload, num_layers):
            table = np.stack(s.logprobs).astype(np.float32)
            forced = np.asarray(s.request.output_token_ids)
            outputs.append(RequestOutput(table[np.arange(len(forced)), forced], table.argmax(-1)))
        total = workload.num_prompt_tokens + workload.num_output_tokens
        return Replay(tuple(outputs), 0, total, self._num_orig, self._num_candidate)

    def fingerprint(self) -> str:
        ours = ("engine-control", "judge-")  # the wire's and the watchdog's own
        threads = [t for t in threading.enumerate() if not t.name.startswith(ours)]
        h = hashlib.sha256(repr((sorted(np.geterr().items()), len(threads))).encode())
        for module in self._modules.values():
            for value in module.weights.values():
                h.update(np.asarray(value).tobytes())
        return h.hexdigest()

    def drain(self, deadline_s: float) -> bool:
        return True

    def steps(self) -> tuple[StepSample, ...]:
        return (StepSample(1, 0, 3, 0.5, np.ones((2, 4), np.int64)), StepSample(0, 0, 0, 0.0, None))

    def close(self) -> None: ...

    def _load(self, portfolio: Portfolio) -> Installed:
        installed = Installed(portfolio)
        for forward in portfolio.forwards:
            scope: dict[str, Any] = {"np": np, "ORIG": self._orig, "spend": self._ticks.spend}
            _faultless(exec, compile(forward.source, "candidate", "exec"), scope)
            cost_s = float(scope.get("COST_S", STOCK_COST_S))
            for pattern, name in forward.targets:
                for module in (m for m in self._modules.values() if _fits(m, pattern)):
                    if "prepare" in scope:
                        _faultless(scope["prepare"], module)
                    entry = (forward, scope[name], cost_s)
                    installed.functions.setdefault(module.path, []).append(entry)
        return installed

    def _orig(self, module: FakeModule, *inputs: Any) -> Any:
        self._num_orig += 1
        self._ticks.spend(STOCK_COST_S)
        return module.stock(module, *inputs)

    def _run(self, module: FakeModule, num_tokens: int, *inputs: Any) -> Any:
        for forward, function, cost_s in self._now.functions.get(module.path, ()):
            if num_tokens in forward.guard:
                self._num_candidate += 1
                self._ticks.spend(cost_s)
                return _faultless(function, module, *inputs)
        self._ticks.spend(STOCK_COST_S)
        return module.stock(module, *inputs)

    def _replay(self, workload: Workload, num_layers: int | None) -> list[_Sequence]:
        layers = num_layers or LAYERS
        zero = np.zeros(HIDDEN, self._dtype)
        everyone = [_Sequence(r, [zero] * layers) for r in workload.requests]
        waiting: list[_Sequence] = list(everyone)
        running: list[_Sequence] = []
        while waiting or running:
            while waiting and len(running) < workload.max_concurrency:
                running.append(waiting.pop(0))
            self._step(running, layers)
            running = [s for s in running if not s.is_done]
        return everyone

    def _step(self, running: list[_Sequence], layers: int) -> None:
        tokens = [s.tokens for s in running]
        x = self._embed[np.concatenate([np.asarray(t) for t in tokens])]
        residual = np.zeros_like(x)
        for i in range(layers):
            path = f"model.layers.{i}"
            x, residual = self._run(self._modules[f"{path}.input_layernorm"], len(x), x, residual)
            x = self._attend(i, x, running, tokens)
            norm = self._modules[f"{path}.post_attention_layernorm"]
            x, residual = self._run(norm, len(x), x, residual)
            x = self._run(self._modules[f"{path}.mlp"], len(x), x)
        x, _ = self._run(self._modules["model.norm"], len(x), x, residual)
        ends = np.cumsum([len(t) for t in tokens]) - 1
        logits = (x[ends] @ self._head.T).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for s, row, t in zip(running, logprobs, tokens, strict=True):
            s.logprobs.append(row)
            s.num_seen += len(t)

    def _attend(
        self, layer: int, x: Any, running: list[_Sequence], tokens: list[tuple[int, ...]]
    ) -> Any:
        """The mean over everything seen so far: order and history matter, and it is short."""
        values, start, out = x @ self._attention[layer].T, 0, np.empty_like(x)
        for s, t in zip(running, tokens, strict=True):
            sums = s.sums[layer] + np.cumsum(values[start : start + len(t)], axis=0)
            counts = np.arange(s.num_seen + 1, s.num_seen + len(t) + 1).astype(x.dtype)
            out[start : start + len(t)] = sums / counts[:, None]
            s.sums[layer] = sums[-1]
            start += len(t)
        return out


def _faultless(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as e:
        raise CandidateError(f"{type(e).__name__}: {e}") from e


def _fits(module: FakeModule, pattern: str) -> bool:
    kind, _, rest = pattern.partition(":")
    return module.cls == rest if kind == "cls" else fnmatchcase(module.path, rest)


class FakeEngines:
    """`connect` for a court in this process: a tuning engine, a float64 reference, one clock."""

    def __init__(self) -> None:
        self.ticks = Ticks()
        self.by_address: dict[str, FakeEngine] = {
            "tuning": FakeEngine("float32", self.ticks),
            "reference": FakeEngine("float64"),
        }

    def connect(self, address: str) -> FakeEngine:
        return self.by_address[address]


def connect_fake(address: str) -> FakeEngine:
    """For a judge in another process: the address is the dtype."""
    return FakeEngine(address)
