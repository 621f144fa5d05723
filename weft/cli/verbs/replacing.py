"""`weft daemon --replace`: the daemon that runs goes on as the Weft that this command is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from weft.cli.exits import USAGE, leave
from weft.client.client import Client


def replace_daemon(flags: Mapping[str, object]) -> None:
    """Returns once the new daemon serves. flags: by the names of the settings; None for those that are not given."""
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
    if others := [flag for flag in given if flag != "--runtime-dir"]:
        leave(USAGE, f"--replace keeps the settings of the daemon that runs; leave {others[0]} out, or restart it")
    runtime_dir = flags["runtime_dir"]
    told = Client(Path(str(runtime_dir), "weft.sock") if runtime_dir is not None else None).replace()
    jobs = told["jobs"]
    if told["problem"]:
        print(f"weft: the running jobs could not be handed over: {told['problem']}", file=sys.stderr)
        how = "starts from its newest checkpoint" if jobs == 1 else "start from their newest checkpoints"
    else:
        how = "went on"
    print(f"weft {told['version']} serves" + (f"; {jobs} job{'s' * (jobs != 1)} {how}" if jobs else ""))
