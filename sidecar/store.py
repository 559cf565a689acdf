"""What must outlive a process, in one SQLite file (WAL): candidates, board, evidence, events,
verdicts, audit, the controller's own state, and the one-controller lock.

Every write is one statement and durable when the call returns. `trimtab serve` and the
`trimtab compile` that it starts share one file, each with its own `SqliteStore`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Executable,
    Float,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    create_engine,
    event,
    func,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError
from sqlalchemy.schema import CreateTable

from compiler.candidates import Candidate, Event, Line, Stage
from compiler.store import Post
from engines.engine import ForwardPass, Portfolio

SCHEMA_VERSION = 1
FILE_NAME = "trimtab.db"  # in a state directory
BUSY_S = 10.0  # how long a write waits for another process's

METADATA = MetaData()


def _table(name: str, *columns: Column[Any]) -> Table:
    return Table(name, METADATA, *columns, sqlite_autoincrement=True)


def _seq() -> Column[int]:
    return Column("seq", Integer, primary_key=True)


def _text(*names: str) -> tuple[Column[str], ...]:
    return tuple(Column(name, String, nullable=False) for name in names)


SCHEMA = _table("schema", Column("id", Integer, primary_key=True), Column("version", Integer))
COUNTERS = _table("counters", Column("name", String, primary_key=True), Column("n", Integer))
CANDIDATES = _table(
    "candidates",
    _seq(),
    Column("id", String, unique=True, nullable=False),
    Column("search_id", String, nullable=False),
    Column("parent_id", String),
    *_text("author", "summary", "digest", "sources", "stage", "story"),
    Column("gain", Float),
)
POSTS = _table(
    "posts",
    _seq(),
    Column("at", Float, nullable=False),
    *_text("search_id", "author", "claim", "evidence", "scope"),
    Column("refuted_by", Integer),
)
EVIDENCE = _table("evidence", Column("digest", String, primary_key=True), *_text("bundle"))
EVENTS = _table(
    "events",
    _seq(),
    Column("at", Float, nullable=False),
    *_text("kind", "text", "candidate_id"),
)
VERDICTS = _table(
    "verdicts",
    _seq(),
    Column("at", Float, nullable=False),
    Column("drifted", Boolean, nullable=False),
    *_text("text", "json"),
)
AUDIT = _table(
    "audit",
    _seq(),
    Column("at", Float, nullable=False),
    *_text("who", "what", "why", "outcome"),
)
VALUES = _table("kv", Column("key", String, primary_key=True), *_text("value"))


class StoreError(RuntimeError):
    """The state cannot be opened. Names the file and the way out."""


class StateLocked(StoreError):
    """Another controller holds this state. Names its process."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One line of `watch`."""

    seq: int
    at: float  # Unix seconds
    kind: str  # verdict | experiment | stage | table | rollback | engine | audit
    text: str
    candidate_id: str  # "" when it is about none


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """One drift verdict: in words, and as the JSON that its author made of it."""

    seq: int
    at: float  # Unix seconds
    drifted: bool
    text: str
    json: str


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One operator's call: who, what, why, and what came of it."""

    seq: int
    at: float  # Unix seconds
    who: str
    what: str
    why: str
    outcome: str


