"""`python -m weft.workers FD PARENT`: how the daemon starts the fork server. FD: of its socket. PARENT: its own pid.

The tether comes first. What is imported then takes seconds, or minutes on a machine that swaps, and nobody reads the
daemon's socket meanwhile: a server whose daemon was killed went on for as long.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from weft.machine.tether import tie_to


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to handle
    tie_to(int(sys.argv[2]))
    os.chdir("/")  # as its children outside of jobs: torch cannot be loaded in a directory that is removed meanwhile
    gc.disable()  # until there are children: collecting what is imported takes a fifth of the time, and finds nothing
    from weft.workers.process.fork_server import serve

    serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
