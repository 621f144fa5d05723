"""Result: how a job ended, as the one line of JSON that `run`, `wait` and `submit -f` end with, and JSON in general.

Apart from `weft.cli.screens.display` so that `--json` does not wait for rich to be imported.
"""

from __future__ import annotations

import json
import math
from typing import Any

from weft.transport.wire.frames import Message

RESULT = {  # the keys of the line, and for the documentation what they say
    "job": "its id",
    "state": "`completed`, `failed` or `cancelled`",
    "reason": "of one that is not completed, such as `user-error`",
    "exception": "the name of what its code raised",
    "error": "why it failed: a sentence, or the traceback",
    "exit_code": "what the command exits with",
    "steps": "training steps that are done",
    "loss": "of the last of them; null where it was not finite",
    "validation": "the newest means over the validation data, by name",
    "stopped": "a sentence, where it was completed before its last step",
    "seconds": "that it took",
    "iteration_seconds": "the median",
    "limit_seconds": "the speed limit of its graph in the same iterations",
    "run_dir": "its directory",
    "model": "the file with the trained weights",
    "best": "the file with those that a validation has found the best, where the job keeps them",
}
RESULT_KEYS = tuple(RESULT)


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
