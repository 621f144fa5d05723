"""Error places: where in a job an error was raised, as notes on the error; `weft.workload.faults` tells them.

Whoever calls the user's code knows one part of the place (the unit; the sample; the lane its task), and adds it where
the error passes. Nothing is written down while all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

MAX_SAMPLES = 8
TRIED_STEP = "in the step, tried before training"
TRIED_BACKWARD = "in backward of the step, tried before training"
IN_COLLATE = "in Workload.collate"
IN_ON_EPOCH = "in Workload.on_epoch"

_MARK = "weft: "  # tells our notes from the user's own


def add_place(error: BaseException, place: str, *, innermost: bool = False) -> None:
    """place: a phrase such as "in unit 3". innermost: only where nobody has said more precisely where it was."""
    if not (innermost and places_of(error)) and isinstance(getattr(error, "__notes__", []), list):
        error.add_note(f"{_MARK}{place}")


def places_of(error: BaseException) -> list[str]:
    """From the innermost to the outermost."""
    notes = getattr(error, "__notes__", [])
    told = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    return [note.removeprefix(_MARK) for note in told if note.startswith(_MARK)]


def without_places(lines: Sequence[str]) -> list[str]:
    """Of an error that was told in lines."""
    return [line for line in lines if not line.startswith(_MARK)]


class within:  # read as a statement, as contextlib.suppress is
    """Adds a place to whatever error leaves the block, SystemExit included. May be entered again and again.

    place: as `add_place` takes it, or a function that makes it once there is an error: a lane enters for every task.
    """

    __slots__ = ("_innermost", "_place")

    def __init__(self, place: str | Callable[[], str], *, innermost: bool = False) -> None:
        self._place = place
        self._innermost = innermost

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            place = self._place if isinstance(self._place, str) else self._place()
            add_place(error, place, innermost=self._innermost)


def unit_place(index: int, prefix: str, module: object) -> str:
    """prefix: of the unit's names in the state dict; empty where the unit is the whole model."""
    name, kind = prefix.removesuffix("."), type(module).__name__
    if not name:
        return f"in the model ({kind})"
    return f"in unit {index} ({kind})" if name == str(index) else f"in unit {index} ({name}: {kind})"


def step_place(stepped: object) -> str:
    """Of an optimizer or a scheduler of the user's."""
    return f"in the step of {type(stepped).__name__}"


def function_place(name: str) -> str:
    """Of a function of the workload: "loss", or a metric's name."""
    return "in Workload.loss" if name == "loss" else f"in Workload.metrics[{name!r}]"


def samples_place(field: str, numbers: Sequence[int]) -> str:
    """Samples of a data set of the workload, as many as a line can hold."""
    told = ", ".join(map(str, numbers[:MAX_SAMPLES]))
    more = f" and {len(numbers) - MAX_SAMPLES} more" if len(numbers) > MAX_SAMPLES else ""
    return f"{'samples' if len(numbers) > 1 else 'sample'} {told}{more} of Workload.{field}"
