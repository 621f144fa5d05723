"""Files of a checkpoint: what is read is what was held, in however many files; what is none of ours is refused, and
nothing in it is run."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from weft.machine.checkpoint_files import CheckpointError, read_manifest, write_checkpoint
from weft.workers.snapshots import checkpoint
from weft.workers.snapshots.checkpoint import OpenCheckpoint, write_files
from weft.workers.snapshots.held import VALUES, Extent, Held, Name, Piece
from weft.workers.snapshots.saved import Saved
from weft.workload.workload import WorkloadError

WEIGHT = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
FROZEN = torch.randn(5)
RAN: list[str] = []


def name_of(name: str, tensor: torch.Tensor, first: str = "") -> Name:
    return Name(name, first or name, tuple(tensor.shape), tensor.stride())


@pytest.fixture
def saved() -> Saved:
    return Saved(parts())


def parts() -> list[Held]:
    """A weight in two ranges, held by two owners, with a second name; a frozen one; buffers of two replicas."""
    flat = WEIGHT.permute(0, 2, 3, 1).reshape(-1)
    owners = [
        Held(pieces=[Piece(entry, [Extent("weight", 0, 0, 40)], scale * flat[:40])])
        for entry, scale in ((VALUES, 1.0), ("exp_avg", 2.0))
    ] + [
        Held(pieces=[Piece(entry, [Extent("weight", 40, 3, 59)], torch.cat([torch.zeros(3), scale * flat[40:]]))])
        for entry, scale in ((VALUES, 1.0), ("exp_avg", 2.0))
    ]
    owners[0].states = {"weight": {"step": torch.tensor(7.0), "factor": 0.5}}
    owners[0].options = {"weight": {"lr": 0.1, "betas": (0.9, 0.99), "foreach": True}}
    owners[0].scheduler = {"last_epoch": 7}
    first = Held(
        replica=0,
        buffers={"mean": torch.ones(3), "hidden": torch.full((2,), 5.0)},
        fixed={"frozen": FROZEN},
        names=[
            name_of("weight", WEIGHT),
            name_of("again", WEIGHT, "weight"),
            name_of("frozen", FROZEN),
            name_of("mean", torch.ones(3)),
        ],
    )
    return [*owners, first, *(Held(replica=r, buffers={"mean": torch.full((3,), float(r))}) for r in (11, 2, 22))]


@pytest.fixture
def path(saved: Saved, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, 7, {}, lambda directory: write_files(saved, directory), keep=1)


def opened(path: Path) -> OpenCheckpoint:
    return OpenCheckpoint(read_manifest(path))


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1])
def test_what_is_read_is_what_was_held(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    path = write_checkpoint(tmp_path, 7, {}, lambda directory: write_files(saved, directory), keep=1)
    assert len(list(path.glob("model*.safetensors"))) == (1 if shard_bytes > 1 else 4)
    found, like = opened(path), nn.Parameter(WEIGHT)
    values = found.values("weight", like)
    assert values is not None
    assert torch.equal(values, WEIGHT)
    assert values.stride() == WEIGHT.stride()
    (exp_avg,) = found.elements("weight", like).values()
    assert torch.equal(exp_avg, (2 * WEIGHT).permute(0, 2, 3, 1).reshape(-1)), "in the order of memory"
    assert found.rest("weight") == {"step": torch.tensor(7.0), "factor": 0.5}
    assert found.options("weight") == {"lr": 0.1, "betas": (0.9, 0.99), "foreach": True}
    assert found.scheduler == {"last_epoch": 7}
    assert torch.equal(dict(found.buffers(0))["hidden"], torch.full((2,), 5.0))
    for replica in (2, 11, 22):
        assert torch.equal(found.buffers(replica)["mean"], torch.full((3,), float(replica)))
    assert torch.equal(found.buffers(1)["mean"], torch.ones(3)), "what begins with another's number is not its own"
    assert torch.equal(found.buffers(7)["mean"], torch.ones(3)), "the first one's, of a replica that was not there"


def test_plain_torch_reads_it(path: Path) -> None:
    model = load_file(path / "model.safetensors")
    assert model.keys() == {"weight", "again", "frozen", "mean"}
    assert torch.equal(model["weight"], WEIGHT)
    assert torch.equal(model["again"], WEIGHT)
    training = torch.load(path / "training.pt", weights_only=True)
    assert torch.equal(training["states"]["weight"]["step"], torch.tensor(7.0))
    assert load_file(path / "optimizer.safetensors").keys() == {"exp_avg/weight"}


class Shared(nn.Module):
    """Of the state dict that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.again = nn.Parameter(torch.zeros_like(WEIGHT))
        self.frozen = nn.Parameter(torch.zeros_like(FROZEN), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1])
