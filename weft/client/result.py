"""Result: how a job ended, as the one line of JSON that `run`, `wait` and `submit -f` end with, and JSON in general.

Apart from `weft.cli.screens.display` so that `--json` does not wait for rich to be imported.
"""

from __future__ import annotations

import json
import math
from typing import Any

from weft.transport.wire.frames import Message

RESULT_KEYS = (
    "job",
    "state",
    "reason",
    "steps",
    "loss",
    "validation",
    "seconds",
    "iteration_seconds",
    "limit_seconds",
    "run_dir",
    "model",
)


def to_json(value: Any) -> str:
    """One line of JSON; what JSON has no word for (a loss that is not finite) becomes null."""
    return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def result_json(result: Message) -> str:
    """The one line that `run --json`, `wait --json` and `submit -f --json` end with."""
    return to_json({key: result.get(key) for key in RESULT_KEYS})
