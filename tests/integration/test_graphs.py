"""A graph network trains as in the plain loop: sparse adjacencies as buffers and in batches, which have a class."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.spec.job_spec import JobSpec

GRAPHS = """
import torch
from torch import nn

import weft


class Nodes:
    def __init__(self, items):
        self.rows = {"index": torch.stack([index for index, _ in items]), "kind": torch.stack([y for _, y in items])}
        self.names = [str(len(items))]
        ring = torch.eye(len(items)).roll(1, 0) + torch.eye(len(items))
        self.rows["edges"] = [ring.to_sparse(), ring.to_sparse_csr()]


class Convolution(nn.Module):
    def __init__(self, inputs, outputs, adjacency):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("adjacency", adjacency, persistent=False)

    def forward(self, x):
        return torch.sparse.mm(self.adjacency, self.linear(x))


class Net(nn.Module):
    def __init__(self, features, layout):
        super().__init__()
        adjacency = (torch.rand(24, 24) < 0.2).float()
        parts = [adjacency.to_sparse() if layout == "coo" else adjacency.to_sparse_csr() for _ in range(2)]
        self.register_buffer("features", features)
        self.first, self.second = Convolution(5, 8, parts[0]), Convolution(8, 3, parts[1])

    def forward(self, index):
        return self.second(self.first(self.features).relu())[index]


def step(model, nodes):
    assert nodes.names == [str(len(nodes.rows["kind"]))]
    said = model(nodes.rows["index"])
    for edges in nodes.rows["edges"]:
        said = torch.sparse.mm(edges, said)
    return nn.functional.cross_entropy(said, nodes.rows["kind"])


def workload(layout):
    train = torch.utils.data.TensorDataset(torch.arange(24), torch.arange(24) % 3)
    model = Net(torch.randn(24, 5), layout)
    return weft.Workload(model, train, step=step, collate=Nodes, validation=train, optimizer=SGD)


def SGD(parameters):
    return torch.optim.SGD(parameters, lr=0.5)
"""
agrees = runpy.run_path(str(Path(__file__).with_name("test_replicas.py")))["agrees"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"stages": 2, "microbatches": 3, "recompute": True},
        {"preset": "ddp", "recovery": "iteration"},
        {"preset": "zero-offload"},
        {"preset": "stronghold", "microbatches": 2},
    ],
    ids=lambda strategy: strategy.get("preset", "pipeline"),
)
def test_it_trains_as_in_the_plain_loop(machine: Any, tmp_path: Path, strategy: dict[str, Any], layout: str) -> None:
    (tmp_path / "graphs.py").write_text(GRAPHS)
    job = {"entry": "graphs.py:workload", "args": {"layout": layout}, "batch_size": 8, "epochs": 2, "seed": 3}
    spec = JobSpec.parse(
        {"job": job, "strategy": strategy, "directory": str(tmp_path), "checkpoint": {"every": "2 steps"}}
    )
    agrees(machine, spec, tolerance=1e-5)
