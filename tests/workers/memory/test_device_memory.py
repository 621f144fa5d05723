"""What a GPU's tasks touch, found out without a GPU: devices compute on their own memory; shared memory is only copied.

A dispatch mode sees every operator of torch while a task of an accelerator runs. Memory is known by its storage: shared
blocks from the directory, device memory from the device that gives it, and what is made of device memory is device
memory too. All else is the host's own. It does not see what the kind of device alone decides: what torch would put
beside a parameter with `device=p.device`, such as a fused kernel's count of steps.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.plan.itinerary import Iteration
from weft.workers.devices.device import Accelerator
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.operation import Operation
from weft.workers.updates import sharded_optimizer

_ATTEMPT = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
planned_workload, two_way_source, TWO_WAYS = (_ATTEMPT[n] for n in ("planned_workload", "two_way_source", "TWO_WAYS"))
GPU = _ATTEMPT["GPU"]
STRATEGIES = {
    **{name: strategy for name, strategy in _ATTEMPT["STRATEGIES"].items() if "device" in name},
    "device, late": {"replicas": [GPU], "update": "cpu", "staleness": 1},
    "device, recomputed": {"replicas": [GPU | {"stages": 2, "split": [3]}], "microbatches": 2, "recompute": True},
}
BOUNDS = {"as it is": {}, "clipped": {"clip_norm": 0.5}, "skipping": {"skip_nonfinite": True}}
IN_STAGES = STRATEGIES["device in stages"]
ASKS_THE_DEVICE = "x[0, 0] < 0"  # what the model of test_attempt.py does in its forward

_ATEN = torch.ops.aten
COPIES = {_ATEN.copy_, _ATEN._to_copy}
MADE_ALIKE = {_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.new_empty, _ATEN.new_zeros}
WAITS = {_ATEN._local_scalar_dense, _ATEN.is_nonzero, _ATEN.nonzero, _ATEN.equal, _ATEN.masked_select}

# Tables of numbers in shared memory that the host reads and writes while it launches.
BOOKS = ("missing", "weights")
# Where the host may wait for the device: a bucket turns, once in many iterations. DOWN takes the numbers of the
# optimizer's state to the host and then gives its memory back, UP brings them.
TURNS = ("down", "up")


class Memory:
    """Whose a tensor's memory is. Storages are kept, so that no address is given twice."""

    def __init__(self) -> None:
        self._blocks: dict[int, str] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def watch(self, directory: Any) -> Any:
        block = directory.block

        def opened(name: str, num_bytes: int, fill: int = 0) -> torch.Tensor:
            tensor: torch.Tensor = block(name, num_bytes, fill)
            self._blocks[_address(tensor)] = name
            return tensor

        directory.block = opened
        return directory

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor):
            self._storages[_address(tensor)] = tensor.untyped_storage()
        return tensor

    def of(self, tensor: torch.Tensor) -> str:
        """A block's name, "device", or "host"."""
        address = _address(tensor)
        return self._blocks.get(address) or ("device" if address in self._storages else "host")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class KnownDevice(StandIn):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory.add(super().zeros(num_elements, dtype))

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._memory.of(tensor) == "device":
            return tensor
        return self._memory.add(tensor.to(tensor.device, copy=True, non_blocking=True))

    def adopt(self, module: nn.Module) -> None:
        module._apply(lambda tensor: self._memory.add(tensor.detach().clone()))


