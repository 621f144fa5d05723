from __future__ import annotations

from weft.workers.devices.stand_in import StandIn


def test_what_a_task_that_failed_was_still_to_do_is_forgotten_with_its_job() -> None:
    """A metric raised after the loss had been told, and the next job's first task told that loss as its own."""
    device = StandIn()
    device.after(lambda: None)
    device.end_job()
    assert device.take_acts() == []
