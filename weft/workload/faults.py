"""Faults: what the user's code raised, as plain data for the daemon: a reason, a text and an exit code."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import weft
from weft.machine.checkpoint_files import CheckpointError
from weft.machine.descriptors import all_open, has_run_out
from weft.machine.free_memory import SharedMemoryFull
from weft.machine.run_file import RunFileError
from weft.plan.error_places import IN_COLLATE, IN_ON_EPOCH, places_of, samples_place
from weft.spec.job_spec import SpecError
from weft.workload.code.version import CodeChanged
from weft.workload.compiling.compiler import cannot_compile, is_compilers
from weft.workload.origin import is_ours, is_users
from weft.workload.workload import WorkloadError

MAX_MESSAGE_CHARS = 32_000  # a deep recursion's traceback is longer than anybody reads

CANNOT_WRITE, SOFTWARE = 74, 70  # exit codes, as in sysexits.h
CLOSE_FILES = "close the files and sockets that the job's code opens, or raise LimitNOFILE of the daemon"
NO_GPU = (
    "The job's code asks for a GPU, and this process has none. It need not ask: leave out `.cuda()`, `.to('cuda')` and "
    "`device='cuda'`. Build the model on the CPU; Weft moves it, and its batches, to the devices that they are for\n"
)
ONE_SAMPLE = (
    "A batch norm cannot train on a single sample. Where that is all that a microbatch has, take fewer microbatches or "
    "replicas, or a larger batch_size; where the last batch of an epoch has too few, leave it out by a DataLoader with "
    "drop_last=True, or give job.steps_per_epoch, with which every batch is full\n"
)
OURS = "a fault of Weft's own, not of the job's code; please report it\n"

# What does not come from torch's allocator of a GPU: the host's, the kernel's answer (ENOMEM) to whoever maps, forks or
# reads, CUDA where it loads a kernel, libraries' workspaces.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
COLLATE = (
    "These samples make no batch by themselves: give Workload.collate, a function of a list of samples that returns "
    "the batch, and pads there what has several lengths; it may be the collate_fn of your DataLoader\n"
)
OF_MAIN_ALONE = (
    '{name} is made below `if __name__ == "__main__":`, which does not run where workers import the file: let it be an '
    "argument of the function that makes the workload, and hand it over by args={{...}} of weft.run or by --arg, or "
    "make it above\n"
)
NO_GRADIENTS = (
    "Gradients are gone once the step is done that they were for, so `.grad` is None there. A hook has them as they "
    "come (`parameter.register_post_accumulate_grad_hook`); their norm is in metrics.jsonl, with strategy.clip_norm\n"
)
_REMEDIES = {  # by what torch says
    "Torch not compiled with CUDA enabled": NO_GPU,
    "No CUDA GPUs are available": NO_GPU,
    "Found no NVIDIA driver": NO_GPU,
    "Expected more than 1 value per channel when training": ONE_SAMPLE,
}
_DEFAULT_COLLATE = "torch/utils/data/_utils/collate.py"
_IMPORT_SYSTEM = "<frozen importlib"
_OUR_FILES = str(Path(weft.__file__).parent)


@dataclass(frozen=True, slots=True)
class Fault:
    reason: str  # as in a job's record
    message: str
    exit_code: int  # what the followers of the job exit with
    exception: str = ""  # the name of what the user's code raised; empty where an error of ours says all


def fault_of(error: BaseException) -> Fault:
    """Our own errors say what to change; the user's come with their traceback, from the user's first frame on."""
    match error:
        case NonFiniteLoss():
            return Fault("non-finite-loss", str(error), 1)
        case StateCorrupted():
            return Fault("corrupted", encodable(_with_places(error)), SOFTWARE)
        case WorkloadError() | SpecError() | CheckpointError() if is_out_of_memory(error.__cause__):
            return Fault("out-of-memory", _traceback(error), 1, type(error.__cause__).__name__)
        case CodeChanged():
            return Fault("code-changed", encodable(str(error)), 2)
        case WorkloadError() | SpecError():
            return Fault("invalid-workload", encodable(_with_places(error)), 2)
        case CheckpointError():
            return Fault("invalid-plan", encodable(f"job.resume_from: {error}"), 2)
        case SharedMemoryFull() if not has_run_out(error):
            return Fault("shared-memory", encodable(str(error)), 1)
        case RunFileError():
            return Fault("run-directory", encodable(str(error)), CANNOT_WRITE)
        case SystemExit():
            message = f"the job's code called exit({error.code!r}); it must return, or raise an exception\n"
            return Fault("user-error", message + _traceback(error), _failing_exit_code(error.code), "SystemExit")
    if is_out_of_memory(error):
        return Fault("out-of-memory", _traceback(error), 1, type(error).__name__)
    if is_compilers(error):  # from a backward, whose kernels are made when it first runs
        return Fault("invalid-workload", encodable(_with_places(cannot_compile("a unit", error))), 2)
    if has_run_out(error) and is_ours(error):  # what Weft itself has open in a worker is a few
        return Fault("user-error", f"{all_open()}: {CLOSE_FILES}\n{_traceback(error)}", 1, "OSError")
    if is_ours(error):
        return Fault("internal", OURS + _traceback(error), SOFTWARE)
    return Fault("user-error", _traceback(error) + _remedy(error), 1, type(error).__name__)


def _remedy(error: BaseException) -> str:
    told, frames = _text(error), traceback.extract_tb(error.__traceback__)
    raised = frames[-1:]
    if IN_ON_EPOCH in places_of(error) and "NoneType" in told and any(".grad" in (each.line or "") for each in frames):
        return NO_GRADIENTS
    if raised and raised[0].filename.endswith(_DEFAULT_COLLATE):
        return "" if IN_COLLATE in places_of(error) else COLLATE
    if raised and isinstance(error, NameError) and _is_of_main_alone(str(error.name), raised[0].filename):
        return OF_MAIN_ALONE.format(name=error.name)
    return next((remedy for sign, remedy in _REMEDIES.items() if sign in told), "")


def _is_of_main_alone(name: str, file: str) -> bool:
    """Whether the file makes the global below `if __name__ == "__main__":`."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    mains = [each for each in tree.body if isinstance(each, ast.If) and "'__main__'" in ast.unparse(each.test)]
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for main in mains
        for each in main.body
        for node in ast.walk(each)
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocator has refused, as itself, the kernel or a library says."""
    if error is None or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return error is not None
    told = _text(error)
    return any(sign in told for sign in _OUT_OF_MEMORY)


def _with_places(error: Exception) -> str:
    places = ", ".join(places_of(error))
    return f"{error} ({places})" if places else str(error)


def _failing_exit_code(code: object) -> int:
    """The code of the user's exit() where a follower can end with it; a job that has ended early has not succeeded."""
    return int(code) if isinstance(code, int) and 0 < code < 256 else 1  # True is an int, and no exit code on the wire


