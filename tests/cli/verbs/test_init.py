"""`weft init` as its users run it: which file it writes, what it says, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft.spec.job_spec import JobSpec

PROCESS_SECONDS = 180.0
WORKLOAD = """
import torch, weft

print("imported")

def workload(slope=2.0):
    inputs = torch.arange(8.0).reshape(8, 1)
    return weft.Workload(model=torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)),
                         loss=torch.nn.functional.mse_loss, train=(inputs, slope * inputs),
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.01))

def fails():
    raise ValueError("no data here")

def waits():
    import os, signal
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    signal.pause()

def ends():
    import os, sys
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text(WORKLOAD)
    return tmp_path


def weft(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *arguments]
    return subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)


@pytest.mark.slow(seconds=4)
def test_the_file_is_written_beside_the_source_and_runs(home: Path) -> None:
    done = weft(home, "init", "jobs/train.py", "--arg", "slope=3.0")
    assert (done.returncode, done.stdout) == (0, "jobs/train.toml\n"), done.stderr
    assert "weft: Sequential: 13 parameters (52 B); 3 units" in done.stderr
    spec = JobSpec.load(home / "jobs" / "train.toml")
    assert (spec.job.entry, spec.job.args, spec.job.batch_size) == ("train.py:workload", {"slope": 3.0}, 8)
    ran = weft(home, "run", "jobs/train.toml", "--reference")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.days(2)
@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("arguments", "path", "entry"),
    [
        (["jobs.train:workload"], "train.toml", "jobs/train.py:workload"),
        (["jobs/train.py:workload", "-o", "other.toml"], "other.toml", "jobs/train.py:workload"),
    ],
)
def test_the_entry_is_relative_to_the_file_wherever_that_is(
    home: Path, arguments: list[str], path: str, entry: str
) -> None:
    done = weft(home, "init", *arguments)
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    spec = JobSpec.load(home / path)
    assert spec.job.entry == entry
    spec.check_files()


@pytest.mark.slow(seconds=4)
@pytest.mark.days(3)
def test_a_file_that_is_there_is_written_over_only_by_force(home: Path) -> None:
    file = home / "jobs" / "train.toml"
    file.write_text("mine")
    done = weft(home, "init", "jobs/train.py")
    assert (done.returncode, done.stdout, file.read_text()) == (2, "", "mine")
    assert "is there already; give --force to write over it, or another file with -o" in done.stderr
    printed = weft(home, "init", "jobs/train.py", "--print")
    assert (printed.returncode, file.read_text()) == (0, "mine")
    assert tomllib.loads(printed.stdout)["job"]["entry"] == "train.py:workload"
    assert "imported\n" in printed.stderr
    assert weft(home, "init", "jobs/train.py", "--force").returncode == 0
    assert file.read_text() == printed.stdout


@pytest.mark.days(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["jobs/train.py:fails"], 1, "weft: ValueError: no data here"),
        (["jobs/train.py:gone"], 2, "has no 'gone'; it defines: workload, fails, waits, ends"),
        (["jobs/train.py:ends"], 1, "the process that called ends died (exit code 3)"),
        (["jobs/train.py", "--arg", "slop=1"], 2, "job.args: got an unexpected keyword argument 'slop'"),
        (["jobs/train.py", "--arg", "slope"], 2, "--arg 'slope': write NAME=VALUE"),
        (["jobs/gone.py"], 2, "jobs/gone.py: no such file"),
        (["jobs.gone:workload"], 2, "jobs.gone:workload: no such module below this directory; give FILE.py"),
        (["nonsense"], 2, "nonsense: no such module below this directory; give FILE.py"),
        (["jobs/train.py", "-o", "none/train.toml"], 2, "none/train.toml: its directory is not there; make it"),
    ],
)
def test_what_cannot_be_described_is_a_sentence_and_no_file(
    home: Path, arguments: list[str], code: int, sentence: str
) -> None:
    done = weft(home, "init", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert list(home.rglob("*.toml")) == []


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_that_calls_the_function_too(home: Path, number: signal.Signals) -> None:
    """It went on, with whatever the function downloads or computes, and nobody to tell it to."""
    os.mkfifo(home / "jobs" / "pid")
    command = [sys.executable, "-m", "weft", "init", "train.py:waits", "--print"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs these tests by nohup
    try:
        process = subprocess.Popen(command, cwd=home / "jobs", stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        called = int((home / "jobs" / "pid").read_text())
        process.send_signal(number)
        assert process.wait(PROCESS_SECONDS) == 143
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(called, 0)
