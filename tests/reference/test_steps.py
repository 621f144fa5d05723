"""The oracle of a workload with a step, against the loop that anyone would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from weft.metrics.recording.step_log import read_step_log
from weft.reference.lines import ReferenceLines
from weft.reference.loop import ReferenceResult, train
from weft.reference.run import run_reference
from weft.spec.job_spec import CheckpointSection, JobSpec, Strategy
from weft.workload.faults import NonFiniteLoss
from weft.workload.randomness import unit_key
from weft.workload.workload import WorkloadError

SOURCE = '''
import torch, weft
from dataclasses import dataclass
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    """Two inputs, a mask, and a second use of the first layer; its dropouts stand inside and outside of a block."""
    def __init__(self, dropout=0.0, again=False):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        self.last = nn.Linear(8, 1)
        self.dropout, self.again = dropout, again
    def forward(self, x, *, mask, other=None):
        hidden = self.first(x) if other is None else self.first(x) + self.first(other)
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        for block in self.blocks:
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=False) if self.again else block(hidden))
        return self.last(hidden * mask)

def data(samples):
    inputs = torch.linspace(-1, 1, samples * 3, dtype=torch.float64).sin().view(samples, 3)
    return {"x": inputs, "mask": (torch.arange(samples) % 3 > 0).double().view(-1, 1), "other": inputs.flip(0),
            "labels": inputs.sum(dim=1, keepdim=True)}

@dataclass
class Item:
    """Not all of it tensors."""
    fields: dict
    name: str
    hint: None = None

class Items(torch.utils.data.Dataset):
    def __init__(self, tensors):
        self.tensors = tensors
    def __len__(self):
        return len(self.tensors["x"])
    def __getitem__(self, index):
        return Item({name: tensor[index].numpy() for name, tensor in self.tensors.items()}, str(index))

def step(model, batch):
    if isinstance(batch, Item):
        assert len(batch.name) == len(batch.fields["x"])
        batch = batch.fields
    labels = batch.pop("labels")
    output = model(**batch)
    return {"loss": nn.functional.mse_loss(output, labels), "output": output.mean(), "samples": len(labels)}

def masked(batch):
    return batch["mask"].sum()

def masked_step(model, batch):
    labels, mask = batch["labels"], batch["mask"]
    return ((model(batch["x"], mask=mask) - labels).square() * mask).sum() / mask.sum()

def workload(dropout=0.0, again=False, held_out=0, items=False, **changes):
    kind = Items if items else dict
    parts = dict(model=Net(dropout, again).double(), train=kind(data(10)), step=step,
                 validation=kind(data(held_out)) if held_out else None,
                 optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    return weft.Workload(**{**parts, **changes})
'''

Run = Callable[..., ReferenceResult]


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., JobSpec]:
    """Of the workload above, changed by Python source, with fields of the spec and arguments of the entry."""

    def make(changes: str = "", **fields: Any) -> JobSpec:
        (tmp_path / "job.py").write_text(f"{SOURCE}\ndef entry(**args):\n    return workload(**args{changes})\n")
        job = {"entry": "job.py:entry", "batch_size": 4, "seed": 3, "epochs": 1}
        job |= {name: fields.pop(name) for name in ("epochs", "batch_size", "mode") if name in fields}
        strategy = {axis: fields.pop(axis) for axis in list(fields) if axis in Strategy.model_fields}
        return JobSpec(job={**job, "args": fields}, strategy=strategy, directory=str(tmp_path))

    return make


@pytest.fixture
def run(spec: Callable[..., JobSpec]) -> Run:
    return lambda changes="", **fields: train(spec(changes, **fields))


@pytest.fixture
def theirs() -> dict[str, Any]:
    """What the source above defines, for a loop by hand."""
    names: dict[str, Any] = {"__name__": "theirs"}
    exec(SOURCE.replace("@dataclass", ""), names)
    return names


def assert_same_bits(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def orders(epoch: int = 0) -> list[torch.Tensor]:
    return list(torch.randperm(10, generator=torch.Generator().manual_seed(3 + epoch)).split(4))


@pytest.mark.parametrize("items", [False, True], ids=["tensors", "items"])
def test_a_step_is_the_loop_that_anyone_would_write_bit_for_bit(run: Run, theirs: dict[str, Any], items: bool) -> None:
    result = run(epochs=2, items=items)
    torch.manual_seed(3)
    model = theirs["Net"]().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    tensors, told = theirs["data"](10), []
    for epoch in range(2):
        for indices in orders(epoch):
            optimizer.zero_grad()
            values = theirs["step"](model, {name: tensor[indices] for name, tensor in tensors.items()})
            values["loss"].backward()
            optimizer.step()
            told.append({name: float(torch.as_tensor(value).detach()) for name, value in values.items()})
    assert result.measured == told
    assert result.losses == [values["loss"] for values in told]
    assert_same_bits(result.state, model.state_dict())


def test_what_is_drawn_is_keyed_by_the_calls_of_the_blocks(run: Run) -> None:
    """The calls: first 0, first 1, block 0 2, block 1 3, last 4; a loose dropout stands after the second one."""
    result = run(epochs=1, dropout=0.5, microbatches=2)
    torch.manual_seed(3)
    first, blocks, last = nn.Linear(3, 8), [nn.Linear(8, 8) for _ in range(2)], nn.Linear(8, 1)
    parameters = [each for layer in (first, *blocks, last) for each in layer.double().parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01, fused=True)
    inputs = torch.linspace(-1, 1, 30, dtype=torch.float64).sin().view(10, 3)
    mask = (torch.arange(10) % 3 > 0).double().view(-1, 1)
    for step, batch in enumerate(orders()):
        batch_loss = 0.0
        for microbatch in (1, 0):  # in any order
            part = batch.tensor_split(2)[microbatch]

            def draw(x: torch.Tensor, number: int, step: int = step, microbatch: int = microbatch) -> torch.Tensor:
                torch.default_generator.manual_seed(unit_key(3, step, microbatch, number))
                return nn.functional.dropout(x, 0.5)

            hidden = draw(first(inputs[part]) + first(inputs.flip(0)[part]), 4)
            for index, block in enumerate(blocks):
                hidden = hidden + draw(block(hidden).tanh(), 2 * (2 + index) + 1)
            loss = nn.functional.mse_loss(last(hidden * mask[part]), inputs[part].sum(dim=1, keepdim=True))
            (loss * (len(part) / len(batch))).backward()
            batch_loss += loss.item() * (len(part) / len(batch))
        optimizer.step()
        optimizer.zero_grad()
        assert result.losses[step] == pytest.approx(batch_loss, rel=1e-12)
    torch.testing.assert_close(list(result.state.values()), [each.detach() for each in parameters], rtol=1e-9, atol=0)


def test_what_a_checkpoint_runs_again_draws_the_same_numbers(run: Run) -> None:
    plain, again = run(epochs=1, dropout=0.5), run(epochs=1, dropout=0.5, again=True)
    assert plain.losses == again.losses
    assert_same_bits(plain.state, again.state)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_loss_over_pairs_is_the_same_as_a_step_of_its_own(run: Run, microbatches: int) -> None:
    pair = "(data(10)['x'], data(10)['labels'])"
    model = "nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()"
    of_loss = run(f", model={model}, step=None, loss=nn.MSELoss(), train={pair}, validation={pair}", microbatches=1)
    step = "lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])"
    of_step = run(f", model={model}, step={step}, train={pair}, validation={pair}", microbatches=1)
    assert (of_step.losses, of_step.validations) == (of_loss.losses, of_loss.validations)
    assert_same_bits(of_step.state, of_loss.state)


@pytest.mark.parametrize("strategy", [{}, {"microbatches": 3}, {"replicas": 2, "shares": [0.7, 0.3]}], ids=str)
def test_weighted_by_what_its_batch_counts_a_step_is_the_mean_over_all_of_that(
    run: Run, theirs: dict[str, Any], strategy: dict[str, Any]
) -> None:
    """A third of the samples counts nothing, so with three microbatches some would give nan."""
    result = run(", step=masked_step, weight=masked", held_out=9, batch_size=5, **strategy)
    torch.manual_seed(3)
    model = theirs["Net"]().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tensors = theirs["data"](10)
    for step, indices in enumerate(torch.randperm(10, generator=torch.Generator().manual_seed(3)).split(5)):
        loss = theirs["masked_step"](model, {name: tensor[indices] for name, tensor in tensors.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert result.losses[step] == pytest.approx(loss.item(), rel=1e-12)
    expected = theirs["masked_step"](model, theirs["data"](9)).item()
    assert result.validations == [{"loss": pytest.approx(expected, rel=1e-9)}]


def test_validation_is_a_step_without_gradients_or_a_function_of_its_own(run: Run) -> None:
    validate = "lambda model, batch: {'loss': 2.0, 'learns': model.training or torch.is_grad_enabled()}"
    own = run(f", validate={validate}", held_out=6)
    assert own.validations == [{"loss": 2.0, "learns": 0.0}]
    assert list(run(held_out=6, microbatches=2).validations[0]) == ["loss", "output", "samples"]
    assert own.losses == run(held_out=6).losses
    more = "lambda model, batch: step(model, batch) if model.training else {'loss': 1, 'right': 0.5}"
    assert run(f", step={more}", held_out=6).validations == [{"loss": 1.0, "right": 0.5}]


def test_forward_alone_measures_what_the_step_reports(run: Run) -> None:
    result = run(mode="forward")
    assert [values["samples"] for values in result.measured] == [4.0, 4.0, 2.0]
    assert result.losses == [values["loss"] for values in result.measured]


def test_replicas_that_clip_take_a_step_as_they_take_a_loss(run: Run) -> None:
    whole = run(clip_norm=0.1, microbatches=4)
    parted = run(clip_norm=0.1, microbatches=2, replicas=2)
    assert whole.grad_norms == pytest.approx(parted.grad_norms, rel=1e-12)
    torch.testing.assert_close(whole.state, parted.state, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (", step=lambda model, batch: None", "Workload.step returned None as the loss; it must return the loss"),
        (", step=lambda model, batch: model(batch['x'], mask=1)", r"Workload.step returned a tensor of shape \(4, 1\)"),
        (", step=lambda model, batch: 1.0", "Workload.step returned a loss without a gradient"),
        (", step=lambda model, batch: {'x': 1}", "Workload.step returned dict without 'loss'"),
        (
            ", step=lambda model, batch: masked_step(model, batch) + (masked_step(model, batch).backward() or 0)",
            r"the step calls backward\(\); leave it out",
        ),
        (", validate=lambda model, batch: 'x', held_out=4", "Workload.validate returned str as the loss"),
        (
            ", validate=lambda model, batch: {'loss': 1, str(batch['x'][0, 0]): 1}, held_out=8",
            "Workload.validate reported 'loss', ",
        ),
        (", train=data(0)", "Workload.train has no samples; give a dataset of at least one"),
        (
            ", train={'x': torch.zeros(3), 'y': torch.zeros(4)}",
            r"Workload.train: tensors of shapes \(3,\), \(4,\); the",
        ),
        (", train=[{1, 2}] * 4, collate=list", r"the batch\[0\] is set; a batch is made of tensors, arrays, numbers"),
    ],
)
def test_a_step_that_cannot_be_trained_is_refused_by_field_with_a_remedy(run: Run, changes: str, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        run(changes)


def test_a_loss_that_is_not_finite_names_its_samples(run: Run) -> None:
    with pytest.raises(NonFiniteLoss, match=r"loss is nan at step 0 \(microbatch 0: samples \d, \d, \d, \d of Work"):
        run(", step=lambda model, batch: step(model, batch)['loss'] * float('nan')")


def test_an_error_in_a_step_says_where_it_was(run: Run) -> None:
    with pytest.raises(KeyError) as caught:
        run(", step=lambda model, batch: batch['lables']")
    assert caught.value.__notes__ == ["weft: in Workload.step"]


def test_a_reference_run_writes_the_lines_that_a_job_writes(spec: Callable[..., JobSpec], tmp_path: Path) -> None:
    """They had neither epochs nor validations, and what a step tells stood under other names."""
    told = ", on_epoch=lambda values: {'f1': values['epoch'] + 0.5}, epoch_metrics=['f1']"
    result = run_reference(spec(told, held_out=4, epochs=2), threads=1, runs_dir=tmp_path / "runs")
    assert result["state"] == "completed"
    log = read_step_log(path := Path(result["run_dir"], "metrics.jsonl"))
    steps = len(log.steps) // 2
    assert [(each.step, each.epoch) for each in log.steps] == [(n + 1, n // steps) for n in range(2 * steps)]
    assert all(list(each.measured) == ["output", "samples"] and each.lr and each.samples for each in log.steps)
    assert log.steps[-1].loss == result["loss"]
    assert [(each.step, each.epoch) for each in log.validations] == [(steps, 0), (2 * steps, 1)]
    assert log.validations[-1].values == result["validation"]
    assert result["validation"]["f1"] == 1.5
    kinds = [next((kind for kind in ("validation", "on_epoch") if kind in line), "step") for line in _lines(path)]
    assert kinds == [*["step"] * steps, "validation", "on_epoch"] * 2


def test_a_reference_run_that_fails_leaves_the_lines_of_the_steps_before(
    spec: Callable[..., JobSpec], tmp_path: Path
) -> None:
    told = ", on_epoch=lambda values: 1 / 0"
    result = run_reference(spec(told, epochs=2), threads=1, runs_dir=tmp_path / "runs")
    assert result["exception"] == "ZeroDivisionError"
    lines = _lines(Path(result["run_dir"], "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_number_that_is_not_finite_is_null_in_the_lines_of_a_reference_run() -> None:
    taken: list[dict[str, Any]] = []
    ReferenceLines(taken.append).step(1, 0, 4, {"loss": float("nan"), "own": float("inf")}, None)
    assert (taken[0]["loss"], taken[0]["measured"]) == (None, {"loss": None, "own": None})


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_reference_run_tells_where_the_best_weights_are(spec: Callable[..., JobSpec], tmp_path: Path) -> None:
    """They were written, and neither the result nor what is printed of it named them."""
    keeping = spec(held_out=4).model_copy(update={"checkpoint": CheckpointSection(keep_best="loss")})
    best = run_reference(keeping, threads=1, runs_dir=tmp_path / "runs")["best"]
    assert Path(best).name == "best.safetensors"
    assert load_file(best)
    assert run_reference(spec(held_out=4), threads=1, runs_dir=tmp_path / "runs")["best"] is None


HUGGING_FACE = """
import transformers