def _text(error: BaseException) -> str:
    """str(error), also where the user's __str__ is broken."""
    return "".join(traceback.TracebackException.from_exception(error).format_exception_only())


def encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate, which no encoding takes (a file name can hold some)."""
    return text.encode("utf-8", "replace").decode()


def _traceback(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(error)
    files = [frame.filename for frame in told.stack]
    theirs = [number for number, file in enumerate(files) if is_users(file)]
    libraries = [number for number, file in enumerate(files) if not file.startswith((_OUR_FILES, _IMPORT_SYSTEM))]
    if begin := theirs or libraries:
        told.stack = traceback.StackSummary.from_list(
            [frame for frame in told.stack[begin[0] :] if not frame.filename.startswith(_OUR_FILES)]
        )
    elif isinstance(error, SyntaxError):  # its place is in its text, and the way there is the import system's
        told.stack = traceback.StackSummary()
    text = encodable("".join(told.format()))
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS // 2] + "\n...\n" + text[-8000:]


class NonFiniteLoss(WorkloadError):
    """The training loss of one microbatch is nan or infinite: training on would only spread it.

    step: training step, from 0. value: the loss. microbatch: its number in the batch, where it is known. samples: of
    the training data, those in it.
    """

    def __init__(self, step: int, value: float, microbatch: int | None = None, samples: Sequence[int] = ()) -> None:
        super().__init__(step, value, microbatch, samples)  # what pickle calls it with again, in another process
        self.step = step
        self.value = value
        self.microbatch = microbatch
        self.samples = samples

    def __str__(self) -> str:
        told = f": {samples_place('train', self.samples)}" if self.samples else ""
        where = "" if self.microbatch is None else f" (microbatch {self.microbatch}{told})"
        return f"loss is {self.value} at step {self.step}{where}; lower the learning rate, or check the data"


class StateCorrupted(Exception):
    """What an update had left has changed by itself. what: whose bits, such as "values of 0.weight"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"bits of the {self.what} have changed since their last update, and nobody was to change them; memory is "
            "at fault, or the job's code sets parameters outside of its optimizer (then leave out strategy.verify)"
        )
