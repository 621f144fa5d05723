"""Skipped calls: what other stages' modules return, without running them more often than somebody asks."""

from __future__ import annotations

import dataclasses
import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.cutting import skipped as skipped_module
from weft.workload.cutting.calls import SeededCalls
from weft.workload.cutting.placeholder import Placeholder, PlaceholderError, placeholder_of
from weft.workload.cutting.skipped import OtherStructure, SkippedCalls, pickled, unpickled
from weft.workload.cutting.visible import visible_modules

_CUT = runpy.run_path(str(Path(__file__).with_name("test_cut_step.py")))
MODELS, recorded, stages_of, run_stages, seed = (
    _CUT[name] for name in ("MODELS", "recorded", "stages_of", "run_stages", "seed")
)


class Block(nn.Module):
    """float32 (N, T, 4) -> (N, T, 4). Counts its forwards on placeholders."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        Block.runs += isinstance(self.line.weight, Placeholder)
        return x + torch.tanh(self.line(x))


class Blocks(nn.Module):
    def __init__(self, number: int, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def summed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(x).square().sum()
    return total


def late_stages_of(model: nn.Module, found: Any, cuts: list[int], records: Any = None) -> Any:
    """As a worker has them. records: by default of all calls, whether they are needed or not."""
    stages = stages_of(model, found, cuts)
    calls = unpickled(pickled(found.returned if records is None else records, found.redraws))
    for step, *_ in stages:
        step._skipped = calls
    return stages


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    Block.runs = 0
    return Blocks(6)


def test_blocks_are_not_run_for_shapes_that_nobody_asks_for(model: nn.Module) -> None:
    """Each new length of a batch ran each block of the stages before on placeholders, 25 ms for one of a GPT."""
    found = recorded(model, summed, torch.randn(2, 3, 4))
    stages = late_stages_of(model, found, [5])
    runs = []
    for length in range(3, 12):
        batch = torch.randn(2, length, 4)
        before = Block.runs
        assert torch.equal(run_stages(stages, summed, batch), summed(model, batch))
        runs.append(Block.runs - before)
    assert runs == [5, 5, 0, 0, 0, 0, 0, 0, 0], "for two lengths, since what is alike must have been seen"


def test_whoever_asks_for_the_shape_gets_that_of_this_batch(model: nn.Module) -> None:
    asked = []

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(model.blocks):
            x = block(x)
            if number == 3:
                asked.append((tuple(x.shape), x.size(1), len(x), x.dim(), x.numel(), x.stride(), x.is_contiguous()))
                asked.append((torch.zeros_like(x).shape[1], x.dtype, x.device, x.requires_grad))
        return x.square().sum()

    found = recorded(model, step, torch.randn(2, 3, 4))
    stages = late_stages_of(model, found, [5])
    for length in (3, 4, 7, 9):
        batch = torch.randn(2, length, 4)
        asked.clear()
        whole = step(model, batch)
        assert torch.equal(run_stages(stages, step, batch), whole)
        own, _, of_last_stage = asked[:2], asked[2:4], asked[-2:]
        assert of_last_stage == own


def test_a_long_chain_of_blocks_is_asked_at_its_end() -> None:
    """One asks the one before, and so on: as deep as Python calls."""

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        *before, last = model.blocks
        for block in before:
            x = block(x)
        x = x.reshape(-1, 4) if x.shape[1] else x
        total: torch.Tensor = last(x).sum()
        return total

    model = Blocks(150)
    found = recorded(model, step, torch.randn(2, 3, 4))
    stages = late_stages_of(model, found, [149])
    for length in (3, 4, 5, 6):
        batch = torch.randn(2, length, 4)
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))


def test_a_placeholder_that_another_run_has_kept_is_found_by_the_calls_of_its_own(model: nn.Module) -> None:
    """It was looked for among the calls of the run that asked, one of which had been given it: without end."""
    (visible, *_) = [each for each in visible_modules(model) if isinstance(each.module, Block)]
    skipped = SkippedCalls({}, late=True)

    def skip(x: torch.Tensor) -> Any:
        return skipped.skip(visible, 0, visible.module.forward, ((x,), {}))

    def given(length: int) -> Placeholder:
        return placeholder_of(torch.empty(2, length, 4, device="meta"), "x", requires_grad=False)

    for length in (3, 4):
        skip(given(length))
    kept = skip(given(5))
    skipped.end_run()
    late = skip(kept)
    assert tuple(late.shape) == tuple(kept.shape) == (2, 5, 4)


class Telling(Block):
    """Returns its length, too."""

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, int]) -> Any:
        x = x if isinstance(x, torch.Tensor) else x[0]
        return super().forward(x), x.shape[1]


def test_what_returns_more_than_tensors_is_run_for_each_shape() -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        length = 0
        for block in model.blocks:
            x, length = block(x)
        return x.square().sum() / length

    Block.runs = 0
    model = Blocks(3, Telling)
    found = recorded(model, step, torch.randn(2, 3, 4))
    stages = late_stages_of(model, found, [2])
    for length in (3, 4, 5, 6):
        batch = torch.randn(2, length, 4)
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))
    assert Block.runs == 2 * 4


class Splitting(Block):
    """Of what is longer than four it returns two parts."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            x = torch.cat(list(x), dim=1)
        whole = super().forward(x)
        return (whole,) if whole.shape[1] <= 4 else tuple(whole.split(4, dim=1))


