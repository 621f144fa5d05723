"""A directory of files that is kept within a bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

from weft.machine.bounded_directory import YOUNG_SECONDS, shrink


def test_the_oldest_files_go_until_the_rest_fit_and_no_young_one_does(tmp_path: Path) -> None:
    now = time.time()
    (tmp_path / "a").mkdir()
    for number, name in enumerate(("a/oldest", "older", "a/old")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (now, now - 3 * YOUNG_SECONDS + number))
    (tmp_path / "young").write_bytes(bytes(100))
    shrink(tmp_path, 300)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["old", "older", "young"]
    shrink(tmp_path, 0)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["young"]
    shrink(tmp_path / "nowhere", 0)
