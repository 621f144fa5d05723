"""Whole files: what a verb writes is there whole, or what was there before stands as it was."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path


def write_whole(path: Path, parts: Iterable[bytes]) -> int:
    """The number of bytes. A device or a pipe is written to as it is.

    Errors: OSError whose text names the path and the remedy.
    """
    target = path.resolve()
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as stream:
                return _write(stream.fileno(), parts)
        return _replace(target, parts)
    except BrokenPipeError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"{path} cannot be written: {why}; give a path in a directory that you can write to") from error


def _replace(target: Path, parts: Iterable[bytes]) -> int:
    if target.is_dir():
        raise IsADirectoryError(None, "it is a directory")
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.partial")
    with ExitStack() as undoing:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        undoing.callback(_remove, partial)
        try:
            num_bytes = _write(descriptor, parts)
        finally:
            os.close(descriptor)
        partial.replace(target)
        undoing.pop_all()
    return num_bytes


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _write(descriptor: int, parts: Iterable[bytes]) -> int:
    num_bytes = 0
    with os.fdopen(descriptor, "wb", closefd=False) as stream:
        for part in parts:
            num_bytes += stream.write(part)
    return num_bytes
