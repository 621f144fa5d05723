"""Proc: what the kernel tells of another process at this moment. One that has ended has nothing."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

STOPPED, TRACED = "T", "t"  # states as of proc(5): by a signal, by a debugger
_CPU_TIMES: Final = slice(11, 13)  # of the fields of `stat` behind the name: its own, in user and in kernel mode


# Numbers of the calls in which a process waits, by machine; others are told by their numbers.
_X86_64: Final = (
    "read=0 write=1 poll=7 mmap=9 munmap=11 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 select=23 madvise=28 "
    "pause=34 nanosleep=35 connect=42 accept=43 sendto=44 recvfrom=45 sendmsg=46 recvmsg=47 wait4=61 fcntl=72 "
    "flock=73 fsync=74 fdatasync=75 rt_sigtimedwait=128 rt_sigsuspend=130 futex=202 clock_nanosleep=230 "
    "epoll_wait=232 waitid=247 openat=257 pselect6=270 ppoll=271 epoll_pwait=281 fallocate=285 accept4=288 "
    "futex_waitv=449"
)
_AARCH64: Final = (
    "epoll_pwait=22 fcntl=25 ioctl=29 flock=32 fallocate=47 openat=56 read=63 write=64 readv=65 writev=66 "
    "pread64=67 pwrite64=68 pselect6=72 ppoll=73 fsync=82 fdatasync=83 waitid=95 futex=98 nanosleep=101 "
    "clock_nanosleep=115 rt_sigsuspend=133 rt_sigtimedwait=137 accept=202 connect=203 sendto=206 recvfrom=207 "
    "sendmsg=211 recvmsg=212 munmap=215 mmap=222 madvise=233 accept4=242 wait4=260 futex_waitv=449"
)
_CALLS: Final = {
    machine: {int(number): name for name, _, number in (call.partition("=") for call in calls.split())}
    for machine, calls in (("x86_64", _X86_64), ("aarch64", _AARCH64))
}


def state_of(pid: int) -> str:
    """Its letter; "" where it has ended."""
    return next(iter(_stat(Path(f"/proc/{pid}"))), "")


def used_by(pid: int) -> tuple[str, ...]:
    """Time of a processor and bytes read and written, so far: what stays the same while nothing goes on in it."""
    return *_stat(Path(f"/proc/{pid}"))[_CPU_TIMES], text_of(Path(f"/proc/{pid}/io"))


def threads_of(pid: int) -> list[str]:
    """A line for each: its number, name, state, and where it waits: the system call, and the kernel's own function."""
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda each: int(each.name))
    except OSError:
        return []
    return [f"thread {of.name} ({text_of(of / 'comm')}): {_waiting(of)}" for of in threads]


def _waiting(thread: Path) -> str:
    state, call = next(iter(_stat(thread)), ""), _call_of(thread)
    place = text_of(thread / "wchan")  # 0 of one that runs, and where the kernel does not say
    told = f"{state} in {call}" if call else state
    return f"{told} ({place})" if place not in ("", "0") else told


def _call_of(thread: Path) -> str:
    """By name; "" of one that is in none, or may not be looked at."""
    number = text_of(thread / "syscall").partition(" ")[0]
    if not number.isdigit():
        return ""
    return _CALLS.get(platform.machine(), {}).get(int(number), f"system call {number}")


def _stat(of: Path) -> list[str]:
    """What is told of a process or a thread, behind its name."""
    return text_of(of / "stat").rpartition(")")[2].split()


def text_of(path: Path) -> str:
    """Without the space around it; "" of what is not there."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
