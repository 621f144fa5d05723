"""The plain loop as a run of its own: what it leaves, and what it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.reference.loop import ReferenceResult
from weft.reference.run import _write_run


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "best.safetensors"])
def test_a_disk_that_takes_no_more_is_told_with_the_file_and_the_remedy(tmp_path: Path, name: str) -> None:
    """Of the weights it was an error of safetensors, with its traceback; of the numbers one that named no file."""
    weights = {"weight": torch.zeros(4)}
    trained = ReferenceResult(
        losses=[0.5],
        validations=[],
        measured=[],
        learning_rates=[],
        grad_norms=[],
        skipped=[],
        state=weights,
        best=weights,
    )
    if name == "metrics.jsonl":
        (tmp_path / name).symlink_to("/dev/full")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=r"cannot be written: .*; make room, or give another --runs-dir") as told:
        _write_run(tmp_path, trained)
    assert str(told.value).startswith(str(tmp_path / name))
    assert told.value.strerror is None
