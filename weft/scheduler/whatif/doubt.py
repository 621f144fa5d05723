"""What-if doubt: what may be said of a changed job, by how well the simulation explains the job as it ran. Pure.

    simulated ÷ measured, of the job as it ran      what is said of the changed job
    within 10 %                                     a number: measured × the ratio of two simulations
    within a factor of 1.5                          a range: from that number to the changed simulation alone
    further off                                     none

Where the simulation takes twice what was measured, or half, what it leaves out is as large as what it knows, and nobody
can say how a change would touch it. A number would be believed all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from weft.scheduler.planning.outlook import is_beyond

EXPLAINED: Final = 0.1  # of the measured time: two runs of a job differ by as much
_WHY: Final = (
    "it may be other load on the machine, lanes that share cores, or tasks that are short beside what passes between "
    "them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    seconds: float | None  # None where none can be told, as the ratio
    ratio: float | None  # to what was measured
    low_seconds: float | None  # its range; both ends are `seconds` where the simulation explains the job
    high_seconds: float | None
    doubt: str | None  # the sentence that belongs to it


def predict(measured: float, before: float, after: float, *, changed: bool) -> Prediction:
    """Seconds of an iteration: measured, and simulated as it ran and changed. A job that is not changed takes what it
    took, however badly it is explained."""
    if not changed:
        doubt = _doubt(before / measured, "the simulation does not explain it")
        return Prediction(seconds=measured, ratio=1.0, low_seconds=measured, high_seconds=measured, doubt=doubt)
    ratio = after / before
    seconds = measured * ratio
    low, high = sorted((seconds, after))
    if is_explained(before / measured):
        return Prediction(seconds=seconds, ratio=ratio, low_seconds=seconds, high_seconds=seconds, doubt=None)
    doubt = _doubt(before / measured, "what the change would bring cannot be told")
    if is_beyond(before / measured):
        return Prediction(seconds=None, ratio=None, low_seconds=None, high_seconds=None, doubt=doubt)
    return Prediction(seconds=seconds, ratio=ratio, low_seconds=low, high_seconds=high, doubt=doubt)


def is_explained(ratio: float) -> bool:
    """Of simulated to measured."""
    return abs(ratio - 1) <= EXPLAINED


def _doubt(ratio: float, beyond: str) -> str | None:
    if is_explained(ratio):
        return None
    off = f"simulated, the job as it ran takes {ratio:.2f} times what was measured"
    if is_beyond(ratio):
        return f"{off}, and {beyond} ({_WHY})"
    return f"{off}, and a change may lie anywhere between ({_WHY})"
