"""Trained: what a completed job has left, for the code that asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weft.metrics.recording.step_log import FILE, StepLog, read_step_log
from weft.transport.wire.frames import Message

if TYPE_CHECKING:
    import torch
    from torch import nn

MODEL = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A job that is completed. Its files stay in `run_dir`, and are read when they are asked for."""

    job: str
    steps: int  # training steps
    loss: float | None  # of the last step; None where it was not finite
    validation: Mapping[str, float]  # the newest means over the validation data; empty without such data
    seconds: float  # from when it first had workers to its end, pauses among them
    run_dir: Path
    model: Path  # the trained weights, in safetensors, by the names of the model's state dict

    @classmethod
    def of(cls, result: Message) -> Self:
        """From the result that a client's `wait` returns."""
        known: dict[str, Any] = {name: result[name] for name in ("job", "steps", "loss", "validation", "seconds")}
        run_dir = Path(result["run_dir"])
        return cls(**known, run_dir=run_dir, model=Path(result["model"] or run_dir / MODEL))

    @cached_property
    def history(self) -> StepLog:
        """Every training step and every validation, as metrics.jsonl has them. Errors: OSError, StepLogError."""
        return read_step_log(self.run_dir / FILE)

    @property
    def losses(self) -> list[float | None]:
        """The loss of each training step, None where it was not finite. Errors: as of `history`, like the next."""
        return [step.loss for step in self.history.steps]

    @property
    def validations(self) -> list[Mapping[str, float | None]]:
        """The means of each validation: one for each epoch, and the one at the end."""
        return [validation.values for validation in self.history.validations]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The trained weights on the CPU; imports torch. Errors: OSError."""
        from safetensors.torch import load_file

        return load_file(self.model)

    def load_into(self, model: nn.Module) -> nn.Module:
        """Gives a model of the same class the trained weights, and returns it. What a module tells as its extra state
        stays as it is: the file has tensors alone. Errors: OSError; torch's RuntimeError for a model whose state dict
        has other names or shapes."""
        extra = {name: each for name, each in model.state_dict().items() if name.endswith("_extra_state")}
        model.load_state_dict(extra | self.state_dict())
        return model
