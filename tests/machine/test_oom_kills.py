"""Which of the killed processes were the kernel's, from a counter that the test sets."""

from __future__ import annotations

from weft.machine.cgroups import CgroupLimits
from weft.machine.oom_kills import KEPT_SECONDS, OomKills, told_shortage

GIBIBYTE = 1 << 30


class Counter:
    def __init__(self) -> None:
        self.number: int | None = 3  # from before

    def read(self) -> int | None:
        return self.number

    def kill(self) -> None:
        self.number = (self.number or 0) + 1


def test_a_kill_that_the_kernel_has_not_counted_is_somebody_elses() -> None:
    counter = Counter()
    kills = OomKills(counter.read)
    assert not kills.claim(0.0)
    counter.kill()
    assert kills.claim(1.0)
    assert not kills.claim(1.0), "it has counted one"


def test_each_of_several_is_one_processs() -> None:
    counter = Counter()
    kills = OomKills(counter.read)
    counter.kill()
    counter.kill()
    kills.look(0.0)
    assert [kills.claim(1.0) for _ in range(3)] == [True, True, False]


def test_one_that_nobodys_end_explains_is_forgotten() -> None:
    """The kernel had killed what the job's code had started; an operator's kill an hour later was no such thing."""
    counter = Counter()
    kills = OomKills(counter.read)
    counter.kill()
    kills.look(0.0)
    kills.look(KEPT_SECONDS)
    assert kills._unclaimed == 1, "a large process takes a while to end"
    assert not kills.claim(KEPT_SECONDS + 1.0)


def test_a_machine_that_counts_none_has_none() -> None:
    counter = Counter()
    counter.number = None
    kills = OomKills(counter.read)
    assert not kills.claim(0.0)


def test_what_is_told_names_what_there_was_and_whose_limit_it_is() -> None:
    limits = CgroupLimits(memory_bytes=4 * GIBIBYTE, memory_from="/sys/fs/cgroup/weft.service")
    assert told_shortage(3 * GIBIBYTE, limits, 64 * GIBIBYTE) == (
        "was killed by the kernel for lack of memory: it had up to 3072 MiB, and /sys/fs/cgroup/weft.service may have "
        "4096 MiB, all its processes together"
    )
    for none in (CgroupLimits(), CgroupLimits(memory_bytes=128 * GIBIBYTE, memory_from="/x")):
        told = told_shortage(None, none, 64 * GIBIBYTE)
        assert told == "was killed by the kernel for lack of memory: the machine has 65536 MiB"
