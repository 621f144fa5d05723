"""Stage update: UPDATE(s) of a stage that owns its state, by the user's optimizer itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from weft.plan.error_places import step_place, within
from weft.plan.itinerary import Iteration
from weft.workers.compute.measured import Measured
from weft.workers.compute.unit_state import Homes
from weft.workers.snapshots.held import VALUES, Held
from weft.workers.snapshots.saved import Saved
from weft.workers.updates.digests import Digests
from weft.workers.updates.draws import Drawing, draws_nothing
from weft.workers.updates.optimizer_state import options, parted_state, restored_state
from weft.workers.updates.updates import Value, hold_scheduler_and_kinds, members_of, restore_template, step_scheduler
from weft.workload.optimizer import keep_alone, learning_rate_of, make_optimizer
from weft.workload.workload import Workload, make_scheduler, steps_scheduler


class StageUpdate:
    def __init__(
        self,
        workload: Workload,
        parameters: list[nn.Parameter],
        names: Mapping[int, str],
        *,
        reports: bool,
        homes: Homes | None = None,
        drawing: Drawing = draws_nothing,
        value: Value = lambda iteration: None,
        digests: Digests | None = None,
        publish: Callable[[Iteration], None] = lambda iteration: None,
    ) -> None:
        """names: of the model's parameters, by their ids, in their order. reports: it tells the learning rate of each
        step. homes: where the parameters are to be found behind an update. drawing: around each step. value: what the
        scheduler is to be stepped with before an iteration's update. digests: where what it leaves is compared with
        what it finds. publish: called behind each step, which may have changed buffers as well, by a hook on it."""
        self._optimizer = make_optimizer(workload.optimizer, workload.model.parameters()) if parameters else None
        self._scheduler = None if self._optimizer is None else make_scheduler(workload.scheduler, self._optimizer)
        self._workload = workload
        self._members: list[list[str]] = []  # names in each group, its own before other stages'
        if self._optimizer is not None:
            own = {names[id(parameter)] for parameter in parameters}
            members = members_of(self._optimizer, names)
            self._members = [sorted(each, key=lambda name: name not in own) for each in members]
            keep_alone(self._optimizer, parameters)
        self._own = {id(parameter) for parameter in parameters}
        self._first = next((place for place, each in enumerate(names) if each in self._own), 0)
        self._homes = homes or Homes()
        self._drawing = drawing
        self._stepping = within(step_place(self._optimizer))
        self._names = names
        self._reports = reports
        self._value = value
        self._digests = digests
        self._publish = publish

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    def trained(self) -> set[int]:
        """The ids of the parameters that it updates."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {id(parameter) for group in groups for parameter in self._own_of(group)}

    def _own_of(self, group: Mapping[str, Any]) -> list[nn.Parameter]:
        return [parameter for parameter in group["params"] if id(parameter) in self._own]

    def hold(self, held: Held) -> None:
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            own = options(group)
            for parameter in self._own_of(group):
                name = self._names[id(parameter)]
                elements, rest = parted_state(parameter, self._optimizer.state.get(parameter, {}))
                for entry, value in {VALUES: parameter.data, **elements}.items():
                    held.add_whole(name, entry, value)
                held.options[name] = own
                if rest:
                    held.states[name] = rest
        hold_scheduler_and_kinds(held, self._optimizer, self._scheduler)

    def rewind(self) -> None:
        """To before `restore`: of the steps that were made, and of gradients, nothing is known."""
        self._homes.bring_back()
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._optimizer.zero_grad(set_to_none=True)
        if self._digests is not None:
            self._digests.forget()

    def restore(self, saved: Saved) -> None:
        """Goes on from what was saved; the parameters have their values already."""
        if self._optimizer is None:
            return
        restore_template(self._optimizer, self._scheduler, saved, self._members)
        for group in self._optimizer.param_groups:
            for parameter in self._own_of(group):
                if state := restored_state(saved, self._names[id(parameter)], parameter, parameter, group):
                    self._optimizer.state[parameter] = state

    def check(self) -> None:
        """Errors: StateCorrupted."""
        if self._digests is not None:
            self._digests.check(0, self._held())

    def _note(self) -> None:
        if self._digests is not None:
            self._digests.note(0, self._held())

    def _held(self) -> Held:
        held = Held()
        self.hold(held)
        return held

    def run(self, iteration: Iteration, measured: Measured) -> None:
        rate = 0.0
        if self._scheduler is not None and (value := self._value(iteration)) is not None:
            step_scheduler(self._scheduler, value)
        if self._optimizer is not None:
            rate = learning_rate_of(self._optimizer)
            self.check()
            with self._drawing(iteration.step, self._first), self._stepping:
                self._optimizer.step()
            self._homes.bring_back()
            self._note()
            self._optimizer.zero_grad(set_to_none=True)
            self._publish(iteration)
        if self._scheduler is not None and steps_scheduler(self._workload, ends_epoch=iteration.ends_epoch):
            step_scheduler(self._scheduler)
        if self._reports:
            fragment = measured.of(iteration.index)
            fragment.facts["lr"] = rate
            fragment.complete = True
