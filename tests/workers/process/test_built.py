"""What a worker builds of a job's model: its own part, or the whole, and then one worker at a time."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from weft.plan.worker_view import Unneeded
from weft.spec.job_spec import JobSpec
from weft.workers.process.built import Untouched, built, built_again, is_much
from weft.workload.building import LITTLE_BYTES, digest_of, number_of
from weft.workload.code.version import CodeChanged, CodeVersion
from weft.workload.entry import load_workload, unload
from weft.workload.workload import WorkloadError

SOURCE = """
import pathlib, torch, weft
from torch import nn

calls = 0

def workload(kind="", error=""):
    global calls
    calls += 1
    with pathlib.Path(__file__).with_name("calls").open("a") as file:
        file.write("x")
    layers = [nn.Linear(160, 160) for _ in range(3)]
    if kind == "copies":
        layers[2].load_state_dict(layers[0].state_dict())
    if error:
        raise ValueError(f"call {calls}: {error}")
    return weft.Workload(nn.Sequential(*layers), (torch.zeros(4, 160),) * 2, loss=nn.functional.mse_loss,
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""
LARGE = LITTLE_BYTES + 1
UNKNOWN = CodeVersion("digits", {})
SECONDS = 180.0  # for anything that is awaited


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[JobSpec]:
    (tmp_path / "job.py").write_text(SOURCE)
    before = set(sys.modules)
    made = JobSpec.parse({"job": {"entry": "job.py:workload", "steps": 1, "batch_size": 4}, "directory": str(tmp_path)})
    yield made
    unload(made, before)


def of(spec: JobSpec, **args: str) -> JobSpec:
    return spec.model_copy(update={"job": spec.job.model_copy(update={"args": args})})


def without(*layers: int, spec: JobSpec, num_bytes: int = LARGE) -> Unneeded:
    model = load_workload(spec).model
    numbers = [number_of(model.get_parameter(f"{layer}.weight")) for layer in layers]
    return Unneeded(
        numbers=tuple(number for number in numbers if number is not None),
        largest_bytes=4 * 160 * 160,
        num_bytes=num_bytes,
    )


@pytest.mark.parametrize(
    ("kind", "num_bytes", "is_shared"), [("", LARGE, True), ("", LITTLE_BYTES, False), ("copies", LARGE, False)]
)
def test_what_is_unneeded_has_no_memory_where_there_is_much_of_it_and_nobody_asks_for_it(
    spec: JobSpec, kind: str, num_bytes: int, is_shared: bool
) -> None:
    spec = of(spec, kind=kind)
    unneeded = without(0, 1, spec=spec, num_bytes=num_bytes)
    assert is_much(unneeded) is (num_bytes > LITTLE_BYTES)
    whole = load_workload(spec).model
    with built(spec, unneeded, set(sys.modules), Untouched(), UNKNOWN) as workload:
        model = workload.model
        places = {model.get_parameter(f"{layer}.weight").data_ptr() for layer in range(3)}
        assert len(places) == (2 if is_shared else 3)
        own = model.get_parameter("2.weight").tolist()
    assert own == whole.get_parameter("2.weight").tolist()


def test_a_function_that_raises_is_called_again_in_a_module_of_its_own_and_its_error_passes(spec: JobSpec) -> None:
    unneeded = without(0, spec=spec)
    before = set(sys.modules)
    with (
        pytest.raises(ValueError, match="call 1: no such thing"),
        built(of(spec, error="no such thing"), unneeded, before, Untouched(), UNKNOWN),
    ):
        pass


@pytest.mark.parametrize(
    "unneeded",
    [
        Unneeded(numbers=(0, 2), num_bytes=LARGE, largest_bytes=1 << 20),
        Unneeded(copied_bytes=LARGE),
        Unneeded(numbers=(0, 2), num_bytes=LARGE, largest_bytes=1 << 20, copied_bytes=LARGE),
        Unneeded(num_bytes=LARGE - 1, copied_bytes=LARGE - 1),
    ],
)
def test_whole_models_are_built_one_at_a_time(
    spec: JobSpec, unneeded: Unneeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.directory)
    spec = of(spec, kind="copies")
    has_begun, may_end, entered = threading.Event(), threading.Event(), threading.Event()

    def build() -> None:
        with built(spec, unneeded, set(sys.modules), Untouched(), UNKNOWN):
            has_begun.set()
            may_end.wait(SECONDS)

    def build_too() -> None:
        with built(spec, unneeded, set(sys.modules), Untouched(), UNKNOWN):
            entered.set()

    first, other = threading.Thread(target=build), threading.Thread(target=build_too)
    first.start()
    assert has_begun.wait(SECONDS)
    calls = Path("calls").read_text()
    other.start()
    assert not entered.wait(0.3)
    if unneeded.copied_bytes > LITTLE_BYTES:
        assert Path("calls").read_text() == calls, "it is not even called"
    may_end.set()
    for thread in (first, other):
        thread.join(SECONDS)
    assert entered.is_set()


def test_a_turn_ends_with_an_error_too(spec: JobSpec) -> None:
    unneeded = Unneeded(copied_bytes=LARGE)
    for _ in range(2):
        with (
            pytest.raises(WorkloadError, match=r"job\.args"),
            built(of(spec, nothing="1"), unneeded, set(sys.modules), Untouched(), UNKNOWN),
        ):
            pass


def test_a_part_with_other_values_than_were_inspected_is_built_again_whole(spec: JobSpec) -> None:
    model = load_workload(spec).model
    digest = digest_of(model.get_parameter("2.weight"))
    assert digest is not None
    for told, is_whole in ((digest, False), (digest + 1, True)):
        unneeded = replace(without(0, 1, spec=spec), digests={4: told})
        with built(spec, unneeded, set(sys.modules), Untouched(), UNKNOWN) as workload:
            weights = [workload.model.get_parameter(f"{layer}.weight") for layer in range(3)]
            assert len({each.data_ptr() for each in weights}) == (3 if is_whole else 2)


def test_what_is_built_and_not_kept_leaves_no_huge_pages_half_empty(spec: JobSpec) -> None:
    """A worker's most memory was 1.3 times its part of the model, and 1.14 before its heap had huge pages."""
    libc, get = ctypes.CDLL(None), 42  # PR_GET_THP_DISABLE
    for num_bytes, inside in ((LARGE, 1), (LITTLE_BYTES, 0)):
        with built(spec, without(1, spec=spec, num_bytes=num_bytes), set(sys.modules), Untouched(), UNKNOWN):
            assert libc.prctl(get, 0, 0, 0, 0) == inside
        assert libc.prctl(get, 0, 0, 0, 0) == 0


def test_what_was_loaded_and_not_run_is_built_upon_once(spec: JobSpec) -> None:
    before, untouched = set(sys.modules), Untouched()
    calls = Path(spec.directory, "calls")
    workload = load_workload(spec)
    untouched.note(spec, workload, {"data_bytes": 4096})
    untouched.or_unload(spec, before)
    assert sys.modules.keys() - before, "a stage's classes are its own"
    for is_first, num_calls in (True, 1), (False, 2):
        with built(spec, Unneeded(), before, untouched, UNKNOWN) as made:
            assert (made is workload) == is_first
        assert len(calls.read_text()) == num_calls


@pytest.mark.parametrize("facts", [{"data_bytes": LARGE}, {"data_bytes": None}], ids=["large", "the user's own"])
def test_large_data_and_those_of_the_users_own_classes_are_let_go_of(
    spec: JobSpec, facts: dict[str, int | None]
) -> None:
    before, untouched = set(sys.modules), Untouched()
    untouched.note(spec, load_workload(spec), facts)
    untouched.or_unload(spec, before)
    assert untouched.take(spec, before) is None
    assert not sys.modules.keys() - before


def test_what_was_loaded_for_another_strategy_goes_with_its_modules(spec: JobSpec) -> None:
    before, untouched = set(sys.modules), Untouched()
    untouched.note(spec, load_workload(spec), {"data_bytes": 4096})
    assert untouched.take(of(spec, kind="copies"), before) is None
    assert not sys.modules.keys() - before
    assert untouched.take(spec, before) is None


def version_of(spec: JobSpec, before: set[str]) -> CodeVersion:
    """As its inspection has noted it."""
    version = CodeVersion("digits", {})
    version.load(before, spec)
    return version


@pytest.mark.parametrize("num_bytes", [0, LARGE], ids=["whole", "without values"])
def test_a_worker_builds_nothing_of_code_that_has_changed(spec: JobSpec, num_bytes: int) -> None:
    """A worker in the place of a lost one took the edited file, and the job was trained by two versions of it."""
    before = set(sys.modules)
    version, unneeded = version_of(spec, before), without(1, spec=spec, num_bytes=num_bytes)
    calls = Path(spec.directory, "calls")
    num_calls = len(calls.read_text())
    spec.entry_file.write_text(SOURCE.replace("160, 160", "160, 161"))
    with pytest.raises(CodeChanged), built(spec, unneeded, before, Untouched(), version):
        pass
    with pytest.raises(CodeChanged):
        built_again(spec, before, version)
    assert len(calls.read_text()) == num_calls, "it is not even called"


@pytest.mark.parametrize("num_bytes", [0, LARGE], ids=["whole", "without values"])
def test_nor_of_code_that_changes_while_it_is_loaded(spec: JobSpec, num_bytes: int) -> None:
    before, unneeded = set(sys.modules), without(1, spec=spec, num_bytes=num_bytes)
    edits = "    if kind == 'edits':\n        pathlib.Path(__file__).write_text('edited = True')\n    layers ="
    spec.entry_file.write_text(SOURCE.replace("    layers =", edits))
    version, spec = version_of(spec, before), of(spec, kind="edits")
    with pytest.raises(CodeChanged), built(spec, unneeded, before, Untouched(), version):
        pass
