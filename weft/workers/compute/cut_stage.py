"""Cut stage: a stage of a model that is cut by its own forward, whose forward is the user's whole step.

What belongs to other stages is skipped (weft.workload.cutting); this keeps, from a microbatch's forward to its
backward, what autograd needs.

To seed at each call takes longer than to skip one, and many models draw nothing. So a stage without buffers, of a step
that has not drawn when it was inspected, runs unseeded until a run has moved the generator; that one is made again with
its seeds, and all others are seeded. What a step keeps would be changed twice: one whose first run, with seeds, leaves
anything behind is seeded for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft.plan.error_places import within
from weft.plan.plan import SlotValue
from weft.workers.compute.forward_buffers import Began, ForwardBuffers, SharedBuffers
from weft.workers.compute.forward_parts import ForwardParts
from weft.workers.compute.model_part import CallPart
from weft.workers.compute.stage import GivenModes, Stage, Tensors, computing_in, forget_results, leaf_of, no_leaf
from weft.workers.devices.device import Accelerator, Device
from weft.workers.snapshots.first_reads import CountedElsewhere
from weft.workers.snapshots.stage_attributes import StageAttributes
from weft.workers.snapshots.step_memory import StepMemory
from weft.workload.cutting.calls import Made, Seed, unseeded
from weft.workload.cutting.cut_step import Bound, CutStep, Sent
from weft.workload.cutting.skipped import OtherStructure
from weft.workload.cutting.tape import Tape
from weft.workload.data.tree import with_tensors
from weft.workload.randomness import KEY_MASK, Movements, mixed, seed_others
from weft.workload.step import check_names, step_source, step_values, training_step, validation_step
from weft.workload.units import enter_mode
from weft.workload.workload import Workload


@dataclass(slots=True)
class _Saved:
    """Of a microbatch, from its forward to its backward."""

    step: int
    leaves: list[torch.Tensor | None]  # what was received
    given: list[torch.Tensor | None]  # the same as the step got it
    versions: list[int]  # of these, before the step, where it may write to them
    batch: Any
    sent: Tensors | None  # with its graph, unless it is recomputed
    bound: Bound  # what stood for what
    calls: Made  # their numbers
    seed: Seed  # what they were seeded by
    began: Began  # where it is recomputed


class CutStage(Stage):
    def __init__(
        self,
        workload: Workload,
        part: CallPart,
        cut: CutStep,
        *,
        differentiable: Sequence[bool],
        seed: int,
        recompute: bool,
        device: Device,
        copies_input: bool,
        precision: str,
        draws: bool,
        seeds_others: bool,
        parts: ForwardParts,
    ) -> None:
        """cut: installed. differentiable: of what it receives, in that order. copies_input: the step writes to what it
        receives, or to the batch, which neither a slot nor an autograd leaf allows. draws: from torch's generator.
        seeds_others: it draws from Python's or numpy's, too. parts: where the first forward may still have to wait."""
        self._model = model = part.model
        self._elsewhere = CountedElsewhere(model, part.others.counted_elsewhere, part.others.counted_before)
        self._shared = SharedBuffers(model, part.others.shared)
        self._learns = True
        self._cut = cut
        self._steps = {True: training_step(workload), False: validation_step(workload)}  # by whether it learns
        self._sources = {learns: step_source(workload, learns=learns) for learns in (True, False)}
        self._places = {learns: within(f"in {source}") for learns, source in self._sources.items()}
        self._names: dict[bool, list[str]] = {}  # by whether it learns: of what the first batch reported
        self._differentiable = tuple(differentiable)
        self._key = seed & KEY_MASK
        self._recompute = recompute
        self._device = device
        self._copies_input = copies_input
        self._precision = partial(computing_in, precision, device)
        is_host = not isinstance(device, Accelerator)
        self._buffers = ForwardBuffers([model], can_compare=is_host)
        self._before: tuple[StageAttributes, ForwardBuffers] | None = None  # a run that may have to be made again
        cut.new_tape = self._new_tape
        self._modes = GivenModes([model])
        self._seeds_others = seeds_others
        self._memory = StepMemory(workload)
        has_buffers = cut.has_buffers or self._memory.has_buffers
        self._draws = draws or seeds_others or not is_host or copies_input or has_buffers  # or a run has, or has to
        self._looked_at: set[bool] = set()  # of the two steps, those whose first run is over
        Movements.watch()
        self._saved: dict[int, _Saved] = {}
        self._again = super().again()
        self._parts = parts
        self._needed_first = 0  # the part that what no called module has is in
        if parts.count > 1:
            needs = {id(module): parts.needed_by(module.parameters()) for module in cut.modules}
            known = {id(each) for module in cut.modules for each in module.parameters()}
            self._needed_first = parts.needed_by(each for each in model.parameters() if id(each) not in known)
            cut.before_call = lambda module: parts.reach(needs[id(module)])
            parts.watch(model)

    @property
    def num_in_flight(self) -> int:
        return len(self._saved)

    def span(self) -> str:
        return self._cut.span + ","

    def maker(self) -> str:
        return f"the stage {self._cut.span}"

    def train(self, training: bool) -> None:
        self._learns = training
        enter_mode(self._model, training)

    def go_on(self, training: bool) -> None:
        self._learns = training
        for module in self._model.modules():
            module.training = training

    def forward(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Tensors:
        return self._forward(microbatch, step, received, batch)[0]

    def lose(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Mapping[str, torch.Tensor]:
        values = self._forward(microbatch, step, received, batch)[1]
        check_names(values, self._names.setdefault(True, list(values)), self._sources[True])
        return values

    def evaluate(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Tensors:
        with torch.no_grad():
            result = self._run(microbatch, step, received, batch, learns=self._learns)
        if isinstance(result, Sent):
            return result
        if not self._learns:  # nothing in it counts, and perhaps in no other: what is reported has names all the same
            self._names.setdefault(False, list(step_values(result, self._sources[False], learns=False)))
        return []

    def measure(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Mapping[str, torch.Tensor]:
        with torch.no_grad():
            result = self._run(microbatch, step, received, batch, learns=False)
        source = self._sources[False]
        values = step_values(result, source, learns=False)
        check_names(values, self._names.setdefault(False, list(values)), source)
        return values

    def measures(self) -> Sequence[str]:
        return self._names.get(False, [])

    def check_sent(self, sent: Tensors, places: Sequence[SlotValue], size: int) -> None:
        """A place's row says what stands in it, whatever was planned."""

    def take(self, microbatch: int) -> tuple[Tensors, Tensors]:
        saved = self._saved.pop(microbatch)
        if saved.sent is None:
            with self._buffers.as_they_were(saved.began):
                saved.sent = self._run_saved(microbatch, saved)[0]
        self._again = partial(self._begin_backward, saved.bound, saved.calls, saved.seed)
        self._again()
        if not self._copies_input:
            return saved.given, saved.sent
        # A copy is where gradients are summed, but what was written to is another tensor since.
        parts = zip(saved.leaves, saved.given, saved.versions, strict=True)
        return [
            leaf if given is not None and given._version != now else given for leaf, given, now in parts
        ], saved.sent

    def again(self) -> Callable[[], None]:
        return self._again

    def _begin_backward(self, bound: Bound, calls: Made, seed: Seed) -> None:
        """torch.utils.checkpoint may call modules in it, with the arguments and the numbers that they had."""
        self._cut.rebind(bound)
        self._cut.numbers.run_again(seed, calls)

    def drop(self, microbatch: int) -> None:
        self._saved.pop(microbatch, None)

    def rewind(self) -> None:
        self._saved.clear()
        self._cut.rebind([])
        self._modes.restore()

    def close(self) -> None:
        self.rewind()
        self._cut.close()
        self._memory.close()
        self._elsewhere.close()
        forget_results(self._modes.modules)

    # --- runs

    def _forward(
        self, microbatch: int, step: int, received: Tensors, batch: Any
    ) -> tuple[Tensors, Mapping[str, torch.Tensor]]:
        leaves = [leaf_of(each, wants) for each, wants in zip(received, self._differentiable, strict=True)]
        saved = _Saved(step, leaves, leaves, [], batch, None, [], {}, unseeded, Began())
        self._saved[microbatch] = saved
        if not self._recompute:
            saved.sent, values = self._run_saved(microbatch, saved)
            return saved.sent, values
        self._buffers.begin()
        sent, values = self._buffers.forgetting(lambda: self._run_saved(microbatch, saved))
        saved.began = self._buffers.end()
        return [None if each is None else each.detach() for each in sent], {n: v.detach() for n, v in values.items()}

    def _run_saved(self, microbatch: int, saved: _Saved) -> tuple[Tensors, Mapping[str, torch.Tensor]]:
        saved.given = [None if leaf is None else self._apart(leaf) for leaf in saved.leaves]
        if self._copies_input:
            saved.versions = [0 if each is None else each._version for each in saved.given]
        result = self._run(microbatch, saved.step, saved.given, saved.batch, learns=True)
        numbers = self._cut.numbers
        saved.bound, saved.calls, saved.seed = self._cut.bound, numbers.made, numbers.seed
        if isinstance(result, Sent):
            return result, {}
        values = step_values(result, self._sources[True], learns=True)
        return [values["loss"]], values

    def _apart(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.clone() if self._copies_input else no_leaf(leaf)

    def _run(self, microbatch: int, step: int, received: Tensors, batch: Any, *, learns: bool) -> Any:
        """What the step returns on the last stage, on any other a list of what it sends."""
        with self._device.drawing, self._parts.seeing_reads(), self._precision(), self._places[learns]:
            self._device.launching()
            self._parts.reach(self._needed_first)
            run = partial(self._run_once, batch, received, learns=learns)
            if not self._draws and learns in self._looked_at:
                movements = Movements()
                if not movements.were_before:
                    result = run(unseeded)
                    if not movements.are_there():
                        return result
                self._draws = True
            seed = self._seeder(microbatch, step)
            return run(seed) if self._draws else self._first_run(partial(run, seed), learns=learns)

    def _first_run(self, run: Callable[[], Any], *, learns: bool) -> Any:
        before = self._memory.look(learns=learns)
        result = run()
        self._looked_at.add(learns)
        self._draws = before is None or self._memory.look(learns=learns) != before
        return result

    def _run_once(self, batch: Any, received: Tensors, seed: Seed, *, learns: bool) -> Any:
        # containers of its own, which a step may change
        own = with_tensors(batch, torch.Tensor.clone if self._copies_input else torch.Tensor.detach)
        try:
            with self._shared.unchanged():
                return self._cut.run(self._steps[learns], own, received, seed)
        except OtherStructure:
            for each in self._before or ():
                each.put_back()
        finally:
            self._before = None
        return self._run_once(batch, received, seed, learns=learns)

    def _new_tape(self) -> Tape:
        """In a run of shapes that none has had: what it assumes of them may not hold, and then it is made again."""
        self._before = StageAttributes.of(self._model), ForwardBuffers([self._model], can_compare=True)
        self._before[1].begin()
        return Tape()

    def _seeder(self, microbatch: int, step: int) -> Seed:
        key, seed = mixed(mixed(self._key, step), microbatch), self._device.seed
        if not self._seeds_others:
            return lambda number: seed(mixed(key, number))

        def seed_all(number: int) -> None:
            seed(mixed(key, number))
            seed_others(mixed(key, number))

        return seed_all
