"""Does the shadow answer as the primary does? Pure: what to ask, how far apart, what it says.

Text equality cannot be the test, since batching alone flips near ties. A greedy answer is judged by
how much the shadow would rather have said something else at any position of it (`largest_gap`);
when the two texts differ, both are judged, because a forced answer runs as a prefill and a broken
decode shows only in what the shadow itself wrote. A sampled answer is judged by how it ended. One
result proves little: `agreement` looks at many, as often as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any


class MirrorOutcome(StrEnum):
    """The label of one eligible request; `skipped:WHY` is the fifth, made by `skipped`."""

    OK = "ok"
    DIFF = "diff"
    ERROR = "error"  # the shadow failed, the primary did not
    SHED = "shed"  # the mirror was full


def skipped(why: str) -> str:
    """Label of a request that is not mirrored. `why` is one of a few fixed words."""
    return f"skipped:{why}"


class Length(StrEnum):
    """First word of a result's note: how the shadow's answer compares in length."""

    SAME = "same"
    LONGER = "longer"
    SHORTER = "shorter"


@dataclass(frozen=True, slots=True)
class MirrorResult:
    """What became of one eligible request. Times of things not seen are 0."""

    outcome: str  # a MirrorOutcome, or skipped:WHY
    digest: str  # portfolio of the shadow; "" is stock
    max_logprob_gap: float = 0.0  # nats, over the answer; 0 where it was not asked
    num_compared_tokens: int = 0
    primary_ttft_s: float = 0.0
    shadow_ttft_s: float = 0.0
    primary_e2e_s: float = 0.0
    shadow_e2e_s: float = 0.0
    note: str = ""  # a Length, then what else was seen; no user text


# ---- one request -------------------------------------------------------------------------------


def is_greedy(body: Mapping[str, Any]) -> bool:
    """Temperature is asked to be 0. Absent, it is the engine's default, which we do not know."""
    return body.get("temperature") == 0


def why_not(path: str, body: object) -> str | None:
    """Why a request is not to be mirrored, or None. Whatever leaves something behind is not."""
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return "route"
    if not isinstance(body, dict):
        return "body"
    side_effects = ("store", "background", "previous_response_id", "conversation", "session_id")
    if any(body.get(key) for key in (*side_effects, "kv_transfer_params")):
        return "side_effect"
    if any(body.get(key) not in (None, 1) for key in ("n", "best_of")) or body.get(
        "use_beam_search"
    ):
        return "choices"
    return "batch" if _is_batch(body.get("prompt")) else None


