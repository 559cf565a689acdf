from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fakes_engine import FakeEngine, workload
from fakes_search import (
    SEARCH,
    FakeEngines,
    FakeJudge,
    MemoryStore,
    Says,
    forward,
    report,
    search,
    trial,
)

from compiler import evidence
from compiler.agents.rewrites import NOTHING
from compiler.agents.search import SearchAgent, agent_named
from compiler.bench import Bench, Hardware, SearchOver, headroom
from compiler.candidates import Candidate, Event, Stage
from compiler.gate import Trial
from compiler.judge import VerdictVoid
from compiler.search import MAX_JUDGE_FAILURES, MAX_STRIKES, SearchBudget
from engines.engine import EngineGone, Portfolio

A, B, C = forward("a"), forward("b"), forward("c")
BOTH = Portfolio((A, B))


class Killed(BaseException):
    """As a kill -9: nothing that runs after it is asked."""


def stages(store: MemoryStore) -> list[Stage]:
    return [c.stage for c in store.candidates(SEARCH)]


# --- one candidate --------------------------------------------------------------------------------


def test_the_fastest_confirmed_candidate_wins() -> None:
    store = MemoryStore()
    found = search(FakeJudge({"a": 0.1, "b": 0.3}), Says(A, B), store=store)
    assert (found.winner_id, stages(store)) == ("c-0002", [Stage.SCREENED, Stage.CONFIRMED])


def test_wrong_outputs_are_rejected_before_any_clock_runs() -> None:
    judge = FakeJudge({"a": 9.9}, {"a": report(["KL p50 1e-2 nats"])})
    found = search(judge, Says(A))
    assert (judge.asked, found.rejections) == (["validate a"], {"disagrees": 1})


def test_what_is_not_faster_is_rejected() -> None:
    found = search(FakeJudge(), Says(A, B))
    assert (found.winner_id, found.best, found.rejections) == (None, None, {"no_effect": 2})


def test_a_screening_win_that_does_not_hold_is_no_winner() -> None:
    store = MemoryStore()
    found = search(FakeJudge({"a": 0.2}, confirmed={"a": 0.0}), Says(A), store=store)
    assert (found.winner_id, stages(store)) == (None, [Stage.REJECTED])


def test_when_the_best_does_not_hold_the_next_one_is_confirmed() -> None:
    judge = FakeJudge({"a": 0.2, "b": 0.1}, confirmed={"a": 0.0, "b": 0.1})
    assert search(judge, Says(A, B)).winner_id == "c-0002"


def test_only_the_best_single_is_confirmed() -> None:
    judge = FakeJudge({"a": 0.1, "b": 0.3, "c": 0.2})
    search(judge, Says(A, B, C))
    assert [q for q in judge.asked if q.startswith("confirm")] == ["confirm b"]


def test_a_composed_portfolio_is_confirmed_when_it_screens_well() -> None:
    judge = FakeJudge({"a": 0.1, "a+b": 0.3})
    agent = Says(A, BOTH)
    search(judge, agent)
    assert agent.verdicts[-1].candidate.stage is Stage.CONFIRMED


def test_the_other_confirmed_ones_are_superseded() -> None:
    store = MemoryStore()
    judge = FakeJudge({"a": 0.5, "a+b": 0.3}, confirmed={"a": 0.5, "a+b": 0.3})
    search(judge, Says(BOTH, A), store=store)
    assert stages(store) == [Stage.SUPERSEDED, Stage.CONFIRMED]


def test_the_same_source_is_judged_once() -> None:
    judge, agent = FakeJudge(), Says(A, A)
    found = search(judge, agent)
    assert (judge.asked, found.num_experiments) == (["validate a", "screen a"], 1)
    assert agent.verdicts[0] == agent.verdicts[1]


def test_a_candidate_keeps_its_parent_its_author_and_one_plain_line() -> None:
    store = MemoryStore()

    class Child:
        name = "llm"

        def run(self, bench: Bench) -> None:
            bench.submit(A, "two\nlines", parent_id="c-0009")

    search(FakeJudge(), Child(), store=store)
    found = store.candidates()[0]
    assert (found.author, found.summary, found.parent_id) == ("llm", "two lines", "c-0009")


