"""What the service manager hears, over real datagram sockets, and what of its variables reaches whom."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.scheduler.daemon import notify as notify_module
from weft.scheduler.daemon.notify import (
    ServiceManagerError,
    child_environment,
    listen_fds,
    notify,
    notify_ready,
    notify_stopping,
    notify_watchdog,
    watchdog_seconds,
)


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setblocking(False)
        yield receiver


@pytest.fixture(params=["path", "abstract"])
def environment(request: pytest.FixtureRequest, manager: socket.socket, tmp_path: Path) -> dict[str, str]:
    if request.param == "path":
        manager.bind(str(tmp_path / "notify"))
        return {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    manager.bind("")  # Linux picks an abstract name
    return {"NOTIFY_SOCKET": "@" + manager.getsockname()[1:].decode()}


def test_each_message_is_one_datagram_of_the_protocol(environment: dict[str, str], manager: socket.socket) -> None:
    assert notify_ready(environment)
    assert notify_watchdog(environment)
    assert notify_stopping(environment)
    assert notify(environment, READY="1", STATUS="serving")
    heard = [manager.recv(4096) for _ in range(4)]
    assert heard == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1", b"READY=1\nSTATUS=serving"]


def test_a_line_break_in_a_status_starts_no_new_field(environment: dict[str, str], manager: socket.socket) -> None:
    notify(environment, STATUS="running evil\nMAINPID=1\r\nSTOPPING=1")
    assert manager.recv(4096) == b"STATUS=running evil MAINPID=1 STOPPING=1"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_a_manager_nothing_is_sent(environment: dict[str, str]) -> None:
    assert not notify_ready(environment)


@pytest.mark.parametrize("address", ["relative/path", "vsock:2:1234", "@", "/"])
def test_an_address_that_is_no_unix_socket_is_refused(address: str) -> None:
    with pytest.raises(ServiceManagerError, match=r"NOTIFY_SOCKET: .* unset it"):
        notify_ready({"NOTIFY_SOCKET": address})


def test_a_manager_that_has_gone_costs_a_line_and_no_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not notify_ready({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert "the service manager does not take READY ([Errno 2] No such file or directory)" in caplog.text


def test_so_does_one_that_reads_no_more(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon's loop waits for it no longer than SEND_TIMEOUT_SECONDS; it ended by the TimeoutError."""
    monkeypatch.setattr(notify_module, "SEND_TIMEOUT_SECONDS", 0.01)
    while notify_watchdog(environment):  # until the kernel's queue is full
        pass
    assert "the service manager does not take WATCHDOG (timed out)" in caplog.text
    assert not notify_stopping(environment)


def test_the_watchdog_is_fed_twice_in_each_deadline() -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000"}, pid=7) == 15.0
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, pid=7) == 15.0


def test_the_watchdog_of_another_process_or_none_is_not_fed() -> None:
    assert watchdog_seconds({}, pid=7) is None
    assert watchdog_seconds({"WATCHDOG_USEC": ""}, pid=7) is None
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, pid=7) is None


@pytest.mark.parametrize("text", ["soon", "-1", "0", "1.5", "٣", " 3"])
def test_a_variable_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(ServiceManagerError, match=r"WATCHDOG_USEC: .* no positive whole number"):
        watchdog_seconds({"WATCHDOG_USEC": text}, pid=7)
    with pytest.raises(ServiceManagerError, match=r"LISTEN_FDS: .* no positive whole number"):
        listen_fds({"LISTEN_FDS": text, "LISTEN_PID": "7"}, pid=7)


@pytest.mark.parametrize(
    "environment", [{}, {"LISTEN_FDS": "1"}, {"LISTEN_PID": "7"}, {"LISTEN_FDS": "1", "LISTEN_PID": "8"}]
)
def test_sockets_that_are_not_for_this_process_are_not_taken(environment: dict[str, str]) -> None:
    assert listen_fds(environment, pid=7) == ()


def test_an_absurd_number_of_sockets_is_refused() -> None:
    with pytest.raises(ServiceManagerError, match="LISTEN_FDS: 4000000000 is more than 16"):
        listen_fds({"LISTEN_FDS": "4000000000", "LISTEN_PID": "7"}, pid=7)


INHERITOR = """
import json, os, sys
from weft.scheduler.daemon.notify import ServiceManagerError, listen_fds
os.closerange(3, 10)
reader, writer = os.pipe()
os.set_inheritable(reader, True)
fds = listen_fds({"LISTEN_FDS": "1", "LISTEN_PID": "7"}, 7)
try:
    listen_fds({"LISTEN_FDS": "3", "LISTEN_PID": "7"}, 7)
    error = ""
except ServiceManagerError as refused:
    error = str(refused)
json.dump({"reader": reader, "fds": fds, "inheritable": os.get_inheritable(3), "error": error}, sys.stdout)
"""


def test_inherited_sockets_begin_at_3_and_go_to_no_child() -> None:
    done = subprocess.run([sys.executable, "-c", INHERITOR], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "reader": 3,
        "fds": [3],
        "inheritable": False,
        "error": "LISTEN_FDS: descriptor 5 is not open; unset LISTEN_FDS",
    }


def test_children_get_everything_but_the_managers_variables() -> None:
    theirs = {"PATH": "/bin", "WEFT_JOB_ID": "digits-1", "LISTENER": "x", "WATCHDOGS": "3"}
    ours = {
        "NOTIFY_SOCKET": "/n",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "2",
        "LISTEN_FDS": "1",
        "LISTEN_PID": "2",
        "LISTEN_FDNAMES": "weft.socket",
    }
    environment = theirs | ours
    assert child_environment(environment) == theirs
    assert environment == theirs | ours
    assert child_environment(os.environ).keys() <= os.environ.keys()
