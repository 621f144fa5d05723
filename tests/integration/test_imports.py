"""The daemon and its clients never map torch: they start in a fraction of a second and no user code can harm them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon = _REAL["RealDaemon"]

VERB = """
import sys
from weft.cli.main import main
try: main()
except SystemExit: pass
print(*sys.modules, file=sys.stderr)
"""


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
def test_the_daemon_maps_no_torch_although_its_workers_do(daemon: RealDaemon) -> None:
    assert daemon.run(daemon.spec())["state"] == "completed"
    assert not maps_torch(daemon.process.pid)
    assert all(map(maps_torch, daemon.worker_pids().values()))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["submit", "ps", "show", "logs", "wait", "cancel", "status", "top"])
def test_no_verb_that_asks_the_daemon_imports_torch(daemon: RealDaemon, verb: str) -> None:
    spec = daemon.spec()
    job = daemon.run(spec)["job"] if verb in ("show", "logs", "wait", "cancel") else None
    arguments = {"submit": ["-f", str(daemon.spec_file(spec))], "ps": [], "status": [], "top": []}.get(verb, [job])
    done = subprocess.run(
        [sys.executable, "-c", VERB, verb, *arguments],
        env=daemon.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(done.stderr.splitlines()[-1].split())
    assert "weft.client.client" in modules
    assert not {module for module in modules if module.partition(".")[0] == "torch"}
