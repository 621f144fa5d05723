"""Draws the map of roles.md: as what the host is worth most beside a GPU, by how fast it is and how heavy the model.

python docs/roles.py            writes docs/roles/map.json and map.svg, and the table of roles.md
python docs/roles.py --check    exits with 1 and names what is not current; of the map it plans and simulates CHECKED

Every cell is a made-up model on a made-up machine, planned and simulated as `weft plan` would. The machine is that of
benchmarks/results/gpu_*.json, an H100 with 8 threads of its host for Weft: the speed of copies over the bus and of
updates by the host are measured there, and the GPU's own update is taken at two thirds of its memory's speed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from weft.plan.inspection import Inspection, ParameterFacts, TensorFacts, UnitFacts, ValueFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.choosing.choice import Considered, simulated
from weft.scheduler.planning.choosing.roles import Roles, roles_of
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host

FOLDER = Path(__file__).resolve().parent
PAGE, DATA, PICTURE = FOLDER / "roles.md", FOLDER / "roles" / "map.json", FOLDER / "roles" / "map.svg"
RESULTS = FOLDER.parent / "benchmarks" / "results"
BEGIN, END = "<!-- measured: python docs/roles.py -->\n", "<!-- end of measured -->"

SPEEDS = (1, 2, 4, 8, 16, 34, 70, 140, 280)  # of the GPU, in hosts; 34 as in the table that roles.md cites
WEIGHTS = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6)  # bytes of parameters for each FLOP of an iteration
CHECKED = ((34, 1e-4), (4, 3e-6))
TOLERANCE = 1e-6  # of an iteration

DEVICE_FLOPS = 50e12  # a second; the H100 has them with the MLP of gpu_hybrid, in float32
COMPUTE_SECONDS = 0.1  # of an iteration on the GPU
LINK_BYTES_PER_SECOND = 44.8e9  # gpu_transfers, `up`
COPY_BYTES_PER_SECOND = 40e9  # of the host's memory, by 8 threads; made up
HOST_BYTES_PER_SECOND = (
    124e6 * 4 / (43e-3 - 124e6 * 4 / COPY_BYTES_PER_SECOND)
)  # an update; gpu.md has it with its SYNC
DEVICE_BYTES_PER_SECOND = 3.35e12 * 2 / 3 / 7  # an update reads and writes a parameter's bytes seven times
NUM_UNITS, BATCH_SIZE = 4, 512
GPU = {"device": "gpu"}
MAKE: Callable[..., Plan] = partial(make_plan, shared_bytes_free=1 << 60)

BIG, SMALL = 96, 40  # a cell's width and height
LEFT, TOP, BELOW = 110, 64, 96
COLOURS = {"replica": "#56b4e9", "updater": "#e69f00", "loader": "#009e73", "second job": "#c8c8c8"}
_STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #222 } .mid { text-anchor: middle }
.title { font-weight: bold; font-size: 13px } .back { fill: #fff } .cell text { fill: #111; text-anchor: middle }
.small { font-size: 9px } .line { stroke: #222; stroke-dasharray: 5 3 } .mark { fill: #fff; stroke: #111 }
.end { text-anchor: end } .cell rect { stroke: #fff } .number { fill: #111; text-anchor: middle }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .back { fill: #161616 } .cell rect { stroke: #161616 } .mark { fill: #eee }
.cell text { fill: #111 } .number { fill: #111 }
}
"""


