"""What an inspection tells of other numbers of threads than it was made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, Threaded, UnitFacts
from weft.spec.workers_needed import Host

SECONDS = st.floats(0.0, 1.0)


@given(own=st.integers(1, 4), times=st.integers(2, 8), alone=SECONDS, divided=SECONDS, data=st.data())
def test_times_between_two_numbers_of_threads_follow_amdahls_law(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    own: int,
    times: int,
    alone: float,
    divided: float,
    data: st.DataObject,
) -> None:
    """Of work that each thread does, and work that they divide."""

    def taken(threads: int) -> float:
        return alone + divided / threads

    threads = data.draw(st.integers(own, own * times))
    unit = unit_of(0, taken(own), 2 * taken(own))
    known = Threaded(
        threads=own * times,
        seconds=((taken(own * times), 2 * taken(own * times), 0.0, 0.0),),
        update_seconds=taken(own * times),
        copy_bytes_per_second=8e9,
    )
    inspection = replace(
        inspection_of([unit], update_seconds=taken(own), copy_bytes_per_second=8e9),
        host=Host(workers=times, threads=own),
        threaded=known,
    )
    (found,) = inspection.with_threads(threads).units
    assert found.forward_seconds == pytest.approx(taken(threads), abs=1e-9)
    assert found.backward_seconds == pytest.approx(2 * taken(threads), abs=1e-9)
    assert inspection.with_threads(threads).update_seconds == pytest.approx(taken(threads), abs=1e-9)


def test_of_fewer_threads_than_were_measured_and_of_more_nothing_is_known(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    known = Threaded(threads=4, seconds=((0.1, 0.1, 0.0, 0.0),), update_seconds=0.1, copy_bytes_per_second=8e9)
    inspection = replace(inspection_of([unit_of(0)]), host=Host(workers=2, threads=2), threaded=known)
    for threads in (1, 2, 5):
        assert inspection.with_threads(threads) is inspection
    assert replace(inspection, threaded=None).with_threads(3).threaded is None
