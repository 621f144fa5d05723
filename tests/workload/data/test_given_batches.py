"""Batches that the user makes: which samples a run of their places has, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from weft.plan.division import Part, divide
from weft.plan.itinerary import Iteration, Itinerary
from weft.workload.data.batches import Batches
from weft.workload.data.given_batches import GivenBatches, is_weighed
from weft.workload.data.tree import build
from weft.workload.workload import Workload, WorkloadError

DATA = [torch.tensor([float(number)]) for number in range(60)]
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
    expected = torch.randperm(60, generator=torch.Generator().manual_seed(4)).split(4)
    assert trained(made, about[15], [1])[0][0] == expected[0].tolist()


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

    batches(Made([2, 6, 4], shuffles=True)).check_sources(num_loaders=2)
    with pytest.raises(WorkloadError, match="its sampler, a Own, gave two orders when it was asked twice for epoch 0"):
        batches(Own([2, 6, 4])).check_sources(num_loaders=2)


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


@pytest.mark.parametrize("kind", ["one list", "one tensor", "one array", "an array", "a set", "a generator", "keys"])
def test_a_batch_is_what_was_given_when_the_next_is_asked_for_whatever_it_is_given_in(kind: str) -> None:
    class Again(Made):
        def __iter__(self) -> Iterator[Any]:
            numbers: list[int] = []
            tensor = torch.empty(4, dtype=torch.int64)
            for batch in self.batches:
                numbers[:] = batch
                tensor[:] = torch.tensor(batch)
                yield {
                    "one list": numbers,
                    "one tensor": tensor,
                    "one array": tensor.numpy(),
                    "an array": np.array(batch),
                    "a set": set(batch),
                    "a generator": (number for number in numbers),
                    "keys": dict.fromkeys(batch),
                }[kind]

    made = batches(Again([4, 4, 4]))
    expected = Made([4, 4, 4]).batches
    assert [trained(made, iteration, [1]) for iteration in iterations(made)] == [[(each, 4)] for each in 2 * expected]


@pytest.mark.parametrize("makes_batches", [False, True])
def test_the_numbers_of_rows_of_tensors_are_those_that_python_takes(makes_batches: bool) -> None:
    def made(numbers: list[list[int]]) -> Batches:
        data = TensorDataset(torch.arange(6.0)[:, None])
        own: dict[str, Any] = {"batch_sampler": numbers} if makes_batches else {"sampler": [*itertools.chain(*numbers)]}
        loader: DataLoader[Any] = DataLoader(data, **own)
        trained = Workload(nn.Linear(1, 1), loader, optimizer=lambda params: torch.optim.SGD(params, 0.1), step=step)
        return Batches(trained, seed=3, batch_size=3)

    got = made([[0, -1, 2], [-6, 5, 1]])
    samples = [got.batch(iteration, Part(0, 0, 3))[0][0].flatten().tolist() for iteration in iterations(got, 3)]
    assert samples[:2] == [[0, 5, 2], [0, 5, 1]]
    for odd in (6, -7):
        told = rf"sampler, a list, gives the sample number {odd}, and the data has 6 samples; let it give numbers of"
        with pytest.raises(WorkloadError, match=told):
            made([[0, 1, odd], [2, 3, 4]]).check_sources(num_loaders=2)


@pytest.mark.parametrize("makes_batches", [False, True])
def test_an_iterator_that_has_nothing_left_is_told_as_one(makes_batches: bool) -> None:
    numbers: Any = iter([[0, 1], [2, 3]] if makes_batches else [0, 1, 2, 3])
    own: dict[str, Any] = {"batch_sampler": numbers} if makes_batches else {"sampler": numbers}
    loader: DataLoader[Any] = DataLoader(DATA, **own)  # type: ignore[arg-type]
    trained = Workload(nn.Linear(1, 1), loader, optimizer=lambda params: torch.optim.SGD(params, 0.1), step=step)
    made = Batches(trained, seed=3, batch_size=2, steps=2)
    made.check_sources()
    with pytest.raises(WorkloadError, match="its sampler, a list_iterator, has nothing left: an iterator is gone"):
        made.sources()[True].order(0, 3), made.sources()[True].order(0, 3)


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
    given_batches = GivenBatches(None, "train", places=2, num_batches=1, num_rows=None, varies=True)
    places = [given_batches.draw(number, [[number, 7, 8]], 1) for number in range(3)]
    orders = [torch.arange(2) + 2 * each for each in places]
    assert [given_batches.samples(each).tolist() for each in orders] == [[0, 7, 8], [1, 7, 8], [2, 7, 8]]
    given_batches.forget(before=2)
    assert given_batches.samples(orders[2]).tolist() == [2, 7, 8]
    with pytest.raises(KeyError):
        given_batches.samples(orders[1])


# --- batches that are ready


def ready_batch(samples: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"x": torch.tensor(samples), "names": [str(each) for each in samples], "rate": torch.tensor(0.5)} | more


class Drawn(IterableDataset[Any]):
    """Ready batches without an end; it counts what is drawn."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes, self.num_drawn = sizes, 0

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            self.num_drawn += 1
            size = self.sizes[number % len(self.sizes)]
            yield ready_batch(torch.randint(100, (size,)).tolist())
            number += 1


