"""The verb `weft completion`, and what a shell that has it offers for a job's id.

The shell runs `weft` with the line so far in its environment; typer answers, and asks the functions below for an id.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Container
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.exits import guarded
from weft.cli.recordings.whole_file import write_whole
from weft.spec.job_state import TERMINAL_STATES, UNFINISHED_STATES, JobState
from weft.spec.source import home_directory

PROGRAM = "weft"  # however it was started: the shell completes what its user types, and asks by that name
VARIABLE = "_WEFT_COMPLETE"  # in which the shell asks
ANSWER_SECONDS = 1.0  # of the daemon; who presses a key does not wait for longer


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


PLACES = {  # below the user's home, of what makes a shell complete
    Shell.BASH: f".bash_completions/{PROGRAM}.sh",
    Shell.ZSH: f".zfunc/_{PROGRAM}",
    Shell.FISH: f".config/fish/completions/{PROGRAM}.fish",
}


@guarded
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    install: Annotated[
        bool, typer.Option("--install", help="Write it where the shell reads it when it next starts.")
    ] = False,
) -> None:
    """Print what makes a shell complete verbs, options, presets and the ids of jobs, or install it for good.

    For this shell alone: eval "$(weft completion bash)".
    """
    import typer.completion as machinery

    names = {"shell": shell.value, "prog_name": PROGRAM, "complete_var": VARIABLE}
    if not install:
        print(machinery.get_completion_script(**names))  # type: ignore[attr-defined]  # of a module below it
        return
    print(_install(shell, machinery.get_completion_script(**names)))  # type: ignore[attr-defined]  # the same
    print(f"weft: {shell} completes from its next start on", file=sys.stderr)


def _install(shell: Shell, script: str) -> Path:
    """Where typer's own installer has it, which would write the user's file anew, as text, to add a line to it."""
    home = home_directory()
    path = home / PLACES[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [f"{script}\n".encode()])
    if shell is Shell.BASH:
        _add(home / ".bashrc", f"source '{path}'")
    elif shell is Shell.ZSH:
        _add(home / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
        _add(home / ".zshrc", "zstyle ':completion:*' menu select", unless=b"zstyle")
    return path


def _add(path: Path, line: str, unless: bytes = b"") -> None:
    """At the end, if it is not there. What is there stays as it is, byte by byte, also where the disk is full."""
    with open(path, "a+b", buffering=0) as file:
        file.seek(0)
        there = file.read()
        if (unless or line.encode()) in there:
            return
        parted = b"\n" if there and not there.endswith(b"\n") else b""
        told = parted + line.encode() + b"\n"
        try:
            if file.write(told) != len(told):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            file.truncate(len(there))
            raise OSError(f"{path} cannot be written: {error.strerror}; make room, and try again") from error


def prepare_answers() -> None:
    """Where a shell asks, typer gets the answers' forms, which it otherwise has for an app with options of its own."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # of a module below it

        completion_init()


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Ids that begin so, each with the job's state."""
    return _jobs(incomplete, frozenset(JobState))


def complete_live_job(incomplete: str) -> list[tuple[str, str]]:
    return _jobs(incomplete, UNFINISHED_STATES)


def complete_ended_job(incomplete: str) -> list[tuple[str, str]]:
    return _jobs(incomplete, TERMINAL_STATES)


def complete_job_to_resume(incomplete: str) -> list[tuple[str, str]]:
    return _jobs(incomplete, {JobState.PAUSED, *TERMINAL_STATES})


def _jobs(incomplete: str, states: Container[JobState]) -> list[tuple[str, str]]:
    from weft.client.client import Client, DaemonUnreachable, RequestRefused
    from weft.spec.field_errors import SpecError

    try:
        jobs = Client(timeout=ANSWER_SECONDS).jobs()
    except (DaemonUnreachable, RequestRefused, SpecError):
        return []  # a message would stand in the middle of the line that is typed
    offered = [job for job in jobs if job["state"] in states]
    return [(job["job"], job["state"]) for job in offered if job["job"].startswith(incomplete)]
