from __future__ import annotations

import gzip
import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from weft.reference.loop import train
from weft.spec.job_spec import JobSpec

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "examples" / "mnist.toml"
DATA = ROOT.parent / "shared" / "data"
IMAGES = DATA / "t10k-images-idx3-ubyte.gz"
LABELS = DATA / "t10k-labels-idx1-ubyte.gz"

needs_mnist = pytest.mark.skipif(not (IMAGES.exists() and LABELS.exists()), reason="no MNIST files in ../shared/data")

PIXELS = bytes(range(256)) * 10
TWO_IMAGES = struct.pack(">IIII", 0x0803, 2, 28, 28) + PIXELS[: 2 * 784]
TWO_LABELS = struct.pack(">II", 0x0801, 2) + bytes([7, 3])


@pytest.fixture(scope="module")
def mnist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weft_example_mnist", ROOT / "examples" / "mnist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Files = Callable[..., dict[str, str]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Writes the two files and gives the arguments that name them."""

    def write(images: bytes = TWO_IMAGES, labels: bytes = TWO_LABELS) -> dict[str, str]:
        (tmp_path / "images").write_bytes(images)
        (tmp_path / "labels").write_bytes(labels)
        return {"images": str(tmp_path / "images"), "labels": str(tmp_path / "labels")}

    return write


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_images_and_labels_are_read_as_they_were_written(mnist: ModuleType, files: Files, pack: Any) -> None:
    workload = mnist.workload(**files(pack(TWO_IMAGES), pack(TWO_LABELS)), validation=1)
    (inputs, targets), (held_out, held_out_targets) = workload.train, workload.validation
    pixels = torch.tensor(list(PIXELS[: 2 * 784]), dtype=torch.float32).view(2, 784) / 255
    assert torch.equal(torch.cat([inputs, held_out]), pixels)
    assert (targets.tolist(), held_out_targets.tolist()) == ([7], [3])


def test_without_validation_samples_there_is_no_validation(mnist: ModuleType, files: Files) -> None:
    workload = mnist.workload(**files(), validation=0)
    assert workload.validation is None
    assert len(workload.train[0]) == 2


BROKEN: dict[str, tuple[bytes, bytes, str]] = {
    "empty": (b"", TWO_LABELS, "images: expected a header of at least 4 bytes, found 0"),
    "magic": (
        TWO_LABELS,
        TWO_LABELS,
        "images: expected magic number 0x00000803, found 0x00000801; are the files swapped",
    ),
    "swapped": (TWO_IMAGES, TWO_IMAGES, "labels: expected magic number 0x00000801, found 0x00000803"),
    "header": (TWO_IMAGES[:15], TWO_LABELS, "images: expected a header of 16 bytes, found 15; the file is cut short"),
    "body": (
        TWO_IMAGES[:-1],
        TWO_LABELS,
        r"images: expected 1568 bytes of data \(2 x 28 x 28\), found 1567; .* cut short",
    ),
    "no body": (TWO_IMAGES[:16], TWO_LABELS, "images: expected 1568 bytes of data .*, found 0"),
    "trailing": (TWO_IMAGES, TWO_LABELS + b"x", r"labels: expected 2 bytes of data \(2\), found 3; .* after the data"),
    "size": (struct.pack(">IIII", 0x0803, 2, 8, 9) + PIXELS[:144], TWO_LABELS, "images of 28 x 28, found 8 x 9"),
    "count": (TWO_IMAGES, struct.pack(">II", 0x0801, 1) + b"\7", "labels: expected 2 labels, as many as .*, found 1"),
    "none": (struct.pack(">IIII", 0x0803, 0, 28, 28), struct.pack(">II", 0x0801, 0), "at least 1 image, found 0"),
    "label": (TWO_IMAGES, TWO_LABELS[:-1] + b"\x0a", "labels: expected labels below 10, found 10"),
    "huge": (
        struct.pack(">IIII", 0x0803, *[2**32 - 1] * 3),
        TWO_LABELS,
        "images: expected .* bytes of data .*, found 0",
    ),
    "gzip": (gzip.compress(TWO_IMAGES)[:-9], TWO_LABELS, "images: not a whole gzip file .* bytes are damaged"),
    "gzip sum": (gzip.compress(TWO_IMAGES)[:-8] + bytes(8), TWO_LABELS, "images: not a whole gzip file .*CRC"),
    "gzip data": (gzip.compress(TWO_IMAGES)[:10] + b"\xff" * 40, TWO_LABELS, "images: not a whole gzip file"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_named_with_what_was_expected_and_what_was_found(
    mnist: ModuleType, files: Files, fault: str
) -> None:
    images, labels, text = BROKEN[fault]
    with pytest.raises(ValueError, match=text):
        mnist.workload(**files(images, labels), validation=1)


@pytest.mark.parametrize("path", ["no/such/file", ".", "", "a\0b"])
def test_a_path_that_is_no_file_is_named_with_a_remedy(mnist: ModuleType, files: Files, path: str) -> None:
    with pytest.raises(ValueError, match="give the path of an IDX file"):
        mnist.workload(images=path, labels=files()["labels"])


def test_a_relative_path_starts_at_the_examples_own_directory(mnist: ModuleType) -> None:
    with pytest.raises(ValueError, match=str(ROOT / "examples" / "data" / "images")):
        mnist.workload(images="data/images", labels="data/labels")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"validation": 2}, "validation = 2: give at least 0 and less than the 2 samples"),
        ({"validation": -1}, "validation = -1"),
        ({"validation": 1, "hidden": 0}, "hidden = 0, layers = 2: give at least 1 of each"),
        ({"validation": 1, "layers": 0}, "layers = 0"),
    ],
)
def test_an_argument_out_of_range_is_named_with_its_value(
    mnist: ModuleType, files: Files, arguments: dict[str, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        mnist.workload(**files(), **arguments)


def shipped(*overrides: str) -> JobSpec:
    files = [f'job.args.images="{IMAGES}"', f'job.args.labels="{LABELS}"', "job.args.validation=1000"]
    return JobSpec.load(SPEC, [*files, *overrides])


@needs_mnist
def test_an_epoch_over_9000_real_digits_reads_most_of_the_others() -> None:
    result = train(shipped("job.epochs=1", "job.args.hidden=64"))
    assert len(result.losses) == 90
    assert result.validations[0]["accuracy"] > 0.75
