"""What every test relies on; and plans of made-up models: so many units, so long each."""

from __future__ import annotations

import os
import re
import runpy
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, ParameterFacts, TensorFacts, UnitFacts, ValueFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec
from weft.spec.replica import Replica
from weft.spec.schedule_text import STAGES_PER_WORKER, num_lines, why_not_stages
from weft.spec.strategy import Prefetch, Strategy

# Tests assert no times, of an example neither: beside busy loops each takes ten times as long.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test may be about what an inspection meets, and none leaves anything in anybody's cache.
os.environ["WEFT_KEEP_INSPECTIONS"] = "false"

# --- which tests run, and with what

_PAIRS = runpy.run_path(str(Path(__file__).with_name("pairs.py")))
pytest_generate_tests = _PAIRS["pytest_generate_tests"]
pytest_report_collectionfinish = _PAIRS["pytest_report_collectionfinish"]

NOT_QUICK = {"integration", "examples", "gpu", "benchmarks"}
UNMARKED_SECONDS = 0.2  # of a test that is neither quick nor slow: most jobs of a running daemon take no longer
TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    _PAIRS["pytest_addoption"](parser)
    parser.addoption(
        "--part", metavar="K/N", help="of N parts of the tests that run beside each other, the one from 0 on"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What has no quick test is not even looked at where nothing else is asked for."""
    is_quick = collection_path.parent != TESTS or collection_path.name not in NOT_QUICK
    return None if is_quick or config.getoption("markexpr") != "quick" else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever is small has the mark `quick`."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder not in NOT_QUICK and not any(item.get_closest_marker(name) for name in ("slow", "soak")):
            item.add_marker(pytest.mark.quick)
    _PAIRS["without_other_days"](config, items)
    if (part := config.getoption("--part")) is not None:
        number, num_parts = map(int, part.split("/"))
        files = _parts(items, num_parts, quick=config.getoption("markexpr") == "quick")[number]
        items[:] = [item for item in items if item.path in files]


def _parts(items: Sequence[pytest.Item], num_parts: int, *, quick: bool) -> list[set[Path]]:
    """Whole files, and as long in one as in the other, of those that are quick or of those that are not."""
    sizes: defaultdict[Path, float] = defaultdict(float)
    name_of_size, unit, unmarked = ("weighs", "tests", 1) if quick else ("slow", "seconds", UNMARKED_SECONDS)
    for item in items:
        is_run = not any(item.get_closest_marker(name) for name in ("gpu", "soak"))
        if is_run and (item.get_closest_marker("quick") is not None) is quick:
            mark = item.get_closest_marker(name_of_size)
            sizes[item.path] += mark.kwargs.get(unit, 1) if mark is not None else unmarked
    parts: list[set[Path]] = [set() for _ in range(num_parts)]
    parts[-1] |= {item.path for item in items}.difference(sizes)
    sums = [0.0] * num_parts
    for path, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        number = sums.index(min(sums))
        parts[number].add(path)
        sums[number] += size
    return parts


# --- made-up models

PLENTY = 1 << 40


def make_unit(number: int, forward: float = 1.0, backward: float = 2.0, **changes: Any) -> UnitFacts:
    facts: dict[str, Any] = {
        "name": f"{number}.",
        "parameter_bytes": 100,
        "buffer_bytes": 10,
        "forward_seconds": forward,
        "backward_seconds": backward,
    }
    return UnitFacts(**facts | changes)


def make_value(maker: int, *readers: int, **changes: Any) -> ValueFacts:
    facts: dict[str, Any] = {
        "name": str(maker),
        "dtype": "float32",
        "itemsize": 4,
        "shapes": {1: (1, 8), 2: (2, 8)},
        "differentiable": True,
    }
    return ValueFacts(maker=maker, readers=readers or (maker + 1,), **facts | changes)


def make_parameter(*units: int, num_elements: int = 25, **changes: Any) -> ParameterFacts:
    facts: dict[str, Any] = {"dtype": "float32", "itemsize": 4, "trained": True, "group": 0}
    return ParameterFacts(units=units, num_elements=num_elements, **facts | changes)


def make_inspection(units: Sequence[UnitFacts], **changes: Any) -> Inspection:
    """Each unit has one parameter of its own, and reads what the one before has made, unless such are given."""
    facts: dict[str, Any] = {
        "parameters": tuple(make_parameter(n, num_elements=u.parameter_bytes // 4) for n, u in enumerate(units)),
        "units": tuple(units),
        "values": tuple(make_value(number) for number in range(len(units) - 1)),
        "input": TensorFacts(dtype="float32", itemsize=4, shapes={1: (1, 3), 2: (2, 3)}),
        "target": TensorFacts(dtype="int64", itemsize=8, shapes={1: (1,), 2: (2,)}),
        "num_train": 8,
        "num_validation": 0,
        "load_seconds": 0.0,
        "update_seconds": 0.0,
        "metrics": (),
    }
    return Inspection(**facts | changes)


def make_spec(
    *, batch_size: int = 840, steps: int = 3, priority: int = 0, mode: str = "train", **strategy: Any
) -> JobSpec:
    job = {"entry": "job.py:workload", "batch_size": batch_size, "steps": steps, "priority": priority, "mode": mode}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})


@st.composite
def replicas(draw: st.DrawFn, num_units: int) -> Replica:
    split = sorted(draw(st.sets(st.integers(1, num_units - 1), max_size=3)))
    device = draw(st.sampled_from(["cpu", "gpu"]))
    return Replica(
        device=device,
        stages=len(split) + 1,
        gpus=draw(st.integers(1, len(split) + 1)) if device == "gpu" else None,
        split=split,
        microbatches=draw(st.integers(1, 4)),
    )


@st.composite
def strategies(draw: st.DrawFn, num_units: int) -> Strategy:
    """Of one to three replicas, for a model of so many units that can be cut anywhere."""
    listed = draw(st.lists(replicas(num_units), min_size=1, max_size=3))
    num_replicas = len(listed)
    shares: list[float] | None = draw(
        st.tuples(*[st.sampled_from([0.0, 1.0, 2.0])] * num_replicas).filter(any).map(list)
    )
    staleness = draw(st.just([0] * num_replicas) | st.tuples(*[st.integers(0, 2)] * num_replicas).map(list))
    share: Literal["fixed", "stealing"] = draw(st.sampled_from(["fixed", "fixed", "stealing"]))
    if share == "stealing":  # of what is the same for all
        shares, staleness = None, [staleness[0]] * num_replicas
        listed = [replica.model_copy(update={"microbatches": listed[0].microbatches}) for replica in listed]
    several = [name for name in STAGES_PER_WORKER if share == "fixed" and all(_fits(name, each) for each in listed)]
    return Strategy(
        schedule=draw(st.sampled_from(["gpipe", "1f1b", *several])),
        replicas=listed,
        microbatches=listed[0].microbatches or 1,
        recompute=draw(st.booleans()),
        sync=draw(st.sampled_from(["coarse", "fine"])),
        update=draw(st.sampled_from(["local", "cpu", "balanced"])),
        staleness=staleness,
        staleness_warmup=draw(st.sampled_from([0, 0, 1, 3])),
        share=share,
        shares=shares,
        bucket_mib=draw(st.sampled_from([0.001, 0.01, 1.0])),
        clip_norm=draw(st.none() | st.just(1.0)),
        prefetch=Prefetch(load=draw(st.integers(1, 2)), transfer=draw(st.integers(1, 3))),
        loaders=draw(st.sampled_from([1, 1, 2, 3])),
    )


def _fits(schedule: str, replica: Replica) -> bool:
    """A schedule with several stages in a worker."""
    if why_not_stages(schedule, replica.stages, None) is not None:
        return False
    return (replica.gpus or 1) <= num_lines(schedule, replica.stages, None)


@pytest.fixture(scope="session")
def strategies_of() -> Callable[[int], st.SearchStrategy[Strategy]]:
    """By the number of the model's units."""
    return strategies


@pytest.fixture(scope="session")
def unit_of() -> Callable[..., UnitFacts]:
    return make_unit


@pytest.fixture(scope="session")
def value_of() -> Callable[..., ValueFacts]:
    """By the unit that makes it and those that read it, the next one where none is given."""
    return make_value


@pytest.fixture(scope="session")
def parameter_of() -> Callable[..., ParameterFacts]:
    """By the units that use it."""
    return make_parameter


@pytest.fixture(scope="session")
def inspection_of() -> Callable[..., Inspection]:
    return make_inspection


@pytest.fixture(scope="session")
def spec_of() -> Callable[..., JobSpec]:
    return make_spec


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """The plan of a spec of these settings for a model of as many like units as stages, or for the inspection given."""

    def plan(inspection: Inspection | None = None, **settings: Any) -> Plan:
        listed = settings.get("replicas")
        stages = [replica.get("stages", 1) for replica in listed] if isinstance(listed, list) else []
        units = [make_unit(number) for number in range(max(settings.get("stages", 1), *stages, 1))]
        return make_plan(make_spec(**settings), inspection or make_inspection(units), shared_bytes_free=PLENTY)

    return plan


@pytest.fixture(scope="session")
def load_checkpoint() -> Callable[..., None]:
    """As the page has it for plain PyTorch: of a checkpoint's path, a model, an optimizer and a scheduler."""
    text = (TESTS.parent / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    page: dict[str, Any] = {}
    exec(code, page)
    load: Callable[..., None] = page["load_checkpoint"]
    return load


@pytest.fixture
def hangup() -> Iterator[None]:
    """What a test starts hears SIGHUP, though the tests were started with nohup; a test may handle it otherwise."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
