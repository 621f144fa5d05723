"""What users' forwards do between and around modules, and what inspection has to tell of it: which cuts give the whole
step's result, each alone, and what a backward changes. Found by models by chance (`chance_models.py`)."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.cut_proof import CutProof
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload

_TRIALS = runpy.run_path(str(Path(__file__).with_name("cut_trials.py")))
whole_of, trial_of, differs = (_TRIALS[name] for name in ("whole_of", "trial_of", "differs"))

Forward = Callable[["Parts", torch.Tensor], torch.Tensor]


class Shift(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        return x


class Parts(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.run = run
        self.inlet, self.first, self.second, self.third, self.head = (nn.Linear(4, 4) for _ in range(5))
        self.shift, self.norm = Shift(), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self, self.inlet(x)))

    def left_out(self) -> bool:
        return self.training and bool(torch.rand(()) < 0.4)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 4), torch.randn(count, 4)


def told_of(
    model: nn.Module, step: Callable[..., Any] = loss_of, seed: int = 3, mode: str = "train", **strategy: Any
) -> dict[str, Any]:
    workload = Workload(model, data(8), step=step, optimizer=partial(torch.optim.SGD, lr=0.1))
    job = {"entry": "a.py:b", "steps": 1, "batch_size": 4, "seed": seed, "mode": mode}
    spec = JobSpec.parse({"job": job, "strategy": {"stages": 2} | strategy, "directory": "/"})
    return inspect(workload, spec, HostDevice())


def problems_of(told: dict[str, Any]) -> dict[str, str]:
    return {told["units"][unit]["name"]: text for unit, text in told["cut_problems"]}


def again_behind_others(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """Twice through two modules, of which the first writes to its argument."""
    shifted = parts.shift(x.clone())
    once = parts.first(shifted)
    more = parts.shift(shifted.clone())
    return parts.second(once + parts.first(more)) + more


def test_each_cut_alone_gives_the_result_where_a_module_that_writes_is_called_again() -> None:
    """All cuts together did. With one alone the second call is skipped within the later stage, where it got a tensor
    and not a placeholder, and gave that back unwritten: a job of two stages trained on other numbers, and nobody said
    so."""
    model, batch = Parts(again_behind_others), data(4)
    recorded, whole = whole_of(model, loss_of, batch)
    assert recorded.late, "calls of a second pass"
    cuts = [unit for unit in range(1, len(recorded.units)) if unit not in recorded.problems]
    assert len(cuts) > 2
    for chosen in (*([cut] for cut in cuts), cuts):
        assert differs(model, batch, trial_of(model, loss_of, recorded, chosen), whole) is None, chosen


def a_line(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    y = parts.first(x).mean(1, keepdim=True).expand_as(x)
    z = y if parts.left_out() else y + y.tanh()
    for _ in range(2):
        y = parts.third(parts.second(2 * y))
    return y + z.flip(1)


def lines_apart(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    x = parts.first(x)
    y = (x if parts.left_out() else x + parts.second(x)) / 2
    z = y if parts.left_out() else y + parts.third(y)
    return parts.blocks[0](z) + y


def a_second_call(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    x = parts.first(x)
    y = x if parts.left_out() else x + parts.third(parts.second(x))
    return parts.third(parts.second(y.mean(1, keepdim=True).expand_as(x))) * y


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("run", [a_line, lines_apart, a_second_call])
def test_a_cut_gives_the_result_whatever_lines_and_second_calls_are_left_out_or_is_refused(
    run: Forward, seed: int
) -> None:
    model, batch = Parts(run), data(4)
    told = told_of(model, seed=seed)
    problems = {unit for unit, _ in told["cut_problems"]}
    runs = [whole_of(model, loss_of, batch, microbatch) for microbatch in range(24)]
    names = [unit["name"] for unit in told["units"]]
    recorded = next(recorded for recorded, _ in runs if list(recorded.units) == names)
    for cut in set(range(1, len(names))) - problems:
        trial = trial_of(model, loss_of, recorded, [cut], *(recorded.returned for recorded, _ in runs))
        for microbatch, (_, whole) in enumerate(runs):
            assert differs(model, batch, trial, whole, microbatch) is None, (names[cut], microbatch)


def others_called_twice(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    first, *rest = parts.blocks
    for block in rest:
        if parts.training and bool(torch.rand(()) < 2):
            continue
        x = block(x)
    return parts.second(first(first(x)))


def test_a_block_that_every_run_leaves_out_beside_one_that_is_called_twice_keeps_all_in_one_stage() -> None:
    """Nothing shows where it would be called. Inspection ended in an IndexError."""
    problems = problems_of(told_of(Parts(others_called_twice), stages=1))
    assert "nothing shows where it is called" in problems["second"]
    assert "nothing shows where it is called" in problems["head"]


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.losses = nn.Linear(4, 4), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.clear()
        self.losses.append(0 * x.square().mean())
        return self.layer(x)


def test_a_cut_that_was_refused_is_not_taken_for_what_the_trial_before_it_knew() -> None:
    """The loss that a module keeps for the step is nothing here, so nothing shows in the numbers; but the last stage
    has no such module. Its forward was not run a second time, and the cut was taken after all."""
    model = nn.Sequential(nn.Linear(4, 4), Kept(), nn.Linear(4, 4))

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_of(model, batch) + sum(model[1].losses)

    told = told_of(model, step)
    assert [unit["name"] for unit in told["units"]] == ["0", "1", "2"]
    assert set(problems_of(told)) == {"2"}


def memory_of_each_layer(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    mems, new = getattr(parts, "mems", [torch.zeros_like(x)] * 3), []
    for block, mem in zip(parts.blocks, mems, strict=True):
        new.append(x.detach())
        x = x + block(x + mem)
    parts.mems = new
    return x


def memory_of_the_first_layer(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    first = parts.first(x + getattr(parts, "mem", torch.zeros_like(x)))
    x = parts.second(first)
    parts.mem = first.detach()
    return x


@pytest.mark.parametrize("run", [memory_of_each_layer, memory_of_the_first_layer])
def test_a_step_that_goes_by_what_its_last_run_has_left_is_not_cut(run: Forward) -> None:
    """A stage leaves the step before the line that keeps the memory, so all its runs were as the first one, and the
    cuts gave what the uncut step gives in its first run: a job of two stages trained on other numbers."""
    told = told_of(Parts(run))
    assert {unit for unit, _ in told["cut_problems"]} == set(range(1, len(told["units"])))
    for why in problems_of(told).values():
        assert why.startswith("run again with the same batch, the whole step gives something else: the loss (")
        assert "keep in buffers of the model what lasts from call to call" in why


def memory_of_its_own(_: Parts) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    kept: list[Any] = [None]
    return lambda: kept[0], lambda new: kept.__setitem__(0, new)


def memory_of_the_model(parts: Parts) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    parts.mem = None
    return lambda: parts.mem, lambda new: setattr(parts, "mem", new)


@pytest.mark.parametrize("validates", [False, True], ids=["training", "validation"])
@pytest.mark.parametrize("memory", [memory_of_its_own, memory_of_the_model])
def test_a_memory_that_begins_anew_with_the_first_batch_is_found_by_another_batch(
    memory: Callable[[Parts], tuple[Callable[[], Any], Callable[[Any], None]]], validates: bool
) -> None:
    """As the hidden state of a language model does with each epoch: the first batch gives the same however often it is
    run, and jobs of two stages trained on other numbers, since the first stage never had the memory."""
    model = Parts(lambda parts, x: parts.third(parts.second(parts.first(x))))
    remembered, remember = memory(model)

    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y, number = batch
        begins = int(number[0]) == 0 or remembered() is None or model.training == validates
        output = model(x if begins else x + remembered())
        remember(output.detach())
        return nn.functional.mse_loss(output, y)

    data = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 4), torch.arange(12)), batch_size=4)
    workload = Workload(model, data, step=step, validation=data, optimizer=partial(torch.optim.SGD, lr=0.1))
    job = {"entry": "a.py:b", "steps": 1, "batch_size": 4}
    told = inspect(workload, JobSpec.parse({"job": job, "strategy": {"stages": 2}, "directory": "/"}), HostDevice())
    assert {unit for unit, _ in told["cut_problems"]} == set(range(1, len(told["units"])))
    for why in problems_of(told).values():
        assert why.startswith("run again with the same batch, the whole step gives something else: the loss (")


class Counted(Parts):
    calls = 0

    def counted(self) -> int:
        self.calls += 1
        return self.calls


class CountedLayer(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


def counted_first(parts: Any, x: torch.Tensor) -> torch.Tensor:
    parts.counted()
    return parts.third(parts.second(parts.first(x)) / parts.calls)  # type: ignore[no-any-return]


def counted_between(parts: Any, x: torch.Tensor) -> torch.Tensor:
    x = parts.second(parts.first(x)) / parts.counted()
    return parts.third(x)  # type: ignore[no-any-return]


def counted_in_a_module(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return parts.third(parts.blocks[0](parts.first(x)))  # type: ignore[no-any-return]


def counted_behind(parts: Any, x: torch.Tensor) -> torch.Tensor:
    x = parts.third(parts.second(parts.first(x)) / (1 + parts.calls))
    parts.counted()
    return x


@pytest.mark.parametrize(
    ("run", "cut"),
    [
        (counted_first, {"first", "second", "third", "head"}),
        (counted_between, {"first", "second", "third", "head"}),  # stages that end before the line do not count
        (counted_in_a_module, {"first", "blocks.0", "third", "head"}),
        (counted_behind, {"first", "second", "head"}),  # one that ends between would go by the first of the numbers
    ],
)
@pytest.mark.parametrize("mode", ["train", "forward"])
def test_a_number_that_a_step_goes_by_may_be_in_an_attribute_where_each_stage_that_does_counts_it(
    run: Forward, cut: set[str], mode: str
) -> None:
    model = Counted(run)
    model.calls, model.blocks[0] = 0, CountedLayer(4, 4)
    model.blocks[0].calls = 0
    told = told_of(model, mode=mode)
    problems = problems_of(told)
    assert {unit["name"] for unit in told["units"][1:]} - problems.keys() == cut
    assert told["written"] == ["blocks.0.calls" if run is counted_in_a_module else "calls"] * (mode == "train")
    for why in problems.values():
        assert re.match(
            r"cut there, the (attribute 'calls' \(0|loss \(\S+) for \S+\) differs from that of the uncut", why
        )
    assert (model.calls, model.blocks[0].calls) == (0, 0)


class CountingEpochs(Parts):
    epoch = 0

    def train(self, mode: bool = True) -> nn.Module:
        self.epoch += mode
        return super().train(mode)


def by_the_epoch(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return parts.third(parts.second(parts.first(x) / parts.epoch))  # type: ignore[no-any-return]


def test_an_epoch_that_train_counts_is_none_that_the_step_does() -> None:
    model = CountingEpochs(by_the_epoch)
    model.epoch = 0
    told = told_of(model)
    assert (told["cut_problems"], told["written"]) == ([], [])


def from_its_sixth_call(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + max(0, (parts.calls or 0) - 5))


def goes_by_it_later(parts: Any, x: torch.Tensor) -> torch.Tensor:
    x = parts.third(parts.second(from_its_sixth_call(parts, parts.first(x))))
    parts.calls = (parts.calls or 0) + 1
    return x


def goes_by_a_modules_later(parts: Any, x: torch.Tensor) -> torch.Tensor:
    return parts.third(parts.blocks[0](from_its_sixth_call(parts.blocks[0], parts.first(x))))  # type: ignore[no-any-return]


def is_counted_in_validation_alone(parts: Any, x: torch.Tensor) -> torch.Tensor:
    x = parts.third(parts.second(parts.first(x) * (1 + parts.calls if parts.training else 1)))
    parts.calls += not parts.training
    return x


def only_counts(parts: Any, x: torch.Tensor) -> torch.Tensor:
    x = parts.third(parts.second(parts.first(x)))
    parts.calls += 1
    return x


def sets_it_anew(parts: Any, x: torch.Tensor) -> torch.Tensor:
    parts.calls = 0
    for module in (parts.first, parts.second, parts.third):
        x = module(x) / (1 + parts.calls)
        parts.calls += 1
    return x


@pytest.mark.parametrize(
    ("run", "begins_with", "cut"),
    [
        (goes_by_it_later, 0, {"first", "head"}),
        (goes_by_it_later, None, {"first", "head"}),
        (goes_by_it_later, False, {"first", "head"}),
        (goes_by_a_modules_later, 0, {"first"}),  # stages behind the module run the line that reads it, too
        (is_counted_in_validation_alone, 0, {"first", "head"}),
        (only_counts, 0, {"first", "second", "third", "head"}),
        (sets_it_anew, 0, {"first", "second", "third", "head"}),
    ],
)
def test_no_stage_reads_a_number_that_it_does_not_count_as_the_whole_step_does(
    run: Forward, begins_with: Any, cut: set[str]
) -> None:
    """Whatever the first runs come to: a count may matter from its sixth call on."""
    model = Counted(run)
    model.calls, model.blocks[0] = begins_with, CountedLayer(4, 4)
    model.blocks[0].calls = begins_with
    workload = Workload(model, data(8), step=loss_of, validation=data(8), optimizer=partial(torch.optim.SGD, lr=0.1))
    job = {"entry": "a.py:b", "steps": 1, "batch_size": 4, "seed": 3}
    told = inspect(workload, JobSpec.parse({"job": job, "strategy": {"stages": 2}, "directory": "/"}), HostDevice())
    problems = problems_of(told)
    assert {unit["name"] for unit in told["units"][1:]} - problems.keys() == cut
    for why in problems.values():
        assert re.match(rf"cut there, the attribute '(blocks.0.)?calls' \({begins_with} for \S+\) differs from", why)


def freezes_at_every_third(parts: Any, x: torch.Tensor) -> torch.Tensor:
    parts.calls += 1
    for parameter in parts.third.parameters():
        parameter.requires_grad_(parts.calls % 3 != 0)
    return parts.third(parts.second(parts.first(x)))  # type: ignore[no-any-return]


def test_a_layer_that_a_count_freezes_for_a_call_has_no_gradient_to_hand_on() -> None:
    """The trials that are timed come to that call with the gradients of those before it."""
    model = Counted(freezes_at_every_third)
    model.calls = 0
    assert problems_of(told_of(model)) == {}


def sets_whether_they_are_trained(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    parts.second.requires_grad_(True)
    for parameter in parts.third.parameters():
        parameter.requires_grad = True
    return parts.third(parts.second(parts.first(x)))


def test_who_sets_whether_parameters_are_trained_changes_none_of_them() -> None:
    told = told_of(Parts(sets_whether_they_are_trained))
    assert told["cut_problems"] == []
    assert [each["changed_as"] for each in told["parameters"]] == [None] * len(told["parameters"])
    assert not any(unit["changes_state"] for unit in told["units"] if "changes_state" in unit)


def under_a_checkpoint(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    return parts.second(checkpoint(parts.norm, parts.first(x), use_reentrant=False))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


def test_what_a_backward_changes_is_told_of_the_unit_that_has_it() -> None:
    own = told_of(Parts(under_a_checkpoint))
    changes = {unit["name"]: unit["backward_changes"] for unit in own["units"]}
    assert changes.pop("norm").startswith("norm.")
    assert set(changes.values()) == {None}
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(), nn.Linear(4, 4))
    workload = Workload(model, data(8), loss=nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1))
    job = {"entry": "a.py:b", "steps": 1, "batch_size": 4}
    units = inspect(workload, JobSpec.parse({"job": job, "directory": "/"}), HostDevice())["units"]
    assert [unit["backward_changes"] is not None for unit in units] == [False, True, False]


def plain_norm(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    return parts.second(parts.norm(parts.first(x)))


def test_a_forward_changes_statistics_and_no_backward_does() -> None:
    assert {unit["backward_changes"] for unit in told_of(Parts(plain_norm))["units"]} == {None}


class AtTimes(nn.Module):
    """In four of ten forwards it gives back what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training and bool(torch.rand(()) < 0.4) else x + self.layer(x)


