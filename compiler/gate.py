"""Same outputs, truly faster? The rules, as pure functions over numbers. `compiler.judge` gets the
numbers; `compiler.evidence` applies the same rules to kept ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engines.engine import Array, Measurement, ModuleInfo, RequestOutput
from profiler.reservoir import Workload

Floats = npt.NDArray[np.float64]

EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
FLIP_NATS = 0.1  # what one expert chosen otherwise may move a log-probability
SPARSE = ("MoE", "Moe", "Experts", "Embedding")  # classes whose weights no step touches in full


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """How strict, how long. Defaults suit a small model on a CPU that others use too."""

    num_fast_layers: int | None = 2  # of the screen; None is all
    min_gain: float = 0.02  # 0.02: 2 % more tokens/s
    min_pairs: int = 5  # stock and candidate, side by side
    max_pairs: int = 40
    screen_s: float = 1.5  # of racing; then only a promising one goes on, up to four times that
    confirm_s: float = 4.0
    band_z: float = 2.5  # A/A band in standard errors
    noise_floor: float = 0.005  # relative; no clock on a shared machine is better than that
    error_ratio: float = 4.0  # module error over stock's own, both against the reference
    error_ulps: float = 8.0  # and this on top, relative to the row
    band_factor: float = 8.0  # model level, over the band that stock leaves
    max_differing_rate: float = 0.05  # of timed requests and top tokens: a router's ties
    max_stock_slowdown: float = 3.0  # stock's best time now over its best on the fresh engine
    orig_rate: float = 0.5  # this share of calls answered by ORIG is no effect
    num_probe_requests: int = 6
    num_probe_tokens: int = 16
    max_probe_prompt_tokens: int = 512
    max_call_tokens: int = 192
    num_checked_repeats: int = 2  # the last one and random others, against the reference
    num_checked_requests: int = 2
    bytes_per_s: float = 2e13  # more than any memory gives: the roofline floor
    deadline_s: float = 15.0  # silence of an engine in one call
    verdict_deadline_s: float = 180.0  # silence of the judge


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Same outputs? KL in nats per position against the reference."""

    passed: bool
    kl_p50: float
    kl_p99: float
    logprob_gap: float  # nats, the largest over forced tokens
    first_divergence: int | None  # first position with another argmax than the reference
    band: float  # what stock leaves against the reference: its kl_p99
    failures: tuple[str, ...]
    faulted: bool = False  # it could not be installed, or raised
    recycle: bool = False  # it left state behind: throw the engine away


@dataclass(frozen=True, slots=True)
class Trial:
    """Truly faster? `stock` and `candidate` are paired sample by sample, and may have none when
    it `faulted`."""

    stock: Measurement
    candidate: Measurement
    aa_band: float  # relative: what stock against stock leaves
    gain: float  # relative tokens/s: pseudomedian over pairs, shrunk by its noise
    held_out_gain: float | None  # the same on a later slice of traffic
    faster: bool
    reason: str
    num_orig_calls: int
    num_candidate_calls: int
    agrees: bool = True  # the timed runs' own outputs
    faulted: bool = False
    recycle: bool = False
    held_out_stock: Measurement | None = None
    held_out_candidate: Measurement | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """Distance of one set of runs from the reference, in nats."""

    kl_p50: float
    kl_p99: float
    gap_p50: float
    gap_p99: float


# --- module level ---------------------------------------------------------------------------------


def row_errors(got: Array, want: Array) -> Floats:
    """Absolute error of each element relative to the RMS of its row in `want`."""
    width = want.shape[-1]
    exact = want.astype(np.float64).reshape(-1, width)
    scale = np.sqrt(np.mean(np.square(exact), axis=-1, keepdims=True)) + np.finfo(np.float32).tiny
    off = np.abs(got.astype(np.float64).reshape(-1, width) - exact)
    return np.asarray(off / scale, np.float64)


def steady_rows(want: Array, nudged: Array, nudge: float) -> npt.NDArray[np.bool_]:
    """Rows that do not jump when the input moves by `nudge`: where no expert is a tie."""
    moved = np.sqrt(np.mean(np.square(row_errors(nudged, want)), axis=-1))
    steady: npt.NDArray[np.bool_] = moved <= 64 * nudge
    return steady


