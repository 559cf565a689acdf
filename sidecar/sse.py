"""Bytes to server-sent events, incrementally and in bounded memory. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `name` is "" where the stream gave none."""

    name: str
    data: bytes


class SseParser:
    """Feed it chunks cut anywhere; it gives the events that they complete.

    Lines end with CRLF, LF or CR. An event that grows beyond `max_event_bytes` is given up, alone.
    An event that the stream's end cuts off is never given, as the standard has it.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._line = bytearray()  # begun, not ended
        self._name = b""
        self._data: list[bytes] = []
        self._num_bytes = 0  # of this event, its unfinished line included
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        events: list[Event] = []
        for line in chunk.splitlines(keepends=True):
            text = line.rstrip(b"\r\n")
            self._take(text)
            if len(text) < len(line):
                self._end_line(events)
        return events

    def _take(self, part: bytes) -> None:
        self._num_bytes += len(part)
        # of a line that is given up, one byte stays: it is not the empty line
        self._line += part if not self._too_long else part[: 1 - len(self._line[:1])]

    @property
    def _too_long(self) -> bool:
        return self._num_bytes > self._max_bytes

    def _end_line(self, events: list[Event]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._at_start:
            self._at_start, line = False, line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            self._end_event(events)
        elif not self._too_long:
            self._field(line)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value

    def _end_event(self, events: list[Event]) -> None:
        if self._data and not self._too_long:
            events.append(Event(self._name.decode(errors="replace"), b"\n".join(self._data)))
        self._name, self._data, self._num_bytes = b"", [], 0
