"""What /proc tells of a process: that it works, that it does not, that it has ended."""

from __future__ import annotations

import os
import subprocess
import sys

from weft.machine.proc import state_of, used_by


def test_one_that_works_has_used_something_since_and_one_that_waits_has_not() -> None:
    source = "import sys\nfor line in sys.stdin:\n    print(len(line), flush=True)"
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        used = []
        for _ in range(2):
            process.stdin.write(b"x" * 100 + b"\n")
            process.stdin.flush()
            process.stdout.readline()
            used.append(used_by(process.pid))
        assert used[0] != used[1]
        assert all(used[0])
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert state_of(process.pid) == "Z"
    assert (state_of(process.pid), used_by(process.pid)) == ("", ("",))
