"""The entry's file, which is loaded by a name of ours, as a module of its package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import marshal
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from weft.spec.job_spec import JobSpec
from weft.spec.source import ENTRY_MODULE

_newest: dict[tuple[bytes, Any], bytes] = {}  # the source that was compiled last, with its path: its code


def module_name(path: Path) -> str:
    """The same in every process that loads the file, so that what its functions and classes pickle to is, too."""
    return f"{ENTRY_MODULE}{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"


class _OwnName(importlib.machinery.ModuleSpec):
    """Of a file that is loaded by a name of ours, and whose relative imports are those of its package."""

    package = ""

    @property
    def parent(self) -> str:
        return self.package


class _Loader(importlib.machinery.SourceFileLoader):
    """What this process has compiled before it only loads, as from a file of bytecode."""

    def source_to_code(self, data: Any, path: Any, *more: Any) -> CodeType:  # type: ignore[override]
        source = bytes(data), path
        if source not in _newest:
            _newest.clear()
            try:
                _newest[source] = marshal.dumps(super().source_to_code(data, path, *more))
            except (SyntaxError, ValueError) as error:
                if b"\0" in source[0]:  # of which Python names no file
                    error.add_note(f"{path} has NUL bytes: it is UTF-16, or no Python at all; save it as UTF-8")
                raise
        code: CodeType = marshal.loads(_newest[source])
        return code


def package_of(spec: JobSpec) -> str:
    """By the folders between the job's directory and the entry's file; "" of one in the directory itself."""
    try:
        folders = spec.entry_file.relative_to(spec.directory).parent.parts
    except ValueError:
        return ""
    return ".".join(folders) if all(map(str.isidentifier, folders)) else ""


def import_entry(path: Path, name: str, package: str) -> ModuleType:
    module_spec = _OwnName(name, _Loader(name, str(path)), origin=str(path))
    module_spec.has_location, module_spec.package = True, package
    module = importlib.util.module_from_spec(module_spec)
    assert module_spec.loader is not None
    sys.modules[name] = module  # before it runs: dataclasses and pickle look themselves up there
    with contextlib.ExitStack() as undoing:
        undoing.callback(sys.modules.pop, name, None)
        module_spec.loader.exec_module(module)
        undoing.pop_all()
    return module
