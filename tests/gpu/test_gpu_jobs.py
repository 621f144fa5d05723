"""Jobs on a real daemon with a GPU: what they train is what the plain loop trains on the same GPU."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from weft.plan.kinds import BUSY_MODES
from weft.reference import loop as reference
from weft.spec.strategy import Strategy
from weft.workers.process.torch_settings import TorchSettings

_REAL = runpy.run_path(str(Path(__file__).parents[1] / "integration" / "real_daemon.py"))
metrics_rows = _REAL["metrics_rows"]

STEPS = 200
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}

SOURCE = """
import torch, weft
from torch import nn

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.heads = heads
    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))

class Embedding(nn.Module):
    def __init__(self, words, length, width):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
    def forward(self, x):
        return self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))

def workload(dtype="float64", deterministic=False, optimizer="AdamW"):
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 64, (256, 33), generator=generator).cumsum(1) % 64
    width = 64
    model = nn.Sequential(Embedding(64, 32, width), Block(width, 4), Block(width, 4), nn.LayerNorm(width),
                          nn.Linear(width, 64)).to(getattr(torch, dtype))
    model[4].weight = model[0].words.weight
    data = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return weft.Workload(
        model=model, train=data, validation=(data[0][:32], data[1][:32]),
        loss=lambda y, target: nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=1e-3),
    )
"""


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """The plain loop runs here, and its workload may ask for deterministic algorithms."""
    before = TorchSettings.now()
    yield
    before.restore()


STRATEGIES: dict[str, dict[str, Any]] = {
    "local": {"replicas": [GPU], "update": "local", "microbatches": 2},
    "local clipped": {"replicas": [GPU], "update": "local", "clip_norm": 0.5},
    "local skipping": {"replicas": [GPU], "update": "local", "clip_norm": 0.5, "skip_nonfinite": True},
    "local resident": {"replicas": [GPU], "update": "local", "microbatches": 2, "resident": True},
    "hybrid-fine resident": {"preset": "hybrid-fine", "resident": True},
    "zero-offload": {"preset": "zero-offload", "clip_norm": 0.5},
    "zero-offload delayed": {"preset": "zero-offload", "staleness": 1, "staleness_warmup": 10},
    "cotrain": {"preset": "cotrain"},
    "hyscale, fixed": {"preset": "hyscale", "share": "fixed", "shares": [0.75, 0.25]},
    "hybrid-coarse": {"preset": "hybrid-coarse", "clip_norm": 0.5},
    "hybrid-fine": {"preset": "hybrid-fine", "clip_norm": 0.5},
    "stronghold": {"preset": "stronghold", "microbatches": 2, "clip_norm": 0.5},
    "a working window, not recomputed": {"replicas": [GPU | {"working_window": 2}], "update": "cpu"},
    "stages on one GPU": {"replicas": [GPU | {"stages": 3, "gpus": 1}], "microbatches": 4, "clip_norm": 0.5},
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_losses_and_weights_are_those_of_the_plain_loop_on_the_gpu(daemon: Any, strategy: dict[str, Any]) -> None:
    """Without dropout beside a CPU replica: on the GPU alone the plain loop draws other numbers than a CPU does."""
    on_cpu = any(replica.device == "cpu" for replica in Strategy(**strategy).replica_list)
    source = SOURCE.replace("nn.Dropout(0.1)", "nn.Identity()") if on_cpu else SOURCE
    spec = daemon.spec(source, strategy=strategy, steps=STEPS, batch_size=16, args={"dtype": "float64"})
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    expected = reference.train(spec, device="cuda:0")
    losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    state = load_file(result["model"])
    assert max(float((state[key] - tensor).abs().max()) for key, tensor in expected.state.items()) < 1e-6


def test_one_stage_with_deterministic_algorithms_has_the_plain_loops_bits(daemon: Any) -> None:
    args = {"dtype": "float32", "deterministic": True}
    strategy = {"replicas": [GPU], "update": "local", "microbatches": 2}
    spec = daemon.spec(SOURCE, strategy=strategy, steps=STEPS, batch_size=16, args=args)
    result = daemon.run(spec)
    expected = reference.train(spec, device="cuda:0")
    assert [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row] == expected.losses


@pytest.mark.parametrize("update", ["local", "balanced"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "NAdam", "RMSprop", "Adafactor"])
def test_any_optimizer_does_on_the_gpu_what_it_does_in_the_plain_loop(daemon: Any, optimizer: str, update: str) -> None:
    """Also one that torch has a fused kernel of for the host alone."""
    args = {"dtype": "float64", "optimizer": optimizer}
    source = SOURCE.replace("nn.Dropout(0.1)", "nn.Identity()")
    spec = daemon.spec(source, strategy={"replicas": [GPU], "update": update}, steps=20, batch_size=16, args=args)
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert losses == pytest.approx(reference.train(spec, device="cuda:0").losses, rel=1e-6)


def test_bf16_is_within_its_rounding_of_the_plain_loop(daemon: Any) -> None:
    strategy = {"preset": "zero-offload", "precision": "bf16"}
    spec = daemon.spec(SOURCE, strategy=strategy, steps=50, batch_size=16, args={"dtype": "float32"})
    losses = [row["loss"] for row in metrics_rows(daemon.run(spec)["run_dir"]) if "loss" in row]
    assert losses == pytest.approx(reference.train(spec, device="cuda:0").losses, rel=2e-2)


def test_the_streams_time_is_accounted_for_without_a_residual(daemon: Any) -> None:
    spec = daemon.spec(SOURCE, strategy={"preset": "zero-offload"}, steps=50, batch_size=16)
    time = daemon.client.show(daemon.run(spec)["job"])["time"]
    lanes = {lane: row for lane, row in time["lanes"].items() if lane.startswith("gpu-0/")}
    assert lanes
    for row in lanes.values():
        assert abs(row["residual_seconds"]) <= 0.01 * row["wall_seconds"]
        assert sum(row["modes"].get(mode, 0.0) for mode in BUSY_MODES) > 0


def test_memory_that_is_not_there_is_a_reason_and_the_worker_serves_the_next_job(daemon: Any) -> None:
    line = "        return self.words(x)"
    greedy = SOURCE.replace(
        line, f"        assert not x.is_cuda or torch.empty(1 << 42, device=x.device).sum()\n{line}"
    )
    assert greedy != SOURCE
    failed = daemon.run(daemon.spec(greedy, strategy={"replicas": [GPU], "update": "local"}, steps=2, batch_size=16))
    assert (failed["state"], failed["reason"]) == ("failed", "out-of-memory")
    following = daemon.run(daemon.spec(SOURCE, strategy={"replicas": [GPU], "update": "local"}, steps=2, batch_size=16))
    assert following["state"] == "completed"


def test_a_worker_keeps_its_context_from_job_to_job(daemon: Any) -> None:
    spec = daemon.spec(SOURCE, strategy={"replicas": [GPU], "update": "local"}, steps=2, batch_size=16)
    daemon.run(spec)
    before = daemon.worker_pids()["gpu-0"]
    shown = daemon.client.show(daemon.run(spec)["job"])
    assert daemon.worker_pids()["gpu-0"] == before, "it was clean, so nobody replaced it"
    assert shown["device_peak_bytes"]["gpu-0"] > 0
