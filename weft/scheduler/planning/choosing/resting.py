"""Resting: the shares of a batch to which adaptive ones come, where CPU replicas stand beside devices. Pure.

    the CPU's part     first as its speed is of all together, then a half more, a half less, a quarter, ...
    an iteration       simulated; the shortest that is found

The simulator does not move shares: a plan with those of the start, equal ones as a rule, says nothing of a CPU beside a
GPU that is thirty times as fast. So the job begins with what is found here, and goes on adapting from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from weft.plan.division import least_samples, replica_sizes
from weft.plan.inspection import Inspection
from weft.scheduler.planning.choosing.bounds import replica_seconds
from weft.spec.job_spec import JobSpec

FINEST: Final = 16  # of the first guess: a nearer one is beyond what the measured times are good for


def comes_to_rest(spec: JobSpec) -> bool:
    """Whether shares are to be found: adaptive, not given, and of both kinds of device."""
    strategy = spec.strategy
    kinds = {replica.device for replica in strategy.replica_list}
    return strategy.share == "adaptive" and strategy.shares is None and len(kinds) > 1


def rested(spec: JobSpec, inspection: Inspection, seconds_with: Callable[[JobSpec], float]) -> JobSpec:
    """With the shares of the shortest iteration, in whole samples; each replica has as few as a division leaves it, at
    least. seconds_with: of an iteration of the spec that it is given; infinite where that cannot be. Errors: PlanError,
    as of a bound."""
    num_samples = min(spec.job.batch_size, inspection.num_train)
    _, counts, share = spec.strategy.division
    speeds = _Speeds(
        tuple(1 / max(seconds, 1e-12) for seconds in replica_seconds(spec, inspection)),
        tuple(replica.device == "cpu" for replica in spec.strategy.replica_list),
        num_samples,
        least_samples(num_samples, counts, share),
    )
    known: dict[int, tuple[float, JobSpec]] = {}

    def tried(on_host: int) -> tuple[float, JobSpec]:
        if on_host not in known:
            strategy = spec.strategy.model_copy(update={"shares": [float(size) for size in speeds.sizes(on_host)]})
            found = spec.model_copy(update={"strategy": strategy})
            known[on_host] = seconds_with(found), found
        return known[on_host]

    best = first = speeds.first()
    step = max(1, first // 2)
    while step and step >= first // FINEST:
        near = min((best, best - step, best + step), key=lambda count: tried(speeds.within(count))[0])
        step, best = (step, speeds.within(near)) if near != best else (step // 2, best)
    return tried(best)[1]


@dataclass(frozen=True, slots=True)
class _Speeds:
    of_replicas: tuple[float, ...]
    on_host: tuple[bool, ...]  # by replica
    num_samples: int
    least: int  # samples of a replica

    def first(self) -> int:
        """Samples of the replicas on the host, as fast as each replica computes."""
        host = sum(speed for speed, own in zip(self.of_replicas, self.on_host, strict=True) if own)
        return self.within(round(self.num_samples * host / sum(self.of_replicas)))

    def within(self, on_host: int) -> int:
        """Every replica has the least."""
        hosts = sum(self.on_host)
        most = self.num_samples - (len(self.on_host) - hosts) * self.least
        return max(hosts * self.least, min(on_host, most))

    def sizes(self, on_host: int) -> Sequence[int]:
        """By replica."""
        parts = {True: on_host, False: self.num_samples - on_host}
        found = {of: iter(self._divided(parts[of], of=of)) for of in parts}
        return [next(found[own]) for own in self.on_host]

    def _divided(self, num_samples: int, *, of: bool) -> Sequence[int]:
        speeds = [speed for speed, own in zip(self.of_replicas, self.on_host, strict=True) if own == of]
        return replica_sizes(num_samples, speeds, self.least)
