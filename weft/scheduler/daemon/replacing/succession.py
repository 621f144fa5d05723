"""Succession: the daemon becomes another Weft, and its workers go on meanwhile with what they were sent.

    asked ─▶ does that Weft start, and take over? ─▶ the door is closed; requests are answered to their end
          ─▶ workers are sent work ahead, and heard no longer; what was begun for jobs is finished and written
          ─▶ letter ─▶ execve

Until that last moment everything can be taken back, and is where something is in the way: the daemon goes on as it is.
The process stays the same one, so whoever has started it notices nothing. Clients that connect meanwhile wait; those
that follow a job come back, to where they were.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from weft.machine.tether import tying_to
from weft.scheduler.core.events import HandoverBegun
from weft.scheduler.daemon import notify
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.daemon.http.server import MetricsServer
from weft.scheduler.daemon.pool import Pool
from weft.scheduler.daemon.reception import Caller, Reception
from weft.scheduler.daemon.replacing.handover import VARIABLE, Letter, packed, write
from weft.scheduler.daemon.replacing.shape import shape
from weft.scheduler.ledger.ledger import AsyncLedger, Ledger
from weft.spec.settings import Settings
from weft.transport.wire.frames import ErrorCode, Message, WireError, field
from weft.transport.wire.runtime_directory import RuntimeDirectory
from weft.version import __version__

CHECK_SECONDS: Final = 60.0  # for the other Weft to say what it is: a second, and more on a busy machine
ANSWER_SECONDS: Final = 5.0  # for requests that are being answered; those that take longer are cut
SETTLE_SECONDS: Final = 20.0  # for what was begun for jobs; a job's end writes its recording, which takes a second
AHEAD_WINDOWS: Final = 4  # of a second, or a quarter of one: what follows takes a second, and three on a busy machine
MAX_PATH_CHARS: Final = 4096
LASTING: Final = frozenset({"follow", "wait", "replace"})  # verbs whose clients come back, or are answered after it


def ending_signals() -> list[signal.Signals]:
    """Those that end a daemon; SIGHUP, of a terminal that closes, where it is not ignored (nohup)."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] if is_ignored else [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


