"""What the user's code raised, as the daemon and the followers are told."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.machine.checkpoint_files import CheckpointError
from weft.plan.error_places import IN_COLLATE, within
from weft.spec.job_spec import JobSpec, SpecError
from weft.transport.wire.worker_messages import checked
from weft.workers.compute.pairs import DataPair
from weft.workers.compute.unit_stage import UnitStage
from weft.workers.devices.host import HostDevice
from weft.workload.code.version import CodeChanged
from weft.workload.cutting.calls import SeededCalls
from weft.workload.entry import load_workload
from weft.workload.faults import (
    COLLATE,
    MAX_MESSAGE_CHARS,
    NO_GPU,
    NO_GRADIENTS,
    OF_MAIN_ALONE,
    ONE_SAMPLE,
    Fault,
    NonFiniteLoss,
    fault_of,
)
from weft.workload.units import Unit
from weft.workload.workload import WorkloadError, answer_of


def raised(error: BaseException) -> BaseException:
    """The error as it is caught, with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "reason", "exit_code"),
    [
        (NonFiniteLoss(3, float("nan")), "non-finite-loss", 1),
        (WorkloadError("Workload.train has length 0; give one"), "invalid-workload", 2),
        (SpecError("job.entry: no such file"), "invalid-workload", 2),
        (CodeChanged("digits-1", ["/jobs/train.py"]), "code-changed", 2),
    ],
)
def test_our_own_errors_say_what_to_change_and_nothing_else(error: Exception, reason: str, exit_code: int) -> None:
    assert fault_of(raised(error)) == Fault(reason, str(error), exit_code)


def test_a_checkpoint_that_cannot_be_used_is_a_fault_that_the_daemon_takes() -> None:
    """It did not know the reason, and told the job's owner to leave Weft's descriptors alone."""
    fault = fault_of(raised(CheckpointError("training.pt is no file of a checkpoint")))
    told = {"type": "fault", "job": "digits", "attempt": 1, **asdict(fault)}
    assert checked(told)["reason"] == "invalid-plan"


def test_the_users_error_comes_with_its_traceback() -> None:
    fault = fault_of(raised(ZeroDivisionError("by zero")))
    assert (fault.reason, fault.exit_code) == ("user-error", 1)
    assert fault.message.startswith("Traceback (most recent call last):\n")
    assert "test_faults.py" in fault.message
    assert fault.message.endswith("ZeroDivisionError: by zero\n")


def test_the_traceback_begins_at_the_users_first_frame() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the user's mistake")

    stage = UnitStage([Unit(0, "0.", Broken())], seed=0, recompute=False, device=HostDevice(), functions={})

    def run() -> None:
        stage.forward(0, 0, [], DataPair(torch.zeros(1), None))

    with pytest.raises(RuntimeError) as caught:
        run()
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next  # from our frames on
    message = fault_of(error).message
    assert "weft/workers/compute/unit_stage.py" not in message
    assert "the user's mistake" in message
    assert "in forward" in message


