"""A checkpoint is there whole or not at all, whatever ends its writer at whatever moment; and what is not whole is not
used."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.machine import checkpoint_files
from weft.machine.checkpoint_files import (
    CheckpointError,
    best_of,
    check_digests,
    checkpoints,
    newest_whole,
    read_manifest,
    remove_unfinished,
    resolved,
    set_refused_aside,
    write_checkpoint,
)

TRAINING = {"batch_size": 8, "seed": 1}
CALLS = ((os, "rename"), (os, "fsync"), (os, "symlink"), (os, "mkdir"), (os, "unlink"), (shutil, "rmtree"))


def write(run: Path, step: int, *, keep: int = 2, best: bool = False, counted: bool = True) -> Path:
    def files(directory: Path) -> tuple[str, ...]:
        (directory / "model.safetensors").write_bytes(bytes([step]) * 1000)
        (directory / "training.pt").write_bytes(b"plain")
        return "model.safetensors", "training.pt"

    return write_checkpoint(run, step, TRAINING, files, keep=keep, best=best, counted=counted)


def check_is_whole(run: Path, steps: tuple[int, ...]) -> None:
    """Its newest is one of these steps, and `latest` leads to one that is whole."""
    found, refused = newest_whole(run)
    assert found is not None
    assert refused == []
    assert found.step in steps
    assert (found.path / "model.safetensors").read_bytes() == bytes([found.step]) * 1000
    check_digests(read_manifest((run / "checkpoints" / "latest").resolve()))


def counted(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[str]:
    """The names of the calls that change the disk; `act` is called with the number of each before it is made."""
    made: list[str] = []
    for module, name in CALLS:
        original = getattr(module, name)

        def call(*arguments: Any, _original: Any = original, _name: str = name, **options: Any) -> Any:
            made.append(_name)
            act(len(made))
            return _original(*arguments, **options)

        monkeypatch.setattr(module, name, call)
    return made


def test_the_newest_stay_and_latest_leads_to_the_last(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        assert write(tmp_path, step, keep=3) == tmp_path / "checkpoints" / f"step-{step:08d}"
    assert [read_manifest(path).step for path in checkpoints(tmp_path)] == [10, 15, 20]
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000020"
    check_is_whole(tmp_path, (20,))
    assert resolved(tmp_path) == checkpoints(tmp_path)[-1]
    assert resolved(checkpoints(tmp_path)[0]) == checkpoints(tmp_path)[0]


def is_in_memory(path: Path) -> bool:
    """Errors: OSError where the filesystem does not tell."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def test_its_files_leave_memory_once_they_are_on_the_disk(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 100)
    try:
        before = is_in_memory(other)
        with other.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        can_be_told = before and not is_in_memory(other)
    except OSError:
        can_be_told = False
    if not can_be_told:
        pytest.skip("this filesystem keeps its files in memory, or does not tell")
    # The kernel is asked, not told: a page that it has just in its hands stays (one in some hundred files).
    places = (write(tmp_path, step) for step in range(1, 21))
    assert any(not any(is_in_memory(place / name) for name in read_manifest(place).files) for place in places)


@pytest.mark.parametrize("moment", ["while it writes", "behind its last file"])
def test_one_whose_files_somebody_takes_away_is_none(tmp_path: Path, moment: str) -> None:
    """Where a daemon was killed the next one removes what its saver has left. A saver that did not know yet sealed what
    files there still were: a checkpoint without a model was the newest one, and every digest in it was right."""
    write(tmp_path, 1)

    def files(directory: Path) -> list[str]:
        (directory / "model.safetensors").write_bytes(b"model")
        if moment == "while it writes":
            (directory / "model.safetensors").unlink()
        (directory / "training.pt").write_bytes(b"plain")
        if moment != "while it writes":
            remove_unfinished(tmp_path)
        return ["model.safetensors", "training.pt"]

    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path, 2, TRAINING, files, keep=2)
    check_is_whole(tmp_path, (1,))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000001"]


