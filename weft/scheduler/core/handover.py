"""Handover: the event after which nobody answers workers for a while. A value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverBegun:
    """Another daemon goes on with this core, in a moment; what lanes have until then is theirs already."""

    windows: int  # that each lane is to be sent ahead
