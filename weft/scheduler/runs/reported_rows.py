"""Reported rows: whether what a lane has stamped can be its history. Pure.

Every account of the job relies on it: rows name tasks and iterations of the plan, are in order and do not overlap. The
rows come from a process that runs the job's code, so they are looked at as they arrive, by columns: well under a
microsecond a row.
"""

from __future__ import annotations

from array import array
from itertools import chain
from operator import le
from typing import Final

from weft.plan.kinds import MODES
from weft.plan.plan import Plan
from weft.plan.rows import FIELDS_PER_ROW

MAX_NS: Final = 1 << 62  # of CLOCK_MONOTONIC: a difference of two, and the sum of a lane's rows, is an int64 too
NONE: Final = -1


class ReportedRows:
    """One attempt's."""

    def __init__(self, plan: Plan) -> None:
        self._num_tasks = len(plan.graph.tasks)
        self._num_iterations = plan.itinerary.num_iterations
        self._ends: dict[tuple[str, str], int] = {}  # of the last row of each worker's lanes

    def check(self, worker: str, lane: str, packed: bytes) -> None:
        """The next rows of the lane. Raises ValueError with what is wrong with them."""
        if not packed:
            return
        if len(packed) % (8 * FIELDS_PER_ROW):
            raise ValueError(f"records: {len(packed)} bytes are no whole number of rows")
        flat = array("q", packed)
        for name, column, below in (
            ("mode", flat[0::FIELDS_PER_ROW], len(MODES)),
            ("task", flat[1::FIELDS_PER_ROW], self._num_tasks),
            ("iteration", flat[2::FIELDS_PER_ROW], self._num_iterations),
            ("waited_for", flat[3::FIELDS_PER_ROW], self._num_tasks),
        ):
            least = 0 if name == "mode" else NONE
            if min(column) < least or max(column) >= below:
                raise ValueError(f"records: {name} {min(column)} to {max(column)}, of {below}")
        self._check_times(worker, lane, flat)

    def _check_times(self, worker: str, lane: str, flat: array[int]) -> None:
        starts, ends = flat[4::FIELDS_PER_ROW], flat[5::FIELDS_PER_ROW]
        before = self._ends.get((worker, lane), 0)
        in_order = all(map(le, chain((before,), ends), starts)) and all(map(le, starts, ends))
        if not in_order or ends[-1] > MAX_NS:
            raise ValueError("records: times that are not in order")
        self._ends[worker, lane] = ends[-1]