def test_what_turns_out_to_return_something_else_is_run_for_each_shape_from_then_on() -> None:
    def step(model: Any, x: Any) -> torch.Tensor:
        one, two, three, four = model.blocks
        for block in (one, two):
            x = [part + part.new_zeros(()) for part in block(x)]
        total: torch.Tensor = four(three(torch.cat(x, dim=1))).square().sum()
        return total

    model = Blocks(2, Splitting)
    model.blocks.extend([Block(), Block()])  # type: ignore[operator]
    found = recorded(model, step, torch.randn(2, 2, 4))
    stages = late_stages_of(model, found, [3])
    for length in (2, 3, 4):
        batch = torch.randn(2, length, 4)
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))
    batch = torch.randn(2, 6, 4)
    with pytest.raises(OtherStructure):  # the first block was thought to be alike for all shapes
        run_stages(stages, step, batch)
    assert torch.equal(run_stages(stages, step, batch), step(model, batch))


class Masked(Block):
    """Gives its mask back, or one that it has made."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> Any:
        mask = torch.ones_like(x) if mask is None else mask
        bias = torch.zeros_like(x) if bias is None else bias
        return super().forward(x) * mask + bias, mask, bias


def test_a_call_with_other_arguments_is_another_call() -> None:
    """A T5 has no mask where nothing of a batch is padded: its blocks were thought to give back the third of two."""

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.full_like(x, 0.5) if x.shape[1] < 5 else None
        bias = torch.ones_like(x)
        for block in model.blocks:
            x, mask, bias = block(x, mask, bias)
        return (x * mask + bias).square().sum()

    model = Blocks(3, Masked)
    found = recorded(model, step, torch.randn(2, 3, 4))
    stages = late_stages_of(model, found, [2])
    for length in (2, 3, 4, 5, 6, 7, 8):
        batch = torch.randn(2, length, 4)
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))


def test_the_oldest_of_many_signatures_goes_and_not_all(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """All were forgotten at once, and batches of many lengths ran every block again and again."""
    monkeypatch.setattr(skipped_module, "MAX_SIGNATURES", 10)
    found = recorded(model, summed, torch.randn(2, 3, 4))
    stages = stages_of(model, found, [1])
    calls = SkippedCalls(found.returned)
    for step, *_ in stages:
        step._skipped, step._tapes = calls, {}
    for length in [*range(1, 11), *range(2, 11)]:
        stages[-1][0]._tapes.clear()
        run_stages(stages, summed, torch.randn(2, length, 4))
    assert Block.runs == 10
    stages[-1][0]._tapes.clear()
    run_stages(stages, summed, torch.randn(2, 11, 4))
    stages[-1][0]._tapes.clear()
    run_stages(stages, summed, torch.randn(2, 10, 4))
    assert Block.runs == 11


class Scaled(Block):
    def forward(self, x: torch.Tensor, scale: float) -> Any:
        return super().forward(x) * scale


def test_what_is_known_of_calls_does_not_grow_with_a_number_that_each_step_has_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A temperature that falls from step to step is another signature each time."""
    monkeypatch.setattr(skipped_module, "MAX_SIGNATURES", 10)
    scale = [1.0]

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x, scale[0])
        return x.square().sum()

    model = Blocks(3, Scaled)
    batch = torch.randn(2, 3, 4)
    stages = late_stages_of(model, recorded(model, step, batch), [2])
    for number in range(20):
        scale[0] = 1.0 / (number + 1)
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))
    calls = stages[-1][0]._skipped
    assert (len(calls._known), len(calls._alike)) == (10, 10)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("name", MODELS["NAMES"])
