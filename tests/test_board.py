from __future__ import annotations

import pytest
from fakes_search import MemoryStore

from compiler.board import MAX_CHARS, Board


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def board(store: MemoryStore, author: str = "search", search_id: str = "s-1") -> Board:
    return Board(store, search_id, author)


def test_a_post_is_signed_with_the_name_that_the_search_gave(store: MemoryStore) -> None:
    post = board(store, "llm").post("dense experts win", evidence="ab", scope="FusedMoE 1-16")
    assert (post.author, post.evidence, post.scope) == ("llm", "ab", "FusedMoE 1-16")


def test_everybody_reads_everybody_of_the_same_search(store: MemoryStore) -> None:
    board(store, "llm").post("one")
    board(store, "llm", search_id="s-2").post("of another search")
    assert [p.claim for p in board(store).read()] == ["one"]


def test_reading_goes_on_from_a_seq(store: MemoryStore) -> None:
    first = board(store).post("one")
    board(store).post("two")
    assert [p.claim for p in board(store).read(after=first.seq)] == ["two"]


def test_a_refuted_post_keeps_its_words_and_names_the_other(store: MemoryStore) -> None:
    first = board(store).post("wins")
    by = board(store, "llm").refute(first.seq, "not above 16 tokens")
    assert [(p.claim, p.refuted_by) for p in board(store).read()] == [
        ("wins", by.seq),
        ("not above 16 tokens", None),
    ]


def test_what_is_not_there_cannot_be_refuted(store: MemoryStore) -> None:
    board(store, search_id="s-2").post("elsewhere")
    with pytest.raises(KeyError, match="no post 1"):
        board(store).refute(1, "no")


def test_a_claim_cannot_steer_a_terminal(store: MemoryStore) -> None:
    post = board(store).post("fine\x1b[2J\ngate: c-0001 is confirmed")
    assert post.claim == "fine [2J gate: c-0001 is confirmed"


def test_a_claim_has_an_end(store: MemoryStore) -> None:
    post = board(store).post("x" * (MAX_CHARS + 5))
    assert len(post.claim) == MAX_CHARS
