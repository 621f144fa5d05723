"""A job's result is that of the plain loop, bit for bit: every step's loss, every validation, every tensor of the end.

The reference depends on the workload and the number of microbatches alone, so one serves every strategy.
"""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.plan.kinds import Kind
from weft.plan.schedules.greedy import OrderRule, greedy
from weft.plan.schedules.grid import drawn
from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import SCHEDULE_NAMES, STAGES_PER_WORKER

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, EXAMPLES, metrics_rows = _REAL["RealDaemon"], _REAL["EXAMPLES"], _REAL["metrics_rows"]
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

GPT_ARGS = {"layers": 2, "dim": 16, "heads": 2, "context": 8, "samples": 20, "validation_samples": 5}
JOBS: dict[str, dict[str, Any]] = {
    # 1437 samples: the sixth batch of an epoch is whole, the last one has 3, less than 7 microbatches.
    "digits": {"entry": "digits.py:workload", "args": {"hidden": 16}, "epochs": 2, "batch_size": 239},
    "gpt, dropout 0.2": {"entry": "gpt.py:workload", "args": GPT_ARGS | {"dropout": 0.2}, "epochs": 2, "batch_size": 9},
    "gpt": {"entry": "gpt.py:workload", "args": GPT_ARGS | {"dropout": 0.0}, "epochs": 2, "batch_size": 9},
}


@functools.cache
def reference_of(text: str, threads: int) -> reference.ReferenceResult:
    """Of a spec in JSON, trained once."""
    return reference.train(JobSpec.model_validate_json(text), threads=threads)


def plain_loop(spec: JobSpec, threads: int = 1) -> reference.ReferenceResult:
    """The reference's result. Of the strategy it takes the microbatches and the precision only."""
    plain = {"microbatches": spec.strategy.microbatches, "precision": spec.strategy.precision}
    return reference_of(JobSpec.parse(spec.to_wire() | {"strategy": plain}).model_dump_json(), threads)


def same_as_the_plain_loop(daemon: RealDaemon, spec: JobSpec, threads: int = 1) -> dict[str, Any]:
    """The result of a job of which all that is so."""
    expected = plain_loop(spec, threads)
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    rows = metrics_rows(result["run_dir"])
    assert [row["loss"] for row in rows if "loss" in row] == expected.losses
    assert [row["validation"] for row in rows if "validation" in row] == expected.validations
    assert result["steps"] == len(expected.losses)
    assert result["loss"] == expected.losses[-1]
    assert result["validation"] == (expected.validations[-1] if expected.validations else {})
    state = load_file(result["model"])
    assert state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert state[name].dtype is tensor.dtype, name
        assert torch.equal(state[name], tensor), name
    return dict(result)


def examples_spec(job: dict[str, Any], **strategy: Any) -> JobSpec:
    return JobSpec.parse({"job": job | {"seed": 11}, "strategy": strategy, "directory": str(EXAMPLES)})


@pytest.mark.slow
@pytest.mark.pairs(
    8,
    job=JOBS,
    stages=(1, 2, 3),
    microbatches=(1, 4, 7),
    schedule=tuple(name for name in SCHEDULE_NAMES if name not in STAGES_PER_WORKER),
    window=(None, 1),
    recompute=(False, True),
    loaders=(1, 2, 3),
)
def test_any_strategy_gives_the_result_of_the_plain_loop(
    daemon: RealDaemon,
    job: str,
    stages: int,
    microbatches: int,
    schedule: str,
    window: int | None,
    recompute: bool,
    loaders: int,
) -> None:
    how = {"schedule": schedule, "window": window, "recompute": recompute, "loaders": loaders}
    assert same_as_the_plain_loop(daemon, examples_spec(JOBS[job], stages=stages, microbatches=microbatches, **how))


@pytest.mark.slow
@pytest.mark.pairs(job=JOBS, recompute=(False, True))
def test_a_backward_in_two_parts_gives_it_too(daemon: RealDaemon, job: str, recompute: bool) -> None:
    how = {"schedule": "zero-bubble", "recompute": recompute}
    assert same_as_the_plain_loop(daemon, examples_spec(JOBS[job], stages=3, microbatches=6, **how))


@pytest.mark.slow
@pytest.mark.pairs(job=("digits", "gpt, dropout 0.2"), stages=(2, 3), whole=(1, 4), recompute=(False, True))
def test_backwards_of_which_the_later_ones_are_in_two_parts_give_it_too(
    daemon: RealDaemon, job: str, stages: int, whole: int, recompute: bool
) -> None:
    order = greedy(stages, 6, lambda each: 1.0, OrderRule(limits=(6,) * stages, whole=whole))
    assert {Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT} < {each.kind for each in order.passes(stages - 1)}
    how = {"schedule": drawn(order, "mixed"), "recompute": recompute}
    assert same_as_the_plain_loop(daemon, examples_spec(JOBS[job], stages=stages, microbatches=6, **how))


