"""Rows that the tests have already, in the greater numbers of their mark `soak` or as they are: played by pytest."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deck import Row

ROOT = Path(__file__).resolve().parents[2]
TAIL_CHARS = 20_000  # of what pytest said, that a miss keeps
INTERRUPT_SECONDS = 60.0  # that a test's fixtures have to end what they have started


def play(files: Sequence[str], mark: str, each: int, seconds: float, stage: Any, chance: random.Random) -> Counter[str]:
    """each: faults that a test stands for. Errors: AssertionError with what pytest said."""
    with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", mark, *files]
        command += [f"--junitxml={report}", f"--pairs-seed={chance.getrandbits(31)}"]
        environment = os.environ | {"WEFT_TEST_SEED": str(chance.randrange(1, 1 << 32))}
        said, code = run(command, environment, seconds, stage)
        assert code == 0, f"{' '.join(command)} ended with {code}:\n{said[-TAIL_CHARS:]}"
        return Counter({"": each * num_passed(report)})


def run(command: Sequence[str], environment: dict[str, str], seconds: float, stage: Any) -> tuple[str, int]:
    """(what it said, its exit code). After so many seconds it ends as by Ctrl-C, so that its tests clean up."""
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
        ) as stage.process,
    ):
        process = stage.process
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = end(process)
        finally:
            stage.process = None
        said.seek(0)
        return said.read(), code


def end(process: subprocess.Popen[Any]) -> int:
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(INTERRUPT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def num_passed(report: Path) -> int:
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    return sum(
        int(suite.get("tests", 0)) - sum(int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped"))
        for suite in suites
    )


INTEGRATION = "tests/integration"
SOAK, USUAL = "soak", "not soak and not gpu"


def _row(
    name: str, what: str, *files: str, mark: str = USUAL, asked: int = 1, each: int = 1, takes: float = 240.0
) -> Row:
    """name: the promise's id, and after a hyphen which of several this is. asked: 1 stands for all that there are.
    takes: seconds, about; a tenth as fast is a miss.
    """
    unit = "all tests" if asked == 1 else ""
    where = ", ".join(f"`{file}`" for file in files)
    id_, _, variant = name.partition("-")
    return Row(
        id=id_,
        variant=variant,
        what=f"{what}: {where}" + (" -m soak" if mark == SOAK else ""),
        asked=asked,
        unit=unit,
        each=each,
        longest_seconds=takes,
        play=partial(play, files, mark, each, 10 * takes),
    )


ROWS: Sequence[Row] = (
    _row("F3-cancel", "a cancel, whatever is stopped", f"{INTEGRATION}/test_processes.py", mark=SOAK, takes=600.0),
    _row("F7", "memory that runs out", "tests/machine/test_oom_kills.py", "tests/workload/test_faults.py", takes=90.0),
    _row("F8-each", "each write fails", f"{INTEGRATION}/test_failing_disk.py", mark=SOAK, takes=900.0),
    _row("F8-full", "full and failing disks", f"{INTEGRATION}/test_full_disk.py", f"{INTEGRATION}/test_runs_disk.py"),
    _row("F9", "a kill at every step of a checkpoint's commit", "tests/machine/test_checkpoint_files.py", takes=60.0),
    _row(
        "F10",
        "shared memory that is too small, at the plan or later",
        "tests/scheduler/planning/test_planner.py::test_a_plan_that_shared_memory_cannot_hold_is_refused_with_the_sum",
        "tests/transport/memory/test_directory.py",
        takes=60.0,
    ),
    _row("F11", "a daemon that cannot start", f"{INTEGRATION}/test_daemon_start.py"),
    _row("F15", "a ledger that is lost or damaged", f"{INTEGRATION}/test_lost_ledger.py", "tests/scheduler/ledger"),
    _row("F16", "few descriptors", f"{INTEGRATION}/test_scarce_descriptors.py", mark=SOAK, takes=300.0),
    _row(
        "B1",
        "frames by chance",
        f"{INTEGRATION}/test_frames.py::test_frames_by_chance_are_answered_and_the_daemon_lives",
        mark=SOAK,
        asked=10_000_000,
        each=200_000,
        takes=300.0,
    ),
    _row("B1-workers", "messages of workers, any field any value", "tests/scheduler/daemon/test_hearing.py", mark=SOAK),
    _row(
        "B1-links",
        "what a job writes to its worker's link",
        f"{INTEGRATION}/test_hostile_worker.py",
        mark=SOAK,
        takes=600.0,
    ),
    _row(
        "B2", "frames and requests by hand, each cut", f"{INTEGRATION}/test_frames.py", f"{INTEGRATION}/test_clients.py"
    ),
    _row(
        "B4",
        "500 followers that never read",
        f"{INTEGRATION}/test_frames.py::test_500_clients_that_never_read_are_cut_and_leave_nothing",
        mark=SOAK,
    ),
    _row("B5", "clients and idle connections that hold descriptors", f"{INTEGRATION}/test_scarce_descriptors.py"),
    _row("B6", "mistaken specs and jobs", f"{INTEGRATION}/test_bad_input.py", f"{INTEGRATION}/test_bad_steps.py"),
    _row("B7", "a hostile run directory", f"{INTEGRATION}/test_hostile_run_directory.py"),
    _row("B8", "strangers at either end", f"{INTEGRATION}/test_peers.py", "tests/client/test_socket_trust.py"),
    _row("B9", "hostile checkpoints", "tests/workers/snapshots/test_checkpoint.py", takes=60.0),
)
