"""Divided: whether a batch comes to the same whole and in parts, as replicas have it, run twice, or several at a time;
which only running it tells.

    four batches of an epoch of training, the first and the last among them, and as many of validation
        whole      values, gradients   ┐  equal but for rounding; no random numbers drawn, of which parts have others;
        in parts   values, gradients   ┘  nothing kept from one forward to the next, which parts would change twice

So it is for a loss and metrics that are means over samples, and for modules that look at each sample by itself. It is
not for a sum, a mean over tokens without `Workload.weight`, negatives from the batch, batch normalisation, dropout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.spec.job_spec import JobSpec
from weft.spec.strategy import Strategy
from weft.workers.devices.device import Accelerator, Device
from weft.workers.inspection.ran import first_batch
from weft.workers.snapshots.stage_attributes import numbers_of
from weft.workers.updates.optimizer_state import is_elementwise
from weft.workload.code.first_epoch import set_mode
from weft.workload.data.batches import Batches
from weft.workload.data.tree import build
from weft.workload.optimizer import make_optimizer
from weft.workload.randomness import Movements, generator_states, seed_loading
from weft.workload.step import step_source, step_values, training_step, validation_step
from weft.workload.units import is_cut_by_calls
from weft.workload.workload import Workload, kind_of

BATCHES: Final = 4  # arbitrary: each takes as long as two steps, and one alone may have no padding
PART: Final = 3  # of a batch the first has a third: in halves a weight that is not the samples' might not show
DRAWS: Final = 6  # arbitrary: in one of 2,000 a loss of two values, drawn evenly, seems to be another in parts
ROUNDING: Final = 3e-4  # of the largest element: sums of float32 differ by 1e-6 to 1e-5 of it, another loss by 1e-2

_Outcome = dict[str, torch.Tensor | None]


def why_undivided(workload: Workload, spec: JobSpec) -> str | None:
    """As a reason; None where batches may be divided. workload: a new one, nobody can use it afterwards."""
    if spec.job.mode != "train":
        return "job.mode = 'forward' reports what each microbatch comes to"
    batches = Batches.of_job(workload, spec.job)
    if batches.streams:
        return f"the items of Workload.{batches.streams[0]} are drawn one after another"
    if not is_cut_by_calls(workload) and any(each.collate is not None for each in batches.sources().values()):
        return "collate may give parts of a batch other shapes than slots have"  # padded to their own longest sample
    optimizer = make_optimizer(workload.optimizer, workload.model.parameters())
    if optimizer is not None and not is_elementwise(optimizer):
        return f"{kind_of(optimizer)} may look at several parameters at once"
    trial = _Trial(workload, spec, batches)
    try:
        return next(filter(None, map(trial.why_different, _looked_at(batches, spec.job.batch_size))), None)
    except Exception as error:  # whatever the user's code raises for a part, which the job itself need not have
        return f"in parts they raise {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"


def run_again(
    workload: Workload, spec: JobSpec, batches: Batches, size: int, device: Device, specs: Sequence[JobSpec]
) -> dict[str, Any]:
    """What the host finds out by running a step again, where some plan may do so, or have several under way."""
    again = any(each.strategy.recompute for each in specs)
    if not isinstance(device, Accelerator):
        again |= len(specs) > 1 or any(each.strategy.is_auto or each.strategy.may_have_replicas for each in specs)
    several = device.torch.type == "cpu" and any(_may_hold_several(each.strategy) for each in specs)  # a GPU's is large
    divides = (
        not isinstance(device, Accelerator) and size > 1 and any(sum(each.strategy.division[1]) > 1 for each in specs)
    )
    return {
        **(_kept(workload, spec, batches, size) if again else {}),
        "mixes_microbatches": several and _mixes_microbatches(workload, spec, batches, size),
        "loss_in_parts": _loss_in_parts(workload, spec, batches, size) if divides else None,
    }


def _loss_in_parts(workload: Workload, spec: JobSpec, batches: Batches, size: int) -> list[float] | None:
    """What the loss of a batch comes to whole and in two parts, where these differ: it is no mean over samples, or over
    what `Workload.weight` counts. Without dropout, and with the statistics that normalisations have kept. Where other
    numbers are drawn for parts, both are looked at with several draws, and must lie further apart than these."""
    try:
        for multiple in (1, 2):  # a `collate` may refuse odd numbers of samples (timm's mixup)
            with suppress(Exception), _buffers_as_before(workload.model):  # a step may get something else there
                return _told_in_parts(_Trial(workload, spec, batches), size, multiple)
    finally:
        set_mode(workload.model)
    return None


def _told_in_parts(trial: _Trial, size: int, multiple: int) -> list[float] | None:
    iteration, _ = first_batch(size, training=True)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    while not found or (trial.draws and len(found) < DRAWS and _are_apart(found)):
        found.append(trial.evaluated(iteration, multiple, draw=len(found)))
    both = found[0]
    is_told = all(map(math.isfinite, both)) and not _is_close(*both, trial.rounding["loss"]) and _are_apart(found)
    return [*map(float, both)] if is_told else None


def _are_apart(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    wholes, parts = (torch.stack(each) for each in zip(*found, strict=True))
    gap = torch.maximum(wholes.min() - parts.max(), parts.min() - wholes.max())
    return bool(gap > 2 * torch.maximum(wholes.max() - wholes.min(), parts.max() - parts.min()))


def _may_hold_several(strategy: Strategy) -> bool:
    """Whether a stage may have several microbatches under way, that are not computed again."""
    one_by_one = strategy.recompute or (strategy.schedule in ("1f1b", "model-parallel") and not strategy.may_be_cut)
    return max(strategy.microbatch_counts) > 1 and not one_by_one


def _kept(workload: Workload, spec: JobSpec, batches: Batches, size: int) -> dict[str, bool]:
    """Whether a step that is run again, with the parameters, buffers and random numbers that it began with, comes to
    another loss: it has left something in an attribute, in a global or in a generator of its own. And whether it does
    not with the numbers in attributes that it began with."""
    iteration, first_part = first_batch(size, training=True)
    trial = _Trial(workload, spec, batches)
    second_part = [Part(1, size, size)] if 2 * size <= batches.num_train else []  # with the first it may begin anew

    def loss(part: Part) -> torch.Tensor:
        set_mode(workload.model)
        with _buffers_as_before(workload.model):
            return trial.loss(iteration, part).nan_to_num()

    keeps, numbers_alone = False, True
    try:
        for part in (first_part, *second_part):
            set_mode(workload.model)
            with _numbers_as_before(workload.model):
                first = loss(part)
                differs = not torch.equal(first, loss(part))
            keeps = keeps or differs
            numbers_alone = numbers_alone and (not differs or torch.equal(first, loss(part)))
    except Exception:  # what the user's code raises is told where the job itself calls it
        pass
    return {"keeps_elsewhere": keeps, "keeps_numbers": keeps and numbers_alone}


def _mixes_microbatches(workload: Workload, spec: JobSpec, batches: Batches, size: int) -> bool:
    """Whether a microbatch's backward comes to other gradients where the next one's forward has run since: it takes
    what a forward has left in an attribute, as reversible layers may do."""
    total = min(2 * size, batches.num_train)
    iteration, _ = first_batch(total, training=True)
    parts = [Part(0, 0, total - total // 2), Part(1, total - total // 2, total // 2)]
    trial = _Trial(workload, spec, batches)
    try:
        if not trial.runs_code_in_backward(iteration, parts[0]):
            return False
        alone, between = (trial.gradients(iteration, parts, keeps=keeps) for keeps in (1, 2))
        return not _are_close(alone, between) and _are_close(alone, trial.gradients(iteration, parts, keeps=1))
    except Exception:  # as above
        return False


@contextmanager
def _buffers_as_before(model: nn.Module) -> Iterator[None]:
    """Once it is over."""
    slots = [
        (each, key, value) for each in model.modules() for key, value in each._buffers.items() if value is not None
    ]
    kept = [value.clone() for _, _, value in slots]
    try:
        yield
    finally:
        for (module, key, value), before in zip(slots, kept, strict=True):
            module._buffers[key] = value.copy_(before)


@contextmanager
def _numbers_as_before(model: nn.Module) -> Iterator[None]:
    """Once it is over: those in attributes, which a module may count in its forward."""
    kept = [(vars(each), numbers_of(vars(each))) for each in model.modules()]
    try:
        yield
    finally:
        for now, numbers in kept:
            now.update(numbers)


def _looked_at(batches: Batches, batch_size: int) -> Iterator[Iteration]:
    for training, num_samples in ((True, batches.num_train), (False, batches.num_validation)):
        last = max(0, num_samples - 1) // batch_size
        for start in sorted({last * part // (BATCHES - 1) * batch_size for part in range(BATCHES)}):
            size = min(batch_size, num_samples - start)
            if size > 1:
                yield Iteration(index=0, training=training, epoch=0, step=0, start=start, size=size, learns=training)


class _Hooking(TorchFunctionMode):
    """Notes whether a tensor gets a hook, or what is saved for a backward does (torch.utils.checkpoint)."""

    has_hooked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_hooked |= func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        entering: Any = saved_tensors_hooks.__enter__

        def noted(hooks: saved_tensors_hooks) -> Any:
            self.has_hooked = True
            return entering(hooks)

        replaced: Any = saved_tensors_hooks
        replaced.__enter__ = noted
        try:
            with self:
                yield
        finally:
            replaced.__enter__ = entering


class _Trial:
    """Runs batches of a workload, whole and in parts."""

    def __init__(self, workload: Workload, spec: JobSpec, batches: Batches) -> None:
        self._workload = workload
        self._model = workload.model
        self._seed = spec.job.seed
        self._batches = batches
        self.draws, self._draw = False, 0
        self.rounding: defaultdict[str, float] = defaultdict(lambda: ROUNDING)  # of what is reported, by its dtype

    def why_different(self, iteration: Iteration) -> str | None:
        self._batches.order(iteration)  # a sampler may draw
        first = max(1, iteration.size // PART)
        versions, buffers = self._versions(), self._buffers()
        whole = self._run(iteration, [Part(0, 0, iteration.size)])
        changed = [name for name, version in self._versions().items() if version != versions.get(name)]
        changed += [name for name, value in self._buffers().items() if not _is_same(value, buffers.get(name))]
        parts = self._run(iteration, [Part(0, 0, first), Part(1, first, iteration.size - first)])
        if self.draws:
            return "random numbers are drawn, and parts of a batch draw others than the whole"
        if changed:
            return f"{changed[0]!r:.80} changes with each forward"
        differs = next((name for name, value in whole.items() if not self._is_close(name, value, parts)), None)
        what = "training" if iteration.learns else "validation"
        return None if differs is None else f"the {differs} of a batch of {what} is another in parts"

    def _is_close(self, name: str, value: torch.Tensor | None, parts: _Outcome) -> bool:
        return _is_close(value, parts.get(name), self.rounding[name])

    def evaluated(self, iteration: Iteration, multiple: int, *, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a batch whole and in two parts, of a model in eval mode. multiple: of so many samples the first
        part has some. draw: which, where random numbers are."""
        set_mode(self._model, False)
        self._draw = draw
        first = max(1, iteration.size // PART // multiple) * multiple

        def loss(*parts: Part) -> torch.Tensor:
            value = self._weighed(iteration, parts, differentiates=False).get("loss")
            return torch.zeros(()) if value is None else value  # none where nothing counts

        return loss(Part(0, 0, iteration.size)), loss(Part(0, 0, first), Part(1, first, iteration.size - first))

    def loss(self, iteration: Iteration, part: Part) -> torch.Tensor:
        return self._values(self._batch(iteration, part), part, 1.0, learns=True, differentiates=False)["loss"]

    def gradients(self, iteration: Iteration, parts: Sequence[Part], *, keeps: int) -> _Outcome:
        """Of the losses of parts, added up. keeps: so many of them at a time, from forward to backward. The parameters
        have their own gradients again behind it."""
        before = [(each, each.grad) for each in self._model.parameters()]
        set_mode(self._model)
        self._forget_gradients()
        under_way: list[torch.Tensor] = []
        with _buffers_as_before(self._model), _numbers_as_before(self._model):
            for part in parts:
                under_way.append(self._loss(iteration, part))
                if len(under_way) == keeps:
                    torch.autograd.backward(under_way.pop(0))
            for loss in under_way:
                torch.autograd.backward(loss)
        found: _Outcome = {name: each.grad for name, each in self._model.named_parameters()}
        for parameter, gradient in before:
            parameter.grad = gradient
        return found

    def runs_code_in_backward(self, iteration: Iteration, part: Part) -> bool:
        """Of the user's, or of a library's in Python: a function's, a hook's."""
        set_mode(self._model)
        hooking = _Hooking()
        with _buffers_as_before(self._model), _numbers_as_before(self._model), hooking.watching():
            ahead: list[Any] = [self._loss(iteration, part).grad_fn]
        seen: set[Any] = set()
        while ahead:
            node = ahead.pop()
            if node is not None and node not in seen:
                seen.add(node)
                ahead += [following for following, _ in node.next_functions]
        of_modules = (each._backward_hooks or each._backward_pre_hooks for each in self._model.modules())
        return hooking.has_hooked or any(isinstance(node, BackwardCFunction) for node in seen) or any(of_modules)

    def _loss(self, iteration: Iteration, part: Part) -> torch.Tensor:
        batch, step = self._batch(iteration, part), training_step(self._workload)
        self._seeded(part)
        return step_values(step(self._model, batch), step_source(self._workload, learns=True), learns=True)["loss"]

    def _forget_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Of each parameter, which tensor it is and how often it was written to."""
        return {name: (id(tensor), tensor._version) for name, tensor in self._model.named_parameters()}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """As they are: kernels of normalisations write to them without counting it."""
        return {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    def _run(self, iteration: Iteration, parts: Sequence[Part]) -> _Outcome:
        """What is reported, and the gradients: of each part by its weight, added up."""
        set_mode(self._model, iteration.learns)
        self._forget_gradients()
        outcome = self._weighed(iteration, parts)
        if not iteration.learns:
            return outcome
        return outcome | {f"gradient of {name}": each.grad for name, each in self._model.named_parameters()}

    def _weighed(self, iteration: Iteration, parts: Sequence[Part], *, differentiates: bool = True) -> _Outcome:
        """What is reported: of each part by its weight, added up."""
        batches = [self._batch(iteration, part) for part in parts]
        weighed = zip(parts, batches, strict=True)
        weights = [self._batches.weight(iteration, part, batch) for part, batch in weighed]
        outcome: _Outcome = {}
        for batch, part, weight in zip(batches, parts, weights, strict=True):
            if weight == 0:  # nothing in it counts
                continue
            fraction = weight / sum(weights)
            with nullcontext() if differentiates else _numbers_as_before(self._model):
                values = self._values(batch, part, fraction, learns=iteration.learns, differentiates=differentiates)
            for name, value in values.items():
                before = outcome.get(name)
                outcome[name] = value if before is None else before + value
        return outcome

    def _batch(self, iteration: Iteration, part: Part) -> Any:
        seeded = self._seeded(part)
        if not is_cut_by_calls(self._workload):
            batch: Any = self._batches.load(iteration, part)
        else:
            tensors, skeleton = self._batches.batch(iteration, part)
            batch = build(skeleton, tensors)
        self.draws |= generator_states() != seeded
        return batch

    def _values(
        self, batch: Any, part: Part, fraction: float, *, learns: bool, differentiates: bool = True
    ) -> Mapping[str, torch.Tensor]:
        step = training_step(self._workload) if learns else validation_step(self._workload)
        seeded = self._seeded(part)
        with torch.set_grad_enabled(learns):
            values = step_values(step(self._model, batch), step_source(self._workload, learns=learns), learns=learns)
        if learns and differentiates:
            (values["loss"] * fraction).backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        self.draws |= generator_states() != seeded
        for name, value in values.items():
            if value.is_floating_point():
                self.rounding[name] = max(self.rounding[name], math.sqrt(torch.finfo(value.dtype).eps))
        return {name: value.detach().double() * fraction for name, value in values.items()}

    def _seeded(self, part: Part) -> list[object]:
        seed_loading(self._seed, self._draw, part.number)
        Movements.forget()
        return generator_states()


def _is_same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _is_close(one: torch.Tensor | None, other: torch.Tensor | None, least: float = ROUNDING) -> bool:
    """least: the difference that is rounding in any case."""
    if one is None or other is None:
        return one is other
    one, other = one.detach().to_dense(), other.detach().to_dense()
    rounding = max(least, math.sqrt(torch.finfo(one.dtype).eps))
    largest = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=rounding * largest + torch.finfo(one.dtype).tiny, equal_nan=True)


def _are_close(some: _Outcome, others: _Outcome) -> bool:
    return all(_is_close(value, others.get(name)) for name, value in some.items())
