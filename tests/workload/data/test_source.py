"""What a user gives as data: which samples an epoch has, in which order, and who collates them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from weft.workload.data.datasets import Tensors
from weft.workload.data.source import DataSource, source_of
from weft.workload.workload import Workload, WorkloadError

ITEMS = [(float(number), number) for number in range(10)]


def source(
    train: Any,
    *,
    field: Any = "train",
    batch_size: int | None = 4,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    **parts: Any,
) -> DataSource:
    given = {"step": lambda model, batch: None} if "loss" not in parts else {}
    workload = Workload(nn.Linear(1, 1), train, validation=train, optimizer=torch.optim.SGD, **given | parts)
    return source_of(workload, field, batch_size=batch_size, steps=steps, steps_per_epoch=steps_per_epoch)


def shuffled(epoch: int, seed: int = 3, count: int = 10) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def orders(made: DataSource, epochs: int = 3) -> list[list[int]]:
    return [made.order(epoch, 3).tolist() for epoch in range(epochs)]


class Scaled(DataLoader[Any]):
    """Was trained on what its dataset has, as if nobody had scaled it."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield 10 * x, y


class Halves(Sampler[int]):
    """Another half of the data in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch % 2, 10, 2))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_dataset_is_shuffled_for_training_and_taken_in_its_order_for_validation() -> None:
    assert orders(source(ITEMS)) == [shuffled(epoch) for epoch in range(3)]
    assert orders(source(ITEMS, field="validation"), 1) == [list(range(10))]


@pytest.mark.parametrize(
    ("loader", "order"),
    [
        (DataLoader(ITEMS, batch_size=4, shuffle=True), shuffled(0)),  # type: ignore[arg-type]
        (DataLoader(ITEMS, batch_size=4), list(range(10))),  # type: ignore[arg-type]
        (DataLoader(ITEMS, shuffle=True, num_workers=1), shuffled(0)),  # type: ignore[arg-type]
        (DataLoader(ITEMS, batch_size=4, shuffle=True, drop_last=True), shuffled(0)[:8]),  # type: ignore[arg-type]
        (DataLoader(ITEMS, batch_sampler=BatchSampler(SequentialSampler(ITEMS), 4, True)), list(range(8))),  # type: ignore[arg-type]
        (DataLoader(ITEMS, sampler=Halves()), [0, 2, 4, 6, 8]),  # type: ignore[arg-type]
    ],
    ids=["shuffle", "in order", "of one", "drop_last", "batch_sampler", "sampler"],
)
def test_a_loader_gives_its_dataset_its_order_and_what_it_drops(loader: DataLoader[Any], order: list[int]) -> None:
    made = source(loader)
    assert made.dataset is ITEMS
    assert (made.order(0, 3).tolist(), made.size) == (order, len(order))


@pytest.mark.parametrize("make", [lambda x: x[::-1], lambda x: x[:, ::-1], lambda x: x.astype(">f4")])
def test_arrays_may_have_any_strides_and_byte_order(make: Any) -> None:
    """torch takes none that go backwards, nor the other byte order, as files of instruments have it."""
    array = make(np.arange(8, dtype=np.float32).reshape(4, 2))
    for made in (source({"x": array, "y": np.arange(4)}).dataset, Tensors({"x": array, "y": np.arange(4)})):
        item = made[1]
        assert (item["x"].tolist(), item["x"].dtype) == (array[1].tolist(), torch.float32)


def test_a_memory_map_that_is_only_read_is_taken_without_a_warning(tmp_path: Path) -> None:
    """torch's, that it is not writable, stood in each log, with a line of Weft's; nobody writes there."""
    np.save(tmp_path / "x.npy", np.arange(8, dtype=np.float32).reshape(4, 2))
    array = np.load(tmp_path / "x.npy", mmap_mode="r")
    script = "import sys, warnings, numpy; from weft.workload.data.datasets import _as_tensor; "
    script += "warnings.simplefilter('error')"
    script += "; assert _as_tensor(numpy.load(sys.argv[1], mmap_mode='r'))[1].tolist() == [2.0, 3.0]"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.npy")], check=True)  # torch warns once a process
    assert np.shares_memory(source({"x": array, "y": np.arange(4)}).dataset[0]["x"].numpy(), array)


def test_what_a_loader_drops_of_a_validation_goes_by_its_own_batches() -> None:
    """Of ten samples in batches of the job's, 16, nothing would have been left to measure."""
    loader: DataLoader[Any] = DataLoader(ITEMS, batch_size=4, drop_last=True)  # type: ignore[arg-type]
    assert source(loader, field="validation", batch_size=16).size == 8
    assert source(DataLoader(ITEMS, drop_last=True), field="validation", batch_size=3).size == 9  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "its_size"), [("train", 16), ("train", 1), ("validation", 16), ("validation", 1)])
