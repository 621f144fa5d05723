"""What a worker is told when it is forked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    worker: str
    lane: str  # that runs in the main thread
    device: str  # "cpu", "stand-in", or the uuid of a GPU
    threads: int
    unlike: bool  # the crew has GPUs of other models
    cores: tuple[int, ...]  # to run on; empty for any
    spin_seconds: float  # see Board
    stamps: bool  # see Account
    directory: str
    authkey: bytes
    compiled: str  # the directory of what is compiled
    inspections: str | None = None  # the directory of what was found out about jobs; None where that is not kept
