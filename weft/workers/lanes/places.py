"""Places: the shared memory that a worker's lanes meet those of others in: the board, and the rings that it has a part
in. What it will ask the directory for follows from the plan, so it asks for all of that in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from weft.plan.course import Course
from weft.plan.placement import COMPUTE
from weft.plan.plan import Ring
from weft.plan.worker_view import WorkerView
from weft.spec.job_spec import JobSection
from weft.transport.memory.blocks import Wanted
from weft.transport.memory.board import Board, num_words
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Device
from weft.workers.lanes.loaded import Loaded, LoadedBatches, LoadedPairs
from weft.workers.memory.batch_slots import BatchSlots
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.memory.growing import Growing
from weft.workers.memory.parcels import ParcelRing
from weft.workers.memory.slots import SlotRing
from weft.workload.data.batches import Batches
from weft.workload.data.resident import ResidentData
from weft.workload.units import is_cut_by_calls
from weft.workload.workload import Workload

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Places:
    directory: Directory
    view: WorkerView
    course: Course
    device: Device

    def ask_for_all(self, workload: Workload) -> None:
        """Of what does not depend on the model. Errors: as of Directory."""
        self.directory.ask_for(list(self._wanted(is_cut_by_calls(workload))))

    def _wanted(self, by_calls: bool) -> Iterator[Wanted]:
        yield _board_of(self.view)
        for ring in self.view.rings:
            kind = ParcelRing if ring.crosses else BatchSlots if by_calls else SlotRing
            yield from kind.wants(ring)
        if self.view.synchronisation is not None:
            yield from BucketMemory.wants(self.view.synchronisation, self.view.replicas)

    def boards(self, begins: int, spin_seconds: float) -> dict[str, Board]:
        """The job's board as each lane sees it. Of all lanes of a worker the compute lane may spin: others would take
        its core."""
        words = self.directory.block(*_board_of(self.view)).view(torch.int32)
        words.fill_(begins - 1)  # others may have gone before
        programs = self.view.programs
        shares_core = len(programs) > 1
        return {
            lane: Board(words, spin_seconds if lane == COMPUTE else 0.0, shares_core=shares_core) for lane in programs
        }

    def of(self, kind: Callable[..., Made], *, crosses: bool) -> list[tuple[Ring, Made]]:
        counts = self.course.microbatches
        return [
            (ring, kind(self.directory, ring, counts[ring.replica], self.device, position=self.view.position))
            for ring in self.view.rings
            if ring.crosses is crosses
        ]

    def loaded(self, workload: Workload, job: JobSection) -> tuple[Loaded, list[Growing]]:
        """What is loaded, and what of it grows."""
        replicas, resident = self.view.replicas, self._resident(workload, job)
        if is_cut_by_calls(workload):
            batches = self.of(BatchSlots, crosses=False)
            growing = [slots.growing for _, slots in batches]
            return LoadedBatches(batches, self.course, replicas, resident), growing
        return LoadedPairs(self.of(SlotRing, crosses=False), self.course, replicas, self.device, resident), []

    def _resident(self, workload: Workload, job: JobSection) -> ResidentData | None:
        """The data, where this worker's device has them."""
        if not any(self.view.replicas[stage.replica].resident for stage in self.view.stages):
            return None
        return ResidentData(Batches.of_job(workload, job), self.device.put)


def _board_of(view: WorkerView) -> Wanted:
    return Wanted("board", 4 * num_words(view.num_tasks))
