"""What is frozen, and what is in `eval()`, is a part of training: in the middle of an epoch it goes on as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

# Its train() counts epochs and goes by them, and its forward freezes a layer, and takes one's dropout away, for good.
SOURCE = """
import os, signal, torch, weft

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.drop = torch.nn.Dropout(0.5)
        self.epochs = self.calls = 0

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.epochs += 1
            self.last.requires_grad_(self.epochs % 2 == 0)
        return self

    def forward(self, x):
        self.calls += self.training
        if self.calls == 6:
            self.first.requires_grad_(False)
        if self.calls == 10:
            self.drop.eval()
        return self.last(self.drop(self.second(self.first(x).tanh()).tanh()))

def workload(once="", victim="forward", at=0):
    seen = [0]

    def die(where):
        seen[0] += where == victim
        if once and seen[0] >= at and where == victim and not os.path.exists(once):
            open(once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            die("item")
            return x[index], y[index]

    def step(model, batch):
        if model.calls == at and model.training:
            seen[0] = at - 1
            die("forward")
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    x, y = torch.randn(32, 4), torch.randn(32, 4)
    return weft.Workload(Model(), Data(), step=step, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
"""


def of(daemon: Any, steps: int, **args: Any) -> Any:
    strategy = {"stages": 1, "recovery": "iteration"}
    return daemon.spec(SOURCE, strategy=strategy, batch_size=8, steps=steps, args=args)


def check_is_as_plain(daemon: Any, result: Any) -> None:
    assert result["state"] == "completed", result["error"]
    plain, ours = train(of(daemon, 15)).state, load_file(Path(result["model"]))
    assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("steps", [2, 7, 11])
def test_a_resumed_job_is_told_of_no_epoch_twice_and_freezes_what_was_frozen(daemon: Any, steps: int) -> None:
    half, whole = of(daemon, steps), of(daemon, 15).to_wire()
    first = daemon.run(type(half).parse(half.to_wire() | {"checkpoint": {"every": "1 step"}}))
    assert first["state"] == "completed", first["error"]
    whole["job"]["resume_from"] = first["run_dir"]
    check_is_as_plain(daemon, daemon.run(type(half).parse(whole)))


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(("victim", "at"), [("forward", 2), ("forward", 7), ("forward", 11), ("item", 60)])
def test_so_it_is_behind_a_kill(daemon: Any, tmp_path: Path, victim: str, at: int) -> None:
    """Of a worker, and of a loader, behind which the worker goes on with the model that it has."""
    result = daemon.run(of(daemon, 15, once=str(tmp_path / "once"), victim=victim, at=at))
    assert (tmp_path / "once").exists()
    check_is_as_plain(daemon, result)
