from __future__ import annotations

import pytest
from copy_overlap import Copy, rates


def test_copies_that_ran_alone_have_their_directions_rate() -> None:
    found = rates([Copy(0, 100, 1000), Copy(100, 300, 1000)], [Copy(400, 500, 700)])
    assert (found.down, found.up, found.both) == (2000 / 300 * 1e9, 7e9, None)


def test_what_a_copy_moved_beside_the_other_direction_counts_for_both() -> None:
    """Down moves 10 bytes a nanosecond alone and 6 beside; up 8 and 5."""
    downs = [Copy(0, 100, 1000), Copy(100, 200, 50 * 10 + 50 * 6)]
    ups = [Copy(150, 250, 50 * 5 + 50 * 8), Copy(300, 400, 800)]
    found = rates(downs, ups)
    assert found.down == pytest.approx(10e9)
    assert found.up == pytest.approx(8e9)
    assert found.both == pytest.approx(11e9)


def test_both_directions_at_once_all_the_time_need_no_rate_alone() -> None:
    found = rates([Copy(0, 100, 600), Copy(100, 200, 600)], [Copy(0, 200, 1000)])
    assert (found.down, found.up) == (None, None)
    assert found.both == pytest.approx(11e9)


def test_without_a_rate_alone_a_copy_that_ran_so_in_part_tells_nothing() -> None:
    assert rates([Copy(0, 100, 600)], [Copy(50, 100, 300)]).both is None


def test_copies_of_which_no_bytes_rest_have_no_rate_beside_the_other_direction() -> None:
    downs = [Copy(0, 100, 1000), Copy(100, 200, 500)]
    assert rates(downs, [Copy(190, 290, 700), Copy(300, 400, 800)]).both is None


def test_no_copies_have_no_rates() -> None:
    found = rates([], [])
    assert (found.down, found.up, found.both) == (None, None, None)
