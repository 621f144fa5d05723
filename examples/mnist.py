"""An MLP on MNIST, from the files in which it is published: IDX format, gzipped or plain."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import nn

import weft

IMAGES_MAGIC = 0x0803  # two zero bytes, 0x08 for unsigned bytes, the number of dimensions
LABELS_MAGIC = 0x0801
SIDE = 28
NUM_CLASSES = 10


def workload(
    images: str,
    labels: str,
    validation: int = 1000,
    hidden: int = 256,
    layers: int = 2,
    learning_rate: float = 1e-3,
) -> weft.Workload:
    """`layers` hidden layers of `hidden`, trained on all but the last `validation` samples, which measure accuracy.

    images, labels: IDX files; relative paths start at this file's own directory. Raises ValueError for files that are
    not as they should be and for arguments out of range.
    """
    inputs, targets = load_mnist(_resolved("images", images), _resolved("labels", labels))
    if not 0 <= validation < len(inputs):
        raise ValueError(f"validation = {validation}: give at least 0 and less than the {len(inputs)} samples")
    num_train = len(inputs) - validation
    return weft.Workload(
        model=mlp(hidden, layers),
        loss=nn.CrossEntropyLoss(),
        train=(inputs[:num_train], targets[:num_train]),
        validation=(inputs[num_train:], targets[num_train:]) if validation else None,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=learning_rate),
        metrics={"accuracy": accuracy},
    )


def mlp(hidden: int, layers: int) -> nn.Sequential:
    """Linear and ReLU `layers` times, then the output layer."""
    if hidden < 1 or layers < 1:
        raise ValueError(f"hidden = {hidden}, layers = {layers}: give at least 1 of each")
    sizes = [SIDE * SIDE, *[hidden] * layers]
    body = [unit for i in range(layers) for unit in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(hidden, NUM_CLASSES))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The share of samples whose largest output is the target's."""
    return (output.argmax(dim=1) == target).float().mean()


def load_mnist(images: Path, labels: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 784) float32 in 0 to 1 and (N,) int64; raises ValueError for files that are not MNIST."""
    inputs = read_idx(images, IMAGES_MAGIC)
    targets = read_idx(labels, LABELS_MAGIC)
    if inputs.shape[1:] != (SIDE, SIDE):
        found = " x ".join(map(str, inputs.shape[1:]))
        raise ValueError(f"{images}: expected images of {SIDE} x {SIDE}, found {found}")
    if len(inputs) != len(targets):
        raise ValueError(
            f"{labels}: expected {len(inputs)} labels, as many as {images} has images, found {len(targets)}"
        )
    if len(inputs) == 0:
        raise ValueError(f"{images}: expected at least 1 image, found 0")
    if int(targets.max()) >= NUM_CLASSES:
        raise ValueError(f"{labels}: expected labels below {NUM_CLASSES}, found {int(targets.max())}")
    return inputs.flatten(1).float() / 255, targets.long()


def read_idx(path: Path, magic: int) -> torch.Tensor:
    """The unsigned bytes of an IDX file, in its shape. Layout, all integers big-endian:

        magic (4 bytes) | size of each dimension (4 bytes each; how many is the magic's last byte) | data

    Raises ValueError that names the file and both numbers, expected and found.
    """
    content = _content(path)
    if len(content) < 4:
        raise ValueError(f"{path}: expected a header of at least 4 bytes, found {len(content)}; the file is cut short")
    found = int.from_bytes(content[:4], "big")
    if found != magic:
        raise ValueError(f"{path}: expected magic number {magic:#010x}, found {found:#010x}; are the files swapped?")
    num_dimensions = magic & 0xFF
    header_bytes = 4 + 4 * num_dimensions
    if len(content) < header_bytes:
        raise ValueError(
            f"{path}: expected a header of {header_bytes} bytes, found {len(content)}; the file is cut short"
        )
    shape = struct.unpack(f">{num_dimensions}I", content[4:header_bytes])
    expected, found = math.prod(shape), len(content) - header_bytes
    if found != expected:
        fault = "the file is cut short" if found < expected else "there is something after the data"
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"{path}: expected {expected} bytes of data ({sizes}), found {found}; {fault}")
    if expected == 0:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header_bytes).view(shape)


def _content(path: Path) -> bytes:
    """The file's bytes, unzipped if its first two say that it is gzipped, whatever its name."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the path of an IDX file") from None
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); its {len(content)} bytes are damaged") from None


def _resolved(name: str, path: str) -> Path:
    if not path or "\0" in path:
        raise ValueError(f"{name} = {path!r}: give the path of an IDX file")
    return Path(__file__).resolve().parent / path
