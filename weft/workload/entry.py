"""The entry function: from the file that a spec names to the Workload that it returns, and out of the process again.

A worker outlives its jobs, so what a job imports from its own directory must go when it ends: the next job may be the
same file, edited. `unload` takes exactly that away. Installed packages, the standard library and Weft itself stay, even
where the job's directory is the one that they are in.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

from torch import nn

from weft.spec.job_spec import JobSpec, SpecError, is_unicode
from weft.spec.presets import AUTO
from weft.workload.building import NeedsValuesError, Sink, numbered
from weft.workload.code.entry_file import import_entry, module_name, package_of
from weft.workload.code.installed import is_installed
from weft.workload.code.main_module import look_in, look_nowhere
from weft.workload.code.own_classes import forget_modules, note_module
from weft.workload.code.packages import import_remedy
from weft.workload.code.torchs_own import put_back
from weft.workload.compiling.compiled import compile_units
from weft.workload.entry_names import check_named, not_named
from weft.workload.model_memory import check_plain, check_values, settle
from weft.workload.optimizer import note_sparse
from weft.workload.randomness import seed_all
from weft.workload.start import begin
from weft.workload.units import check_modes, is_cut_by_calls
from weft.workload.workload import STOP, Workload, WorkloadError, kind_of

LOADED_BEFORE = (
    "The same file has run in this process before, without this error: Weft runs a job's file, and calls its function, "
    "several times in a process. Where the error comes of that, let what can be done but once look whether it is done"
)
_CALLED_WITH = {
    "optimizer": ("parameters",),
    "loss": ("output", "target"),
    "step": ("model", "batch"),
    "validate": ("model", "batch"),
    "weight": ("batch",),
    "collate": ("items",),
    "scheduler": ("optimizer",),
    "on_epoch": ("values",),
}
_newest: dict[str, tuple[object, ...]] = {}  # what was run last, a file and a call: what tells it from another
_own_argv: list[list[str]] = []  # what sys.argv is in this process, while it is a job's


def load_workload(spec: JobSpec, sink: Sink | None = None) -> Workload:
    """Imports the entry's file and calls its function with `job.args`; `unload` it when the job ends.

    torch's default generator, Python's and numpy's are seeded with `job.seed` before the import and again before the
    call, so what the model starts from is a function of the spec. The spec's directory comes first on `sys.path` during
    both, and no bytecode is written. Raises WorkloadError, naming the field, if file or function are not as the spec
    says or the Workload is not complete. What the user's code raises passes unchanged.

    Until `unload`, `sys.argv` is the file alone, as in `python FILE`: a parser of arguments at its top would end the
    process over a worker's, or over those of `weft run`. What a pickle has as `__main__`'s is the file's, too.

    With a sink the parameters in it have no values, and NeedsValuesError is raised where the function asks for these.
    """
    try:
        spec.check_files()
    except SpecError as error:
        raise WorkloadError(str(error)) from None
    entry = spec.entry_file
    check_named(entry, spec.entry_function)
    _own_argv[:] = _own_argv or [sys.argv]
    sys.argv = [str(entry)]
    look_in(name := module_name(entry))
    with _import_settings(spec), numbered(sink):
        seed_all(spec.job.seed)
        with _once_more("file", spec):
            module = import_entry(entry, name, package_of(spec))
        function = _entry_function(spec, module)
        _check_arguments(function, spec)
        seed_all(spec.job.seed)
        with _once_more("call", spec, spec.entry_function, repr(spec.job.args)):
            result = function(**spec.job.args)
    workload = _checked(result, spec)
    check_modes(workload.model)
    note_module(workload.model, name)
    check_values(workload.model)
    if is_cut_by_calls(workload):
        check_plain(workload.model)
    settle(workload.model, sink)
    note_sparse(workload.model)
    begin(workload, Path(spec.directory), sink)
    assert spec.strategy.compile != AUTO, "whether units are compiled is decided before anybody loads them"
    if spec.strategy.compile:
        compile_units(workload)
    return workload


def unload(spec: JobSpec, before: Collection[str]) -> None:
    """Forgets the entry's module and every module that was imported from the job's directory, and what they have put
    in the place of torch's own. `sys.argv` is the process's own again.

    before: names of the modules, `set(sys.modules)`, that were there before the job; those stay.
    """
    put_back()
    look_nowhere()
    forget_modules()
    if _own_argv:
        sys.argv = _own_argv.pop()
    directory = Path(spec.directory).resolve()
    sys.modules.pop(module_name(spec.entry_file), None)
    names = [name for name in sys.modules.keys() - before if name.partition(".")[0] != "weft"]
    for name in [name for name in names if _is_of_job(sys.modules[name], directory)]:  # a namespace asks its parent
        del sys.modules[name]


def load_again(before: Collection[str], spec: JobSpec) -> Workload:
    """Anew, where it was loaded before in this process; as the two above."""
    if _own_argv:  # or it is not: to unload takes milliseconds
        unload(spec, before)
    return load_workload(spec)


def foreign_modules(before: Collection[str]) -> list[str]:
    """The names of those that have come since from source that is installed nowhere: what stands beside the job's
    directory, or is installed to be edited, may be other source by the next job, and `unload` leaves it."""
    return [name for name in _of_no_package(before) if _is_foreign(name)]


def files_of_job(spec: JobSpec, before: Collection[str]) -> list[Path]:
    """Of the modules that `unload` would forget, and of those that are installed nowhere; as they were named, which may
    be by links."""
    directory, names = Path(spec.directory).resolve(), _of_no_package(before)
    own = [name for name in names if _is_foreign(name) or _is_of_job(sys.modules[name], directory)]
    imported = {path for name in own for path in _locations(sys.modules[name])}
    return sorted({spec.entry_file, *(path for path in imported if path.is_file())})


@contextlib.contextmanager
def _import_settings(spec: JobSpec) -> Iterator[None]:
    # Bytecode is matched to its source by second and size, so an edit within one second could pass unseen: write none.
    writes_nothing, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, spec.directory)
    importlib.invalidate_caches()
    try:
        yield
    except ImportError as error:
        if remedy := import_remedy(error, spec.entry_file, spec.entry_function, spec.directory):
            error.add_note(remedy)
        raise
    finally:
        sys.dont_write_bytecode = writes_nothing
        with contextlib.suppress(ValueError):  # the user's code may have taken it away
            sys.path.remove(spec.directory)


@contextlib.contextmanager
def _once_more(what: str, spec: JobSpec, *called: str) -> Iterator[None]:
    """Tells of an error that the run before it, of the same file in this process, did not have.

    called: of a call the function's name and its arguments; another function may well have errors of its own.
    """
    found = spec.entry_file.stat()
    state = spec.entry_file, found.st_mtime_ns, found.st_size, found.st_ino, spec.directory, *called
    try:
        yield
    except NeedsValuesError:  # it is loaded once more for that
        _newest[what] = state
        raise
    except Exception as error:
        if _newest.get(what) == state and isinstance(getattr(error, "__notes__", []), list):  # a user's own may be any
            error.add_note(LOADED_BEFORE)
        raise
    _newest[what] = state


def _entry_function(spec: JobSpec, module: ModuleType) -> Callable[..., Any]:
    name = spec.entry_function
    function = getattr(module, name, None)
    if function is None:
        own = [key for key, value in vars(module).items() if _is_function_of(value, module)]
        raise not_named(spec.entry_file, name, own)
    if not callable(function):
        raise WorkloadError(
            f"job.entry: {name!r} in {spec.entry_file} is {kind_of(function)}, not a function; "
            "name a function that returns a weft.Workload"
        )
    return function  # type: ignore[no-any-return]  # callable() narrows Any to nothing that mypy could hold


def _is_function_of(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _check_arguments(function: Callable[..., Any], spec: JobSpec) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables written in C tell nothing; the call itself will
        return
    try:
        signature.bind(**spec.job.args)
    except TypeError as error:
        raise WorkloadError(f"job.args: {error}; the function is {spec.entry_function}{signature}") from None


def _checked(workload: object, spec: JobSpec) -> Workload:
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"job.entry: {spec.entry_function} returned {kind_of(workload)}; it must return a weft.Workload"
        )
    if not isinstance(workload.model, nn.Module):
        of_it = f", such as {workload.model.__name__}(...)" if isinstance(workload.model, type) else ""
        raise WorkloadError(f"Workload.model is {kind_of(workload.model)}; give a torch.nn.Module{of_it}")
    if not callable(workload.optimizer):
        raise WorkloadError(f"Workload.optimizer is {kind_of(workload.optimizer)}; give a function")
    if not isinstance(workload.start, (str, Path, Mapping, NoneType)):
        raise WorkloadError(
            f"Workload.start is {kind_of(workload.start)}; give the path of a safetensors file, or a state dict"
        )
    every: object = workload.scheduler_every
    if not isinstance(every, str) or every not in ("step", "epoch"):
        told = repr(every) if isinstance(every, str) else kind_of(every)
        raise WorkloadError(
            f"Workload.scheduler_every is {told:.80}; give 'step', or 'epoch' for a scheduler whose step() is to be "
            "called once an epoch"
        )
    if not isinstance(workload.scheduler_metric, str):
        raise WorkloadError(
            f"Workload.scheduler_metric is {kind_of(workload.scheduler_metric)}; give 'loss', or the name of a metric"
        )
    _check_metrics(workload.metrics)
    _check_epoch_metrics(workload)
    _check_loss_or_step(workload)
    for name in ("validate", "weight", "collate", "scheduler", "on_epoch"):
        optional = getattr(workload, name)
        if optional is not None and not callable(optional):
            raise WorkloadError(f"Workload.{name} is {kind_of(optional)}; give a function, or leave it out")
    for name, arguments in _CALLED_WITH.items():
        _check_call(getattr(workload, name), f"Workload.{name}", arguments)
    for name, metric in workload.metrics.items():
        _check_call(metric, f"Workload.metrics[{name!r:.80}]", _CALLED_WITH["loss"])
    return workload


def _check_loss_or_step(workload: Workload) -> None:
    if workload.loss is None and workload.step is None:
        raise WorkloadError(
            "Workload.loss and Workload.step are both missing; give loss(output, target), or step(model, batch) that "
            "returns the loss"
        )
    if workload.loss is not None and workload.step is not None:
        raise WorkloadError(
            "Workload.loss and Workload.step are both given; leave out one: a step computes the loss itself"
        )
    name, given = ("loss", workload.loss) if workload.step is None else ("step", workload.step)
    _check_function(given, f"Workload.{name}")
    if workload.step is not None and workload.metrics:
        raise WorkloadError(
            "Workload.metrics goes with Workload.loss; let Workload.step return them: {'loss': loss, 'accuracy': ...}"
        )
    if workload.step is None and workload.validate is not None:
        raise WorkloadError("Workload.validate goes with Workload.step; with Workload.loss, give Workload.metrics")


def _check_function(given: object, what: str) -> None:
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise WorkloadError(f"{what} is the class {given.__name__}; give a module of it, such as {given.__name__}()")
    if not callable(given):
        raise WorkloadError(f"{what} is {kind_of(given)}; give a function")


def _check_call(function: object, what: str, arguments: tuple[str, ...]) -> None:
    """Before it is called from somewhere inside of Weft, with a traceback of that."""
    if not callable(function):  # left out
        return
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may take what that does not
    except (TypeError, ValueError):  # as in `_check_arguments`
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = ", ".join(arguments)
        raise WorkloadError(
            f"{what} is called with ({given}), and takes {signature}: {error}; give one that takes that, for example "
            f"`lambda {given}: ...` with your call in it"
        ) from None


def _check_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise WorkloadError(
            f"Workload.metrics is {kind_of(metrics)}; give a mapping from names to functions (output, target) -> scalar"
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not is_unicode(name):
            raise WorkloadError(f"Workload.metrics: the name {name!r:.80} is no text; give one in UTF-8")
        _check_function(metric, f"Workload.metrics[{name!r:.80}]")
    if "loss" in metrics:
        raise WorkloadError("Workload.metrics: 'loss' is always reported; give the metric another name")


def _check_epoch_metrics(workload: Workload) -> None:
    names: object = workload.epoch_metrics
    if not isinstance(names, (list, tuple)):
        raise WorkloadError(
            f"Workload.epoch_metrics is {kind_of(names)}; give a list of the names that Workload.on_epoch returns"
        )
    for name in names:
        if not isinstance(name, str) or not is_unicode(name):
            raise WorkloadError(f"Workload.epoch_metrics: the name {name!r:.80} is no text; give one in UTF-8")
        if name in ("loss", STOP, *workload.metrics) or names.count(name) > 1:
            raise WorkloadError(f"Workload.epoch_metrics: {name!r:.80} stands for something else; give another name")
    if names and workload.on_epoch is None:
        raise WorkloadError("Workload.epoch_metrics is given without Workload.on_epoch, which returns them; give both")


def _is_of_job(module: ModuleType, directory: Path) -> bool:
    places = [path.resolve() for path in _locations(module)]
    return any(path.is_relative_to(directory) and not is_installed(path) for path in places)


def _of_no_package(before: Collection[str]) -> list[str]:
    """The names of the modules that have come since and are of no installed package. To resolve the path of each of a
    library's thousand modules would take a second."""
    names = sys.modules.keys() - before
    installed = {root for root in {name.partition(".")[0] for name in names} if _is_of_installed(root)}
    return [name for name in names if name.partition(".")[0] not in installed]


def _is_of_installed(package: str) -> bool:
    paths = _locations(sys.modules[package]) if package in sys.modules else []
    return package == "weft" or any(is_installed(path) or is_installed(path.resolve()) for path in paths)


def _is_foreign(name: str) -> bool:
    """Of no installed package's."""
    paths = _locations(sys.modules[name])
    is_source = bool(paths) and paths[0].suffix == ".py"  # another is made once in a process
    return is_source and not any(is_installed(path.resolve()) for path in paths)


def _locations(module: ModuleType) -> list[Path]:
    """The file of a module, or the directories of a namespace package, which has none."""
    file = getattr(module, "__file__", None)
    try:
        paths = [Path(path) for path in ([file] if file else getattr(module, "__path__", ()))]
    except KeyError:  # a namespace whose parent the user's code has taken away
        return []
    return [path for path in paths if path.is_absolute()]  # torch.ops and its like name files that are nowhere
