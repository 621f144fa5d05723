from __future__ import annotations

import tomllib
from typing import Any

import pytest

from weft.cli.screens.toml_text import toml


@pytest.mark.parametrize(
    "value", ["a\n\"b\\'", True, 3, 1e-3, 1e300, float("inf"), [1, [2]], {}, {"a b": {"c": [{"d": 1.5}]}, "é": "é"}]
)
def test_a_value_is_written_as_toml_reads_it(value: Any) -> None:
    assert tomllib.loads(f"x = {toml(value)}") == {"x": value}
