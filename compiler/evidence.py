"""One candidate's evidence as one JSON document that anybody can check again, offline.

It holds sources, guards, digests, raw samples and verdicts; no prompt and no output.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

import numpy as np

from compiler import gate
from compiler.candidates import Candidate, Stage
from compiler.gate import GatePolicy, Trial, ValidationReport
from engines.engine import (
    CONTRACT_VERSION,
    CandidateError,
    EngineInfo,
    ForwardPass,
    Measurement,
    Portfolio,
)

EVIDENCE_VERSION = 1
TRIALS = ("screen", "confirm")
PROVEN = (Stage.CONFIRMED, Stage.SHADOW, Stage.CANARY, Stage.LIVE)


def bundle(
    candidate: Candidate,
    *,
    workloads: Mapping[str, str],
    environment: Mapping[str, str],
    policy: GatePolicy,
    validation: ValidationReport | None = None,
    screen: Trial | None = None,
    confirm: Trial | None = None,
) -> str:
    """Canonical JSON. `workloads` maps a name (screen, confirm, held_out) to a workload's digest;
    the verdict is the candidate's stage with its story."""
    document = {
        "version": EVIDENCE_VERSION,
        "contract_version": CONTRACT_VERSION,
        "candidate": {
            "id": candidate.id,
            "search_id": candidate.search_id,
            "parent_id": candidate.parent_id,
            "author": candidate.author,
            "summary": candidate.summary,
        },
        "digest": candidate.change.digest,
        "forwards": [
            {
                "digest": f.digest,
                "guard": [f.guard.min_tokens, f.guard.max_tokens],
                "source": f.source,
            }
            for f in candidate.change.forwards
        ],
        "workloads": dict(workloads),
        "environment": dict(environment),
        "policy": asdict(policy),
        "validation": _finite(asdict(validation)) if validation else None,
        "screen": asdict(screen) if screen else None,
        "confirm": asdict(confirm) if confirm else None,
        "verdict": candidate.stage.value,
        "story": [asdict(line) for line in candidate.story],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _finite(kept: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: null where a candidate never came to be compared."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in kept.items()}


def digest(bundle: str) -> str:
    """sha256 hex: the bundle's name in the store and on the board."""
    return hashlib.sha256(bundle.encode()).hexdigest()


def environment(info: EngineInfo) -> dict[str, str]:
    """The machine and the engine that the samples come from."""
    return {
        "engine": info.engine,
        "model": info.model,
        "dtype": info.dtype,
        "device": info.device,
        "num_layers": str(info.num_layers),
        "num_cpus": str(os.cpu_count()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def verify(bundle: str) -> list[str]:
    """What does not hold, re-derived from sources and raw samples; empty when all of it does."""
    try:
        document = json.loads(bundle)
        if document["version"] != EVIDENCE_VERSION:
            return [f"the bundle has version {document['version']}, not {EVIDENCE_VERSION}"]
        policy = GatePolicy(**document["policy"])
        return [
            *_digests(document),
            *_validation(document["validation"], document["environment"], policy),
            *(w for name in TRIALS for w in _trial(name, document[name], policy)),
            *_verdict(document),
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        return [f"the bundle cannot be read: {type(e).__name__}: {e}"]


def _digests(document: Mapping[str, Any]) -> list[str]:
    wrong: list[str] = []
    forwards = []
    for i, kept in enumerate(document["forwards"]):
        try:
            forward = ForwardPass.from_source(kept["source"])
        except CandidateError as e:
            return [f"forward pass {i} is none: {e}"]
        if forward.digest != kept["digest"]:
            wrong.append(f"forward pass {i} says {kept['digest'][:12]}, is {forward.digest[:12]}")
        if [forward.guard.min_tokens, forward.guard.max_tokens] != kept["guard"]:
            wrong.append(f"forward pass {i} says guard {kept['guard']}, its source says otherwise")
        forwards.append(forward)
    derived = Portfolio(tuple(forwards)).digest
    if derived != document["digest"]:
        wrong.append(f"the portfolio says {document['digest'][:12]}, is {derived[:12]}")
    return wrong


def _validation(
    kept: Mapping[str, Any] | None, environment: Mapping[str, str], policy: GatePolicy
) -> list[str]:
    if kept is None:
        return []
    wrong = []
    if kept["passed"] != (not kept["failures"]):
        wrong.append(f"validation says passed={kept['passed']}, {len(kept['failures'])} failures")
    limit = gate.kl_limit(kept["band"], gate.EPS[environment["dtype"]], policy)
    found = kept["kl_p99"]
    if kept["passed"] and (found is None or found > limit):
        wrong.append(f"validation passed with KL p99 {found} nats, over {limit:.2e}")
    return wrong


def _trial(name: str, kept: Mapping[str, Any] | None, policy: GatePolicy) -> list[str]:
    if kept is None:
        return []
    trial = _as_trial(kept)
    again = gate.decide(trial, policy)
    wrong = [
        f"{name} says {field} {getattr(trial, field)}, its samples say {getattr(again, field)}"
        for field in ("aa_band", "gain", "held_out_gain")
        if not _same(getattr(trial, field), getattr(again, field))
    ]
    if trial.faster != again.faster:
        wrong.append(f"{name} says faster={trial.faster}, the rules say: {again.reason}")
    return wrong


def _as_trial(kept: Mapping[str, Any]) -> Trial:
    names = ("stock", "candidate", "held_out_stock", "held_out_candidate")
    timings = {name: _as_measurement(kept[name]) for name in names}
    return Trial(**{**kept, **timings})


def _as_measurement(kept: Mapping[str, Any] | None) -> Measurement | None:
    if kept is None:
        return None
    return Measurement(**{**kept, "samples_s": tuple(kept["samples_s"])})


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= 1e-9 * max(1.0, abs(a), abs(b))


def _verdict(document: Mapping[str, Any]) -> list[str]:
    """A proven candidate has every step of the proof."""
    if document["verdict"] not in PROVEN:
        return []
    wrong = []
    if not (document["validation"] or {}).get("passed"):
        wrong.append(f"it is {document['verdict']} without a passed validation")
    for name in TRIALS:
        if not (document[name] or {}).get("faster"):
            wrong.append(f"it is {document['verdict']} without a {name} that was faster")
    return wrong