def test_each_event_is_stored_with_a_note_before_the_next_question() -> None:
    store = MemoryStore()
    seen: list[tuple[str, ...]] = []
    judge = FakeJudge({"a": 0.1})
    judge.on_ask = lambda: seen.append(
        tuple(line.note for c in store.candidates() for line in c.story)
    )
    search(judge, Says(A), store=store)
    assert [len(notes) for notes in seen] == [0, 1, 2]
    assert all(note for notes in seen for note in notes)


def test_the_winners_evidence_holds_when_it_is_checked_again() -> None:
    store = MemoryStore()
    search(FakeJudge({"a": 0.1}), Says(A), store=store)
    posts = [p for p in store.posts(SEARCH) if p.author == "gate"]
    bundle = store.bundles[posts[-1].evidence]
    assert json.loads(bundle)["verdict"] == "confirmed"
    assert [w for w in evidence.verify(bundle) if "without" in w or "digest" in w] == []


# --- faults ---------------------------------------------------------------------------------------


def test_a_candidate_that_takes_its_engine_down_is_out_and_the_search_goes_on() -> None:
    judge, engines = FakeJudge({"b": 0.1}), FakeEngines()
    judge.raises["validate a"] = [EngineGone("silent for 15 s in call")]
    found = search(judge, Says(A, B), engines=engines)
    assert (found.winner_id, found.rejections) == ("c-0002", {"faulted": 1})
    assert judge.addresses == ["tuning-1"]


def test_a_candidate_that_leaves_state_behind_costs_its_engine() -> None:
    judge, engines = FakeJudge(), FakeEngines()
    judge.validations = {"a": report(["state left"], recycle=True)}
    found = search(judge, Says(A), engines=engines)
    assert (engines.num_recycled, found.rejections) == (1, {"faulted": 1})


def test_a_fault_is_stored_before_the_engine_is_recycled() -> None:
    store, judge = MemoryStore(), FakeJudge()
    judge.raises["screen a"] = [EngineGone("gone")]

    class Dry(FakeEngines):
        def recycle(self) -> str:
            raise EngineGone("no engine can be started")

    with pytest.raises(EngineGone, match="no engine"):
        search(judge, Says(A, B), store=store, engines=Dry())
    assert stages(store) == [Stage.REJECTED]


def test_a_void_verdict_is_asked_for_again() -> None:
    judge = FakeJudge({"a": 0.1})
    judge.raises["screen a"] = [VerdictVoid("the judge was silent")]
    found = search(judge, Says(A))
    assert (found.winner_id, judge.asked.count("screen a")) == ("c-0001", 2)


def test_a_candidate_whose_verdicts_stay_void_is_out() -> None:
    judge = FakeJudge()
    judge.raises["screen a"] = [VerdictVoid("silent"), VerdictVoid("silent")]
    assert search(judge, Says(A)).rejections == {"faulted": 1}


def test_an_author_strikes_out_and_the_others_go_on() -> None:
    judge = FakeJudge({"b": 0.1})
    bad = [forward(f"bad{i}") for i in range(MAX_STRIKES + 2)]
    judge.raises = {f"validate bad{i}": [EngineGone("gone")] for i in range(len(bad))}
    found = search(judge, Says(*bad, name="bad"), Says(B, name="good"))
    assert found.rejections == {"faulted": MAX_STRIKES}
    assert found.winner_id is not None


def test_an_agent_that_crashes_does_not_take_the_search_with_it() -> None:
    class Crashes:
        name = "crashes"

        def run(self, bench: Bench) -> None:
            raise ZeroDivisionError

    assert search(FakeJudge({"a": 0.1}), Crashes(), Says(A)).winner_id == "c-0001"


def test_a_judge_that_fails_whatever_it_is_asked_ends_the_search() -> None:
    judge = FakeJudge()
    many = [forward(f"x{i}") for i in range(MAX_JUDGE_FAILURES + 1)]
    judge.raises = {f"validate x{i}": [RuntimeError("the judge failed")] for i in range(len(many))}
    with pytest.raises(RuntimeError, match="the judge failed"):
        search(judge, Says(*many))


