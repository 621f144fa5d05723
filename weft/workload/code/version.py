"""Version: what a job's files of code said when a worker first loaded them. A job trains with one version of its code.

    first inspection ── load ─▶ digests by file ─▶ the daemon keeps them with the run ─▶ with every order to load
    any later load   ── compare ─ load ─ compare

Looked at are the files of modules, as `files_of_job` has them. What an inspection has imported after the load, in a
forward, is looked at from then on; what is imported later still, and what the job reads by other ways, is not.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from weft.spec.job_spec import JobSpec, is_unicode
from weft.workload.entry import files_of_job, load_again
from weft.workload.workload import Workload, WorkloadError

MAX_NAMES: Final = 3  # of files, in a message: a line's worth


class CodeChanged(WorkloadError):
    """Files of a job's code are no longer what they were when it loaded them first."""

    def __init__(self, job: str, files: Collection[str]) -> None:
        super().__init__(job, files)  # what pickle calls it with again, in another process
        self.job = job
        self.files = sorted(files)

    def __str__(self) -> str:
        more = f" and {len(self.files) - MAX_NAMES} more" if len(self.files) > MAX_NAMES else ""
        has, it = ("has", "it") if len(self.files) == 1 else ("have", "them")
        return (
            f"{', '.join(self.files[:MAX_NAMES])}{more} {has} changed since {self.job} first loaded {it}, and a worker "
            f"has to load {it} anew; a job trains with one version of its code. Put {it} back, then "
            f"`weft resume {self.job}` goes on as it was; as {'it is' if it == 'it' else 'they are'}, "
            f"`weft resume {self.job}` goes on with the new code, and `weft restart {self.job}` begins again with it"
        )


class CodeVersion:
    """Of one job: known from its first load, or what that load is to be noted as. digests: of SHA-256, by path."""

    def __init__(self, job: str, digests: Mapping[str, str]) -> None:
        self.digests = dict(digests)
        self._job = job
        self._began_ns: int | None = None  # the first load
        self._imported = _imported()  # behind it

    def check(self) -> None:
        """Before a load, and again behind it. Errors: CodeChanged."""
        if changed := [path for path, digest in self.digests.items() if _digest(Path(path)) != digest]:
            raise CodeChanged(self._job, changed)

    def load(self, before: Collection[str], spec: JobSpec) -> Workload:
        """As `load_again`; the first load is noted. Errors: CodeChanged, too.

        Of a file that changes meanwhile nobody knows which version was imported. Loaded once more, it is known of those
        that have stayed as they were then; what changes with each load the job itself writes, and that is not noted.
        """
        self.check()
        if self._began_ns is not None:
            return load_again(before, spec)
        self._began_ns = time.time_ns()
        workload = load_again(before, spec)
        found = _digests(files_of_job(spec, before))
        if any(_has_changed_since(path, self._began_ns) for path in found.keys() - self.digests.keys()):
            del workload
            workload = load_again(before, spec)
            found = dict(found.items() & _digests(map(Path, found)).items())
        self.digests, self._imported = found | self.digests, _imported()
        return workload

    def note_late(self, before: Collection[str], spec: JobSpec) -> None:
        """What has been imported since the load, by what was run then."""
        assert self._began_ns is not None
        if _imported() == self._imported:
            return
        late = [each for each in files_of_job(spec, before) if str(each) not in self.digests]
        self.digests |= _digests(each for each in late if not _has_changed_since(str(each), self._began_ns))


def _imported() -> tuple[int, str]:
    """What is another thing once a module has come: it comes last."""
    return len(sys.modules), next(reversed(sys.modules))


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """Of those that are there, and whose names a message can have."""
    found = ((str(file), _digest(file)) for file in files if is_unicode(str(file)))
    return {file: digest for file, digest in found if digest is not None}


def _digest(file: Path) -> str | None:
    """None of one that cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


def _has_changed_since(path: str, began_ns: int) -> bool:
    """By the time of its inode: another file that is moved or linked there brings its own of the content. Many
    kernels take the clock's last tick, some milliseconds ago, so what is written that soon is taken to have been there:
    a job may be submitted as soon as its file is."""
    try:
        return Path(path).stat().st_ctime_ns >= began_ns
    except OSError:
        return True
