"""Grids: what is printed is read as the same schedule, and what is wrong with one is said with its line and remedy."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.schedules.grid import drawn, read_grid, schedule_of
from weft.plan.schedules.named import SCHEDULES
from weft.plan.schedules.schedule import ScheduleError


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12))
def test_what_is_printed_is_read_as_the_same(name: str, stages: int, microbatches: int) -> None:
    schedule = SCHEDULES[name](stages, microbatches)
    assert read_grid(drawn(schedule, name)) == schedule


def test_a_worker_may_have_several_stages() -> None:
    schedule = read_grid("0F0 2F0 2B0 0B0\n1F0 1B0")
    assert schedule.worker_of == {0: 0, 1: 1, 2: 0}
    assert drawn(schedule, "two of three").splitlines() == [
        "# two of three",
        " F0   . 2F0 2B0   .  B0",
        "  .  F0   .   .  B0",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# nothing", "no worker has a pass; write a line for each worker"),
        ("F0 B0\n.", "line 2 is a worker without passes; write its passes there, or leave the line out"),
        ("F0 B0 X1", "line 1: 'X1' is no pass; write . for a wait, or a letter of F (forward), B (backward)"),
        ("# mine\n\nF0 B0\nF0 B0 F1", "line 3 lacks F1; each stage has every microbatch once"),
        ("F0 B0\nF0", "line 2 lacks B0; each stage has every microbatch once"),
        ("F0 F0 B0", "line 1 has F0 twice; leave one of them out"),
        ("F0 B0 F1 B1\nF1 B1 F0 B0", "line 2 has F0 behind F1; write a stage's microbatches in their order"),
        ("F0 F1 B1 B0", "line 1 has B0 behind B1; write a stage's microbatches in their order"),
        ("B0 F0", "line 1 has B0 before F0, which it needs; write F0 first"),
        ("F0 B0\nF0 I0", "line 2 lacks W0; each stage has every microbatch once"),
        ("F0 B0\nF0 W0 I0", "line 2 has W0 before I0, which it needs; write I0 first"),
        ("F0 B0\nF0 I0 B0", "line 2 has microbatch 0 go back whole and in parts; write B0, or I0 and W0 for its parts"),
        ("F0 B0 F1 B1\nF0 F1 I0 I1 W1 W0", "line 2 has W0 behind W1; write a stage's microbatches in their order"),
        ("F0 B0\n0F0", "line 2 has F0 of stage 0, which is in line 1; write all passes of a stage in one line"),
        ("0F0 2F0 0B0 2B0", "stage 1 is in no line, and stage 2 in line 1; number the stages from 0 without gaps"),
        (
            "F0 B0 F1 B1\nF0 F1 B0 B1",
            "line 1 stands at B0 and waits for B0 of line 2; line 2 stands at F1 and waits for F1 of line 1: that is a "
            "deadlock; in line 2 write B0 before F1",
        ),
        ("1F0 1B0\n0F0 2F0 0B0 2B0", "that is a deadlock; in line 2 write 2B0 before 0B0"),
        ("1F0 1B0\n2F0 0F0 2B0 0B0", "that is a deadlock; in line 2 write 0F0 before 2F0"),
        ("F0 1F0 B0 1B0", "that is a deadlock; in line 1 write 1B0 before B0"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_the_line_and_the_remedy(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        read_grid(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_remedy_for_a_deadlock_mends_it() -> None:
    assert read_grid("F0 B0 F1 B1\nF0 B0 F1 B1") == SCHEDULES["model-parallel"](2, 2)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whatever_is_out_of_order_the_remedies_lead_to_a_grid_that_runs(
    stages: int, microbatches: int, workers: int, rng: random.Random
) -> None:
    """Where a worker has several stages, the remedy for a deadlock once was to write a pass before itself."""
    programs: list[list[str]] = [[] for _ in range(min(workers, stages))]
    for stage in range(stages):
        for m in range(microbatches):
            back = ("B",) if rng.random() < 0.5 else ("I", "W")
            programs[stage % len(programs)] += [f"{stage}{letter}{m}" for letter in ("F", *back)]
    for program in programs:
        rng.shuffle(program)
    for _ in range(300):
        lines = [" ".join(program) for program in programs]
        try:
            read_grid("\n".join(lines))
        except ScheduleError as error:
            line, first, then = remedy(str(error))
        else:
            return
        program = programs[line]
        names = [name.removeprefix(str(line)) if name[0] == str(line) else name for name in program]
        assert names.index(then) < names.index(first)
        program.insert(names.index(then), program.pop(names.index(first)))
    raise AssertionError("\n".join(lines))


def remedy(told: str) -> tuple[int, str, str]:
    """(line from 0, what is to be written before, what): as a sentence has it."""
    if (deadlock := re.search(r"in line (\d+) write (\S+) before (\S+)$", told)) is not None:
        line, first, then = deadlock.groups()
    else:
        found = re.match(r"line (\d+) has (\S+) (before|behind) (\w+)", told)
        assert found is not None, told
        line, one, where, other = found.groups()
        first, then = (one, other) if where == "behind" else (other, one)
    return int(line) - 1, first, then


def test_a_grid_of_another_size_than_the_jobs_is_refused() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"strategy\.stages = 2 and strategy\.microbatches = 1, and 2 and 4 are asked for; use its own",
    ):
        schedule_of("F0 B0\nF0 B0\n", 2, 4)


@given(st.text(alphabet="FBIW012. #\n", max_size=60))
def test_whatever_is_written_is_a_schedule_that_ends_or_is_refused(text: str) -> None:
    try:
        schedule = read_grid(text)
    except ScheduleError:
        return
    assert len(list(schedule.timeline())) == sum(map(len, schedule.programs))
