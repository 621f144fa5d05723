"""F12: clients that die in the middle of a frame, of a submit, of following a job."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from deck import Row
from jobs import JOBS
from stage import Stage, until

from weft.transport.wire.frames import encode

NUM_CLIENTS = 100


def die_in_a_frame(stage: Stage, chance: random.Random, job: str, absent: str) -> None:
    spec = JOBS["one stage"].spec(stage.daemon).to_wire()
    frame = encode({"id": 1, "verb": "submit", "spec": spec, "job": absent, "priority": 1})
    with stage.daemon.connected() as dying:
        dying.socket.sendall(frame[: chance.randrange(1, len(frame) - 1)])


def die_watching(stage: Stage, chance: random.Random, job: str, absent: str) -> None:
    with stage.daemon.connected() as dying:
        dying.send({"id": 1, "verb": chance.choice(("follow", "wait")), "job": job})
        if chance.random() < 0.5:
            dying.send({"id": 2, "verb": "show", "job": job})


def die_submitting(stage: Stage, chance: random.Random, job: str, absent: str) -> None:
    """Its whole frame is out: the job is there whole, or is absent and may be sent again."""
    spec = stage.daemon.spec("raise ValueError('at once')\n").to_wire()
    name = f"dying-{chance.getrandbits(48)}"
    with stage.daemon.connected() as dying:
        dying.send({"id": 1, "verb": "submit", "spec": spec, "job": name})
    assert stage.daemon.submit(spec, job=name) == name
    until(lambda: stage.state_of(name) == "failed", f"the end of {name}")


Way = Callable[[Stage, random.Random, str, str], None]
WAYS: Sequence[tuple[str, Way, int]] = (
    ("in a frame", die_in_a_frame, 48),
    ("following or waiting", die_watching, 48),
    ("after a submit", die_submitting, 4),
)


def kill_clients(stage: Stage, chance: random.Random) -> Counter[str]:
    """A hundred beside a job, which they must not disturb."""
    name = chance.choice(list(JOBS))
    stage.undisturbed(name)
    job, absent = stage.submit(name), f"absent-{chance.getrandbits(48)}"
    ways = [(kind, way) for kind, way, count in WAYS for _ in range(count)]
    chance.shuffle(ways)
    fired: Counter[str] = Counter()
    for kind, way in ways:
        way(stage, chance, job, absent)
        fired[kind] += 1
    assert sum(fired.values()) == NUM_CLIENTS
    stage.check(job, name)
    assert absent not in names_of(stage.daemon)
    return fired


def names_of(daemon: Any) -> set[str]:
    return {job["job"] for job in daemon.client.jobs()}


ROWS: Sequence[Row] = (
    Row(
        id="F12",
        what="clients that die in a frame, after a submit, while they follow",
        asked=5000,
        unit="clients",
        each=NUM_CLIENTS,
        play=kill_clients,
    ),
)
