"""The verb `weft completion`, and what a shell that has it offers for a job's id.

The shell runs `weft` with the line so far in its environment; typer answers, and asks the functions below for an id.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container
from enum import StrEnum
from typing import Annotated

import typer

from weft.cli.exits import guarded
from weft.spec.job_state import TERMINAL_STATES, UNFINISHED_STATES, JobState

PROGRAM = "weft"  # however it was started: the shell completes what its user types, and asks by that name
VARIABLE = "_WEFT_COMPLETE"  # in which the shell asks
ANSWER_SECONDS = 1.0  # of the daemon; who presses a key does not wait for longer


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


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
    _, path = machinery.install(**names)  # type: ignore[attr-defined]  # the same
    print(path)
    print(f"weft: {shell} completes from its next start on", file=sys.stderr)


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
