from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.candidates import EXITS, NEXT, Candidate, Event, Stage, WrongEvent
from engines.engine import Portfolio

BEFORE_TRAFFIC = (Stage.PROPOSED, Stage.VALID, Stage.SCREENED, Stage.CONFIRMED)
IN_TRAFFIC = (Stage.SHADOW, Stage.CANARY, Stage.LIVE)


def candidate(*events: Event) -> Candidate:
    found = Candidate("c-0142", "s-1", None, "search", "norms", Portfolio())
    for at, event in enumerate(events):
        found = found.after(event, float(at), f"note {at}")
    return found


TO_LIVE = (
    Event.AGREES,
    Event.FASTER,
    Event.FASTER,
    Event.ADMITTED,
    Event.AGREES,
    Event.HELD,
)


def test_a_candidate_goes_from_proposed_to_live_without_skipping_a_stage() -> None:
    stages = [candidate(*TO_LIVE[:n]).stage for n in range(len(TO_LIVE) + 1)]
    assert stages == [*BEFORE_TRAFFIC, *IN_TRAFFIC]


@pytest.mark.parametrize("event", [Event.DISAGREES, Event.NO_EFFECT, Event.FAULTED])
@pytest.mark.parametrize("stage", BEFORE_TRAFFIC)
def test_before_traffic_the_way_out_is_rejected(stage: Stage, event: Event) -> None:
    assert NEXT[stage, event] is Stage.REJECTED


@pytest.mark.parametrize("event", [Event.DISAGREES, Event.FAULTED, Event.BREACHED])
@pytest.mark.parametrize("stage", IN_TRAFFIC)
def test_in_traffic_the_way_out_is_rolled_back(stage: Stage, event: Event) -> None:
    assert NEXT[stage, event] is Stage.ROLLED_BACK


def test_a_breach_in_production_rolls_back() -> None:
    assert candidate(*TO_LIVE, Event.BREACHED).stage is Stage.ROLLED_BACK


@pytest.mark.parametrize("stage", [*BEFORE_TRAFFIC, Stage.LIVE])
def test_a_better_one_supersedes(stage: Stage) -> None:
    assert NEXT[stage, Event.OUTDONE] is Stage.SUPERSEDED


@pytest.mark.parametrize(("stage", "event"), list(itertools.product(sorted(EXITS), Event)))
def test_no_event_leads_back_from_an_exit(stage: Stage, event: Event) -> None:
    assert (stage, event) not in NEXT


def test_nobody_meets_traffic_without_having_been_admitted() -> None:
    ways_in = {(s, e) for (s, e), to in NEXT.items() if to in IN_TRAFFIC and s not in IN_TRAFFIC}
    assert ways_in == {(Stage.CONFIRMED, Event.ADMITTED)}


def test_the_story_keeps_every_event_with_its_time_and_note() -> None:
    story = candidate(Event.AGREES, Event.NO_EFFECT).story
    assert [(x.at, x.event, x.stage, x.note) for x in story] == [
        (0.0, Event.AGREES, Stage.VALID, "note 0"),
        (1.0, Event.NO_EFFECT, Stage.REJECTED, "note 1"),
    ]


def test_a_wrong_event_is_told_with_the_story_so_far() -> None:
    says = r"c-0142 is screened and cannot take 'held' \(so far: agrees → faster\)"
    with pytest.raises(WrongEvent, match=says):
        candidate(Event.AGREES, Event.FASTER).after(Event.HELD, 3.0)


def test_a_candidate_is_not_changed_by_an_event() -> None:
    proposed = candidate()
    proposed.after(Event.AGREES, 1.0)
    assert (proposed.stage, proposed.story) == (Stage.PROPOSED, ())


@given(st.lists(st.sampled_from(Event)))
def test_whatever_is_reported_the_stage_is_the_one_its_story_ends_with(
    events: list[Event],
) -> None:
    found = candidate()
    for event in events:
        if (found.stage, event) in NEXT:
            found = found.after(event, 0.0)
    assert found.stage is (found.story[-1].stage if found.story else Stage.PROPOSED)
    assert sum(line.stage in EXITS for line in found.story) <= 1
