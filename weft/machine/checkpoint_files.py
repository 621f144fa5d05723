"""Checkpoint files: directories that are there whole or not at all, and which of them is the newest that is.

    RUN/checkpoints/step-00000500/    manifest.json, and the files that it names with their sizes and SHA-256
    RUN/checkpoints/latest            a link to the newest
    RUN/checkpoints/best              a link to the best, which stays, of a job that keeps it
    RUN/checkpoints/refused-step-…    one that cannot be used, as it was found
    RUN/checkpoints/.step-…           one that is being written, or removed

A checkpoint is written beside its place, every file brought to the disk, and renamed; then the link is replaced by a
rename as well. So whoever is killed at whatever moment leaves the one before, and nothing that looks like another. What
he leaves beside is the next one's to remove, or the next daemon's: `remove_unfinished`.
Nothing here knows what is in the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from weft.machine.run_file import RunFileError, load, make_directory, sync

FOLDER: Final = "checkpoints"
LATEST: Final = "latest"
BEST: Final = "best"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1  # of the manifest, and of the files that it names
MAX_MANIFEST_BYTES: Final = 16 << 20
MAX_REASON_CHARS: Final = 200
_HASHED_BYTES: Final = 1 << 22  # at a time
_PREFIX: Final = "step-"
_REFUSED: Final = "refused-"


class CheckpointError(Exception):
    """It cannot be used. The text names the file and says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One that has a manifest."""

    path: Path
    step: int  # training steps that are done
    training: Mapping[
        str, Any
    ]  # what its bits depend on: batch size, seed, number of samples, whether units are compiled
    files: Mapping[str, tuple[int, str]]  # by name: bytes, SHA-256
    standing: Mapping[str, Any]  # what `[stop]` goes on with, see weft.spec.stopping
    adjusted: Mapping[str, Any]  # to what the job had been adjusted, see weft.scheduler.runs.checkpoints
    counted: bool  # one of those of which the newest stay; else it is there as long as it is the best


def name_of(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def read_manifest(path: Path) -> Checkpoint:
    """path: of the checkpoint's directory. Errors: CheckpointError."""
    try:
        told = json.loads(load(path / MANIFEST, MAX_MANIFEST_BYTES))
        if told["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has the format {told['format']!r:.80}, and this Weft reads {FORMAT}; use the one that wrote it"
            )
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in told["files"].items()}
        step, training, standing = int(told["step"]), dict(told["training"]), dict(told.get("standing", {}))
        adjusted = dict(told.get("adjusted", {}))  # not there before it was kept
        counted = bool(told.get("counted", True))  # the same
    except (FileNotFoundError, RunFileError) as error:
        if isinstance(error, RunFileError) and path.is_dir():
            raise CheckpointError(str(error)) from error
        raise CheckpointError(
            f"{path} is no checkpoint, nor a run that has one; give a directory of RUN/checkpoints, such as "
            "RUN/checkpoints/latest"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path / MANIFEST, f"{type(error).__name__}: {error}") from error
    if step < 0 or any(Path(name).name != name or name.startswith(".") for name in files):
        raise _damaged(path / MANIFEST, "it names what is no file of a checkpoint")
    return Checkpoint(
        path=path, step=step, training=training, files=files, standing=standing, adjusted=adjusted, counted=counted
    )


def check_digests(checkpoint: Checkpoint) -> None:
    """That every file is as it was written. Errors: CheckpointError."""
    for name, (num_bytes, digest) in checkpoint.files.items():
        file = checkpoint.path / name
        try:
            found = file.stat(follow_symlinks=False).st_size
            if found != num_bytes:
                raise _damaged(file, f"it has {found} bytes, not {num_bytes}")
            if _digest(file) != digest:
                raise _damaged(file, "its SHA-256 is not the manifest's")
        except OSError as error:
            raise _damaged(file, str(error.strerror)) from error


def newest_whole(run: Path) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """(the newest checkpoint of a run directory whose digests are right, why newer ones are not)"""
    refused: list[CheckpointError] = []
    for path in reversed(checkpoints(run)):
        try:
            return _read_whole(path), refused
        except CheckpointError as error:
            refused.append(error)
    return None, refused


def _read_whole(path: Path) -> Checkpoint:
    """Errors: CheckpointError."""
    checkpoint = read_manifest(path)
    check_digests(checkpoint)
    return checkpoint