def test_between_the_users_frames_is_none_of_ours() -> None:
    """The forward of a module that is cut by its calls goes through us."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the user's mistake")

    model = nn.ModuleList([Broken(), Broken()])
    with pytest.raises(RuntimeError) as caught, SeededCalls(model).installed():
        model[1](torch.zeros(1))
    message = fault_of(caught.value).message
    assert "weft/workload/cutting" not in message
    assert message.count("test_faults.py") == 2


def test_a_traceback_has_no_way_through_libraries_to_the_users_first_line() -> None:
    """Torch's calls of a module, or the import system's of a file, stood before it."""

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the user's mistake")

    with pytest.raises(RuntimeError) as caught:
        Broken()(torch.zeros(1))
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # from torch's frames on
    assert "_wrapped_call_impl" not in fault_of(error).message
    assert "in forward" in fault_of(error).message


def test_where_no_line_is_the_users_the_librarys_stand() -> None:
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 2)(torch.zeros(1, 3))
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert "linear.py" in fault_of(error).message


def test_a_syntax_error_stands_without_the_import_systems_frames(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def workload(:\n")
    spec = JobSpec(job={"entry": "job.py:workload", "epochs": 1, "batch_size": 1}, directory=str(tmp_path))
    with pytest.raises(SyntaxError) as caught:
        load_workload(spec)
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # from our frames on
    message = fault_of(error).message
    assert "importlib" not in message
    assert f'File "{tmp_path}/job.py", line 1' in message


@pytest.mark.parametrize("source", ["def workload(): ...".encode("utf-16"), b"\x7fELF\0\1\2"])
def test_a_file_that_is_no_text_in_utf_8_is_named(tmp_path: Path, source: bytes) -> None:
    """All that was told was "source code string cannot contain null bytes", without a file."""
    (tmp_path / "job.py").write_bytes(source)
    spec = JobSpec(job={"entry": "job.py:workload", "epochs": 1, "batch_size": 1}, directory=str(tmp_path))
    with pytest.raises((SyntaxError, ValueError)) as caught:
        load_workload(spec)
    assert (
        f"{tmp_path}/job.py has NUL bytes: it is UTF-16, or no Python at all; save it" in fault_of(caught.value).message
    )


def test_code_that_exits_is_told_with_its_place(tmp_path: Path) -> None:
    class Exits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise SystemExit(3)

    stage = UnitStage([Unit(0, "0.", Exits())], seed=0, recompute=False, device=HostDevice(), functions={})
    with pytest.raises(SystemExit) as caught:
        stage.forward(0, 0, [], DataPair(torch.zeros(1), None))
    assert fault_of(caught.value).message.endswith("weft: in unit 0 (Exits)\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 1 PB"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("unable to mmap 4096 bytes from file </x>: Cannot allocate memory (12)"),
    ],
)
def test_memory_that_ran_out_is_a_reason_of_its_own(error: Exception) -> None:
    assert fault_of(raised(error)).reason == "out-of-memory"


@pytest.mark.parametrize("told", [WorkloadError("it cannot be copied"), CheckpointError("its bytes are damaged")])
def test_it_is_so_where_an_error_of_ours_says_what_could_not_be_done_for_it(told: Exception) -> None:
    """A model that could not be copied for lack of memory was an invalid workload."""
    told.__cause__ = MemoryError()
    fault = fault_of(raised(told))
    assert (fault.reason, fault.exception) == ("out-of-memory", "MemoryError")
    assert str(told) in fault.message


@pytest.mark.parametrize(
    ("code", "exit_code"), [(17, 17), (0, 1), (None, 1), ("bye", 1), (True, 1), (256, 1), (-1, 1), (255, 255)]
)
def test_code_that_exits_has_failed_and_its_code_is_kept_where_it_can_be(code: Any, exit_code: int) -> None:
    """A job whose code called exit(0) was failed, and its follower ended with 0 as after a success."""
    fault = fault_of(raised(SystemExit(code)))
    assert (fault.reason, fault.exit_code) == ("user-error", exit_code)
    checked({"type": "fault", "job": "a", "attempt": 1, **asdict(fault)})  # or the daemon would blame the worker
    assert fault.message.startswith(f"the job's code called exit({code!r}); it must return, or raise an exception\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), subprocess.CalledProcessError(3, "x")])
def test_whatever_else_is_raised_is_the_users_error(error: BaseException) -> None:
    assert fault_of(raised(error)).reason == "user-error"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_code_that_asks_for_a_gpu_where_there_is_none_is_told_that_it_need_not() -> None:
    """Torch says that it is not compiled so, or has no driver, which is nothing that the job's owner is to mend."""
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        nn.Linear(1, 1).to("cuda")
    fault = fault_of(caught.value)
    assert (fault.reason, fault.exception) == ("user-error", type(caught.value).__name__)
    assert fault.message.endswith(f"{caught.value}\n{NO_GPU}")


@pytest.mark.parametrize("text", ["No CUDA GPUs are available", "Found no NVIDIA driver on your system. Please check"])
def test_it_is_so_with_a_torch_that_has_cuda(text: str) -> None:
    assert fault_of(raised(RuntimeError(text))).message.endswith(f"{text}\n{NO_GPU}")


