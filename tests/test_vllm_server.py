"""The door in the API process, over a real unix socket: pauses, turns, ranks, faults, noise."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes_vllm import FakeEngineClient, Rank
from prometheus_client import REGISTRY, Gauge

from engines.inside import vllm_server, wire
from engines.inside.vllm_server import Door, Middleware
from engines.inside.wire import SOCKET

Message = wire.Message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "inside.sock"


@dataclass
class FakeRank:
    """Answers, and keeps what it was asked."""

    answers: dict[str, Message] = field(default_factory=dict)
    asked: list[Message] = field(default_factory=list)
    num_steps: int = 0

    def __call__(self, message: Message) -> Message:
        self.asked.append(message)
        return self.answers.get(message["do"], {"digest": "d", "num_live_steps": self.num_steps})


def broken(message: Message) -> Message:
    raise ZeroDivisionError("this worker broke")


@dataclass
class House:
    """An engine, its door, and a way in."""

    engine: FakeEngineClient
    path: Path

    async def ask(self, what: str, **said: Any) -> Message:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(wire.pack({"do": what, "deadline_s": 5.0, **said}))
        head = await reader.readexactly(wire.LENGTHS.size)
        frame = head + await reader.readexactly(sum(wire.lengths(head)))
        writer.close()
        return wire.unpack(frame)

    async def send(self, noise: bytes, ends: bool = True) -> bytes:
        """Everything that comes back."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(noise)
        if ends:
            writer.write_eof()
        back = await reader.read()
        writer.close()
        return back


@asynccontextmanager
async def house(path: Path, *ranks: Rank) -> AsyncIterator[House]:
    engine = FakeEngineClient(*ranks or (FakeRank(),))
    async with Door(engine, path):
        yield House(engine, path)


# --- between two steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("flip", ["swap", "revert", "give_way"])
async def test_a_flip_happens_between_pause_and_resume(path: Path, flip: str) -> None:
    async with house(path) as h:
        await h.ask(flip)
        assert h.engine.log == ["pause", flip, "clear", "resume"]


async def test_a_flip_says_how_many_requests_are_computed_again(path: Path) -> None:
    async with house(path) as h:
        h.engine.num_pending = 3
        assert (await h.ask("swap"))["num_preempted"] == 3


async def test_without_a_step_since_the_last_flip_there_is_nothing_to_clear(path: Path) -> None:
    async with house(path) as h:
        await h.ask("swap")
        await h.ask("revert")
        assert h.engine.log[4:] == ["pause", "revert", "resume"]


async def test_after_a_step_no_kv_outlives_a_flip(path: Path) -> None:
    rank = FakeRank()
    async with house(path, rank) as h:
        for what in ("swap", "revert", "replay"):
            rank.num_steps, h.engine.has_kv = rank.num_steps + 1, True
            await h.ask(what)
            assert h.engine.log[-1] == "resume"
            assert not h.engine.has_kv


@pytest.mark.parametrize("what", ["info", "steps", "fingerprint", "source", "attach"])
async def test_looking_on_pauses_nothing(path: Path, what: str) -> None:
    async with house(path) as h:
        await h.ask(what)
        assert h.engine.log == [what]


@pytest.mark.parametrize("what", ["swap", "revert", "give_way", "replay", "call"])
async def test_a_worker_that_fails_leaves_no_pause(path: Path, what: str) -> None:
    async with house(path, broken) as h:
        reply = await h.ask(what)
        assert reply["text"] == "ZeroDivisionError: this worker broke"
        assert h.engine.log[-1] == "resume"


@pytest.mark.parametrize("what", ["swap", "replay"])
@pytest.mark.parametrize("answer", [None, {"error": "candidate", "text": "it raised"}])
async def test_whatever_failed_leaves_no_kv(path: Path, what: str, answer: Message | None) -> None:
    async with house(path, broken if answer is None else FakeRank({what: answer})) as h:
        await h.ask(what)
        assert not h.engine.has_kv


async def test_a_pause_that_does_not_come_is_undone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "PAUSE_DEADLINE_S", 0.05)
    async with house(path) as h:
        h.engine.pauses = False
        assert "no step ended" in (await h.ask("swap"))["text"]
        assert h.engine.log == ["pause", "resume"]


async def test_a_worker_that_does_not_answer_in_time_leaves_no_pause(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "SLACK_S", 0.0)
    goes_on = asyncio.Event()

    async def never(method: str, args: Any) -> list[bytes]:
        await goes_on.wait()
        return []

    async with house(path) as h:
        monkeypatch.setattr(h.engine, "collective_rpc", never)
        reply = await h.ask("swap", deadline_s=0.05)
        assert reply == {"error": "deadline", "text": "the engine did not answer in time"}
        assert h.engine.log[-1] == "resume"


