"""What is amiss with the daemon's directories, lock and socket, from their facts. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from weft.cli.doctor.daemon_facts import StorageFacts
from weft.cli.doctor.facts import Facts
from weft.cli.doctor.finding import Finding, mebibytes, note, ok, problem
from weft.cli.screens.ledger_trouble import ledger_trouble
from weft.transport.wire.runtime_directory import LOCK_NAME, MAX_PATH_BYTES

LEAST_DISK_BYTES = 1 << 30  # a recording and a log for each job, and models; arbitrary
_OTHER_DIRECTORY = "Give another runtime_dir (WEFT_RUNTIME_DIR, or weft.toml)."


def check_runtime_directory(facts: Facts) -> Iterable[Finding]:
    check, directory = "runtime-directory", facts.daemon.runtime_dir
    path, num_bytes = directory.path, len(os.fsencode(directory.path))
    if num_bytes > MAX_PATH_BYTES:
        yield problem(
            check,
            f"{path} has {num_bytes} bytes, and sockets in it can have paths below {MAX_PATH_BYTES}.",
            _OTHER_DIRECTORY,
        )
    elif directory.kind == "absent":
        yield _absent(check, Path(path))
    elif directory.kind != "directory":
        what = "a symbolic link" if directory.kind == "link" else "no directory"
        yield problem(check, f"{path} is {what}: the daemon does not start.", f"Remove it. Or: {_OTHER_DIRECTORY}")
    elif directory.owner != os.geteuid():
        yield problem(
            check,
            f"{path} belongs to uid {directory.owner}, not to {os.geteuid()}: the daemon does not start there.",
            _OTHER_DIRECTORY,
        )
    elif (directory.mode or 0) & 0o077:
        yield _open_to_others(facts)
    else:
        yield ok(check, f"{path} is ours alone.")


def _absent(check: str, path: Path) -> Finding:
    there = next(above for above in path.parents if above.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ok(check, f"{path} will be made when the daemon starts.")
    return problem(check, f"{path} cannot be made: {there} does not let us write.", _OTHER_DIRECTORY)


def _open_to_others(facts: Facts) -> Finding:
    directory = facts.daemon.runtime_dir
    sentence = f"{directory.path} has mode {directory.mode:04o}: other users reach into it"
    if directory.others == () and not directory.sticky:
        return note(
            "runtime-directory",
            f"{sentence}, until the daemon starts and makes it 0700.",
            f"chmod 700 {directory.path}",
        )
    remedy = f"chmod 700 {directory.path}, if it is Weft's alone. Or: {_OTHER_DIRECTORY}"
    return problem("runtime-directory", f"{sentence}, and the daemon does not start in it.", remedy)


def check_socket(facts: Facts) -> Iterable[Finding]:
    daemon = facts.daemon
    path = f"{daemon.runtime_dir.path}/weft.sock"
    match daemon.socket:
        case "answers":
            status = daemon.status or {}
            yield ok("daemon", f"weft {status.get('version')} answers, pid {status.get('pid')}.")
            down = [worker["worker"] for worker in status.get("workers", ()) if worker["state"] == "down"]
            if down:
                yield note(
                    "daemon",
                    f"{', '.join(down)} down or still starting: jobs wait for them.",
                    "Look again in some seconds; then at workers.log in the state directory.",
                )
        case "absent" if daemon.lock_held:
            yield problem(
                "daemon",
                f"Process {daemon.lock_pid} holds {LOCK_NAME}, and there is no {path}: nobody reaches it.",
                f"If it is not just starting: kill {daemon.lock_pid}, and start the daemon again.",
            )
        case "absent":
            yield ok("daemon", "None runs. `weft run` needs none; `weft daemon` starts one.")
        case "stale":
            yield note(
                "daemon",
                f"{path} was left by a daemon that was killed: nobody listens.",
                "Start the daemon: it takes the socket over.",
            )
        case "file":
            yield problem("daemon", f"{path} is no socket: the daemon does not start.", "Move it away.")
        case "silent":
            holder = f"process {daemon.lock_pid}" if daemon.lock_held else "whoever listens there"
            yield problem("daemon", f"{daemon.why}.", f"Stop {holder}, and start the daemon again.")


def check_lock(facts: Facts) -> Iterable[Finding]:
    daemon = facts.daemon
    if daemon.lock_pid is None or daemon.lock_held or daemon.socket == "answers":
        return
    yield note(
        "lock",
        f"{daemon.runtime_dir.path}/{LOCK_NAME} names process {daemon.lock_pid}, which does not hold it: left by a "
        "daemon that was killed.",
        "Nothing has to be done: the next daemon takes it over.",
    )


def check_ledger(facts: Facts) -> Iterable[Finding]:
    status = facts.daemon.status
    if status is None:
        return
    lines = ledger_trouble(status.get("ledger"))
    for line in lines:
        yield problem("ledger", f"{line[0].upper()}{line[1:]}.", "Make room in the state directory; see its log.")
    if not lines:
        yield ok("ledger", "It takes what is written.")


def check_storage(facts: Facts) -> Iterable[Finding]:
    yield from _storage("state-directory", facts.daemon.state_dir, "state_dir (WEFT_STATE_DIR)")
    yield from _storage("runs-directory", facts.daemon.runs_dir, "runs_dir (WEFT_RUNS_DIR)")


def _storage(check: str, storage: StorageFacts, setting: str) -> Iterable[Finding]:
    if not storage.writable:
        what = "cannot be written to" if storage.exists else "cannot be made"
        yield problem(
            check, f"{storage.path} {what}: the daemon does not start, or jobs fail.", f"Give another {setting}."
        )
    elif storage.free_bytes < LEAST_DISK_BYTES:
        yield problem(
            check,
            f"{storage.path} is on a disk with {mebibytes(storage.free_bytes)} free: submits are refused and models "
            "are not saved once it is full.",
            f"Make room, or give another {setting}.",
        )
    else:
        yield ok(check, f"{storage.path}: {mebibytes(storage.free_bytes)} free.")


DAEMON_CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    check_runtime_directory,
    check_socket,
    check_lock,
    check_ledger,
    check_storage,
)
