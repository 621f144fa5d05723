"""Kinds: what tasks there are, why one waits for another, and what their time counts as. Pure."""

from __future__ import annotations

import enum


class Kind(enum.StrEnum):
    LOAD = "load"
    FETCH = "fetch"  # a microbatch to a device
    FORWARD = "forward"
    BACKWARD = "backward"
    GRAD = "grad"  # the milestone: a bucket's gradient is complete
    DOWN = "down"  # a bucket's gradient from a device
    SYNC = "sync"
    UPDATE = "update"
    VALIDATE = "validate"  # of speculative updates, once the norm is known
    UP = "up"  # a bucket's parameters, or its summed gradient, to a device
    RELOAD = "reload"  # a bucket's parameters to a device once more, for the backward of a layer that had to make room


class Cause(enum.StrEnum):
    """Why a lane does not run: for an edge, what it carries; the last four come from elsewhere than an edge."""

    DATA = "data"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SYNC = "sync"
    UPDATE = "update"
    SLOT = "slot"
    DISPATCH = "dispatch"
    RECOVERY = "recovery"
    IDLE = "idle"


class Way(enum.StrEnum):
    """Who updates a bucket that may be updated by either; which of the two, each iteration has anew."""

    HOST = "host"
    DEVICE = "device"


BUSY_MODES = ("forward", "backward", "sync", "update", "load", "transfer", "snapshot")
STALL_MODES = (
    "stall_data",
    "stall_activation",
    "stall_gradient",
    "stall_sync",
    "stall_update",
    "stall_slot",
    "stall_dispatch",
    "recovery",
    "idle",
)
MODES = BUSY_MODES + STALL_MODES
FIRST_STALL = len(BUSY_MODES)  # an index into MODES: below it are the busy ones
MODE_INDEX = {mode: index for index, mode in enumerate(MODES)}
# What a task's time counts as, by its kind in the iteration graph. A milestone takes none; what is left to do for it
# belongs to the backward that it ends.
MODE_OF_KIND = {
    "load": "load",
    "fetch": "transfer",
    "forward": "forward",
    "backward": "backward",
    "grad": "backward",
    "down": "transfer",
    "sync": "sync",
    "update": "update",
    "validate": "update",
    "up": "transfer",
    "reload": "transfer",
}


def is_compute_lane(lane: str) -> bool:
    """lane: its name, with or without its worker's. Stages that share a GPU compute in "compute", "compute-1", ..."""
    return lane.rpartition("/")[2].partition("-")[0] == "compute"