class SqliteStore:
    """Keeps `compiler.store.Store` and the controller's state. Synchronous, usable from several
    threads; call it off the event loop. Whoever opens it closes it.

    `clock` gives Unix seconds. Raises `StoreError` when `path` is no state of ours, or a newer one.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._clock = path, clock
        self._db = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_S})
        event.listen(self._db, "connect", _configure)
        try:
            self._open()
        except DatabaseError as e:
            self.close()
            raise StoreError(f"{path} cannot be opened as Trimtab's state: {e.orig}") from e
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        self._db.dispose()

    # --- candidates -------------------------------------------------------------------------------

    def next_candidate_id(self) -> str:
        """A fresh id such as "c-0142", never given twice, whoever asks."""
        first = insert(COUNTERS).values(name="candidate", n=1)
        following = first.on_conflict_do_update(
            index_elements=[COUNTERS.c.name], set_={"n": COUNTERS.c.n + 1}
        )
        return f"c-{self._write(following.returning(COUNTERS.c.n))[0].n:04d}"

    def put_candidate(self, candidate: Candidate) -> None:
        """Insert, or replace the row with the same id."""
        values = _candidate_values(candidate)
        new = insert(CANDIDATES).values(values)
        self._write(
            new.on_conflict_do_update(
                index_elements=[CANDIDATES.c.id],
                set_={name: value for name, value in values.items() if name != "id"},
            )
        )

    def candidates(self, search_id: str | None = None) -> list[Candidate]:
        """All, or one search's, oldest first."""
        query = select(CANDIDATES).order_by(CANDIDATES.c.seq)
        if search_id is not None:
            query = query.where(CANDIDATES.c.search_id == search_id)
        return [_candidate(row) for row in self._read(query)]

    def candidate(self, id: str) -> Candidate | None:
        rows = self._read(select(CANDIDATES).where(CANDIDATES.c.id == id))
        return _candidate(rows[0]) if rows else None

    # --- board and evidence -----------------------------------------------------------------------

    def post(
        self, search_id: str, author: str, claim: str, evidence: str = "", scope: str = ""
    ) -> Post:
        """Append to the board."""
        values = {
            "at": self._clock(),
            "search_id": search_id,
            "author": author,
            "claim": claim,
            "evidence": evidence,
            "scope": scope,
        }
        return _post(self._write(insert(POSTS).values(values).returning(POSTS))[0])

    def refute(self, seq: int, by: int) -> None:
        """Mark post `seq` as refuted by post `by`; the words stay."""
        self._write(update(POSTS).where(POSTS.c.seq == seq).values(refuted_by=by))

    def posts(self, search_id: str | None = None, after: int = 0) -> list[Post]:
        """Those with a higher seq than `after`, oldest first."""
        query = select(POSTS).where(POSTS.c.seq > after).order_by(POSTS.c.seq)
        if search_id is not None:
            query = query.where(POSTS.c.search_id == search_id)
        return [_post(row) for row in self._read(query)]

    def put_evidence(self, bundle: str) -> str:
        """Keep a JSON bundle; returns its sha256 hex digest."""
        digest = hashlib.sha256(bundle.encode()).hexdigest()
        kept = insert(EVIDENCE).values(digest=digest, bundle=bundle)
        self._write(kept.on_conflict_do_nothing())
        return digest

    def evidence(self, digest: str) -> str | None:
        rows = self._read(select(EVIDENCE.c.bundle).where(EVIDENCE.c.digest == digest))
        return str(rows[0].bundle) if rows else None

    # --- what the controller keeps ----------------------------------------------------------------

    def add_event(self, kind: str, text: str, candidate_id: str = "") -> StoredEvent:
        """Append a line for `watch`. No user text in it."""
        values = {"at": self._clock(), "kind": kind, "text": text, "candidate_id": candidate_id}
        row = self._write(insert(EVENTS).values(values).returning(EVENTS))[0]
        return StoredEvent(**row._mapping)

    def events(self, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """The first `limit` of those with a higher seq than `after`, oldest first."""
        query = select(EVENTS).where(EVENTS.c.seq > after).order_by(EVENTS.c.seq).limit(limit)
        return [StoredEvent(**row._mapping) for row in self._read(query)]

    def last_event_seq(self) -> int:
        """0 when there is none."""
        return int(self._read(select(func.coalesce(func.max(EVENTS.c.seq), 0)))[0][0])

    def add_verdict(self, drifted: bool, text: str, json: str = "{}") -> StoredVerdict:
        values = {"at": self._clock(), "drifted": drifted, "text": text, "json": json}
        row = self._write(insert(VERDICTS).values(values).returning(VERDICTS))[0]
        return StoredVerdict(**row._mapping)

    def verdicts(self, limit: int = 1000) -> list[StoredVerdict]:
        """The last `limit`, newest first."""
        query = select(VERDICTS).order_by(VERDICTS.c.seq.desc()).limit(limit)
        return [StoredVerdict(**row._mapping) for row in self._read(query)]

    def audit(self, who: str, what: str, why: str, outcome: str) -> AuditLine:
        """Append one call, refused ones too."""
        values = {"at": self._clock(), "who": who, "what": what, "why": why, "outcome": outcome}
        row = self._write(insert(AUDIT).values(values).returning(AUDIT))[0]
        return AuditLine(**row._mapping)

    def audits(self, limit: int = 1000) -> list[AuditLine]:
        """The last `limit`, newest first."""
        query = select(AUDIT).order_by(AUDIT.c.seq.desc()).limit(limit)
        return [AuditLine(**row._mapping) for row in self._read(query)]

    def put(self, key: str, value: object) -> None:
        """Keep anything that JSON can say: the committed table, the open rollout."""
        text = json.dumps(value)
        kept = insert(VALUES).values(key=key, value=text)
        self._write(kept.on_conflict_do_update(index_elements=[VALUES.c.key], set_={"value": text}))

    def get(self, key: str) -> Any:
        """What `put` kept last, as `json.loads` reads it; None when there is nothing."""
        rows = self._read(select(VALUES.c.value).where(VALUES.c.key == key))
        return json.loads(rows[0].value) if rows else None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one controller of this state. Raises `StateLocked`, naming the holder. The
        kernel lets go when the process ends, however it ends."""
        path = self._path.with_name(self._path.name + ".lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _hold(fd, path)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()}".encode(), 0)
            yield
        finally:
            os.close(fd)

    # --- the file ---------------------------------------------------------------------------------

    def _open(self) -> None:
        with self._db.begin() as db:
            db.execute(CreateTable(SCHEMA, if_not_exists=True))
            ours = insert(SCHEMA).values(id=1, version=SCHEMA_VERSION)
            db.execute(ours.on_conflict_do_nothing())
            found = db.execute(select(SCHEMA.c.version)).scalar_one()
            if found != SCHEMA_VERSION:
                raise StoreError(
                    f"{self._path} has schema {found}, and this Trimtab reads {SCHEMA_VERSION}; "
                    "run the Trimtab that wrote it, or name another state directory"
                )
            for table in METADATA.sorted_tables:
                db.execute(CreateTable(table, if_not_exists=True))

    def _read(self, query: Executable) -> Sequence[Row[Any]]:
        with self._db.connect() as db:
            return db.execute(query).all()

    def _write(self, statement: Executable) -> Sequence[Row[Any]]:
        with self._db.begin() as db:
            result = db.execute(statement)
            return result.all() if result.returns_rows else ()


def _configure(connection: Any, _record: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):  # FULL: durable when a call returns
        connection.execute(f"PRAGMA {pragma}")


def _hold(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        holder = os.pread(fd, 100, 0).decode(errors="replace") or "another process"
        raise StateLocked(
            f"{path.parent} is the state of {holder}, which still runs; stop it, or give this "
            "one another --name"
        ) from e


def _candidate_values(candidate: Candidate) -> Mapping[str, Any]:
    return {
        "id": candidate.id,
        "search_id": candidate.search_id,
        "parent_id": candidate.parent_id,
        "author": candidate.author,
        "summary": candidate.summary,
        "digest": candidate.change.digest,
        "sources": json.dumps([f.source for f in candidate.change.forwards]),
        "stage": candidate.stage.value,
        "story": json.dumps([asdict(line) for line in candidate.story]),
        "gain": candidate.gain,
    }


def _candidate(row: Row[Any]) -> Candidate:
    forwards = tuple(ForwardPass.from_source(source) for source in json.loads(row.sources))
    story = tuple(
        Line(line["at"], Event(line["event"]), Stage(line["stage"]), line["note"])
        for line in json.loads(row.story)
    )
    return Candidate(
        id=row.id,
        search_id=row.search_id,
        parent_id=row.parent_id,
        author=row.author,
        summary=row.summary,
        change=Portfolio(forwards),
        stage=Stage(row.stage),
        story=story,
        gain=row.gain,
    )


def _post(row: Row[Any]) -> Post:
    return Post(**row._mapping)