def test_a_loader_that_drops_all_that_it_has_is_refused_for_that(field: Any, its_size: int) -> None:
    loader: DataLoader[Any] = DataLoader(ITEMS, batch_size=its_size, drop_last=True)  # type: ignore[arg-type]
    told = (
        f"Workload.{field}: its DataLoader has drop_last = True, and its 10 samples are no whole batch of 16, so none"
    )
    with pytest.raises(WorkloadError, match=told):
        source(loader, field=field, batch_size=16)


def test_a_shuffled_loader_for_validation_is_taken_in_order() -> None:
    assert orders(source(DataLoader(ITEMS, shuffle=True), field="validation"), 1) == [list(range(10))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler([1, 3, 5, 7]),
        SubsetRandomSampler([1, 3, 5, 7], generator=torch.Generator()),
        WeightedRandomSampler([0.5] * 10, 20),
        RandomSampler(ITEMS, replacement=True, num_samples=6),
        DistributedSampler(ITEMS, num_replicas=1, rank=0),
        Halves(),
    ],
    ids=["default generator", "own generator", "weighted", "replacement", "of one process", "set_epoch"],
)
def test_a_sampler_is_keyed_by_seed_and_epoch_and_an_epoch_can_be_gone_back_to(sampler: Any) -> None:
    made = source(DataLoader(ITEMS, sampler=sampler))  # type: ignore[arg-type]
    state = torch.get_rng_state()
    first = orders(made)
    assert made.size == len(first[0]) == len(sampler)
    assert first[0] != first[1]
    torch.rand(3)
    assert [made.order(epoch, 3).tolist() for epoch in (2, 1, 0)] == first[::-1]
    torch.set_rng_state(state)
    made.order(0, 3)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are touched"


def test_the_collate_of_a_loader_is_taken_over_unless_the_workload_has_one() -> None:
    assert source(DataLoader(ITEMS, collate_fn=tuple)).collate is tuple  # type: ignore[arg-type]
    assert source(DataLoader(ITEMS, collate_fn=tuple), collate=list).collate is list  # type: ignore[arg-type]
    assert source(DataLoader(ITEMS)).collate is None  # type: ignore[arg-type]
    assert source(ITEMS, collate=list).collate is list


@pytest.mark.parametrize(
    "data",
    [
        (torch.arange(6), torch.zeros(6, 2)),
        [torch.arange(6), torch.zeros(6, 2)],
        (torch.arange(6),),
        (torch.arange(6), torch.zeros(6, 2), torch.zeros(6, 1)),
        {"ids": torch.arange(6), "labels": torch.zeros(6, 2)},
        (np.arange(6), torch.zeros(6, 2)),
        {"ids": np.arange(6), "labels": np.zeros((6, 2))},
    ],
    ids=["pair", "list", "one", "three", "dict", "pair of arrays", "dict of arrays"],
)
def test_a_tree_of_tensors_has_its_samples_along_the_first_dimension(data: Any) -> None:
    made = source(data)
    assert isinstance(made.dataset, Tensors)
    assert made.size == len(made.dataset) == 6
    rows, item = made.dataset.rows(torch.tensor([4, 1])), made.dataset[4]
    assert type(rows) is type(item) is type(data)
    key: Any = "ids" if isinstance(data, dict) else 0
    assert (rows[key].tolist(), item[key].item()) == ([4, 1], 4)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1])


