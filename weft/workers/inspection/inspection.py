"""Inspection: what the planner has to know about a workload, found out by running it on one worker.

One worker inspects, whatever the job's kinds of replicas, with a new model for each kind, which is thrown away:

    CPU replicas alone       a CPU worker               units, load, update, copies
    with GPU replicas        the first GPU's worker     units and update on its device; load and copies on its host,
                                                        and what else the host will do: its units, its updates

A GPU's worker computes on the host with as many threads as a CPU worker, so it may speak for both; two that inspected
at the same time would slow each other down, and an answer that comes in two parts can be lost by halves. The host runs
the model only where a replica will: of one that only GPUs compute it need not even have memory for the activations.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from weft.machine.free_memory import free_memory
from weft.plan.itinerary import Itinerary
from weft.quantities import duration, size
from weft.spec.candidates import candidates, is_undecided, looked_at, on_one_worker, with_parts
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import ONE_CORE, Host
from weft.workers.compute.stage import computing_in
from weft.workers.devices.device import Accelerator, Device
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.cut_facts import inspect_batches
from weft.workers.inspection.divided import run_again, why_undivided
from weft.workers.inspection.known import NOTHING, Known
from weft.workers.inspection.pairs import inspect_pairs
from weft.workers.inspection.sizes import (
    computes_on,
    largest_of_training,
    most_with_room,
    sizes_of,
    sizes_of_training,
    those_left,
    with_room,
    without_refused,
)
from weft.workers.inspection.state_facts import parameter_facts
from weft.workers.inspection.times import copy_bytes_per_second
from weft.workers.inspection.update_times import GradientSample, lost_beside, unsaved, update_facts, update_times
from weft.workers.snapshots.step_memory import LostAttributes
from weft.workers.updates.sharded_optimizer import is_elementwise
from weft.workload.aliases import aliases_of, check_aliases, referred_elsewhere
from weft.workload.building import digests_of
from weft.workload.changes import ParameterChanges
from weft.workload.code.freezing import trainable
from weft.workload.compiling.ahead import compile_ahead, note_calls, noted_calls
from weft.workload.compiling.compiled import compiled_modules
from weft.workload.data.batches import Batches
from weft.workload.data.given_batches import is_weighed
from weft.workload.data.resident import can_be_resident
from weft.workload.optimizer import hook_of, make_optimizer, nothing_to_train, options_of
from weft.workload.units import enter_mode, is_cut_by_calls
from weft.workload.workload import Workload, WorkloadError, make_scheduler, scheduler_facts

_SECONDS = ("forward_seconds", "backward_seconds", "small_forward_seconds", "small_backward_seconds")

# Of a job that gives no strategy, which is only looked at twice where that is little beside its training:
WORTH_SECONDS = 10.0  # of training on one worker
WORTH_TIMES = 10  # what the look is thought to take
ROOM = 0.5  # of the free memory, which replicas may have between them with what the job's function makes in each
LOADS, LOOKS = 3, 40  # it takes as long as so many calls of the job's function and so many steps


def inspect_job(
    load: Callable[[], Workload], spec: JobSpec, device: Device, host: Host = ONE_CORE, known: Known = NOTHING
) -> dict[str, Any]:
    """The wire form of weft.plan.inspection.Inspection, for all kinds of replicas of the job, and of those that it may
    come to have.

    load: makes the workload anew: a module may keep what it has computed on one device. device: the worker's own. host:
    the daemon's workers. known: what was found out before. Errors: WorkloadError, and whatever the user's code raises.
    """
    if is_undecided(spec):
        return _by_default(load, spec, device, host, known)
    own, specs = candidates(spec, host), looked_at(spec, host)
    if spec.strategy.is_auto:
        return _of_those_left(load, spec, with_parts(spec, host), device, known)
    if len(specs) > len(own):
        with contextlib.suppress(Exception):  # a model may be for devices alone: what its own strategy raises is told
            return _of_many(load, spec, specs, device, known)
    return _of_all_devices(load, spec, own, device, known)


def _of_those_left(
    load: Callable[[], Workload], spec: JobSpec, specs: Sequence[JobSpec], device: Device, known: Known
) -> dict[str, Any]:
    """Of candidates. Some may have microbatches of a size that the user's code raises for, as batch norm does for one
    sample: where there are others, these are left out."""
    try:
        return _of_many(load, spec, specs, device, known)
    except Exception as error:
        first = error
    used = device if computes_on(specs, "gpu") else HostDevice()  # out of `except`: what it raises is told alone
    refused, left = those_left(load(), spec, specs, used)
    if not (refused and left):
        raise first
    del first  # and what its frames hold
    return _of_many(load, spec, left, device, known) | {"refused_sizes": refused}


def _of_many(
    load: Callable[[], Workload], spec: JobSpec, specs: Sequence[JobSpec], device: Device, known: Known
) -> dict[str, Any]:
    facts = _of_all_devices(load, spec, specs, device, known)
    return facts | {"timed_size": max(size for size, _ in facts["input"]["shapes"])}


def _by_default(
    load: Callable[[], Workload], spec: JobSpec, device: Device, host: Host, known: Known
) -> dict[str, Any]:
    """Of a job that gives no strategy: what it needs on one worker; and where it is long enough for a second look, what
    others need, too. Whatever goes wrong in that look, the job goes on without it."""
    alone, specs = on_one_worker(spec), candidates(spec, host)
    began, before = time.perf_counter(), psutil.Process().memory_info().rss
    workload = load()
    load_seconds, loaded = time.perf_counter() - began, psutil.Process().memory_info().rss - before
    facts = inspect(workload, alone, HostDevice(), known=known)
    why = _why_not_worth_it(alone, facts, load_seconds) if len(specs) > 1 else "there is no other"
    if why is None:
        try:
            room = None if loaded * host.workers <= free_memory().host * ROOM else _no_room(loaded)
            return _of_choices(load, alone, specs, room, device, known.quiet())
        except Exception as error:  # of a size of microbatch that the job itself need never have
            why = f"a look at others raised {_named(error)}"
    return facts | {"unchosen": why}


def _why_not_worth_it(alone: JobSpec, facts: Mapping[str, Any], load_seconds: float) -> str | None:
    step_seconds = facts["update_seconds"] + sum(u["forward_seconds"] + u["backward_seconds"] for u in facts["units"])
    seconds = step_seconds * Itinerary.of_job(alone.job, facts["num_train"], facts["num_validation"]).steps
    least = max(WORTH_SECONDS, WORTH_TIMES * (LOADS * load_seconds + LOOKS * step_seconds))
    if seconds >= least:
        return None
    return f"some {duration(seconds)} of training are too few to look for another (from {duration(least)} on)"


def _of_choices(
    load: Callable[[], Workload],
    alone: JobSpec,
    specs: Sequence[JobSpec],
    no_room: str | None,
    device: Device,
    known: Known,
) -> dict[str, Any]:
    """specs: what there is to choose among. no_room: for several replicas, as a reason."""
    workload = load()
    batches = Batches.of_job(workload, alone.job)
    sizes = sizes_of([alone], batches)
    told = known.facts(
        workload,
        batches,
        alone,
        (),
        sizes,
        digests_of(workload.model),
        HostDevice(),
        lambda: {"undivided": why_undivided(workload, alone)},
    )
    undivided = no_room or told["undivided"]
    if undivided:
        specs = [each for each in specs if each.strategy.division == alone.strategy.division]
    return _of_many_or_on_host(load, alone, specs, device, known) | {"undivided": undivided}


def _of_many_or_on_host(
    load: Callable[[], Workload], alone: JobSpec, specs: Sequence[JobSpec], device: Device, known: Known
) -> dict[str, Any]:
    """A model may be for the host alone, or too large for a device."""
    on_host = [each for each in specs if not computes_on([each], "gpu")]
    why = None
    if len(on_host) < len(specs):
        try:
            return _of_those_left(load, alone, specs, device, known)
        except Exception as error:
            why = f"a look at them raised {_named(error)}"
    return _of_those_left(load, alone, on_host, device, known) | {"without_gpus": why}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"


def _no_room(loaded: int) -> str:
    return f"each replica would have data and a model of its own, {size(loaded)}, and memory is short"


def inspect_threaded(
    load: Callable[[], Workload], spec: JobSpec, host: Host, facts: Mapping[str, Any], known: Known = NOTHING
) -> dict[str, Any] | None:
    """The wire form of weft.plan.inspection.Threaded: what the host takes with the threads that torch has now. None
    where the job can go on without. facts: what `inspect_job` has returned."""
    threaded = [each for each in looked_at(spec, host) if each.strategy.threads is not None]
    if facts["crowded"] is not None:  # so that it is timed with the same microbatch
        threaded = with_room(with_parts(spec, host), facts)
    if not (threaded := without_refused(threaded, facts)):
        return None
    if not is_undecided(spec):
        return _threaded(load, spec, threaded, known)
    with contextlib.suppress(Exception):  # as of all that nobody has asked for
        return _threaded(load, on_one_worker(spec), threaded, known.quiet())
    return None


def _threaded(load: Callable[[], Workload], spec: JobSpec, specs: Sequence[JobSpec], known: Known) -> dict[str, Any]:
    facts = inspect(load(), spec, HostDevice(), specs, known)
    return {
        "threads": torch.get_num_threads(),
        "seconds": [[unit[name] for name in _SECONDS] for unit in facts["units"]],
        "update_seconds": facts["update_seconds"],
        "copy_bytes_per_second": facts["copy_bytes_per_second"],
    }


def _of_all_devices(
    load: Callable[[], Workload], spec: JobSpec, specs: Sequence[JobSpec], device: Device, known: Known
) -> dict[str, Any]:
    if not computes_on(specs, "gpu"):
        return inspect(load(), spec, HostDevice(), specs, known)
    with device.computing():
        on_device = inspect(load(), spec, device, specs, known)
    if not computes_on(specs, "cpu"):
        return on_device
    on_host = inspect(load(), spec, HostDevice(), with_room(specs, on_device), known)
    if on_host["most_samples"] != on_device["most_samples"]:  # both are to be timed with the same
        with device.computing():
            on_device = inspect(load(), spec, device, with_room(specs, on_host), known)
    return on_host | {
        "crowded": on_device["crowded"] or on_host["crowded"],
        "device_units": on_device["units"],
        "device_values": on_device["values"],
        "cut_problems": [*on_device["cut_problems"], *on_host["cut_problems"]],
        "device_update_seconds": on_device["device_update_seconds"],
        "loose_parameter": on_device["loose_parameter"],
        "small_size": min(on_host["small_size"], on_device["small_size"]),
    }


def inspect(
    workload: Workload, spec: JobSpec, device: Device, specs: Sequence[JobSpec] = (), known: Known = NOTHING
) -> dict[str, Any]:
    """For replicas of one kind: those that compute on the device. specs: with the strategies that it may come to have,
    where that is still to be chosen."""
    specs = specs or (spec,)
    batches = Batches.of_job(workload, spec.job)
    _check(workload, spec, batches)
    batches.check_sources(spec.strategy.loaders)
    digests = digests_of(workload.model)

    def anew() -> dict[str, Any]:
        largest = sorted({largest_of_training(each, batches.num_train) for each in specs})
        most, crowded = largest[-1], None
        if spec.strategy.is_auto:
            most, crowded = most_with_room(workload, spec, batches, largest, device)
        roomy = [each for each in specs if largest_of_training(each, batches.num_train) <= most]
        facts = _inspected(workload, spec, device, roomy, batches, sizes_of(roomy, batches), digests)
        return facts | {"most_samples": most, "crowded": crowded}

    return known.facts(workload, batches, spec, specs, sizes_of(specs, batches), digests, device, anew)


def _inspected(
    workload: Workload,
    spec: JobSpec,
    device: Device,
    specs: Sequence[JobSpec],
    batches: Batches,
    sizes: Sequence[int],
    digests: Mapping[int, int | None],
) -> dict[str, Any]:
    loose_parameter = referred_elsewhere(workload.model) if isinstance(device, Accelerator) else None
    note_calls(workload.model)
    look = inspect_batches if is_cut_by_calls(workload) else inspect_pairs
    learns, is_one_of_many = spec.job.mode == "train", spec.strategy.is_auto or len(specs) > 1
    optimizer = make_optimizer(workload.optimizer, workload.model.parameters()) if learns else None
    sample = GradientSample(optimizer)
    trained = sizes_of_training(specs, batches.num_train)
    aliases, changes = aliases_of(workload.model) if learns else [], ParameterChanges(workload.model)
    required, hook = trainable(workload), None if optimizer is None else hook_of(optimizer)
    attributes, options = LostAttributes(workload), options_of(optimizer)
    ran = look(workload, spec, batches, sizes, trained=trained, device=device, leave=sample.take)
    check_aliases(aliases)
    beside = attributes.of_epoch([each["name"] for each in ran.units], ran.written) if learns else {}
    steps = _step_facts(optimizer, options)
    changing = {*ran.changing, *changes.names()} if learns else set[str]()
    for unit in ran.units if sample.sparse else ():
        unit["in_place"] = True  # indices are the batch's own memory, and by the update that may have the next one
    looks = learns and not changing and not batches.streams
    again = run_again(workload, spec, batches, max(trained), device, specs) if looks else {}
    compiled_calls = _compiled_ahead(workload.model, spec, device)
    own = hook is None and _device_updates(specs, device)  # a hook may want all of the model in one place
    on_host, on_device = update_times(workload, optimizer, sample, device, host=_host_updates(specs, device), own=own)
    if hook is not None:  # it may keep a mean in parameters that nobody trains
        kept = {id(each) for each in workload.model.parameters() if not each.requires_grad} - required
        changing |= {name for name in changes.names() if id(workload.model.get_parameter(name)) in kept}
    stepped = None if (update := on_host or on_device) is None else update.stepped
    scheduler = None if optimizer is None else make_scheduler(workload.scheduler, optimizer)
    return {
        "compiled": [name for name, _ in compiled_modules(workload)] if spec.strategy.compile else [],
        "compiled_calls": compiled_calls,
        **ran.facts(),
        **_data_facts(batches),
        "load_seconds": ran.load_seconds * (len(sizes) * max(sizes) / sum(sizes) if is_one_of_many else 1.0),
        **update_facts(update),
        "device_update_seconds": None if on_device is None else on_device.seconds,
        "parameters": parameter_facts(
            workload.model, ran.users, optimizer, stepped, digests, changing, sample.sparse, required
        ),
        **steps,
        "weighted": is_weighed(workload),
        "on_epoch": learns and workload.on_epoch is not None,
        "epoch_metrics": list(workload.epoch_metrics) if learns else [],
        **scheduler_facts(workload, scheduler),
        "batch_modules": _batch_modules(workload.model, learns=learns),
        "lost_attributes": attributes.names() if learns else [],
        "loose_parameter": loose_parameter,
        **again,
        "unsaved": None if optimizer is None else unsaved(optimizer, scheduler, update),
        "copy_bytes_per_second": copy_bytes_per_second(torch.get_num_threads()),
        "lost_beside": beside | lost_beside(scheduler, update, batches.shifting()),  # last: they move on
    }


def _step_facts(optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """options: of the optimizer, before the user's step was tried."""
    return {
        "elementwise": optimizer is None or is_elementwise(optimizer),
        "step_hook": None if optimizer is None else hook_of(optimizer),
        "set_by_step": next((name for name, now in options_of(optimizer).items() if options.get(name) != now), None),
    }