def test_any_model_gives_its_own_loss_for_batches_of_sizes_that_come_late(name: str) -> None:
    torch.manual_seed(0)
    model, user_step, data = MODELS["parts"](name)

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        values = user_step(model, {key: tensor.clone() for key, tensor in batch.items()})  # it may write to them
        return values["loss"] if isinstance(values, dict) else values

    trained = recorded(model, step, data(3))
    with torch.no_grad():
        model.eval()
        found = trained.merged(recorded(model, step, data(3)), "Workload.step")
        cuts = [unit for unit in range(1, len(found.units)) if unit not in found.problems]
        stages = late_stages_of(model, found, cuts[1::2])
        for size in (3, 2, 5, 4, 6):
            batch = data(size)
            with SeededCalls(model).installed() as numbers, numbers.running(seed):
                whole = step(model, batch)
            assert torch.equal(run_stages(stages, step, batch), whole), size


def needed(model: nn.Module, found: Any, cuts: list[int], step: Any, batch: Any) -> Any:
    """Those records of calls that placeholders do not lead to, which are all that a worker gets."""
    stages = stages_of(model, found, cuts)
    run_stages(stages, step, batch)
    return stages[0][0]._skipped.needed


class Packing(nn.Module):
    """float32 (N, T, 4), lengths (N,) -> (N, longest, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded: torch.Tensor = nn.utils.rnn.pad_packed_sequence(self.rows(packed)[0], batch_first=True)[0]
        return padded


class Cropping(Block):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return super().forward(x)[:, : int(lengths.max())]


class Listing(Block):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return super().forward(x)[:, : max(lengths.tolist())]


class Choosing(Block):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        (kept,) = torch.where(torch.arange(x.shape[1]) < lengths.max())
        return super().forward(x).index_select(1, kept)


@pytest.mark.parametrize("kind", [Packing, Cropping, Listing, Choosing])
def test_shapes_that_go_by_numbers_of_the_batch_are_those_of_this_batch(kind: type[nn.Module]) -> None:
    """They were the first batch's, where batches had one shape: a mean over columns was divided by another number."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        first, second, third = model.blocks
        x = second(first(batch["x"]), batch["lengths"])
        total: torch.Tensor = third(x.mean(1)).square().sum() * x.shape[1]
        return total

    model = Blocks(3)
    model.blocks[1] = kind()
    sizes = [(9, 5), (9, 7), (9, 7), (8, 4), (7, 7), (9, 9), (6, 5), (5, 5), (9, 5)]  # the first block's come late
    batches = [{"x": torch.randn(2, width, 4), "lengths": torch.tensor([3, longest])} for width, longest in sizes]
    found = recorded(model, step, batches[0])
    stages = late_stages_of(model, found, [2], needed(model, found, [2], step, batches[0]))
    for batch in batches:
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))


def test_a_module_that_is_given_a_packed_sequence_returns_one_of_the_same_length() -> None:
    """A packed sequence was like any other: its length is the sum of the batch's."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        rows, last = model.blocks
        packed = nn.utils.rnn.pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True)
        x, lengths = nn.utils.rnn.pad_packed_sequence(rows(packed)[0], batch_first=True)
        x = x.masked_fill((torch.arange(x.shape[1]) >= lengths[:, None])[..., None], 0.0)
        total: torch.Tensor = last(x.mean(1)).square().sum() * x.shape[1]
        return total

    model = Blocks(2)
    model.blocks[0] = nn.GRU(4, 4, batch_first=True)
    batches = [{"x": torch.randn(3, 9, 4), "lengths": torch.tensor(each)} for each in ([9, 7, 4], [8, 8, 8], [5, 4, 4])]
    found = recorded(model, step, batches[0])
    stages = late_stages_of(model, found, [1], needed(model, found, [1], step, batches[0]))
    for batch in (*batches, *batches):
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))


def test_a_module_that_is_given_parts_in_an_object_of_the_users_is_asked_for_each_shape() -> None:
    """Of an object that is no tensor, tuple, list or dict its class alone was looked at."""

    @dataclasses.dataclass
    class Pair:
        first: torch.Tensor
        second: torch.Tensor

    class Joining(Block):
        def forward(self, pair: Any) -> Any:
            return super().forward(torch.cat([pair.first, pair.second], dim=1))

    def step(model: Any, batch: Any) -> torch.Tensor:
        x = model.blocks[0](Pair(batch["x"], batch["y"]))
        total: torch.Tensor = model.blocks[1](x.mean(1)).square().sum() * x.shape[1]
        return total

    model = Blocks(1)
    model.blocks.insert(0, Joining())
    batch = {"x": torch.randn(2, 3, 4), "y": torch.randn(2, 2, 4)}
    found = recorded(model, step, batch)
    stages = late_stages_of(model, found, [1], needed(model, found, [1], step, batch))
    for length in (2, 5, 3, 4, 2):
        batch = {"x": torch.randn(2, 3, 4), "y": torch.randn(2, length, 4)}
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))


class Routing(Block):
    """Asks for its own numbers, and hands on what it is given beside x, or another tensor that lies as that one."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.makes = makes

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        rows, columns = torch.where(self.line(x).sum(2) > 0)
        chosen = torch.zeros_like(x, memory_format=torch.contiguous_format)
        chosen[rows, columns] = self.line(x[rows, columns])
        return x + chosen * bias, bias.sin() if self.makes else bias


