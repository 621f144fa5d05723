"""The wire against its enemies: hand-made frames, frames cut anywhere, random bytes (promises B1 to B3)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.transport.wire.frames import (
    MAX_CLIENT_DEPTH,
    MAX_CLIENT_FRAME_BYTES,
    MAX_CLIENT_ITEMS,
    MAX_WORKER_FRAME_BYTES,
    ErrorCode,
    FrameReader,
    Message,
    WireError,
    encode,
    field,
)

MIB = 1 << 20


def strict() -> FrameReader:
    return FrameReader(MAX_CLIENT_FRAME_BYTES, strict=True)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def in_a_map(value: bytes) -> bytes:
    """{"a": value}, the value as raw msgpack."""
    return framed(b"\x81\xa1a" + value)


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


# --- messages


MESSAGES: dict[str, Message] = {
    "hello": {"hello": {"protocol": 1, "version": "0.1.0"}},
    "hello of the daemon": {"hello": {"protocol": 1, "version": "0.1.0", "pid": 4242}},
    "submit": {
        "id": 1,
        "verb": "submit",
        "spec": {
            "job": {"entry": "digits.py:workload", "args": {"rates": [0.1, None, True], "name": "größer"}, "epochs": 2},
            "strategy": {"stages": 2},
            "directory": "/jobs",
        },
        "priority": -3,
    },
    "show": {"id": 2, "verb": "show", "job": "digits-1"},
    "logs": {"id": 2**63, "verb": "logs", "job": "digits-1", "offset": 2**40},
    "wait": {"id": 3, "verb": "wait", "job": "digits-1", "timeout": 1.5},
    "ok": {"id": 1, "ok": {"jobs": [{"job": "digits-1", "state": "running", "step": 3, "loss": None}]}},
    "error": {"id": 1, "error": {"code": "no-such-job", "message": "there is no job digits-2"}},
    "event": {"id": 1, "event": {"progress": {"step": 1, "loss": 0.25, "eta_seconds": 3.0}}},
    "empty": {},
    "fork": {"fork": "cpu-0", "role": "worker", "config": {"cores": [0, 1], "authkey": b"\x00\xff" * 16}, "job": ""},
    "exited": {"exited": "cpu-0", "pid": 17, "code": -9},
    "dispatch": {"type": "dispatch", "work": [[0, [1, 2, 3]], [1, [1]]]},
    "report": {"type": "report", "lane": "compute", "count": 5, "records": b"\x01" * 96, "values": [{"loss": 1.0}]},
    "prepared": {"type": "prepared", "job": "digits-1", "attempt": 1},
    "fault": {"type": "fault", "job": "a", "attempt": 1, "reason": "user-error", "message": "é" * 300, "exit_code": 1},
    "released": {"type": "released", "job": "a", "attempt": 1, "clean": True},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_arrives_as_it_was_sent(name: str) -> None:
    frame = encode(MESSAGES[name])
    assert strict().feed(frame) == [MESSAGES[name]]
    assert FrameReader(MAX_WORKER_FRAME_BYTES).feed(frame) == [MESSAGES[name]]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_cut_at_any_byte_is_no_message_and_no_error(name: str) -> None:
    """B3: the peer that closes there leaves nothing behind; and a slow one may send the rest."""
    frame = encode(MESSAGES[name])
    for cut in range(len(frame)):
        reader = strict()
        assert reader.feed(frame[:cut]) == []
        assert reader.feed(b"") == []
        assert reader.feed(frame[cut:]) == [MESSAGES[name]]


def test_a_body_that_is_cut_at_any_byte_is_named() -> None:
    """A length that tells the truth about a body that is only the beginning of one."""
    for message in MESSAGES.values():
        body = encode(message)[4:]
        for cut in range(1, len(body)):
            with pytest.raises(WireError) as caught:
                strict().feed(framed(body[:cut]))
            assert caught.value.code is ErrorCode.NOT_MSGPACK


@given(st.lists(st.sampled_from(sorted(MESSAGES)), max_size=6), st.data())
def test_messages_come_whole_and_in_order_however_the_stream_is_cut(names: list[str], data: st.DataObject) -> None:
    stream = b"".join(encode(MESSAGES[name]) for name in names)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = strict()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == [MESSAGES[name] for name in names]


# --- B2: hand-made frames

NIL, ONE = b"\xc0", b"\x01"
HOSTILE: dict[str, tuple[bytes, ErrorCode, str]] = {
    # lengths
    "length 0": (u32(0), ErrorCode.EMPTY_FRAME, "a frame of length 0"),
    "length 0 before a good frame": (u32(0) + encode({}), ErrorCode.EMPTY_FRAME, "length 0"),
    "length one above the bound": (
        u32(MAX_CLIENT_FRAME_BYTES + 1),
        ErrorCode.FRAME_TOO_LARGE,
        "1048577 bytes; at most",
    ),
    "length 2**31": (u32(2**31), ErrorCode.FRAME_TOO_LARGE, "2147483648 bytes"),
    "length 2**32 - 1": (u32(2**32 - 1), ErrorCode.FRAME_TOO_LARGE, "4294967295 bytes"),
    "a request of HTTP": (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.FRAME_TOO_LARGE, "1195725856 bytes"),
    "a hello of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", ErrorCode.FRAME_TOO_LARGE, "369295618 bytes"),
    "a line of JSON": (b'{"id": 1, "verb": "ls"}\n', ErrorCode.FRAME_TOO_LARGE, "bytes; at most"),
    "a little-endian length": (b"\x01\x00\x00\x00\x80", ErrorCode.FRAME_TOO_LARGE, "16777216 bytes"),
    # no map
    "nil": (framed(NIL), ErrorCode.NOT_A_MAP, "holds NoneType"),
    "true": (framed(b"\xc3"), ErrorCode.NOT_A_MAP, "holds bool"),
    "a small number": (framed(ONE), ErrorCode.NOT_A_MAP, "holds int"),
    "a negative number": (framed(b"\xff"), ErrorCode.NOT_A_MAP, "holds int"),
    "2**64 - 1": (framed(b"\xcf" + b"\xff" * 8), ErrorCode.NOT_A_MAP, "holds int"),
    "a float": (framed(b"\xcb" + b"\x00" * 8), ErrorCode.NOT_A_MAP, "holds float"),
    "nan": (framed(b"\xcb\x7f\xf8" + b"\x00" * 6), ErrorCode.NOT_A_MAP, "holds float"),
    "text": (framed(b"\xa5hello"), ErrorCode.NOT_A_MAP, "holds str"),
    "bytes": (framed(b"\xc4\x01x"), ErrorCode.NOT_A_MAP, "holds bytes"),
    "an array": (framed(b"\x90"), ErrorCode.NOT_A_MAP, "holds list"),
    "an array with a map in it": (framed(b"\x91\x80"), ErrorCode.NOT_A_MAP, "holds list"),
    # no msgpack
    "the byte that stands for nothing": (framed(b"\xc1"), ErrorCode.NOT_MSGPACK, "a byte that stands for nothing"),
    "that byte as a value": (in_a_map(b"\xc1"), ErrorCode.NOT_MSGPACK, "a byte that stands for nothing"),
    "a map without its pairs": (framed(b"\x81"), ErrorCode.NOT_MSGPACK, "incomplete"),
    "a key without a value": (framed(b"\x81\xa1a"), ErrorCode.NOT_MSGPACK, "incomplete"),
    "text shorter than it says": (in_a_map(b"\xa5hell"), ErrorCode.NOT_MSGPACK, "incomplete"),
    "a number cut in half": (in_a_map(b"\xcd\x01"), ErrorCode.NOT_MSGPACK, "incomplete"),
    "bytes after the map": (framed(b"\x80\x80"), ErrorCode.NOT_MSGPACK, "extra data"),
    "two maps in a frame": (framed(b"\x81\xa1a\x01\x81\xa1a\x01"), ErrorCode.NOT_MSGPACK, "extra data"),
    "a pickle": (framed(b"\x80\x04}\x94\x8c\x01a\x94K\x01s."), ErrorCode.NOT_MSGPACK, "extra data"),
    "a frame in a frame": (framed(encode({"id": 1})), ErrorCode.NOT_MSGPACK, "extra data"),
    # huge headers in small frames
    "an array of 2**32 - 1": (
        in_a_map(b"\xdd" + u32(2**32 - 1)),
        ErrorCode.NOT_MSGPACK,
        "4294967295 exceeds max_array_len",
    ),
    "an array of 2**20": (in_a_map(b"\xdd" + u32(2**20)), ErrorCode.NOT_MSGPACK, "1048576 exceeds max_array_len"),
    "an array of 2**16 - 1": (in_a_map(b"\xdc\xff\xff"), ErrorCode.NOT_MSGPACK, "65535 exceeds max_array_len"),
    "a map of 2**32 - 1": (framed(b"\xdf" + u32(2**32 - 1)), ErrorCode.NOT_MSGPACK, "4294967295 exceeds max_map_len"),
    "a map of 2**16 - 1": (framed(b"\xde\xff\xff"), ErrorCode.NOT_MSGPACK, "65535 exceeds max_map_len"),
    "text of 2**32 - 1": (in_a_map(b"\xdb" + u32(2**32 - 1)), ErrorCode.NOT_MSGPACK, "incomplete"),
    "text of 2**16 - 1": (in_a_map(b"\xda\xff\xffx"), ErrorCode.NOT_MSGPACK, "incomplete"),
    "bytes of 2**32 - 1": (in_a_map(b"\xc6" + u32(2**32 - 1)), ErrorCode.NOT_MSGPACK, "incomplete"),
    "bytes of 2**16 - 1": (in_a_map(b"\xc5\xff\xffx"), ErrorCode.NOT_MSGPACK, "incomplete"),
    "arrays of thousands in one another": (
        in_a_map((b"\xdc\x0f\xff") * 1400),
        ErrorCode.NOT_MSGPACK,
        "nested too deep",
    ),
    # nesting
    "one array too deep": (in_a_map(b"\x91" * MAX_CLIENT_DEPTH + ONE), ErrorCode.NOT_MSGPACK, "at most 64 containers"),
    "one map too deep": (framed(b"\x81\xa1a" * (MAX_CLIENT_DEPTH + 1) + ONE), ErrorCode.NOT_MSGPACK, "nested too deep"),
    "1,000 arrays": (in_a_map(b"\x91" * 1000 + ONE), ErrorCode.NOT_MSGPACK, "nested too deep"),
    "100,000 arrays": (in_a_map(b"\x91" * 100_000 + ONE), ErrorCode.NOT_MSGPACK, "nested too deep"),
    "100,000 maps": (framed(b"\x81\xa1a" * 100_000 + ONE), ErrorCode.NOT_MSGPACK, "nested too deep"),
    "a mebibyte of arrays": (framed(b"\x91" * (MIB - 1) + ONE), ErrorCode.NOT_MSGPACK, "nested too deep"),
    # keys
    "a number as a key": (framed(b"\x81\x01\x02"), ErrorCode.NOT_MSGPACK, "int is not allowed for map key"),
    "nil as a key": (framed(b"\x81\xc0\x02"), ErrorCode.NOT_MSGPACK, "NoneType is not allowed for map key"),
    "a float as a key": (
        framed(b"\x81\xca\x00\x00\x00\x00\x02"),
        ErrorCode.NOT_MSGPACK,
        "float is not allowed for map key",
    ),
    "bytes as a key": (framed(b"\x81\xc4\x01a\x02"), ErrorCode.BAD_FIELD, "the key b'a' is bytes; keys are text"),
    "an array as a key": (framed(b"\x81\x91\x01\x02"), ErrorCode.NOT_MSGPACK, "list is not allowed for map key"),
    "a map as a key": (framed(b"\x81\x80\x02"), ErrorCode.NOT_MSGPACK, "dict is not allowed for map key"),
    "a key twice": (framed(b"\x82\xa1a\x01\xa1a\x02"), ErrorCode.BAD_FIELD, "the field 'a' is given twice"),
    "a key twice, further in": (in_a_map(b"\x91\x82\xa1b\x01\xa1b\x02"), ErrorCode.BAD_FIELD, "'b' is given twice"),
    "a key twice, long": (
        framed(b"\x82" + (b"\xd9\xff" + b"k" * 255 + ONE) * 2),
        ErrorCode.BAD_FIELD,
        "is given twice",
    ),
    # text
    "a lone continuation byte": (in_a_map(b"\xa1\x80"), ErrorCode.NOT_MSGPACK, "'utf-8' codec can't decode"),
    "half a character": (in_a_map(b"\xa1\xc3"), ErrorCode.NOT_MSGPACK, "'utf-8' codec can't decode"),
    "a surrogate": (in_a_map(b"\xa3\xed\xa0\x80"), ErrorCode.NOT_MSGPACK, "'utf-8' codec can't decode"),
    "an overlong slash": (in_a_map(b"\xa2\xc0\xaf"), ErrorCode.NOT_MSGPACK, "'utf-8' codec can't decode"),
    "a key that is no text": (framed(b"\x81\xa1\xff\x01"), ErrorCode.NOT_MSGPACK, "'utf-8' codec can't decode"),
    "Latin-1": (in_a_map(b"\xa3gr\xfc"), ErrorCode.NOT_MSGPACK, "'utf-8' codec can't decode"),
    # extension types
    "an extension of one byte": (in_a_map(b"\xd4\x05\x00"), ErrorCode.NOT_MSGPACK, "exceeds max_ext_len"),
    "an extension of 16 bytes": (in_a_map(b"\xd8\x05" + bytes(16)), ErrorCode.NOT_MSGPACK, "exceeds max_ext_len"),
    "an empty extension": (in_a_map(b"\xc7\x00\x05"), ErrorCode.NOT_MSGPACK, "extension type 5 with 0 bytes"),
    "an extension as the frame": (framed(b"\xc7\x00\x05"), ErrorCode.NOT_MSGPACK, "extension type 5 with 0 bytes"),
    "an extension as a key": (framed(b"\x81\xc7\x00\x05\x01"), ErrorCode.NOT_MSGPACK, "extension type 5 with 0 bytes"),
    "an extension of 2**32 - 1 bytes": (
        in_a_map(b"\xc9" + u32(2**32 - 1) + b"\x05"),
        ErrorCode.NOT_MSGPACK,
        "max_ext_len",
    ),
    "a time stamp": (in_a_map(b"\xd6\xff\x00\x00\x00\x00"), ErrorCode.NOT_MSGPACK, "exceeds max_ext_len"),
    "an empty time stamp": (in_a_map(b"\xc7\x00\xff"), ErrorCode.NOT_MSGPACK, "invalid timestamp"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_is_refused_with_its_own_name(name: str) -> None:
    frame, code, text = HOSTILE[name]
    with pytest.raises(WireError) as caught:
        strict().feed(frame)
    assert caught.value.code is code
    assert text in caught.value.message
    assert len(caught.value.message) < 300
    assert caught.value.to_wire() == {"code": str(code), "message": caught.value.message}


def test_there_are_as_many_hostile_frames_as_promised_and_no_two_are_alike() -> None:
    assert len(HOSTILE) >= 60
    assert len({frame for frame, *_ in HOSTILE.values()}) == len(HOSTILE)


def test_what_came_before_a_bad_frame_in_the_same_bytes_does_not_hide_it() -> None:
    with pytest.raises(WireError, match="length 0"):
        strict().feed(encode({"id": 1}) + u32(0))


def test_a_frame_of_exactly_the_bound_is_taken() -> None:
    frame = in_a_map(b"\xc6" + u32(MAX_CLIENT_FRAME_BYTES - 8) + bytes(MAX_CLIENT_FRAME_BYTES - 8))
    assert len(frame) == 4 + MAX_CLIENT_FRAME_BYTES
    [message] = strict().feed(frame)
    assert len(message["a"]) == MAX_CLIENT_FRAME_BYTES - 8


@pytest.mark.parametrize("shape", ["one list", "many lists", "maps"])
def test_a_frame_holds_a_bounded_number_of_values(shape: str) -> None:
    """A list of 500,000 mistakes in a spec held the daemon up for 4 s, while each of them was written down."""

    def frame(number: int) -> bytes:
        match shape:
            case "one list":
                return encode({"a": [1] * (number - 1)})
            case "many lists":
                return encode({"a": [[1]] * ((number - 1) // 2), "b": [1] * ((number - 2) % 2)})
            case _:
                return encode({str(key): 1 for key in range(number)})

    assert len(strict().feed(frame(MAX_CLIENT_ITEMS - 3))) == 1
    with pytest.raises(WireError, match="65536") as caught:
        strict().feed(frame(MAX_CLIENT_ITEMS + 3))
    assert caught.value.code in (ErrorCode.FRAME_TOO_LARGE, ErrorCode.NOT_MSGPACK)


def test_nesting_up_to_the_bound_is_taken() -> None:
    assert len(strict().feed(in_a_map(b"\x91" * (MAX_CLIENT_DEPTH - 1) + ONE))) == 1


def test_our_own_processes_may_nest_deeper_and_still_send_no_extensions() -> None:
    reader = FrameReader(MAX_WORKER_FRAME_BYTES)
    assert len(reader.feed(in_a_map(b"\x91" * 200 + ONE))) == 1
    for name in ("an empty extension", "a time stamp", "a surrogate", "length 0"):
        frame, code, _ = HOSTILE[name]
        with pytest.raises(WireError) as caught:
            FrameReader(MAX_WORKER_FRAME_BYTES).feed(frame)
        assert caught.value.code is code


# --- B1: random and mutated frames


def play(data: bytes) -> str:
    """Feeds a stream piece by piece until it ends, or breaks the protocol and is told so; no other error may come."""
    reader = strict()
    try:
        for start in range(0, len(data), 7):
            for message in reader.feed(data[start : start + 7]):
                encode(message)
    except WireError as error:
        return error.message
    return "the end"


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_messages_or_a_wire_error(data: bytes) -> None:
    assert play(data)


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=200))
def test_random_bodies_are_messages_or_a_wire_error(body: bytes) -> None:
    assert play(framed(body))
    assert play(framed(b"\x81\xa1a" + body))


@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(MESSAGES)),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4),
    keep_length=st.booleans(),
)
@example(name="submit", flips=[(4, 1)], keep_length=True)
def test_mutated_messages_are_messages_or_a_wire_error(
    name: str, flips: list[tuple[int, int]], keep_length: bool
) -> None:
    frame = bytearray(encode(MESSAGES[name]))
    for place, flip in flips:
        first = 4 if keep_length and len(frame) > 4 else 0
        frame[first + place % (len(frame) - first)] ^= flip
    assert play(bytes(frame))


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa1a" + (b"\xdd" + u32(2**20)) * 800,
        b"\x81\xa1a" + (b"\xdc\x0f\xa0") * 1000,
        (b"\xdf" + u32(2**20) + b"\xa1a") * 800,
        b"\x81\xa1a\xdb" + u32(2**31) + b"x" * 4000,
    ],
    ids=["arrays beyond the frame", "arrays within it", "maps", "text"],
)
def test_a_small_frame_cannot_ask_for_much_memory(body: bytes) -> None:
    """Room for an array is made when its header is read: 800 headers of 2**20 items asked for 6 GiB."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            strict().feed(framed(body))
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


