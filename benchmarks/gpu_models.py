"""The models of the GPU benchmarks: GPTs by size, and what can be said of one without building it. Pure.

    name   layers   dim    heads   parameters
    0.1b       12    768      12      98 million
    1b         24   1856      29   1,025 million
    4b         32   3200      25   3,989 million

With a vocabulary of 8192 and learned positions, every weight trained. State is in float32: 16 bytes of a parameter, its
value, its gradient and Adam's two averages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

VOCABULARY = 8192
CONTEXT = 1024
STATE_BYTES = 16  # of a parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """The arguments of gpu_gpt_job.py that make the model."""

    layers: int
    dim: int
    heads: int
    context: int = CONTEXT
    vocabulary: int = VOCABULARY

    def num_parameters(self) -> int:
        """Of examples/gpt.py: embeddings and positions, the blocks, the head with its norm."""
        block = 12 * self.dim**2 + 13 * self.dim
        head = 2 * self.dim + self.vocabulary * (self.dim + 1)
        return (self.vocabulary + self.context) * self.dim + self.layers * block + head

    def state_bytes(self) -> int:
        return STATE_BYTES * self.num_parameters()

    def with_layers(self, layers: int) -> Gpt:
        return replace(self, layers=layers)

    def args(self, **others: Any) -> dict[str, Any]:
        """Of the job. others: beside the model's."""
        return asdict(self) | others

    def __str__(self) -> str:
        billions = self.num_parameters() / 1e9
        shape = f"layers {self.layers}, dim {self.dim}, heads {self.heads}, context {self.context}"
        return f"GPT of {billions:.3g} B parameters: {shape}, vocabulary {self.vocabulary}"


SIZES = {
    "0.1b": Gpt(layers=12, dim=768, heads=12),
    "1b": Gpt(layers=24, dim=1856, heads=29),
    "4b": Gpt(layers=32, dim=3200, heads=25),
}
TINY = Gpt(layers=2, dim=32, heads=2, context=32, vocabulary=256)  # for stand-ins
