"""Idle optimizer: that of a process which is asked about epochs, and updates nothing.

The user's function finds it where `Workload.optimizer` has put it, with the options that the others' have come to: its
scheduler is stepped when the function is about to be asked, as often as theirs were since.
"""

from __future__ import annotations

from weft.plan.course import Course
from weft.workers.snapshots.saved import Saved
from weft.workers.updates.updates import members_of, restore_template, step_scheduler
from weft.workload.optimizer import keep_alone, make_optimizer
from weft.workload.workload import Workload, make_scheduler, steps_scheduler


class IdleOptimizer:
    def __init__(self, workload: Workload, course: Course) -> None:
        """workload: with all of its model. course: of the attempt."""
        self._workload, self._course = workload, course
        named = dict(workload.model.named_parameters())
        self._optimizer = make_optimizer(workload.optimizer, named.values())
        self._scheduler = None if self._optimizer is None else make_scheduler(workload.scheduler, self._optimizer)
        by_id = {id(each): name for name, each in named.items()}
        self._members = [] if self._optimizer is None else members_of(self._optimizer, by_id)
        if self._optimizer is not None:
            keep_alone(self._optimizer, [])
        self._following = course.begins

    def go_on(self, saved: Saved | None) -> None:
        """From there; None: where it begins."""
        self._following = self._course.begins
        if self._optimizer is not None and saved is not None:
            restore_template(self._optimizer, self._scheduler, saved, self._members)

    def catch_up(self, steps: int) -> None:
        """With as many training steps as are done."""
        itinerary = self._course.itinerary
        while self._following < itinerary.num_iterations and itinerary.at(self._following).step < steps:
            iteration = itinerary.at(self._following)
            self._following += 1
            if self._scheduler is None or not iteration.learns:
                continue
            if (value := self._course.measured(iteration)) is not None:
                step_scheduler(self._scheduler, value)
            if steps_scheduler(self._workload, ends_epoch=iteration.ends_epoch):
                step_scheduler(self._scheduler)