def _compiled_ahead(model: nn.Module, spec: JobSpec, device: Device) -> str:
    """What compiled units were called with, as `noted_calls` tells it; their kernels are there now."""
    calls = noted_calls(model)
    precision = partial(computing_in, spec.strategy.precision, device)
    compile_ahead(model, calls, list(model.parameters()), device.torch, precision)
    return calls


def _data_facts(batches: Batches) -> dict[str, Any]:
    sources = list(batches.sources().values())
    num_bytes = None
    if all(map(can_be_resident, sources)):
        num_bytes = sum(tensor.nbytes for source in sources if (whole := source.whole) for tensor in whole[0])
    return {
        "num_train": batches.num_train,
        "num_validation": batches.num_validation,
        "streams": batches.streams,
        "endless": batches.are_endless,
        "data_bytes": num_bytes,
    }


def _check(workload: Workload, spec: JobSpec, batches: Batches) -> None:
    if batches.num_train == 0:
        raise WorkloadError("Workload.train has length 0; give at least one sample")
    if spec.job.mode == "train" and workload.validation is not None and batches.num_validation == 0:
        raise WorkloadError("Workload.validation has length 0; give at least one sample, or leave it out")
    trains = any(parameter.requires_grad for parameter in workload.model.parameters())
    if spec.job.mode == "train" and not trains:
        raise WorkloadError(nothing_to_train(workload.model))


def _host_updates(specs: Sequence[JobSpec], device: Device) -> bool:
    """Whether the host makes updates that no inspection of CPU replicas tells."""
    makes_any = any(each.strategy.update != "local" or any(each.strategy.staleness_list) for each in specs)
    return not isinstance(device, Accelerator) or (makes_any and not computes_on(specs, "cpu"))


def _device_updates(specs: Sequence[JobSpec], device: Device) -> bool:
    """An optimizer that no device is to step need not be one that could. Versions of parameters are the host's."""
    if not isinstance(device, Accelerator):
        return False
    return any(each.strategy.update != "cpu" and not any(each.strategy.staleness_list) for each in specs)


def _batch_modules(model: nn.Module, *, learns: bool) -> list[str]:
    """By their types: torch's batch norms and what is made of them, but those that the model's own `train()` leaves in
    eval(), which go by their statistics. What another one does nobody can tell."""
    enter_mode(model, learns)
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)
        if module.training or module.running_mean is None
    ]
