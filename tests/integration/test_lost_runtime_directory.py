"""A daemon whose runtime directory is removed ends, and says why: no client would ever reach it again."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
SECONDS, PIPELINE = _RECOVERY["SECONDS"], _RECOVERY["PIPELINE"]
held_behind_a_snapshot, check_is_undisturbed = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "check_is_undisturbed")
)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=15)
def test_a_daemon_without_its_runtime_directory_ends_and_its_jobs_go_on_in_the_next(
    own_daemon: Callable[..., Any],
) -> None:
    # It went on unreachable, and a job that lost a worker then was planned for ever.
    daemon = own_daemon(drain_seconds=0.1)
    with held_behind_a_snapshot(daemon, PIPELINE) as (job, spec, gate):
        daemon.processes()
        worker = daemon.worker_pids(job)["cpu-1"]
        shutil.rmtree(daemon.runtime)
        daemon.seen[worker].kill()
        assert daemon.process.wait(SECONDS) == 1
        daemon.until_nothing_lives()
        gate.open()
    told = f"{daemon.socket}: the socket of this daemon (pid {daemon.process.pid}) is gone"
    assert daemon.log().count(told) == 2, "when it is found, and as the reason of the end"
    assert f"weft: {told}" in daemon.log()
    assert "Traceback" not in daemon.log()
    assert list(daemon.runtime.iterdir()) == []
    daemon.start()
    check_is_undisturbed(daemon, job, spec)
    assert "goes on from" in daemon.log_of(job), "what it had come to was in the memory of the directory's process"