def test_an_error_whose_own_text_fails_is_told_all_the_same() -> None:
    """Its __str__ raised in the worker, which ended the worker and not the job."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    fault = fault_of(raised(Unspeakable()))
    assert fault.reason == "user-error"
    assert "Unspeakable: <exception str() failed>" in fault.message


def test_a_very_long_text_is_cut_in_its_middle() -> None:
    message = fault_of(raised(ValueError("x" * 10 * MAX_MESSAGE_CHARS + "the end"))).message
    assert len(message) < MAX_MESSAGE_CHARS
    assert message.startswith("Traceback")
    assert message.endswith("the end\n")
    assert "\n...\n" in message


def test_a_chain_of_errors_is_told_whole() -> None:
    def chained() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        chained()
    message = fault_of(caught.value).message
    assert message.index("KeyError: 'first'") < message.index("ValueError: second")


def test_a_non_finite_loss_says_where_it_was_and_what_to_do() -> None:
    error = NonFiniteLoss(17, float("nan"), 2)
    assert str(error) == "loss is nan at step 17 (microbatch 2); lower the learning rate, or check the data"
    assert "microbatch" not in str(NonFiniteLoss(17, float("inf")))


def test_a_non_finite_loss_reaches_another_process_whole() -> None:
    error = NonFiniteLoss(17, float("inf"), 2)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.step, copy.value, copy.microbatch) == (17, float("inf"), 2)
    assert str(copy) == str(error)


def test_a_batch_norm_that_gets_one_sample_is_told_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))
    fault = fault_of(caught.value)
    assert (fault.reason, fault.exception) == ("user-error", "ValueError")
    assert fault.message.endswith(f"{caught.value}\n{ONE_SAMPLE}")


@pytest.mark.parametrize(
    "samples",
    [[[1, 2], [1]], [torch.zeros(2), torch.zeros(1)], [object(), object()]],
    ids=["lists", "tensors", "objects"],
)
def test_samples_that_make_no_batch_are_told_with_what_does(samples: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        torch.utils.data.default_collate(samples)
    assert fault_of(caught.value).message.endswith(COLLATE)
    with pytest.raises(RuntimeError) as caught:
        torch.stack([torch.zeros(2), torch.zeros(1)])
    assert COLLATE not in fault_of(caught.value).message, "a model's own"


def test_who_has_given_a_collate_that_raises_is_not_told_to_give_one() -> None:
    with pytest.raises(IndexError) as caught, within(IN_COLLATE):
        torch.utils.data.default_collate([])
    assert fault_of(caught.value).message.endswith("weft: in Workload.collate\n")


def test_gradients_that_are_asked_for_behind_an_epoch_are_told_to_be_gone() -> None:
    """TensorBoard's histograms of them are drawn there."""
    parameter, nothing = torch.nn.Parameter(torch.zeros(2)), None
    for ask, is_of_gradients in (
        (lambda values: {"norm": parameter.grad.norm()}, True),
        (lambda values: {"norm": nothing.norm()}, False),  # type: ignore[attr-defined]
    ):
        with pytest.raises(AttributeError) as caught:
            answer_of(ask, ["norm"], {})
        assert fault_of(caught.value).message.endswith(NO_GRADIENTS) == is_of_gradients


@pytest.mark.parametrize("made", ["args = 3", "import sys\n    for args in sys.path: pass"])
def test_a_global_that_only_a_script_makes_is_told_with_how_to_hand_it_over(tmp_path: Path, made: str) -> None:
    """It was a NameError of a name that the file plainly has."""
    path = tmp_path / "train.py"
    source = f'def workload():\n    return args\ndef other():\n    return arg\nif __name__ == "__main__":\n    {made}\n'
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(path.read_text(), path, "exec"), names)
    with pytest.raises(NameError) as caught:
        names["workload"]()
    assert fault_of(caught.value).message.endswith(OF_MAIN_ALONE.format(name="args"))
    with pytest.raises(NameError) as caught:
        names["other"]()
    assert fault_of(caught.value).message.endswith("NameError: name 'arg' is not defined\n")
