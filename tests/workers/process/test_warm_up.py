"""The first step of all workers: made once, by the fork server, whose children are whole all the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SERVER = """
import os, sys, torch
from weft.workers.devices.host import HostDevice
from weft.workers.process.warm_up import warm_up, warm_up_server

threads = lambda: len(os.listdir("/proc/self/task"))
warm_up_server()
assert threads() == 1, threads()
if os.fork() == 0:
    warm_up(HostDevice())
    torch.set_num_threads(2)
    weight = torch.randn(600, 600, requires_grad=True)
    (torch.randn(600, 600) @ weight).sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    assert threads() > 1, threads()
    print("trained", flush=True)
    os._exit(0)
assert os.wait()[1] == 0
"""


@pytest.mark.slow(seconds=4)
def test_a_server_that_has_made_a_step_has_one_thread_and_its_children_train_with_several() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as the daemon has it: numpy makes its threads on import
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
