"""Presets: published strategies (and our own) as rows of axis values. Data, and the table of it for the documentation.

A row names the axes that make the strategy what it is; any other axis keeps its default, and what a spec gives itself
counts before the row. `python -m weft.spec.presets` prints the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

AUTO: Final = "auto"  # in place of a row: the planner chooses one, and weft.spec.candidates has among which


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A row: `axes` as a spec's [strategy] table would give them, where they come from, and the idea in a sentence."""

    axes: Mapping[str, Any]
    source: str
    idea: str


def _row(source: str, idea: str, **axes: Any) -> Preset:
    return Preset(axes=MappingProxyType(axes), source=source, idea=idea)


_CPU, _GPU = {"device": "cpu"}, {"device": "gpu"}
_PIPELINE_AND_CPU = [{"device": "gpu", "stages": "all"}, {"device": "cpu", "microbatches": 1}]

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "model-parallel": _row(
            "Dean et al., Large Scale Distributed Deep Networks, section 3 (Model parallelism), NIPS 2012",
            "The model is cut over the workers, and the whole batch goes through one stage after the other.",
            stages=2,
            microbatches=1,
        ),
        "gpipe": _row(
            "Huang et al., GPipe, section 2 (The GPipe Library), NeurIPS 2019",
            "Microbatches fill the pipeline: all forwards, then all backwards, then one update.",
            schedule="gpipe",
            stages=2,
            microbatches=4,
        ),
        "1f1b": _row(
            "Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (PipeDream-Flush), ICML 2021",
            "After its warm-up a stage alternates one forward and one backward, so it keeps few activations.",
            schedule="1f1b",
            stages=2,
            microbatches=4,
        ),
        "ddp": _row(
            "Li et al., PyTorch Distributed, section 3.2 (Gradient Reduction), VLDB 2020",
            "Equal replicas reduce the gradients bucket by bucket while backward still computes the earlier ones.",
            replicas=2,
            stages=1,
            sync="fine",
            update="local",
            share="fixed",
        ),
        "parameter-server": _row(
            "Li et al., Scaling Distributed Machine Learning with the Parameter Server (bounded delay), OSDI 2014; "
            "Ho et al., Stale Synchronous Parallel Parameter Server (bounded staleness), NIPS 2013",
            "The CPU holds and updates the parameters, and a replica may run ahead of the newest ones by a bound.",
            replicas=2,
            stages=1,
            sync="fine",
            staleness=1,
            update="cpu",
        ),
        "zero-offload": _row(
            "Ren et al., ZeRO-Offload, section 4.1 (Single GPU Schedule), USENIX ATC 2021",
            "The GPU computes gradients and streams them down during backward; the CPU does the update.",
            replicas=[_GPU],
            sync="fine",
            update="cpu",
        ),
        "cotrain": _row(
            "Li et al., CoTrain (fine-grained task partition by data reuse distance), ICPP 2023",
            "The update is divided: the GPU does what its next forward needs first, the CPU the rest beside it.",
            replicas=[_GPU],
            sync="fine",
            update="balanced",
        ),
        "stronghold": _row(
            "Sun et al., STRONGHOLD (working window, asynchronous offloading), SC 2022",
            "The GPU holds a window of layers; parameters and optimizer state stay in host memory and stream through.",
            replicas=[{"device": "gpu", "working_window": "auto"}],
            sync="fine",
            update="cpu",
            recompute=True,
        ),
        "hyscale": _row(
            "Lin and Prasanna, HyScale-GNN (hybrid training, two-stage prefetching, dynamic resource management), "
            "IPDPS 2023",
            "CPU and GPU train side by side, shares follow their measured speeds, and loading and transfer run ahead.",
            replicas=[_GPU, _CPU],
            share="adaptive",
            update="local",
            prefetch={"load": 2, "transfer": 2},
        ),
        "hybrid-coarse": _row(
            "Weft's own",
            "A CPU replica beside a GPU pipeline: gradients are exchanged after all backwards, and each side updates.",
            microbatches=4,
            replicas=_PIPELINE_AND_CPU,
            sync="coarse",
            update="local",
            share="adaptive",
        ),
        "hybrid-fine": _row(
            "Weft's own",
            "The same, each bucket exchanged and updated on both sides once its gradients exist, beside the backwards.",
            microbatches=4,
            replicas=_PIPELINE_AND_CPU,
            sync="fine",
            update="local",
            share="adaptive",
        ),
    }
)


def presets_table() -> str:
    """The rows in Markdown: a column for each axis that some row names (empty: the axis's default), idea and source."""
    axes = list(dict.fromkeys(axis for preset in PRESETS.values() for axis in preset.axes))
    lines = [_line(["preset", *axes, "idea", "source"]), _line(["---"] * (len(axes) + 3))]
    for name, preset in PRESETS.items():
        values = [_cell(preset.axes[axis]) if axis in preset.axes else "" for axis in axes]
        lines.append(_line([f"`{name}`", *values, preset.idea, preset.source]))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    match value:
        case list():
            return " + ".join(_cell(replica) for replica in value)
        case {"device": device, **axes}:
            return f"1 {device}" + (f" ({_cell(axes)})" if axes else "")
        case dict():
            return ", ".join(f"{key} {part}" for key, part in value.items())
        case _:
            return str(value)


if __name__ == "__main__":
    print(presets_table(), end="")