class Careless(KnownDevice):
    """Leaves in shared memory what is to be on the device."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Watch(TorchDispatchMode):
    """task: its kind. violations: gets a line for each."""

    def __init__(self, memory: Memory, task: str, violations: list[str], *, reads_on_host: bool) -> None:
        super().__init__()
        self._memory = memory
        self._task = task
        self._reads_on_host = reads_on_host
        self._violations = violations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(each): each for each in _tensors((args, kwargs))}.values()
        where = [self._memory.of(tensor) for tensor in given]
        if where == ["host", "device"] and func is _ATEN.copy_.default and args[0].dtype is torch.uint8:
            self._memory.add(args[0])  # deepcopy's copy of a whole storage, made where the storage is
            where[0] = "device"
        kind = func.overloadpacket
        if not (func.is_view or kind in MADE_ALIKE):
            if kind in COPIES:
                found = self._copy(where, is_asynchronous=True in args[2:] or "non_blocking" in (kwargs or {}))
            else:
                found = self._use(kind, list(given), where)
            if found:
                self._violations.append(f"{self._task}: {func} {found} {where}")
        result = func(*args, **(kwargs or {}))
        if "device" in where:
            for tensor in _tensors(result):
                if self._memory.of(tensor) == "host":
                    self._memory.add(tensor)
        return result

    def _copy(self, where: list[str], *, is_asynchronous: bool) -> str | None:
        crosses = "device" in where and set(where) != {"device"}
        turns = self._task in TURNS and any(name.startswith("optimizer-state") for name in where)
        return None if is_asynchronous or not crosses or turns else "makes the host wait"

    def _use(self, kind: Any, given: list[torch.Tensor], where: list[str]) -> str | None:
        for name in set(where) - {"device", "host"}:
            if not (name in BOOKS or self._may_touch(name)):
                return "computes on shared memory"
        if "device" not in where:
            return None
        if kind in WAITS and self._task != "down":
            return "makes the host wait"
        mixed = any(name != "device" and tensor.dim() for tensor, name in zip(given, where, strict=True))
        return "mixes memory of host and device" if mixed else None

    def _may_touch(self, name: str) -> bool:
        """The host may read what was over before it launched: the norm, gradients that have come down to be summed.
        Optimizer state: numbers."""
        if name == "norms" or (self._task == "sync" and name.startswith("bucket-gradient")):
            return self._reads_on_host
        return name.startswith("optimizer-state") and self._task in TURNS


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class WatchedTurns(_ATTEMPT["Turns"]):  # type: ignore[misc]
    def __init__(self, planned: Any, make_device: Callable[[Memory], StandIn]) -> None:
        self._memory = Memory()
        self.violations: list[str] = []
        self.watched: set[str] = set()  # kinds of tasks
        self.readers: set[str] = set()  # kinds of those that read on the host what a device has computed
        directory = self._memory.watch(planned.new_directory())
        with Watch(self._memory, "set-up", [], reads_on_host=True):  # to know what is made; it may wait
            super().__init__(planned, directory, lambda: make_device(self._memory))

    def _perform(self, attempt: Attempt, operation: Operation, iteration: Iteration) -> None:
        if not isinstance(attempt.device, Accelerator):
            operation.run(iteration)
            return
        task = str(self.plan.graph.tasks[operation.task].kind)
        self.watched.add(task)
        self.readers |= {task} if operation.reads_on_host else set()
        with Watch(self._memory, task, self.violations, reads_on_host=operation.reads_on_host):
            operation.run(iteration)


Watched = Callable[..., WatchedTurns]


@pytest.fixture
def watched(planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    # Tiles are for a CPU's caches: on a GPU every optimizer steps by itself.
    monkeypatch.setattr(sharded_optimizer, "can_tile", lambda optimizer: False)

    def build(
        optimizer: str = "adam",
        make_device: Callable[[Memory], StandIn] = KnownDevice,
        asks: str = "len(x) % 2",
        **strategy: Any,
    ) -> WatchedTurns:
        source = two_way_source(optimizer)
        assert source.count(ASKS_THE_DEVICE) == 1
        (tmp_path / "job.py").write_text(source.replace(ASKS_THE_DEVICE, asks))
        plan = planned(planned_workload(tmp_path), steps=5, directory=str(tmp_path), batch_size=9, **strategy)
        return WatchedTurns(plan, make_device)

    return build


@pytest.mark.pairs(name=STRATEGIES, bound=BOUNDS)
def test_devices_compute_on_their_own_memory_and_only_copy_what_is_shared(
    watched: Watched, name: str, bound: str
) -> None:
    """No host waits for a device, whatever the norm of the gradient says; but to sum what stages of one GPU share. A
    device that undoes a step reads what its hosts have told of the norm."""
    strategy = STRATEGIES[name] | BOUNDS[bound]
    turns = watched(**strategy)
    turns.run(random.Random(0).choice)
    assert turns.violations == []
    sync = turns.plan.synchronisation
    validates = {"validate"} if sync is not None and sync.devices_speculate else set()
    assert turns.readers == ({"sync"} if "gpus" in strategy["replicas"][0] else validates)
    assert {"forward", "backward", "fetch"} <= turns.watched


def test_a_step_that_the_device_cannot_leave_out_is_the_one_thing_that_waits_for_a_number(watched: Watched) -> None:
    turns = watched("whole", replicas=[GPU], update="local", skip_nonfinite=True)
    turns.run(min)
    assert turns.violations == []
    assert turns.readers == {"update"}


@pytest.mark.pairs(name=TWO_WAYS, optimizer=["adam", "momentum", "adagrad", "whole"])
def test_what_moves_with_a_bucket_that_turns_is_copied_to_where_it_is_computed_with(
    watched: Watched, name: str, optimizer: str
) -> None:
    turns = watched(optimizer, update="balanced", **TWO_WAYS[name])
    turns.set_routes(random.Random(1))
    turns.run(random.Random(0).choice)
    assert turns.violations == []
    assert {"down", "up", "update"} <= turns.watched


def test_a_stage_that_computes_on_a_slot_is_found_out(watched: Watched) -> None:
    turns = watched(make_device=Careless, **IN_STAGES)
    turns.run(min)
    assert any(line.startswith("forward: ") and "activation-0-0" in line for line in turns.violations)
    assert any(line.startswith("backward: ") and "gradient-0-0" in line for line in turns.violations)


def test_a_model_that_asks_its_input_for_a_number_is_found_out(watched: Watched) -> None:
    turns = watched(asks=ASKS_THE_DEVICE, **IN_STAGES)
    turns.run(min)
    assert turns.violations
    assert all(line.startswith("forward: ") and "makes the host wait" in line for line in turns.violations)
