"""Messages between our host and what runs inside: JSON beside raw arrays, in length-marked frames.

Values are what JSON knows, bytes and numpy arrays. A frame is `!IQ` (header and body lengths), the
header in JSON and the body. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

SOCKET = "TRIMTAB_INSIDE"  # environment: path of the socket that the server inside opens
EXPERT_COUNTS = "TRIMTAB_EXPERT_COUNTS"  # environment: count in every n-th step; 0: never
Message = dict[str, Any]
LENGTHS = struct.Struct("!IQ")
MAX_HEADER_BYTES = 1 << 26


class WireError(ConnectionError):
    """What came is no message."""


def pack(message: Mapping[str, Any]) -> bytes:
    """One frame. Raises `TypeError` for a value that cannot travel."""
    blobs: list[bytes] = []

    def put(value: object) -> object:
        if isinstance(value, bytes):
            blobs.append(value)
            return {"$bytes": len(value)}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
            blobs.append(little.tobytes())
            return {"$bytes": little.nbytes, "dtype": value.dtype.name, "shape": value.shape}
        raise TypeError(f"a {type(value).__name__} cannot travel")

    header = json.dumps(message, default=put, allow_nan=True).encode()
    return b"".join((LENGTHS.pack(len(header), sum(map(len, blobs))), header, *blobs))


def unpack(frame: bytes) -> Message:
    """The message of one whole frame. Raises `WireError`."""
    try:
        header_bytes, body_bytes = lengths(frame[: LENGTHS.size])
        at = LENGTHS.size + header_bytes
        if len(frame) != at + body_bytes:
            raise WireError(f"a frame of {len(frame)} bytes says {at + body_bytes}")
        body = memoryview(frame)[at:]
        taken = 0

        def take(value: dict[str, Any]) -> object:
            nonlocal taken
            if "$bytes" not in value:
                return value
            start, taken = taken, taken + int(value["$bytes"])
            part = body[start:taken]
            if "dtype" not in value:
                return bytes(part)
            dtype = np.dtype(value["dtype"]).newbyteorder("<")
            flat = np.frombuffer(part, dtype).astype(value["dtype"])
            return flat.reshape(value["shape"])

        message = json.loads(frame[LENGTHS.size : at], object_hook=take)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, struct.error) as e:
        raise WireError(f"a frame that cannot be read: {e}") from e
    if not isinstance(message, dict):
        raise WireError(f"a frame that holds a {type(message).__name__}, not a message")
    return message


def lengths(head: bytes) -> tuple[int, int]:
    """(header, body) bytes that follow. Raises `WireError`."""
    if len(head) != LENGTHS.size:
        raise WireError("the connection ended within a message")
    header_bytes, body_bytes = LENGTHS.unpack(head)
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(f"a header of {header_bytes} bytes")
    return header_bytes, body_bytes
