"""A bundle stands by itself: what was changed afterwards shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes_engine import HONEST, KEY, FakeEngine, FakeEngines, portfolio, workload

from compiler import evidence
from compiler.candidates import Candidate, Event
from compiler.gate import GatePolicy, ValidationReport
from compiler.judge import Court, Setup, Workloads

POLICY = GatePolicy(min_pairs=3, max_pairs=4)


@pytest.fixture(scope="module")
def proof() -> str:
    """Of a candidate that really went through the gate."""
    engines = FakeEngines()
    workloads = Workloads(workload(0), workload(1), workload(2))
    court = Court(
        Setup(engines.connect, "tuning", "reference", KEY, workloads, POLICY), clock=engines.ticks
    )
    change = portfolio(HONEST)
    candidate = Candidate("c-0001", "s-01", None, "search", "norm without mean", change)
    for event in (Event.AGREES, Event.FASTER, Event.FASTER):
        candidate = candidate.after(event, at=1.0)
    return evidence.bundle(
        candidate,
        workloads={"screen": workloads.screen.digest, "confirm": workloads.confirm.digest},
        environment=evidence.environment(FakeEngine().info()),
        policy=POLICY,
        validation=court.validate(change),
        screen=court.screen(change),
        confirm=court.confirm(change),
    )


def test_a_true_bundle_verifies(proof: str) -> None:
    assert evidence.verify(proof) == []


def test_a_bundle_keeps_every_sample(proof: str) -> None:
    kept = json.loads(proof)["confirm"]
    assert len(kept["stock"]["samples_s"]) == len(kept["candidate"]["samples_s"]) >= 3


def test_a_bundle_shows_no_prompt(proof: str) -> None:
    assert "token_ids" not in proof


def _with(proof: str, value: Any, *path: str | int) -> str:
    document = json.loads(proof)
    place = document
    for step in path[:-1]:
        place = place[step]
    assert place[path[-1]] != value
    place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        (HONEST + "#", ("forwards", 0, "source"), "forward pass 0"),
        ([1, 2], ("forwards", 0, "guard"), "guard"),
        ("00", ("digest",), "portfolio"),
        (0.9, ("confirm", "gain"), "gain"),
        (0.0, ("screen", "aa_band"), "aa_band"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], ("confirm", "stock", "samples_s"), "cannot be read"),
        (False, ("screen", "faster"), "rules say"),
        (["it was wrong"], ("validation", "failures"), "1 failures"),
        (None, ("confirm",), "without a confirm"),
        (None, ("validation",), "without a passed validation"),
        (0.5, ("validation", "kl_p99"), "KL p99"),
        (None, ("validation", "kl_p99"), "KL p99"),
        (9, ("version",), "version"),
    ],
)
def test_what_was_changed_shows(
    proof: str, value: Any, path: tuple[str | int, ...], why: str
) -> None:
    found = evidence.verify(_with(proof, value, *path))
    assert any(why in line for line in found), found


def test_a_candidate_that_was_never_compared_has_a_bundle_too() -> None:
    inf = float("inf")
    report = ValidationReport(False, inf, inf, inf, None, 1e-12, ("it raised",), faulted=True)
    candidate = Candidate("c-0002", "s-01", None, "search", "", portfolio(HONEST))
    candidate = candidate.after(Event.FAULTED, at=1.0)
    made = evidence.bundle(
        candidate,
        workloads={},
        environment=evidence.environment(FakeEngine().info()),
        policy=POLICY,
        validation=report,
    )
    assert evidence.verify(made) == []


def test_what_is_no_bundle_says_so() -> None:
    assert "cannot be read" in evidence.verify("{}")[0]


def test_the_digest_is_of_every_byte(proof: str) -> None:
    assert evidence.digest(proof) != evidence.digest(proof + " ")
