"""Entry names: whether a job's file has its function at all, by its source, before a line of it runs.

A script that trains as it is imported would otherwise be trained to its end, a night maybe, and then be told so.
"""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from pathlib import Path

from weft.workload.workload import WorkloadError

MAX_NAMES = 8  # of functions, in a message: a line's worth

# By these a file may have a name that its source does not mention.
_OTHER_WAYS = frozenset({"*", "__getattr__", "__dict__", "exec", "globals", "locals", "setattr", "vars"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check_named(path: Path, name: str) -> None:
    """Raises WorkloadError where the source of a file does not mention the name, and has no other way to give it, or
    trains as it is imported. Source that cannot be read is left to its import."""
    try:
        source = path.read_bytes()
        if re.search(
            rb"^(async )?def %b\b" % re.escape(name).encode(), source, re.MULTILINE
        ):  # nearly always: no need to parse it
            return
        with warnings.catch_warnings(action="ignore"):  # they come with its import
            module = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    mentioned = _mentioned(module)
    if name in mentioned or name.startswith("__"):  # every module has some of these
        return
    trains_at = _first_backward(module)
    if trains_at is None and mentioned & _OTHER_WAYS:
        return
    told = not_named(path, name, [node.name for node in module.body if isinstance(node, _FUNCTIONS)])
    if trains_at is None:
        raise told
    raise WorkloadError(
        f"{told}; what calls backward() at line {trains_at} would run as the file is imported, which is done several "
        f'times: let it stand under `if __name__ == "__main__":`, and let a function {name} return a weft.Workload'
    )


def not_named(path: Path, name: str, functions: list[str]) -> WorkloadError:
    """functions: those that it has."""
    close = difflib.get_close_matches(name, functions, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"it defines: {_listed(functions)}"
    return WorkloadError(f"job.entry: {path} has no {name!r}; {remedy}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES]) or 'no function'}{more}"


def _mentioned(tree: ast.AST) -> set[str]:
    """Names of whatever kind, and texts."""
    fields = [value for node in ast.walk(tree) for _, value in ast.iter_fields(node)]
    return {each for value in fields for each in (value if isinstance(value, list) else [value]) if type(each) is str}


def _first_backward(module: ast.Module) -> int | None:
    """The line of a call of backward() that the import comes to, in functions that it calls, too."""
    functions = {node.name: node for node in module.body if isinstance(node, _FUNCTIONS)}
    left: list[ast.AST] = [*module.body]
    while left:
        node = left.pop(0)
        match node:
            case ast.If(test=test, orelse=otherwise) if "__name__" in _mentioned(test):
                left += otherwise
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                continue
            case ast.Call(func=ast.Attribute(attr="backward")):
                return node.lineno
            case ast.Call(func=ast.Name(id=called)) if called in functions:
                left += functions.pop(called).body
        left += ast.iter_child_nodes(node)
    return None
