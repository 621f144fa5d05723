"""Cut proof: which cuts of a model give what the whole step gives, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from weft.workers.inspection.cut_trial import StageError
from weft.workload.cutting.cut_step import CannotSendError, OtherCallsError
from weft.workload.cutting.placeholder import PlaceholderError
from weft.workload.workload import WorkloadError

# What differs in a run that is cut so, or None. Errors: StageError.
Difference = Callable[[Sequence[int]], str | None]


def proven(
    cuts: Sequence[int],
    difference: Difference,
    problems: dict[int, str],
    told: Callable[[BaseException | None], str] | None = None,
) -> list[int]:
    """Of the numbers of units with which stages might begin, those with which they can, all at once; why not with the
    others goes to the problems. told: of what was raised."""
    told = told or _told
    left_out: list[int] = []
    kept = list(cuts)
    while kept:
        try:
            differs = difference(kept)
        except StageError as error:
            cause = error.__cause__
            number = error.number if isinstance(cause, CannotSendError) else error.number - 1
            cut = kept[min(max(number, 0), len(kept) - 1)]
            problems[cut] = told(cause)
            kept.remove(cut)
            left_out.append(cut)
            continue
        if differs is None:
            break
        kept = _agreeing(kept, difference, problems, told)
    for cut in left_out:  # one may have been blamed for what another has done
        with contextlib.suppress(StageError):
            if difference(sorted([*kept, cut])) is None:
                kept = sorted([*kept, cut])
                del problems[cut]
    return kept


def _agreeing(
    cuts: Sequence[int],
    difference: Difference,
    problems: dict[int, str],
    told: Callable[[BaseException | None], str],
) -> list[int]:
    """Of cuts that differ together, those that add no difference, one by one."""
    kept: list[int] = []
    for cut in cuts:
        try:
            differs = difference([*kept, cut])
        except StageError as error:
            problems[cut] = told(error.__cause__)
            continue
        if differs is None:
            kept.append(cut)
        else:
            problems[cut] = (
                f"cut there, {differs} differs from that of the uncut step; keep in buffers what lasts from call "
                "to call, draw from torch's, numpy's or Python's own generator (and from no other), or cut elsewhere "
                "(strategy.split)"
            )
    return kept


def told_of_a_draw(cause: BaseException | None) -> str:
    """Where the cut has been proven with other blocks left out."""
    if isinstance(cause, (OtherCallsError, PlaceholderError)):
        return (
            "where other blocks are left out at random, a later stage needs there what another line or call has made "
            "than when the step was tried; call each block and leave it out inside of its own forward, or cut "
            "elsewhere (strategy.split)"
        )
    return _told(cause)


def _told(cause: BaseException | None) -> str:
    if isinstance(cause, OtherCallsError):  # with the very calls that were recorded
        return (
            "modules before it pass on an object that is no tensor, tuple, list, dict or dataclass, and nothing in it "
            "crosses, or each run calls others; return one of these, draw from torch's, numpy's or Python's own "
            "generator, or cut elsewhere (strategy.split)"
        )
    if isinstance(cause, WorkloadError):
        return str(cause)
    first = str(cause).partition("\n")[0].rstrip(".")
    return (
        f"with a stage that begins there the step raises {type(cause).__name__}: {first:.200}; if something in it "
        "needs the whole model (torch.autograd.grad does), cut elsewhere (strategy.split), or put that into one "
        "nn.Module"
    )