@pytest.mark.slow
@pytest.mark.pairs(job=("digits", "gpt, dropout 0.2"), schedule=STAGES_PER_WORKER, recompute=(False, True))
def test_several_stages_in_a_worker_give_it_too(daemon: RealDaemon, job: str, schedule: str, recompute: bool) -> None:
    how = {"schedule": schedule, "recompute": recompute}
    assert same_as_the_plain_loop(daemon, examples_spec(JOBS[job], stages=4, microbatches=6, **how))


IN_PLACE = """
import torch, weft
from torch import nn

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = x.detach().clone(), weight.detach().clone()
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.kept
        ctx.kept = x.mul_(0.5), weight.mul_(0.5)
        return gradient @ weight, gradient.T @ x

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) * 0.3)

    def forward(self, x):
        return Scaled.apply(x, self.weight)

def workload():
    layers = (each for _ in range(4) for each in (Layer(), nn.Tanh()))
    data = torch.randn(20, 6), torch.randn(20, 6)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    return weft.Workload(nn.Sequential(*layers), data, loss=nn.MSELoss(), optimizer=optimizer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zero-bubble", "zero-bubble-v"])
def test_a_backward_in_two_parts_runs_a_function_once_that_writes_over_what_it_has_kept(
    daemon: RealDaemon, tmp_path: Path, schedule: str
) -> None:
    """As fused losses do. It ran in both parts: the job trained, with other numbers."""
    (tmp_path / "job.py").write_text(IN_PLACE)
    job = {"entry": "job.py:workload", "epochs": 2, "batch_size": 8, "seed": 11}
    strategy = {"stages": 4 if schedule in STAGES_PER_WORKER else 2, "microbatches": 4, "schedule": schedule}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": str(tmp_path)})
    assert same_as_the_plain_loop(daemon, spec)


def test_a_schedule_from_a_file_gives_it_too_and_the_file_may_go(daemon: RealDaemon, tmp_path: Path) -> None:
    """The first worker has the first and the last stage."""
    grid = tmp_path / "mine.grid"
    grid.write_text("# mine\nF0 F1 2F0 2B0 2F1 2B1 B0 B1\nF0 F1 B0 B1\n")
    toml = tmp_path / "job.toml"
    toml.write_text(
        f'[job]\nentry = "{EXAMPLES}/digits.py:workload"\nargs = {{ hidden = 16 }}\nepochs = 1\nbatch_size = 239\n'
        'seed = 11\n[strategy]\nstages = 3\nmicrobatches = 2\nschedule = "mine.grid"\n'
    )
    spec = JobSpec.load(toml)
    grid.unlink()
    assert same_as_the_plain_loop(daemon, spec)


WIDE = """
import torch, weft

def workload():
    inputs = torch.randn(64, 32)
    return weft.Workload(model=torch.nn.Linear(32, 4096), loss=torch.nn.MSELoss(),
                         train=(inputs, torch.randn(64, 4096)), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
"""


@pytest.mark.parametrize(("strategy", "threads"), [({"threads": "all"}, 3), ({"threads": 2, "microbatches": 2}, 2)])
def test_a_worker_with_the_cores_of_others_gives_that_of_as_many_threads(
    daemon: RealDaemon, tmp_path: Path, strategy: dict[str, Any], threads: int
) -> None:
    """A mean of so many numbers is summed in as many parts. The next job has the cores as ever."""
    (tmp_path / "wide.py").write_text(WIDE)
    job = {"entry": "wide.py:workload", "batch_size": 64, "steps": 4, "seed": 11}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": str(tmp_path)})
    assert plain_loop(spec, 1).losses != plain_loop(spec, threads).losses
    assert same_as_the_plain_loop(daemon, spec, threads)
    assert same_as_the_plain_loop(daemon, JobSpec.parse(spec.to_wire() | {"strategy": {}}))


@pytest.mark.slow
@pytest.mark.pairs(2, job=JOBS, schedule=("measured", "dynamic"), recompute=(False, True))
def test_an_order_that_was_made_gives_it_too_and_so_does_its_grid(
    daemon: RealDaemon, job: str, schedule: str, recompute: bool
) -> None:
    how = {"stages": 3, "microbatches": 6, "recompute": recompute}
    result = same_as_the_plain_loop(daemon, examples_spec(JOBS[job], schedule=schedule, **how))
    grid = Path(result["run_dir"], "schedule.grid").read_text()
    assert grid.startswith(f"# {schedule}, 3 stages, 6 microbatches\n")
    assert same_as_the_plain_loop(daemon, examples_spec(JOBS[job], schedule=grid, **how))


HEADER = """
import torch, weft
from torch import nn

def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))
"""

# name -> (source, strategy); batches of 8 of 20 samples, so the last one has 4.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a convolution with batch normalisation, recomputed": (
        """
