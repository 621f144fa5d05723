"""A worker's profile as a value: its rows, its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.worker_profile import (
    ProfileError,
    ProfileRow,
    Track,
    WorkerProfile,
    apart_or_within,
    outermost,
    packed_track,
    profiles_in,
)

ROWS: list[ProfileRow] = [(0, 1, 100, 200), (1, 2, 250, 300)]
PROFILE = WorkerProfile(
    job="digits-1",
    attempt=2,
    worker="gpu-0",
    first=10,
    last=12,
    start_ns=50,
    end_ns=400,
    clock_error_ns=1,
    dropped=0,
    names=("gemm", "Memcpy DtoH"),
    tracks=(Track(lane="compute", source="stream 13", packed=packed_track(ROWS)),),
)


def spans(rows: Sequence[ProfileRow]) -> list[tuple[int, int]]:
    return [(start, end) for _, _, start, end in rows]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = PROFILE.save(tmp_path)
    assert path == tmp_path / "profile-gpu-0.msgpack"
    loaded = WorkerProfile.load(path)
    assert loaded == PROFILE
    assert list(loaded.tracks[0].rows()) == ROWS
    assert loaded.num_events == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_has_the_profiles_of_one_attempt_among_others(tmp_path: Path) -> None:
    for profile in (PROFILE, replace(PROFILE, worker="cpu-0"), replace(PROFILE, worker="cpu-1", attempt=1)):
        profile.save(tmp_path)
    assert [profile.worker for profile in profiles_in(tmp_path, "digits-1", 2)] == ["cpu-0", "gpu-0"]
    assert profiles_in(tmp_path, "digits-2", 2) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb({"weft_profile": 1}),
        msgpack.packb({"weft_profile": 1, "tracks": [{"lane": "compute", "source": "", "packed": b"123"}]}),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "profile-x.msgpack"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=r"profile-x.msgpack is no profile"):
        WorkerProfile.load(path)


def test_a_file_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "profile-x.msgpack"
    path.write_bytes(msgpack.packb({"weft_profile": 7}))
    with pytest.raises(ProfileError, match="of version 7 and this Weft reads 1; run the job again"):
        WorkerProfile.load(path)


def test_a_kernel_that_begins_before_the_one_in_front_is_over_begins_where_that_ends() -> None:
    assert spans(apart_or_within([(0, 1, 0, 10), (1, 1, 8, 15), (2, 1, 20, 30)])) == [(0, 10), (10, 15), (20, 30)]


def test_what_lies_within_another_stays_where_it_is() -> None:
    rows: list[ProfileRow] = [(0, 0, 0, 100), (1, 0, 10, 50), (2, 0, 10, 20), (3, 0, 60, 100)]
    assert apart_or_within(list(reversed(rows))) == rows


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_whatever_the_spans_they_end_up_apart_or_within_each_other(drawn: list[tuple[int, int]]) -> None:
    placed = spans(apart_or_within([(0, 1, start, start + length) for start, length in drawn]))
    assert len(placed) == len(drawn)
    assert all(start <= end for start, end in placed)
    assert all(before[0] <= after[0] for before, after in pairwise(placed))
    for number, (start, end) in enumerate(placed):
        for other_start, other_end in placed[number + 1 :]:
            assert other_start >= end or other_end <= end, "the later one is behind it or within it"
            assert other_start >= start


def test_outermost_spans_are_those_in_no_other_and_those_that_overlap_are_one() -> None:
    rows: list[ProfileRow] = [(0, 0, 0, 100), (1, 0, 10, 50), (2, 0, 100, 120), (3, 0, 130, 140), (3, 0, 135, 150)]
    assert list(outermost(rows)) == [(0, 100), (100, 120), (130, 150)]
    assert list(outermost([])) == []