def test_a_reader_holds_no_more_than_the_frame_that_is_on_its_way() -> None:
    reader = strict()
    frame = encode({"x": bytes(1000)})
    tracemalloc.start()
    try:
        for _ in range(2000):
            assert len(reader.feed(frame)) == 1
        assert reader.feed(frame[:-1]) == []
        assert tracemalloc.get_traced_memory()[1] < MIB // 8
    finally:
        tracemalloc.stop()


def test_what_msgpack_cannot_hold_is_refused_where_it_is_sent() -> None:
    for value in (2**64, {1, 2}, object()):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            encode({"a": value})


# --- fields


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ({}, int, "the field 'a' is missing"),
        ({"a": "1"}, int, "the field 'a' is str, not int"),
        ({"a": True}, int, "the field 'a' is bool, not int"),
        ({"a": 1.0}, int, "the field 'a' is float, not int"),
        ({"a": float("nan")}, int, "the field 'a' is float, not int"),
        ({"a": None}, str, "the field 'a' is NoneType, not str"),
        ({"a": []}, dict, "the field 'a' is list, not dict"),
        ({"a": b"x"}, (str, int), "the field 'a' is bytes, not str or int"),
        ({"a": True}, (int, type(None)), "the field 'a' is bool, not int or NoneType"),
        ({"a": False}, (int, float, type(None)), "the field 'a' is bool, not int or float or NoneType"),
        ({"a": 1}, bool, "the field 'a' is int, not bool"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(message: Message, kind: Any, text: str) -> None:
    with pytest.raises(WireError) as caught:
        field(message, "a", kind)
    assert (caught.value.code, caught.value.message) == (ErrorCode.BAD_FIELD, text)


def test_a_field_is_taken_as_it_is_or_by_its_default() -> None:
    assert field({"a": 3}, "a", int) == 3
    assert field({}, "a", int, 7) == 7
    assert field({"a": None}, "a", (int, type(None)), None) is None
    assert field({"a": True}, "a", bool, False) is True
    assert field({"a": True}, "a", (bool, int)) is True
    with pytest.raises(WireError):
        field({"a": "x"}, "a", int, 7)


def test_the_hand_made_frames_are_made_as_msgpack_makes_them() -> None:
    assert framed(msgpack.packb({"a": 1})) == in_a_map(ONE) == encode({"a": 1})
