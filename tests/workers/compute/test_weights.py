"""What each microbatch counts in its batch: its samples, or what the workload says of its targets."""

from __future__ import annotations

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.transport.memory.directory import Directory
from weft.workers.compute.weights import Weights

FIRST, SECOND, EMPTY = Part(0, 0, 3), Part(1, 3, 1), Part(2, 4, 0)


def iteration(index: int) -> Iteration:
    return Iteration(index=index, training=True, epoch=0, step=index, start=0, size=4)


def test_without_a_function_a_microbatch_counts_its_samples_and_nothing_is_shared(directory: Directory) -> None:
    weights = Weights(directory, weighs=False, num_microbatches=3, depth=2)
    weights.set(iteration(0), FIRST, 1.0, 3)
    assert [weights.fraction(iteration(0), part) for part in (FIRST, SECOND, EMPTY)] == [0.75, 0.25, 0.0]
    assert (weights.weighs, weights.samples(iteration(0)), directory.num_bytes()) == (False, 4, {})


def test_what_the_loader_weighs_the_stages_read(directory: Directory) -> None:
    loader, stage = (Weights(directory, weighs=True, num_microbatches=3, depth=2) for _ in range(2))
    loader.set(iteration(0), FIRST, 2, 5)
    loader.set(iteration(0), SECOND, 1, 2)
    loader.set(iteration(0), EMPTY, 0, 0)
    assert stage.weighs
    assert (stage.total(iteration(0)), stage.samples(iteration(0))) == (3, 7)
    assert [stage.fraction(iteration(0), part) for part in (FIRST, SECOND, EMPTY)] == [2 / 3, 1 / 3, 0.0]


def test_where_nothing_in_a_batch_counts_no_part_of_it_does(directory: Directory) -> None:
    weights = Weights(directory, weighs=True, num_microbatches=3, depth=1)
    for part in (FIRST, SECOND, EMPTY):
        weights.set(iteration(0), part, 0.0, part.size)
    assert (weights.total(iteration(0)), weights.samples(iteration(0))) == (0, 4)
    assert [weights.fraction(iteration(0), part) for part in (FIRST, SECOND, EMPTY)] == [0.0] * 3


def test_batches_on_their_way_do_not_share_a_row_and_the_next_one_leaves_nothing_of_the_last(
    directory: Directory,
) -> None:
    weights = Weights(directory, weighs=True, num_microbatches=3, depth=2)
    totals = []
    for index, weight in enumerate((3, 2, 1)):
        weights.set(iteration(index), FIRST, weight, 3)
        weights.set(iteration(index), SECOND, 1, 1)
        weights.set(iteration(index), EMPTY, 0, 0)
        totals.append([weights.total(iteration(each)) for each in range(max(0, index - 1), index + 1)])
    assert totals == [[4.0], [4.0, 3.0], [3.0, 2.0]]
