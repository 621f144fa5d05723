"""Handovers: what goes on with another process of ours in the place of one, and what cannot. Values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverBegun:
    """Another daemon goes on with this core, in a moment; what lanes have until then is theirs already."""

    windows: int  # that each lane is to be sent ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLost:
    """The process that owns the shared tensors has died; another is on its way up, and has what it is handed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryMissed:
    """A worker of the attempt missed what must be in the directory. It may say so before DirectoryLost, or later."""

    job: str
    attempt: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandMemoryOn:
    """To the directory that takes the place of one that died: what the attempt maps in the worker, which goes on.
    Answered by DirectoryMissed where that cannot be."""

    job: str
    attempt: int
    worker: str
