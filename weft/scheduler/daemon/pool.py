"""The pool: the fork server, the directory and the workers as the daemon sees them; their sockets, starts and ends.

Decides nothing: the driver says which worker to start or kill, and hears here that one has joined, said something or is
lost. Each worker's end is reported once, when the fork server has reaped it and its socket has been read to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from weft.machine.cgroups import read_cgroup_limits
from weft.machine.crew import Crew
from weft.machine.oom_kills import OomKills, told_shortage
from weft.machine.proc import STOPPED, TRACED, state_of, used_by
from weft.scheduler.core.back_off import back_off
from weft.scheduler.daemon.fork_server import PoolError, start_fork_server
from weft.scheduler.daemon.link import DIRECTORY, SAVER, WORKER, Brood, Child, HeldLink, Link, saver_of, socket_pair
from weft.scheduler.daemon.replacing.shape import stamp
from weft.spec.settings import Settings
from weft.transport.wire.frames import Message, encode

# A sleep ends 50 µs late and costs the waker 10; the core is the lane's own, and Board notices when it is not.
SPIN_SECONDS = 4e-3
STOPPED_LOOKS = 10  # a second apart, at what is no worker and stopped, before it is told to go on; arbitrary
# Looks at one that owes an answer and in which nothing goes on; arbitrary, and far above what a busy disk takes.
HUNG_LOOKS = {DIRECTORY: 60, SAVER: 600}
MAX_LOOKS = 10  # a second apart, at a link on which nothing goes on: a frame of 64 MiB takes one on a busy machine

_log = logging.getLogger("weft.pool")


class Pool:
    """on_message(worker, message), on_lost(worker, exit_code, shortage) and the others are called from the event loop,
    and raise nothing. on_garbled(worker, problem): its link is of no use any more. on_stop(worker, what, at): its
    process was stopped, or goes on. shortage: what is known where the kernel has killed it for lack of memory, or
    empty."""

    def __init__(
        self,
        settings: Settings,
        crew: Crew,
        environment: Mapping[str, str],
        on_message: Callable[[str, Message], None],
        on_garbled: Callable[[str, str], None],
        on_stop: Callable[[str, str, int], None],
        on_lost: Callable[[str, int | None, str], None],
        on_saved: Callable[[str, Message], None],
        on_directory_lost: Callable[[], None],
        on_server_lost: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._environment = dict(environment)
        self._on_message = on_message
        self._on_garbled = on_garbled
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._on_saved = on_saved
        self._on_directory_lost = on_directory_lost
        self._on_server_lost = on_server_lost
        self._authkey = secrets.token_bytes(32)
        self._children: dict[str, Child] = {}
        self._process: psutil.Process | None = None
        self._socket: socket.socket | None = None
        self._own_stamp = self._stamp = stamp()  # of this Weft, and of that which the fork server is of
        self._renewing = asyncio.Lock()  # held while there is none
        self._server: Link | None = None
        self._closing = False
        self._server_stopped = 0  # looks in a row that found it so
        self._crew = crew
        self._directory_failures = 0
        self._oom_kills = OomKills()

    @property
    def directory_address(self) -> Path:
        return self._settings.runtime_dir / "directory.sock"

    def has(self, name: str) -> bool:
        return name in self._children

    def pid(self, worker: str) -> int | None:
        child = self._children.get(worker)
        return child.pid if child else None

    async def start(self, log: Path) -> None:
        """Starts the fork server; returns at once, what is asked of it waits. Errors: PoolError."""
        await self._start_server(log)
        await self.start_directory()

    async def _start_server(self, log: Path) -> None:
        try:
            self._socket, theirs = socket.socketpair()
        except OSError as error:
            raise PoolError(f"the fork server cannot be started: {error}") from error
        self._stamp = self._own_stamp
        environment = self._environment | {"OMP_NUM_THREADS": str(self._settings.threads)}
        with theirs:
            self._process = start_fork_server(theirs, environment, log)
        await self._hear_server(self._socket)

    async def _hear_server(self, ours: socket.socket, held: HeldLink | None = None) -> None:
        loop, connection = asyncio.get_running_loop(), ours.dup()
        _, self._server = await loop.create_connection(
            lambda: Link(connection, self._server_said, lambda: self._server_closed(ours), self._server_broken, held),
            sock=connection,
        )

    # --- from one daemon to the next

    def hold(self) -> None:
        """Nothing more is heard, until `resume`. What is said waits in the sockets."""
        for link in self._links():
            link.hold()

    def resume(self) -> None:
        for link in self._links():
            link.resume()

    def _links(self) -> list[Link]:
        links = (*(child.link for child in self._children.values()), self._server)  # of an end it tells, and last
        return [link for link in links if link is not None]

    def brood(self) -> Brood | None:
        """All that it has, but for children that were not asked for yet; None where the fork server is gone."""
        server = None if self._server is None else self._server.held()
        if server is None or self._process is None or self._closing:
            return None
        return Brood(
            stamp=self._stamp,
            authkey=self._authkey,
            server_pid=self._process.pid,
            server=server,
            children=tuple(
                (replace(child, link=None), child.link.held())
                for child in self._children.values()
                if child.link is not None
            ),
            directory_failures=self._directory_failures,
            oom_kills=self._oom_kills,
        )

    async def take_over(self, brood: Brood) -> None:
        """What another pool had, in this process; nothing is heard before `resume`."""
        self._stamp, self._authkey, self._oom_kills = brood.stamp, brood.authkey, brood.oom_kills
        self._directory_failures = brood.directory_failures
        self._process, loop = psutil.Process(brood.server_pid), asyncio.get_running_loop()
        self._socket = socket.socket(fileno=brood.server.descriptor)
        self._children = {child.name: child for child, _ in brood.children}
        await self._hear_server(self._socket, brood.server)
        for child, held in brood.children:
            if held is not None:
                ours = socket.socket(fileno=held.descriptor)
                _, child.link = await loop.create_connection(partial(self._link, child, ours, held), sock=ours)

    @property
    def is_of_another_weft(self) -> bool:
        return self._stamp != self._own_stamp and not self._renewing.locked()

    async def renew(self, log: Path) -> None:
        """A fork server of this Weft in the place of the one before, whose children have nothing to do and end with it.
        Workers are to be started again. Errors: PoolError."""
        async with self._renewing:
            await self._end_server()
            await self._start_server(log)
        await self.start_directory()

    async def start_directory(self) -> None:
        """At once, unless it keeps failing of itself."""
        await asyncio.sleep(back_off(self._directory_failures))
        config = {"address": str(self.directory_address), "authkey": self._authkey}
        await self._fork(DIRECTORY, DIRECTORY, config)

    async def start_worker(self, worker: str, job: str) -> None:
        """job: that goes on with it in the place of one that was lost, by its blocks' name; or empty."""
        member = self._crew[worker]
        loads = member.kind == "loader"
        await self._fork(
            worker,
            WORKER,
            {
                "worker": worker,
                "lane": member.lane,
                "device": member.device,
                "threads": 1 if loads else self._settings.threads,
                "unlike": self._crew.is_unlike and member.kind == "gpu",
                "cores": list(member.cores),
                "spin_seconds": SPIN_SECONDS if self._crew.is_pinned and not loads else 0.0,
                "stamps": self._settings.accounting,
                "directory": str(self.directory_address),
                "authkey": self._authkey,
                **self._settings.caches,
            },
            job,
        )

    async def start_saver(self, job: str, config: Mapping[str, Any]) -> None:
        """Its answer comes to on_saved(job, answer), with an error where it has ended without one."""
        config = {"directory": str(self.directory_address), "authkey": self._authkey, **config}
        await self._fork(saver_of(job), SAVER, config)

    def send(self, worker: str, message: Message) -> None:
        child = self._children.get(worker)
        if child is not None:
            child.stands_in_for = ""
            if child.link is not None:
                child.link.send(message)

    def drop(self, blocks: str) -> None:
        """By name, of a job that is over, or goes on with others: the directory has them, and workers that were started
        for it and have been told nothing since may have."""
        self.send(DIRECTORY, {"arenas": blocks})
        for child in self._children.values():
            if child.stands_in_for == blocks:
                self.send(child.name, {"type": "forget"})

    def kill(self, worker: str, cause: str) -> None:
        child = self._children.get(worker)
        if child is not None and child.pid and not child.exited and not self._closing:
            _log.info("%s (pid %d) is killed: %s", worker, child.pid, cause)
            child.killed_for = cause
            if child.link is not None:
                child.link.deafen()
            with contextlib.suppress(ProcessLookupError):  # reaped this moment, and the server's word is on its way
                os.kill(child.pid, signal.SIGKILL)

    def look(self) -> None:
        """Once a second: a child whose frame does not end, or whose link is gone while it lives, will never be heard of
        again. Looks are counted, not seconds: a daemon that comes late has not looked."""
        self._oom_kills.look(time.monotonic())
        self._rouse_server()
        for child in list(self._children.values()):
            if child.role != WORKER and child.pid and not child.exited:  # of workers jobs have what tells of hangs
                self._rouse(child)
                self._watch(child)
            if child.exited or child.is_stopped or (child.link is None and not child.closed):
                continue
            is_gone = child.link is None or child.closed or child.link.is_stuck()
            child.num_looks = child.num_looks + 1 if is_gone else 0
            if child.num_looks == MAX_LOOKS:
                self._broken(child, "the end of its link" if child.closed else "a frame without an end")

    def _rouse(self, child: Child) -> None:
        """What all jobs have come to is in the directory's memory: one that somebody has stopped is told to go on, and
        killed only where it does not. So is a saver: a checkpoint waits for it."""
        child.num_stopped = child.num_stopped + 1 if child.is_stopped else 0
        if child.num_stopped == STOPPED_LOOKS:
            _tell_to_go_on(f"the {child.name}", child.pid)
        elif child.num_stopped == 2 * STOPPED_LOOKS:
            self.kill(child.name, "it is stopped, and does not go on when it is told to")

    def _rouse_server(self) -> None:
        """As the others. Who kills it ends the daemon."""
        pid = 0 if self._process is None or self._closing else self._process.pid
        self._server_stopped = self._server_stopped + 1 if pid and state_of(pid) == STOPPED else 0
        if self._server_stopped and self._server_stopped % STOPPED_LOOKS == 0:
            _tell_to_go_on("the fork server", pid)

    def _watch(self, child: Child) -> None:
        """One that hangs, in whatever it is, is killed: another directory is started, another checkpoint written."""
        before, child.used = child.used, used_by(child.pid)
        is_quiet = child.owes and child.used == before and not child.is_stopped and state_of(child.pid) != TRACED
        child.num_quiet = child.num_quiet + 1 if is_quiet else 0
        if child.num_quiet == HUNG_LOOKS[child.role]:
            self.kill(child.name, f"nothing has gone on in it for {child.num_quiet} s")
        elif child.role == DIRECTORY and not child.owes:
            child.owes = True
            self.send(DIRECTORY, {"arenas": None})

    async def stop(self) -> None:
        """Ends every child and the fork server, and waits until they are gone."""
        self._closing = True
        await self._end_server()

    async def _end_server(self) -> None:
        links, ours, process = self._links(), self._socket, self._process
        self._children, self._server, self._socket, self._process = {}, None, None, None
        for link in links:
            link.close()
        if ours is not None:
            ours.close()
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, 5.0)
            except psutil.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)

    async def _fork(self, name: str, role: str, config: dict[str, Any], job: str = "") -> None:
        async with self._renewing:
            pass
        assert self._socket is not None
        child = Child(name, role, owes=role == SAVER, stands_in_for=job)
        self._children[name] = child
        ours, theirs = await socket_pair(name)
        with theirs:
            loop = asyncio.get_running_loop()
            _, child.link = await loop.create_connection(lambda: self._link(child, ours), sock=ours)
            try:
                request = {"fork": name, "role": role, "config": config, "job": child.stands_in_for}
                socket.send_fds(self._socket, [encode(request)], [theirs.fileno()])
            except OSError:  # the server is gone, which is reported once, by its own link
                child.link.close()

    def _server_said(self, message: Message) -> None:
        what = next(key for key in ("forked", "exited", "stopped", "continued") if key in message)
        child = self._children.get(message[what])
        if child is None or (child.pid and child.pid != message["pid"]):
            return
        child.pid = message["pid"]
        child.is_stopped = what == "stopped"
        if what == "exited":
            child.exited, child.exit_code, child.peak_bytes = True, message["code"], message.get("peak_bytes")
            if child.link is not None:
                child.link.finish()
            self._ended(child)
        elif what != "forked" and child.role == WORKER:
            self._on_stop(child.name, what, message["at"])

    def _server_broken(self, problem: str) -> None:
        """It runs nobody's code: a bug of ours, and what it said of its children is lost."""
        _log.error("the fork server sent %s", problem)
        assert self._server is not None
        self._server.abort()

    def _server_closed(self, ours: socket.socket) -> None:
        """The fork server is gone and the kernel has killed its children: nothing can run any more."""
        if not self._closing and ours is self._socket:
            self._closing = True
            self._on_server_lost()

    def _link(self, child: Child, connection: socket.socket, held: HeldLink | None = None) -> Link:
        return Link(
            connection,
            lambda message: self._child_said(child, message),
            lambda: self._child_closed(child),
            lambda problem: self._broken(child, problem),
            held,
        )

    def _broken(self, child: Child, problem: str) -> None:
        if child.role == DIRECTORY:  # a new one is started once it is gone
            self.kill(DIRECTORY, f"it sent what no directory sends: {problem}")
        elif child.role == SAVER:
            self.kill(child.name, f"it sent what no saver sends: {problem}")
        else:
            self._on_garbled(child.name, problem)

    def _child_said(self, child: Child, message: Message) -> None:
        child.owes = False
        if child.role == WORKER:
            self._on_message(child.name, message)
        elif child.role == SAVER:
            child.answer = message
        elif message.get("type") == "there":  # it serves: whatever ends it now, its start has not failed
            self._directory_failures = 0

    def _child_closed(self, child: Child) -> None:
        child.closed = True
        self._ended(child)

    def _ended(self, child: Child) -> None:
        if child.exited and child.closed and self._children.get(child.name) is child and not self._closing:
            del self._children[child.name]
            shortage = self._shortage(child)
            if child.role == DIRECTORY:
                self._directory_failures += child.exit_code != -signal.SIGKILL  # from outside: nothing of its own
                self._on_directory_lost()
            elif child.role == SAVER:
                killed = f"was killed: {child.killed_for}" if child.killed_for else ""
                ended = shortage or killed or f"ended with exit code {child.exit_code}"
                gone = {"error": f"the process that wrote it {ended}"}
                self._on_saved(child.name.removeprefix(f"{SAVER} of "), child.answer or gone)
            else:
                self._on_lost(child.name, child.exit_code, shortage)

    def _shortage(self, child: Child) -> str:
        if child.exit_code != -signal.SIGKILL or child.killed_for or not self._oom_kills.claim(time.monotonic()):
            return ""
        shortage = told_shortage(child.peak_bytes, read_cgroup_limits(), psutil.virtual_memory().total)
        _log.warning("%s %s", child.name, shortage)
        return shortage


def _tell_to_go_on(whom: str, pid: int) -> None:
    _log.warning("%s (pid %d) has been stopped, and is told to go on", whom, pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