def ready(data: Any, batch_size: int = 4, steps: int | None = None, **more: Any) -> Batches:
    loader: DataLoader[Any] = DataLoader(data, batch_size=None, shuffle=more.pop("shuffle", None))
    own = {"steps_per_epoch": more.pop("steps_per_epoch", None)}
    how = {"step": step} | more
    made = Workload(nn.Linear(1, 1), loader, optimizer=lambda params: torch.optim.SGD(params, 0.1), **how)
    return Batches(made, seed=3, batch_size=batch_size, steps=steps, **own)


def read(made: Batches, iteration: Iteration, counts: Sequence[int]) -> list[tuple[list[int], float]]:
    """As of `trained`; what else is in a batch is as divided as its samples."""
    parts = [part for replica in divide(iteration.size, [1.0] * len(counts), counts, "even") for part in replica]
    told = []
    for part in (each for each in parts if each.size):
        tensors, skeleton = made.batch(iteration, part)
        batch = build(skeleton, tensors)
        assert batch["names"] == [str(each) for each in batch["x"].tolist()]
        assert batch["rate"] == 0.5
        told.append((batch["x"].tolist(), made.weight(iteration, part, batch)))
    return told


@given(sizes=SIZES, batch_size=st.integers(1, 9), counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_every_sample_of_a_ready_batch_counts_once_too(sizes: list[int], batch_size: int, counts: list[int]) -> None:
    expected = Made(sizes).batches
    made = ready([ready_batch(batch) for batch in expected], batch_size)
    for iteration, batch in zip(iterations(made, batch_size), 2 * expected, strict=True):
        told = read(made, iteration, counts)
        assert [sample for samples, weight in told if weight for sample in samples] == batch
        assert all(samples and weight in (0, len(samples)) for samples, weight in told)


def test_a_stream_of_ready_batches_is_drawn_once_for_all_microbatches() -> None:
    data = Drawn([4, 2, 7])
    made = ready(data, steps=6)
    about = iterations(made, epochs=0, steps=6)
    told = [read(made, iteration, [3]) for iteration in about]
    assert [sum(weight for _, weight in each) for each in told] == [4, 2, 7, 4, 2, 7]
    assert data.num_drawn == 6
    whole = [read(ready(Drawn([4, 2, 7]), steps=6), iteration, [1]) for iteration in about[:2]]
    assert [samples for ((samples, _),) in whole] == [
        [sample for part, weight in each if weight for sample in part] for each in told[:2]
    ]


def test_ready_batches_are_shuffled_and_go_on_pass_after_pass() -> None:
    data = [ready_batch([number]) for number in range(5)]
    made = ready(data, shuffle=True, steps_per_epoch=2)
    told = [read(made, it, [1])[0][0][0] for it in iterations(made, steps_per_epoch=2, epochs=5)]
    passes = [torch.randperm(5, generator=torch.Generator().manual_seed(3 + number)).tolist() for number in range(2)]
    assert told == passes[0] + passes[1]


class Noisy(Dataset[Any]):
    """A batch of random numbers, another one each time that it is asked for."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> Any:
        return ready_batch(torch.randint(1000, (4,)).tolist())


def test_a_ready_batch_is_drawn_once_an_iteration_whoever_has_which_part_of_it() -> None:
    made, other = (ready(Noisy(), steps_per_epoch=3) for _ in range(2))
    about = iterations(made, steps_per_epoch=3, epochs=1)
    whole = [read(made, iteration, [1])[0][0] for iteration in about]
    in_parts = [[sample for part, _ in read(other, iteration, [3]) for sample in part] for iteration in about]
    assert whole == in_parts
    assert whole[0] != whole[1] != whole[2], "each step has its own numbers"


def test_what_a_ready_batch_counts_may_be_the_users_to_say() -> None:
    made = ready([ready_batch([5, 6, 7])], weight=lambda batch: batch["x"].sum())
    assert read(made, iterations(made, epochs=1)[0], [2]) == [([5], 5.0), ([6, 7], 13.0)]


def test_with_a_loss_ready_batches_are_pairs_of_the_jobs_size() -> None:
    pairs = [(torch.arange(4.0)[:, None] + 4 * number, torch.arange(4.0) + 4 * number) for number in range(2)]
    made = ready(pairs, step=None, loss=nn.functional.mse_loss)
    second = iterations(made, epochs=1)[1]
    assert made.load(second, Part(1, 2, 2))[0].flatten().tolist() == made.load(second, Part(1, 2, 2))[1].tolist()
    assert made.weight(second, Part(1, 2, 2), None) == 2
    same = [(x, x) for x, _ in pairs]
    inputs, targets = ready(same, step=None, loss=nn.functional.mse_loss).load(second, Part(0, 0, 2))
    assert inputs.equal(targets)
    with pytest.raises(
        WorkloadError, match=r"batch \d of its DataLoader, tensors of shapes \(4, 1\) and \(4,\), has not job"
    ):
        ready(pairs, 5, step=None, loss=nn.functional.mse_loss).load(second, Part(0, 0, 2))


def test_a_ready_batch_without_samples_in_common_is_whole_or_refused() -> None:
    made = ready([{"x": torch.zeros(3), "y": torch.zeros(2)}])
    iteration = iterations(made, epochs=1)[0]
    whole, half = Part(0, 0, 4), Part(0, 0, 2)
    assert len(made.batch(iteration, whole)[0]) == 2
    assert made.weight(iteration, whole, None) == 1
    assert made.count(iteration, whole) == 4  # as the job says
    assert made.part_of_loaded(iteration, whole) == 1.0
    with pytest.raises(
        WorkloadError, match=r"tensors of shapes \(3,\), \(2,\), cannot be divided into microbatches: let"
    ):
        made.batch(iteration, half)


def test_ready_batches_are_about_as_large_as_the_job_says() -> None:
    for steps in (None, 6):
        data: Any = Drawn([4, 2, 7]) if steps else [ready_batch(range(size)) for size in (4, 2, 7)]
        ready(data, 3, steps=steps).check_sources()
        with pytest.raises(
            WorkloadError, match=r"batch_size = None gives batches of 2 to 7 samples, and job\.batch_size"
        ):
            ready(data, 8, steps=steps).check_sources()
    with pytest.raises(
        WorkloadError, match=r"gives batches of 4 samples, .* is 1; give job\.batch_size = 4, what they"
    ):
        ready([ready_batch(range(4))], 1).check_sources()


class Named:
    def __init__(self, samples: torch.Tensor) -> None:
        self.samples, self.names = samples, [str(each) for each in samples.tolist()]


class Weighed:
    def __init__(self, weights: np.ndarray[Any, Any]) -> None:
        self.weights = weights


class Table:
    """As scipy's sparse arrays and pandas' frames have it."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.sides = {"rows": shape[0], "columns": shape[1]}

    @property
    def shape(self) -> tuple[int, int]:
        return self.sides["rows"], self.sides["columns"]


SAMPLES = torch.arange(4)


def as_they_are(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(
    "values",
    [
        ("0", "1", "2", "3"),
        (0, 1, 2, 3),
        list(SAMPLES.unbind()),
        [{"label": number, "name": "a"} for number in range(4)],
        [(SAMPLES[number], None) for number in range(4)],
    ],
)
def test_what_a_ready_batch_has_one_of_for_each_sample_is_divided_with_the_samples(values: Any) -> None:
    loader: DataLoader[Any] = DataLoader([{"x": SAMPLES, "values": values}], batch_size=None, collate_fn=as_they_are)
    made = Workload(nn.Linear(1, 1), loader, optimizer=lambda params: torch.optim.SGD(params, 0.1), step=step)
    of_job = Batches(made, seed=3, batch_size=4)
    iteration = iterations(of_job, epochs=1)[0]
    told = [of_job.batch(iteration, Part(number, 2 * number, 2)) for number in range(2)]
    halves = [build(skeleton, tensors) for tensors, skeleton in told]
    assert [half["x"].tolist() for half in halves] == [[0, 1], [2, 3]]
    assert [half["values"] for half in halves] == [values[:2], values[2:]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([torch.zeros(4, 2)] * 4, "a list of 4 items with 4 rows each, beside tensors of 4 samples"),
        ([None, *[torch.zeros(4, 2)] * 3], "a list of 4 items with 4 rows each, beside tensors of 4 samples"),
        (
            torch.sparse_coo_tensor(torch.zeros(4, 4), torch.ones(4), (2, 2, 2, 2), check_invariants=False),
            "a tensor of layout sparse_coo",
        ),
        (Named(SAMPLES), "Named with a list of 4 in it, beside tensors of 4 samples"),
        (Weighed(np.ones(4)), "Weighed with a ndarray of 4 in it, beside tensors of 4 samples"),
        (Table((4, 2)), "Table, beside tensors of 4 samples"),
    ],
)
def test_a_ready_batch_that_does_not_tell_where_its_samples_are_is_not_divided(value: Any, text: str) -> None:
    made = ready([{"x": torch.zeros(4), "y": value}])
    with pytest.raises(WorkloadError, match=f"and a batch of it, {text}.*, cannot be divided into microbatches: let"):
        made.batch(iterations(made, epochs=1)[0], Part(0, 0, 2))


def test_a_part_of_a_ready_batch_may_be_none_in_some_of_them() -> None:
    masks = [torch.zeros(4), None, torch.ones(4)]
    made = ready([{"x": torch.arange(4), "mask": mask} for mask in masks])
    for iteration in iterations(made, epochs=1):
        parts = [made.batch(iteration, Part(number, 2 * number, 2)) for number in range(2)]
        mask = masks[int(made.order(iteration)[iteration.start]) // 4]
        halves = [build(skeleton, tensors)["mask"] for tensors, skeleton in parts]
        assert halves == [None, None] if mask is None else torch.cat(halves).equal(mask)


def test_a_collate_for_samples_does_not_go_with_ready_batches() -> None:
    with pytest.raises(WorkloadError, match=r"with batch_size = None the items of Workload\.train's DataLoader are b"):
        ready([ready_batch([1])], collate=tuple)


class Told(Dataset[Any]):
    """It notes what it is asked for."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.asked = batches, list[int]()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        self.asked.append(number)
        return self.batches[number]


def test_what_a_batch_of_the_users_takes_to_load_is_told_as_for_the_places_that_a_job_says() -> None:
    part = Part(0, 0, 2)
    made = batches(Made([3, 5]))
    assert made.part_of_loaded(iterations(made)[0], Part(0, 0, 4)) == 4 / 3
    data = Told([ready_batch(range(6)), ready_batch(range(2))])
    made = ready(data, shuffle=False)
    first = iterations(made)[0]
    for _ in range(2):
        made.anew(lambda: made.batch(first, part))()
    assert data.asked.count(0) == 2, "a part of the batch that is there takes no time"
    assert made.part_of_loaded(first, part) == 2 / 6, "all of it is loaded for the first part"
