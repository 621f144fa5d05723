from __future__ import annotations

from weft.plan.kinds import BUSY_MODES, KINDS, Kind


def test_every_kind_has_a_row_and_its_time_counts_as_some_work() -> None:
    assert list(KINDS) == list(Kind)
    assert {facts.mode for facts in KINDS.values()} <= set(BUSY_MODES)


def test_what_goes_over_a_link_moves_something() -> None:
    assert all(facts.moves for facts in KINDS.values() if facts.link)
