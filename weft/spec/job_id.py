"""Job ids: what a user may choose, and the stem of the ones that the ledger generates.

An id becomes the name of the run directory, so nothing that could leave its parent is ever accepted.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

MAX_STEM_CHARS = 100  # leaves room for the counter in the 128 characters of an id
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class InvalidJobId(ValueError):
    """An id that cannot be the name of a run directory. The text names the remedy."""


def check_job_id(text: str) -> str:
    """The id itself; raises InvalidJobId for one that a user may not choose."""
    if _ID.fullmatch(text) is None or ".." in text:
        raise InvalidJobId(
            f"id: {text!r:.80} is not a job id; use 1 to 128 letters, digits, '.', '_' or '-', "
            "a letter or digit first and no '..', for example 'digits-baseline'"
        )
    return text


def stem_of(entry: str) -> str:
    """What a generated id begins with: the entry's file without directory and suffix, in the letters of an id."""
    stem = PurePosixPath(entry.rpartition(":")[0]).stem
    stem = re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "-", stem).strip("._-")
    return stem[:MAX_STEM_CHARS] or "job"
