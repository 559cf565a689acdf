"""Frames there and back, and what comes of bytes that are none."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engines.inside.wire import LENGTHS, MAX_HEADER_BYTES, Message, WireError, lengths, pack, unpack

NAMES = st.text(max_size=5).filter(lambda name: name != "$bytes")
DTYPES = st.sampled_from(["float16", "float32", "float64", "int8", "uint16", "int64", "bool"])
ARRAYS = DTYPES.flatmap(lambda d: arrays.arrays(d, arrays.array_shapes(min_dims=0, min_side=0)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Types too, and NaN is NaN."""
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def frame(header: str, body: bytes = b"") -> bytes:
    """One that says the right lengths, whatever its header says."""
    text = header.encode()
    return LENGTHS.pack(len(text), len(body)) + text + body


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_is_packed_is_unpacked(message: Message) -> None:
    assert same(unpack(pack(message)), message)


@given(ARRAYS)
def test_an_array_can_be_written_to_on_the_other_side(array: np.ndarray[Any, Any]) -> None:
    assert unpack(pack({"a": array}))["a"].flags.writeable


@pytest.mark.parametrize("view", ["a.T", "a[:, ::2]", "a[::-1]", "a.astype('>f4')"])
def test_an_array_travels_however_it_lies_in_memory(view: str) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = eval(view, {"a": a})
    there = unpack(pack({"a": given}))["a"]
    assert there.dtype == np.float32
    assert np.array_equal(there, given)


def test_bytes_and_arrays_keep_their_order() -> None:
    ones = np.ones(3, np.int16)
    there = unpack(pack({"a": b"x", "b": [ones, b""], "c": {"d": b"yz", "e": ones[:0]}}))
    assert (there["a"], there["b"][1], there["c"]["d"]) == (b"x", b"", b"yz")
    assert np.array_equal(there["b"][0], ones)


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, np.float32(1)])
def test_what_is_no_message_is_refused_where_it_starts(value: object) -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        pack({"a": value})


def test_an_array_of_objects_is_refused_where_it_starts() -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        pack({"a": np.array([None, "text"], dtype=object)})


def test_a_frame_cut_anywhere_is_no_frame() -> None:
    whole = pack({"a": np.arange(3), "b": "text"})
    for num in range(len(whole)):
        with pytest.raises(WireError):
            unpack(whole[:num])


def test_a_frame_with_more_behind_it_is_no_frame() -> None:
    with pytest.raises(WireError, match="bytes says"):
        unpack(pack({"a": b"1"}) + b"!")


def test_a_header_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="a header of"):
        lengths(LENGTHS.pack(MAX_HEADER_BYTES + 1, 0))


@pytest.mark.parametrize("head", [b"", b"\0" * 11, b"\0" * 13])
def test_a_head_of_another_length_is_refused(head: bytes) -> None:
    with pytest.raises(WireError, match="ended within"):
        lengths(head)


@given(st.binary(max_size=60))
def test_garbage_is_no_message(noise: bytes) -> None:
    with pytest.raises(WireError):
        unpack(noise)


@given(st.binary(max_size=40), st.binary(max_size=8))
def test_a_garbage_header_is_no_message(header: bytes, body: bytes) -> None:
    try:
        assert isinstance(unpack(LENGTHS.pack(len(header), len(body)) + header + body), dict)
    except WireError:
        pass


@pytest.mark.parametrize(
    "said",
    [
        '{"$bytes": "many"}',
        '{"$bytes": null}',
        '{"$bytes": 8, "dtype": "no such type", "shape": [1]}',
        '{"$bytes": 8, "dtype": "float64", "shape": [2]}',
        '{"$bytes": 8, "dtype": "float64", "shape": "one"}',
        '{"$bytes": 7, "dtype": "float64", "shape": [1]}',
        '{"$bytes": 8, "dtype": "object", "shape": [1]}',
        '{"$bytes": 8, "dtype": {"names": 1}, "shape": [1]}',
        '{"$bytes": 8, "dtype": "float64", "shape": [99999999999999999999]}',
    ],
)
def test_a_value_that_lies_about_its_bytes_is_no_message(said: str) -> None:
    with pytest.raises(WireError):
        unpack(frame(f'{{"a": {said}}}', b"\0" * 8))


def test_a_length_over_what_came_is_no_message() -> None:
    with pytest.raises(WireError):
        unpack(frame('{"a": {"$bytes": 99999999999999999999, "dtype": "int8", "shape": [1]}}'))


def test_an_endless_length_is_no_message() -> None:
    with pytest.raises(WireError):
        unpack(frame('{"a": {"$bytes": Infinity}}'))


def test_an_array_without_a_shape_is_no_message() -> None:
    with pytest.raises(WireError):
        unpack(frame('{"a": {"$bytes": 8, "dtype": "float64"}}', b"\0" * 8))


def test_a_header_nested_too_deep_is_no_message() -> None:
    with pytest.raises(WireError):
        unpack(frame('{"a":' + "[" * 100_000))


@pytest.mark.parametrize("text", ["[]", "null", "3", '"text"'])
def test_json_that_is_no_object_is_no_message(text: str) -> None:
    with pytest.raises(WireError, match="not a message"):
        unpack(frame(text))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("it was unpickled",)


def test_nothing_is_unpickled() -> None:
    pickled = pickle.dumps(Trap())
    for dtype in (None, "object", "O"):
        said = {"$bytes": len(pickled)} | ({"dtype": dtype, "shape": [1]} if dtype else {})
        try:
            there = unpack(frame(json.dumps({"a": said}), pickled))
        except WireError:
            continue
        assert there["a"] == pickled
    with pytest.raises(WireError):
        unpack(pickled)