def workload():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
                          nn.Flatten(), nn.Linear(64, 3))
    data = numbers(20, 1, 8, 8), torch.arange(20) % 3
    return weft.Workload(model=model, loss=nn.CrossEntropyLoss(), train=data, validation=data,
                         optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 2, "recompute": True},
    ),
    "a convolution with batch normalisation": (
        """
def workload():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
                          nn.Flatten(), nn.Linear(64, 3))
    data = numbers(20, 1, 8, 8), torch.arange(20) % 3
    return weft.Workload(model=model, loss=nn.CrossEntropyLoss(), train=data, validation=data,
                         optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
""",
        {"stages": 3, "microbatches": 2},
    ),
    "frozen parameters": (
        """
def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in [*model[0].parameters(), model[2].bias]:
        parameter.requires_grad_(False)
    data = numbers(20, 6), numbers(20, 1)
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 3, "microbatches": 2},
    ),
    "a map-style dataset with numbers as targets": (
        """
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return torch.tensor([index / 20, 1.0]) + 0.01 * torch.randn(2), (index / 20) ** 2

def loss(output, target):
    return nn.functional.mse_loss(output.squeeze(1), target.float())

def workload():
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    return weft.Workload(model=model, loss=loss, train=Squares(), validation=Squares(),
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 3},
    ),
    "a dataset of tensors that changes its items": (
        """
class Noisy(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + torch.rand(()), targets

def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=Noisy(numbers(20, 6), numbers(20, 1)),
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 3},
    ),
    "a loader with a sampler, a collate function and a batch that is dropped": (
        """
from torch.utils.data import DataLoader, WeightedRandomSampler

def collate(items):
    inputs, targets = zip(*items)
    return torch.stack(inputs) + 0.01 * torch.randn(len(inputs), 6), torch.stack(targets)

def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(numbers(20, 6), numbers(20, 1))
    sampler = WeightedRandomSampler(torch.arange(20) + 1.0, 19)
    return weft.Workload(model, DataLoader(data, sampler=sampler, collate_fn=collate, drop_last=True),
                         loss=nn.functional.mse_loss, validation=DataLoader(data, batch_size=7, collate_fn=collate),
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 3},
    ),
    "an iterable dataset that draws": (
        """
class Drawn(torch.utils.data.IterableDataset):
    def __len__(self):
        return 20
    def __iter__(self):
        for number in torch.randperm(20):
            yield number + torch.rand(6), torch.rand(1)

def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return weft.Workload(model, Drawn(), loss=nn.functional.mse_loss, validation=Drawn(),
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 3},
    ),
    "stochastic gradient descent with momentum": (
        """
def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    data = numbers(20, 6), numbers(20, 1)
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=data,
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3))
""",
        {"stages": 2, "microbatches": 4, "schedule": "gpipe"},
    ),
    "float64": (
        """