def test_one_failure_of_the_judge_costs_one_candidate() -> None:
    judge = FakeJudge({"b": 0.1})
    judge.raises["validate a"] = [RuntimeError("the judge failed: stock overflows")]
    assert search(judge, Says(A, B)).winner_id == "c-0002"


# --- budget ---------------------------------------------------------------------------------------


def test_a_search_ends_when_its_experiments_are_spent() -> None:
    agent = Says(A, B, C)
    found = search(FakeJudge(), agent, budget=SearchBudget(max_experiments=2))
    assert (found.num_experiments, found.ended, len(agent.verdicts)) == (2, "budget spent", 2)


def test_a_search_ends_when_its_seconds_are_spent() -> None:
    now_s = [0.0]
    judge = FakeJudge()
    judge.on_ask = lambda: now_s.__setitem__(0, now_s[0] + 5.0)
    found = search(judge, Says(A, B, C), budget=SearchBudget(max_s=15.0), clock=lambda: now_s[0])
    assert (found.num_experiments, found.seconds) == (2, 20.0)
    assert found.experiments_per_hour == 360.0


def test_what_won_before_the_budget_was_spent_is_still_confirmed() -> None:
    found = search(FakeJudge({"a": 0.1}), Says(A, B), budget=SearchBudget(max_experiments=1))
    assert found.winner_id == "c-0001"


def test_an_agent_that_never_stops_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiler.search.GRACE_S", 0.1)
    released = threading.Event()

    class Sleeps:
        name = "sleeps"

        def run(self, bench: Bench) -> None:
            bench.submit(A, "a")
            with pytest.raises(SearchOver):
                bench.submit(B, "b")
            released.wait(60.0)

    found = search(FakeJudge(), Sleeps(), budget=SearchBudget(max_experiments=1))
    released.set()
    assert found.num_experiments == 1


# --- resuming -------------------------------------------------------------------------------------


def kill_at(store: MemoryStore, stage: Stage, judge: FakeJudge, *changes: Any) -> None:
    """A search that dies as it is about to write the stage down."""

    def die(candidate: Candidate) -> None:
        if candidate.stage is stage:
            raise Killed

    class Dies(Says):
        def run(self, bench: Bench) -> None:
            with pytest.raises(Killed):
                super().run(bench)

    store.on_write = die
    search(judge, Dies(*changes), store=store)
    store.on_write = lambda candidate: None
    judge.asked.clear()


def test_a_killed_search_repeats_no_finished_verdict() -> None:
    store, judge = MemoryStore(), FakeJudge({"a": 0.1, "b": 0.0})
    search(judge, Says(B), store=store)
    judge.asked.clear()
    found = search(judge, Says(B, A), store=store)
    assert (found.num_known, found.num_experiments) == (1, 1)
    assert judge.asked == ["validate a", "screen a", "confirm a"]


def test_only_the_verdict_that_was_under_way_is_asked_for_again() -> None:
    store, judge = MemoryStore(), FakeJudge({"a": 0.1})
    kill_at(store, Stage.SCREENED, judge, A)
    search(judge, store=store)
    assert judge.asked == ["screen a", "confirm a"]


def test_a_resumed_candidate_keeps_the_evidence_of_before_the_kill() -> None:
    store, judge = MemoryStore(), FakeJudge({"a": 0.1})
    kill_at(store, Stage.SCREENED, judge, A)
    search(judge, store=store)
    last = json.loads(store.bundles[store.board[-1].evidence])
    assert last["validation"]["passed"]
    assert last["screen"]["faster"]
    assert last["confirm"]["faster"]


def test_a_search_does_not_see_another_searchs_candidates() -> None:
    store, judge = MemoryStore(), FakeJudge()
    other = Candidate("c-0900", "s-9", None, "x", "x", Portfolio((A,)))
    store.put_candidate(other.after(Event.DISAGREES, 1.0))
    search(judge, Says(A), store=store)
    assert judge.asked == ["validate a", "screen a"]


# --- the built-in agent ---------------------------------------------------------------------------

QWEN = ("RMSNorm", "Qwen3MoeSparseMoeBlock", "FusedMoE", "Attention", "Qwen3MoeAttention")
DENSE = ("LlamaMLP", "MergedColumnParallelLinear", "RowParallelLinear")


