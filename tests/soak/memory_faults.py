"""F17: a bit of a parameter changes while the job trains, which `verify = "digest"` has to find; and a worker computes
other bits than it should, which `verify = "replay"` has to find."""

from __future__ import annotations

import random
import re
import runpy
from collections import Counter
from collections.abc import Sequence

from deck import Row
from jobs import JOBS, PACED, PAUSE_SECONDS, REPLAYED, STEPS, TESTS, VERIFIED
from stage import Stage

COMPUTES_WRONG = runpy.run_path(str(TESTS / "integration" / "test_replays.py"))["COMPUTES_WRONG"]

# Of the shared memory that the worker of the last stage trains, once: the job goes on in the same directory.
FLIP = """
import gc
if not os.path.exists('flipped'):
    open('flipped', 'x').close()
    mine = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter) and each.data.is_shared()]
    bits = mine[{which} % len(mine)].data.view(torch.int32).view(-1)
    bits[{which} % len(bits)] ^= 1 << {bit}
    print('flipped a bit of', len(mine), 'parameters', flush=True)
"""
CALLS = (20, 2 * STEPS - 40)  # of the loss: behind those of the inspection, and with updates to come
HIGHEST_BIT = 22  # of the mantissa: what follows stays a finite number, as a bit that nobody would notice does


def flip_bits(stage: Stage, chance: random.Random) -> Counter[str]:
    name = chance.choice(VERIFIED)
    stage.undisturbed(name)
    flip = FLIP.format(which=chance.randrange(1000), bit=chance.randint(0, HIGHEST_BIT))
    arguments = {"pause": PAUSE_SECONDS, "fault": flip, "fault_at": chance.randint(*CALLS)}
    spec = stage.daemon.spec(PACED, strategy=JOBS[name].strategy, steps=STEPS, args=arguments)
    job = stage.daemon.submit(spec)
    stage.check(job, name)
    log = stage.daemon.log_of(job)
    if "flipped a bit of" not in log:
        return Counter()
    assert "recovering (corrupted)" in log, log
    assert re.search(r"cpu-\d: bits of .+ have changed", log), "the worker is named"
    return Counter({"": 1})


def compute_wrong(stage: Stage, chance: random.Random) -> Counter[str]:
    """Once, in the first iteration that others run again: in the worker with the loss, or in either where both have
    it."""
    name = chance.choice(REPLAYED)
    stage.undisturbed(name)
    worker = "cpu-1" if "stages" in JOBS[name].strategy else f"cpu-{chance.randrange(2)}"
    arguments = {"pause": PAUSE_SECONDS, "worker": worker, "times": 1}
    source, strategy = PACED + COMPUTES_WRONG, JOBS[name].strategy
    spec = stage.daemon.spec(source, entry="line.py:wrong", strategy=strategy, steps=STEPS, args=arguments)
    job = stage.daemon.submit(spec)
    stage.check(job, name)
    log = stage.daemon.log_of(job)
    if "has other bits" not in log:
        return Counter()
    assert re.search(rf"{worker} has computed other bits in .+, than two runs that agree", log), log
    return Counter({"": 1})


ROWS: Sequence[Row] = (
    Row(
        id="F17",
        what="a bit of a parameter changes while a job trains that verifies",
        asked=100,
        unit="bits",
        play=flip_bits,
    ),
    Row(
        id="F17",
        variant="replays",
        what="a worker computes other bits in a job whose iterations others run again",
        asked=50,
        unit="times",
        play=compute_wrong,
    ),
)
