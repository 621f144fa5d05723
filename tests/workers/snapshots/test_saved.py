"""What each task held, put together: it does not matter how a parameter was parted among them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from weft.workers.snapshots.attributes import Attributes
from weft.workers.snapshots.held import VALUES, Extent, Held, Piece
from weft.workers.snapshots.saved import Saved, shaped
from weft.workload.workload import WorkloadError

MATRIX = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)


def in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def held_whole(tensor: Tensor, entry: str = VALUES) -> Held:
    held = Held()
    held.add_whole("weight", entry, tensor)
    return held


def held_in_ranges(tensor: Tensor, cuts: Sequence[int], entry: str = VALUES) -> list[Held]:
    """Each behind three elements of another parameter."""
    flat = in_memory_order(tensor)
    helds = []
    for start, stop in zip([0, *cuts], [*cuts, tensor.numel()], strict=True):
        piece = torch.cat([torch.zeros(3), flat[start:stop]])
        extents = [Extent("bias", 0, 0, 3), Extent("weight", start, 3, 3 + stop - start)]
        helds.append(Held(pieces=[Piece(entry, extents, piece)]))
    return helds


@pytest.mark.parametrize(
    "like", [torch.randn(()), torch.randn(5), torch.randn(3, 4), MATRIX], ids=lambda t: str(t.shape)
)
def test_a_parameter_comes_back_whole_however_it_was_held(like: Tensor) -> None:
    for helds in ([held_whole(like)], held_in_ranges(like, []), held_in_ranges(like, [like.numel() // 2])):
        saved = Saved(helds)
        found = saved.values("weight", torch.zeros_like(like))
        assert found is not None
        assert torch.equal(found, like)
        assert found.stride() == like.stride()


def test_the_order_in_which_ranges_come_does_not_matter() -> None:
    saved = Saved(reversed(held_in_ranges(MATRIX, [7, 50])))
    found = saved.values("weight", torch.zeros_like(MATRIX))
    assert found is not None
    assert torch.equal(found, MATRIX)


def test_a_parameter_that_has_another_order_in_memory_now_has_the_same_elements() -> None:
    found = Saved([held_whole(MATRIX)]).values("weight", torch.zeros(MATRIX.shape))
    assert found is not None
    assert torch.equal(found, MATRIX)
    assert found.is_contiguous()


def test_what_the_optimizer_keeps_comes_by_its_names_and_of_its_dtypes() -> None:
    held = held_whole(MATRIX)
    held.add_whole("weight", "square", (MATRIX * MATRIX).double())
    held.states["weight"] = {"step": 3}
    saved = Saved([held])
    assert list(saved.elements("weight", MATRIX)) == ["square"]
    square = saved.elements("weight", MATRIX)["square"]
    assert square.dtype is torch.float64
    assert torch.equal(shaped(square, MATRIX), (MATRIX * MATRIX).double())
    assert saved.rest("weight") == {"step": 3}
    assert saved.elements("bias", MATRIX) == saved.rest("bias") == {}
    assert saved.values("bias", MATRIX) is None
    assert saved.options("bias") is None


def test_what_was_there_twice_is_taken_once() -> None:
    """Of a parameter that stages share, each of them may hold it."""
    found = Saved([held_whole(MATRIX), held_whole(MATRIX.clone())]).values("weight", MATRIX)
    assert found is not None
    assert torch.equal(found, MATRIX)


@pytest.mark.parametrize("like", [torch.zeros(4, 3), torch.zeros(12), torch.zeros(2, 3), torch.zeros(4, 4)], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_a_model_whose_parameters_have_other_shapes_is_refused(like: Tensor, whole: bool) -> None:
    saved = Saved([held_whole(torch.ones(3, 4))] if whole else held_in_ranges(torch.ones(3, 4), [6]))
    if like.numel() == 12 and not whole:
        pytest.skip("of ranges nobody knows the shape")
    with pytest.raises(WorkloadError, match=r"'weight' has the shape .*, and had .* when it was saved"):
        saved.values("weight", like)


def test_buffers_are_those_of_the_replica_or_else_of_the_first() -> None:
    saved = Saved([Held(replica=r, buffers={f"{name}": torch.tensor(r)}) for r in (0, 1) for name in "ab"])
    assert saved.buffers(1) == {"a": 1, "b": 1}
    assert saved.buffers(0) == saved.buffers(2) == {"a": 0, "b": 0}
    assert Saved([]).buffers(0) == {}


def test_the_schedulers_state_is_that_of_whoever_had_one() -> None:
    assert Saved([Held(), Held(scheduler={"last_epoch": 3}), Held()]).scheduler == {"last_epoch": 3}
    assert Saved([Held()]).scheduler is None


@pytest.mark.parametrize("whole", [True, False], ids=["in its shape", "flat"])
def test_what_lies_as_it_is_asked_for_is_not_copied(whole: bool) -> None:
    """A large model's state would be touched twice, in memory that nobody has had."""
    value = torch.arange(6.0).view(2, 3)
    held = Held(replica=0)
    if whole:
        held.add_whole("weight", VALUES, value)
    else:
        held.pieces.append(Piece(VALUES, [Extent("weight", 0, 0, 6)], value.view(6)))
    found = Saved([held]).values("weight", torch.zeros(2, 3))
    assert found is not None
    assert found.data_ptr() == value.data_ptr()
    assert torch.equal(found, value)


@pytest.mark.parametrize("order", [1, -1])
def test_an_attribute_is_of_the_stage_that_has_changed_it_since_it_was_restored(order: int) -> None:
    stages = []
    for counts in ("first", "second", "neither"):
        model = nn.Module()
        model.first = model.second = 0  # type: ignore[assignment]
        attributes = Attributes({"": model})
        attributes.restore({"": {"first": 3, "second": 3, "third": [3]}})
        if counts != "neither":
            setattr(model, counts, 5)
        stages.append(Held(replica=0, attributes=attributes.changed(), restored=attributes.as_restored()))
    assert Saved(stages[::order]).attributes(0) == {
        "": {"first": 5, "second": 5, "third": stages[2].attributes[""]["third"]}
    }
