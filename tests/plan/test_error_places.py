"""Places on errors: added where the error passes, told from the innermost to the outermost."""

from __future__ import annotations

import pytest
from torch import nn

from weft.plan.error_places import add_place, places_of, samples_place, unit_place, within
from weft.workload.faults import fault_of
from weft.workload.workload import WorkloadError


def test_places_are_told_in_the_order_in_which_the_error_passes_them() -> None:
    with pytest.raises(KeyError) as caught, within("in step 3"), within("in unit 1"):
        raise KeyError("lost")
    assert places_of(caught.value) == ["in unit 1", "in step 3"]


def test_an_innermost_place_gives_way_to_one_that_is_there() -> None:
    with pytest.raises(KeyError) as caught, within("in unit 1", innermost=True), within("in Workload.loss"):
        raise KeyError("lost")
    assert places_of(caught.value) == ["in Workload.loss"]


def test_the_users_own_notes_are_left_alone() -> None:
    error = ValueError("no")
    error.add_note("the user's own")
    add_place(error, "in unit 1")
    assert places_of(error) == ["in unit 1"]
    assert error.__notes__ == ["the user's own", "weft: in unit 1"]


@pytest.mark.parametrize("notes", [3, None, "text", [3, None]])
def test_notes_of_any_kind_do_no_harm(notes: object) -> None:
    error = ValueError("no")
    error.__notes__ = notes  # type: ignore[assignment]
    add_place(error, "in unit 1")
    assert places_of(error) in ([], ["in unit 1"])
    assert fault_of(error).exception == "ValueError"


def test_a_unit_is_named_by_its_number_its_name_and_its_kind() -> None:
    module = nn.Linear(1, 1)
    assert unit_place(2, "2.", module) == "in unit 2 (Linear)"
    assert unit_place(2, "head.", module) == "in unit 2 (head: Linear)"
    assert unit_place(0, "", module) == "in the model (Linear)"


def test_many_samples_are_told_in_a_line() -> None:
    assert samples_place("train", [7]) == "sample 7 of Workload.train"
    assert samples_place("validation", list(range(10))) == (
        "samples 0, 1, 2, 3, 4, 5, 6, 7 and 2 more of Workload.validation"
    )


def test_a_sentence_of_ours_has_its_places_behind_it() -> None:
    error = WorkloadError("Workload.loss returned no scalar tensor; it must")
    add_place(error, "in forward of stage 1")
    assert fault_of(error).message == "Workload.loss returned no scalar tensor; it must (in forward of stage 1)"
