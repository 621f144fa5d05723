"""Runs a real Prometheus against the daemon that is running, until Ctrl-C: `make observability`.

It scrapes what `weft status` says, with the rules and alerts that are shipped, and keeps its data in a temporary
directory that goes when it ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_server import PrometheusError, PrometheusServer, tool

PORT = 9090


def metrics_address() -> str:
    """HOST:PORT of the running daemon's metrics. Errors: PrometheusError."""
    command = [sys.executable, "-m", "weft", "status", "--json"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise PrometheusError(f"no daemon to look at: {asked.stderr.strip()}")
    url = json.loads(asked.stdout)["metrics"]
    if url is None:
        raise PrometheusError("the daemon exports no metrics; start it with --metrics 127.0.0.1:9464")
    return urlsplit(str(url)).netloc


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=PORT, help=f"of Prometheus, on 127.0.0.1; default {PORT}, 0: any")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Prometheus must not outlive this
    try:
        tool("promtool")
        target = metrics_address()
        with (
            tempfile.TemporaryDirectory(prefix="weft-prometheus-") as home,
            PrometheusServer(Path(home), target, port=arguments.port) as server,
        ):
            print(f"Prometheus at {server.url} scrapes {target}; Ctrl-C ends it", flush=True)
            raise PrometheusError(f"prometheus has ended with exit code {server.wait()}")
    except KeyboardInterrupt:
        return 0
    except PrometheusError as error:
        print(f"observability: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
