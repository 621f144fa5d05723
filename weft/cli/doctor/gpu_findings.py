"""What is amiss with the GPUs and what they need, from the machine's facts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.cli.doctor.facts import Facts
from weft.cli.doctor.finding import Finding, counted, mebibytes, note, ok, problem
from weft.machine.gpus import Gpu

PINNED_BYTES = 1 << 30  # page-locked arenas of some 60 million parameters; arbitrary beyond "more than the usual 8 MiB"
MOST_PIDS = 8  # in a sentence
_INSTALL_EXTRA = "pip install 'weft[gpu]'"


def check_gpus(facts: Facts) -> Iterable[Finding]:
    inventory, cards = facts.inventory, facts.machine.num_nvidia_cards
    if facts.crew_error is not None:
        yield problem(
            "gpus", f"The daemon does not start: {facts.crew_error}.", "Change gpus in weft.toml or WEFT_GPUS."
        )
    if inventory.gpus:
        yield ok("gpus", f"{len(inventory.gpus)} found, driver {inventory.driver or 'unknown'}.")
        return
    stand_ins = "GPU strategies can be tried on the CPU: --stand-ins 1."
    if not cards:
        yield note("gpus", f"There is no NVIDIA GPU on the PCI bus ({inventory.reason}).", stand_ins)
        return
    there = f"{counted(cards, 'NVIDIA card')} on the PCI bus, but"
    remedy = {
        "extra": f"{_INSTALL_EXTRA}.",
        "library": "Install NVIDIA's driver; in a container, start it with the GPUs (docker run --gpus all).",
        "driver": "modprobe nvidia; after an update of the driver, restart the machine.",
        "device": "Start the container or unit with the GPUs (docker run --gpus all, DeviceAllow=char-nvidia).",
    }[inventory.missing or "device"]
    yield problem("gpus", f"{there} {inventory.reason}.", remedy)


def check_cuda(facts: Facts) -> Iterable[Finding]:
    if not facts.inventory.gpus:
        return
    built, serves = facts.software.torch_cuda, facts.inventory.driver_cuda
    if built is None:
        yield problem(
            "cuda",
            f"PyTorch {facts.software.packages.get('torch')} is built without CUDA: it uses no GPU.",
            "Install a build of PyTorch for CUDA in this environment.",
        )
    elif serves is not None and int(serves.partition(".")[0]) < int(built.partition(".")[0]):
        yield problem(
            "cuda",
            f"PyTorch is built for CUDA {built}, and driver {facts.inventory.driver} serves {serves} at most: no "
            "GPU is used.",
            f"Update the driver, or install a build of PyTorch for CUDA {serves.partition('.')[0]}.",
        )
    else:
        yield ok("cuda", f"PyTorch is built for CUDA {built}; the driver serves {serves or 'an unknown version'}.")
    if facts.visible_gpus is not None:
        yield note(
            "cuda",
            f"CUDA_VISIBLE_DEVICES is {facts.visible_gpus!r:.80}: PyTorch sees these GPUs only.",
            "Unset it to use them all.",
        )


def check_page_locking(facts: Facts) -> Iterable[Finding]:
    """No problem, since current NVIDIA drivers do not count what CUDA page-locks; RDMA and mlock do."""
    limit = facts.limits.memlock_bytes
    if limit is None:
        yield ok("page-locking", "RLIMIT_MEMLOCK does not limit page-locked memory.")
    elif not facts.inventory.gpus:
        yield ok("page-locking", f"RLIMIT_MEMLOCK is {mebibytes(limit)}, which would matter with a GPU only.")
    elif limit < PINNED_BYTES:
        yield note(
            "page-locking",
            f"RLIMIT_MEMLOCK is {mebibytes(limit)}: where the driver counts page-locked arenas against it, they are "
            "refused, and copies to and from the GPU no longer run beside computation.",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit (Weft's own units have it).",
        )
    else:
        yield ok("page-locking", f"RLIMIT_MEMLOCK is {mebibytes(limit)}.")


def check_each_gpu(facts: Facts) -> Iterable[Finding]:
    workers = (facts.daemon.status or {}).get("workers", ())
    for gpu in facts.inventory.gpus:
        yield from _gpu(gpu, {worker["pid"] for worker in workers})


def _gpu(gpu: Gpu, ours: set[int]) -> Iterable[Finding]:
    check = f"gpu-{gpu.index}"
    notes = []
    if gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width:
        notes.append(
            note(
                check,
                f"{gpu.name} has {gpu.pcie_width} of its {gpu.max_pcie_width} PCIe lanes: copies take "
                f"{gpu.max_pcie_width / gpu.pcie_width:.2g} times as long.",
                "Look again while it is busy; then move it to another slot, or look at the slot's settings.",
            )
        )
    strangers = [process for process in gpu.processes if process.pid not in ours]
    if strangers:
        used = sum(process.bytes_used or 0 for process in strangers)
        notes.append(
            note(
                check,
                f"{mebibytes(used)} of the memory of {gpu.name}, and part of its time, go to "
                f"{counted(len(strangers), 'other process')}.",
                f"Look at {', '.join(str(process.pid) for process in strangers[:MOST_PIDS])}.",
            )
        )
    if gpu.persistence is False:
        notes.append(
            note(
                check,
                f"{gpu.name} is without persistence mode: its first use after a pause takes seconds.",
                "nvidia-smi -pm 1, as root.",
            )
        )
    if gpu.mig:
        notes.append(
            note(
                check,
                f"{gpu.name} is divided (MIG): a process sees one part of it, and its memory is that part's.",
                "nvidia-smi -mig 0, as root, to have it whole.",
            )
        )
    return notes or [ok(check, f"{gpu.name}: {mebibytes(gpu.free_bytes)} of {mebibytes(gpu.total_bytes)} free.")]


def check_presets(facts: Facts) -> Iterable[Finding]:
    cannot = [fit for fit in facts.presets if not fit.runs]
    if not cannot:
        yield ok("strategies", f"All {len(facts.presets)} presets can run.")
        return
    yield note(
        "strategies",
        f"{len(facts.presets) - len(cannot)} of {len(facts.presets)} presets can run; not "
        f"{', '.join(fit.preset for fit in cannot)}.",
        "; ".join(dict.fromkeys(fit.remedy for fit in cannot)) + ".",
    )


GPU_CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    check_gpus,
    check_cuda,
    check_page_locking,
    check_each_gpu,
    check_presets,
)
