"""Entry: where the workers find the function that a call from Python gives, a file and a name in it.

a function of a .py file          that file, a script's own included: the workers import it under another name
one that was typed in a notebook  a file of its own, for as long as the call, when its source is all that it needs
anything else                     refused: what the workers could not import would not be what was meant
"""

from __future__ import annotations

import builtins
import inspect
import symtable
import sys
import tempfile
import textwrap
import zipimport
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from weft.spec.field_errors import SpecError
from weft.spec.source import ENTRY_MODULE, working_directory

_NOTEBOOK_FILES = "ipykernel_"  # a directory of cells, which are there as files while one debugs
_OWN_FILE = "put all of it in a file, for example with %%writefile train.py, and give the function imported from it"


@contextmanager
def entry_of(function: object) -> Iterator[tuple[str, str]]:
    """The directory and the entry of a job that the function makes the workload of. Errors: SpecError.

    function: what is defined by `def` at the top of a module.
    """
    plain = _plain_function(function)
    file = Path(plain.__code__.co_filename)
    if file.suffix == ".py" and file.is_file() and not file.parent.name.startswith(_NOTEBOOK_FILES):
        root = _import_root(plain, file.absolute())
        yield str(root), f"{file.absolute().relative_to(root)}:{plain.__name__}"
        return
    source = _source_alone(plain)
    with tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True) as place:
        written = Path(place, f"{plain.__name__}.py")
        written.write_text(source, encoding="utf-8")
        yield working_directory(), f"{written}:{plain.__name__}"


def taken_apart(function: object, args: Mapping[str, Any]) -> tuple[object, dict[str, Any]]:
    """A partial's function, and with what it is called: as if args were given to the partial. Errors: SpecError."""
    args = dict(args)
    while isinstance(function, partial):
        given, named, function = function.args, function.keywords, function.func
        try:
            by_place = inspect.signature(function).bind_partial(*given) if given else None
        except (TypeError, ValueError) as error:
            raise SpecError(f"weft.run: workload is a partial that cannot be called: {error}") from None
        if by_place is not None:
            parameters = by_place.signature.parameters.values()
            if any(
                each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters if each.name in by_place.arguments
            ):
                raise SpecError(
                    "weft.run: workload is a partial with values without a name; give them by name, as args={...}"
                )
            if twice := by_place.arguments.keys() & {*named, *args}:
                raise SpecError(f"weft.run: workload is a partial that has {min(twice)!r} already; give it once")
            named = {**by_place.arguments, **named}
        args = {**named, **args}
    return function, args


def check_not_inside_an_entry() -> None:
    """Refuses to begin a job while its own file is imported, or its workload made. Errors: SpecError."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.startswith(ENTRY_MODULE):
            raise SpecError(
                f"{frame.f_code.co_filename}: weft.run was called while a worker imports this file, and would run the "
                'job from inside itself; write the call below `if __name__ == "__main__":`'
            )
        frame = frame.f_back


def _plain_function(function: object) -> FunctionType:
    """What workers can ask the file for by name, without its decorators."""
    plain = inspect.unwrap(function) if callable(function) else function
    kind = "None" if function is None else type(function).__name__
    if (type(function).__module__, kind) == ("weft.workload.workload", "Workload"):
        problem = "is a Workload; give the function that makes it, since each worker calls it for one of its own"
    elif not isinstance(plain, FunctionType):
        problem = f"is {kind}; give a function that returns a weft.Workload, and its arguments as args={{...}}"
    elif plain.__name__ == "<lambda>":
        problem = "is a lambda; workers find a function by its name, so define it by def at the top of its file"
    elif "." in plain.__qualname__:
        problem = f"is {plain.__qualname__}; workers import it by its name, so define it at the top of its file"
        problem += ", and hand it values as args={...}"
    else:
        return plain
    raise SpecError(f"weft.run: workload {problem}")


def _import_root(function: FunctionType, file: Path) -> Path:
    """The directory from which the function's module was imported: that of a package's modules is above the package."""
    spec = getattr(sys.modules.get(function.__module__), "__spec__", None)
    names = [] if spec is None else spec.name.split(".")
    if file.name == "__init__.py":
        names.append("__init__")
    in_package = list(file.with_suffix("").parts[-len(names) :]) == names
    return file.parents[len(names) - 1] if names and in_package else file.parent


def _source_alone(function: FunctionType) -> str:
    """The source of a function that stands in no file, below imports of what it names. Errors: SpecError."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        names = _global_names(source)
    except (OSError, TypeError, SyntaxError):
        raise SpecError(f"weft.run: the source of {function.__name__} is not to be had; {_OWN_FILE}") from None
    imports, foreign = [], []
    for name in sorted(names - {function.__name__, *dir(builtins)}):
        line = _import_of(name, function.__globals__.get(name))
        imports.append(line) if line else foreign.append(name)
    if foreign and (archive := _archive_of("__main__")):
        raise SpecError(
            f"weft.run: {function.__name__} needs {', '.join(foreign)} of {archive}, from which workers cannot import; "
            "define it inside the function, or put all of it in a .py file outside of the archive, and give the "
            "function imported from it"
        )
    if foreign:
        raise SpecError(
            f"weft.run: {function.__name__} needs {', '.join(foreign)}, defined elsewhere in the notebook; define it "
            f"inside the function, or {_OWN_FILE}"
        )
    return "\n".join([*imports, "\n", source])


def _global_names(source: str) -> set[str]:
    """What the source looks up and does not define. Errors: SyntaxError."""
    tables = [symtable.symtable(source, "workload", "exec")]
    names: set[str] = set()
    while tables:
        table = tables.pop()
        outermost = table.get_type() == "module"
        for symbol in table.get_symbols():
            foreign = not symbol.is_assigned() if outermost else symbol.is_global()
            if foreign and symbol.is_referenced():
                names.add(symbol.get_name())
        tables += table.get_children()
    return names


def _import_of(name: str, value: object) -> str | None:
    """The line that imports a value of the notebook from where it is; None for what is the notebook's own."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}" if _is_importable(value.__name__, value) else None
    module, original = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(original, str) or module == "__main__":
        return None
    if getattr(sys.modules.get(module), original, None) is not value or not _is_importable(module):
        return None
    return f"from {module} import {original} as {name}"


def _is_importable(name: str, module: ModuleType | None = None) -> bool:
    """By workers: not what a program that is an archive (`python app.pyz`) has in it. module: that it has to be."""
    archive = _archive_of(name)
    is_inside = archive is not None and archive == _archive_of("__main__")
    return not is_inside and (module is None or sys.modules.get(name) is module)


def _archive_of(name: str) -> str | None:
    """The archive that a module was imported from."""
    loader = getattr(sys.modules.get(name), "__loader__", None)
    return loader.archive if isinstance(loader, zipimport.zipimporter) else None
