"""What the machine is, read from made-up trees of /proc and /sys, and once from the real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.machine.facts import (
    NumaNode,
    core_speeds,
    cpu_list,
    read_limits,
    read_machine,
    read_memory_policy,
    read_shared_memory,
)


def write(root: Path, **texts: str) -> None:
    """Files by path, with __ for a slash."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of two cores of two threads; CPU n and n + 4 share a core. A cache for each socket."""
    for cpu in range(8):
        socket, core = cpu % 4 // 2, cpu % 4
        topology = f"sys__devices__system__cpu__cpu{cpu}__topology__"
        cache = f"sys__devices__system__cpu__cpu{cpu}__cache__"
        shared = f"{2 * socket}-{2 * socket + 1},{2 * socket + 4}-{2 * socket + 5}\n"
        files = {
            topology + "physical_package_id": f"{socket}\n",
            topology + "thread_siblings_list": f"{core},{core + 4}\n",
            cache + "index0__level": "1\n",
            cache + "index0__size": "32K\n",
            cache + "index3__level": "3\n",
            cache + "index3__size": "16384K\n",
            cache + "index3__shared_cpu_list": shared,
        }
        write(tmp_path, **files)
    for node in range(2):
        folder = f"sys__devices__system__node__node{node}__"
        write(
            tmp_path,
            **{
                folder + "cpulist": f"{2 * node}-{2 * node + 1},{2 * node + 4}-{2 * node + 5}\n",
                folder + "meminfo": f"Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 5 kB\n",
            },
        )
    write(
        tmp_path,
        sys__devices__system__cpu__online="0-7\n",
        proc__cpuinfo="processor\t: 0\nmodel name\t: A Processor 9000\nmodel name\t: A Processor 9000\n",
        proc__meminfo="MemTotal:        2048 kB\nMemAvailable:    1024 kB\nHugePages_Total:       3\n"
        "Hugepagesize:       2048 kB\nCommitLimit:     4096 kB\nCommitted_AS:    1024 kB\n",
    )
    return tmp_path


def test_sockets_cores_and_threads_of_the_whole_machine_are_counted(two_sockets: Path) -> None:
    machine = read_machine(two_sockets, range(8))
    assert (machine.num_sockets, machine.num_cores, len(machine.cpus), machine.num_online) == (2, 4, 8, 8)
    assert machine.one_cpu_per_core == (0, 1, 2, 3)
    assert machine.cpu_model == "A Processor 9000"
    assert (machine.total_bytes, machine.available_bytes) == (2048 * 1024, 1024 * 1024)
    assert machine.last_cache_bytes == 2 * 16384 * 1024


def test_only_what_the_affinity_mask_leaves_counts(two_sockets: Path) -> None:
    machine = read_machine(two_sockets, [2, 3, 6])
    assert (machine.num_sockets, machine.num_cores, machine.cpus, machine.num_online) == (1, 2, (2, 3, 6), 8)
    assert machine.last_cache_bytes == 16384 * 1024
    assert machine.nodes == (
        NumaNode(index=0, cpus=(), total_bytes=1024 * 1024),
        NumaNode(index=1, cpus=(2, 3, 6), total_bytes=1024 * 1024),
    )


def test_a_kernel_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, [0, 1])
    assert (machine.num_cores, machine.num_online, machine.nodes, machine.total_bytes) == (2, 2, (), 0)
    assert machine.cpu_model == "unknown"
    assert read_memory_policy(tmp_path).huge_pages is None


def test_cores_of_two_kinds_have_two_speeds(tmp_path: Path) -> None:
    """By their capacity where the kernel tells it; where it does not, or all are alike, nothing is said."""

    def tell(name: str, *values: int) -> None:
        for cpu, value in enumerate(values):
            write(tmp_path, **{f"sys__devices__system__cpu__cpu{cpu}__{name}": f"{value}\n"})

    assert core_speeds([0, 1, 2], tmp_path) == {}
    tell("cpufreq__cpuinfo_max_freq", 5_000_000, 5_000_000, 4_000_000)
    assert core_speeds([0, 1, 2], tmp_path) == {0: 1.0, 1: 1.0, 2: 0.8}
    assert read_machine(tmp_path, [0, 1]).core_speeds == {}
    tell("cpu_capacity", 1024, 512)
    assert core_speeds([0, 2], tmp_path) == {0: 1.0, 2: 0.8}, "of one it does not"
    tell("cpu_capacity", 1024, 1024, 512)
    assert core_speeds([0, 1, 2], tmp_path) == {0: 1.0, 1: 1.0, 2: 0.5}


def test_nvidia_cards_on_the_bus_are_counted_and_other_devices_are_not(tmp_path: Path) -> None:
    devices = [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]
    for number, (vendor, kind) in enumerate(devices):
        folder = f"sys__bus__pci__devices__0000:0{number}:00.0__"
        write(tmp_path, **{folder + "vendor": vendor + "\n", folder + "class": kind + "\n"})
    assert read_machine(tmp_path, [0]).num_nvidia_cards == 2


def test_the_memory_policy_is_the_word_in_brackets(two_sockets: Path) -> None:
    write(
        two_sockets,
        sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]\n",
        sys__kernel__mm__transparent_hugepage__shmem_enabled="always within_size [advise] never\n",
        proc__sys__vm__overcommit_memory="2\n",
    )
    policy = read_memory_policy(two_sockets)
    assert (policy.huge_pages, policy.shared_huge_pages, policy.overcommit) == ("never", "advise", 2)
    assert (policy.num_reserved_huge_pages, policy.huge_page_bytes) == (3, 2048 * 1024)
    assert policy.uncommitted_bytes == 3072 * 1024


def test_the_last_mount_at_dev_shm_is_the_one_that_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__mountinfo=f"1 0 0:1 / {tmp_path} rw - ext4 /dev/sda rw\n2 1 0:2 / {tmp_path} rw - tmpfs shm rw\n",
    )
    shared = read_shared_memory(tmp_path, tmp_path)
    assert shared.kind == "tmpfs"
    assert 0 < shared.free_bytes <= shared.total_bytes


def test_no_dev_shm_is_no_error(tmp_path: Path) -> None:
    shared = read_shared_memory(tmp_path / "absent", tmp_path)
    assert (shared.kind, shared.total_bytes) == (None, 0)


@pytest.mark.parametrize(("text", "numbers"), [("", ()), ("3\n", (3,)), ("0-2,5", (0, 1, 2, 5))])
def test_a_list_of_processors_is_read(text: str, numbers: tuple[int, ...]) -> None:
    assert cpu_list(text) == numbers


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert set(machine.cpus) == os.sched_getaffinity(0)
    assert 1 <= machine.num_sockets <= machine.num_cores <= len(machine.cpus) <= machine.num_online
    assert 0 < machine.available_bytes <= machine.total_bytes
    nofile = read_limits().nofile
    assert nofile is None or nofile > 0
