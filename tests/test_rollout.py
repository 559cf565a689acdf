from __future__ import annotations

from dataclasses import replace

import pytest
from fakes_control import mirrored, sample

from compiler.candidates import Event, Stage
from profiler.samples import Outcome, RequestSample
from sidecar.comparison import AgreementPolicy
from sidecar.config import Autonomy
from sidecar.rollout import (
    Action,
    ArmFigures,
    Do,
    Figures,
    Rollout,
    RolloutPolicy,
    breach,
    decide,
    furthest,
)

POLICY = RolloutPolicy(
    steps=(0.1, 0.5, 1.0), step_s=10, step_requests=5, agreement=AgreementPolicy(min_results=20)
)
SHADOW = Rollout("c-1", "d", Stage.SHADOW, since_s=0.0, until=Stage.LIVE)
CANARY = SHADOW.at(Stage.CANARY, now_s=100.0, step=0)
LIVE = SHADOW.at(Stage.LIVE, now_s=100.0, step=2)


def arm(num: int, num_failed: int = 0, tpot_s: float = 0.01, at_s: float = 105.0) -> ArmFigures:
    good = sample(finished_s=at_s, tpot_s=tpot_s)
    bad = replace(good, outcome=Outcome.SERVER_ERROR, tpot_s=None, num_output_tokens=None)
    return ArmFigures((bad,) * num_failed + (good,) * (num - num_failed))


def after(rollout: Rollout, figures: Figures, now_s: float = 200.0) -> Action:
    return decide(rollout, figures, now_s, POLICY)


GOOD = Figures(stable=arm(50), canary=arm(20), baseline=arm(50))


def test_a_confirmed_candidate_is_admitted() -> None:
    new = replace(SHADOW, stage=Stage.CONFIRMED)
    action = after(new, Figures())
    assert (action.do, action.event) == (Do.ADMIT, Event.ADMITTED)


def test_a_shadow_that_agrees_gets_the_first_step() -> None:
    action = after(SHADOW, Figures(mirrored=(mirrored("d"),) * 30))
    assert (action.do, action.event, action.weight) == (Do.STEP, Event.AGREES, 0.1)


def test_a_shadow_with_too_few_answers_is_held() -> None:
    action = after(SHADOW, Figures(mirrored=(mirrored("d"),) * 3))
    assert action.do is Do.HOLD
    assert action.reason == "insufficient_data: 3 mirrored answers"


def test_a_shadow_that_disagrees_is_rolled_back() -> None:
    action = after(SHADOW, Figures(mirrored=(mirrored("d", "diff"),) * 10))
    assert (action.do, action.event) == (Do.ROLL_BACK, Event.BREACHED)


def test_a_canary_steps_up_when_time_and_requests_are_there() -> None:
    action = after(CANARY, GOOD)
    assert (action.do, action.weight) == (Do.STEP, 0.5)


def test_a_canary_without_traffic_is_held_for_ever() -> None:
    action = after(CANARY, replace(GOOD, canary=ArmFigures()), now_s=1e9)
    assert action.do is Do.HOLD
    assert action.reason.startswith("insufficient_data")


def test_requests_of_an_earlier_step_do_not_count_for_this_one() -> None:
    action = after(CANARY, replace(GOOD, canary=arm(20, at_s=99.0)))
    assert action.do is Do.HOLD


def test_a_step_lasts_its_time_however_many_requests_come() -> None:
    assert after(CANARY, GOOD, now_s=105.0).do is Do.WAIT


def test_the_last_step_is_committed() -> None:
    action = after(CANARY.at(Stage.CANARY, 100.0, step=2), GOOD)
    assert (action.do, action.event, action.weight) == (Do.COMMIT, Event.HELD, 1.0)


@pytest.mark.parametrize("rollout", [SHADOW, CANARY, LIVE])
def test_failures_roll_back_in_every_state(rollout: Rollout) -> None:
    assert after(rollout, replace(GOOD, canary=arm(8, num_failed=4))).do is Do.ROLL_BACK


@pytest.mark.parametrize("rollout", [SHADOW, CANARY, LIVE])
def test_an_engine_in_trouble_rolls_back_in_every_state(rollout: Rollout) -> None:
    assert after(rollout, replace(GOOD, trouble="it is silent")).do is Do.ROLL_BACK


def test_a_live_candidate_that_became_slow_is_rolled_back() -> None:
    action = after(LIVE, replace(GOOD, canary=arm(20, tpot_s=0.03)))
    assert action.reason.startswith("20 of 20 canary requests are over 2 times as slow between")


def test_a_canary_with_a_few_slow_requests_is_not_slow() -> None:
    mixed = ArmFigures(arm(14).samples + arm(6, tpot_s=0.1).samples)
    assert breach(replace(GOOD, canary=mixed), POLICY) is None


def test_one_failure_is_no_proof() -> None:
    assert breach(replace(GOOD, canary=arm(8, num_failed=1)), POLICY) is None


def test_failures_that_stable_has_too_are_not_the_canarys() -> None:
    both = replace(GOOD, stable=arm(50, num_failed=15), canary=arm(20, num_failed=6))
    assert breach(both, POLICY) is None


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_CANCELLED, Outcome.CLIENT_ERROR])
def test_what_clients_do_is_never_held_against_a_canary(outcome: Outcome) -> None:
    samples: tuple[RequestSample, ...] = (sample(outcome=outcome),) * 100
    assert breach(replace(GOOD, canary=ArmFigures(samples)), POLICY) is None


def test_a_canary_that_took_over_is_compared_with_stable_when_it_had_all_traffic() -> None:
    quiet_stable = replace(GOOD, stable=arm(50, tpot_s=0.004), canary=arm(20, tpot_s=0.012))
    assert breach(quiet_stable, POLICY) is None


@pytest.mark.parametrize(
    ("autonomy", "stage"),
    [
        (Autonomy.OBSERVE, None),
        (Autonomy.RECOMMEND, None),
        (Autonomy.SHADOW, Stage.SHADOW),
        (Autonomy.CANARY, Stage.CANARY),
        (Autonomy.AUTO, Stage.LIVE),
    ],
)
def test_autonomy_says_how_far_it_goes(autonomy: Autonomy, stage: Stage | None) -> None:
    assert furthest(autonomy) is stage


def test_autonomy_shadow_ends_at_the_shadow() -> None:
    held = replace(SHADOW, until=Stage.SHADOW)
    assert after(held, Figures(mirrored=(mirrored("d"),) * 30)).do is Do.HOLD


def test_autonomy_canary_never_commits() -> None:
    held = replace(CANARY.at(Stage.CANARY, 100.0, step=2), until=Stage.CANARY)
    assert after(held, GOOD).do is Do.HOLD
