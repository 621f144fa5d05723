"""A job whose user looks on: what ends the looking on cancels it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from weft.client.client import Client, DaemonUnreachable, RequestRefused
from weft.client.foreground import run_in_foreground
from weft.spec.job_spec import JobSpec

SPEC = JobSpec.parse({"job": {"entry": "digits.py:workload", "steps": 3, "batch_size": 4}, "directory": "/jobs"})


class Interrupted:
    """A client that is interrupted while it follows."""

    def __init__(self, by: BaseException) -> None:
        self.by = by
        self.cancelled: list[str] = []

    def submit(self, spec: JobSpec, job: str | None) -> dict[str, Any]:
        return {"job": "digits-1"}

    def follow(self, job: str) -> Iterator[Any]:
        yield {"log": "running\n", "offset": 8}
        raise self.by

    def cancel(self, job: str) -> str:
        self.cancelled.append(job)
        return "cancelled"

    def wait(self, job: str, timeout: float) -> dict[str, Any]:
        return {"state": "cancelled", "run_dir": "runs/digits-1"}


@pytest.mark.parametrize(
    ("by", "cancelled"),
    [
        (KeyboardInterrupt(), ["digits-1"]),
        (SystemExit(7), ["digits-1"]),
        (RuntimeError("of a signal handler"), ["digits-1"]),
        (TimeoutError("of a signal handler"), ["digits-1"]),
        (BrokenPipeError(), ["digits-1"]),
        (DaemonUnreachable(Path("weft.sock"), "it has gone"), []),
        (RequestRefused("no-such-job", "somebody has removed it"), []),
    ],
)
def test_whatever_ends_the_looking_on_cancels_the_job(by: BaseException, cancelled: list[str]) -> None:
    """A script whose handler of SIGTERM calls sys.exit left its job in the daemon that ran."""
    client = Interrupted(by)
    with pytest.raises(type(by)):
        run_in_foreground(cast(Client, client), SPEC)
    assert client.cancelled == cancelled


@pytest.mark.parametrize("again", [KeyboardInterrupt(), RequestRefused("timed-out", "it has not ended")])
def test_a_job_that_is_not_waited_for_any_longer_is_told_with_where_its_files_are(
    again: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second Ctrl-C ended `weft run` without a word."""

    class Impatient(Interrupted):
        def wait(self, job: str, timeout: float) -> dict[str, Any]:
            raise again

        def show(self, job: str) -> dict[str, Any]:
            return {"run_dir": "runs/digits-1"}

    with pytest.raises(KeyboardInterrupt):
        run_in_foreground(cast(Client, Impatient(KeyboardInterrupt())), SPEC)
    assert capsys.readouterr().err.endswith("weft: digits-1 is stopped; its files stay in runs/digits-1\n")
