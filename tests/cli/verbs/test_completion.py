"""What a shell completes: through a real bash, with a daemon that answers and without one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPTED = runpy.run_path(str(Path(__file__).parents[2] / "scripted_daemon.py"))
ScriptedDaemon, HOLD = _SCRIPTED["ScriptedDaemon"], _SCRIPTED["HOLD"]

PROCESS_SECONDS = 180.0
BASH = """
eval "$("$PROGRAM" completion bash)"
COMP_WORDS=($LINE)
test "${LINE: -1}" = " " && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_weft_completion "$PROGRAM"
printf '%s\\n' "${COMPREPLY[@]}"
"""
JOBS = [{"job": "digits-1", "state": "completed"}, {"job": "digits-2", "state": "running"}]
JOBS += [{"job": "circle-1", "state": "queued"}, {"job": "circle-2", "state": "paused"}]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a user whose home is empty, with a `weft` in the PATH as it is installed."""
    program = tmp_path / "bin" / "weft"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weft "$@"\n')
    program.chmod(0o755)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    variables = {"HOME": str(tmp_path), "WEFT_RUNTIME_DIR": str(runtime), "PROGRAM": str(program)}
    return os.environ | variables


def offered(environment: dict[str, str], line: str) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH],
        env=environment | {"LINE": line},
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def weft(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )


@pytest.mark.days(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("weft comp", ["compare", "completion"]),
        ("weft run digits.toml --pre", ["--preset"]),
        ("weft run digits.toml --preset hybrid-", ["hybrid-coarse", "hybrid-fine"]),
        ("weft show d", ["digits-1", "digits-2"]),
        ("weft cancel ", ["digits-2", "circle-1", "circle-2"]),
        ("weft resume ", ["digits-1", "circle-2"]),
        ("weft rm ", ["digits-1"]),
    ],
)
def test_bash_completes_verbs_options_presets_and_the_jobs_that_a_verb_takes(
    environment: dict[str, str], line: str, expected: list[str]
) -> None:
    with ScriptedDaemon(Path(environment["WEFT_RUNTIME_DIR"], "weft.sock"), {"ps": [[{"ok": {"jobs": JOBS}}]]}):
        assert offered(environment, line) == expected


@pytest.mark.slow
@pytest.mark.parametrize("answers", [None, {"ps": [[HOLD]]}, {"ps": [[{"error": {"code": "draining"}}]]}])
def test_without_an_answer_nothing_is_offered_and_nothing_is_written(
    environment: dict[str, str], answers: dict[str, Any] | None
) -> None:
    socket = Path(environment["WEFT_RUNTIME_DIR"], "weft.sock")
    if answers is None:
        assert offered(environment, "weft show ") == []
        return
    with ScriptedDaemon(socket, answers):
        assert offered(environment, "weft show ") == []


@pytest.mark.days(3)
@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_is_installed_where_the_shell_reads_it_once_however_often(
    environment: dict[str, str], tmp_path: Path, shell: str
) -> None:
    printed = weft(environment, "completion", shell)
    assert "_WEFT_COMPLETE" in printed.stdout
    for _ in range(2):
        done = weft(environment, "completion", shell, "--install")
        assert (done.returncode, done.stderr) == (0, f"weft: {shell} completes from its next start on\n")
    written = Path(done.stdout.strip())
    assert written.is_relative_to(tmp_path)
    assert written.read_text().strip() == printed.stdout.strip()
    if shell == "bash":
        assert (tmp_path / ".bashrc").read_text().split() == ["source", f"'{written}'"]


@pytest.mark.slow
@pytest.mark.parametrize(("shell", "file"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_what_the_user_has_in_the_shells_file_stays_byte_by_byte(
    environment: dict[str, str], tmp_path: Path, shell: str, file: str
) -> None:
    """It was written anew, as text: one in another encoding was an error, and one on a full disk lost."""
    precious = b"# caf\xe9\r\nalias ll='ls -l'"
    (tmp_path / file).write_bytes(precious)
    assert weft(environment, "completion", shell, "--install").returncode == 0
    there = (tmp_path / file).read_bytes()
    assert there.startswith(precious + b"\n")
    assert weft(environment, "completion", shell, "--install").returncode == 0
    assert (tmp_path / file).read_bytes() == there


def test_a_line_for_which_there_is_no_room_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """Half of it would end the shell's start with an error."""
    file = tmp_path / ".bashrc"
    file.write_bytes(b"alias ll='ls -l'\n")
    added = "import resource; from pathlib import Path; from weft.cli.verbs.completion import _add\n"
    added += f"resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25)); _add(Path({str(file)!r}), 'source nothing')"
    done = subprocess.run([sys.executable, "-c", added], capture_output=True, text=True, timeout=PROCESS_SECONDS)
    assert f"{file} cannot be written: No space left on device; make room, and try again" in done.stderr
    assert file.read_bytes() == b"alias ll='ls -l'\n"


def test_another_shell_is_refused_with_those_that_are_known(environment: dict[str, str]) -> None:
    done = weft(environment, "completion", "tcsh")
    assert done.returncode == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr.replace("\n", " ")


def test_a_home_that_cannot_be_written_is_a_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = weft(environment | {"HOME": str(tmp_path / "file")}, "completion", "fish", "--install")
    assert done.returncode == 74
    assert "check the path, and that you may write there" in done.stderr
    assert "Traceback" not in done.stderr
