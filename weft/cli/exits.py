"""Exit codes of the `weft` command, and the one place where an error becomes a sentence on stderr and a code.

a job's own code   run, wait, logs -f, submit -f (128 + N when signal N killed it)
2  usage, or a spec that is not valid      75   try again later: the queue is full, the daemon drains, the job runs
4  no such job, or nothing recorded of it  77   not yours
69 no daemon answers, or run's own         124  wait timed out
   does not start
1  compare: no preset completed; doctor: a problem was found; daemon: it could not start, its fork server or its socket
   was lost, or it was not to be replaced and goes on as it is
130 Ctrl-C, 143 SIGTERM or a terminal that closed, 141 nobody reads stdout
 74 stdout, a file, the daemon's ledger or a new job's run directory cannot be written, or a job's files not removed
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, ParamSpec, TextIO, TypeVar

from weft.client.client import DaemonUnreachable, RequestRefused
from weft.transport.wire.frames import ErrorCode, Message

P = ParamSpec("P")
R = TypeVar("R")

FAILED = 1
USAGE = 2
NO_SUCH_JOB = 4
UNREACHABLE = 69
SOFTWARE = 70  # a refusal that only a fault of ours explains
CANNOT_WRITE = 74
TRY_LATER = 75
NOT_YOURS = 77
TIMED_OUT = 124
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143

_REFUSALS: dict[str, int] = {
    ErrorCode.BAD_FIELD: USAGE,
    ErrorCode.FRAME_TOO_LARGE: USAGE,
    ErrorCode.ID_TAKEN: USAGE,
    ErrorCode.INVALID_SPEC: USAGE,
    ErrorCode.NO_SUCH_JOB: NO_SUCH_JOB,
    ErrorCode.WRONG_PROTOCOL: UNREACHABLE,
    ErrorCode.DRAINING: TRY_LATER,
    ErrorCode.QUEUE_FULL: TRY_LATER,
    ErrorCode.TOO_MANY_CONNECTIONS: TRY_LATER,
    ErrorCode.NOT_YOURS: NOT_YOURS,
    ErrorCode.NOTHING_RECORDED: NO_SUCH_JOB,
    ErrorCode.NOT_ENDED: TRY_LATER,
    ErrorCode.NOT_PAUSED: USAGE,
    ErrorCode.NOT_REMOVED: CANNOT_WRITE,
    ErrorCode.NOT_SAVED: CANNOT_WRITE,
    ErrorCode.NOT_REPLACED: FAILED,
    ErrorCode.NO_ROOM: CANNOT_WRITE,
    ErrorCode.TIMED_OUT: TIMED_OUT,
    ErrorCode.LEDGER_UNAVAILABLE: CANNOT_WRITE,
}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, on the same way out as Ctrl-C."""


def of_refusal(code: str) -> int:
    return _REFUSALS.get(code, SOFTWARE)


def of_interrupt(interrupt: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def of_result(result: Message) -> int:
    """The job's own code; 1 for a job that ended badly without one."""
    code = result.get("exit_code")
    if isinstance(code, int):
        return code
    return 0 if result["state"] == "completed" else 1


def leave(code: int, message: str = "") -> NoReturn:
    """Ends the verb; the message goes to stderr, each line of it with the name of the command."""
    try:
        for line in message.splitlines():
            print(f"weft: {line}", file=sys.stderr)
        sys.stderr.flush()
    except OSError:  # a terminal that has closed, a disk that is full: the code says it all the same
        _silence(sys.stderr)
    raise SystemExit(code)


def guarded(verb: Callable[P, R]) -> Callable[P, R]:
    """The verb, with every error that is not ours turned into a sentence and an exit code."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return verb(*args, **kwargs)
            finally:
                sys.stdout.flush()  # here, where a reader that has gone is dealt with
        except DaemonUnreachable as error:
            leave(UNREACHABLE, str(error))
        except RequestRefused as refusal:
            leave(of_refusal(refusal.code), refusal.message)
        except KeyboardInterrupt as interrupt:
            leave(of_interrupt(interrupt))
        except BrokenPipeError:
            _silence(sys.stdout, sys.stderr)
            leave(BROKEN_PIPE)
        except OSError as error:
            if _is_of_closed_terminal(error):  # its signal comes later, or was answered before
                _silence(sys.stdout, sys.stderr)
                leave(TERMINATED)
            _drop_unwritten()
            _check_working_directory(error)
            leave(CANNOT_WRITE, _told(error))
        except _spec_error() as error:
            leave(USAGE, str(error))

    return run


@contextmanager
def termination_raises() -> Iterator[None]:
    """While it lasts, SIGTERM raises Terminated, so that every `finally` on the way out runs. So does SIGHUP, unless it
    is ignored (nohup)."""

    def handle(signum: int, frame: FrameType | None) -> NoReturn:
        if signum == signal.SIGHUP:  # of a terminal that closes one comes from the shell, too: not into the `finally`
            signal.signal(signum, signal.SIG_IGN)
        raise Terminated

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _spec_error() -> type[Exception]:
    from weft.spec.job_spec import SpecError

    return SpecError


def _check_working_directory(error: OSError) -> None:
    """Ends the verb where that is what the error is about, which names no file then."""
    from weft.spec.source import working_directory

    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            working_directory()
        except _spec_error() as gone:
            leave(USAGE, str(gone))


def _is_of_closed_terminal(error: OSError) -> bool:
    """Whether it is what a terminal answers that has closed, and one of ours has."""
    if error.errno != errno.EIO:
        return False
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        try:
            termios.tcgetattr(stream.fileno())
        except termios.error as answer:
            if answer.args[0] == errno.EIO:  # of what is no terminal it is another
                return True
    return False


def _told(error: OSError) -> str:
    """An error of the system without its number; one of ours as it is."""
    if error.strerror is None:
        return str(error)
    if error.filename is None:
        return f"{error.strerror}; check where the output goes, and that its disk is not full"
    return f"{error.filename}: {error.strerror}; check the path, and that you may write there"


def _drop_unwritten() -> None:
    """What stdout cannot take, Python would try to write again at its end, and end with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)


def _silence(*streams: TextIO) -> None:
    """Sends what Python still wants to flush to nowhere: the reader of one of the streams has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