def collate(rows):
    ids = torch.stack(rows)
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})

def hugging(**parts):
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, embd_pdrop=PDROP,
                                     attn_pdrop=PDROP, resid_pdrop=PDROP)
    tokens = torch.arange(80).view(10, 8) % 11
    return weft.Workload(transformers.GPT2LMHeadModel(config), list(tokens), collate=collate,
                         step=lambda model, batch: model(**batch).loss, validation=list(tokens),
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


@pytest.mark.slow
def test_a_hugging_face_model_trains_by_its_own_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def result(pdrop: float, **strategy: Any) -> ReferenceResult:
        (tmp_path / "job.py").write_text(SOURCE + HUGGING_FACE.replace("PDROP", str(pdrop)))
        job = {"entry": "job.py:hugging", "batch_size": 4, "seed": 3, "epochs": 1}
        return train(JobSpec(job=job, strategy=strategy, directory=str(tmp_path)))

    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, embd_pdrop=0.0)
    config.attn_pdrop = config.resid_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)
    losses = []
    for indices in orders():
        ids = torch.arange(80).view(10, 8)[indices] % 11
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    assert result(0.0).losses == pytest.approx(losses, rel=1e-6)
    drawn = result(0.5, microbatches=2)
    assert drawn.losses == result(0.5, microbatches=2).losses != result(0.0).losses