@pytest.mark.parametrize("makes", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_asks_for_numbers_may_return_dimensions_in_any_order_in_memory(order: list[int], makes: bool) -> None:
    """Switch Transformers' sparse blocks hand on a bias of positions that has its heads last in memory; a batch of
    another length than those that were tried was refused."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        x, bias = batch
        for block in model.blocks:
            x, bias = block(x, bias)
        return (x + bias).square().sum()

    def batch(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
        lying = torch.randn(*(sizes[dim] for dim in order)).permute([order.index(dim) for dim in range(3)])
        return torch.randn(*sizes), lying

    model = Blocks(0)
    model.blocks = nn.ModuleList(Routing(makes) for _ in range(3))
    batches = [batch(2, 5, 4), batch(2, 3, 4), batch(1, 7, 4), batch(3, 1, 4)]
    found = recorded(model, step, batches[0])
    stages = late_stages_of(model, found, [2], needed(model, found, [2], step, batches[0]))
    for each in batches:
        assert torch.equal(run_stages(stages, step, each), step(model, each))


class Pruning(Block):
    """Keeps as many columns as its own numbers say."""

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x[:, : int(x.sum()) + 1]


def test_a_shape_that_goes_by_numbers_of_another_stage_is_refused_where_the_step_goes_by_it() -> None:
    """It was that of the run before training: silently, where a loss is divided by it."""

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        first, second, third = model.blocks
        x = second(first(x))
        total: torch.Tensor = third(x).square().sum() / (x.shape[1] if asks else 1)
        return total

    model = Blocks(3)
    model.blocks[0] = pruning = Pruning()
    nn.init.zeros_(pruning.line.weight)
    nn.init.zeros_(pruning.line.bias)
    batches = [torch.full((2, 9, 4), number / 72) for number in (3.5, 3.5, 5.5)]
    for asks in (False, True):
        found = recorded(model, step, batches[0])
        stages = late_stages_of(model, found, [2], needed(model, found, [2], step, batches[0]))
        for batch in batches[: 2 if asks else 3]:
            assert torch.equal(run_stages(stages, step, batch), step(model, batch))
    with pytest.raises(PlaceholderError, match=r"Block\) has the shape \(2, 6, 4\), and the step went by \(2, 4, 4\)"):
        run_stages(stages, step, batches[2])


class Filling(nn.Module):
    """Writes to the dict that it is given, and returns that: a value beside what came, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        state["x"] = self.line(state["x"]).tanh()
        state["sizes"] = state["sizes"] + state["x"].square().mean() if "sizes" in state else state["x"].mean()
        state["seen"].append(state["x"])
        return state


def test_a_dict_that_blocks_write_to_and_return_is_passed_on_wherever_the_model_is_cut() -> None:
    """A block that was skipped for the first time wrote to it, and what it gives back was looked for there; what it
    returns twice was two tensors, one of which never came."""
    torch.manual_seed(0)
    model = Blocks(4, Filling)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        state = model({"x": batch, "mask": batch > 0, "seen": []})
        loss: torch.Tensor = (state["x"] * state["mask"]).sum() + state["sizes"] + torch.stack(state["seen"]).sum()
        return loss

    found = recorded(model, step, torch.randn(2, 4))
    assert found.problems == {}
    stages = late_stages_of(model, found, [1, 2, 3])
    for length in (2, 2, 3, 4, 5):
        batch = torch.randn(length, 4)
        assert torch.equal(run_stages(stages, step, batch), step(model, batch))
