"""The service manager's side of the daemon: readiness, watchdog and inherited sockets, as systemd defines them.

sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3) in a few lines each. Nothing here reads the process's own
environment: it is passed in, and everything is a no-op where the service manager set nothing.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

FIRST_LISTEN_FD = 3  # SD_LISTEN_FDS_START
MAX_LISTEN_FDS = 16  # we have one socket unit with one socket; more than a handful is a wrong number
SEND_TIMEOUT_SECONDS = 1.0  # the manager's queue holds few datagrams, and the daemon's loop must not hang on a full one
_PREFIXES = ("WATCHDOG_", "LISTEN_")

_log = logging.getLogger("weft.notify")


class ServiceManagerError(ValueError):
    """A variable that the service manager sets and that cannot be understood. The text names it and the remedy."""


def notify_ready(environment: Mapping[str, str]) -> bool:
    """The daemon answers on its socket: what `systemctl start` waits for."""
    return notify(environment, READY="1")


def notify_stopping(environment: Mapping[str, str]) -> bool:
    """The drain has begun."""
    return notify(environment, STOPPING="1")


def notify_watchdog(environment: Mapping[str, str]) -> bool:
    """The driver loop turns. Send it every `watchdog_seconds`."""
    return notify(environment, WATCHDOG="1")


def notify_extend(environment: Mapping[str, str], seconds: float) -> bool:
    """Stopping takes this much longer: at least so many seconds from now."""
    return notify(environment, EXTEND_TIMEOUT_USEC=str(round(seconds * 1e6)))


def notify(environment: Mapping[str, str], **fields: str) -> bool:
    """Sends fields to NOTIFY_SOCKET in one datagram; False, and nothing sent, where there is none.

    Line breaks in a value become spaces, so that no job's name can end a field. A manager that does not take the
    datagram within SEND_TIMEOUT_SECONDS costs a line in the log, and no job. Errors: ServiceManagerError, for an
    address that is no Unix socket.
    """
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address[0] not in "/@" or len(address) < 2:
        raise ServiceManagerError(f"NOTIFY_SOCKET: {address!r} is no absolute path and no @abstract name; unset it")
    if address[0] == "@":
        address = "\0" + address[1:]
    text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(SEND_TIMEOUT_SECONDS)
        try:
            sender.sendto(text.encode(), address)
        except OSError as error:
            _log.warning("NOTIFY_SOCKET: the service manager does not take %s (%s)", ", ".join(fields), error)
            return False
    return True


def watchdog_seconds(environment: Mapping[str, str], pid: int) -> float | None:
    """How often to send `notify_watchdog`: half of the manager's deadline. None if it expects none of process `pid`."""
    if not environment.get("WATCHDOG_USEC"):
        return None
    if environment.get("WATCHDOG_PID") and _number(environment, "WATCHDOG_PID") != pid:
        return None
    return _number(environment, "WATCHDOG_USEC") / 2 / 1e6


def listen_fds(environment: Mapping[str, str], pid: int) -> tuple[int, ...]:
    """The listening sockets that process `pid` inherited, each now closed on exec; empty without socket activation."""
    if not environment.get("LISTEN_FDS") or not environment.get("LISTEN_PID"):
        return ()
    if _number(environment, "LISTEN_PID") != pid:
        return ()
    num_fds = _number(environment, "LISTEN_FDS")
    if num_fds > MAX_LISTEN_FDS:
        raise ServiceManagerError(f"LISTEN_FDS: {num_fds} is more than {MAX_LISTEN_FDS}; list one socket in the unit")
    fds = tuple(range(FIRST_LISTEN_FD, FIRST_LISTEN_FD + num_fds))
    for fd in fds:
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            raise ServiceManagerError(f"LISTEN_FDS: descriptor {fd} is not open; unset LISTEN_FDS") from error
    return fds


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy for children, without what is meant for the daemon alone."""
    return {
        name: value for name, value in environment.items() if name != "NOTIFY_SOCKET" and not name.startswith(_PREFIXES)
    }


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise ServiceManagerError(f"{name}: {text!r} is no positive whole number; unset it")
    return int(text)
