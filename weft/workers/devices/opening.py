"""Opening: a worker's device, by its name."""

from __future__ import annotations

import os

from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn


def open_device(name: str) -> Device:
    """name: "cpu", "stand-in", or a GPU's uuid. In a process that has not used CUDA."""
    if name == "cpu":
        return HostDevice()
    if name == "stand-in":
        return StandIn()
    os.environ["CUDA_VISIBLE_DEVICES"] = name
    from weft.workers.devices.cuda import CudaDevice

    return CudaDevice()
