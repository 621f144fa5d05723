"""What is installed: files of packages and of the standard library, which no job changes."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path


def is_installed(path: Path) -> bool:
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    return any(map(path.is_relative_to, _standard_library()))


@functools.cache
def _standard_library() -> list[Path]:
    return [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
