"""The wire: length-prefixed msgpack frames, sans-IO, with every bound at the top.

    ┌────────────┬─────────────────────────────┐
    │ length u32 │ msgpack map, `length` bytes │    big-endian length, no extension types, string keys
    └────────────┴─────────────────────────────┘

Two conversations use it. Clients speak requests and replies over the daemon's socket:

    client  {"hello": {"protocol": 1, "version": "0.1.0"}}
    daemon  {"hello": {"protocol": 1, "version": "0.1.0", "pid": 4242}}
    client  {"id": 1, "verb": "show", "job": "digits-1"}
    daemon  {"id": 1, "ok": {...}}  or  {"id": 1, "error": {"code": "no-such-job", "message": "..."}}
    daemon  {"id": 1, "event": {...}} any number of times before the `ok`, for verbs that stream

Workers speak one-way messages over a socket pair that they inherit: {"type": "dispatch", ...}. Both sides are ours, so
a bad frame there is a bug and ends the worker; a bad frame from a client is the client's fault and ends its connection
with one of `ErrorCode`.
"""

from __future__ import annotations

import enum
from typing import Any

import msgpack

PROTOCOL = 1
MAX_CLIENT_FRAME_BYTES = 1 << 20  # a job spec is a few kB; 1 MiB leaves room for large args
MAX_WORKER_FRAME_BYTES = 64 << 20  # an inspection or a plan of 256 stages × 1,024 microbatches is some 20 MB
MAX_CONTAINER_ITEMS = 1 << 20
MAX_CLIENT_DEPTH = 64  # what a request holds is passed on as JSON and msgpack, whose own limits lie far above
_PREFIX_BYTES = 4

Message = dict[str, Any]


class ErrorCode(enum.StrEnum):
    """What a reply's error says, and the exit code that the command line gives for it."""

    EMPTY_FRAME = "empty-frame"
    FRAME_TOO_LARGE = "frame-too-large"
    NOT_MSGPACK = "not-msgpack"
    NOT_A_MAP = "not-a-map"
    NO_HELLO = "no-hello"
    WRONG_PROTOCOL = "wrong-protocol"
    UNKNOWN_VERB = "unknown-verb"
    BAD_FIELD = "bad-field"
    INVALID_SPEC = "invalid-spec"
    NO_SUCH_JOB = "no-such-job"
    NOT_YOURS = "not-yours"
    QUEUE_FULL = "queue-full"
    ID_TAKEN = "id-taken"
    TIMED_OUT = "timed-out"
    DRAINING = "draining"
    TOO_MANY_CONNECTIONS = "too-many-connections"
    NOTHING_RECORDED = "nothing-recorded"
    NO_ROOM = "no-room"


class WireError(Exception):
    """A frame or a message that breaks the protocol, or a request that is refused."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def to_wire(self) -> Message:
        return {"code": str(self.code), "message": self.message}


def encode(message: Message) -> bytes:
    """One frame. Raises ValueError or TypeError for what msgpack cannot hold."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return len(body).to_bytes(_PREFIX_BYTES, "big") + body


class FrameReader:
    """Bytes in, messages out; holds at most one frame and raises WireError at the first bad one.

    After an error the reader must not be fed again: the stream has no frame boundary to recover at. strict is for what
    strangers send: it also refuses a key that is given twice, keys of bytes and what is nested too deep.
    """

    def __init__(self, max_frame_bytes: int, *, strict: bool = False) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._strict = strict
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _PREFIX_BYTES:
            length = int.from_bytes(self._buffer[start : start + _PREFIX_BYTES], "big")
            if length == 0:
                raise WireError(ErrorCode.EMPTY_FRAME, "a frame of length 0; a frame holds one msgpack map")
            if length > self._max_frame_bytes:
                raise WireError(
                    ErrorCode.FRAME_TOO_LARGE, f"a frame of {length} bytes; at most {self._max_frame_bytes} are taken"
                )
            end = start + _PREFIX_BYTES + length
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[start + _PREFIX_BYTES : end])))
            start = end
        del self._buffer[:start]
        return messages

    def _decode(self, body: bytes) -> Message:
        most_items = min(len(body), MAX_CONTAINER_ITEMS)  # an item is a byte at least; room for all is made at once
        try:
            message = msgpack.unpackb(
                body,
                raw=False,
                strict_map_key=True,
                ext_hook=_refuse_extension,
                max_ext_len=0,
                object_pairs_hook=_map_without_repeats if self._strict else None,
                max_array_len=most_items,
                max_map_len=most_items,
            )
        except (ValueError, TypeError, RecursionError, MemoryError, msgpack.exceptions.UnpackException) as error:
            problem = str(error) or _SILENT_ERRORS.get(type(error), type(error).__name__)
            raise WireError(ErrorCode.NOT_MSGPACK, f"a frame that is not msgpack: {problem}") from None
        if not isinstance(message, dict):
            raise WireError(ErrorCode.NOT_A_MAP, f"a frame that holds {type(message).__name__}; it must be a map")
        if self._strict:
            _check_depth(message, MAX_CLIENT_DEPTH)
        return message


_SILENT_ERRORS = {
    msgpack.exceptions.FormatError: "a byte that stands for nothing",
    msgpack.exceptions.StackError: "nested too deep",
}


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} with {len(data)} bytes; there are none here")


def _map_without_repeats(pairs: list[tuple[Any, Any]]) -> Message:
    message: Message = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise WireError(ErrorCode.BAD_FIELD, f"the key {key!r:.80} is {type(key).__name__}; keys are text")
        if key in message:
            raise WireError(ErrorCode.BAD_FIELD, f"the field {key!r:.80} is given twice")
        message[key] = value
    return message


def _check_depth(value: Any, deeper: int) -> None:
    if isinstance(value, (dict, list)):
        if deeper == 0:
            raise WireError(
                ErrorCode.NOT_MSGPACK, f"a frame nested too deep; at most {MAX_CLIENT_DEPTH} containers stand in one"
            )
        for part in value.values() if isinstance(value, dict) else value:
            _check_depth(part, deeper - 1)


def field(message: Message, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """The message's field, of the type asked for; raises WireError that names it."""
    value = message.get(name, default)
    if value is ...:
        raise WireError(ErrorCode.BAD_FIELD, f"the field {name!r} is missing")
    if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is int)):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise WireError(ErrorCode.BAD_FIELD, f"the field {name!r} is {type(value).__name__}, not {wanted}")
    return value