async def test_a_client_that_hangs_up_leaves_no_pause(path: Path) -> None:
    async with house(path) as h:
        await h.send(wire.pack({"do": "swap", "deadline_s": 5.0}))
        assert h.engine.log == ["pause", "swap", "clear", "resume"]


async def test_one_operation_runs_at_a_time(path: Path) -> None:
    async with house(path) as h:
        await h.ask("revert")
        h.engine.log.clear()
        await asyncio.gather(*(h.ask(what) for what in ("swap", "revert", "swap")))
        assert (h.engine.log[::3], h.engine.log[2::3]) == (["pause"] * 3, ["resume"] * 3)
        assert sorted(h.engine.log[1::3]) == ["revert", "swap", "swap"]


# --- replays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["replay", "call", "graph_check"])
async def test_a_replay_leaves_no_prefix_behind(path: Path, what: str) -> None:
    async with house(path) as h:
        await h.ask(what)
        assert h.engine.log == ["pause", what, "clear", "resume"]


async def test_a_replay_is_refused_while_somebody_is_served_and_costs_them_nothing(
    path: Path,
) -> None:
    async with house(path) as h:
        h.engine.num_pending = 1
        reply = await h.ask("replay")
        assert reply == {"error": "candidate", "text": "the engine is serving; drain it first"}
        assert h.engine.log == []


async def test_a_replay_is_refused_when_somebody_comes_before_the_pause(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pause(mode: str, clear_cache: bool) -> None:
        h.engine.num_pending = 1

    async with house(path) as h:
        monkeypatch.setattr(h.engine, "pause_scheduler_async", pause)
        assert (await h.ask("replay"))["text"] == "the engine is serving; drain it first"
        assert h.engine.log == ["resume"]


async def test_who_is_pending_is_told_at_once_also_during_an_operation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = asyncio.Event()

    async def slow(mode: str, clear_cache: bool) -> None:
        await goes_on.wait()

    async with house(path) as h:
        h.engine.num_pending = 2
        monkeypatch.setattr(h.engine, "pause_scheduler_async", slow)
        async with asyncio.TaskGroup() as tasks:
            swap = tasks.create_task(h.ask("swap"))
            assert await h.ask("pending") == {"num_pending": 2}
            assert not swap.done()
            goes_on.set()


# --- ranks ----------------------------------------------------------------------------------------


async def test_the_first_rank_speaks_for_all(path: Path) -> None:
    ranks = [FakeRank({"fingerprint": {"fingerprint": f, "rank": f}}) for f in ("a", "b")]
    async with house(path, *ranks) as h:
        reply = await h.ask("fingerprint")
        assert (reply["rank"], reply["num_ranks"], reply["fingerprints"]) == ("a", 2, ["a", "b"])


async def test_a_swap_that_failed_on_one_rank_is_undone_on_the_others(path: Path) -> None:
    fine = FakeRank({"swap": {"digest": "new"}})
    bad = FakeRank({"swap": {"error": "candidate", "text": "it raised"}})
    async with house(path, fine, bad, fine) as h:
        reply = await h.ask("swap")
        assert (reply["error"], reply["text"]) == ("candidate", "it raised (rank 1 of 3)")
        assert h.engine.log[:3] == ["pause", "swap", "undo"]
        assert fine.asked[-1]["swap_id"] == fine.asked[-2]["swap_id"]


async def test_a_swap_that_failed_everywhere_has_nothing_to_undo(path: Path) -> None:
    bad = FakeRank({"swap": {"error": "permission", "text": "no"}})
    async with house(path, bad, bad) as h:
        assert (await h.ask("swap"))["error"] == "permission"
        assert "undo" not in h.engine.log


async def test_an_engine_of_one_rank_names_none(path: Path) -> None:
    async with house(path, FakeRank({"call": {"error": "candidate", "text": "no module"}})) as h:
        assert (await h.ask("call"))["text"] == "no module"


# --- faults ---------------------------------------------------------------------------------------


async def test_a_fault_note_makes_the_engine_give_way(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(path) as h:
        await h.ask("fault", digest="bad", text="norm raised KeyError")
        assert h.engine.log == ["pause", "give_way", "clear", "resume"]
        assert "norm raised KeyError" in caplog.text


async def test_a_fault_waits_for_its_turn(path: Path) -> None:
    async with house(path) as h:
        await h.ask("revert")
        h.engine.log.clear()
        await asyncio.gather(h.ask("swap"), h.ask("fault", digest="bad", text="why"))
        assert (h.engine.log[::3], h.engine.log[2::3]) == (["pause"] * 2, ["resume"] * 2)
        assert sorted(h.engine.log[1::3]) == ["give_way", "swap"]


# --- the socket -----------------------------------------------------------------------------------


@pytest.fixture
def left(path: Path) -> Path:
    """By a server that died."""
    path.write_text("left")
    return path


async def test_the_socket_is_its_owner_s_alone(path: Path) -> None:
    async with house(path):
        mode = await asyncio.to_thread(path.stat)
        assert stat.S_IMODE(mode.st_mode) == 0o600


async def test_the_socket_goes_with_the_door(path: Path) -> None:
    async with house(path):
        pass
    assert not await asyncio.to_thread(path.exists)


async def test_a_socket_that_a_dead_server_left_is_taken_over(left: Path) -> None:
    async with house(left) as h:
        assert await h.ask("pending") == {"num_pending": 0}


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        b"\0",
        b"\xff" * 40,
        wire.LENGTHS.pack(4, 0) + b"[[[[",
        wire.LENGTHS.pack(2, 0) + b"[]",
        wire.pack({"do": "swap"})[:-3],
    ],
)
async def test_noise_ends_its_own_connection_and_no_more(path: Path, noise: bytes) -> None:
    async with house(path) as h:
        assert await h.send(noise) == b""
        assert await h.ask("pending") == {"num_pending": 0}
        assert h.engine.log == []


