"""What differs between two specs, for whoever gave another job's id."""

from __future__ import annotations

from weft.scheduler.ledger.spec_difference import what_differs


def test_each_key_that_differs_is_named_with_both_values() -> None:
    there = {"job": {"seed": 1, "args": {"hidden": 8}}, "strategy": {"stages": 2}}
    here = {"job": {"seed": 2, "args": {"rate": 0.5}}, "strategy": {"stages": 2}}
    assert what_differs(there, here) == (
        "job.seed is 1 there and 2 here, job.args.hidden is 8 there and not given here, "
        "job.args.rate is not given there and 0.5 here"
    )


def test_nothing_is_said_of_equal_specs_and_many_differences_are_cut_short() -> None:
    assert what_differs({"a": {"b": [1]}}, {"a": {"b": [1]}}) == ""
    many = {f"key{number}": number for number in range(9)}
    assert what_differs(many, {}).endswith("key3 is 3 there and not given here and 5 more")


def test_a_table_in_place_of_a_value_is_one_difference() -> None:
    assert what_differs({"replicas": 2}, {"replicas": {"stages": 1}}) == "replicas is 2 there and {'stages': 1} here"
