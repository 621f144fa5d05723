"""F17: a bit of a parameter changes while the job trains, which `verify = "digest"` has to find."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

from deck import Row
from jobs import JOBS, PACED, PAUSE_SECONDS, STEPS, VERIFIED
from stage import Stage

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


ROWS: Sequence[Row] = (
    Row(
        id="F17",
        what="a bit of a parameter changes while a job trains that verifies",
        asked=100,
        unit="bits",
        play=flip_bits,
    ),
)