class Door(Protocol):
    """Where clients come in; while it is closed they wait outside."""

    async def open(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    settings: Settings
    environment: Mapping[str, str]  # of the process
    runtime: RuntimeDirectory
    driver: Driver
    pool: Pool
    ledger: AsyncLedger
    reception: Reception
    door: Door
    http: MetricsServer | None
    is_stopping: Callable[[], bool]
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    async def asked(self, request: Message, caller: Caller) -> Message:
        """The verb: answered by the next daemon, or refused by this one, which then goes on."""
        executable = _executable(request)
        arguments = [argument for argument in sys.argv[1:] if argument != "--accept-empty-ledger"]
        command = [executable, "-P", "-m", "weft", *arguments]
        asking = [executable, "-P", "-c", _tied_weft(), *arguments, "--tell-shape"]
        if self.turn.locked():
            raise _refusal("somebody else is replacing it")
        async with self.turn:
            version = await self._check(asking)
            if self.is_stopping():
                raise WireError(ErrorCode.DRAINING, "the daemon is about to end")
            return await self._go_over(command, version, caller)

    async def _go_over(self, command: Sequence[str], version: str, caller: Caller) -> NoReturn:
        self.door.close()
        try:
            await self.reception.until_answered(LASTING, ANSWER_SECONDS)
            self.driver.feed(HandoverBegun(windows=AHEAD_WINDOWS))
            self.pool.hold()
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._settled()
            raise _refusal(self._become(command, version, caller))
        except TimeoutError:
            raise _refusal("what was begun for its jobs takes too long; try again") from None
        finally:
            self.pool.resume()
            await self.door.open()

    async def _check(self, command: Sequence[str]) -> str:
        """The version of the other Weft, which would take over. command: by which it tells. Errors: WireError."""
        told = await asyncio.to_thread(_ask, command, notify.child_environment(self.environment))
        if isinstance(told, str):
            raise _refusal(told)
        if told.get("shape") != await asyncio.to_thread(shape):
            raise _refusal(
                f"Weft {told.get('version')} of {command[0]} keeps other things of its jobs and workers than Weft "
                f"{__version__} does; restart it instead, and its jobs go on from their newest checkpoints"
            )
        return str(told.get("version"))

    async def _settled(self) -> None:
        while True:
            await self.driver.settle()
            await self.ledger.run(Ledger.look)
            if self.driver.is_settled:
                return

    def _become(self, command: Sequence[str], version: str, caller: Caller) -> str:
        """Does not return, but where it cannot be: with the reason. Nothing may happen in between: no await in here."""
        brood = self.pool.brood()
        if brood is None:
            return "its fork server is gone"
        if (problem := self.ledger.health.problem) is not None:
            return f"the ledger does not take what changes: {problem}"
        number, connection = caller.line()
        letter = Letter(
            version=__version__,
            successor=version,
            settings=self.settings.model_dump(mode="json"),
            listener=self.runtime.listener.fileno(),
            lock=self.runtime.lock_fd,
            owns_socket=self.runtime.owns_socket,
            http=[] if self.http is None else self.http.descriptors(),
            links=brood.descriptors(),
            server_pid=brood.server_pid,
            caller=connection,
            call=number,
        )
        try:
            descriptor = write(letter, packed(self.driver.estate, brood, self.driver.writer))
        except Exception as error:  # a piece that cannot be pickled: a bug of ours, and no reason to end
            return f"its state cannot be written down ({type(error).__name__}: {error}); restart it instead"
        try:
            return self._execute(command, letter.descriptors(), descriptor)
        finally:
            os.close(descriptor)

    def _execute(self, command: Sequence[str], descriptors: Sequence[int], memory: int) -> str:
        """Signals that come from here on wait for the next daemon; one that came before is this one's."""
        came, ending = list[int](), ending_signals()
        before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in ending}
        environment = {name: value for name, value in self.environment.items() if not name.startswith("LISTEN_")}
        try:
            for each in (*descriptors, memory):
                os.set_inheritable(each, True)
            signal.pthread_sigmask(signal.SIG_BLOCK, ending)
            if came or self.is_stopping():
                return "it was told to end"
            sys.stdout.flush()
            sys.stderr.flush()
            os.execve(command[0], list(command), environment | {VARIABLE: str(memory)})
        except OSError as error:
            return f"{command[0]}: cannot be started ({error.strerror})"
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
            for each in descriptors:
                os.set_inheritable(each, False)


def _executable(request: Message) -> str:
    executable: str = field(request, "executable", str)
    if not executable.startswith("/") or "\0" in executable or len(executable) > MAX_PATH_CHARS:
        raise WireError(ErrorCode.BAD_FIELD, f"executable is {executable!r:.80}; give the absolute path of a Python")
    return executable


def _tied_weft() -> str:
    """`-m weft` that ends with this process, however that ends."""
    run = "runpy.run_module('weft', run_name='__main__', alter_sys=True)"
    return f"{tying_to(os.getpid())}; import runpy; {run}"


def _ask(command: Sequence[str], environment: Mapping[str, str]) -> Message | str:
    """What the other Weft says of itself, asked by this command; or why there is none."""
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_SECONDS,
            env=dict(environment),
            check=False,
        )
        told = json.loads(done.stdout) if done.returncode == 0 else None
    except OSError as error:
        return f"{command[0]}: cannot be started ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"{command[0]}: does not say within {CHECK_SECONDS:.0f} s which Weft it has"
    except ValueError:
        told = None
    if isinstance(told, dict):
        return told
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return f"{command[0]}: has no Weft that could take over ({said[-1] if said else 'it says nothing'})"


def _refusal(why: str) -> WireError:
    return WireError(ErrorCode.NOT_REPLACED, f"the daemon goes on as it is: {why}")
