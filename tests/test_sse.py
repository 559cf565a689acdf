"""Bytes to events, however they are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.sse import Event, SseParser


def _data(stream: bytes, max_event_bytes: int = 1 << 18) -> list[bytes]:
    return [event.data for event in SseParser(max_event_bytes).feed(stream)]


def test_an_event_ends_with_an_empty_line() -> None:
    assert _data(b"data: a\n\ndata: b\n") == [b"a"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_ending_counts(end: bytes) -> None:
    assert _data(b"data: a" + end + end + b"data: b" + end + end) == [b"a", b"b"]


def test_the_space_after_the_colon_is_optional_and_only_one_goes() -> None:
    assert _data(b"data:a\n\ndata:  b\n\n") == [b"a", b" b"]


def test_comments_and_unknown_fields_are_no_data() -> None:
    assert _data(b": ping\n\nid: 7\nretry: 5\ndata: a\nwhat\n\n") == [b"a"]


def test_data_lines_are_joined_and_the_name_is_the_events_own() -> None:
    events = SseParser().feed(b"event: x\ndata: a\ndata\ndata: b\n\ndata: c\n\n")
    assert events == [Event("x", b"a\n\nb"), Event("", b"c")]


def test_a_byte_order_mark_is_not_part_of_the_first_field() -> None:
    assert _data(b"\xef\xbb\xbfdata: a\n\n") == [b"a"]


def test_only_the_event_that_is_too_long_is_given_up() -> None:
    long = b"data: " + b"x" * 100 + b"\ndata: y\n\n"
    assert _data(b"data: a\n\n" + long + b"data: b\n\n", max_event_bytes=50) == [b"a", b"b"]


def test_an_endless_line_is_not_kept() -> None:
    parser = SseParser(max_event_bytes=50)
    for _ in range(100):
        assert parser.feed(b"data: " + b"x" * 100) == []
    assert len(parser._line) < 200
    assert [e.data for e in parser.feed(b"\n\ndata: b\n\n")] == [b"b"]


STREAM = (
    "event: a\r\ndata: 北京🚀\r\n\r\n: ping\n\ndata:1\ndata:2\n\ndata: c\r\rdata: d\n\n"
).encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_where_it_is_cut_changes_nothing(cuts: list[int]) -> None:
    parser, places = SseParser(), [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in pairwise(places)]
    cut = [event for part in parts for event in parser.feed(part)]
    assert cut == SseParser().feed(STREAM)
    assert [e.data.decode() for e in cut] == ["北京🚀", "1\n2", "c", "d"]
