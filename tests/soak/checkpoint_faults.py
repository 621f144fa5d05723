"""F14: checkpoints that are cut short or have a bit flipped."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deck import Row
from jobs import PACED, PAUSE_SECONDS, STEPS, TWO_STAGES
from stage import Stage

from weft.machine.checkpoint_files import MANIFEST, CheckpointError, checkpoints, newest_whole, read_manifest
from weft.spec.job_spec import JobSpec

SOURCE_JOB = "checkpoints, one stage"
NUM_DAMAGED = 10
WAYS = ("cut short", "a bit flipped", "gone")
UNDER = ({"microbatches": 2}, TWO_STAGES, {"microbatches": 2, "clip_norm": 1e6})


def damage_checkpoints(stage: Stage, chance: random.Random) -> Counter[str]:
    """Ten times the newest of a run is damaged and the one before is found; then a job goes on from such a run."""
    undamaged = stage.undisturbed(SOURCE_JOB).run_dir
    assert len(checkpoints(undamaged)) >= 2, "the one before is needed"
    fired: Counter[str] = Counter()
    for number in range(NUM_DAMAGED):
        copy = stage.daemon.home / f"damaged-{chance.getrandbits(48)}"
        shutil.copytree(undamaged, copy, symlinks=True)
        newest, before = checkpoints(copy)[-1], checkpoints(copy)[-2]
        file = chance.choice(sorted(path for path in newest.iterdir()))
        how = damage(file, chance)
        found, refused = newest_whole(copy)
        assert found is not None, (file, how)
        assert (found.path, len(refused)) == (before, 1), (file, how, found.path, refused)
        assert file.name in str(refused[0]) or "is no checkpoint" in str(refused[0]), (file, how, refused)
        if number == 0:
            goes_on(stage, copy, chance)
        shutil.rmtree(copy)
        fired[how] += 1
    return fired


def damage(file: Path, chance: random.Random) -> str:
    data = bytearray(file.read_bytes())
    how = chance.choice(WAYS[::2] if file.name == MANIFEST else WAYS)  # a bit of a manifest may be a blank's
    match how:
        case "cut short":
            file.write_bytes(data[: chance.randrange(len(data))])
            if file.name == MANIFEST and is_readable(file.parent):
                file.unlink()  # what was cut off were blanks
        case "a bit flipped":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
        case "gone":
            file.unlink()
    return how


def is_readable(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint)
    except CheckpointError:
        return False
    return True


def goes_on(stage: Stage, run: Path, chance: random.Random) -> None:
    """Under another plan, from the one before, to the same bits."""
    strategy = chance.choice(UNDER)
    arguments = {"pause": PAUSE_SECONDS}
    spec: JobSpec = stage.daemon.spec(PACED, strategy=strategy, steps=STEPS, args=arguments, resume_from=str(run))
    job = stage.daemon.submit(spec)
    stage.check_model(job, SOURCE_JOB)


ROWS: Sequence[Row] = (
    Row(
        id="F14",
        what="a checkpoint that is cut short, or has a bit flipped, or lacks a file",
        asked=500,
        unit="checkpoints",
        each=NUM_DAMAGED,
        play=damage_checkpoints,
    ),
)
