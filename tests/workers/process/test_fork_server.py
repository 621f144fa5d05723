"""The fork server's part where the machine has no more processes; what else it does is seen of real daemons."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, encode
from weft.workers.process.fork_server import ForkServer


def test_a_process_that_cannot_be_forked_has_ended_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server died of the OSError, and the daemon and all its jobs with it."""

    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    daemon, ours = socket.socketpair()
    child, theirs = socket.socketpair()
    with daemon, ours, child:
        with theirs:
            server = ForkServer(ours)
            message = {"fork": "cpu-0", "role": "worker", "config": {}, "job": ""}
            socket.send_fds(daemon, [encode(message)], [theirs.fileno()])
        try:
            assert server._receive()
        finally:
            for each in (server._changed, server._wakeup, server._selector):
                each.close()
        told = FrameReader(MAX_WORKER_FRAME_BYTES).feed(daemon.recv(1 << 16))
        assert told == [{"exited": "cpu-0", "pid": 0, "code": 1}]
        assert child.recv(1) == b"", "its socket is closed"
    assert capfd.readouterr().err == "cpu-0 cannot be forked: Resource temporarily unavailable\n"
