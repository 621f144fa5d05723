"""`weft daemon --replace`: the daemon that runs goes on as the Weft that this command is."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.client.client import Client


def replace_daemon(runtime_dir: Path | None) -> None:
    """Returns once the new daemon serves."""
    told = Client(None if runtime_dir is None else runtime_dir / "weft.sock").replace()
    jobs = told["jobs"]
    if told["problem"]:
        print(f"weft: the running jobs could not be handed over: {told['problem']}", file=sys.stderr)
        how = "starts from its newest checkpoint" if jobs == 1 else "start from their newest checkpoints"
    else:
        how = "went on"
    print(f"weft {told['version']} serves; {jobs or 'no'} job{'s' * (jobs != 1)} {how}")
