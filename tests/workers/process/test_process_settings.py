"""What a job sets for its whole worker process is not the next job's: it is put back, or the worker is replaced.

A job that had lowered the limit of open files, or set a timer, passed itself; those after it failed in its workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from weft.workers.process.process_settings import ProcessSettings

NEVER_PUT_BACK = {
    "a limit": "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "the mask of new files": "os.umask(0o777)",
    "a signal that is ignored": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "a stream that is closed": "os.close(1)",
    "a stream that is another": "os.dup2(os.open('/', os.O_PATH), 0)",
    "many descriptors": "[os.open('/', os.O_PATH) for _ in range(100)]",
    "a handler": "signal.signal(signal.SIGINT, lambda *about: None)",
    "a signal that is blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
    "a timer": "signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.setitimer(signal.ITIMER_REAL, 1000.0)",
    "niceness": "os.nice(1)",
    "a process group": "os.setsid()",
    "a hook": "sys.excepthook = print",
    "a tracer": "sys.setprofile(lambda *about: None)",
    "the collector": "gc.disable()",
    "the recursion limit": "sys.setrecursionlimit(2000)",
    "the time of sockets": "socket.setdefaulttimeout(1.0)",
    "errors of numpy": "np.seterr(all='raise')",
    "torch's device": "torch.set_default_device('meta')",
    "no gradients": "torch.set_grad_enabled(False)",
    "kernels": "torch.backends.mkldnn.set_flags(False)",
    "anomalies": "torch.autograd.set_detect_anomaly(True)",
    "small numbers": "torch.set_flush_denormal(True) or os._exit(3)",
    "torch's device, the one that is": "torch.set_default_device('cpu')",
    "a mode": "type('Mode', (torch.overrides.TorchFunctionMode,), {})().__enter__()",
    "a mode of kernels": "type('Mode', (TorchDispatchMode,), {})().__enter__()",
    "hooks of what is saved": "torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__()",
    "a kernel of torch's": "global own; own = torch.library.Library('aten', 'IMPL'); own.impl('relu', abs, 'CPU')",
    "a module that is gone": "del sys.modules['json']",
    "a module that is another": "del sys.modules['json']; import json",
    "a module beside the job's directory": "sys.path.insert(0, sys.argv[2]); import beside_the_job",
}
STAYS = {
    "nothing": "",
    "a few descriptors": "[os.open('/', os.O_PATH) for _ in range(9)]",
    "its own operator": "torch.library.custom_op('its::own', abs, mutates_args=(), schema='(Tensor x) -> Tensor')",
}
# Each in a child of its own; of those that come back as clean the name is printed.
TRIES = """
import gc, json, os, resource, signal, socket, sys
import numpy as np, torch
from torch.utils._python_dispatch import TorchDispatchMode
from weft.workers.process.footprint import Footprint
from weft.workload.code import torchs_own
statements, clean = json.loads(sys.argv[1]), []
torchs_own.note()
before = Footprint.now({})
for name, statement in statements.items():
    if (child := os.fork()) == 0:
        exec(statement)
        os._exit(not before.is_clean())
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        clean.append(name)
print(json.dumps(clean))
"""
NONE_LEFT = """
import os
from weft.workers.process.footprint import Footprint, peak_resident_bytes
before = Footprint.now({})
try:
    while True:
        os.dup(0)
except OSError:
    print(before.is_clean(), peak_resident_bytes())
"""


def test_the_environment_and_the_path_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("WEFT_TEST_KEPT", "1")
    before, path = ProcessSettings.now(), list(sys.path)
    monkeypatch.setenv("WEFT_TEST_NEW", "1")
    monkeypatch.delenv("WEFT_TEST_KEPT")
    of_installed = str(Path(pytest.__file__).parent / "vendored")
    sys.path[:0] = ["/the/jobs/own", of_installed]
    assert before.restore()
    assert (os.environ.get("WEFT_TEST_NEW"), os.environ["WEFT_TEST_KEPT"]) == (None, "1")
    assert sys.path == [*path, of_installed]


def test_which_warnings_are_shown_is_put_back_and_those_shown_before_are_shown_again() -> None:
    def warn() -> None:
        warnings.warn("of a job", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")  # once for each place
        before = ProcessSettings.now()
        warn()
        warnings.simplefilter("error")
        assert before.restore()
        warn()
        assert (warnings.filters, len(shown)) == (list(before.filters), 2)


@pytest.mark.slow(seconds=4)
def test_a_worker_is_clean_unless_something_stays_that_cannot_be_put_back(tmp_path: Path) -> None:
    (tmp_path / "beside_the_job.py").touch()
    command = [sys.executable, "-c", TRIES, json.dumps(STAYS | NEVER_PUT_BACK), str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == list(STAYS)


@pytest.mark.slow(seconds=3)
def test_a_worker_in_which_nothing_can_be_opened_is_not_clean_and_says_so() -> None:
    # It raised, which ended the worker; the job was said to have lost it.
    command = [sys.executable, "-c", NONE_LEFT]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False None\n"