@pytest.mark.parametrize("seed", range(6))
def test_a_value_has_a_gradient_where_it_has_one_with_some_draws(seed: int) -> None:
    """It had none in the run that was looked at, since the only layer before the cut was left out: none came back, and
    the job trained on other numbers."""
    model = Parts(lambda parts, x: x)
    model.inlet, model.run = AtTimes(), lambda parts, x: parts.second(x.detach() * 2 + x)
    values = told_of(model, seed=seed)["values"]
    assert {value["name"]: value["differentiable"] for value in values}[">second:0"]


def written_to_at_times(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    x = parts.first(x)
    y = x if parts.left_out() else x * 2
    z = parts.second(x.detach().clone())
    y += z
    return y


@pytest.mark.parametrize("seed", range(6))
def test_a_unit_writes_to_what_it_is_given_where_it_does_so_with_some_draws(seed: int) -> None:
    """A stage then works on copies. Without, the job failed where autograd refuses to write to a leaf."""
    units = told_of(Parts(written_to_at_times), seed=seed)["units"]
    assert {unit["name"]: unit["in_place"] for unit in units}["second"]


class Told(nn.Module):
    """One writes to a dict what another one goes by, if it is there."""

    def __init__(self, memo: dict[int, float], writes: list[int], reads: list[int], *, fails: bool) -> None:
        super().__init__()
        self.line, self.memo, self.writes, self.reads, self.fails = nn.Linear(4, 4), memo, writes, reads, fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memo |= dict.fromkeys(self.writes, 0.5)
        read = [self.memo[each] if self.fails else self.memo.get(each, 0.0) for each in self.reads]
        return self.line(x) * (1 + sum(read))


class Telling(nn.Module):
    def __init__(self, pairs: list[tuple[int, int]], *, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.memo = dict[int, float]()
        by = [[[i for i, pair in enumerate(pairs) if pair[end] == block] for block in range(12)] for end in (0, 1)]
        self.blocks = nn.ModuleList(Told(self.memo, *each, fails=fails) for each in zip(*by, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memo.clear()
        for block in self.blocks:
            x = block(x)
        return x


PAIRS = [[(0, 11)], [(0, 1)], [(10, 11)], [(2, 4), (3, 5), (8, 9)], [(5, 6), (6, 8)], [(0, 1), (2, 3), (4, 5), (6, 7)]]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("pairs", PAIRS)
def test_of_many_cuts_those_are_refused_that_part_who_writes_from_who_reads(
    pairs: list[tuple[int, int]], fails: bool
) -> None:
    found = problems_of(told_of(Telling(pairs, fails=fails)))
    apart = {f"blocks.{block}" for block in range(12) if any(first < block <= last for first, last in pairs)}
    assert {name.removesuffix(".") for name in found} == apart, found
    why = "the step raises KeyError" if fails else "differs from that of the uncut step"
    assert all(why in text for text in found.values()), found


def test_few_of_many_cuts_that_fail_alike_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a model, as its teacher, in a step that raises in each stage of it alone."""
    tries = list[int]()
    difference = CutProof._difference

    def counting(proof: CutProof, cuts: list[int]) -> str | None:
        tries.append(len(cuts))
        return difference(proof, cuts)

    monkeypatch.setattr(CutProof, "_difference", counting)
    assert len(problems_of(told_of(Telling([(0, 11)], fails=True)))) == 11
    assert len(tries) <= 4 + 2 + 1, tries  # of 1, 2, 4 and the rest; both ends once more; and none
