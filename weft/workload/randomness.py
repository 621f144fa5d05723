"""Random numbers keyed by what they are for: (seed, step, microbatch, unit), never by who ran what when.

Before a unit of the model runs forward (or forward again, under recompute), torch's default CPU generator is seeded
with its key. So dropout masks are the same for any number of stages, any schedule and any order of execution.
"""

from __future__ import annotations

import torch

LOADING = -1  # stands for the unit in the key of random numbers that a dataset draws (augmentation)

KEY_MASK = (1 << 64) - 1


def unit_key(seed: int, step: int, microbatch: int, unit: int) -> int:
    """A 64-bit key from the four numbers (the finalizer of SplitMix64; Steele, Lea and Flood, OOPSLA 2014, fig. 17)."""
    return mixed(mixed(mixed(seed & KEY_MASK, step), microbatch), unit)


def mixed(key: int, part: int) -> int:
    """A key with one more number."""
    key = (key + part + 1) * 0x9E3779B97F4A7C15 & KEY_MASK
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & KEY_MASK
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & KEY_MASK
    return key ^ (key >> 31)


def seed_unit(seed: int, step: int, microbatch: int, unit: int) -> None:
    """Seeds torch's default CPU generator for one unit of the model, in about 2 microseconds."""
    torch.default_generator.manual_seed(unit_key(seed, step, microbatch, unit))
