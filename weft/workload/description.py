"""Description: what is to be known of a workload before its job file is written, as a line of JSON.

`python -m weft.workload.description SPEC`, SPEC a job spec in JSON. In a process of its own, since `weft init` imports
no torch, and the user's code may do anything to whoever runs it. What that prints goes to stderr.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from weft.spec.job_spec import JobSpec
from weft.workload.cutting.visible import CallKind, visible_modules
from weft.workload.data.datasets import Field
from weft.workload.data.given_batches import num_samples
from weft.workload.data.source import DataSource, source_of
from weft.workload.data.tree import flatten
from weft.workload.entry import load_workload
from weft.workload.faults import fault_of
from weft.workload.units import is_cut_by_calls, units
from weft.workload.workload import Workload, WorkloadError


def main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        print(json.dumps(_answer(JobSpec.parse(json.loads(sys.argv[1])))), file=answer)


def _answer(spec: JobSpec) -> dict[str, Any]:
    os.chdir(spec.directory)
    try:
        workload = load_workload(spec)
        return describe(workload) | {"args": defaults(spec.entry_file, spec.entry_function)}
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        fault = fault_of(error)
        return {"error": fault.message.rstrip(), "exit_code": fault.exit_code}


def describe(workload: Workload) -> dict[str, Any]:
    """Its model, unit by unit (name, class, number of parameters), and its data: samples, or why there is no number.

    Where the model is cut by its own forward nothing has been called, so these are the modules that may turn out units.
    """
    model, parameters = workload.model, list(workload.model.parameters())
    return {
        "model": type(model).__name__,
        "parameters": _count(model),
        "frozen": sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
        "bytes": sum(parameter.nbytes for parameter in parameters),
        "units": [(name, type(unit).__name__, _count(unit)) for name, unit in _units(workload)],
        "cut_by_calls": is_cut_by_calls(workload),
        "train": _num_samples(workload, "train"),
        "validation": None if workload.validation is None else _num_samples(workload, "validation"),
        "batch_size": _batch_size(workload),
    }


def _units(workload: Workload) -> list[tuple[str, nn.Module]]:
    if not is_cut_by_calls(workload):
        return [(prefix.rstrip("."), unit) for prefix, unit in units(workload.model)]
    visible = visible_modules(workload.model)
    return [(each.name, each.module) for each in visible if each.kind is CallKind.OPAQUE] or [("", workload.model)]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _num_samples(workload: Workload, field: Field) -> int | str:
    try:
        source = source_of(workload, field)
        return sum(_sizes(source)) if _makes_batches(source) else source.num_items
    except WorkloadError as error:
        return str(error)


def _batch_size(workload: Workload) -> int | None:
    """That of the user's DataLoader, or what its batches have on average."""
    if not isinstance(workload.train, DataLoader):
        return None
    try:
        source = source_of(workload, "train")
        return round(fmean(_sizes(source))) if _makes_batches(source) else workload.train.batch_size
    except WorkloadError:  # told elsewhere
        return None


def _makes_batches(source: DataSource) -> bool:
    return source.batches is not None or source.is_ready


def _sizes(source: DataSource) -> list[int]:
    """Of the user's batches of the first pass; of those that are ready, as if all were as large as the first."""
    source.order_of_pass(0, 0)
    if source.batches is not None:
        return source.batches.sizes(0)
    try:
        first = num_samples(flatten(source.collate([source.dataset[0]]))[0]) if source.collate else None
    except Exception:  # what the user's code raises is told where the job loads it
        first = None
    return [first or 1] * source.num_items


def defaults(file: Path, function: str) -> dict[str, Any]:
    """The function's arguments that have a default which a job file can hold, as the source has them."""
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) or None :]
            pairs: list[tuple[ast.arg, ast.expr | None]] = [*zip(names, node.args.defaults, strict=False)]
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            given = {name.arg: _literal(value) for name, value in pairs}
            return {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}
    return {}


def _literal(value: ast.expr | None) -> Any:
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
