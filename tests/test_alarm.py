"""What a deadline breaks off, and what it leaves alone."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from engines.inside import alarm as alarms
from engines.inside.alarm import Alarm, Hang

pytestmark = pytest.mark.timeout(60, method="thread")  # a signal of its own would be ours
SOON_S = 0.05


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarm]:
    monkeypatch.setattr(alarms, "AGAIN_S", SOON_S)
    before = signal.getsignal(signal.SIGALRM)
    yield Alarm()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def spin() -> None:
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        pass


def sleep() -> None:
    time.sleep(10)


def swallow() -> None:
    """Goes on after the first time."""
    with contextlib.suppress(Exception):
        sleep()
    sleep()


@pytest.mark.parametrize("hang", [spin, sleep, swallow])
def test_a_hang_inside_is_broken_off(alarm: Alarm, hang: Callable[[], None]) -> None:
    started_s = time.monotonic()
    with pytest.raises(Hang, match=r"end within 0\.05 s"), alarm.within(SOON_S), alarm.inside:
        hang()
    assert time.monotonic() - started_s < 5


def test_code_outside_is_never_cut(alarm: Alarm) -> None:
    with alarm.within(SOON_S):
        time.sleep(4 * SOON_S)
        with alarm.inside:
            pass
        time.sleep(4 * SOON_S)


def test_what_comes_inside_after_the_time_is_up_is_broken_off(alarm: Alarm) -> None:
    with alarm.within(SOON_S):
        time.sleep(3 * SOON_S)
        with pytest.raises(Hang), alarm.inside:
            sleep()


def test_inside_within_inside_is_still_inside(alarm: Alarm) -> None:
    def nested() -> None:
        with alarm.inside:
            pass
        sleep()

    with pytest.raises(Hang), alarm.within(SOON_S), alarm.inside:
        nested()


def test_after_a_hang_code_outside_goes_on_uncut(alarm: Alarm) -> None:
    with alarm.within(SOON_S):
        with contextlib.suppress(Hang), alarm.inside:
            sleep()
        time.sleep(4 * SOON_S)
    assert alarm.inside.depth == 0


def test_nothing_rings_after_the_end(alarm: Alarm) -> None:
    with alarm.within(SOON_S):
        pass
    with alarm.inside:
        time.sleep(4 * SOON_S)


def test_nothing_rings_after_an_end_by_an_error(alarm: Alarm) -> None:
    with contextlib.suppress(KeyError), alarm.within(SOON_S):
        raise KeyError
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_each_deadline_is_a_new_one(alarm: Alarm) -> None:
    for _ in range(3):
        with alarm.within(20 * SOON_S), alarm.inside:
            time.sleep(4 * SOON_S)


def test_a_hang_that_rings_on_the_way_out_leaves_nothing_inside(alarm: Alarm) -> None:
    def ring(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is type(alarm.inside).__exit__.__code__:
            sys.settrace(before)
            alarm._ring(signal.SIGALRM, frame)

    before = sys.gettrace()
    with contextlib.suppress(Hang), alarm.inside:
        sys.settrace(ring)
    sys.settrace(before)
    assert alarm.inside.depth == 0


def test_off_the_main_thread_there_is_none() -> None:
    before, done = signal.getsignal(signal.SIGALRM), threading.Event()

    def work() -> None:
        alarm = Alarm()
        with alarm.within(SOON_S), alarm.inside:
            time.sleep(4 * SOON_S)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done.is_set()
    assert signal.getsignal(signal.SIGALRM) is before