def set_refused_aside(run: Path, newest: Checkpoint | None) -> None:
    """What stands behind the newest that is whole, of a run that goes on from that: it comes to those steps again, and
    neither leaves out a checkpoint for one that is refused nor removes one for it. Errors: OSError."""
    folder, there = run / FOLDER, checkpoints(run)
    refused = there if newest is None else there[there.index(newest.path) + 1 :]
    if folder.is_symlink() or not refused:  # the job's own code may have put it there
        return
    for place in refused:
        aside = place.with_name(f"{_REFUSED}{place.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(place, aside)
    if newest is None:
        (folder / LATEST).unlink(missing_ok=True)
    else:
        _point(folder / LATEST, newest.path.name)


def checkpoints(run: Path) -> list[Path]:
    """Of a run directory, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(run / FOLDER) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    numbered = (name for name in names if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdigit())
    return [run / FOLDER / name for name in sorted(numbered, key=lambda name: int(name[len(_PREFIX) :]))]


def resolved(path: Path) -> Path:
    """A checkpoint's directory, from that of a run, too, whose newest it then is. Errors: CheckpointError."""
    if (path / MANIFEST).exists() or not (path / FOLDER).is_dir():
        return path
    newest, refused = newest_whole(path)
    if newest is None:
        why = "; ".join(map(str, refused)) or f"{path / FOLDER} is empty"
        raise CheckpointError(f"{path} has no checkpoint that can be used: {why}")
    return newest.path


def write_checkpoint(
    run: Path,
    step: int,
    training: Mapping[str, Any],
    write: Callable[[Path], Iterable[str]],
    *,
    keep: int,
    best: bool = False,
    counted: bool = True,
    standing: Mapping[str, Any] = MappingProxyType({}),
    adjusted: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Makes the checkpoint of a step whose files `write` puts into the directory that it is given, and names; nothing
    where there is one already that is as it was written. keep: how many stay of those that are counted, the newest; the
    best one does, too, and the newest of all. best: it is that from now on.

    Errors: OSError, also where somebody has taken a file away; after which all is as it was before.
    """
    folder = run / FOLDER
    place, partial = folder / name_of(step), _hidden(folder / name_of(step))
    make_directory(folder)
    if not _is_whole(place):
        remove_unfinished(run)
        try:
            partial.mkdir(0o700)
            names = write(partial)
            about = {"training": dict(training), "standing": dict(standing), "adjusted": dict(adjusted)}
            _seal(partial, sorted(names), {"step": step, "counted": counted, **about})
            _remove(place)
            os.rename(partial, place)
            sync(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    if best:
        _point(folder / BEST, place.name)
    there = checkpoints(run)
    _point(folder / LATEST, there[-1].name)
    kept = {best_of(run), there[-1], *[each for each in there if _is_counted(each)][-keep:]}
    for old in there:
        if old not in kept:
            _remove(old)
    return place


def _is_counted(place: Path) -> bool:
    try:
        return read_manifest(place).counted
    except CheckpointError:
        return True


def _is_whole(place: Path) -> bool:
    try:
        _read_whole(place)
    except CheckpointError:
        return False
    return True


def remove_unfinished(run: Path) -> None:
    """Of a run directory, what nobody writes any more: who wrote it, or removed it, was killed."""
    folder = run / FOLDER
    if folder.is_symlink():  # the job's own code may have put it there
        return
    for left in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    for link in (LATEST, BEST):
        with suppress(OSError):
            (folder / f".{link}").unlink()


def best_of(run: Path) -> Path | None:
    """The checkpoint of a run directory that a validation has found the best."""
    with suppress(OSError):
        name = os.readlink(run / FOLDER / BEST)
        if name.startswith(_PREFIX) and Path(name).name == name and (run / FOLDER / name / MANIFEST).is_file():
            return run / FOLDER / name
    return None


def copy_files(checkpoint: Path, place: Path) -> Iterable[str]:
    """Of a checkpoint, all but its manifest; their names. Errors: OSError, CheckpointError."""
    names = read_manifest(checkpoint).files
    for name in names:
        shutil.copyfile(checkpoint / name, place / name, follow_symlinks=False)
    return names


def _seal(partial: Path, names: Iterable[str], about: Mapping[str, Any]) -> None:
    """The manifest comes last: what has none is no checkpoint. It has all that was written, not all that is there: who
    takes away what a killed one has left may meet a writer that is not dead yet. Nobody reads a checkpoint soon, and
    pages that were never used cost a virtual machine ten times what it takes to fill those that the last one had."""
    files = {name: ((partial / name).stat().st_size, _digest(partial / name)) for name in names}
    for name in files:
        sync(partial / name, is_read_again=False)
    manifest = {"format": FORMAT, **about, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    sync(partial / MANIFEST)
    sync(partial)


def _remove(place: Path) -> None:
    """Half of it never looks like a checkpoint."""
    hidden = _hidden(place, "-removed")
    with suppress(OSError):
        os.rename(place, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _hidden(place: Path, ends: str = "") -> Path:
    """Beside it, and this process's alone: a daemon that was killed may have left a writer of the same step, which dies
    in a moment."""
    return place.with_name(f".{place.name}.{os.getpid()}{ends}")


def _point(link: Path, target: str) -> None:
    fresh = link.with_name(f".{link.name}")
    with suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(target)
    os.rename(fresh, link)
    sync(link.parent)


def _digest(path: Path) -> str:
    sums = hashlib.sha256()
    for data in _chunks(path):
        sums.update(data)
    return sums.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while data := file.read(_HASHED_BYTES):
            yield data


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged ({why:.{MAX_REASON_CHARS}}); use the checkpoint before it")
