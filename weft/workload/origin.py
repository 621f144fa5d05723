"""Whose fault an exception is that a worker has caught: the job's, or Weft's own.

Most of what is raised comes through the user's objects, and much of that shows no line of theirs: two layers that do
not fit, a loss of torch's own. So it is theirs wherever it may be, and ours only where it cannot: in a module that
never calls what the user gave, or where an assertion of ours fails.
"""

from __future__ import annotations

import functools
import sysconfig
import traceback
from pathlib import Path

import torch

import weft

_ROOT = Path(weft.__file__).parent
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Of the modules that a worker runs, those that reach the user's objects through another module of ours alone.
_OURS_ALONE = (
    "transport",
    "plan/course.py",
    *(f"workers/lanes/{name}.py" for name in ("attempt", "lane", "lanes", "stream_lane")),
    *(f"workers/memory/{name}.py" for name in ("bucket_memory", "layer_window")),
    *(f"workers/process/{name}.py" for name in ("job_output", "saving", "worker")),
    "workers/profiling/profiler.py",
    "workers/updates/owner.py",
)


def is_ours(error: BaseException) -> bool:
    """Whether it says nothing about the job's code."""
    if isinstance(error, torch.AcceleratorError):  # a kernel's, which the host hears of whenever it next waits
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file for file in files if Path(file).is_relative_to(_ROOT)]
    if not ours or any(is_users(file) for file in files):
        return False
    if isinstance(error, AssertionError) and ours[-1] == files[-1]:
        return True
    return str(Path(ours[-1]).relative_to(_ROOT)).startswith(_OURS_ALONE)


@functools.cache
def is_users(file: str) -> bool:
    """A file that is neither ours, nor Python's, nor a library's. What is none, such as "<string>", says nothing."""
    path = Path(file)
    if not path.is_absolute() or path.is_relative_to(_ROOT):
        return False
    return not {"site-packages", "dist-packages"} & set(path.parts) and not file.startswith(_LIBRARIES)
