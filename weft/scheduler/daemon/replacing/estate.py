"""The estate: all that the driver knows and no file has. It is data, and goes over to the next daemon as it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.machine.crew import Crew
from weft.scheduler.core.core import Core
from weft.scheduler.daemon.hangs import Watch
from weft.scheduler.daemon.hearing import DeviceFacts
from weft.scheduler.daemon.savers import Writing
from weft.scheduler.runs.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Estate:
    crew: Crew
    core: Core
    runs: dict[str, Run] = field(default_factory=dict)  # of jobs that have not ended; others are in the ledger
    writing: Writing = field(default_factory=Writing)
    watches: dict[str, Watch] = field(default_factory=dict)  # by job
    device_facts: DeviceFacts = field(default_factory=DeviceFacts)

    @classmethod
    def begin(cls, crew: Crew) -> Estate:
        """Of a daemon that nobody was before."""
        return cls(crew=crew, core=Core(crew.kinds()))
