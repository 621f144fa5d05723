"""Packed: the skeleton of a batch as bytes, for another process of the job."""

from __future__ import annotations

import pickle

from weft.workload.code.own_classes import Modules, Unpickling
from weft.workload.data.tree import Skeleton
from weft.workload.workload import WorkloadError


def packed(skeleton: Skeleton) -> bytes:
    """Raises WorkloadError for a class that would not be found there."""
    try:
        return pickle.dumps(skeleton, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise WorkloadError(
            f"the batch's structure cannot go to another process ({error}); define its classes and functions at the "
            "top of a file, or use a dict"
        ) from error


def unpacked(packet: bytes, modules: Modules | None = None) -> Skeleton:
    """modules: as of Unpickling."""
    skeleton: Skeleton = Unpickling(packet, modules).load()
    return skeleton
