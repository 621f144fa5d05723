"""Source: the file that a job is named by. A TOML file says all of it; of a Python file a function makes the workload,
and the rest of the spec is given beside it.

    digits.toml              a job spec
    train.py                 the function `workload` of train.py
    train.py:small           another function of it
    package.train:workload   a function of a module below the working directory, which is then the job's
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from weft.spec.field_errors import SpecError

WORKLOAD = "workload"  # the function of a Python file for which no other is named
ENTRY_MODULE = "weft_entry_"  # what the module of an entry's file is called begins so, wherever it is imported
MAX_ARGS_DEPTH = 16  # tables and lists in one another; deeper ones are no arguments but an attack on the parser
MAX_SPEC_BYTES = 16 << 20

_REMEDY = (
    "give the path of a job spec in TOML, or FILE.py with a function `workload` in it, or FILE.py:FUNCTION, or "
    "MODULE:FUNCTION in the directory that has the module's package in it"
)


def read_source(source: str | Path) -> dict[str, Any]:
    """The tables of a spec, with its `directory`. Errors: SpecError for what cannot be read."""
    file, function = module_function(source)
    if file:
        return {"directory": working_directory(), "job": {"entry": f"{file}:{function}"}}
    file, function = python_function(source)
    if not file:
        path = Path(source)
        tables = _read_toml(path)
        return _placed(tables, path.resolve().parent if path.is_file() else Path(working_directory()))
    directory, name = os.path.split(os.path.abspath(file))
    if not os.path.isfile(file):
        raise SpecError(f"{file}: {'not a file' if os.path.exists(file) else 'no such file'}; {_REMEDY}")
    return {"directory": directory, "job": {"entry": f"{name}:{function}"}}


def working_directory() -> str:
    """Where relative paths begin; torch cannot be loaded without one. Errors: SpecError where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise SpecError("the working directory is gone; change to one that is there") from None


def home_directory() -> Path:
    """Errors: SpecError where nothing tells it, as in a container that runs as a user of its own."""
    try:
        return Path.home()
    except RuntimeError:
        raise SpecError(
            f"the home directory is unknown: HOME is not set, and user {os.getuid()} has no entry in /etc/passwd; set "
            "HOME, or both WEFT_STATE_DIR and WEFT_CACHE_DIR"
        ) from None


def check_utf8(path: str) -> str:
    """The path. Errors: ValueError where it has other bytes: no spec can name it, and no message."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path!r:.160} has bytes that are not UTF-8; give another path, or rename it") from None
    return path


def python_function(source: str | Path) -> tuple[str, str]:
    """The Python file that a source names, and the function of it; ("", "") of a TOML file."""
    file, _, function = str(source).rpartition(":")
    if file.endswith(".py"):
        return file, function
    return (str(source), WORKLOAD) if str(source).endswith(".py") else ("", "")


def module_function(source: str | Path) -> tuple[str, str]:
    """The file, below the working directory, of the MODULE[:FUNCTION] that a source names, and the function of it;
    ("", "") of another source, also where there is no such file."""
    module, colon, function = str(source).partition(":")
    names = module.split(".")
    if not all(map(str.isidentifier, names)) or names[-1] == "py" or os.path.exists(source):
        return "", ""
    place = "/".join(names)
    file = next(filter(os.path.isfile, (f"{place}.py", f"{place}/__init__.py")), "")
    return (file, function if colon else WORKLOAD) if file else ("", "")


def _placed(tables: dict[str, Any], home: Path) -> dict[str, Any]:
    """With `home`, the file's own directory or of a pipe the working directory, or the one that it names, which may be
    relative to that."""
    named = tables.get("directory", "")
    return tables | {"directory": os.path.normpath(home / named)} if isinstance(named, str) else tables


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # a bounded read: a model or an endless device would take all memory
            content = file.read(MAX_SPEC_BYTES + 1)
        if len(content) <= MAX_SPEC_BYTES:
            return tomllib.loads(content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; {_REMEDY}") from None
    except IsADirectoryError:
        raise SpecError(f"{path} is a directory; {_REMEDY}") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); make it readable, or give another") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: cannot be read: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from error
    except RecursionError:
        raise SpecError(f"{path}: not read: nested too deep; at most {MAX_ARGS_DEPTH} levels are taken") from None
    except ValueError:  # a NUL in the path
        raise SpecError(f"{str(path)!r}: no such file; {_REMEDY}") from None
    raise SpecError(f"{path}: larger than {MAX_SPEC_BYTES >> 20} MiB, which no job spec is; {_REMEDY}")
