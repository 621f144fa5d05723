"""Packages: what to say of an import that fails because the job's directory is another than the package's."""

from __future__ import annotations

import shlex
from pathlib import Path

LEVELS = 4  # above the job's directory: farther up a name is likely another's

_RELATIVE = ("no known parent package", "beyond top-level package")


def import_remedy(error: ImportError, file: Path, function: str, directory: str) -> str:
    """What to do, with the command for it; "" where the import fails for another reason."""
    place = Path(directory)
    if any(part in str(error) for part in _RELATIVE):
        home = _above_package(place)
        why, write = "so that package is not known", "Write `from MODULE import`, or let"
    else:
        name = error.name or ""
        found = _home_of(name, place)
        if not isinstance(error, ModuleNotFoundError) or found is None:
            return ""
        home, why, write = found, f"so {name!r} is not found, which is in {found}", "Let"
    return (
        f"Weft runs a job's file as `python FILE` does, and the job's directory is {place}, {why}. {write} the "
        f"directory be {home}: {_command(file, function, home)}. A job file says it by `directory = ...` above its "
        "tables, and weft.run does so with a function that is imported from a package"
    )


def _above_package(place: Path) -> Path:
    """The next one that has no `__init__.py`; a package need not have one."""
    return next((above for above in place.parents if not (above / "__init__.py").exists()), place)


def _home_of(name: str, place: Path) -> Path | None:
    """The directory above that has a module or a package of this name in it. A folder without an `__init__.py` may be
    anything: it counts where the job's file is in it."""
    if not name.isidentifier():
        return None
    for home in place.parents[:LEVELS]:
        package = home / name
        if (home / f"{name}.py").is_file() or (package / "__init__.py").is_file():
            return home
        if package == place or package in place.parents:
            return home
    return None


def _command(file: Path, function: str, home: Path) -> str:
    inside = file.relative_to(home) if file.is_relative_to(home) else file
    names = [*inside.parent.parts, *([] if inside.stem == "__init__" else [inside.stem])]
    if all(map(str.isidentifier, names)):
        return f"`cd {shlex.quote(str(home))} && weft run {'.'.join(names)}:{function} ...`, `weft init` likewise"
    return f'a job file with `directory = "{home}"` and `entry = "{inside}:{function}"`'
