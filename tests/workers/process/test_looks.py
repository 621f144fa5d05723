"""What a worker looks at of a job that leaves open whether its units are compiled, and when it leaves that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from weft.machine.free_memory import FreeMemory
from weft.plan.inspection import Inspection
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host
from weft.transport.wire.worker_messages import checked
from weft.workers.devices.host import HostDevice
from weft.workers.inspection import sizes
from weft.workers.inspection.known import NOTHING
from weft.workers.process import looks
from weft.workers.process.looks import Looks, training_seconds
from weft.workload.compiling.compiler import compiling, keep_in
from weft.workload.entry import load_workload
from weft.workload.workload import Workload

TESTS = Path(__file__).parents[2]
LAYERS = """
import torch, weft

def workload():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return weft.Workload(model=model, loss=torch.nn.functional.mse_loss, train=(torch.ones(8, 4), torch.ones(8, 1)),
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""


@dataclass
class Worker:
    """What it did. fails: the load of this number, from 0."""

    fails: int | None = None
    did: list[str] = field(default_factory=list)
    keep_kernels: Callable[[], None] = lambda: None

    def load(self, spec: JobSpec) -> Workload:
        self.did.append("compiled" if spec.strategy.compile else "eager")
        if len([each for each in self.did if each in ("compiled", "eager")]) - 1 == self.fails:
            raise RuntimeError("once too often\nas it says")
        return load_workload(spec)

    def look(self, spec: JobSpec) -> dict[str, Any]:
        facts = Looks(
            load=self.load,
            device=HostDevice(),
            host=Host(workers=1),
            known=NOTHING,
            use_own=lambda: self.did.append("own threads"),
            use_all=None,
            keep_kernels=self.keep_kernels,
        ).of(spec)
        checked({"type": "inspected", "job": "a", "attempt": 1, "inspection": facts, "code": {}})
        return facts


def spec_of(directory: Path = TESTS, entry: str = "compiled_models.py", steps: int = 10**9, **axes: Any) -> JobSpec:
    job = {"entry": f"{entry}:workload", "steps": steps, "batch_size": 8}
    return JobSpec.parse({"job": job, "strategy": {"compile": "auto"} | axes, "directory": str(directory)})


def test_a_short_job_is_looked_at_eager_alone() -> None:
    worker = Worker()
    facts = worker.look(spec_of(steps=9))
    assert "compiled_too" not in facts
    assert facts["uncompiled"].endswith("s of training are too few to make kernels for (from 60 s on)")
    assert worker.did == ["own threads", "eager"]
    assert Inspection.from_wire(facts).uncompiled == facts["uncompiled"]


def test_what_compiled_units_cannot_be_is_a_reason_and_no_refusal() -> None:
    facts = Worker().look(spec_of(replicas=2, share="adaptive"))
    assert facts["uncompiled"] == (
        "strategy.compile = true compiles each size of microbatch, and strategy.share = 'adaptive' has ever other ones"
    )


def test_what_has_no_room_eager_is_not_tried_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(LAYERS)
    monkeypatch.setattr(sizes, "free_memory", lambda: FreeMemory(shared=1, host=1))
    worker = Worker()
    facts = worker.look(spec_of(tmp_path, "job.py", preset="auto"))
    assert facts["uncompiled"] == facts["crowded"]
    assert "a microbatch of 8 samples" in facts["crowded"]
    assert worker.did == ["own threads", "eager"]


@pytest.mark.slow(seconds=2)
@pytest.mark.filterwarnings("ignore")  # torch's own, where it imports its compiler
def test_what_goes_wrong_in_the_compiled_look_is_a_reason_too(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(LAYERS)
    facts = Worker().look(spec_of(tmp_path, "job.py"))
    assert facts["uncompiled"] == "each is a single layer of torch's own, which is one kernel already"
    (tmp_path / "file").touch()
    facts = Worker(keep_kernels=partial(keep_in, tmp_path / "file" / "compiled")).look(spec_of(tmp_path, "job.py"))
    assert facts["uncompiled"].startswith("a look at compiled units raised RunFileError: ")
    facts = Worker(fails=1).look(spec_of(tmp_path, "job.py"))
    assert facts["uncompiled"] == "a look at compiled units raised RuntimeError: once too often"


@pytest.mark.slow(seconds=3)
@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
def test_kernels_that_take_longer_than_a_part_of_the_training_are_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(looks, "MOST_PART", 0.0)
    with compiling(tmp_path / "compiled"):
        facts = Worker().look(spec_of())
    assert facts["uncompiled"] == "making kernels takes longer than they are worth"


def test_training_takes_all_steps_by_all_microbatches_or_until_its_time_is_up(spec_of: Callable[..., JobSpec]) -> None:
    unit = {"forward_seconds": 0.01, "backward_seconds": 0.02}
    facts = {"num_train": 80, "num_validation": 0, "units": [unit, unit], "update_seconds": 0.04}
    facts["input"] = {"shapes": [[4, [4, 1]], [2, [2, 1]]]}

    def seconds(**changes: Any) -> float:
        tables = spec_of(batch_size=8).to_wire()
        job = {"entry": tables["job"]["entry"], "batch_size": 8, "steps": 100}
        return training_seconds(JobSpec.parse(tables | {"job": job | changes.pop("job", {})} | changes), facts)

    assert seconds() == pytest.approx(100 * (2 * 0.06 + 0.04))
    assert seconds(job={"mode": "forward"}) == pytest.approx(100 * (2 * 0.02 + 0.04))
    assert seconds(stop={"max_time": "5 s"}) == 5.0
