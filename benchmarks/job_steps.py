"""What a benchmark's job tells of its steps, in the order of its iterations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.client.client import Client


def rows_of(client: Client, job: str) -> list[dict[str, Any]]:
    """The lines of its metrics.jsonl, once it has completed. Errors: AssertionError where it does not."""
    result = client.wait(job, timeout=600)
    assert result["state"] == "completed", result
    lines = Path(result["run_dir"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
