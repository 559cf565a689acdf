"""The operator's service and the data planes' one, on one gRPC server; and the operator's client.

Wire messages end here: the controller and the commands see dataclasses. Whoever starts the server
stops it. All of it runs on the controller's event loop, never on a data plane's.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from compiler.candidates import Event, Line, Stage
from protos import sidecar_control_pb2 as pb
from protos import sidecar_fleet_pb2 as fleet_pb
from protos.sidecar_control_pb2_grpc import (
    ControlServicer,
    ControlStub,
    add_ControlServicer_to_server,
)
from protos.sidecar_fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from sidecar.link import CHANNEL_OPTIONS, PlaneState, order_to_wire, state_from_wire
from sidecar.routing import RoutingTable

log = logging.getLogger(__name__)

PAGE_SIZE = 100
WATCH_POLL_S = 0.2
WHO = "x-trimtab-who"
MAX_PATH_BYTES = 107  # sun_path

T = TypeVar("T")


class Refused(RuntimeError):
    """The controller will not do it. The text names the thing, its state and the way out."""

    code = grpc.StatusCode.INTERNAL


class NotThere(Refused):
    code = grpc.StatusCode.NOT_FOUND


class WrongState(Refused):
    code = grpc.StatusCode.FAILED_PRECONDITION


class WronglyAsked(Refused):
    code = grpc.StatusCode.INVALID_ARGUMENT


class ControllerGone(ConnectionError):
    """No controller answers at this address."""


@dataclass(frozen=True, slots=True)
class ArmStatus:
    url: str
    role: str  # stable | canary
    weight: float  # share of sessions
    digest: str  # portfolio it runs; "" is stock
    healthy: bool
    swappable: bool  # False: a cold arm


@dataclass(frozen=True, slots=True)
class Status:
    """Counts are over all data planes since they started."""

    name: str
    version: str
    autonomy: str
    state: str  # idle | searching | shadow | canary | live | rolled_back
    candidate_id: str  # of the open rollout or the live one, else ""
    table_version: int
    num_data_planes: int
    num_requests: int
    num_failed: int
    num_mirrored: int
    num_diverged: int
    arms: tuple[ArmStatus, ...]
    last_verdict: str
    uptime_s: float


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of `watch`. `at` is Unix seconds."""

    seq: int
    at: float
    kind: str  # verdict | experiment | stage | table | rollback | engine | audit
    text: str
    candidate_id: str = ""


@dataclass(frozen=True, slots=True)
class CandidateCard:
    """A candidate as the operator sees it, without its source."""

    id: str
    search_id: str
    parent_id: str
    author: str
    summary: str
    digest: str
    stage: str
    story: tuple[Line, ...]
    gain: float | None


@dataclass(frozen=True, slots=True)
class VerdictCard:
    at: float
    drifted: bool
    text: str
    json: str


@dataclass(frozen=True, slots=True)
class RolledBack:
    """`complete`: every data plane has acknowledged, or its lease is over."""

    state: str
    table_version: int
    took_s: float
    complete: bool


class Operator(Protocol):
    """What the controller does for whoever calls. Raises `Refused`."""

    async def status(self) -> Status: ...
    async def happenings(self, after: int) -> Sequence[Happening]:
        """Those with a higher seq, oldest first, a bounded number at once."""

    async def candidates(self) -> Sequence[CandidateCard]:
        """All, oldest first."""

    async def profile(self) -> str: ...
    async def verdicts(self) -> Sequence[VerdictCard]:
        """Newest first."""

    async def retune(self, why: str) -> str: ...
    async def promote(self, candidate_id: str, why: str) -> str: ...
    async def rollback(self, why: str) -> RolledBack: ...
    async def audit(self, who: str, what: str, why: str, outcome: str) -> None: ...


# --- data planes ----------------------------------------------------------------------------------


