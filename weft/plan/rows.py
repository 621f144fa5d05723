"""Stamped records: where a lane's time went, as rows of six int64 that travel in one binary field of a report.

    mode | task | iteration | waited_for | start_ns | end_ns

mode is an index into MODES; task and iteration are -1 where there is none; waited_for is the task whose output a stall
waited for, or -1. Times are CLOCK_MONOTONIC. A lane's rows are in order and do not overlap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain

from weft.plan.kinds import FIRST_STALL

FIELDS_PER_ROW = 6

Row = tuple[int, int, int, int, int, int]


def pack(rows: list[int]) -> bytes:
    """Rows laid end to end in one flat list, as bytes."""
    return array("q", rows).tobytes()


def packed_rows(rows: Iterable[Row]) -> bytes:
    return array("q", chain.from_iterable(rows)).tobytes()


def unpack(data: bytes) -> Iterator[Row]:
    """Raises ValueError where the bytes are no whole number of rows."""
    flat = array("q")
    flat.frombytes(data)
    if len(flat) % FIELDS_PER_ROW:
        raise ValueError(f"{len(flat)} numbers are no whole number of rows of {FIELDS_PER_ROW}")
    values = iter(flat)
    return zip(values, values, values, values, values, values, strict=True)


def last_ends(data: bytes) -> dict[int, int]:
    """When the last task of each iteration that ran here ended; by columns, without a tuple for each row."""
    flat = array("q", data)
    columns = zip(flat[0::FIELDS_PER_ROW], flat[2::FIELDS_PER_ROW], flat[5::FIELDS_PER_ROW], strict=True)
    return {iteration: end for mode, iteration, end in columns if mode < FIRST_STALL}
