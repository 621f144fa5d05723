"""The fork server where the machine has no more processes, and where a job's code talks to it. The rest is seen of real
daemons."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, encode
from weft.workers.process.fork_server import ForkServer, _Child
from weft.workers.process.spare import make_channel


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


@pytest.mark.parametrize("said", [b"\xff" * 3000, b"", b"1 a@1", os.fsencode("a@1")])
def test_what_a_jobs_code_says_in_the_place_of_a_spare_is_no_spare(said: bytes) -> None:
    """It could name any process as the spare, which is ended where nobody wants it."""
    daemon, ours = socket.socketpair()
    channel, theirs = make_channel()
    with daemon, ours, channel, theirs:
        server = ForkServer(ours)
        worker = _Child("cpu-0", os.getpid(), {}, channel)
        server._adopt(worker)
        try:
            theirs.send(said)
            server._hear(worker)
            assert worker.spare == 0
            assert (worker.channel is None) == (said == b""), "which is as good as the end of it"
        finally:
            for each in (server._changed, server._wakeup, server._selector):
                each.close()
