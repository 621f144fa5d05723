"""TOML text: a value of a spec, as a job file and `--set` have it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_BARE = re.compile(r"[A-Za-z0-9_-]+")  # a key without quotes


def toml(value: Any) -> str:
    match value:
        case BaseModel():
            return toml(value.model_dump(exclude_none=True))
        case Mapping():
            pairs = [f"{key if _BARE.fullmatch(key) else toml(key)} = {toml(part)}" for key, part in value.items()]
            return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return json.dumps(value, ensure_ascii=False)