def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)).double()
    data = numbers(20, 6).double(), numbers(20, 1).double()
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 2},
    ),
    "parameters in channels-last order": (
        """
def workload():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    data = numbers(20, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.arange(20) % 2
    return weft.Workload(model=model, loss=nn.CrossEntropyLoss(), train=data, validation=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 2},
    ),
    "a head that is the embedding's weight, and a block that two stages share": (
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.2)
        self.query_key_value, self.output = nn.Linear(8, 24), nn.Linear(8, 8)
    def forward(self, hidden):
        query, key, value = self.query_key_value(self.norm(hidden)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.dropout(self.output(attended))

def workload():
    embedding, block, head = nn.Embedding(11, 8), Block(), nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, block, Block(), block, nn.LayerNorm(8), head)
    tokens = torch.randint(11, (20, 6), generator=torch.Generator().manual_seed(5))
    def loss(logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return weft.Workload(model=model, loss=loss, train=(tokens[:, :-1], tokens[:, 1:]),
                         validation=(tokens[:7, :-1], tokens[:7, 1:]),
                         optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
""",
        {"stages": 3, "split": [2, 3], "microbatches": 3},
    ),
    "a model that is no sequence": (
        """
class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.tied = self.inner
        self.register_buffer("scale", torch.tensor(0.5))
    def forward(self, x):
        return (x + self.scale * self.tied(self.inner(x).tanh())).sum(1, keepdim=True)

def workload():
    data = numbers(20, 6), numbers(20, 1)
    return weft.Workload(model=Residual(), loss=nn.functional.mse_loss, train=data,
                         optimizer=lambda params: torch.optim.Adagrad(params, lr=1e-2))
""",
        {"stages": 1, "microbatches": 2},
    ),
    "complex activations and parameters, and a dict between units": (
        """
class Make(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    def forward(self, x):
        return {"filtered": torch.fft.ifft(x * self.filter), "plain": [x]}

class Take(nn.Module):
    def forward(self, parts):
        return parts["filtered"].real + parts["plain"][0].abs()

class Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)

def workload():
    model = nn.Sequential(nn.Linear(6, 8), Fourier(), Make(), Take(), nn.Linear(8, 1))
    data = numbers(20, 6), numbers(20, 1)
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 3, "split": [2, 4], "microbatches": 2},
    ),
    "spectral norms and a parameter that is not contiguous, recomputed": (
        """
class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(8, 6).double().t())
    def forward(self, x):
        return x @ self.weight

class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(8))
    def forward(self, x):
        self.mean = 0.7 * self.mean + 0.3 * x.detach().abs().mean(0)
        return x * self.mean

def workload():
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(Weight(), norm(nn.Linear(8, 8)), nn.Tanh(), Momentum(), norm(nn.Linear(8, 1))).double()
    data = numbers(20, 6).double(), numbers(20, 1).double()
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 3, "split": [1, 3], "microbatches": 4, "recompute": True},
    ),
    "a stage without parameters that shares a worker": (  # it was taken for none, and the other had its model
        """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet, self.centred, self.inner, self.outlet = nn.Linear(6, 8), Centred(), nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.outlet(self.inner(self.centred(self.inlet(x))).tanh())

def workload():
    data = numbers(20, 6), numbers(20, 1)
    return weft.Workload(Model(), data, loss=nn.functional.mse_loss, validation=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 4, "split": ["centred", "inner", "outlet"], "microbatches": 2, "schedule": "interleaved"},
    ),
    "embeddings with sparse gradients": (
        """
def workload():
    bags = nn.EmbeddingBag(50, 8, mode="mean", sparse=True)
    model = nn.Sequential(nn.Identity(), bags, nn.Tanh(), nn.Linear(8, 1))
    data = (numbers(20, 400).abs() * 15).long().clamp(max=49), numbers(20, 1)
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=data,
                         optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
""",
        {"stages": 1, "microbatches": 1},
    ),
    "embeddings with sparse gradients, in a step": (
        """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(50, 8, sparse=True), nn.Embedding(50, 8, sparse=True)
        self.scale, self.head = Scale(), nn.Linear(8, 1)
    def forward(self, words):
        scale = self.scale()
        x = self.first(words[:, ::5]).tanh() + self.second(words[:, ::5])
        return (self.head(x) * scale).mean(1)

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(80))
    def forward(self):
        return self.rows.view(1, 80, 1)

def workload():
    data = {"words": (numbers(20, 400).abs() * 15).long().clamp(max=49), "y": numbers(20, 1)}
    step = lambda model, batch: nn.functional.mse_loss(model(batch["words"]), batch["y"])
    return weft.Workload(Words(), data, step=step, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
""",
        {"stages": 3, "split": ["second", "head"], "microbatches": 5},
    ),
    "a module that differentiates by itself, recomputed": (
        """
class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy, self.norm = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), nn.BatchNorm1d(6)
    def forward(self, x):
        x = self.norm(x)
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

class Slope(nn.Module):
    def forward(self, x):
        return torch.func.grad(lambda y: y.cos().sum())(x)

