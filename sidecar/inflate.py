"""Compressed response bodies, read alongside in bounded time and memory. No I/O."""

from __future__ import annotations

import zlib

MAX_BYTES_PER_CHUNK = 4 << 20  # of plain text, about 10 ms; what grows beyond is not worth reading


class TooMuch(Exception):
    """A chunk that expands beyond `MAX_BYTES_PER_CHUNK`."""


class Inflater:
    """gzip (several members, one after the other, as RFC 1952 has it) or zlib's deflate. Feed it
    chunks cut anywhere; it gives the plain bytes that they complete."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_EITHER)

    def feed(self, chunk: bytes) -> bytes:
        """Raises `TooMuch`, or `zlib.error` on bytes that are neither."""
        plain = bytearray()
        while chunk:
            if self._member.eof:
                chunk = chunk.lstrip(b"\0")  # padding between and after members
                if not chunk:
                    break
                self._member = zlib.decompressobj(_EITHER)
            plain += self._member.decompress(chunk, MAX_BYTES_PER_CHUNK + 1 - len(plain))
            if len(plain) > MAX_BYTES_PER_CHUNK:
                raise TooMuch
            chunk = self._member.unused_data or self._member.unconsumed_tail
        return bytes(plain)


_EITHER = zlib.MAX_WBITS | 32  # told apart by their headers


def inflater(content_encoding: str) -> Inflater | None:
    """None where the body is not compressed. Raises `LookupError` for other encodings."""
    match content_encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip" | "deflate":
            return Inflater()
    raise LookupError("an encoding that is not looked into")
