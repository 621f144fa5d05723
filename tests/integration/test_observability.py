"""Prometheus itself scrapes a real run, and every panel of every board has something to show."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]

FOLDER = Path(__file__).resolve().parents[2] / "observability"
CHECK_SECONDS = 260
needs_prometheus = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("prometheus", "promtool")), reason="prometheus is not installed"
)


@pytest.mark.days(3)
@needs_prometheus
@pytest.mark.slow(seconds=35)
@pytest.mark.timeout(280)  # 45 s on a quiet machine
def test_every_panel_has_data_and_promtool_finds_no_fault_in_a_real_run() -> None:
    command = [sys.executable, str(FOLDER / "check.py"), "--seconds", "15"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"4 boards, \d+ panels, \d+ queries, all with data", done.stdout)


@pytest.mark.days(3)
@needs_prometheus
@pytest.mark.slow(seconds=5)
def test_prometheus_is_served_beside_a_running_daemon_until_it_is_interrupted(
    own_daemon: Callable[..., RealDaemon],
) -> None:
    daemon = own_daemon()
    command = [sys.executable, str(FOLDER / "serve.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=daemon.environment) as serving:
        try:
            assert serving.stdout is not None
            said = serving.stdout.readline()
            found = re.match(r"Prometheus at (http://\S+) scrapes (\S+);", said)
            assert found is not None, said
            assert daemon.client.status()["metrics"] == f"http://{found[2]}"
            with urllib.request.urlopen(f"{found[1]}/api/v1/rules", timeout=180.0) as answer:
                assert b"WeftJobStalls" in answer.read()
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.wait(180) == 0


@needs_prometheus
def test_without_a_daemon_it_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"WEFT_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "serve.py")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("observability: no daemon to look at: ")


def test_without_prometheus_it_names_the_package(tmp_path: Path) -> None:
    for script in ("serve.py", "check.py"):
        done = subprocess.run(
            [sys.executable, str(FOLDER / script)],
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": str(tmp_path)},
            check=False,
        )
        assert done.returncode == 1
        assert "is not installed; Debian has it: apt-get install prometheus" in done.stderr
