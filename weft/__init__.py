"""Weft trains deep networks on every core and GPU of one machine, and shows where the time went.

import weft

def workload() -> weft.Workload: ...          # in the job's file; imports torch
weft.Client().submit(weft.JobSpec(job={...}))  # anywhere; imports no torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.client import AsyncClient as AsyncClient
    from weft.client import Client as Client
    from weft.spec import JobSpec as JobSpec
    from weft.spec import SpecError as SpecError
    from weft.workload import Workload as Workload

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "JobSpec", "SpecError", "Workload"]

_HOMES = {
    "AsyncClient": "weft.client",
    "Client": "weft.client",
    "JobSpec": "weft.spec",
    "SpecError": "weft.spec",
    "Workload": "weft.workload",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that a client never imports torch: only Workload's module does.
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