class Short(Endless):
    def __len__(self) -> int:
        return 3


class Lists(Sampler[Any]):
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1]])


class OneWay(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Drawn(Sampler[int]):
    """Says how much was drawn of it, and has no end."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.count += 1
            yield self.count % 10


class Long(Drawn):
    def __len__(self) -> int:
        return 10**15


@pytest.mark.parametrize("sampler", [Long(), Drawn()], ids=["long", "endless"])
def test_no_more_is_drawn_of_a_sampler_than_the_steps_take(sampler: Drawn) -> None:
    made = source(DataLoader(ITEMS, sampler=sampler), steps=3)  # type: ignore[arg-type]
    assert made.order(0, 3).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert sampler.count == 12
    assert made.is_endless == (type(sampler) is Drawn)
    assert made.size == (12 if made.is_endless else 10**15)


def test_what_is_drawn_of_a_long_sampler_is_its_beginning() -> None:
    long = RandomSampler(ITEMS, replacement=True, num_samples=int(1e10))  # type: ignore[arg-type]
    short = RandomSampler(ITEMS, replacement=True, num_samples=320)  # type: ignore[arg-type]
    few = source(DataLoader(ITEMS, sampler=long), steps=30).order(0, 3)  # type: ignore[arg-type]
    assert few.equal(source(DataLoader(ITEMS, sampler=short)).order(0, 3)[:120])  # type: ignore[arg-type]


def test_epochs_of_so_many_steps_go_on_in_an_endless_sampler() -> None:
    made = source(DataLoader(ITEMS, sampler=Drawn()), steps=4, steps_per_epoch=2)  # type: ignore[arg-type]
    assert [made.order(epoch, 3).tolist() for epoch in range(2)] == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 0, 1, 2, 3, 4, 5, 6]]


def test_an_endless_sampler_that_ends_is_told() -> None:
    with pytest.raises(WorkloadError, match="its sampler ended after 2 samples, and 12 are needed; give it a __len__"):
        source(DataLoader(ITEMS, sampler=Endless()), steps=3).order(0, 3)  # type: ignore[arg-type]


class Prepared(Scaled):
    """As accelerate has them."""

    __module__ = "accelerate.data_loader"

    def __init__(self, loader: DataLoader[Any], skip_batches: int = 0) -> None:
        super().__init__(ITEMS, batch_size=4)
        self.base_dataloader, self.skip_batches = loader, skip_batches


def test_a_loader_that_accelerate_has_prepared_is_the_one_that_it_was_given() -> None:
    loader = DataLoader(ITEMS, batch_size=4, drop_last=True, collate_fn=tuple)  # type: ignore[arg-type]
    made = source(Prepared(loader))
    assert (made.size, made.in_order, made.collate) == (len(ITEMS) // 4 * 4, True, tuple)
    with pytest.raises(WorkloadError, match="its DataLoader, a Prepared, has a __iter__ of its own"):
        source(Prepared(loader, skip_batches=1))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            DataLoader(ITEMS, batch_size=8),
            "its DataLoader has batch_size = 8, and job.batch_size is 4; make them equal",
        ),  # type: ignore[arg-type]
        (DataLoader(ITEMS, sampler=Endless()), "a Endless, has no length; give it a __len__ .*, or job.steps"),  # type: ignore[arg-type]
        (
            DataLoader(ITEMS, sampler=DistributedSampler(ITEMS, num_replicas=2, rank=1)),
            "its sampler, a DistributedSampler, gives 1/2 of the data, as for one of 2 processes; leave it out",
        ),  # type: ignore[arg-type]
        (DataLoader(ITEMS, sampler=Short()), "its sampler has length 3, and gave 2 samples for epoch 0; both must"),  # type: ignore[arg-type]
        (
            DataLoader(ITEMS, sampler=Lists()),
            "its sampler gives list; let it give the numbers of sing",
        ),  # type: ignore[arg-type]
        (
            Scaled(ITEMS, batch_size=4),
            "its DataLoader, a Scaled, has a __iter__ of its own, and here nobody iterates over it; let",
        ),  # type: ignore[arg-type]
        ({"x": [1, 2], "y": [3, 4]}, "is a dict of list; give a dict of tensors or of arrays of numbers, or a list of"),
        (
            {"a": DataLoader(ITEMS)},
            "Workload.train is a dict of DataLoaders; give one, of an IterableDataset that goes",
        ),  # type: ignore[arg-type]
        ([DataLoader(ITEMS)] * 2, "Workload.train is a list of DataLoaders; give one, of an IterableDataset that goes"),  # type: ignore[arg-type]
        ("data/train", "Workload.train is str; give a map-style dataset"),
        ((torch.zeros(3), torch.zeros(4), torch.zeros(3)), r"tensors of shapes \(3,\), \(4,\), \(3,\); the first dim"),
        ({"a": torch.tensor(1.0)}, r"tensors of shapes \(\); the first dimensions must be equal"),
        (OneWay(), r"is an IterableDataset \(OneWay\) without a length; give it a __len__, or job.steps"),
        (DataLoader(OneWay()), r"Workload.train is an IterableDataset \(OneWay\) without a length; give it a __len__"),
        (
            iter([]),
            "Workload.train is list_iterator; give a map-style .*, an IterableDataset, a DataLoader of one of these",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_gives_no_order_of_samples_is_refused_with_a_remedy(data: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text) as caught:
        source(data).order(0, 3)
    assert str(caught.value).startswith("Workload.train")


def test_the_batches_of_a_validation_loader_may_be_of_any_size() -> None:
    assert source(DataLoader(ITEMS, batch_size=7), field="validation").size == 10  # type: ignore[arg-type]


class Growing(Dataset[float]):
    """Its samples depend on the epoch."""

    def __init__(self) -> None:
        self.scale = torch.zeros(())
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.scale = epoch, torch.rand(())

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> float:
        return self.epoch + float(self.scale)


@pytest.mark.parametrize("field", ["train", "validation"])
@pytest.mark.parametrize("wrap", [lambda data: data, DataLoader], ids=["dataset", "loader"])
def test_a_dataset_is_told_of_its_epoch_which_can_be_gone_back_to(wrap: Any, field: Any) -> None:
    made = source(wrap(Growing()), field=field)
    state = torch.get_rng_state()
    found = []
    for epoch in (0, 1, 0):
        made.order(epoch, 3)
        found.append(made.dataset[0])
    assert list(map(int, found)) == [0, 1, 0]
    assert found[0] == found[2]
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are touched"


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 25])
@pytest.mark.parametrize(
    "data",
    [
        ITEMS,
        DataLoader(ITEMS, batch_size=4),  # type: ignore[arg-type]
        DataLoader(ITEMS, batch_size=4, shuffle=True, drop_last=True),  # type: ignore[arg-type]
        DataLoader(ITEMS, sampler=Halves()),  # type: ignore[arg-type]
        DataLoader(ITEMS, sampler=WeightedRandomSampler([1.0] * 10, 13)),  # type: ignore[arg-type]
    ],
    ids=["dataset", "in order", "drop last", "own sampler", "a sampler that draws"],
)
def test_epochs_of_so_many_steps_go_through_pass_after_pass(data: Any, steps: int) -> None:
    passes = source(data)
    in_a_row = [number for each in range(120) for number in passes.order(each, 3).tolist()]
    made = source(data, steps_per_epoch=steps)
    size = 4 * steps
    assert made.epoch_size == size
    assert made.size == passes.size
    for epoch in (0, 1, 2, 5, 2, 0):  # also back again
        assert made.order(epoch, 3).tolist() == in_a_row[epoch * size : (epoch + 1) * size]


def test_epochs_of_so_many_steps_do_not_touch_validation() -> None:
    assert orders(source(ITEMS, field="validation", steps_per_epoch=1), 2) == [list(range(10))] * 2


def test_a_batch_of_more_than_a_pass_is_refused_where_batches_reach_over_its_end() -> None:
    with pytest.raises(
        WorkloadError, match=r"Workload\.train has 10 samples, and with job\.steps_per_epoch every batch"
    ):
        source(ITEMS, batch_size=11, steps_per_epoch=2)