def test_one_takes_the_place_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    """Of a run directory that somebody has copied in part."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    write(tmp_path, 2)
    check_is_whole(tmp_path, (2,))
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_what_a_jobs_code_has_put_in_the_place_of_its_checkpoints_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / ".step-of-a-dance").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(theirs)
    remove_unfinished(tmp_path / "run")
    assert (theirs / ".step-of-a-dance").is_dir()


def test_one_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    before = (path / "manifest.json").stat().st_mtime_ns
    assert write(tmp_path, 5) == path
    assert (path / "manifest.json").stat().st_mtime_ns == before


def num_calls(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = counted(monkeypatch, lambda number: None)
        for step in (1, 2, 3):
            write(tmp_path, step)
        return len(made)


def test_a_writer_that_is_killed_at_any_moment_leaves_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / "before", step)
    for moment in range(1, num_calls(tmp_path / "counted") + 1):
        run = tmp_path / str(moment)
        shutil.copytree(tmp_path / "before", run, symlinks=True)
        child = os.fork()
        if child == 0:
            with pytest.MonkeyPatch.context() as monkeypatch:
                counted(monkeypatch, lambda number, last=moment: os._exit(9) if number == last else None)
                write(run, 3)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check_is_whole(run, (2, 3))
        if os.waitstatus_to_exitcode(status) == 0:
            return
        left = shutil.copytree(run, tmp_path / f"{moment}-is-over", symlinks=True)
        remove_unfinished(left)
        check_is_whole(left, (2, 3))
        names = {path.name for path in (left / "checkpoints").iterdir()}
        assert names == {"latest", *(path.name for path in checkpoints(left))}, "where no next one comes"
        assert all(read_manifest(path) for path in checkpoints(left))
        write(run, 4)
        check_is_whole(run, (4,))
        assert not list((run / "checkpoints").glob(".step-*")), "what it left goes with the next"
    raise AssertionError("no writer came to its end")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_a_disk_that_fails_at_any_moment_leaves_the_one_before(tmp_path: Path, error: int) -> None:
    for step in (1, 2):
        write(tmp_path / "before", step)
    for moment in range(1, 100):
        run = tmp_path / str(moment)
        shutil.copytree(tmp_path / "before", run, symlinks=True)

        def fail(number: int, last: int = moment) -> None:
            if number == last:
                raise OSError(error, os.strerror(error))

        with pytest.MonkeyPatch.context() as monkeypatch:
            counted(monkeypatch, fail)
            try:
                write(run, 3)
                came_to_its_end = True
            except OSError:
                came_to_its_end = False
        check_is_whole(run, (2, 3))
        if came_to_its_end:
            return
    raise AssertionError("no writer came to its end")


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": 2, "step": 1, "training": {}, "files": {}}',
        b'{"format": 1, "step": -1, "training": {}, "files": {}}',
        b'{"format": 1, "step": "x", "training": {}, "files": {}}',
        b'{"format": 1, "step": 1, "training": 3, "files": {}}',
        b'{"format": 1, "step": 1, "training": {}, "files": {"../secret": [1, ""]}}',
        b'{"format": 1, "step": 1, "training": {}, "files": {"/etc/passwd": [1, ""]}}',
        b'{"format": 1, "step": 1, "training": {}, "files": {".hidden": [1, ""]}}',
        b'{"format": 1, "step": 1, "training": {}, "files": {"a": 1}}',
        b'{"format": 1, "step": 1, "training": {}, "files": [["a", 1, ""]]}',
        b"[" * 100_000,
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, told: bytes) -> None:
    path = write(tmp_path, 7)
    (path / "manifest.json").write_bytes(told)
    with pytest.raises(CheckpointError, match=r"; use the (checkpoint before it|one that wrote it)$"):
        read_manifest(path)


@pytest.mark.parametrize("place", ["a FIFO", "a directory", "a link"])
def test_what_stands_in_a_files_place_is_not_followed(tmp_path: Path, place: str) -> None:
    path = write(tmp_path, 7)
    for name in ("model.safetensors", "manifest.json"):
        (path / name).rename(tmp_path / name)
        match place:
            case "a FIFO":
                os.mkfifo(path / name)
            case "a directory":
                (path / name).mkdir()
            case "a link":
                (path / name).symlink_to(tmp_path / name)
        with pytest.raises(CheckpointError, match=name):
            check_digests(read_manifest(path))
        found, refused = newest_whole(tmp_path)
        assert found is None
        assert len(refused) == 1
        (path / name).rmdir() if place == "a directory" else (path / name).unlink()
        (tmp_path / name).rename(path / name)


def test_one_that_is_damaged_is_written_anew(tmp_path: Path) -> None:
    """It was there, so nothing was written, and the whole ones before it were removed for it."""
    write(tmp_path, 20)
    (write(tmp_path, 40) / "model.safetensors").write_bytes(b"4O")
    assert write(tmp_path, 40, keep=1).name == "step-00000040"
    check_is_whole(tmp_path, (40,))


@pytest.mark.parametrize("before", [True, False])
def test_refused_ones_are_set_aside_by_who_goes_on_from_the_one_before(tmp_path: Path, before: bool) -> None:
    if before:
        write(tmp_path, 20)
    for step in (40, 60):
        (write(tmp_path, step, keep=3, best=step == 60) / "model.safetensors").write_bytes(b"4O")
    newest, refused = newest_whole(tmp_path)
    assert len(refused) == 2
    for _ in range(2):  # nothing is refused the second time
        set_refused_aside(tmp_path, newest)
        kept = [tmp_path / "checkpoints" / f"refused-step-000000{step}" for step in (40, 60)]
        assert [(each / "model.safetensors").read_bytes() for each in kept] == [b"4O", b"4O"]
        assert os.path.lexists(tmp_path / "checkpoints" / "latest") is before
        assert best_of(tmp_path) is None
    if before:
        check_is_whole(tmp_path, (20,))
    for step in (30, 60):
        write(tmp_path, step, keep=1)
        check_is_whole(tmp_path, (step,))


@pytest.mark.parametrize("named", ["manifest.json", "manifest.json/beneath"])
def test_a_file_is_no_checkpoint_and_nobody_is_told_to_remove_it(tmp_path: Path, named: str) -> None:
    path = write(tmp_path, 7) / named
    with pytest.raises(CheckpointError, match=f"^{path} is no checkpoint, .*; give a directory of RUN/checkpoints"):
        read_manifest(path)


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    for name in ("step-", "step-x", "step--1", "other"):
        shutil.copytree(path, path.parent / name)
    (path.parent / "step-00000009").write_text("a file")
    assert checkpoints(tmp_path) == [path]
    with pytest.raises(CheckpointError, match="is no checkpoint, nor a run that has one; give a directory"):
        read_manifest(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no checkpoint that can be used"):
        resolved(tmp_path / "empty")


def test_the_best_stays_beside_the_newest_until_another_is_better(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [path.name for path in checkpoints(tmp_path)]

    assert best_of(tmp_path) is None
    for step, best in ((1, False), (2, True), (3, False), (4, False)):
        write(tmp_path, step, keep=1, best=best)
    assert names() == ["step-00000002", "step-00000004"]
    assert best_of(tmp_path) == tmp_path / "checkpoints" / "step-00000002"
    write_checkpoint(tmp_path, 4, TRAINING, fail, keep=1, best=True)  # it is there: nothing is written
    assert (names(), best_of(tmp_path)) == (["step-00000004"], tmp_path / "checkpoints" / "step-00000004")
    write(tmp_path, 3, keep=2, best=True)  # its turn came late
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000004"


def test_a_best_one_takes_no_place_of_those_that_are_counted_and_goes_with_the_next(tmp_path: Path) -> None:
    """Each that was the best once pushed out one of the interval's."""

    def steps() -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in checkpoints(tmp_path)]

    for step in range(10, 160, 10):
        write(tmp_path, step, keep=2, best=True, counted=step % 50 == 0)
    assert steps() == [100, 150]
    write(tmp_path, 160, keep=2, best=True, counted=False)
    assert steps() == [100, 150, 160]
    write(tmp_path, 200, keep=2)
    assert steps() == [150, 160, 200]
    write(tmp_path, 210, keep=2, best=True, counted=False)
    assert steps() == [150, 200, 210]
    write(tmp_path, 205, keep=2, best=True, counted=False)  # the newest of all stays, from which a daemon would go on
    assert steps() == [150, 200, 205, 210]
    write(tmp_path, 250, keep=2)
    assert steps() == [200, 205, 250]


def test_one_whose_manifest_does_not_say_is_counted(tmp_path: Path) -> None:
    manifest = write(tmp_path, 10, best=True, counted=False) / "manifest.json"
    told = json.loads(manifest.read_text())
    assert told.pop("counted") is False
    manifest.write_text(json.dumps(told))
    write(tmp_path, 20, best=True, counted=False)
    assert len(checkpoints(tmp_path)) == 2


def fail(path: Path) -> None:
    raise AssertionError(path)


@pytest.mark.parametrize("target", ["../../elsewhere", "step-00000009", "/", "manifest.json"])
def test_a_link_to_no_checkpoint_of_the_run_names_no_best(tmp_path: Path, target: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoints" / "best").symlink_to(target)
    assert best_of(tmp_path) is None


def test_the_manifest_tells_what_a_reader_needs(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    told = json.loads((path / "manifest.json").read_text())
    assert told.keys() == {"format", "step", "training", "standing", "adjusted", "counted", "files"}
    assert (told["step"], told["training"]) == (7, TRAINING)
    assert told["files"]["training.pt"][0] == 5
    assert told["format"] == checkpoint_files.FORMAT
