"""A decoder-only transformer that learns to continue text, byte by byte.

Shapes, as suffixes: B samples, T positions (context), D width (dim), H heads, V vocabulary.
"""

from __future__ import annotations

import math
import sysconfig
from collections import OrderedDict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import weft

NUM_BYTES = 256
CORPUS_BYTES = 2_000_000  # arbitrary: enough that some thousand steps see nothing twice
INITIAL_DEVIATION = 0.02  # Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), 2019


def workload(
    path: str = "",
    layers: int = 4,
    dim: int = 64,
    heads: int = 4,
    context: int = 64,
    vocabulary: int = NUM_BYTES,
    dropout: float = 0.1,
    samples: int = 2000,
    validation_samples: int = 100,
    learning_rate: float = 1e-3,
) -> weft.Workload:
    """A transformer of layers + 2 units, trained on windows of text spread evenly over its first nine tenths.

    path: a file; a relative one starts at this file's directory; without one, the Python standard library's sources.
    vocabulary: size of the embedding and of the output; text is bytes, so entries above 256 learn nothing.
    samples, validation_samples: windows of `context` bytes; those for validation come from the last tenth.
    Raises ValueError for arguments out of range and text that is too short.
    """
    _check_shape(layers, dim, heads, context, vocabulary, dropout)
    train_text, held_out = _split(_text(path), context, path or "the standard library's sources")
    return weft.Workload(
        model=gpt(layers, dim, heads, context, vocabulary, dropout),
        loss=cross_entropy,
        train=Windows(train_text, context, _at_least("samples", samples, 1)),
        validation=(
            Windows(held_out, context, validation_samples)
            if _at_least("validation_samples", validation_samples, 0)
            else None
        ),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        metrics={"bits_per_byte": bits_per_byte},
    )


def gpt(layers: int, dim: int, heads: int, context: int, vocabulary: int, dropout: float) -> nn.Sequential:
    """int64 (B, T) -> logits (B, T, V)."""
    blocks = [(f"block{i}", Block(dim, heads, dropout)) for i in range(layers)]
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            [("embedding", Embedding(vocabulary, context, dim, dropout)), *blocks, ("head", Head(dim, vocabulary))]
        )
    )
    model.apply(_initialise)
    return model


class Embedding(nn.Module):
    """int64 (B, T) -> (B, T, D): what each token is, plus where it stands."""

    def __init__(self, vocabulary: int, context: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        position_TD = self.position.weight[: tokens_BT.shape[1]]
        hidden_BTD: torch.Tensor = self.dropout(self.token(tokens_BT) + position_TD)
        return hidden_BTD


class Block(nn.Module):
    """(B, T, D) -> (B, T, D): attention, then an MLP, each added to what it was given."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(dim), CausalAttention(dim, heads, dropout), nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        attended_BTD: torch.Tensor = hidden_BTD + self.attention(hidden_BTD)
        mixed_BTD: torch.Tensor = self.mlp(attended_BTD)
        return attended_BTD + mixed_BTD


class CausalAttention(nn.Module):
    """(B, T, D) -> (B, T, D): each position looks at itself and at those before it."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        query_key_value = self.query_key_value(hidden_BTD).unflatten(-1, (3, self.heads, -1))
        query, key, value = query_key_value.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed_BTD: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return mixed_BTD


class Head(nn.Module):
    """(B, T, D) -> logits (B, T, V)."""

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocabulary)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        logits_BTV: torch.Tensor = self.output(self.norm(hidden_BTD))
        return logits_BTV


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`count` windows, spread evenly over the text: int64 (T,) inputs and the same moved on by one as targets."""

    def __init__(self, text: torch.Tensor, context: int, count: int) -> None:
        self._text = text
        self._context = context
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * (len(self._text) - self._context) // self._count
        window = self._text[start : start + self._context + 1].long()
        return window[:-1], window[1:]


def cross_entropy(logits_BTV: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
    """Mean over all positions, in nats; every sample has as many, so it is the mean over samples, too."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def bits_per_byte(logits_BTV: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
    """The mean number of bits that a coder with these predictions would write for a byte; 8 is no prediction at all."""
    return cross_entropy(logits_BTV, target_BT) / math.log(2)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _check_shape(layers: int, dim: int, heads: int, context: int, vocabulary: int, dropout: float) -> None:
    for name, value in (("layers", layers), ("dim", dim), ("heads", heads), ("context", context)):
        _at_least(name, value, 1)
    if dim % heads:
        raise ValueError(f"dim = {dim} is not divisible by heads = {heads}; each head takes dim / heads of the width")
    if vocabulary < NUM_BYTES:
        raise ValueError(f"vocabulary = {vocabulary}: text is bytes, give at least {NUM_BYTES}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout = {dropout}: give at least 0 and less than 1")


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{name} = {value}: give at least {least}")
    return value


def _text(path: str) -> torch.Tensor:
    """uint8 (N,): the file's bytes, or the first `CORPUS_BYTES` of the standard library's modules in order of name."""
    if not path:
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        content = b"".join(module.read_bytes() for module in modules)[:CORPUS_BYTES]
    else:
        try:
            content = (Path(__file__).resolve().parent / path).read_bytes()
        except (OSError, ValueError) as error:
            raise ValueError(f"path = {path!r}: cannot be read ({error}); give the path of a text file") from None
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _split(text: torch.Tensor, context: int, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first nine tenths and the last tenth, which has at least one window, too."""
    window = context + 1  # the last position's target is one further
    if len(text) < 2 * window:
        raise ValueError(
            f"{source}: {len(text)} bytes of text, but context = {context} takes at least {2 * window}, "
            "one window to train on and one to validate"
        )
    num_held_out = max(len(text) // 10, window)
    return text[:-num_held_out], text[-num_held_out:]
