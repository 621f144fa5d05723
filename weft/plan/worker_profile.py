"""Worker profile: what torch.profiler saw of a worker's lanes in some iterations, as a file of the run directory. Pure.

    profile-gpu-0.msgpack      start_ns ├──────── covered ────────┤ end_ns         CLOCK_MONOTONIC, as stamped rows
      track compute                      ▕k▏▕k▏▕kernel▏ ▕k▏▕kernel▏                kernels, copies, fills of a stream
      track d2h                               ▕copy▏     ▕copy▏                    or operators of a thread, nested

    rows of a track     name | kind | start_ns | end_ns      four int64; name is a place in `names`, kind one in KINDS

A worker writes one while its job runs; whoever looks at a recording puts the tracks beside its lanes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgpack

from weft.machine.run_file import load, replace

VERSION: Final = 1
KINDS: Final = ("operator", "kernel", "copy", "fill")
MAX_EVENTS: Final = 100_000  # of a file, which has then some 4 MB; more than that nobody looks at one by one
MAX_BYTES: Final = 64 << 20  # of a file, where each event has a long name of its own
MAX_NAME: Final = 160  # characters; a kernel's name tells its template's arguments, to several thousand
_FIELDS: Final = 4
_PREFIX: Final = "profile-"

ProfileRow = tuple[int, int, int, int]


class ProfileError(ValueError):
    """A file that is no profile, or of another version. The text names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What ran in one stream, or thread."""

    lane: str  # whose it is, "" where it is no lane's
    source: str  # such as "stream 13"
    packed: bytes  # rows in the order of their starts; two of them lie within each other or apart

    def rows(self) -> Iterator[ProfileRow]:
        """Errors: ValueError where the bytes are no whole number of rows."""
        flat = array("q")
        flat.frombytes(self.packed)
        if len(flat) % _FIELDS:
            raise ValueError(f"{len(flat)} numbers are no whole number of rows of {_FIELDS}")
        values = iter(flat)
        return zip(values, values, values, values, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProfile:
    job: str
    attempt: int
    worker: str
    first: int  # of the iterations that it was asked for
    last: int
    start_ns: int  # of the time of which everything is there
    end_ns: int
    clock_error_ns: int  # what the profiler's clock may be off the rows' by, at most
    dropped: int  # events beyond MAX_EVENTS
    names: tuple[str, ...]
    tracks: tuple[Track, ...]

    @property
    def num_events(self) -> int:
        return sum(len(track.packed) for track in self.tracks) // (8 * _FIELDS)

    # --- as a file

    def save(self, directory: Path) -> Path:
        """Whole or not at all. Errors: OSError."""
        path = directory / f"{_PREFIX}{self.worker}.msgpack"
        replace(path, msgpack.packb({"weft_profile": VERSION, **asdict(self)}))
        return path

    @classmethod
    def load(cls, path: Path) -> WorkerProfile:
        """Errors: ProfileError, and OSError where it cannot be read."""
        try:
            wire = msgpack.unpackb(load(path, MAX_BYTES))
            version = wire.pop("weft_profile")
            if version != VERSION:
                raise ProfileError(f"{path} is of version {version} and this Weft reads {VERSION}; run the job again")
            tracks = tuple(Track(**track) for track in wire.pop("tracks"))
            for track in tracks:
                track.rows()
            return cls(**wire | {"names": tuple(wire["names"]), "tracks": tracks})
        except ProfileError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise ProfileError(f"{path} is no profile ({type(error).__name__}: {str(error)[:200]})") from error


def profiles_in(directory: Path, job: str, attempt: int) -> list[WorkerProfile]:
    """Those of one attempt of a job; a directory may have older ones. Errors: ProfileError, OSError."""
    found = (WorkerProfile.load(path) for path in sorted(directory.glob(f"{_PREFIX}*.msgpack")))
    return [profile for profile in found if (profile.job, profile.attempt) == (job, attempt)]


def packed_track(rows: Iterable[ProfileRow]) -> bytes:
    return array("q", [number for row in rows for number in row]).tobytes()


def apart_or_within(rows: Sequence[ProfileRow]) -> list[ProfileRow]:
    """In the order of their starts; one that begins inside another and ends after it begins where that one ends.

    So overlapping kernels of one stream, of which the later had begun before the earlier was quite over.
    """
    placed: list[ProfileRow] = []
    around: list[tuple[int, int]] = []  # those placed that the next one may lie within
    for name, kind, start, end in sorted(rows, key=lambda row: (row[2], -row[3])):
        while around and around[-1][1] <= start:
            around.pop()
        while around and around[-1][1] < end:
            start = around.pop()[1]
        if around:
            start = max(start, around[-1][0])
        end = max(start, end)
        around.append((start, end))
        placed.append((name, kind, start, end))
    return placed


def outermost(rows: Iterable[ProfileRow]) -> Iterator[tuple[int, int]]:
    """When any of a track's events ran: of those that lie within each other or overlap the whole span."""
    first = last = None
    for _, _, start, end in rows:
        if first is None or last is None:
            first, last = start, end
        elif start < last:
            last = max(last, end)
        else:
            yield first, last
            first, last = start, end
    if first is not None and last is not None:
        yield first, last