def _is_batch(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


_NOT_IN_REPLAY = (
    *("stream_options", "logprobs", "top_logprobs", "max_completion_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "echo", "response_format", "suffix"),
)


def copied(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The copy for the shadow where it differs from the client's body: a stream that would not say
    its usage is asked to. None: send the client's bytes."""
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    if not body.get("stream") or options.get("include_usage"):
        return None
    return {**body, "stream_options": {**options, "include_usage": True}}


def forced(path: str, body: Mapping[str, Any], answer: str) -> dict[str, Any] | None:
    """The request that replays `answer` teacher-forced, or None where text cannot carry it."""
    asked: dict[str, Any] = {k: v for k, v in body.items() if k not in _NOT_IN_REPLAY}
    asked |= {"stream": False, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    match body:
        case {"prompt": str(prompt)} if path == "/v1/completions":
            return asked | {"prompt": prompt + answer}
        case {"messages": list(messages)} if path == "/v1/chat/completions":
            messages = [*messages, {"role": "assistant", "content": answer}]
            template = {"continue_final_message": True, "add_generation_prompt": False}
            return asked | template | {"messages": messages}
    return None


@dataclass(frozen=True, slots=True)
class Gap:
    """How much the shadow would rather have said something else, in nats, at the worst position."""

    max_logprob_gap: float
    num_tokens: int


def largest_gap(
    reply: Mapping[str, Any], num_prompt_tokens: int, num_answer: int | None
) -> Gap | None:
    """Read a forced replay. None when the text came back as other tokens than the `num_answer` that
    were generated, where that is known: it says nothing then. Raises `ValueError` when the reply
    holds no usable `prompt_logprobs`."""
    positions = _prompt_logprobs(reply)[num_prompt_tokens:]
    # a stop token counts as generated and is in no text
    if not positions:
        return None
    if num_answer is not None and len(positions) not in (num_answer, num_answer - 1):
        return None
    gaps = [max(logprobs) - min(logprobs) for logprobs in map(_logprobs, positions)]
    return Gap(max(gaps), len(gaps))


def _prompt_logprobs(reply: Mapping[str, Any]) -> list[Any]:
    """On top for chat, in the choice for completions."""
    match reply:
        case {"prompt_logprobs": list(positions)}:
            return positions
        case {"choices": [{"prompt_logprobs": list(positions)}, *_]}:
            return positions
    raise ValueError("the reply has no prompt_logprobs")


def _logprobs(position: object) -> list[float]:
    """The actual token's and the best one's; one value where they are the same token."""
    match position:
        case {**entries} if entries:
            values = [e["logprob"] for e in entries.values() if isinstance(e, dict)]
            if values and all(isinstance(v, int | float) and math.isfinite(v) for v in values):
                return values
    raise ValueError("a position of prompt_logprobs has no finite logprob")


def length(primary: int | None, shadow: int | None) -> Length:
    """By tokens. Unknown counts as the same: it proves nothing."""
    if primary is None or shadow is None or primary == shadow:
        return Length.SAME
    return Length.LONGER if shadow > primary else Length.SHORTER


# ---- many requests -----------------------------------------------------------------------------


class Agreement(StrEnum):
    INSUFFICIENT_DATA = "insufficient_data"
    AGREES = "agrees"
    DISAGREES = "disagrees"


@dataclass(frozen=True, slots=True)
class AgreementPolicy:
    """What a shadow may do and still agree. Rates are 0-1 of the requests it was asked."""

    min_results: int = 20
    max_diff_rate: float = 0.02
    max_error_rate: float = 0.02
    max_latency_ratio: float = 2.0  # median end to end, shadow over primary
    false_alarm_rate: float = 0.01  # for each rule, over all looks together


def agreement(results: Sequence[MirrorResult], policy: AgreementPolicy) -> Agreement:
    """The verdict on what was mirrored so far. Skipped and shed requests say nothing.

    The rate and length rules are likelihood ratios that stay valid when looked at after every
    result; the latency rule is a plain bound and waits for `min_results`.
    """
    asked = [r for r in results if r.outcome in ("ok", "diff", "error")]
    answered = [r for r in asked if r.outcome != "error"]
    num_errors, num_diffs = len(asked) - len(answered), sum(r.outcome == "diff" for r in answered)
    limit = math.log(1 / policy.false_alarm_rate)
    if (
        excess(num_errors, len(asked), policy.max_error_rate) >= limit
        or excess(num_diffs, len(answered), policy.max_diff_rate) >= limit
        or _lopsided(answered) >= limit
    ):
        return Agreement.DISAGREES
    if len(answered) < policy.min_results:
        return Agreement.INSUFFICIENT_DATA
    if _latency_ratio(answered) > policy.max_latency_ratio:
        return Agreement.DISAGREES
    within = num_errors <= policy.max_error_rate * len(
        asked
    ) and num_diffs <= policy.max_diff_rate * len(answered)
    return Agreement.AGREES if within else Agreement.INSUFFICIENT_DATA


def excess(num_hits: int, num: int, allowed: float) -> float:
    """Log evidence that the true rate is above `allowed`: a mixture over what it could be.

    Each part has mean 1 or less while the rate is within what is allowed, so by Ville's inequality
    it ever exceeds log(1/a) with probability a at most, however often it is looked at.
    """
    allowed = min(max(allowed, 1e-6), 0.5)
    rates = [allowed + (1 - allowed) * share for share in (0.05, 0.2, 0.5)]
    parts = [
        num_hits * math.log(rate / allowed)
        + (num - num_hits) * math.log((1 - rate) / (1 - allowed))
        for rate in rates
    ]
    return _log_mean_exp(parts)


def _lopsided(results: Sequence[MirrorResult]) -> float:
    """Log evidence that one side's answers are longer: the same engine is longer half the time."""
    notes = [r.note.partition(" ")[0] for r in results]
    longer, shorter = notes.count(Length.LONGER), notes.count(Length.SHORTER)
    return _log_mean_exp(
        [
            a * math.log(0.75 / 0.5) + b * math.log(0.25 / 0.5)
            for a, b in ((longer, shorter), (shorter, longer))
        ]
    )


def _log_mean_exp(parts: Sequence[float]) -> float:
    top = max(parts)
    return top + math.log(sum(math.exp(p - top) for p in parts) / len(parts))


def _latency_ratio(results: Sequence[MirrorResult]) -> float:
    timed = [r for r in results if r.primary_e2e_s > 0 and r.shadow_e2e_s > 0]
    if not timed:
        return 0.0
    return median(r.shadow_e2e_s for r in timed) / median(r.primary_e2e_s for r in timed)
