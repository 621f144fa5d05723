"""Limits of control groups, from made-up trees of both versions, and once from the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.machine.cgroups import CgroupLimits, read_cgroup_limits, read_memory_limit, read_oom_kills

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


def tree(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """files: below /sys/fs/cgroup."""
    texts = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_least_limit_of_our_group_and_those_above_it_counts(tmp_path: Path) -> None:
    files = {
        "user.slice/memory.max": "8589934592\n",
        "user.slice/cpu.max": "150000 100000\n",
        "user.slice/job/memory.max": "max\n",
        "user.slice/job/cpu.max": "max 100000\n",
        "other/memory.max": "1\n",
    }
    root = tree(tmp_path, "0::/user.slice/job\n", V2_MOUNT, files)
    limits = read_cgroup_limits(root)
    assert read_memory_limit(root) == limits.memory_bytes
    assert limits == CgroupLimits(
        memory_bytes=8 << 30,
        memory_from="/sys/fs/cgroup/user.slice",
        cpus=1.5,
        cpus_from="/sys/fs/cgroup/user.slice",
    )


def test_a_container_that_sees_only_its_own_group_has_that_groups_limits(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("0:26 / ", "0:26 /docker/abc ")
    limits = read_cgroup_limits(tree(tmp_path, "0::/docker/abc\n", mount, {"memory.max": "1073741824\n"}))
    assert (limits.memory_bytes, limits.cpus) == (1 << 30, None)


@pytest.mark.parametrize("path", ["/docker/unseen", "/../../elsewhere"])
def test_a_group_outside_of_what_is_mounted_falls_back_to_the_top(tmp_path: Path, path: str) -> None:
    limits = read_cgroup_limits(tree(tmp_path, f"0::{path}\n", V2_MOUNT, {"memory.max": "1073741824\n"}))
    assert limits.memory_bytes == 1 << 30


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    mounts = (
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/job/memory.limit_in_bytes": "4294967296\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "unified/cgroup.procs": "",
    }
    limits = read_cgroup_limits(tree(tmp_path, "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n", mounts, files))
    assert limits == CgroupLimits(
        memory_bytes=4 << 30,
        memory_from="/sys/fs/cgroup/memory/job",
        cpus=2.0,
        cpus_from="/sys/fs/cgroup/cpu,cpuacct/job",
    )


@pytest.mark.parametrize("files", [{"memory.max": "max\n", "cpu.max": "max 100000\n"}, {"cgroup.procs": ""}])
def test_a_group_without_limits_has_none(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_cgroup_limits(tree(tmp_path, "0::/\n", V2_MOUNT, files)) == CgroupLimits()


def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/my\\040groups ")
    limits = read_cgroup_limits(tree(tmp_path, "0::/\n", mount, {"my groups/memory.max": "4096\n"}))
    assert limits.memory_bytes == 4096


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert read_cgroup_limits(tmp_path) == CgroupLimits()


def test_this_machine_can_be_read() -> None:
    limits = read_cgroup_limits()
    assert (limits.memory_bytes is None) == (limits.memory_from is None)


# --- processes that the kernel has killed for lack of memory

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
EVENTS = "low 0\nhigh 7\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"
VMSTAT = "pgfault 123\noom_kill 40\n"


def test_kills_are_those_in_our_own_group(tmp_path: Path) -> None:
    files = {"user.slice/job/memory.events": EVENTS, "user.slice/memory.events": EVENTS.replace("3", "9")}
    root = tree(tmp_path, "0::/user.slice/job\n", V2_MOUNT, files)
    (root / "proc/vmstat").write_text(VMSTAT)
    assert read_oom_kills(root) == 3


def test_version_1_counts_them_beside_its_switch(tmp_path: Path) -> None:
    files = {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}
    assert read_oom_kills(tree(tmp_path, "4:memory:/job\n0::/\n", V1_MOUNT, files)) == 5


def test_where_the_group_does_not_count_those_of_the_machine_are_taken(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", V2_MOUNT, {"cgroup.procs": ""})
    assert read_oom_kills(root) is None
    (root / "proc/vmstat").write_text(VMSTAT)
    assert read_oom_kills(root) == 40


def test_this_machine_counts_them() -> None:
    assert isinstance(read_oom_kills(), int)
