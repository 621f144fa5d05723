"""Kinds: what tasks there are, why one waits for another, and what their time counts as. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal


class Kind(enum.StrEnum):
    """A new one is a line here, a row of KINDS and an operation in a worker."""

    LOAD = "load"
    FETCH = "fetch"  # a microbatch to a device
    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"  # the part of a backward that the stage before waits for
    WEIGHT = "weight"  # the other part: the gradients of the stage's own parameters
    GRAD = "grad"  # the milestone: a bucket's gradient is complete
    DOWN = "down"  # a bucket's gradient from a device
    SYNC = "sync"
    UPDATE = "update"
    VALIDATE = "validate"  # of speculative updates, once the norm is known
    UP = "up"  # a bucket's parameters, or its summed gradient, to a device
    RELOAD = "reload"  # a bucket's parameters to a device once more, for the backward of a layer that had to make room
    REFRESH = "refresh"  # of a device's own parameters by the host's, now and then: each side has updated its own
    SNAPSHOT = "snapshot"  # of what training has come to, now and then: a copy that outlives its worker


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFacts:
    mode: str  # what its time counts as; a milestone takes none, what is left to do for it is its backward's
    letter: str  # of its bar in a picture
    learns: bool = False  # it has nothing to do in an iteration that learns nothing, a validation's for example
    computes: bool = False  # it runs the units of a stage
    of_position: bool = False  # in its replica's program: where replicas steal, without a microbatch unless granted one
    hands_back: bool = False  # it makes the gradient that the stage before begins its own backward with
    makes_gradient: bool = False  # of its stage's parameters; the last in a stage's program completes them
    is_milestone: bool = False  # it may be posted from inside another task
    seldom: bool = False  # few iterations do it: an iteration's prediction and limit are without it
    moves: Literal["microbatch", "bucket"] | None = None  # between host and device, or to a replica's own parameters
    link: Literal["h2d", "d2h"] | None = None  # the way that this goes


KINDS: Final[Mapping[Kind, KindFacts]] = {
    Kind.LOAD: KindFacts(mode="load", letter="L"),
    Kind.FETCH: KindFacts(mode="transfer", letter="T", of_position=True, moves="microbatch", link="h2d"),
    Kind.FORWARD: KindFacts(mode="forward", letter="F", computes=True, of_position=True),
    Kind.BACKWARD: KindFacts(
        mode="backward",
        letter="B",
        learns=True,
        computes=True,
        of_position=True,
        hands_back=True,
        makes_gradient=True,
    ),
    Kind.INPUT: KindFacts(mode="backward", letter="I", learns=True, computes=True, of_position=True, hands_back=True),
    Kind.WEIGHT: KindFacts(
        mode="backward", letter="W", learns=True, computes=True, of_position=True, makes_gradient=True
    ),
    Kind.GRAD: KindFacts(mode="backward", letter="", learns=True, is_milestone=True),
    Kind.DOWN: KindFacts(mode="transfer", letter="D", learns=True, moves="bucket", link="d2h"),
    Kind.SYNC: KindFacts(mode="sync", letter="S", learns=True),
    Kind.UPDATE: KindFacts(mode="update", letter="U", learns=True),
    Kind.VALIDATE: KindFacts(mode="update", letter="V", learns=True),
    Kind.UP: KindFacts(mode="transfer", letter="P", moves="bucket", link="h2d"),
    Kind.RELOAD: KindFacts(mode="transfer", letter="R", learns=True, moves="bucket", link="h2d"),
    Kind.REFRESH: KindFacts(mode="transfer", letter="H", learns=True, seldom=True),
    Kind.SNAPSHOT: KindFacts(mode="snapshot", letter="C", learns=True, seldom=True),
}


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
COMPUTE_MODES = tuple(dict.fromkeys(facts.mode for facts in KINDS.values() if facts.computes))
MODE_INDEX = {mode: index for index, mode in enumerate(MODES)}


def is_compute_lane(lane: str) -> bool:
    """lane: its name, with or without its worker's. Stages that share a GPU compute in "compute", "compute-1", ..."""
    return lane.rpartition("/")[2].partition("-")[0] == "compute"
