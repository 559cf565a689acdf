"""What agents tell each other: append-only posts over a `Store`.

A post is data. No gate, judge or rollout reads one, and what an agent wrote is never obeyed.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.store import Post, Store

MAX_CHARS = 2000  # of a claim; the rest is cut


class Board:
    """One author's view of one search's board. The search writes the author's name, not the author.

    What was written cannot be changed; another post can refute it.
    """

    def __init__(self, store: Store, search_id: str, author: str) -> None:
        self._store, self._search_id, self._author = store, search_id, author

    def post(self, claim: str, *, evidence: str = "", scope: str = "") -> Post:
        """`evidence` is a bundle's digest, `scope` where it was seen: class, batch sizes."""
        return self._store.post(
            self._search_id,
            plain(self._author, 64),
            plain(claim),
            plain(evidence, 64),
            plain(scope, 200),
        )

    def refute(self, seq: int, claim: str, *, evidence: str = "", scope: str = "") -> Post:
        """Say that post `seq` does not hold. Raises `KeyError` when this board has no such post."""
        if not any(post.seq == seq for post in self.read(after=seq - 1)):
            raise KeyError(f"board {self._search_id} has no post {seq} to refute")
        by = self.post(claim, evidence=evidence, scope=scope)
        self._store.refute(seq, by.seq)
        return by

    def read(self, after: int = 0) -> Sequence[Post]:
        """Everybody's posts of this search with a higher seq, oldest first."""
        return self._store.posts(self._search_id, after)


def plain(text: str, limit: int = MAX_CHARS) -> str:
    """One bounded line without control characters: terminals and logs show it as it is."""
    shown = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