def shape_failure(got: Sequence[Array], want: Sequence[Array], dtypes: Sequence[str]) -> str | None:
    """Why the outputs cannot be compared, or None. Shapes are the reference's, dtypes stock's."""
    if len(got) != len(want):
        return f"returned {len(got)} outputs, not {len(want)}"
    for i, (g, w, dtype) in enumerate(zip(got, want, dtypes, strict=True)):
        if g.shape != w.shape:
            return f"output {i} has shape {g.shape}, not {w.shape}"
        if g.dtype.name != dtype:
            return f"output {i} is {g.dtype.name}, not {dtype}"
        if not np.isfinite(g).all():
            return f"output {i} holds NaN or infinity"
    return None


@dataclass(frozen=True, slots=True)
class ErrorSpread:
    """Stock's own error against the reference, relative to the row."""

    p99: float
    worst: float

    @classmethod
    def of(cls, errors: Floats) -> ErrorSpread:
        return cls(float(np.percentile(errors, 99)), float(errors.max()))


def error_failure(errors: Floats, stock: ErrorSpread, eps: float, policy: GatePolicy) -> str | None:
    """Errors of one call. Few of them have no percentile to speak of: the worst decides then."""
    if not errors.size:
        return None
    found = ErrorSpread.of(errors)
    limits = [("worst", found.worst, stock.worst)]
    if errors.size >= 4000:
        limits.insert(0, ("p99", found.p99, stock.p99))
    for name, got, own in limits:
        limit = policy.error_ratio * own + policy.error_ulps * eps
        if not got <= limit:  # NaN fails too
            return f"{name} error {got:.2e} of the row, over {limit:.2e} ({own:.2e} is stock's)"
    return None


# --- model level ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one probe lies from the reference's, over all positions of all requests."""

    kl: Floats  # [num_positions], nats
    gap: Floats  # [num_positions], nats, of the forced token
    first_divergence: int | None

    @property
    def band(self) -> Band:
        kl50, kl99 = np.percentile(self.kl, [50, 99])
        gap50, gap99 = np.percentile(self.gap, [50, 99])
        return Band(float(kl50), float(kl99), float(gap50), float(gap99))


def distance(
    probe: Sequence[npt.NDArray[np.float32]],
    reference: Sequence[npt.NDArray[np.float32]],
    workload: Workload,
) -> Distance | str:
    """Or why the probe cannot be compared. `ValueError` when it is the reference that cannot."""
    if not all(np.isfinite(table).all() for table in reference):
        raise ValueError("the reference's probe holds NaN or infinity; no verdict can rest on it")
    if len(probe) != len(reference):
        return f"the probe answered {len(probe)} requests, not {len(reference)}"
    for got, want in zip(probe, reference, strict=True):
        if got.shape != want.shape:
            return f"a probe has shape {got.shape}, not {want.shape}"
        if not np.isfinite(got).all():
            return "the probe holds NaN or infinity"
    q, p = np.concatenate([*probe]), np.concatenate([*reference])
    forced = np.concatenate([np.asarray(r.output_token_ids) for r in workload.requests])
    rows = np.arange(len(forced))
    gap = np.abs(q[rows, forced].astype(np.float64) - p[rows, forced])
    differs = np.flatnonzero(q.argmax(axis=-1) != p.argmax(axis=-1))
    return Distance(kl(p, q), gap, int(differs[0]) if len(differs) else None)


def kl(p: npt.NDArray[np.float32], q: npt.NDArray[np.float32]) -> Floats:
    """KL(p || q) by row, in nats. Rows are normalised first, and the sum is written so that
    no term is negative: float32 rounding would else drown the differences we look for."""
    exact = p.astype(np.float64)
    d = q.astype(np.float64) - exact
    weights = np.exp(exact - _logsumexp(exact))
    d = d - _logsumexp(q.astype(np.float64)) + _logsumexp(exact)
    terms = weights * (np.expm1(np.clip(d, -60.0, 60.0)) - d)
    return np.asarray(terms.sum(axis=-1), np.float64)


def _logsumexp(x: Floats) -> Floats:
    top = x.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)), np.float64)


def kl_limit(own: float, eps: float, policy: GatePolicy) -> float:
    """Nats, where stock leaves `own`."""
    return policy.band_factor * own + (8 * eps) ** 2


