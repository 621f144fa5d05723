"""Batches that a sampler of the user's makes: which samples a run of their places has, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from weft.plan.division import divide
from weft.plan.itinerary import Iteration, Itinerary
from weft.workload.data.batches import Batches
from weft.workload.data.given_batches import GivenBatches, is_weighed
from weft.workload.workload import Workload, WorkloadError

DATA = [torch.tensor([float(number)]) for number in range(40)]
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


class Made(Sampler[list[int]]):
    """Batches of these sizes, in another order in each epoch where it shuffles."""

    def __init__(self, sizes: Sequence[int], *, shuffles: bool = False, length: int | None = None) -> None:
        self.batches = [batch.tolist() for batch in torch.arange(sum(sizes)).split(list(sizes))]
        self.shuffles, self.length = shuffles, len(sizes) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.batches)).tolist() if self.shuffles else range(len(self.batches))
        return iter([self.batches[number] for number in order])


class Endless(Made):
    def __len__(self) -> int:
        raise TypeError

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from super().__iter__()


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch).mean()
    return output


def workload(sampler: Any, **more: Any) -> Workload:
    loader: DataLoader[Any] = DataLoader(DATA, batch_sampler=sampler)  # type: ignore[arg-type]
    how = {"step": step} | more
    return Workload(nn.Linear(1, 1), loader, optimizer=lambda params: torch.optim.SGD(params, 0.1), **how)


def batches(sampler: Any, batch_size: int = 4, **more: Any) -> Batches:
    own = {name: more.pop(name) for name in ("steps", "steps_per_epoch") if name in more}
    return Batches(workload(sampler, **more), seed=3, batch_size=batch_size, **own)


def trained(made: Batches, iteration: Iteration, counts: Sequence[int]) -> list[tuple[list[int], float]]:
    """Of each microbatch its samples, and what it counts."""
    parts = [part for replica in divide(iteration.size, [1.0] * len(counts), counts, "even") for part in replica]
    told = []
    for part in parts:
        if part.size:
            tensors, _ = made.batch(iteration, part)
            told.append(([int(x) for x in tensors[0]], made.weight(iteration, part, tensors[0])))
    return told


def iterations(made: Batches, batch_size: int = 4, **more: int) -> list[Iteration]:
    given: dict[str, Any] = {"epochs": 2, "steps": None} | more
    about = Itinerary.of(num_train=made.num_train, num_validation=0, batch_size=batch_size, **given)
    return [about.at(index) for index in range(about.num_iterations)]


@given(sizes=SIZES, batch_size=st.integers(1, 9), counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_every_sample_of_a_batch_counts_once_in_whatever_way_it_is_divided(
    sizes: list[int], batch_size: int, counts: list[int]
) -> None:
    made = batches(Made(sizes), batch_size)
    for number, (iteration, batch) in enumerate(
        zip(iterations(made, batch_size), 2 * Made(sizes).batches, strict=True)
    ):
        told = trained(made, iteration, counts)
        assert [sample for samples, weight in told if weight for sample in samples] == batch, number
        assert all(samples and weight in (0, len(samples)) for samples, weight in told)
        assert {sample for samples, _ in told for sample in samples} == set(batch)


def test_a_batch_of_the_size_that_the_job_says_is_divided_as_any_other() -> None:
    made = batches(Made([4, 4]))
    first = iterations(made)[0]
    assert trained(made, first, [3]) == [([0, 1], 2), ([2], 1), ([3], 1)]


def test_each_epoch_asks_the_sampler_anew_with_its_seed_and_can_be_gone_back_to() -> None:
    made, expected = batches(Made([2, 6, 4, 3], shuffles=True)), list[list[int]]()
    for epoch in range(2):
        torch.manual_seed(3 + epoch)
        expected += list(Made([2, 6, 4, 3], shuffles=True))
    about = iterations(made)
    for order in (range(8), reversed(range(8))):
        assert all(trained(made, about[index], [1])[0][0] == expected[index] for index in order)
    assert expected[:4] != expected[4:]


def test_a_sampler_within_it_is_told_the_epoch_and_seeded() -> None:
    """As torchvision's `GroupedBatchSampler` and torch's own have one."""

    class Pairs(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return super().__iter__()

    inner = RandomSampler(DATA, generator=torch.Generator())  # type: ignore[arg-type]
    made = batches(Pairs(inner, 4, True))
    about = iterations(made)
    expected = torch.randperm(40, generator=torch.Generator().manual_seed(4)).split(4)
    assert trained(made, about[10], [1])[0][0] == expected[0].tolist()


def test_epochs_of_so_many_steps_go_on_pass_after_pass() -> None:
    made = batches(Made([2, 6, 4]), steps_per_epoch=2)
    given = {"steps_per_epoch": 2, "epochs": 4}
    told = [trained(made, iteration, [1])[0][0] for iteration in iterations(made, **given)]
    assert told == [Made([2, 6, 4]).batches[number % 3] for number in range(8)]


def test_no_more_is_drawn_than_the_steps_take_so_it_may_have_no_end() -> None:
    for sampler in (Endless([2, 6, 4]), Made([2, 6, 4, 4, 4, 4, 4], length=7)):
        made = batches(sampler, steps=5)
        made.check_sources()
        told = [trained(made, iteration, [1])[0][0] for iteration in iterations(made, epochs=0, steps=5)]
        assert [len(each) for each in told[:3]] == [2, 6, 4]
    assert batches(Endless([2, 6, 4]), steps=5).are_endless
    ended = Made([2, 6, 4])
    ended.length = 9
    with pytest.raises(WorkloadError, match=r"gave 3 batches for epoch 0, and its length, or what .* need, is 5"):
        batches(ended, steps=5).check_sources()


def test_what_a_microbatch_counts_is_asked_of_the_workload_where_it_says_so() -> None:
    made = batches(Made([1, 6]), weight=lambda batch: batch.sum())
    small, large = iterations(made, epochs=1)
    assert trained(made, small, [2]) == [([0], 0), ([0], 0.0)]
    assert trained(made, large, [2]) == [([1, 2, 3], 6.0), ([4, 5, 6], 15.0)]


def test_microbatches_are_weighed_where_batches_may_be_of_any_size() -> None:
    plain: DataLoader[Any] = DataLoader(DATA, batch_size=4)  # type: ignore[arg-type]
    assert is_weighed(workload(Made([4])))
    assert not is_weighed(workload(Made([4]), step=None, loss=nn.functional.mse_loss))
    made = Workload(nn.Linear(1, 1), plain, step=step, optimizer=lambda params: torch.optim.SGD(params, 0.1))
    assert not is_weighed(made)


def test_a_sampler_that_would_tell_every_loader_other_batches_is_refused() -> None:
    class Own(Made):
        def __iter__(self) -> Iterator[list[int]]:
            self.batches = [*self.batches[1:], self.batches[0]]
            return super().__iter__()

    batches(Made([2, 6, 4], shuffles=True)).check_orders()
    with pytest.raises(WorkloadError, match="its sampler, a Own, gave two orders when it was asked twice for epoch 0"):
        batches(Own([2, 6, 4])).check_orders()


@pytest.mark.parametrize(
    ("sampler", "more", "text"),
    [
        (
            Made([4, 4], length=3),
            {},
            "gave 2 batches for epoch 0, and its length, .*, is 3; let its __len__ tell how many",
        ),
        ([0, 1, 2], {}, "a list, gave int as batch 0 of epoch 0; let it give lists of sample numbers"),
        (["ab"], {}, "gave str as batch 0 of epoch 0; let it give lists of sample numbers"),
        ([[0, 1], []], {}, "gave no sample in batch 1 of epoch 0; let it leave out what is empty"),
        (Made([9, 12, 15]), {}, "a Made, gives batches of 9 to 15 samples, and job.batch_size is 4; give .* = 12"),
        (Made([3, 3]), {}, "gives batches of 3 samples, and job.batch_size is 4; give job.batch_size = 3, what"),
        (
            Made([4, 2]),
            {"step": None, "loss": nn.functional.mse_loss},
            "gave 2 samples in batch 1 of epoch 0, and job.batch_size is 4; with a loss all batches have as many",
        ),
    ],
)
def test_what_makes_no_such_batches_is_refused_with_a_remedy(sampler: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(WorkloadError, match=f"^Workload.train: its batch_sampler, .*{text}"):
        batches(sampler, **more).check_sources()


def test_one_without_a_length_needs_steps() -> None:
    with pytest.raises(WorkloadError, match="a Endless, has no length; give it a __len__ that tells the batches of an"):
        batches(Endless([4, 4]))


def test_an_epoch_with_another_number_of_batches_is_told_before_training() -> None:
    class Fewer(Made):
        def __iter__(self) -> Iterator[list[int]]:
            self.batches = self.batches[:-1] if torch.initial_seed() == 4 else self.batches
            return super().__iter__()

    with pytest.raises(WorkloadError, match="gave 2 batches for epoch 1, and its length"):
        batches(Fewer([4, 4, 4])).check_sources()


def test_passes_that_are_over_are_forgotten() -> None:
    given_batches = GivenBatches(None, "train", batch_size=2, num_batches=1, varies=True)
    places = [given_batches.draw(number, [[number, 7, 8]], 1) for number in range(3)]
    assert [given_batches.samples(each).tolist() for each in places] == [[0, 7, 8], [1, 7, 8], [2, 7, 8]]
    given_batches.forget(before=2)
    assert given_batches.samples(places[2]).tolist() == [2, 7, 8]
    with pytest.raises(KeyError):
        given_batches.samples(places[1])