@pytest.mark.parametrize("message", [{}, {"do": ["swap"]}, {"swap": 1}])
async def test_a_message_that_says_nothing_is_answered(path: Path, message: Message) -> None:
    async with house(path) as h:
        reply = wire.unpack(await h.send(wire.pack(message)))
        assert (reply["error"], h.engine.log) == ("engine", [])


@pytest.mark.parametrize("what", ["swap", "replay", "info"])
async def test_a_message_without_a_deadline_asks_nobody(
    path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    async with house(path) as h:
        monkeypatch.setattr(h.engine, "collective_rpc", lambda *a, **k: asked.append(a))
        reply = wire.unpack(await h.send(wire.pack({"do": what})))
        assert (reply["error"], h.engine.log, asked) == ("engine", [], [])


async def test_a_connection_may_ask_again(path: Path) -> None:
    async with house(path) as h:
        frame = wire.pack({"do": "pending"})
        assert await h.send(frame * 3) == wire.pack({"num_pending": 0}) * 3


async def test_the_door_closes_on_those_who_are_in(path: Path) -> None:
    async with house(path):
        reader, writer = await asyncio.open_unix_connection(path)
        await asyncio.sleep(0.01)
    assert await reader.read() == b""
    writer.close()


# --- gauges ---------------------------------------------------------------------------------------


@pytest.fixture
def gauges() -> Iterator[dict[str, Gauge]]:
    names = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    made = {name: Gauge(name, "of vLLM's", ["engine"]) for name in names}
    yield made
    for gauge in made.values():
        REGISTRY.unregister(gauge)


async def test_steps_come_with_vllm_s_own_gauges(path: Path, gauges: dict[str, Gauge]) -> None:
    for i, gauge in enumerate(gauges.values()):
        gauge.labels("0").set(i + 0.5)
    async with house(path, FakeRank({"steps": {"steps": []}})) as h:
        assert (await h.ask("steps"))["gauges"] == {
            "num_waiting": 0.5,
            "num_running": 1.5,
            "kv_cache_usage": 2.5,
        }


async def test_without_statistics_the_gauges_are_zero(path: Path) -> None:
    async with house(path) as h:
        assert set((await h.ask("info"))["gauges"].values()) == {0.0}


# --- the middleware -------------------------------------------------------------------------------


async def receive() -> dict[str, Any]:
    return {}


async def send(message: MutableMapping[str, Any]) -> None: ...


NOBODY = (receive, send)


class FakeApp:
    """ASGI."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen, self.was_open = path, list[Any](), False

    async def __call__(self, *given: Any) -> None:
        self.seen.append(given)
        self.was_open = await asyncio.to_thread(self.path.exists)


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_requests_pass_untouched(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET, str(path))
    app, scope = FakeApp(path), {"type": kind}
    await Middleware(app)(scope, *NOBODY)
    assert (app.seen, app.was_open) == ([(scope, *NOBODY)], False)
    assert app.seen[0][0] is scope


async def test_the_door_is_open_while_the_server_lives(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET, str(path))
    state = SimpleNamespace(engine_client=FakeEngineClient(FakeRank()))
    app = FakeApp(path)
    scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
    await Middleware(app)(scope, *NOBODY)
    assert (app.was_open, await asyncio.to_thread(path.exists)) == (True, False)


async def test_without_its_setting_nothing_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    app = FakeApp(path)
    await Middleware(app)({"type": "lifespan"}, *NOBODY)
    assert (len(app.seen), app.was_open) == (1, False)


async def test_what_failed_is_logged_with_its_traceback(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with house(path, broken) as h:
        await h.ask("revert")
    assert "Trimtab's revert failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