class ByClass(FakeJudge):
    """Every rewrite of some classes wins, together more than alone."""

    winning: tuple[str, ...] = ()

    def _ask(self, what: str, portfolio: Portfolio) -> str:
        self.asked.append(what)
        hits = sum(
            any(w in t for t, _ in f.targets) for f in portfolio.forwards for w in self.winning
        )
        self.gains = {"it": 0.1 * hits}
        return "it"


def by_class(*winning: str) -> ByClass:
    judge = ByClass()
    judge.winning = tuple(f"cls:{w}" for w in winning)
    return judge


def test_the_agent_composes_what_won_and_the_portfolio_wins() -> None:
    store = MemoryStore()
    judge = by_class("RMSNorm", "Attention")
    found = search(judge, SearchAgent(), store=store, engines=FakeEngines(QWEN))
    assert found.best is not None
    assert {t for f in found.best.change.forwards for t, _ in f.targets} >= {
        "cls:RMSNorm",
        "cls:Attention",
    }


def test_what_is_lost_in_noise_alone_is_tried_in_company() -> None:
    class OnlyTogether(ByClass):
        def screen(self, portfolio: Portfolio) -> Trial:
            self.asked.append("screen")
            return trial(0.3 if len(portfolio.forwards) > 2 else 0.0)

        def confirm(self, portfolio: Portfolio) -> Trial:
            return self.screen(portfolio)

    found = search(OnlyTogether(), SearchAgent(), engines=FakeEngines(QWEN))
    assert found.best is not None
    assert (found.best.stage, len(found.best.change.forwards) > 2) == (Stage.CONFIRMED, True)


def test_the_agent_leaves_out_classes_that_the_model_does_not_have() -> None:
    store = MemoryStore()
    search(FakeJudge(), SearchAgent(), store=store, engines=FakeEngines(DENSE))
    targets = {t for c in store.candidates() for f in c.change.forwards for t, _ in f.targets}
    assert targets == {"cls:LlamaMLP", "cls:RowParallelLinear"}


def test_the_agent_starts_where_there_is_most_headroom() -> None:
    from compiler.search import Assignment

    store, room = MemoryStore(), {"RMSNorm": 0.6, "Attention": 0.3}
    search(
        FakeJudge(),
        SearchAgent(),
        store=store,
        engines=FakeEngines(QWEN),
        assignment=Assignment(None, room),
    )
    firsts = [c.change.forwards[0].targets[0][0] for c in store.candidates()[:2]]
    assert firsts == ["cls:RMSNorm", "cls:Attention"]


def test_the_same_seed_and_verdicts_make_the_same_search() -> None:
    def digests(seed: int) -> list[str]:
        store = MemoryStore()
        budget = SearchBudget(max_experiments=20)
        judge = by_class("Attention", "RMSNorm")
        search(judge, SearchAgent(seed), store=store, budget=budget, engines=FakeEngines(QWEN))
        return [c.change.digest for c in store.candidates()]

    assert digests(3) == digests(3) != digests(4)


def test_the_agent_tells_the_board_what_won_where_and_with_what_evidence() -> None:
    store = MemoryStore()
    search(by_class("RMSNorm"), SearchAgent(), store=store, engines=FakeEngines(("RMSNorm",)))
    post = next(p for p in store.posts(SEARCH) if p.author == "search")
    assert post.evidence in store.bundles
    assert post.scope == "RMSNorm for all batches"


def test_a_search_without_an_effect_has_no_winner() -> None:
    store = MemoryStore()
    agent = agent_named("no-effect")
    found = search(FakeJudge(), agent, store=store, engines=FakeEngines(QWEN))
    assert (found.winner_id, found.num_experiments) == (None, len(NOTHING) - 1)
    assert all("ORIG" in c.change.forwards[0].source for c in store.candidates())


def test_an_unknown_agent_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="write search or no-effect"):
        agent_named("magic")


# --- headroom -------------------------------------------------------------------------------------


def test_headroom_is_a_share_of_a_step_for_each_class_that_can_be_swapped() -> None:
    found = headroom(FakeEngine(), workload(), Hardware(1e10, 1e10))
    assert {"RMSNorm", "LlamaMLP", "LlamaAttention"} <= set(found)
    assert all(0.0 <= share <= 1.0 for share in found.values())
