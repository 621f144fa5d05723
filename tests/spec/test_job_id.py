"""Job ids: what is made of an entry's file is one."""

from __future__ import annotations

import pytest

from weft.spec.job_id import check_job_id, stem_of


@pytest.mark.parametrize(
    ("entry", "stem"),
    [
        ("digits.py:workload", "digits"),
        ("a/b/my model.py:f", "my-model"),
        ("../../etc/passwd.py:f", "passwd"),
        ("..py:f", "job"),
        ("été.py:f", "t"),
        ("日本.py:f", "job"),
        ("a...b.py:f", "a-b"),
        ("x" * 500 + ".py:f", "x" * 100),
    ],
)
def test_the_stem_of_any_entry_makes_a_valid_id(entry: str, stem: str) -> None:
    assert stem_of(entry) == stem
    assert check_job_id(f"{stem}-{10**9}")
