"""Cut proof: which cuts of a model give what the whole step gives, bit for bit, in training and in validation; of a
step that leaves out blocks at random, in a few runs of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.workers.inspection.cut_trial import CutTrial, StageError
from weft.workers.inspection.ran import StatesOfRuns, TrialOutcome
from weft.workers.snapshots.stage_attributes import Numbers
from weft.workload.cutting.calls import Seed
from weft.workload.cutting.cut_step import OtherCallsError, Step
from weft.workload.cutting.names import Attribute
from weft.workload.cutting.operation import KEEP_IN_BUFFERS
from weft.workload.cutting.placeholder import CannotSendError, PlaceholderError
from weft.workload.workload import WorkloadError

MAX_TRIES = 24  # arbitrary: to find a run that calls all, and others that leave out each, together and alone
MAX_PROVEN = 4  # of them, behind the first: each takes as long as the proof of a step that draws nothing

_LASTING = f"{KEEP_IN_BUFFERS}, draw from torch's, numpy's or Python's own generator (and from no other)"

Told = Callable[[BaseException | None], str]


@dataclass(frozen=True, slots=True)
class Whole:
    """A run of a whole step: what those that are cut must equal."""

    step: Step
    batch: Any
    outcome: TrialOutcome
    learns: bool
    other: Any = None  # another batch, if there is one


@dataclass(frozen=True, slots=True)
class _Second:
    """What a second run of a whole step comes to, and where that is something else, and a run leaves nothing but
    numbers in attributes, these: a step may go by them if all stages count alike."""

    outcome: TrialOutcome
    numbers: Numbers | None = None
    left: Mapping[Attribute, Any] = field(default_factory=dict)  # numbers, texts and None, whatever comes of them


class _LeftOut:
    """Cuts that are tried no more. Where those side by side fail alike one after the other, twice as many go each time:
    all between a model and the teacher that follows it do, and a try takes as long as steps."""

    def __init__(self, cuts: Sequence[int]) -> None:
        self._cuts = list(cuts)
        self._out: set[int] = set()  # places
        self._newest = range(0)  # of these
        self._cause: type | None = None

    def add(self, cut: int, cause: BaseException | None) -> list[int]:
        """Those that are left out for it."""
        place = self._cuts.index(cut)
        is_behind, is_before = place == self._newest.stop, place == self._newest.start - 1
        goes_on = bool(self._newest) and type(cause) is self._cause and (is_behind or is_before)
        count = 2 * len(self._newest) if goes_on else 1
        first = max(0, place - count + 1) if goes_on and is_before else place
        self._newest = range(first, min(len(self._cuts), first + count))
        self._cause = type(cause)
        new = set(self._newest) - self._out
        self._out |= new
        return [self._cuts[each] for each in sorted(new)]

    def others(self) -> list[int]:
        return [cut for place, cut in enumerate(self._cuts) if place not in self._out]

    def ends(self) -> Iterator[list[int]]:
        """Of each row of them, from the first on, and from the last."""
        rows: list[list[int]] = []
        for place in sorted(self._out):
            if place - 1 not in self._out:
                rows.append([])
            rows[-1].append(self._cuts[place])
        for row in rows:
            yield row
            if len(row) > 1:
                yield row[::-1]


class CutProof:
    """trial_of: of a step, cut so. states: what each run finds, and is put back behind it. forget: called before a run
    that is to skip calls for the first time. goes_back: whether the step goes through units again."""

    def __init__(
        self,
        states: StatesOfRuns,
        wholes: Sequence[Whole],
        trial_of: Callable[[Sequence[int], Step], CutTrial],
        *,
        seed: Seed,
        forget: Callable[[], None],
        goes_back: bool,
    ) -> None:
        self._model = states.model
        self._wholes = wholes
        self._trial_of = trial_of
        self._seed = seed
        self._states = states
        self._forget = forget
        self._goes_back = goes_back
        self._seconds: dict[int, _Second] = {}  # by the number of the whole

    def proven(self, cuts: Sequence[int], problems: dict[int, str], told: Told | None = None) -> list[int]:
        """Of the numbers of units with which stages might begin, those with which they can, all at once; why not with
        the others goes to the problems. told: of what was raised."""
        told = told or _told
        left_out, kept = _LeftOut(cuts), list(cuts)
        while kept:
            try:
                differs = self._difference(kept)
            except StageError as error:
                cause = error.__cause__
                number = error.number if isinstance(cause, CannotSendError) else error.number - 1
                problems |= dict.fromkeys(left_out.add(kept[min(max(number, 0), len(kept) - 1)], cause), told(cause))
                kept = left_out.others()
                continue
            if differs is not None:
                kept = self._agreeing([], kept, problems, told, differ=True)
            break
        for ends in left_out.ends():  # one may have been blamed for what another has done
            for cut in ends:
                if cut in kept or not self._is_sound(sorted([*kept, cut])):
                    break
                kept = sorted([*kept, cut])
                problems.pop(cut, None)
        return self._agreeing_alone(kept, problems, told) if self._goes_back else kept

    def lasting(self, cuts: Sequence[int], problems: dict[int, str]) -> list[int]:
        """Those that may be sound, and why others are not: none is where one of the steps goes by what its last run has
        left elsewhere than in buffers, since a stage that does not run the end of the step does not keep it."""
        if not cuts:
            return []
        try:
            differs = self._difference_in_two(self._trial_of([], self._wholes[0].step), 0)
            differs = differs or next(filter(None, map(self._difference_of_other, self._wholes)), None)
        except StageError:  # as the job itself will, whole
            return list(cuts)
        if differs is None:
            return list(cuts)
        why = f"run again with the same batch, the whole step gives something else: {differs} differs from that of its "
        problems |= dict.fromkeys(cuts, f"{why}first run; {_LASTING}")
        return []

    def _difference_of_other(self, whole: Whole) -> str | None:
        """Of another batch, run twice: with the first one of an epoch a step may begin anew what it keeps. Numbers in
        attributes may be others, as they are with the first. Buffers that came to be nobody puts back."""
        if whole.other is None or self._states.has_new_buffers():
            return None
        whole = replace(whole, batch=whole.other)
        with self._mode_of(whole):
            trial = self._trial_of([], whole.step)
            first, second = self._outcome(trial, whole), self._outcome(trial, whole)
            differs = first.difference(second)
            if differs is not None and trial.numbers() is not None:
                differs = first.difference(self._outcome(self._trial_of([], whole.step), whole))
        return differs

    def _agreeing_alone(self, cuts: Sequence[int], problems: dict[int, str], told: Told) -> list[int]:
        """A stage of several units skips in later passes what a stage of one has no call of."""
        return [cut for cut in cuts if self._agreeing([], [cut], problems, told)]

    def _agreeing(
        self, kept: list[int], cuts: Sequence[int], problems: dict[int, str], told: Told, *, differ: bool = False
    ) -> list[int]:
        """What is kept, and of the cuts behind it those that add no difference; by halves, since most cuts do not and a
        try takes as long as steps. differ: all of them together do, as is known."""
        if not differ or len(cuts) == 1:
            why = self._why_not([*kept, *cuts], told)
            if why is None:
                return [*kept, *cuts]
            if len(cuts) == 1:
                problems[cuts[0]] = why
                return kept
        half = len(cuts) // 2
        found = self._agreeing(kept, cuts[:half], problems, told)
        return self._agreeing(found, cuts[half:], problems, told, differ=len(found) == len(kept) + half)

    def _why_not(self, cuts: Sequence[int], told: Told) -> str | None:
        """Why the step is not cut so; None where it can be."""
        try:
            differs = self._difference(cuts)
        except StageError as error:
            return told(error.__cause__)
        if differs is None:
            return None
        return (
            f"cut there, {differs} differs from that of the uncut step; {_LASTING}, let a module return what "
            "is read of it, or cut elsewhere (strategy.split)"
        )

    def _is_sound(self, cuts: Sequence[int]) -> bool:
        """Also as a job begins, whose workers have skipped nothing yet: what trials before it know is forgotten."""
        with contextlib.suppress(StageError):
            if self._difference(cuts) is None:
                self._forget()
                return self._difference(cuts) is None
        return False

    def _difference(self, cuts: Sequence[int]) -> str | None:
        """What differs in runs that are cut so, or None. Errors: StageError."""
        read, others = [set[Attribute]() for _ in (0, *cuts)], [dict[Attribute, str]() for _ in (0, *cuts)]
        seconds = [self._second(number) for number in range(len(self._wholes))]
        for number, whole in enumerate(self._wholes):
            with self._mode_of(whole):
                trial = self._trial_of(cuts, whole.step)
                differs = self._difference_in_two(trial, number)  # the second skips by heart
                for stage, told in enumerate(trial.others(seconds[number].left)):
                    read[stage] |= trial.read()[stage]
                    others[stage] |= told
                if differs is None and trial.has_renewed():  # which leaves nothing in the modules that are skipped
                    differs = whole.outcome.difference(self._outcome(trial, whole))
            if differs is not None:
                return f"in validation {differs}" if number else differs
        return next((told[each] for told, own in zip(others, read, strict=True) for each in told if each in own), None)

    def _mode_of(self, whole: Whole) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if whole.learns else self._states.evaluating()

    def _difference_in_two(self, trial: CutTrial, number: int) -> str | None:
        """What differs in two runs, of which the second one finds what the first has left in attributes."""
        whole, second = self._wholes[number], self._second(number)
        differs = whole.outcome.difference(self._outcome(trial, whole))
        if differs is None:  # the first may still run calls that the second skips
            trial.watch({attribute for each in self._seconds.values() for attribute in each.left})
            differs = second.outcome.difference(self._outcome(trial, whole))
        return differs or (trial.other_number(second.numbers) if second.numbers else None)

    def _second(self, number: int) -> _Second:
        whole = self._wholes[number]
        if not self._states.leaves:
            return _Second(whole.outcome)
        if number not in self._seconds:
            self._seconds[number] = _Second(whole.outcome)
            with contextlib.suppress(StageError), self._mode_of(whole):  # as the job itself will, whole
                trial = self._trial_of([], whole.step)
                first, second = self._outcome(trial, whole), self._outcome(trial, whole)
                differs = [whole.outcome.difference(each) is not None for each in (first, second)]
                numbers = trial.numbers() if differs == [False, True] else None
                self._seconds[number] = _Second(second if numbers else whole.outcome, numbers, trial.left())
        return self._seconds[number]

    def _outcome(self, trial: CutTrial, whole: Whole) -> TrialOutcome:
        for parameter in self._model.parameters():
            parameter.grad = None
        try:
            values = trial.run(whole.batch, self._seed)
            return whole.outcome.like(self._model, values, learns=whole.learns)
        finally:
            self._states.restore()
            for parameter in self._model.parameters():
                parameter.grad = None


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
    if isinstance(cause, (AttributeError, LookupError)):
        return (
            f"with a stage that begins there the step raises {type(cause).__name__}: {first:.200}; what a module keeps "
            "by itself, in an attribute or a list, is in its own stage alone: let it return that, or cut elsewhere "
            "(strategy.split)"
        )
    return (
        f"with a stage that begins there the step raises {type(cause).__name__}: {first:.200}; if something in it "
        "needs the whole model (torch.autograd.grad does), cut elsewhere (strategy.split), or put that into one "
        "nn.Module"
    )


def telling(done: Mapping[int, tuple[frozenset[Any], frozenset[Any]]]) -> list[int]:
    """Of runs, by the calls of each and by what it computes between them, the one that calls most, then few others
    which leave out what can be."""
    fullest = max(done, key=lambda run: [len(each) for each in done[run]])
    called = {run: calls | computed for run, (calls, computed) in done.items()}
    found, everything = [fullest], frozenset[Any]().union(*called.values())
    unseen = everything - frozenset.intersection(*called.values())  # left out by some run, and by none that was taken
    unseen -= everything - called[fullest]
    while unseen and len(found) <= MAX_PROVEN:
        run = max(called, key=lambda run: len(unseen - called[run]))
        found.append(run)
        unseen &= called[run]
    while len(found) <= MAX_PROVEN:  # what is left out together is not what is left out alone

        def distance(run: int) -> int:
            return min(len(called[run] ^ called[other]) for other in found)

        farthest = max(called, key=distance)
        if not distance(farthest):
            break
        found.append(farthest)
    return found