def workload():
    model = nn.Sequential(nn.Linear(6, 6), Force(), nn.Dropout(0.2), nn.Linear(6, 6), Slope(), nn.Linear(6, 1))
    data = numbers(20, 6), numbers(20, 1)
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "split": [3], "microbatches": 2, "recompute": True},
    ),
    "a step that differentiates by itself, recomputed": (
        """
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return self.outer(self.inner(self.norm(x)).tanh())

def step(model, batch):
    x = batch["x"].requires_grad_()
    y = model(x)
    slope, = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (slope.norm(dim=1) - 1).square().mean()

def workload():
    return weft.Workload(Critic(), {"x": numbers(20, 6)}, step=step,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 1, "microbatches": 2, "recompute": True},
    ),
    "no batch but one, smaller than was asked for": (
        """
def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    data = numbers(3, 6), numbers(3, 1)
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
""",
        {"stages": 2, "microbatches": 5},
    ),
}


@pytest.mark.slow
@pytest.mark.pairs(2, kind=KINDS)
def test_any_kind_of_workload_gives_the_result_of_the_plain_loop(daemon: RealDaemon, kind: str) -> None:
    source, how = KINDS[kind]
    assert same_as_the_plain_loop(daemon, daemon.spec(HEADER + source, strategy=how, batch_size=8, epochs=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "microbatches", "loaders"),
    [
        ("a map-style dataset with numbers as targets", 1, 2),
        ("a dataset of tensors that changes its items", 3, 2),
        ("a loader with a sampler, a collate function and a batch that is dropped", 2, 2),
        ("no batch but one, smaller than was asked for", 5, 3),
    ],
)
def test_several_loaders_give_the_result_of_the_plain_loop(
    daemon: RealDaemon, kind: str, microbatches: int, loaders: int
) -> None:
    source, how = KINDS[kind]
    strategy = how | {"microbatches": microbatches, "loaders": loaders}
    assert same_as_the_plain_loop(daemon, daemon.spec(HEADER + source, strategy=strategy, batch_size=8, epochs=2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "forward"])
def test_shapes_that_depend_on_the_data_fail_between_stages_with_the_unit_and_a_remedy(
    daemon: RealDaemon, mode: str
) -> None:
    """In forward mode (1, 4) was broadcast into the slot: the job completed, with losses of 1.29 for 0.32."""
    source = """
class Some(nn.Module):
    def forward(self, x):
        return x[x[:, 0] > 0]

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(0, keepdim=True)

def workload():
    model = nn.Sequential(nn.Linear(6, 4), Some(), Mean(), nn.Linear(4, 1))
    return weft.Workload(model=model, loss=lambda y, target: (y - target).square().mean(),
                         train=(numbers(40, 6), numbers(40, 1)),
                         optimizer=lambda params: torch.optim.SGD(params, lr=1e-2))
"""
    result = daemon.run(daemon.spec(HEADER + source, strategy={"stages": 2, "split": [2]}, batch_size=4, mode=mode))
    assert (result["state"], result["reason"]) == ("failed", "invalid-workload")
    assert "unit 1 (Some) passes on, for a microbatch of 4 samples, (" in result["error"]
    assert "leave this place out of strategy.split" in result["error"]


@pytest.mark.slow
def test_a_job_says_where_batch_statistics_are_not_of_the_batch(daemon: RealDaemon) -> None:
    source, _ = KINDS["a convolution with batch normalisation"]
    result = daemon.run(daemon.spec(HEADER + source, strategy={"microbatches": 2}, batch_size=8, steps=1))
    note = "batch statistics: 1 (BatchNorm2d), 4 (BatchNorm2d) take means and variances of each microbatch of 4 samples"
    assert note in daemon.log_of(result["job"])
    (shown,) = daemon.client.show(result["job"])["plan"]["notes"]
    assert shown.startswith(note)


@pytest.mark.slow
def test_a_number_of_steps_that_ends_inside_an_epoch_gives_the_result_of_the_plain_loop(daemon: RealDaemon) -> None:
    assert same_as_the_plain_loop(
        daemon, daemon.spec(strategy={"stages": 2, "microbatches": 3}, steps=5, batch_size=10)
    )


@pytest.mark.slow
def test_the_same_job_gives_the_same_bits_beside_another_job(daemon: RealDaemon) -> None:
    spec = daemon.spec(strategy={"stages": 2, "microbatches": 4}, epochs=20)
    other = daemon.submit(daemon.spec(epochs=40))
    assert same_as_the_plain_loop(daemon, spec)
    daemon.client.wait(other)


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA / "t10k-images-idx3-ubyte.gz").is_file(), reason="needs MNIST's test files in ../shared/data"
)
def test_mnist_gives_the_result_of_the_plain_loop(daemon: RealDaemon) -> None:
    args = {
        "images": str(DATA / "t10k-images-idx3-ubyte.gz"),
        "labels": str(DATA / "t10k-labels-idx1-ubyte.gz"),
        "hidden": 32,
    }
    job = {"entry": "mnist.py:workload", "args": args, "steps": 20, "batch_size": 100}
    assert same_as_the_plain_loop(daemon, examples_spec(job, stages=3, microbatches=4, schedule="1f1b"))