def gap_limit(own: float, eps: float, policy: GatePolicy) -> float:
    """Nats, where stock leaves `own`. Log-probabilities travel as float32: no finer than that."""
    return policy.band_factor * own + 64 * min(eps, 2.0**-10)


def band_failures(found: Band, stock: Band, eps: float, policy: GatePolicy) -> tuple[str, ...]:
    """Which percentiles lie outside stock's band. Low precision shows at the median."""
    rows = (
        ("KL p50", found.kl_p50, stock.kl_p50, kl_limit),
        ("KL p99", found.kl_p99, stock.kl_p99, kl_limit),
        ("log-probability gap p50", found.gap_p50, stock.gap_p50, gap_limit),
        ("log-probability gap p99", found.gap_p99, stock.gap_p99, gap_limit),
    )
    return tuple(
        f"{name} {got:.2e} nats, over {limit(own, eps, policy):.2e} ({own:.2e} is stock's)"
        for name, got, own, limit in rows
        if not got <= limit(own, eps, policy)
    )


# --- timed outputs --------------------------------------------------------------------------------


def output_failure(
    found: Sequence[RequestOutput],
    wanted: Sequence[RequestOutput],
    band: Band,
    eps: float,
    policy: GatePolicy,
) -> str | None:
    """Why timed runs' own outputs are not those of `wanted`, or None. Pool the requests of all
    runs: each must stay in stock's band by its median, but for the few where a router's tie fell
    the other way, which happens in honest runs; and no position may be far off."""
    if len(found) != len(wanted):
        return f"answered {len(found)} requests, not {len(wanted)}"
    both = list(zip(found, wanted, strict=True))
    for got, want in both:
        shapes = got.logprobs.shape, got.top_token_ids.shape
        if shapes != (want.logprobs.shape, want.top_token_ids.shape):
            return f"a request has outputs of shapes {shapes}, not {want.logprobs.shape}"
        if not np.isfinite(got.logprobs).all():
            return "log-probabilities hold NaN or infinity"
    gaps = [np.abs(g.logprobs.astype(np.float64) - w.logprobs) for g, w in both]
    limit = gap_limit(band.gap_p99, eps, policy)
    num_off = sum(float(np.median(g)) > limit for g in gaps)
    if num_off > max(1.0, policy.max_differing_rate * len(gaps)):
        return f"{num_off} of {len(gaps)} requests have a median gap over {limit:.2e} nats"
    far, limit = float(np.percentile(np.concatenate(gaps), 99)), limit + FLIP_NATS
    if far > limit:
        return f"log-probability gap p99 {far:.2e} nats, over {limit:.2e}"
    tops = np.concatenate([g.top_token_ids != w.top_token_ids for g, w in both])
    if tops.sum() > max(1.0, (policy.max_differing_rate + 8 * min(eps, 0.01)) * len(tops)):
        return f"{int(tops.sum())} of {len(tops)} top tokens differ"
    return None


# --- speed ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Effect:
    """Log ratios of times; positive is faster."""

    median: float
    band: float  # stock against stock, at `band_z`
    shrunk: float

    @property
    def gain(self) -> float:
        return float(np.expm1(self.shrunk))

    @property
    def aa_band(self) -> float:
        return float(np.expm1(self.band))


def effect(stock_s: Sequence[float], candidate_s: Sequence[float], policy: GatePolicy) -> Effect:
    """Of paired samples, at least two. The noise is the larger of two: stock against the next
    stock, and the pairs' own spread, so that an unsteady candidate is not called faster."""
    stock, candidate = np.log(np.asarray(stock_s)), np.log(np.asarray(candidate_s))
    pairs = stock - candidate
    median = _pseudomedian(pairs)
    noise = max(_spread(np.diff(stock)), _spread(pairs - median), policy.noise_floor)
    error = 1.05 * noise / float(np.sqrt(len(pairs)))  # of a pseudomedian
    keep = max(0.0, 1.0 - (error / median) ** 2) if median else 0.0
    return Effect(median, policy.band_z * error, median * keep)


def _pseudomedian(values: Floats) -> float:
    """Hodges-Lehmann: the median over the means of all pairs. As good as a mean on quiet
    machines, and unmoved by a quarter of samples that something else disturbed."""
    i, j = np.triu_indices(len(values))
    return float(np.median((values[i] + values[j]) / 2))


