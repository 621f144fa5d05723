"""Cut facts: where a model that is cut by its own forward can be cut, what crosses, and what each unit takes.

record    the whole step, with gradients, and validation's: units, values, problems; what is to come out
try       all cuts at once, a microbatch forward and backward, and one of validation: refused are those that raise, and
          those that differ
time      the same again, for seconds
record    once for each other size of microbatch, for shapes

A job that only runs forward is looked at in the same way, without gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.plan.error_places import TRIED_BACKWARD, TRIED_STEP, within
from weft.spec.job_spec import JobSpec
from weft.workers.compute.stage import computing_in
from weft.workers.devices.device import Device
from weft.workers.inspection.cut_proof import MAX_TRIES, CutProof, Whole, telling, told_of_a_draw
from weft.workers.inspection.cut_trial import CutTrial, others_of, run_as_it_is
from weft.workers.inspection.looked_at import LookedAt
from weft.workers.inspection.ran import (
    DRAWS,
    Ran,
    StateBefore,
    StatesOfRuns,
    TrialOutcome,
    first_batch,
    mark_carriers,
    tried,
    users_of,
    value_facts,
)
from weft.workers.inspection.state_facts import cut_units
from weft.workers.inspection.times import TIMED_RUNS, CutTimes, Times, between, note, note_around, note_split
from weft.workers.inspection.unit_facts import SMALL_RUNS, keeps, size_of_small
from weft.workers.snapshots.stage_attributes import StageAttributes
from weft.workload.code.first_epoch import set_mode
from weft.workload.code.freezing import trainable
from weft.workload.cutting.calls import SeededCalls
from weft.workload.cutting.cut_step import Step
from weft.workload.cutting.names import named_tensors
from weft.workload.cutting.recorded import Recorded
from weft.workload.cutting.recording import StepRecording
from weft.workload.cutting.skipped import SkippedCalls, pickled
from weft.workload.data.batches import Batches
from weft.workload.data.tree import Skeleton, build, flatten, with_tensors
from weft.workload.randomness import Draws, OtherGenerators, seed_others, unit_key
from weft.workload.step import step_source, step_values, training_step, validation_step
from weft.workload.workload import Workload

HEAD_SLACK = 256  # bytes: a head's length depends on the numbers in it


def inspect_batches(
    workload: Workload,
    spec: JobSpec,
    batches: Batches,
    sizes: Sequence[int],
    *,
    trained: Sequence[int],
    device: Device,
    leave: Callable[[nn.Module], None],
) -> Ran:
    """sizes: of microbatches. trained: those that are known to occur in training. leave: called with the model once it
    has the gradients of a run."""
    looked = LookedAt.of(batches, sizes)
    small = size_of_small(spec, max(sizes))
    first = first_batch(small, training=small <= batches.num_train)
    few = tried(lambda: _on(device, batches.batch(*first))) if small else None
    inspection = CutInspection(
        workload,
        spec,
        {size: _on(device, batch) for size, batch in looked.trained.items()},
        (0 if few is None else small, few),
        {size: _on(device, batch) for size, batch in looked.held_out.items()},
        least=None if looked.least is None else _on(device, looked.least),
        others=[None if other is None else _on(device, other) for other in looked.others],
        between=looked.between,
        trained=trained,
        device=device,
    )
    packed = {"dtype": "uint8", "itemsize": 1, "shapes": [[max(sizes), [looked.num_bytes() + HEAD_SLACK]]]}
    ran = inspection.run(leave, packed, looked.load_seconds)
    return dataclasses.replace(ran, varying_shapes=looked.varying_shapes)


def _on(device: Device, batch: tuple[list[torch.Tensor], Skeleton]) -> Any:
    return build(batch[1], [device.put(tensor) for tensor in batch[0]])


class CutInspection:
    """samples, held_out: batches of training and of validation, by size; small: one to be timed with, and its size.
    least, others, between: as of `LookedAt`."""

    def __init__(
        self,
        workload: Workload,
        spec: JobSpec,
        samples: Mapping[int, Any],
        small: tuple[int, Any],
        held_out: Mapping[int, Any],
        *,
        least: Any,
        others: Sequence[Any],
        between: float,
        trained: Sequence[int],
        device: Device,
    ) -> None:
        self._model, self._workload, self._spec = workload.model, workload, spec
        self._samples, self._small, self._held_out = samples, small, held_out
        (self._other, self._other_held_out), self._least, self._between = others, least, between
        self._trained, self._device = trained, device
        self._precision = partial(computing_in, spec.strategy.precision, device)
        self._learns = spec.job.mode == "train"
        self._trainable, self._thaws = trainable(workload), False
        self._step = training_step(workload) if self._learns else validation_step(workload)
        train = partial(self._record, self._step, self._largest) if self._learns else None
        set_mode(self._model, self._learns)  # which may change numbers, for this epoch and in this mode
        self._states = StatesOfRuns(workload.model, train)
        self._restore = self._states.restore
        self._changing: Sequence[str] = ()  # parameters that the step changes by itself
        self._made_once: frozenset[str] = frozenset()  # as of Recorded
        self._written: list[str] = []  # as of Ran
        self._backward_changes: list[str] = []  # parameters and buffers
        self._writing: set[int] = set()  # as of CutTrial, in any run
        self._built = {name for name, _ in named_tensors(workload.model)}  # forward may register others
        self._microbatch = 0  # in the key of random numbers
        self._other_draws: list[int] = []  # numbers of microbatches that leave out other blocks
        self._metrics: list[str] = []
        self._others, self._draws = OtherGenerators(), Draws()
        self._needs_own_batch = False  # some run of a whole step has written to its batch, or kept some of it

    def run(self, leave: Callable[[nn.Module], None], packed: dict[str, Any], load_seconds: float) -> Ran:
        self._device.adopt(self._model)
        self._attributes = StageAttributes.of(self._model)
        with torch.set_grad_enabled(self._learns):
            recorded, whole = self._whole()
            wholes = [whole]
            leave(self._model)
            recorded = self._with_gradients(recorded)
            if self._learns and self._held_out:
                recorded = self._with_validation(recorded)
                wholes.append(self._validated())
            skipped = SkippedCalls(recorded.returned, self._device.torch, recorded.redraws)
            problems = dict(recorded.problems)
            cuts = self._proven(recorded, wholes, skipped, problems)
            changes = self._changing, self._backward_changes, self._states.changed.union(self._written)
            units = cut_units(self._model, recorded, self._built, *changes)
            if self._learns and self._spec.strategy.may_have_replicas:
                mark_carriers(units, recorded, self._model, self._losses)
                self._restore()
            self._time(units, recorded, cuts, skipped)
            values = self._values(recorded, skipped)
        for unit in units if self._needs_own_batch else ():  # any stage runs the line that does, if it ends behind it
            unit["in_place"] = True
        self._device.give_back(self._model)
        return Ran(
            units=units,
            values=values,
            cut_problems=[[unit, text] for unit, text in sorted(problems.items())],
            small_size=self._small[0],
            input=packed,
            target=None,
            load_seconds=load_seconds,
            metrics=self._metrics or list(self._workload.metrics),
            users=users_of(recorded, self._model),
            changing=self._changing,
            written=[*self._written, *(self._states.counted if self._learns else ())],
            skipped_calls=pickled(skipped.needed, recorded.redraws),
            draws=self._draws.were_there,
            seeds_others=self._others.have_drawn,
        )

    # --- runs

    @property
    def _largest(self) -> Any:
        return self._samples[max(self._samples)]

    @contextlib.contextmanager
    def _drawing(self, microbatch: int) -> Iterator[None]:
        """With its random numbers; what raises may be a try."""
        fullest, self._microbatch = self._microbatch, microbatch
        try:
            yield
        finally:
            self._microbatch = fullest

    def _seed(self, number: int, *, looks: bool = False) -> None:
        key = unit_key(self._spec.job.seed, 0, self._microbatch, number)
        if looks:
            self._draws.look()
        self._device.seed(key)
        if looks:
            self._draws.begin()
            self._others.seed(key)
        elif self._others.have_drawn:
            seed_others(key)

    def _record(self, step: Step, batch: Any) -> tuple[Recorded, StepRecording]:
        recording = StepRecording(self._model, self._made_once)
        tensors, skeleton = flatten(batch)
        own = [tensor.clone() for tensor in tensors]
        with self._device.drawing, self._precision(), within(TRIED_STEP, innermost=True):
            recorded = recording.run(step, build(skeleton, own), partial(self._seed, looks=True))
        self._thaws |= any(not each.requires_grad for each in self._model.parameters() if id(each) in self._trainable)
        self._made_once = recorded.made_once
        self._draws.look()
        if self._others.look():  # what it calls may depend on that
            recorded = dataclasses.replace(recorded, varies=True).with_spares()
        self._needs_own_batch |= any(tensor._version for tensor in own) or keeps(self._model.modules(), own)
        return recorded, recording

    def _results(self, result: Any) -> Mapping[str, torch.Tensor]:
        learns = torch.is_grad_enabled()
        values = step_values(result, step_source(self._workload, learns=learns), learns=learns)
        return {"loss": values["loss"]} if learns else values

    def _whole(self) -> tuple[Recorded, Whole]:
        """The whole step as it is, and what came out; buffers are as before."""
        recorded, recording = self._fullest()
        if self._learns and recording.changed:
            self._changing = recording.changed
            self._states.begin_with(others_of(self._model, self._changing))
            del recorded, recording
            self._restore()
            recorded, recording = self._fullest()
        self._written = recording.written if self._learns else []
        if not self._learns:
            self._metrics = [name for name in self._results(recorded.result) if name != "loss"]
        return recorded, self._ran(recorded, recording)

    def _ran(self, recorded: Recorded, recording: StepRecording) -> Whole:
        values = self._results(recorded.result)
        if self._learns:
            before = StateBefore(self._model)
            with within(TRIED_BACKWARD, innermost=True), recording.installed_again(self._seed), self._draws.backward():
                torch.autograd.backward(values["loss"])
            self._backward_changes += before.changed()
        outcome = TrialOutcome.of(self._model, values, self._changing, learns=self._learns)
        self._restore()
        return Whole(self._step, self._largest, outcome, learns=self._learns, other=self._other)

    def _fullest(self) -> tuple[Recorded, StepRecording]:
        """Of a few runs the one that calls most, where modules or lines are left out at random."""
        found = self._record(self._step, self._largest)
        if not found[0].varies or not self._spec.strategy.may_be_cut:
            return found
        del found  # and what it has for a backward
        done = {}
        for self._microbatch in range(1, MAX_TRIES + 1):
            self._restore()
            recorded, _ = self._record(self._step, self._largest)
            done[self._microbatch] = recorded.called, recorded.computed
            del recorded
        self._microbatch, *self._other_draws = telling(done)
        self._restore()
        return self._record(self._step, self._largest)

    def _with_gradients(self, recorded: Recorded) -> Recorded:
        """A value that had none may have one with other draws, if somebody is left out inside of a module; or any, if
        lines are, by which values have other names, or if layers thaw."""
        if not (self._learns and self._spec.strategy.may_be_cut):
            return recorded
        if recorded.varies or self._thaws:
            return recorded.with_gradients({value.name for value in recorded.values})
        names = set[str]()
        for draw in range(1, DRAWS if self._draws.were_there and recorded.lacks_gradients else 1):
            with self._drawing(self._microbatch + draw):
                found = self._record(self._step, self._largest)[0].values
            names |= {value.name for value in found if value.has_gradient}
            self._restore()
        return recorded.with_gradients(names)

    def _with_validation(self, recorded: Recorded) -> Recorded:
        """What validation passes on may be other values: a dropout then gives back what it got."""
        other = self._states.evaluated(partial(self._of_validation, self._held_out[max(self._held_out)]))
        self._restore()
        return recorded.merged(other, step_source(self._workload, learns=False))

    def _of_validation(self, batch: Any) -> Recorded:
        with self._states.evaluating():
            recorded, _ = self._record(validation_step(self._workload), batch)
            self._metrics = [name for name in self._results(recorded.result) if name != "loss"]
            return recorded

    def _validated(self) -> Whole:
        """Validation's step, looked at by nobody: some modules compute in another way where somebody does."""
        step, batch = validation_step(self._workload), self._held_out[max(self._held_out)]
        calls = SeededCalls(self._model)
        own = with_tensors(batch, torch.Tensor.clone)
        with (
            self._states.evaluating(),
            self._device.drawing,
            self._precision(),
            within(TRIED_STEP, innermost=True),
            calls.installed() as numbers,
            numbers.running(self._seed),
        ):
            values = self._results(step(self._model, own))
            outcome = TrialOutcome.of(self._model, values, self._changing, learns=False)
        self._restore()
        return Whole(step, batch, outcome, learns=False, other=self._other_held_out)

    def _proven(
        self, recorded: Recorded, wholes: Sequence[Whole], skipped: SkippedCalls, problems: dict[int, str]
    ) -> list[int]:
        def proof(wholes: Sequence[Whole]) -> CutProof:
            trial, again = partial(self._trial, recorded, skipped), bool(recorded.late)
            return CutProof(self._states, wholes, trial, seed=self._seed, forget=skipped.forget, goes_back=again)

        cuts = [unit for unit in range(1, len(recorded.units)) if unit not in problems]
        cuts = proof(wholes).proven(proof(wholes).lasting(cuts, problems), problems)
        for draw in self._other_draws:
            with self._drawing(draw):
                other, recording = self._record(self._step, self._largest)
                skipped.learn(other.returned)
                cuts = proof([self._ran(other, recording)]).proven(cuts, problems, told_of_a_draw)
        return cuts

    def _trial(self, recorded: Recorded, skipped: SkippedCalls, cuts: Sequence[int], step: Step) -> CutTrial:
        attributes = self._states.in_mode(self._attributes)
        how: dict[str, Any] = {"values_of": self._results, "precision": self._precision, "attributes": attributes}
        return CutTrial(self._model, step, recorded, cuts, skipped, self._device, writing=self._writing, **how)

    # --- facts

    def _losses(self, draw: int) -> list[torch.Tensor]:
        with self._drawing(self._microbatch + draw), torch.no_grad():
            return [self._results(self._record(self._step, self._largest)[0].result)["loss"]]

    def _time(
        self, units: list[dict[str, Any]], recorded: Recorded, cuts: Sequence[int], skipped: SkippedCalls
    ) -> None:
        bounds = [0, *cuts]
        trial = self._trial(recorded, skipped, cuts, self._step)
        together = self._trial(recorded, skipped, cuts[:1], self._step) if len(cuts) > 1 else None
        timed = CutTimes(trial, together, partial(run_as_it_is, seed=self._seed), self._spec)
        trial.counts = self._learns and not self._spec.strategy.compile
        times = timed.of(self._largest, TIMED_RUNS)
        for first, kept_bytes, counts in zip(bounds, trial.kept_bytes, trial.left_by_stages(), strict=True):
            units[first] |= {"kept_bytes": kept_bytes, "counts": counts}
        for unit in self._writing:
            units[unit]["in_place"] = True
        note_around(units, bounds, ("forward", "backward"), timed.around)
        if self._learns and self._spec.strategy.may_split_backwards:
            if (split := tried(partial(timed.parts_of, self._largest, SMALL_RUNS))) is not None:
                note_split(units, bounds, times, split[0])
                note_around(units, bounds, ("input", "weight"), split[1])
            timed.splits(False)
        if self._least is not None:
            least = tried(partial(self._times_of_other, timed, skipped, self._least))
            times = times if least is None else between(least, times, self._between)
        note(units, bounds, times, "")
        if self._small[0]:
            small = tried(partial(self._times_of_other, timed, skipped, self._small[1]))
            if small is None:
                self._small = (0, None)
            else:
                note(units, bounds, small, "small_")
        self._restore()

    def _times_of_other(self, timed: CutTimes, skipped: SkippedCalls, batch: Any) -> Times:
        skipped.learn(self._record(self._step, batch)[0].returned)
        return timed.of_other(batch, SMALL_RUNS)

    def _values(self, recorded: Recorded, skipped: SkippedCalls) -> list[dict[str, Any]]:
        largest = max(self._samples)
        shapes = {value.name: {largest: tuple(value.tensor.shape)} for value in recorded.values}
        for size, batch in self._samples.items():
            if size != largest:
                other = self._of_size(size, batch)
                skipped.learn_needed(other.returned)
                for value in other.values:
                    shapes.setdefault(value.name, {})[size] = tuple(value.tensor.shape)
        set_mode(self._model, self._learns)
        looks_again = self._learns and (skipped.needed or self._spec.strategy.compile)
        for batch in self._held_out.values() if looks_again else ():
            skipped.learn_needed(self._states.evaluated(partial(self._of_validation, batch)).returned)
        self._restore()
        return [value_facts(value, shapes[value.name]) for value in recorded.values]

    def _of_size(self, size: int, batch: Any) -> Recorded:
        trains = self._learns and size in self._trained  # batch norm trains on no single sample

        def run() -> Recorded:
            with contextlib.nullcontext() if trains else self._states.of_validation():
                set_mode(self._model, trains)
                return self._record(self._step, batch)[0]

        return run() if trains else self._states.evaluated(run)