@dataclass(frozen=True, kw_only=True)
class Model:
    speed: float  # of the GPU, in hosts
    parameter_bytes: float
    compute_seconds: float = COMPUTE_SECONDS  # of an iteration on the GPU, without its update

    @property
    def weight(self) -> float:
        """Bytes for each FLOP, of a device of DEVICE_FLOPS."""
        return self.parameter_bytes / (self.compute_seconds * DEVICE_FLOPS)


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured of a model."""

    title: str
    role: str
    strategy: Mapping[str, Any]  # that was measured
    results: str  # the file; the next three are rows of it
    ratio: str  # the iteration of the GPU alone ÷ that of the strategy
    iteration: str  # of the GPU alone; of an updater, of the strategy
    share: str | None = None  # of a replica, the host's part of the batch
    parameter_bytes: int

    def measured(self) -> tuple[Model, float]:
        """The model on that machine, and what the role brought there."""
        rows = {row["name"]: row["value"] for row in json.loads((RESULTS / self.results).read_text())["results"]}
        ratio = rows[self.ratio]
        alone = rows[self.iteration] / 1e3 * (1.0 if self.share else ratio)
        share = rows[self.share] / 100 if self.share else None
        model = Model(
            speed=SPEEDS[-1] if share is None else (1 - share) / share,
            parameter_bytes=self.parameter_bytes,
            compute_seconds=alone - self.parameter_bytes / DEVICE_BYTES_PER_SECOND,
        )
        return model, 1 - 1 / ratio

    def simulated(self, model: Model) -> float:
        """What the simulator says that the strategy brings."""
        seconds = [
            simulated(Considered(spec=each, title="", least_seconds=0.0), _inspection(model), MAKE).seconds
            for each in (_spec(model, {"replicas": [GPU]}), _spec(model, self.strategy))
        ]
        alone, ours = seconds
        assert alone is not None
        assert ours is not None
        return 1 - ours / alone


_BESIDE = {"replicas": [GPU, {"device": "cpu"}], "share": "adaptive", "sync": "coarse"}
_OFFLOADED = {"replicas": [GPU], "update": "cpu", "sync": "coarse"}
_GPT_BYTES = 4 * 98_400_000
POINTS = (
    Point(
        title="MLP, 50 million parameters, 1024 samples, `hybrid-coarse`",
        role="replica",
        strategy=_BESIDE,
        results="gpu_hybrid.json",
        ratio="mlp_hybrid_coarse_vs_gpu",
        iteration="mlp_gpu",
        share="mlp_hybrid_coarse_cpu_share",
        parameter_bytes=4 * 3 * 4096 * 4097,
    ),
    Point(
        title="tables of embeddings, 51 million parameters, 8192 samples, `hybrid-coarse`",
        role="replica",
        strategy=_BESIDE,
        results="gpu_hybrid.json",
        ratio="embedding_hybrid_coarse_vs_gpu",
        iteration="embedding_gpu",
        share="embedding_hybrid_coarse_cpu_share",
        parameter_bytes=4 * (8 * 100_000 * 64 + 513 * 512 + 513 * 2),
    ),
    Point(
        title="GPT, 98 million parameters, 2 k tokens, `zero-offload`, coarse",
        role="updater",
        strategy=_OFFLOADED,
        results="gpu_offload.json",
        ratio="practicality_2k_0.1b",
        iteration="ours_2k_0.1b",
        parameter_bytes=_GPT_BYTES,
    ),
    Point(
        title="GPT, 98 million parameters, 16 k tokens, `zero-offload`, coarse",
        role="updater",
        strategy=_OFFLOADED,
        results="gpu_offload.json",
        ratio="practicality_16k_0.1b",
        iteration="ours_16k_0.1b",
        parameter_bytes=_GPT_BYTES,
    ),
)


STAND_IN = "a stand-in whose units sleep, 96 ms of an iteration"
STAND_IN_WEIGHT = 4 * 4 * 257 * 256 / (0.096 * DEVICE_FLOPS)  # of sleeping_job.py; the map begins above it


def beside_stand_ins() -> list[dict[str, Any]]:
    """What cpu_roles.py measured, and what was said of it before."""
    rows = {row["name"]: row["value"] / 100 for row in json.loads((RESULTS / "cpu_roles.json").read_text())["results"]}
    found = []
    for role in ("replica", "loader", "second job"):
        is_on_map = role == "replica"
        about = {"title": STAND_IN, "role": role, "speed": 1.0, "weight": STAND_IN_WEIGHT if is_on_map else None}
        name = role.replace(" ", "_")
        found.append(about | {"measured": rows[f"{name}_brings"], "simulated": rows[f"{name}_said"]})
    return found


# --- what is simulated


def roles_in(model: Model) -> Roles:
    roles = roles_of(_spec(model, {"replicas": [GPU]}), _inspection(model), MAKE)
    assert roles is not None
    return roles


def _spec(model: Model, strategy: Mapping[str, Any]) -> JobSpec:
    """Each unit is a bucket, as far as a strategy may have it so."""
    bucket_mib = min(4096.0, max(1.0, model.parameter_bytes / NUM_UNITS / 2**20))
    return JobSpec.parse(
        {
            "job": {"entry": "made_up.py:workload", "batch_size": BATCH_SIZE, "steps": 1},
            "strategy": {"bucket_mib": bucket_mib, **strategy},
            "directory": "/",
        }
    )


def _inspection(model: Model) -> Inspection:
    shapes = {BATCH_SIZE: (BATCH_SIZE, 64)}
    num_elements = int(model.parameter_bytes / 4 / NUM_UNITS)
    num_bytes = 4 * num_elements * NUM_UNITS
    values = tuple(
        ValueFacts(
            name=str(n), maker=n, readers=(n + 1,), dtype="float32", itemsize=4, shapes=shapes, differentiable=True
        )
        for n in range(NUM_UNITS - 1)
    )
    return Inspection(
        units=_units(num_elements, model.compute_seconds * model.speed),
        device_units=_units(num_elements, model.compute_seconds),
        values=values,
        device_values=values,
        input=TensorFacts(dtype="float32", itemsize=4, shapes=shapes),
        target=TensorFacts(dtype="int64", itemsize=8, shapes={BATCH_SIZE: (BATCH_SIZE,)}),
        num_train=BATCH_SIZE,
        num_validation=0,
        load_seconds=model.compute_seconds / 20,
        update_seconds=num_bytes / HOST_BYTES_PER_SECOND,
        device_update_seconds=num_bytes / DEVICE_BYTES_PER_SECOND,
        metrics=(),
        parameters=tuple(
            ParameterFacts(units=(n,), num_elements=num_elements, dtype="float32", itemsize=4, trained=True, group=0)
            for n in range(NUM_UNITS)
        ),
        copy_bytes_per_second=COPY_BYTES_PER_SECOND,
        link_bytes_per_second=LINK_BYTES_PER_SECOND,
        host=Host(workers=1, threads=8, gpus=1),
    )


def _units(num_elements: int, seconds: float) -> tuple[UnitFacts, ...]:
    """A backward takes twice as long as a forward."""
    return tuple(
        UnitFacts(
            name=f"{number}.",
            parameter_bytes=4 * num_elements,
            buffer_bytes=0,
            forward_seconds=seconds / NUM_UNITS / 3,
            backward_seconds=2 * seconds / NUM_UNITS / 3,
        )
        for number in range(NUM_UNITS)
    )


def cell(speed: float, weight: float) -> dict[str, Any]:
    """What the map knows of a place."""
    roles = roles_in(Model(speed=speed, parameter_bytes=weight * COMPUTE_SECONDS * DEVICE_FLOPS))
    return {"speed": speed, "weight": weight, "best": roles.best, "at_most": _rounded(roles.at_most)} | {
        each.role: _rounded(each.brings) for each in roles.roles
    }


def _rounded(part: float | None) -> float | None:
    return part if part is None else round(part, 6)


def data() -> dict[str, Any]:
    points = []
    for point in POINTS:
        model, measured = point.measured()
        speed = model.speed if point.share else None
        about = {"title": point.title, "role": point.role, "speed": speed and round(speed, 1)}
        points.append(about | {"weight": model.weight, "measured": measured, "simulated": point.simulated(model)})
    points += beside_stand_ins()
    return {"cells": [cell(speed, weight) for weight in WEIGHTS for speed in SPEEDS], "points": points}


# --- what is drawn


def svg(found: Mapping[str, Any]) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    width, foot = LEFT + BIG * len(SPEEDS) + 12, TOP + SMALL * len(WEIGHTS)
    height = foot + BELOW
    title = "As what the CPU is worth most beside a GPU, in per cent of an iteration of the GPU alone"
    size = f'width="{width}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img">'
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    yield f'<rect class="back" {size}/><text class="title" x="12" y="20">{escape(title)}</text>'
    yield f'<text x="12" y="{TOP - 22}">parameter bytes</text><text x="12" y="{TOP - 8}">for each FLOP</text>'
    for number, each in enumerate(found["cells"]):
        yield _cell(each, LEFT + BIG * (number % len(SPEEDS)), TOP + SMALL * (number // len(SPEEDS)))
    for number, weight in enumerate(WEIGHTS):
        yield f'<text class="end" x="{LEFT - 8}" y="{TOP + SMALL * number + 24}">{weight:.0e}</text>'
    for number, speed in enumerate(SPEEDS):
        yield f'<text class="mid" x="{LEFT + BIG * number + BIG // 2}" y="{foot + 16}">{speed}</text>'
    yield f'<text x="{LEFT}" y="{foot + 32}">GPU as fast as so many CPUs, all cores of the host together</text>'
    for number, point in enumerate(found["points"], start=1):
        if point["weight"] is not None:
            yield from _mark(number, point)
    best = {each["best"] for each in found["cells"]}
    yield from _legend([name for name in COLOURS if name in best], foot + 56)
    yield "</svg>"


def _cell(each: Mapping[str, Any], x: int, y: int) -> str:
    best, brings = each["best"], each[each["best"]]
    others = ", ".join(f"{name[0]} {_percent(each[name])}" for name in ("replica", "updater"))
    middle = x + BIG // 2
    return (
        f'<g class="cell"><rect x="{x}" y="{y}" width="{BIG}" height="{SMALL}" fill="{COLOURS[best]}"/>'
        f'<text x="{middle}" y="{y + 17}">{_percent(brings)} %</text>'
        f'<text class="small" x="{middle}" y="{y + 31}">{others}</text></g>'
    )


def _percent(part: float) -> str:
    value = 100 * part
    return f"{value + 0.0:.1f}" if abs(value) < 10 else f"{value:.0f}"


def _mark(number: int, point: Mapping[str, Any]) -> Iterator[str]:
    """A circle; where no CPU computed, whose speed was then not measured, a line."""
    y = TOP + SMALL * (_place(WEIGHTS, point["weight"]) + 0.5)
    x = LEFT + BIG // 2 - 40.0
    if point["speed"] is None:
        yield f'<path class="line" d="M{LEFT} {y:.1f}H{LEFT + BIG * len(SPEEDS)}"/>'
    else:
        x = LEFT + BIG * (_place(SPEEDS, point["speed"]) + 0.5)
    yield f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
    yield f'<text class="number" x="{x:.1f}" y="{y + 4:.1f}">{number}</text>'


def _place(steps: Sequence[float], value: float) -> float:
    """Where it is among the steps, by logarithms; at the edge, where it is beyond."""
    ends = math.log(steps[0]), math.log(steps[-1])
    place = (len(steps) - 1) * (math.log(value) - ends[0]) / (ends[1] - ends[0])
    return min(max(place, -0.5), len(steps) - 0.5)


def _legend(names: Sequence[str], y: int) -> Iterator[str]:
    x = LEFT
    for name in names:
        yield f'<g class="cell"><rect x="{x}" y="{y}" width="20" height="12" fill="{COLOURS[name]}"/></g>'
        yield f'<text x="{x + 26}" y="{y + 10}">{name}</text>'
        x += 130
    yield f'<text x="{x}" y="{y + 10}">small: as replica (r), as updater (u); with a number: measured</text>'


def table(found: Mapping[str, Any]) -> str:
    lines = [
        "| | measured | role | GPU ÷ CPU | bytes for each FLOP | brought | simulated |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for number, point in enumerate(found["points"], start=1):
        speed = "-" if point["speed"] is None else f"{point['speed']:.0f}"
        brought, predicted = (f"{100 * point[name]:.0f} %" for name in ("measured", "simulated"))
        weight = "-" if point["weight"] is None else f"{point['weight']:.1e}"
        about = f"{point['title']} | {point['role']} | {speed} | {weight}"
        lines.append(f"| {number} | {about} | {brought} | {predicted} |")
    return "\n".join(lines) + "\n"


def page(text: str, found: Mapping[str, Any]) -> str:
    before, _, behind = text.partition(BEGIN)
    return before + BEGIN + table(found) + END + behind.partition(END)[2]


def stale() -> list[str]:
    """What is not as it would be written; of the map only what is CHECKED is simulated."""
    found = json.loads(DATA.read_text(encoding="utf-8"))
    kept = {(each["speed"], each["weight"]): each for each in found["cells"]}
    names = [f"{DATA.name}: {place}" for place in CHECKED if not _alike(kept[place], cell(*place))]
    if PICTURE.read_text(encoding="utf-8") != svg(found):
        names.append(PICTURE.name)
    text = PAGE.read_text(encoding="utf-8")
    return [*names, *([PAGE.name] if page(text, found) != text else [])]


def _alike(kept: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    numbers = [name for name, value in made.items() if isinstance(value, float)]
    return (
        kept.keys() == made.keys()
        and kept["best"] == made["best"]
        and all(abs(kept[name] - made[name]) <= TOLERANCE for name in numbers)
    )


def main() -> int:
    if "--check" in sys.argv[1:]:
        names = stale()
        if names:
            print(f"not current: {', '.join(names)}; run python docs/roles.py", file=sys.stderr)
        return 1 if names else 0
    found = data()
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(svg(found), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