class Bell:
    """Wakes everybody who waits for something to have changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until the next `ring`, or `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)


class Fleet(FleetServicer):
    """Every data plane's stream: tables out, reports in. Belongs to the event loop's thread."""

    def __init__(
        self,
        table: RoutingTable,
        on_report: Callable[[PlaneState], None],
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_report` must not block. `lease_s` is how long a plane that left may still obey."""
        self._table = table
        self._on_report = on_report
        self._lease_s = lease_s
        self._clock = clock
        self._versions: dict[str, int] = {}  # plane id -> table in force there
        self._left_s: dict[str, float] = {}  # plane id -> when it went without the present table
        self._bell = Bell()
        self._is_closed = False

    @property
    def table(self) -> RoutingTable:
        return self._table

    @property
    def num_planes(self) -> int:
        return len(self._versions)

    def publish(self, table: RoutingTable) -> None:
        """Make `table` everybody's, at once for those who are here."""
        self._table = table
        self._bell.ring()

    def close(self) -> None:
        """End every stream; data planes go on with what they have."""
        self._is_closed = True
        self._bell.ring()

    async def acknowledged(self, version: int, deadline_s: float) -> bool:
        """Wait until every data plane obeys `version` or a later one, or its lease is over."""
        until_s = self._clock() + deadline_s
        while not self._is_everywhere(version):
            left_s = until_s - self._clock()
            if left_s <= 0:
                return False
            await self._bell.wait(min(left_s, 0.5))
        return True

    def _is_everywhere(self, version: int) -> bool:
        now_s = self._clock()
        self._left_s = {p: s for p, s in self._left_s.items() if now_s < s + self._lease_s}
        return not self._left_s and all(v >= version for v in self._versions.values())

    async def Join(  # type: ignore[override]  # grpc.aio also takes a coroutine that writes
        self,
        request_iterator: AsyncIterator[fleet_pb.PlaneReport],
        context: grpc.aio.ServicerContext[fleet_pb.PlaneReport, fleet_pb.PlaneOrder],
    ) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._orders(context))
                await self._reports(request_iterator)
                raise _PlaneLeft
        except* _PlaneLeft:
            pass

    async def _orders(
        self, context: grpc.aio.ServicerContext[fleet_pb.PlaneReport, fleet_pb.PlaneOrder]
    ) -> None:
        while not self._is_closed:
            table = self._table
            await context.write(order_to_wire(table))
            renew_s = 3600.0 if table.lease_s is None else table.lease_s / 3
            if self._table is table:
                await self._bell.wait(renew_s)
            while self._table is table and table.lease_s is None and not self._is_closed:
                await self._bell.wait(renew_s)  # committed: said once is enough
        raise _PlaneLeft

    async def _reports(self, reports: AsyncIterator[fleet_pb.PlaneReport]) -> None:
        plane_id = ""
        try:
            async for wire in reports:
                state = state_from_wire(wire, self._clock())
                plane_id = state.plane_id
                self._arrived(state)
        finally:
            version = self._versions.pop(plane_id, None)
            if version is not None:
                self._left_s[plane_id] = self._clock()
            self._bell.ring()

    def _arrived(self, state: PlaneState) -> None:
        self._left_s.pop(state.plane_id, None)
        if self._versions.get(state.plane_id) != state.table_version:
            self._versions[state.plane_id] = state.table_version
            self._bell.ring()
        self._on_report(state)


class _PlaneLeft(Exception):
    """Its stream has ended."""


# --- operators ------------------------------------------------------------------------------------


