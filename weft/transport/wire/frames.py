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

Workers speak one-way messages over a socket pair that they inherit: {"type": "dispatch", ...}. Both sides are ours, but
the job's code runs in the worker's process and may write to its socket: a bad frame from there ends the worker and its
job. A bad frame from a client is the client's fault and ends its connection with one of `ErrorCode`.
"""

from __future__ import annotations

import enum
from typing import Any

import msgpack

PROTOCOL = 1
MAX_CLIENT_FRAME_BYTES = 1 << 20  # a job spec is a few kB; 1 MiB leaves room for large args
MAX_REPLY_BYTES = 64 << 20  # `ps` of 1,000 finished jobs is some 300 kB; a client takes no more than this
MAX_WORKER_FRAME_BYTES = 64 << 20  # an inspection or a plan of 256 stages × 1,024 microbatches is some 20 MB
MAX_CONTAINER_ITEMS = 1 << 20
MAX_CLIENT_ITEMS = 1 << 16  # values in a client's frame: each is looked at, and may be told of in an error
MAX_ERROR_CHARS = 1 << 16  # of an error's message, which may quote what was sent
MAX_CLIENT_DEPTH = 64  # what a request holds is passed on as JSON and msgpack, whose own limits lie far above
LINK_GONE_EXIT = 76  # as EX_PROTOCOL in sysexits.h: of a worker that finds something else where its socket was
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
    NOT_ENDED = "not-ended"
    NOT_PAUSED = "not-paused"
    NOT_REMOVED = "not-removed"
    NOT_SAVED = "not-saved"
    NOT_REPLACED = "not-replaced"
    INTERNAL_ERROR = "internal-error"
    LEDGER_UNAVAILABLE = "ledger-unavailable"
    NO_ROOM = "no-room"


class WireError(Exception):
    """A frame or a message that breaks the protocol, or a request that is refused."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def to_wire(self) -> Message:
        """What any frame can hold: a message may quote a path with bytes that are no text."""
        text = self.message[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()
        return {"code": str(self.code), "message": text}


def encode(message: Message) -> bytes:
    """One frame. Raises ValueError, TypeError or OverflowError for what msgpack cannot hold."""
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

    @property
    def holds_part(self) -> bool:
        """A frame has begun and not ended."""
        return bool(self._buffer)

    @property
    def part(self) -> bytes:
        """Of the frame that has begun, what has come."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        messages, error = self.take(data)
        if error is not None:
            raise error
        return messages

    def take(self, data: bytes) -> tuple[list[Message], WireError | None]:
        """As `feed`, with the messages before the first bad frame."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        try:
            while (body := self._body_at(start)) is not None:
                messages.append(self._decode(body))
                start += _PREFIX_BYTES + len(body)
        except WireError as error:
            return messages, error
        del self._buffer[:start]
        return messages, None

    def _body_at(self, start: int) -> bytes | None:
        """Of the frame that begins there; None while it has not come whole."""
        if len(self._buffer) - start < _PREFIX_BYTES:
            return None
        length = int.from_bytes(self._buffer[start : start + _PREFIX_BYTES], "big")
        if length == 0:
            raise WireError(ErrorCode.EMPTY_FRAME, "a frame of length 0; a frame holds one msgpack map")
        if length > self._max_frame_bytes:
            raise WireError(
                ErrorCode.FRAME_TOO_LARGE, f"a frame of {length} bytes; at most {self._max_frame_bytes} are taken"
            )
        end = start + _PREFIX_BYTES + length
        return bytes(self._buffer[start + _PREFIX_BYTES : end]) if len(self._buffer) >= end else None

    def _decode(self, body: bytes) -> Message:
        most_items = MAX_CLIENT_ITEMS if self._strict else MAX_CONTAINER_ITEMS
        most_items = min(len(body), most_items)  # an item is a byte at least; room for all is made at once
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
            _count_items(message, MAX_CLIENT_DEPTH, 0)
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


def _count_items(value: dict[str, Any] | list[Any], deeper: int, num_items: int) -> int:
    """So many were counted before; raises WireError where there are too many of them, or too many in one another."""
    if deeper == 0:
        raise WireError(
            ErrorCode.NOT_MSGPACK, f"a frame nested too deep; at most {MAX_CLIENT_DEPTH} containers stand in one"
        )
    num_items += len(value)
    if num_items > MAX_CLIENT_ITEMS:
        raise WireError(
            ErrorCode.FRAME_TOO_LARGE,
            f"a frame of more than {MAX_CLIENT_ITEMS} values, which are the most that are taken; keep data out of it",
        )
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (dict, list)):
            num_items = _count_items(part, deeper - 1, num_items)
    return num_items


def field(message: Message, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """The message's field, of the type asked for; raises WireError that names it."""
    value = message.get(name, default)
    if value is ...:
        raise WireError(ErrorCode.BAD_FIELD, f"the field {name!r} is missing")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    is_wanted = bool in kinds if isinstance(value, bool) else isinstance(value, kinds)  # True is no number here
    if value is not default and not is_wanted:
        wanted = " or ".join(each.__name__ for each in kinds)
        raise WireError(ErrorCode.BAD_FIELD, f"the field {name!r} is {type(value).__name__}, not {wanted}")
    return value
