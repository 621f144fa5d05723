"""Asked: `Workload.on_epoch`, as the step knows it that runs to its end in this process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from weft.plan.buckets import Holder
from weft.plan.course import Course
from weft.plan.plan import StagePlan
from weft.plan.worker_view import WorkerView
from weft.workers.compute.model_part import CallPart, OwnPart
from weft.workers.epochs.changes import places_from, take
from weft.workers.epochs.idle_optimizer import IdleOptimizer
from weft.workers.epochs.options import take_options
from weft.workers.epochs.whole_model import WholeModel
from weft.workers.snapshots.attributes import Attributes
from weft.workers.snapshots.plain import unpacked
from weft.workers.snapshots.saved import Saved
from weft.workload.code.beside_model import modules_beside
from weft.workload.code.places import Variables, place_of
from weft.workload.code.variables import VariableSearch, variables_of
from weft.workload.workload import EpochFunction, Workload


@dataclass(slots=True)
class Asked:
    """Stages of one worker may have a workload each, with variables and a model of its own."""

    function: EpochFunction | None
    workload: Workload | None  # whose function it is, until it has its optimizer
    names: Sequence[str]
    whole: WholeModel
    holders: Collection[Holder]  # which have its workload
    is_here: bool  # it is this process that is asked
    updating: Attributes  # of a worker that has no stage: what optimizer and scheduler go by
    optimizer: IdleOptimizer | None = None  # where it is asked, and nothing is updated here

    @classmethod
    def of(cls, view: WorkerView, owned: Sequence[OwnPart], workload: Workload, *, on_host: bool) -> Asked:
        """owned: of the worker's stages, before any of them moves. workload: where it has none of the first replica."""
        pairs = [(stage, own.workload) for stage, own in zip(view.stages, owned, strict=True) if stage.replica == 0]
        asked = max(pairs, key=lambda pair: pair[0].stage)[1] if pairs else workload
        own = [stage for stage, its in pairs if its is asked]
        whole = WholeModel(asked, view, own, on_host=on_host)
        holders = [stage.holder for stage in own]
        is_here = Holder(0, view.replicas[0].num_stages - 1) in holders
        updating = Attributes({} if owned or asked.on_epoch is None else _of_updates(asked))
        return cls(asked.on_epoch, asked, asked.epoch_metrics, whole, holders, is_here, updating)

    def take(self, changes: bytes, attributes: Mapping[Holder, Attributes]) -> None:
        """What it has changed where it was asked, as `ToldChanges` has packed that. attributes: of the stages here."""
        message = unpacked(changes)
        for holder, own in attributes.items():
            if not (self.is_here and holder in self.holders):
                take(message, own)
        if not attributes:
            take(message, self.updating)
        take_options(message["options"])

    def have_optimizer(self, course: Course, *, updates: bool) -> None:
        """While the model is as it was built, but for memory. updates: anything here has one."""
        workload, self.workload = self.workload, None
        if self.is_here and workload is not None and self.function is not None and not updates:
            self.optimizer = IdleOptimizer(workload, course)

    def go_on(self, saved: Saved | None) -> None:
        """With what nobody else here does."""
        self.whole.go_on(None if saved is None else saved.modes(0))
        if saved is not None:
            self.updating.restore(saved.attributes(0))
        if self.optimizer is not None:
            self.optimizer.go_on(saved)


def attributes_of(plan: StagePlan, own: OwnPart, view: WorkerView) -> Attributes:
    """Of a stage, before anything of it has moved."""
    return Attributes({**own.part.modules(), **own.variables}, _elsewhere(plan, own, view))


def _of_updates(workload: Workload) -> dict[str, Variables]:
    places = places_from((workload.optimizer, workload.scheduler))
    found = variables_of(workload).items()
    return {name: own for name, own in found if not places.isdisjoint(place_of(own, key) for key in own)}


def _elsewhere(plan: StagePlan, own: OwnPart, view: WorkerView) -> dict[str, nn.Module]:
    """By name, modules that the stage does not run and its process has all the same, where `on_epoch` may have changed
    attributes of them: all of a model that is cut by its own forward and what its step refers to, or of one that the
    function has hold of."""
    function, replicas = own.workload.on_epoch, view.replicas
    if function is None or (len(replicas) == 1 and replicas[0].num_stages == 1):
        return {}
    is_last = plan.holder == Holder(0, replicas[0].num_stages - 1)
    its = dict(own.workload.model.named_modules()) | modules_beside(own.workload)
    if not isinstance(own.part, CallPart):
        found = VariableSearch({"Workload.on_epoch": function}, into_modules=False).models if is_last else []
        if not set(map(id, its.values())).intersection(map(id, found)):
            return {}
    modules = own.part.modules()
    return {name: module for name, module in its.items() if name not in modules}
