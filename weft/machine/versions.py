"""Versions of what Weft runs on, without importing any of it."""

from __future__ import annotations

import ast
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("torch", "numpy", "uvloop", "msgpack", "pydantic", "aiohttp", "prometheus-client", "psutil", "safetensors")
EXTRAS = {"gpu": "nvidia-ml-py", "plots": "matplotlib", "tensorboard": "tensorboard", "examples": "scikit-learn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    python: str
    kernel: str
    weft: str
    packages: dict[str, str | None]  # versions, None for what is not installed
    extras: dict[str, str | None]  # the version of the package behind each
    torch_cuda: str | None  # the CUDA version that torch was built for, None for a build without


def read_software() -> Software:
    from weft.version import __version__

    return Software(
        python=platform.python_version(),
        kernel=platform.release(),
        weft=__version__,
        packages={name: _version(name) for name in PACKAGES},
        extras={extra: _version(name) for extra, name in EXTRAS.items()},
        torch_cuda=torch_cuda(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built for; None without, or without torch.

    From the text of torch/version.py: importing torch would take seconds.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        lines = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return None
    return constant(lines, "cuda")


def constant(lines: list[ast.stmt], name: str) -> str | None:
    """The text that a module's assignment gives the name, with or without a type."""
    for line in lines:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(line, (ast.Assign, ast.AnnAssign)) and isinstance(line.value, ast.Constant):
            return line.value.value if isinstance(line.value.value, str) else None
    return None