def test_the_page_s_function_reads_it_in_however_many_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_checkpoint: Callable[..., None],
    shard_bytes: int,
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    owner = Held(pieces=[Piece("exp_avg_sq", [Extent("weight", 0, 0, 96)], torch.ones(96))])
    saved = Saved([*parts(), owner])
    path = write_checkpoint(tmp_path, 7, {}, lambda directory: write_files(saved, directory), keep=1)
    assert len(list(path.glob("optimizer*.safetensors"))) == (1 if shard_bytes > 1 else 2)
    model = Shared()
    optimizer = torch.optim.AdamW([model.frozen, model.weight], lr=1.0, foreach=False)
    load_checkpoint(path, model, optimizer)
    assert torch.equal(model.weight, WEIGHT)
    assert torch.equal(model.frozen, FROZEN)
    assert torch.equal(model.mean, torch.ones(3))
    state = optimizer.state[model.weight]
    assert torch.equal(state["exp_avg"], 2 * WEIGHT)
    assert torch.equal(state["exp_avg_sq"], torch.ones_like(WEIGHT))
    assert state["step"] == 7
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["foreach"]) == (0.1, (0.9, 0.99), False)


class Hostile:
    def __reduce__(self) -> Any:
        return RAN.append, ("it was run",)


def header(table: object, behind: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + behind


FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "training.pt": [
        b"",
        b"PK\x03\x04",
        pickle.dumps(Hostile()),
        pickle.dumps({"states": Hostile(), "options": {}, "scheduler": None}),
        b"\x80\x04." * 10,
        b"\0" * 1000,
    ],
    "model.safetensors": [
        b"",
        struct.pack("<Q", 1 << 63),
        struct.pack("<Q", 1 << 40) + b"{}",
        header([]),
        header({"weight": FLOATS}),
        header({"weight": FLOATS | {"data_offsets": [8, 0]}}, b"\0" * 8),
        header({"weight": FLOATS | {"shape": [1 << 62, 1 << 62]}}, b"\0" * 8),
        header({"weight": FLOATS | {"dtype": "PICKLE"}}, b"\0" * 8),
        header({"weight": FLOATS, "other": FLOATS}, b"\0" * 8),
        pickle.dumps(Hostile()),
        b"\0" * 1000,
    ],
    "optimizer.safetensors": [b"", header({"x": None}), pickle.dumps(Hostile())],
    "buffers.safetensors": [b"", header({"x": 3}), pickle.dumps(Hostile())],
}


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, many in HOSTILE.items() for n in range(len(many))])
def test_a_hostile_file_with_the_right_digest_is_refused_and_nothing_is_run(path: Path, name: str, number: int) -> None:
    replace_file(path, name, HOSTILE[name][number])
    with pytest.raises(CheckpointError, match=name):
        opened(path)
    assert RAN == []


EDITED = [
    *({"states": None}, {"states": {"weight": 3}}, {"states": {0: {}}}, {"states": []}),
    *({"options": None}, {"options": {"weight": None}}, {"options": {"weight": [0.1]}}),
    *({"scheduler": "x"}, {"scheduler": []}, {"scheduler": 0}, {"kinds": None}, {"kinds": 3}, {"kinds": ["optimizer"]}),
    *({"attributes": None}, {"attributes": {0: None}}, {"attributes": {0: {"": 3}}}, {"attributes": {0: {"": {3: 1}}}}),
    *({"attributes": {0: {3: {"calls": 1}}}}, {"attributes": {0: {"": {"_parameters": {}}}}}),
    {"attributes": {0: {"": {"recent": ("weft: list", [], None)}}}},
    {"attributes": {0: {"": {"recent": ("weft: set", 3, None)}}}},
    {"attributes": {0: {"": {"recent": [("weft: array", [1.0], None)]}}}},
    {"attributes": {0: {"": {"random": ("weft: generator", ("weft: deque", 3, None), None)}}}},
]


