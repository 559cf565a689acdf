"""The engine protocol, its nouns, and what a swappable module sees.

**A forward pass** is one Python file in plain text::

    TARGETS = {"cls:Qwen3MoeSparseMoeBlock": "moe"}  # class or path pattern -> function below
    WHEN = {"num_tokens": (1, 16)}  # optional guard: scheduled tokens, no padding, inclusive
    def prepare(module): ...  # optional, once per module: repack weights into static buffers
    def moe(self, hidden_states): ...  # same signature as the forward it replaces

`ORIG(self, ...)` is in the file's globals and calls the *stock* forward of the same module, never
an earlier candidate; so does a batch outside `WHEN`. `TARGETS` keys are `cls:` exact class names or
`path:` fnmatch patterns over module paths.

**What a swappable module sees** is vLLM's shape of the world: a forward pass moves from the
embedded engine to vLLM. Hidden states are flat, [num_tokens, hidden_size], all requests of the step
one after the other. Classes, attributes, arguments (shapes in brackets):

- `RMSNorm.forward(x, residual=None)`: `weight` [hidden_size], `variance_epsilon`. Without a
  residual returns the norm; with one returns `(norm(x + residual), x + residual)`.
- `Qwen3MoeDecoderLayer | LlamaDecoderLayer.forward(positions, hidden_states, residual)` returns
  `(hidden_states, residual)`: `input_layernorm`, `self_attn`, `post_attention_layernorm`, `mlp`.
- `Qwen3MoeAttention | LlamaAttention.forward(positions, hidden_states)`: `qkv_proj`, `q_norm` and
  `k_norm` (Qwen3 only, over head_dim), `rotary_emb(positions, q, k)`, `attn`, `o_proj`;
  `num_heads`, `num_kv_heads`, `head_dim`, `q_size`, `kv_size`, `scaling`.
- `Attention.forward(query, key, value)` [num_tokens, num_heads * head_dim], writes key and value
  into the paged cache, returns [num_tokens, num_heads * head_dim]: `layer_name`, `num_heads`,
  `num_kv_heads`, `head_size`, `scale`.
- `Qwen3MoeSparseMoeBlock.forward(hidden_states)`: `gate` [num_experts, hidden_size], `experts`.
  `FusedMoE` (`experts`): `w13_weight` [num_experts, 2 * intermediate, hidden_size] (gate rows, then
  up rows), `w2_weight` [num_experts, hidden_size, intermediate], `top_k`, `renormalize`,
  `forward(hidden_states, router_logits)`.
- `LlamaMLP | Qwen3MoeMLP.forward(x)`: `gate_up_proj`, `down_proj`, `act_fn` (`SiluAndMul`).
- linear layers return `(output, None)` as vLLM's do, and hold `weight` [out, in].

`from engines.inside.step import step`: `step()` is the running step's `StepView`, in both worlds.

In vLLM some of it lies elsewhere, by release: in 0.32 `experts` is a `MoERunner` with the router,
and the weights are on its `routed_experts`. Weights are this rank's shards. A layer's KV cache has
the layout of its attention backend: FlashAttention's and Triton's are shown as above, the CPU's
raises. Under CUDA graphs `WHEN` is decided where a graph is captured: one of n tokens serves all
batches down to the next smaller size, and is the forward pass's only if its guard lets all of them
in; otherwise stock's graph serves them.

Timing is nobody's business here: an engine runs steps and returns outputs; whoever holds the clock
brackets the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.inside.source import (
    CONTRACT_VERSION,
    STOCK,
    CandidateError,
    ForwardPass,
    Guard,
    Portfolio,
    Scope,
    sign,
)
from profiler.reservoir import Workload
from profiler.samples import StepSample

__all__ = [
    "CONTRACT_VERSION",
    "STOCK",
    "Array",
    "CandidateError",
    "Engine",
    "EngineGone",
    "EngineInfo",
    "ForwardPass",
    "Guard",
    "Measurement",
    "ModuleInfo",
    "Portfolio",
    "Replay",
    "RequestOutput",
    "Scope",
    "SwapReport",
    "sign",
]

Array = npt.NDArray[np.float32] | npt.NDArray[np.float64] | npt.NDArray[np.int64]


class EngineGone(ConnectionError):
    """The engine did not answer: it hangs, died, or was never there."""


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One module of the model: `path` as in `named_modules()`, class name, parameter bytes."""

    path: str
    cls: str
    num_weight_bytes: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and runs now."""

    engine: str  # "embedded", "vllm"
    model: str
    dtype: str
    device: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    scope: Scope
    digest: str  # portfolio that new requests are answered with; "" is stock
    previous_digest: str | None  # what `revert` would restore; None when there is nothing
    num_running: int
    start_to_ready_s: float
    modules: tuple[ModuleInfo, ...]


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What a swap or revert did; times are the engine's own, for diagnosis only."""

    digest: str
    num_modules: int
    num_preempted: int  # running requests whose KV is recomputed under the new forward pass
    load_s: float  # outside the step loop
    swap_s: float  # the step loop stood still


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Outputs of one replayed request, at each forced output position."""

    logprobs: npt.NDArray[np.float32]  # [num_output_tokens], of the forced token
    top_token_ids: npt.NDArray[np.int64]  # [num_output_tokens], argmax


@dataclass(frozen=True, slots=True)
class Replay:
    """What `measure` returns: outputs and counts, no clock."""

    outputs: tuple[RequestOutput, ...]  # in the workload's order
    num_steps: int
    num_tokens: int  # scheduled, prefill and decode
    num_orig_calls: int  # stock forwards run inside a candidate's guard through ORIG
    num_candidate_calls: int  # forwards answered by the portfolio


@dataclass(frozen=True, slots=True)
class Measurement:
    """One forward pass on one workload, by the judge's clock: every sample, never a best-of."""

    samples_s: tuple[float, ...]  # seconds of each repeat
    num_tokens: int  # per repeat
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def num_repeats(self) -> int:
        return len(self.samples_s)

    @property
    def median_s(self) -> float:
        return float(np.median(self.samples_s))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.median_s

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles."""
        low, high = np.percentile(self.samples_s, [25, 75])
        return float(high - low) / 2


class Engine(Protocol):
    """A running engine. Synchronous: call it off the event loop. Whoever connects closes.

    Every call raises `EngineGone` when the engine does not answer within its deadline, and
    `CandidateError` when a forward pass is at fault.
    """

    def info(self) -> EngineInfo: ...

    def source(self, target: str) -> str:
        """Raw source of the stock forward of a `cls:` or `path:` target, its class included."""

    def swap(self, portfolio: Portfolio, signature: str) -> SwapReport:
        """Install between two steps. Raises `CandidateError` with the old portfolio still in place,
        `PermissionError` when the signature does not fit the engine's scope and key."""

    def revert(self) -> SwapReport:
        """Restore the portfolio before the last swap, one level. Compiles and loads nothing.
        Raises `CandidateError` when there is nothing to revert to."""

    def call(self, module: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Run one module, by path, on [num_tokens, ...] inputs under the present portfolio.
        Not for modules that need a step (attention): `CandidateError`."""

    def probe(
        self, workload: Workload, num_layers: int | None = None
    ) -> tuple[npt.NDArray[np.float32], ...]:
        """Teacher-forced log-probabilities [num_output_tokens, vocab_size] of each request, run
        through the same steps as `measure` (prefill, then decode), with an empty prefix cache."""

    def measure(self, workload: Workload, num_layers: int | None = None) -> Replay:
        """Replay a workload as fast as it goes, outputs forced, from an empty prefix cache.
        `num_layers` runs the first layers only (the fast tier)."""

    def fingerprint(self) -> str:
        """Digest of the process's state that a candidate must leave alone: weights, hooks, dtypes,
        backends, threads, global settings. The installed portfolio is not part of it."""

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing runs or waits. False when the deadline passed first."""

    def steps(self) -> tuple[StepSample, ...]:
        """Steps of live traffic since the last call; when there are too many, the oldest go."""

    def close(self) -> None:
        """Let go of the connection. The engine runs on."""
