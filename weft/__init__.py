"""Weft trains deep networks on every core and GPU of one machine, and shows where the time went.

import weft

def workload() -> weft.Workload: ...          # in the job's file; imports torch
weft.run(workload, batch_size=100, epochs=10)  # in a script or a notebook
weft.Client().submit(weft.JobSpec(job={...}))  # anywhere; imports no torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.version import __version__ as __version__

if TYPE_CHECKING:
    from weft.client.call import JobFailed as JobFailed
    from weft.client.call import run as run
    from weft.client.client import AsyncClient as AsyncClient
    from weft.client.client import Client as Client
    from weft.client.client import DaemonUnreachable as DaemonUnreachable
    from weft.client.client import RequestRefused as RequestRefused
    from weft.client.embedded import Daemon as Daemon
    from weft.client.trained import Trained as Trained
    from weft.spec.field_errors import SpecError as SpecError
    from weft.spec.job_spec import JobSpec as JobSpec
    from weft.workload.workload import Workload as Workload

__all__ = [
    "AsyncClient",
    "Client",
    "Daemon",
    "DaemonUnreachable",
    "JobFailed",
    "JobSpec",
    "RequestRefused",
    "SpecError",
    "Trained",
    "Workload",
    "run",
]

_HOMES = {
    "AsyncClient": "weft.client.client",
    "Client": "weft.client.client",
    "Daemon": "weft.client.embedded",
    "DaemonUnreachable": "weft.client.client",
    "JobFailed": "weft.client.call",
    "JobSpec": "weft.spec.job_spec",
    "RequestRefused": "weft.client.client",
    "SpecError": "weft.spec.field_errors",
    "Trained": "weft.client.trained",
    "Workload": "weft.workload.workload",
    "run": "weft.client.call",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that a client never imports torch: only Workload's module does.
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