class _Control(ControlServicer):
    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.StatusReply:
        status = await self._operator.status()
        return pb.StatusReply(
            name=status.name,
            version=status.version,
            autonomy=status.autonomy,
            state=status.state,
            candidate_id=status.candidate_id,
            table_version=status.table_version,
            num_data_planes=status.num_data_planes,
            num_requests=status.num_requests,
            num_failed=status.num_failed,
            num_mirrored=status.num_mirrored,
            num_diverged=status.num_diverged,
            arms=[
                pb.Arm(
                    url=a.url,
                    role=a.role,
                    weight=a.weight,
                    digest=a.digest,
                    healthy=a.healthy,
                    swappable=a.swappable,
                )
                for a in status.arms
            ],
            last_verdict=status.last_verdict,
            uptime_s=status.uptime_s,
        )

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.WatchReply]:
        after = request.after_seq
        while True:
            for h in await self._operator.happenings(after):
                after = h.seq
                yield pb.WatchReply(
                    seq=h.seq, at=h.at, kind=h.kind, text=h.text, candidate_id=h.candidate_id
                )
            await asyncio.sleep(WATCH_POLL_S)

    async def ListCandidates(
        self, request: pb.ListCandidatesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.ListCandidatesReply:
        async with _refusals(context):
            if request.stage and request.stage not in list(Stage):
                raise WronglyAsked(f"stage {request.stage!r} is none of {', '.join(Stage)}")
            cards = [c for c in await self._operator.candidates() if request.stage in ("", c.stage)]
            page, token = _page(cards, request.page_size, request.page_token)
            return pb.ListCandidatesReply(
                candidates=[_card_to_wire(c) for c in page], next_page_token=token
            )

    async def GetProfile(
        self, request: pb.GetProfileRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.GetProfileReply:
        async with _refusals(context):
            return pb.GetProfileReply(json=await self._operator.profile())

    async def ListVerdicts(
        self, request: pb.ListVerdictsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.ListVerdictsReply:
        async with _refusals(context):
            found = await self._operator.verdicts()
            page, token = _page(found, request.page_size, request.page_token)
            verdicts = [
                pb.Verdict(at=v.at, drifted=v.drifted, text=v.text, json=v.json) for v in page
            ]
            return pb.ListVerdictsReply(verdicts=verdicts, next_page_token=token)

    async def Retune(
        self, request: pb.RetuneRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.RetuneReply:
        async with self._audited(context, "retune", request.why) as outcome:
            outcome.text = await self._operator.retune(request.why)
        return pb.RetuneReply(search_id=outcome.text)

    async def Promote(
        self, request: pb.PromoteRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.PromoteReply:
        what = f"promote {request.candidate_id}"
        async with self._audited(context, what, request.why) as outcome:
            if not request.candidate_id:
                raise WronglyAsked("promote names no candidate; `trimtab candidates` lists them")
            outcome.text = await self._operator.promote(request.candidate_id, request.why)
        return pb.PromoteReply(state=outcome.text)

    async def Rollback(
        self, request: pb.RollbackRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.RollbackReply:
        async with self._audited(context, "rollback", request.why) as outcome:
            done = await self._operator.rollback(request.why)
            outcome.text = f"{done.state}, table {done.table_version}, complete={done.complete}"
        return pb.RollbackReply(
            state=done.state,
            table_version=done.table_version,
            took_s=done.took_s,
            complete=done.complete,
        )

    @contextlib.asynccontextmanager
    async def _audited(
        self, context: grpc.aio.ServicerContext[object, object], what: str, why: str
    ) -> AsyncIterator[_Outcome]:
        """Refused and failed calls are kept in the audit as well."""
        outcome, who = _Outcome(), _who(context)
        async with _refusals(context):
            try:
                yield outcome
            except Exception as e:
                await self._operator.audit(who, what, why, f"{type(e).__name__}: {e}")
                raise
            await self._operator.audit(who, what, why, outcome.text)


@dataclass(slots=True)
class _Outcome:
    text: str = ""


@contextlib.asynccontextmanager
async def _refusals(context: grpc.aio.ServicerContext[object, object]) -> AsyncIterator[None]:
    try:
        yield
    except Refused as e:
        await _abort(context, e.code, str(e))


async def _abort(
    context: grpc.aio.ServicerContext[object, object], code: grpc.StatusCode, text: str
) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("abort returned")


def _who(context: grpc.aio.ServicerContext[object, object]) -> str:
    said = dict(context.invocation_metadata() or ()).get(WHO, "")
    return str(said)[:100] or context.peer()


def _page(items: Sequence[T], size: int, token: str) -> tuple[Sequence[T], str]:
    """One page and the next one's token, which is an offset: nothing is ever removed."""
    if size < 0 or (token and not token.isdecimal()):
        raise WronglyAsked(f"page_size {size} or page_token {token!r} is not one we gave")
    start = int(token or 0)
    end = start + (min(size, 1000) or PAGE_SIZE)
    return items[start:end], str(end) if end < len(items) else ""


def _card_to_wire(card: CandidateCard) -> pb.Candidate:
    return pb.Candidate(
        id=card.id,
        search_id=card.search_id,
        parent_id=card.parent_id,
        author=card.author,
        summary=card.summary,
        digest=card.digest,
        stage=card.stage,
        story=[
            pb.StoryLine(at=s.at, event=s.event, stage=s.stage, note=s.note) for s in card.story
        ],
        gain=card.gain,
    )


def _card_from_wire(wire: pb.Candidate) -> CandidateCard:
    return CandidateCard(
        id=wire.id,
        search_id=wire.search_id,
        parent_id=wire.parent_id,
        author=wire.author,
        summary=wire.summary,
        digest=wire.digest,
        stage=wire.stage,
        story=tuple(Line(s.at, Event(s.event), Stage(s.stage), s.note) for s in wire.story),
        gain=wire.gain if wire.HasField("gain") else None,
    )


# --- server ---------------------------------------------------------------------------------------


def control_address(state: Path) -> str:
    """Where the controller of a state folder listens. Raises `ValueError` when it is too long."""
    path = state.absolute() / "control.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"{path} is too long for a unix socket; set a shorter state_dir")
    return f"unix:{path}"


class ControlServer:
    """Control, Fleet, health and reflection at a unix address, between `start` and `stop`."""

    def __init__(self, operator: Operator, fleet: Fleet, address: str) -> None:
        self._operator, self._fleet, self._address = operator, fleet, address
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Take the address over: whoever holds the controller's lock owns it."""
        path = Path(self._address.removeprefix("unix:"))
        await asyncio.to_thread(path.unlink, missing_ok=True)
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        add_ControlServicer_to_server(_Control(self._operator), server)
        add_FleetServicer_to_server(self._fleet, server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = [d.services_by_name[n].full_name for d, n in _SERVICES]
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        server.add_insecure_port(self._address)
        await server.start()
        await asyncio.to_thread(path.chmod, 0o600)
        for name in ("", *names):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server = server

    async def stop(self, grace_s: float = 0.5) -> None:
        self._fleet.close()
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None


_SERVICES = (
    (pb.DESCRIPTOR, "Control"),
    (fleet_pb.DESCRIPTOR, "Fleet"),
    (health_pb2.DESCRIPTOR, "Health"),
)


# --- client ---------------------------------------------------------------------------------------


class ControlClient:
    """The commands' end. Blocks. Raises `Refused` as the controller said it, `ControllerGone` when
    none answers. Whoever makes it closes it."""

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = ControlStub(self._channel)
        self._metadata = ((WHO, f"{getpass.getuser()} (pid {os.getpid()})"),)

    def status(self) -> Status:
        with self._errors():
            reply = self._stub.Status(pb.StatusRequest(), timeout=self._timeout_s)
        arms = tuple(
            ArmStatus(a.url, a.role, a.weight, a.digest, a.healthy, a.swappable) for a in reply.arms
        )
        return Status(
            name=reply.name,
            version=reply.version,
            autonomy=reply.autonomy,
            state=reply.state,
            candidate_id=reply.candidate_id,
            table_version=reply.table_version,
            num_data_planes=reply.num_data_planes,
            num_requests=reply.num_requests,
            num_failed=reply.num_failed,
            num_mirrored=reply.num_mirrored,
            num_diverged=reply.num_diverged,
            arms=arms,
            last_verdict=reply.last_verdict,
            uptime_s=reply.uptime_s,
        )

    def watch(self, after_seq: int = 0) -> Iterator[Happening]:
        """Endless; close the client to end it."""
        with self._errors():
            for r in self._stub.Watch(pb.WatchRequest(after_seq=after_seq)):
                yield Happening(r.seq, r.at, r.kind, r.text, r.candidate_id)

    def candidates(self, stage: str = "") -> Iterator[CandidateCard]:
        token = "-"
        while token:
            request = pb.ListCandidatesRequest(stage=stage, page_token=token.strip("-"))
            with self._errors():
                reply = self._stub.ListCandidates(request, timeout=self._timeout_s)
            yield from (_card_from_wire(c) for c in reply.candidates)
            token = reply.next_page_token

    def profile(self) -> str:
        with self._errors():
            return self._stub.GetProfile(pb.GetProfileRequest(), timeout=self._timeout_s).json

    def verdicts(self, most: int = 20) -> tuple[VerdictCard, ...]:
        request = pb.ListVerdictsRequest(page_size=most)
        with self._errors():
            reply = self._stub.ListVerdicts(request, timeout=self._timeout_s)
        return tuple(VerdictCard(v.at, v.drifted, v.text, v.json) for v in reply.verdicts)

    def retune(self, why: str) -> str:
        """The id of the search that was started."""
        request = pb.RetuneRequest(why=why)
        with self._errors():
            return self._stub.Retune(
                request, timeout=self._timeout_s, metadata=self._metadata
            ).search_id

    def promote(self, candidate_id: str, why: str) -> str:
        request = pb.PromoteRequest(candidate_id=candidate_id, why=why)
        with self._errors():
            return self._stub.Promote(
                request, timeout=self._timeout_s, metadata=self._metadata
            ).state

    def rollback(self, why: str) -> RolledBack:
        request = pb.RollbackRequest(why=why)
        with self._errors():
            r = self._stub.Rollback(request, timeout=self._timeout_s, metadata=self._metadata)
        return RolledBack(r.state, r.table_version, r.took_s, r.complete)

    def close(self) -> None:
        self._channel.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as e:
            raise _as_ours(e, self._address) from e


def _as_ours(error: grpc.RpcError, address: str) -> Exception:
    code, details = error.code(), error.details() or ""
    for kind in (NotThere, WrongState, WronglyAsked):
        if code is kind.code:
            return kind(details)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ControllerGone(
            f"no controller answers at {address}; is `trimtab serve` running, under this --name?"
        )
    return Refused(f"{code.name.lower()}: {details}")