def _spread(values: Floats) -> float:
    """Robust standard deviation around zero; half the plain one where the robust one is luck."""
    robust = 1.4826 * float(np.median(np.abs(values)))
    return max(robust, 0.5 * float(np.sqrt(np.mean(np.square(values)))))


def is_faster(found: Effect, policy: GatePolicy) -> bool:
    return found.median > found.band and found.gain > policy.min_gain


def is_settled(found: Effect, num_pairs: int, policy: GatePolicy) -> bool:
    """More pairs would hardly change the answer: clearly faster; or not, for which one standard
    error is enough, and before `min_pairs` the whole band."""
    wanted = float(np.log1p(policy.min_gain))
    if num_pairs < policy.min_pairs:
        return num_pairs >= 3 and found.median + found.band < wanted
    error = found.band / policy.band_z
    return found.median - found.band > wanted or found.median + error < wanted


def is_over(
    found: Effect, num_pairs: int, elapsed_s: float, limit_s: float, policy: GatePolicy
) -> bool:
    """No further pair: the answer is settled or the time is up. One that is a standard error over
    the wanted gain gets more of it, since noise is the only thing against it."""
    if is_settled(found, num_pairs, policy) or num_pairs >= policy.max_pairs:
        return True
    is_promising = found.median - found.band / policy.band_z > np.log1p(policy.min_gain)
    is_late = elapsed_s > limit_s * (4 if is_promising else 1)
    return num_pairs >= policy.min_pairs and is_late


def no_effect(num_orig_calls: int, num_candidate_calls: int, policy: GatePolicy) -> str | None:
    if num_candidate_calls == 0:
        return "no effect: no batch of the workload reached it"
    if num_orig_calls >= policy.orig_rate * num_candidate_calls:
        return f"no effect: {num_orig_calls} ORIG calls in {num_candidate_calls} of its own"
    return None


def num_tokens(workload: Workload) -> int:
    """By our own count; an engine's is not asked."""
    return workload.num_prompt_tokens + workload.num_output_tokens


def roofline_floor_s(
    workload: Workload, modules: Sequence[ModuleInfo], layers_rate: float, policy: GatePolicy
) -> float:
    """No replay is faster: a decode step a token of the longest output, the weights that every
    step must touch (leaves, without experts and embeddings), at a bandwidth no machine has."""
    paths = {m.path for m in modules}
    parents = {p.rsplit(".", n)[0] for p in paths for n in range(1, p.count(".") + 1)}
    dense = sum(
        m.num_weight_bytes
        for m in modules
        if m.path not in parents and not any(part in m.cls for part in SPARSE)
    )
    num_steps = max((len(r.output_token_ids) for r in workload.requests), default=0)
    return num_steps * dense * layers_rate / policy.bytes_per_s


def decide(trial: Trial, policy: GatePolicy) -> Trial:
    """Everything that follows from what a trial measured: gains, band, `faster`, `reason`."""
    if trial.stock.num_repeats < 2:
        return replace(trial, faster=False)
    found = effect(trial.stock.samples_s, trial.candidate.samples_s, policy)
    later = held_out_effect(trial, policy)
    trial = replace(
        trial,
        aa_band=found.aa_band,
        gain=found.gain,
        held_out_gain=None if later is None else later.gain,
        faster=False,
    )
    if trial.faulted or trial.recycle or not trial.agrees:
        return trial
    idle = no_effect(trial.num_orig_calls, trial.num_candidate_calls, policy)
    if idle is not None:
        return replace(trial, reason=idle)
    if not is_faster(found, policy):
        return replace(trial, reason=f"not faster: {describe(found)}")
    if later is not None and not later.median > later.band:
        return replace(trial, reason=f"not faster on the later slice: {describe(later)}")
    return replace(trial, faster=True, reason=f"faster: {describe(found)}")


def describe(found: Effect) -> str:
    return f"{found.gain:+.1%} tokens/s, A/A band {found.aa_band:.1%}"


def held_out_effect(trial: Trial, policy: GatePolicy) -> Effect | None:
    stock, candidate = trial.held_out_stock, trial.held_out_candidate
    if stock is None or candidate is None:
        return None
    return effect(stock.samples_s, candidate.samples_s, policy)
