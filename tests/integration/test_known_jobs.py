"""A job that comes again, to a daemon that keeps what it has found out: with the same result, also after a failure."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon = _REAL["RealDaemon"]

STANDS = "the job has not changed since it was inspected"
SOURCE = """
from pathlib import Path
import torch, weft
from torch import nn
import weft.workers.inspection.known as known

known._waited_seconds = lambda: 0.0  # whatever else runs on the machine

def loss(output, target):
    if Path(__file__).with_name("broken").exists():
        raise RuntimeError("what is read while it runs")
    return nn.functional.mse_loss(output, target)

def workload(width=8):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 96).reshape(-1, 1)
    model = nn.Sequential(nn.Linear(1, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 1))
    return weft.Workload(model, (x, 3 * x), loss=loss, validation=(x, 3 * x),
                         optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
"""


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    environment = {"WEFT_KEEP_INSPECTIONS": "true", "WEFT_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    with RealDaemon(environment, workers=2).serving() as daemon:
        yield daemon


@pytest.mark.days(2)
@pytest.mark.slow(seconds=5)
def test_a_job_that_comes_again_is_not_inspected_and_trains_the_same(keeping: Any) -> None:
    spec = keeping.spec(SOURCE, strategy={"stages": 2, "microbatches": 3})
    results = [keeping.run(spec) for _ in range(3)]
    assert [STANDS in keeping.log_of(each["job"]) for each in results] == [False, True, True]
    first, *others = [load_file(each["model"]) for each in results]
    assert all(other.keys() == first.keys() for other in others)
    assert all(other[name].equal(tensor) for other in others for name, tensor in first.items())
    keeping.kill()
    keeping.start()
    assert STANDS in keeping.log_of(keeping.run(spec)["job"]), "also by another daemon"
    auto = keeping.spec(SOURCE, strategy={"preset": "auto"})
    logs = [keeping.log_of(keeping.run(auto)["job"]) for _ in range(2)]
    assert [STANDS in log for log in logs] == [False, True]


@pytest.mark.slow
def test_a_job_that_has_failed_is_inspected_anew(keeping: Any) -> None:
    spec = keeping.spec(SOURCE, strategy={"stages": 2}, args={"width": 4})  # which no other test has run
    keeping.run(spec)
    marker = Path(spec.directory, "broken")
    marker.touch()
    failed = keeping.run(spec)
    assert failed["state"] == "failed"
    assert "what is read while it runs" in failed["error"]
    assert STANDS in keeping.log_of(failed["job"])
    marker.unlink()
    again = keeping.run(spec)
    assert again["state"] == "completed"
    assert STANDS not in keeping.log_of(again["job"])


COUNTED = (
    SOURCE
    + """
import dataclasses
make = workload

class Items(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        self.items = list(zip(inputs, targets))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]

def workload(items=False):
    print("one more call")
    made = make()
    return dataclasses.replace(made, train=Items(*made.train)) if items else made
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("items", "calls"), [(False, [4, 3]), (True, [4, 4])])
def test_a_known_jobs_first_stage_begins_with_what_was_loaded_for_the_look(
    keeping: Any, items: bool, calls: list[int]
) -> None:
    """But where the look has run code of the user's: it has loaded a batch. Three workers prepare."""
    spec = keeping.spec(COUNTED, strategy={"stages": 2, "microbatches": 3}, args={"items": items})
    results = [keeping.run(spec) for _ in range(2)]
    logs = [keeping.log_of(each["job"]) for each in results]
    assert [STANDS in log for log in logs] == [False, True]
    assert [log.count("one more call") for log in logs] == calls
    first, second = [load_file(each["model"]) for each in results]
    assert all(second[name].equal(tensor) for name, tensor in first.items())