@pytest.mark.parametrize("edited", EDITED)
def test_plain_data_of_another_kind_is_refused(path: Path, edited: dict[str, Any]) -> None:
    """It failed in whatever first took it for what it was to be, as an error of the user's code."""
    training = torch.load(path / "training.pt", weights_only=True)
    file = io.BytesIO()
    torch.save(training | edited, file)
    replace_file(path, "training.pt", file.getvalue())
    with pytest.raises(CheckpointError, match=r"training\.pt is no file of a checkpoint \(.+\)$"):
        opened(path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "buffers.safetensors", "training.pt"])
def test_a_manifest_that_leaves_a_file_out_is_refused(path: Path, name: str) -> None:
    edit_files(path, lambda files: files.pop(name))
    with pytest.raises(CheckpointError, match=rf"is no whole checkpoint \(its manifest has no {re.escape(name)}\)"):
        opened(path)


def replace_file(path: Path, name: str, data: bytes) -> None:
    """With the digest that it has then."""
    (path / name).write_bytes(data)
    edit_files(path, lambda files: files.update({name: [len(data), hashlib.sha256(data).hexdigest()]}))


def edit_files(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest["files"])
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_model_of_another_shape_is_refused(path: Path) -> None:
    with pytest.raises(Exception, match=r"'weight' has the shape \(3, 3\), and had the shape \(2, 3, 4, 4\)"):
        opened(path).values("weight", torch.empty(3, 3))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["weight"], None),
        (["weight", "frozen", "later"], "1 parameters that it does not have ('later'); build the model as it was then"),
        (["frozen"], "1 parameters that this one does not have ('weight')"),
    ],
)
def test_a_model_of_other_parameters_is_refused(path: Path, names: list[str], told: str | None) -> None:
    """It went on, with the values that its function had given them."""
    model = {name: nn.Parameter(torch.zeros(1)) for name in names}
    model["unsaved"] = nn.Parameter(torch.zeros(1), requires_grad=False)  # a module may leave out what it has
    if told is None:
        opened(path).check_model(model)
        return
    with pytest.raises(WorkloadError, match=re.escape(told)):
        opened(path).check_model(model)


@pytest.mark.parametrize("now", [torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype_is_refused(path: Path, now: torch.dtype) -> None:
    """Resumed in bfloat16 a job trained on with momentum in float32; in float64 SGD's step failed."""
    with pytest.raises(WorkloadError) as refused:
        opened(path).check_model({"weight": nn.Parameter(WEIGHT.to(now))})
    name = str(now).removeprefix("torch.")
    assert f"'weight' is {name} and was float32 when it was saved" in str(refused.value)
    assert "build the model in the dtype that it had, or begin a new job with the weights" in str(refused.value)


def test_a_dtype_is_compared_of_what_is_trained_and_of_any_shape(tmp_path: Path) -> None:
    scale, empty = torch.tensor(2.0, dtype=torch.float64), torch.empty(0, 3, dtype=torch.bfloat16)
    first = Held(
        replica=0,
        fixed={"scale": scale, "empty": empty, "frozen": FROZEN},
        names=[name_of("scale", scale), name_of("empty", empty), name_of("frozen", FROZEN)],
    )
    found = opened(write_checkpoint(tmp_path, 7, {}, lambda place: write_files(Saved([first]), place), keep=1))
    frozen = nn.Parameter(FROZEN.double(), requires_grad=False)
    model = {"scale": nn.Parameter(scale), "empty": nn.Parameter(empty), "frozen": frozen}
    found.check_model(model)
    with pytest.raises(WorkloadError, match=r"'scale' is float32 and was float64"):
        found.check_model(model | {"scale": nn.Parameter(scale.float())})
