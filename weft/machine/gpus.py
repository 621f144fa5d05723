"""The GPUs of this machine, as NVIDIA's management library (NVML) tells them: without CUDA, torch or a context on any.

NVML counts every GPU that this process may see, in the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says; CUDA
may number them otherwise. So a GPU is named to CUDA by its uuid. Package nvidia-ml-py, the extra weft[gpu].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

# Not nvidia-ml-py's own NVML_P2P_CAPS_INDEX_READ: a stray comma makes that a tuple.
_P2P_READ, _P2P_NVLINK, _P2P_OK = 0, 2, 0

Missing = Literal["extra", "library", "driver", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    pid: int
    bytes_used: int | None  # None where the driver does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """None: the driver does not tell."""

    index: int  # NVML's
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    numa_node: int | None  # that its slot is on
    pci_address: str
    compute_capability: tuple[int, int] | None
    pcie_generation: int | None
    max_pcie_generation: int | None
    pcie_width: int | None
    max_pcie_width: int | None
    ecc: bool | None
    persistence: bool | None
    mig: bool | None
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Two GPUs, by index."""

    first: int
    second: int
    access: bool | None  # one can read the other's memory
    nvlink: bool | None  # over NVLink, not the PCI bus


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[Peers, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that it serves
    missing: Missing | None = None  # set where there are no GPUs, with
    reason: str | None = None  # a sentence


def gpus() -> list[Gpu]:
    return list(read_inventory().gpus)


def read_inventory(root: Path = Path("/")) -> Inventory:
    """Never raises: whatever keeps the GPUs from being found is the inventory's `reason`."""
    try:
        import pynvml as nvml
    except ImportError:
        return Inventory(missing="extra", reason="nvidia-ml-py, which finds GPUs, is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _nothing(nvml, error)
    try:
        return _take(nvml, root)
    except nvml.NVMLError as error:
        return Inventory(missing="driver", reason=f"the NVIDIA driver does not answer: {error}")
    finally:
        nvml.nvmlShutdown()


def _nothing(nvml: Any, error: Any) -> Inventory:
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return Inventory(missing="library", reason="there is no NVIDIA driver library (libnvidia-ml.so.1)")
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return Inventory(missing="driver", reason="the NVIDIA kernel module is not loaded")
    return Inventory(missing="driver", reason=f"the NVIDIA driver cannot be used: {error}")


def _take(nvml: Any, root: Path) -> Inventory:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda = _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    found = tuple(_gpu(nvml, index, handle, root) for index, handle in enumerate(handles))
    return Inventory(
        gpus=found,
        peers=tuple(
            _peers(nvml, handles, first, second)
            for first in range(len(found))
            for second in range(first + 1, len(found))
        ),
        driver=_asked(nvml, nvml.nvmlSystemGetDriverVersion),
        driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        missing=None if found else "device",
        reason=None if found else "the NVIDIA driver has no GPU that this process may use",
    )


def _gpu(nvml: Any, index: int, handle: Any, root: Path) -> Gpu:
    def ask(call: Callable[..., T]) -> T | None:
        return _asked(nvml, call, handle)

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    address = nvml.nvmlDeviceGetPciInfo(handle).busId
    ecc, mig = ask(nvml.nvmlDeviceGetEccMode), ask(nvml.nvmlDeviceGetMigMode)
    persistence = ask(nvml.nvmlDeviceGetPersistenceMode)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        free_bytes=memory.free,
        numa_node=_numa_node(root, address),
        pci_address=address,
        compute_capability=_pair(ask(nvml.nvmlDeviceGetCudaComputeCapability)),
        pcie_generation=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        max_pcie_generation=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        max_pcie_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        ecc=None if ecc is None else bool(ecc[0]),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
        processes=tuple(
            GpuProcess(pid=process.pid, bytes_used=process.usedGpuMemory)
            for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        ),
    )


def _peers(nvml: Any, handles: list[Any], first: int, second: int) -> Peers:
    def can(capability: int) -> bool | None:
        status = _asked(nvml, nvml.nvmlDeviceGetP2PStatus, handles[first], handles[second], capability)
        return None if status is None else bool(status == _P2P_OK)

    return Peers(first=first, second=second, access=can(_P2P_READ), nvlink=can(_P2P_NVLINK))


def _asked(nvml: Any, call: Callable[..., T], *arguments: Any) -> T | None:
    """The answer, or None where this GPU or driver has none."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _pair(numbers: Any) -> tuple[int, int] | None:
    return None if numbers is None else (int(numbers[0]), int(numbers[1]))


def _numa_node(root: Path, address: str) -> int | None:
    """address: NVML's 00000000:3B:00.0, in /sys 0000:3b:00.0."""
    domain, _, rest = address.lower().partition(":")
    try:
        text = (root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text(encoding="utf-8")
    except OSError:
        return None
    return node if (node := int(text)) >= 0 else None
