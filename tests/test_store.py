from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler.candidates import Candidate, Event, Stage
from engines.engine import ForwardPass, Portfolio
from sidecar.store import SqliteStore, StateLocked, StoreError

SOURCE = 'TARGETS = {"cls:RMSNorm": "norm"}\ndef norm(self, x):\n    return ORIG(self, x)\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "trimtab.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(path, clock=lambda: 1000.0)
    yield opened
    opened.close()


def candidate(id: str, search_id: str = "s-1") -> Candidate:
    change = Portfolio((ForwardPass.from_source(SOURCE),))
    return Candidate(id, search_id, None, "search", "norms", change, gain=0.12)


def test_a_candidate_comes_back_with_its_portfolio_and_story(store: SqliteStore) -> None:
    kept = candidate("c-0001").after(Event.AGREES, 5.0, "inside the band")
    store.put_candidate(kept)
    assert store.candidates() == [kept]


def test_a_candidate_is_replaced_and_keeps_its_place(store: SqliteStore) -> None:
    for id in ("c-0001", "c-0002"):
        store.put_candidate(candidate(id))
    store.put_candidate(candidate("c-0001").after(Event.DISAGREES, 5.0))
    assert [(c.id, c.stage) for c in store.candidates()] == [
        ("c-0001", Stage.REJECTED),
        ("c-0002", Stage.PROPOSED),
    ]


def test_a_search_sees_its_own_candidates(store: SqliteStore) -> None:
    store.put_candidate(candidate("c-0001", "s-1"))
    store.put_candidate(candidate("c-0002", "s-2"))
    assert [c.id for c in store.candidates("s-2")] == ["c-0002"]


def test_a_candidate_is_found_by_its_id(store: SqliteStore) -> None:
    store.put_candidate(candidate("c-0001"))
    assert (store.candidate("c-0001"), store.candidate("c-0009")) == (candidate("c-0001"), None)


def _take_ids(path: Path, num: int, ids: multiprocessing.SimpleQueue[list[str]]) -> None:
    store = SqliteStore(path)
    ids.put([store.next_candidate_id() for _ in range(num)])
    store.close()


def test_no_id_is_given_twice_whoever_asks(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ids = context.SimpleQueue()
    takers = [context.Process(target=_take_ids, args=(path, 20, ids)) for _ in range(2)]
    for taker in takers:
        taker.start()
    taken = ids.get() + ids.get()
    for taker in takers:
        taker.join()
    assert sorted(taken) == [f"c-{n:04d}" for n in range(1, 41)]


def test_posts_are_numbered_from_one_and_read_from_where_one_left(store: SqliteStore) -> None:
    first = store.post("s-1", "search", "dense experts win", "ab12", "FusedMoE 1-16")
    second = store.post("s-1", "llm", "not above 16 tokens")
    assert (first.seq, store.posts("s-1", after=first.seq)) == (1, [second])


def test_a_refuted_post_keeps_its_words(store: SqliteStore) -> None:
    first, second = (store.post("s-1", "search", claim) for claim in ("wins", "does not"))
    store.refute(first.seq, second.seq)
    assert [(p.claim, p.refuted_by) for p in store.posts()] == [("wins", 2), ("does not", None)]


def test_evidence_is_named_by_its_content(store: SqliteStore) -> None:
    digest = store.put_evidence('{"a":1}')
    assert store.put_evidence('{"a":1}') == digest
    assert store.evidence(digest) == '{"a":1}'


def test_evidence_that_was_never_kept_is_none(store: SqliteStore) -> None:
    assert store.evidence("00") is None


def test_events_are_read_on_from_a_seq(store: SqliteStore) -> None:
    seqs = [store.add_event("stage", f"line {i}", "c-0001").seq for i in range(3)]
    assert [e.text for e in store.events(after=seqs[0])] == ["line 1", "line 2"]
    assert store.last_event_seq() == seqs[-1]


def test_verdicts_come_newest_first(store: SqliteStore) -> None:
    store.add_verdict(False, "as before")
    store.add_verdict(True, "drifted", '{"score": 0.9}')
    assert [(v.drifted, v.json) for v in store.verdicts()] == [
        (True, '{"score": 0.9}'),
        (False, "{}"),
    ]


def test_the_audit_says_who_what_why_and_what_came_of_it(store: SqliteStore) -> None:
    store.audit("unix:1000", "rollback", "p99 looks odd", "rolled back")
    line = store.audits()[0]
    assert (line.at, line.who, line.what, line.why, line.outcome) == (
        1000.0,
        "unix:1000",
        "rollback",
        "p99 looks odd",
        "rolled back",
    )


def test_the_last_value_of_a_key_is_kept(store: SqliteStore) -> None:
    store.put("table", {"version": 1})
    store.put("table", {"version": 2})
    assert (store.get("table"), store.get("nothing")) == ({"version": 2}, None)


def test_another_process_sees_what_a_killed_one_had_written(path: Path, store: SqliteStore) -> None:
    script = (
        "import os, sys, pathlib; from sidecar.store import SqliteStore\n"
        "store = SqliteStore(pathlib.Path(sys.argv[1])); store.put('x', 7)\n"
        "lock = store.lock(); lock.__enter__(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    with store.lock():  # it held the lock too
        assert (done.returncode, store.get("x")) == (-9, 7)


def test_a_second_controller_is_told_who_holds_the_state(path: Path, store: SqliteStore) -> None:
    other = SqliteStore(path)
    with store.lock(), pytest.raises(StateLocked, match=r"process \d+"), other.lock():
        pass
    other.close()


def test_the_lock_is_free_once_it_is_let_go(path: Path, store: SqliteStore) -> None:
    other = SqliteStore(path)
    with store.lock():
        pass
    with other.lock():
        other.close()


def test_a_newer_state_is_refused_and_left_alone(path: Path, store: SqliteStore) -> None:
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE schema SET version = 99")
    db.close()
    with pytest.raises(StoreError, match="schema 99"):
        SqliteStore(path)


def test_a_file_that_is_no_database_is_refused_by_name(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("not a database, " * 100)
    with pytest.raises(StoreError, match=r"trimtab\.db"):
        SqliteStore(path)
