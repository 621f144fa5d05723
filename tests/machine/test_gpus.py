"""The GPU inventory, with a double in the place of nvidia-ml-py: there is no GPU where these tests run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.machine.gpus import Peers, gpus, read_inventory


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class MadeUpNvml:
    """Two GPUs in one machine: an H-class one with everything, and one that answers the least that it may.

    init_error: what nvmlInit raises. alive: between nvmlInit and nvmlShutdown.
    """

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 3, 9, 12

    def __init__(self, count: int = 2, init_error: int | None = None, count_error: int | None = None) -> None:
        self.alive = False
        self._count, self._init_error, self._count_error = count, init_error, count_error

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise NVMLError(self._init_error)
        self.alive = True

    def nvmlShutdown(self) -> None:
        assert self.alive
        self.alive = False

    def nvmlDeviceGetCount(self) -> int:
        if self._count_error is not None:
            raise NVMLError(self._count_error)
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13020

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=24 << 30, free=(23 - handle) << 30)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x3B + handle:02X}:00.0")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "A GPU"

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, capability: int) -> int:
        assert isinstance(capability, int)
        return {0: 0, 2: 5}[capability]

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetPersistenceMode": 0,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77, usedGpuMemory=None)],
        }
        if name not in answers:
            raise AttributeError(name)

        def ask(handle: int) -> Any:
            if handle:
                raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
            return answers[name]

        return ask


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(nvml) -> puts it in the place of the pynvml module; None: the module is not installed."""
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_every_gpu_is_found_with_what_its_driver_tells(install: Any, tmp_path: Path) -> None:
    nvml = MadeUpNvml()
    install(nvml)
    node = tmp_path / "sys/bus/pci/devices/0000:3b:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    inventory = read_inventory(tmp_path)
    full, least = inventory.gpus
    assert (full.index, full.uuid, full.name, full.numa_node) == (0, "GPU-0", "A GPU", 1)
    assert (full.total_bytes, full.free_bytes, full.compute_capability) == (24 << 30, 23 << 30, (9, 0))
    assert (full.pcie_generation, full.max_pcie_generation, full.pcie_width) == (1, 5, 16)
    assert (full.ecc, full.persistence, full.mig) == (True, False, False)
    assert [(process.pid, process.bytes_used) for process in full.processes] == [(77, None)]
    assert (least.uuid, least.numa_node, least.pcie_width, least.ecc, least.processes) == (
        "GPU-1",
        None,
        None,
        None,
        (),
    )
    assert (inventory.driver, inventory.driver_cuda) == ("580.95.05", "13.2")
    assert (inventory.missing, inventory.reason) == (None, None)
    assert not nvml.alive


def test_who_reads_whose_memory_is_asked_for_each_pair(install: Any, tmp_path: Path) -> None:
    install(MadeUpNvml(count=3))
    peers = read_inventory(tmp_path).peers
    assert [(each.first, each.second) for each in peers] == [(0, 1), (0, 2), (1, 2)]
    assert peers[0] == Peers(first=0, second=1, access=True, nvlink=False)


def test_a_slot_without_a_node_of_its_own_has_none(install: Any, tmp_path: Path) -> None:
    install(MadeUpNvml(count=1))
    node = tmp_path / "sys/bus/pci/devices/0000:3b:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("-1\n")
    assert read_inventory(tmp_path).gpus[0].numa_node is None


def test_gpus_are_the_inventorys(install: Any) -> None:
    install(MadeUpNvml(count=1))
    assert [gpu.uuid for gpu in gpus()] == ["GPU-0"]


@pytest.mark.parametrize(
    ("nvml", "missing", "said"),
    [
        (None, "extra", "not installed"),
        (MadeUpNvml(init_error=12), "library", "libnvidia-ml.so.1"),
        (MadeUpNvml(init_error=9), "driver", "not loaded"),
        (MadeUpNvml(init_error=18), "driver", "error 18"),
        (MadeUpNvml(count_error=15), "driver", "error 15"),
        (MadeUpNvml(count=0), "device", "no GPU"),
    ],
    ids=["no package", "no library", "no module", "mismatch", "lost", "no device"],
)
def test_whatever_keeps_gpus_from_being_found_is_a_reason_and_no_error(
    install: Any, nvml: Any, missing: str, said: str
) -> None:
    install(nvml)
    inventory = read_inventory()
    assert (inventory.gpus, inventory.missing) == ((), missing)
    assert said in (inventory.reason or "")
    assert nvml is None or not nvml.alive


def test_the_real_package_has_every_name_that_is_asked_of_it() -> None:
    nvml = pytest.importorskip("pynvml")
    asked = {name for name in dir(MadeUpNvml) if name.startswith(("nvml", "NVML"))}
    asked |= {"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetEccMode"}
    asked |= {"nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth"}
    asked |= {"nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeRunningProcesses"}
    assert {name for name in asked if not hasattr(nvml, name)} == set()
    assert nvml.NVML_ERROR_LIBRARY_NOT_FOUND == MadeUpNvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert nvml.NVML_ERROR_DRIVER_NOT_LOADED == MadeUpNvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert (nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK) == (2, 0)


def test_this_machine_has_gpus_or_says_why_not() -> None:
    inventory = read_inventory()
    assert bool(inventory.gpus) == (inventory.reason is None)
