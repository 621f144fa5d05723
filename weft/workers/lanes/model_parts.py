"""Model parts: what of the user's model and optimizer one worker holds, put together from its view of the plan.

Without buckets a stage owns its state: an arena holds it, and the user's optimizer updates it. With buckets parameters
lie in the shared memory of all, stages have arenas for the rest of their state only, and owners update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.plan.buckets import Holder
from weft.plan.course import Course
from weft.plan.graph import Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.plan.plan import Ring, StagePlan
from weft.plan.worker_view import WorkerView
from weft.spec.job_spec import JobSpec
from weft.transport.memory.arena import Arena, Layout
from weft.transport.memory.directory import Directory
from weft.workers.compute.backward.own_gradients import OwnGradients
from weft.workers.compute.cut_stage import CutStage
from weft.workers.compute.forward_parts import ForwardParts
from weft.workers.compute.gradients import StageGradients
from weft.workers.compute.model_part import (
    CallPart,
    ModelPart,
    OwnPart,
    UnitPart,
    check_built,
    functions_with_state,
    own_parts,
    part_of,
    whole_state,
)
from weft.workers.compute.stage import Stage, computing_in
from weft.workers.compute.stage_parcels import StageParcels
from weft.workers.compute.stage_tasks import StageTasks
from weft.workers.compute.unit_stage import UnitStage
from weft.workers.compute.unit_state import Homes, copy_buffer, keep_state, move_state, restore_buffers
from weft.workers.compute.weights import Weights
from weft.workers.devices.device import Accelerator, Device
from weft.workers.epochs.asked import Asked, attributes_of
from weft.workers.lanes.loaded import Loaded
from weft.workers.lanes.shown import Shown
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.memory.layer_window import LayerWindow
from weft.workers.memory.parcels import ParcelRing
from weft.workers.memory.replica_memory import ReplicaMemory
from weft.workers.snapshots.attributes import Attributes
from weft.workers.snapshots.held import Held
from weft.workers.snapshots.saved import Saved
from weft.workers.updates.bucket_updates import BucketUpdates
from weft.workers.updates.digests import Digests
from weft.workers.updates.draws import drawing_of
from weft.workers.updates.moving_state import Moves
from weft.workers.updates.stage_update import StageUpdate
from weft.workload.compiling.ahead import compile_ahead
from weft.workload.cutting.cut_step import CutStep
from weft.workload.data.batches import sample_numbers
from weft.workload.data.source import source_of_job
from weft.workload.workload import Workload

PostGradient = Callable[[Holder, int], None]
GoOn = Callable[[Holder], None]


class ModelParts:
    def __init__(
        self,
        spec: JobSpec,
        view: WorkerView,
        workload: Workload,
        directory: Directory,
        device: Device,
        course: Course,
        weights: Weights,
        loaded: Loaded,
        parcels: Sequence[tuple[Ring, ParcelRing]],
        post_gradient: PostGradient,
        go_on: GoOn,
        saved: Saved | None,
        again: Callable[[], Workload],
    ) -> None:
        """go_on, again: as of ForwardParts, of own_parts. saved: what training goes on from; None where it begins."""
        self._spec, self._view, self._workload = spec, view, workload
        self._directory, self._device = directory, device
        self._course, self._weights, self._loaded, self._parcels = course, weights, loaded, parcels
        self._post_gradient, self._go_on = post_gradient, go_on
        check_built(workload.model, view.first_stages)
        self._state, self._saved = whole_state(workload.model), saved
        named = dict(workload.model.named_parameters())
        if saved is not None:
            saved.check_model(named)
        self._parameters, self._names = list(named.values()), list(named)
        self._parts: dict[Holder, ModelPart] = {}
        self._named: dict[Holder, dict[str, nn.Parameter]] = {}  # those that a stage holds
        self._buffers: dict[Holder, frozenset[str]] = {}  # its buffers' names
        self.attributes: dict[Holder, Attributes] = {}
        self.shown: dict[int, Shown] = {}  # by stage of the first replica
        self._train = source_of_job(workload, "train", spec.job)
        self.stages: dict[Holder, StageTasks] = {}
        self.memories: dict[Holder, ReplicaMemory] = {}
        self._windows: dict[int, LayerWindow] = {}
        self.updates: BucketUpdates | None = None  # of a job with buckets
        self.own_updates: dict[int, StageUpdate] = {}  # by stage, of a job without
        self.cuts: list[CutStep] = []
        self._memory = None
        self._in_buckets: set[int] = set()
        if view.synchronisation is not None:
            self._memory = BucketMemory(directory, view.synchronisation, view.replicas)
            moves = Moves(directory, self._memory, course, view.replicas, device)
            places = [place for bucket in self._memory.buckets for place in bucket.places]
            self._in_buckets = {id(self._parameters[place.parameter]) for place in places}
        held = self._add_stages(again)
        if self._memory is not None:
            self._memory.share(self._parameters, apart=held)
            self.updates = self._updates_of(self._memory, moves)
        updating = self.own_updates.values() if self.updates is None else [self.updates]
        self.asked.have_optimizer(course, updates=any(each.has_optimizer for each in updating))
        for cut in self.cuts:
            cut.install()
        # the other stages' parts of the model go with them
        del self._parameters, self._state, self._workload, self._saved

    def _add_stages(self, again: Callable[[], Workload]) -> set[int]:
        """Ids of the parameters that they have."""
        owned = own_parts(self._view, self._workload, again, self._device.torch)  # before any of them moves
        self.asked = Asked.of(self._view, owned, self._workload, on_host=isinstance(self._device, Accelerator))
        for own in owned:
            pairs = zip(own.parameters, self._parameters, strict=True)
            self._in_buckets |= {id(its) for its, first in pairs if id(first) in self._in_buckets}
        held = [parameter for own in owned for parameter in own.part.parameters()]
        precision = functools.partial(computing_in, self._spec.strategy.precision, self._device)
        for model in {own.workload.model: None for own in owned}:
            compile_ahead(model, self._view.compiled_calls, held, self._device.torch, precision)
        for stage, own in zip(self._view.stages, owned, strict=True):
            self._add_stage(stage, own)
        return set(map(id, held))

    def _updates_of(self, memory: BucketMemory, moves: Moves) -> BucketUpdates:
        spec, view, course, parameters = self._spec, self._view, self._course, self._parameters
        updates = BucketUpdates(
            spec, view, self._workload, parameters, memory, moves, course, self._device, self.memories, self._names
        )
        if self.stages or updates.owners:
            memory.publish_layout(self._state, parameters)
        if self._saved is not None:
            updates.restore(self._saved, self._names, course.iteration(course.begins))
        return updates

    # --- stages

    def _add_stage(self, plan: StagePlan, own: OwnPart) -> None:
        holder, part, parameters = plan.holder, own.part, own.parameters
        held = {id(p) for p in part.parameters()}
        named = {name: p for name, p in zip(self._names, parameters, strict=True) if id(p) in held}
        self._parts[holder], self._named[holder], self._buffers[holder] = part, named, frozenset(part.buffers())
        self.attributes[holder] = attributes_of(plan, own, self._view)
        if self._saved is not None:
            self._restore(holder, self._saved)
        part.adopt(self._device)
        for module in functions_with_state(own.workload):
            self._device.adopt(module)
        in_buckets = self._memory is not None
        gradients = self._place_in_buckets(holder, parameters) if in_buckets else OwnGradients(part.parameters())
        state = self._state_beside_buckets(part)
        arena = self._state_arena(holder, state)
        movable = [] if isinstance(self._device, Accelerator) else state
        homes = move_state([each for each in movable if isinstance(each[1], nn.Parameter)], arena)
        keep = keep_state(part, dict(state), arena, self._device)
        publish = functools.partial(self._publish, holder.stage, homes, keep)
        is_last = holder.stage == self._view.replicas[holder.replica].num_stages - 1
        parcels = StageParcels([pair for pair in self._parcels if pair[0].replica == holder[0]], holder[1], parameters)
        parts = ForwardParts.of(self._view, holder, parameters, self._go_on, self._device)
        stage = self._stage(plan, own, parcels, parts)
        self.stages[holder] = stage_tasks = StageTasks(
            stage,
            replica=holder[0],
            is_last=is_last,
            course=self._course,
            weights=self._weights,
            parcels=parcels,
            read_batch=self._loaded.reader(holder, own.modules),
            gradients=gradients,
            before_evaluation=self._buffers_of_first(holder, part),
            publish=publish if holder[0] == 0 else None,
            device=self._device,
            skips_nonfinite=self._spec.strategy.skip_nonfinite,
            samples_of=functools.partial(sample_numbers, self._train, self._spec.job.seed),
            parts=parts,
        )
        if self._saved is not None:
            stage_tasks.go_on(self.attributes[holder], self._saved.modes(holder.replica))
        names = dict(zip(map(id, parameters), self._names, strict=True))
        if self._memory is None and not self._course.itinerary.forward_only:
            self.own_updates[holder.stage] = self._own_update(own, names, homes, publish, holder.stage)
        if holder.replica == 0:
            own_update = self.own_updates.get(holder.stage)
            trained = self._in_buckets if own_update is None else own_update.trained()
            self.shown[holder.stage] = Shown(part, names, trained, is_asked=own.workload.on_epoch is not None)

    def _own_update(
        self, own: OwnPart, names: Mapping[int, str], homes: Homes, publish: Callable[[], None], stage: int
    ) -> StageUpdate:
        update = StageUpdate(
            own.workload,
            own.part.parameters(),
            names,
            reports=stage == self._view.last_updated_stage,
            homes=homes,
            drawing=drawing_of(self._view, self._device, self._spec.job.seed),
            value=self._course.measured,
            digests=Digests() if self._spec.strategy.verify == "digest" else None,
            publish=lambda iteration: publish() if self._course.ends_training(iteration) else None,
        )
        if self._saved is not None:
            update.restore(self._saved)
        return update

    def _publish(self, stage: int, homes: Homes, publish: Callable[[], None]) -> None:
        self.shown[stage].check()
        homes.bring_back()
        publish()

    def _stage(self, plan: StagePlan, own: OwnPart, parcels: StageParcels, parts: ForwardParts) -> Stage:
        how: Any = {
            "seed": self._spec.job.seed,
            "recompute": self._view.recompute,
            "copies_input": plan.copies_input,
            "precision": self._spec.strategy.precision,
            "device": self._device,
            "seeds_others": self._view.seeds_others,
            "parts": parts,
        }
        part, skipped = own.part, own.skipped
        if isinstance(part, UnitPart):
            return UnitStage(part.units, functions=own.workload.functions, **how)
        assert isinstance(part, CallPart)
        assert skipped is not None
        cut = CutStep(
            part.model,
            begins=plan.begins,
            ends=plan.ends,
            own=part.names,
            receives=parcels.received,
            sends=[value.name for value in parcels.sent],
            skipped=skipped,
        )
        self.cuts.append(cut)
        differentiable = [number in parcels.returned for number in range(len(parcels.received))]
        return CutStage(own.workload, part, cut, differentiable=differentiable, draws=self._view.draws, **how)

    def _restore(self, holder: Holder, saved: Saved) -> None:
        """Where it is: before anything of it has moved, or behind that."""
        with torch.no_grad():
            for name, parameter in self._named[holder].items():
                if (values := saved.values(name, parameter)) is not None:
                    parameter.copy_(values)
            restore_buffers(self._parts[holder], self.attributes[holder].with_buffers, saved.buffers(holder.replica))
            self.attributes[holder].restore(saved.attributes(holder.replica))

    @property
    def can_rewind(self) -> bool:
        """Whether each parameter has a place of its own."""
        return not self._windows

    def fits(self, saved: Saved) -> bool:
        """Whether training has left buffers and attributes that can take what was saved."""
        for holder, part in self._parts.items():
            now, theirs = part.buffers(), saved.buffers(holder.replica)
            if now.keys() != self._buffers[holder] or not all(
                name in theirs and theirs[name].shape == own.shape and theirs[name].dtype is own.dtype
                for name, own in now.items()
            ):
                return False
        return all(own.fits(saved.attributes(holder.replica)) for holder, own in self.attributes.items())

    def rewind(self, saved: Saved) -> None:
        """To the first iteration of the course, with what it `fits`. No lane of any worker runs: memory is shared."""
        for holder, part in self._parts.items():
            self._restore(holder, saved)
            for parameter in part.parameters():
                parameter.grad = None
            if holder.replica == 0:
                self.shown[holder.stage].begin()
            self.stages[holder].rewind()
            self.stages[holder].go_on(self.attributes[holder], saved.modes(holder.replica))
        for memory in self.memories.values():
            memory.rewind()
        for own in self.own_updates.values():
            own.rewind()
            own.restore(saved)
        if self._memory is not None and self.updates is not None:
            self._memory.rewind()
            self.updates.rewind()
            self.updates.restore(saved, self._names, self._course.iteration(self._course.begins))

    def hold(self, task: Task, iteration: Iteration) -> Held:
        """What a SNAPSHOT copies, as it is now."""
        held = Held()
        if task.owner is not None:
            assert self.updates is not None
            self.updates.hold_owned(task.owner, held, self._names, iteration)
            return held
        held.replica = task.holder.replica
        held.buffers = self._parts[task.holder].buffers()
        held.add_attributes(self.attributes[task.holder])
        if task.holder.replica == 0:
            self.shown[task.holder.stage].hold(held)
        if self.updates is not None:
            self.updates.hold_own(task.holder, held, self._names, iteration)
        else:
            self.own_updates[task.holder.stage].hold(held)
        return held

    def versions(self) -> tuple[int, ...]:
        """Of the parameters of all stages, as autograd counts what changes them; updates do not count."""
        return tuple(each._version for named in self._named.values() for each in named.values())

    def updates_by(self, task: Task) -> bool:
        """Whether what is updated here is what the SNAPSHOT copies, and not a replica's buffers alone."""
        return task.owner is not None or self.updates is None

    def check(self, task: Task, iteration: Iteration) -> None:
        """That what a SNAPSHOT has copied was as the updates had left it. Errors: StateCorrupted."""
        if task.owner is not None:
            assert self.updates is not None
            self.updates.check_owned(task.owner, iteration)
        elif self.updates is None:
            self.own_updates[task.holder.stage].check()

    def _place_in_buckets(self, holder: Holder, parameters: list[nn.Parameter]) -> StageGradients:
        assert self._memory is not None
        replica = self._view.replicas[holder[0]]
        window = self._window(holder[0])
        memory = self.memories[holder] = ReplicaMemory(
            self._memory,
            self._course,
            holder,
            parameters,
            is_private=replica.private,
            is_device=replica.device == "gpu",
            writes=holder[0] == 0,
            device=self._device,
            window=window,
        )
        return StageGradients(
            self._memory,
            holder,
            memory.held_parameters(),
            memory.gradients,
            lambda bucket: self._post_gradient(holder, bucket),
            taken_over=window is not None,
        )

    def _window(self, replica: int) -> LayerWindow | None:
        plan = self._view.replicas[replica]
        if plan.working_window is not None and replica not in self._windows:
            assert self._memory is not None
            self._windows[replica] = LayerWindow(
                self._memory, replica, num_layers=plan.num_stages, num_places=plan.working_window, device=self._device
            )
        return self._windows.get(replica)

    def _state_beside_buckets(self, own: ModelPart) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in own.named_state() if id(tensor) not in self._in_buckets]

    def _state_arena(self, holder: Holder, state: list[tuple[str, torch.Tensor]]) -> Arena:
        """Found by peers as "state-REPLICA-STAGE"."""
        return self._directory.create(f"state-{holder[0]}-{holder[1]}", Layout.of(state))

    def _buffers_of_first(self, holder: Holder, own: ModelPart) -> Callable[[], None]:
        """Other replicas evaluate with the first one's buffers; while they train, each has its own."""
        buffers = {name for name, tensor in own.named_state() if not isinstance(tensor, nn.Parameter)}
        if holder[0] == 0 or not buffers:
            return lambda: None
        theirs: dict[str, torch.Tensor] = {}
        for stage in self._view.first_stages:
            arena = self._state_arena(stage.holder, self._state_beside_buckets(part_of(self._workload, stage)))
            theirs |= {name: tensor for name, tensor in arena.items().items() if name in buffers}

        def read() -> None:
            now = dict(own.named_state())
            for name in buffers:
                copy_buffer(name, now[name], theirs[name], self._device)

        return read

    def update_needed(self, task: Task) -> Callable[[Iteration], int] | None:
        """For UP to a stale replica: the iteration whose update makes the version that is needed next."""
        if task.kind is not Kind.UP or not self._view.replicas[task.holder.replica].staleness:
            return None
        memory, course = self.memories[task.holder], self._course
        return lambda iteration: course.update_of(memory.next_version(iteration))
