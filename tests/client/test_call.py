"""A job as a call: around a scripted daemon, then as scripts that run it for real."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.client.embedded import Daemon

_SCRIPTED = runpy.run_path(str(Path(__file__).parents[1] / "scripted_daemon.py"))
ScriptedDaemon = _SCRIPTED["ScriptedDaemon"]

PROCESS_SECONDS = 180.0
SUBMITTED = {"ok": {"job": "train-1", "created": True}}
STEPS = [
    {"step": 1, "epoch": 0, "loss": 2.5, "lr": 0.1, "grad_norm": None, "samples": 4, "seconds": None},
    {"step": 2, "epoch": 0, "loss": 1.5, "lr": 0.1, "grad_norm": None, "samples": 4, "seconds": 0.1},
    {"step": 2, "epoch": 0, "validation": {"loss": 1.25}},
]


def workload() -> None: ...


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    run_dir = tmp_path / "train-1"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in STEPS))
    known = {"job": "train-1", "state": "completed", "reason": None, "steps": 2, "loss": 1.5, "seconds": 3.0}
    return known | {"validation": {"loss": 1.25}, "run_dir": str(run_dir), "model": str(run_dir / "model.safetensors")}


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The usual place of the socket."""
    directory = tmp_path / "runtime"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("WEFT_RUNTIME_DIR", str(directory))
    return directory


def answers(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": [[{"ok": {"pid": 1}}]],
        "submit": [[SUBMITTED]],
        "follow": [[{"event": {"log": "hello\n", "offset": 6}}, {"ok": {"result": result}}]],
        "show": [[{"ok": {"error": None}}]],
    }


def test_a_call_hands_the_job_to_the_daemon_that_answers_and_returns_what_it_left(
    runtime: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedDaemon(runtime / "weft.sock", answers(result)) as scripted:
        trained = weft.run(
            workload, batch_size=4, steps=2, seed=7, args={"hidden": 8}, microbatches=2, schedule="gpipe", job="mine"
        )
    assert [request["verb"] for request in scripted.requests] == ["status", "submit", "follow", "show"]
    submitted = scripted.requests[1]
    assert submitted["job"] == "mine"
    assert submitted["spec"]["job"] | {"entry": "", "args": {}} == {
        "entry": "",
        "args": {},
        "steps": 2,
        "batch_size": 4,
        "seed": 7,
        "priority": 0,
        "mode": "train",
        "on_hang": "restart",
        "hang_seconds": 60.0,
    }
    file, _, function = submitted["spec"]["job"]["entry"].rpartition(":")
    assert (Path(submitted["spec"]["directory"], file), function) == (Path(__file__), "workload")
    assert submitted["spec"]["job"]["args"] == {"hidden": 8}
    strategy = submitted["spec"]["strategy"]
    assert (strategy["stages"], strategy["microbatches"], strategy["schedule"]) == (1, 2, "gpipe")
    assert (trained.job, trained.steps, trained.loss, trained.seconds) == ("train-1", 2, 1.5, 3.0)
    assert (trained.losses, trained.validations, trained.validation) == ([2.5, 1.5], [{"loss": 1.25}], {"loss": 1.25})
    assert trained.history.steps[1].seconds == 0.1
    assert trained.model == trained.run_dir / "model.safetensors"
    assert capsys.readouterr().err == "hello\n"


def test_a_preset_is_an_axis_like_any_other(runtime: Path, result: dict[str, Any]) -> None:
    """Stages that were not given must not stand beside the preset's own list of replicas."""
    with ScriptedDaemon(runtime / "weft.sock", answers(result)) as scripted:
        weft.run(workload, batch_size=4, steps=2, preset="hyscale")
    assert len(scripted.requests[1]["spec"]["strategy"]["replicas"]) == 2


def test_numbers_may_be_numpys(runtime: Path, result: dict[str, Any]) -> None:
    with ScriptedDaemon(runtime / "weft.sock", answers(result)) as scripted:
        weft.run(
            workload,
            batch_size=np.int64(4),
            steps=np.int32(2),
            args={"width": np.float64(0.5), "sizes": [np.int8(3)], "bias": np.bool_(True)},
            clip_norm=np.float32(1.5),
        )
    spec = scripted.requests[1]["spec"]
    assert (spec["job"]["batch_size"], spec["job"]["steps"], spec["strategy"]["clip_norm"]) == (4, 2, 1.5)
    assert spec["job"]["args"] == {"width": 0.5, "sizes": [3], "bias": True}


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (
            {
                "state": "failed",
                "reason": "user-error",
                "exception": "ValueError",
                "error": "Traceback\nValueError: no such class\n",
            },
            "train-1 failed (user-error ValueError) after 3.00 s\nTraceback\nValueError: no such class",
        ),
        ({"state": "cancelled", "reason": "cancelled"}, "train-1 cancelled after 3.00 s"),
    ],
)
def test_a_job_that_does_not_complete_raises_the_sentence_of_the_command(
    runtime: Path, result: dict[str, Any], ended: dict[str, Any], text: str
) -> None:
    with (
        ScriptedDaemon(runtime / "weft.sock", answers(result | ended)),
        pytest.raises(weft.JobFailed) as failed,
    ):
        weft.run(workload, batch_size=4, steps=2)
    assert str(failed.value) == text
    assert failed.value.result["run_dir"] == result["run_dir"]


def test_a_refusal_is_raised_as_the_daemon_words_it(runtime: Path, result: dict[str, Any]) -> None:
    refused = {"error": {"code": "invalid-spec", "message": "strategy.stages = 9 needs 9 CPU workers"}}
    with (
        ScriptedDaemon(runtime / "weft.sock", answers(result) | {"submit": [[refused]]}),
        pytest.raises(weft.RequestRefused, match="needs 9 CPU workers"),
    ):
        weft.run(workload, batch_size=4, steps=2, stages=9, microbatches=1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_size": 4}, "job: neither epochs nor steps is given; write one of them"),
        ({"batch_size": 4, "epochs": 1, "steps": 1}, "epochs = 1 and steps = 1 are both given; leave one of them out"),
        ({"batch_size": 0, "epochs": 1}, r"job\.batch_size: 0 is too small; write 1 or more"),
        ({"batch_size": 4, "epochs": 1, "stage": 2}, r"stage: unknown; did you mean stages\?"),
        ({"batch_size": 4, "epoch": 1}, r"epoch: unknown; did you mean epochs\?"),
        (
            {"batch_size": 4, "epochs": 1, "workers": 2},
            r"workers: of a daemon; write daemon=weft\.Daemon\(workers=\.\.\.\)",
        ),
        ({"batch_size": 4, "epochs": 1, "stop": {}}, r"stop: of a job file; put all of the job in a weft\.JobSpec"),
        (
            {"batch_size": 4, "epochs": 1, "hidden": 8},
            r"hidden: unknown; an argument of the function stands in args=\{",
        ),
        (
            {"batch_size": 4, "epochs": 1, "args": [1]},
            r"args: \[1\] is no dict; write for example args=\{'hidden': 128\}",
        ),
        ({"batch_size": 4, "epochs": 1, "resume_from": 3}, "resume_from: 3 is no path; give a str or a pathlib.Path"),
        ({"batch_size": 4, "epochs": 1, "socket": 3}, "socket: 3 is no path"),
        ({"batch_size": 4, "epochs": 1, "daemon": 3}, r"daemon: 3 is no daemon; write for example weft\.Daemon\("),
        ({"batch_size": 4, "epochs": 1, "microbatches": 8}, r"job\.batch_size = 4 is smaller than"),
        ({"batch_size": 4, "epochs": 1, "args": {"a": {1, 2}}}, r"args\.a = .* cannot be handed on"),
        ({"batch_size": 4, "epochs": 1, "socket": "x", "daemon": Daemon()}, "leave one out"),
    ],
)
def test_arguments_that_make_no_job_are_refused_before_anything_runs(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(weft.SpecError, match=f"weft.run: .*{sentence}"):
        weft.run(workload, **arguments)


def test_a_socket_that_is_given_must_answer(tmp_path: Path) -> None:
    with pytest.raises(weft.DaemonUnreachable, match=r"gone\.sock"):
        weft.run(workload, batch_size=4, epochs=1, socket=tmp_path / "gone.sock")


# --- with the real daemon

SCRIPT = """
import torch, weft

def workload(slope=2.0):
    inputs = torch.arange(8.0).reshape(8, 1)
    return weft.Workload(model=torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)),
                         loss=torch.nn.functional.mse_loss, train=(inputs, slope * inputs),
                         validation=(inputs, slope * inputs),
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.01))

if GUARD:
    trained = weft.run(workload, batch_size=4, steps=STEPS, stages=2, args={"slope": 3.0})
    model = trained.load_into(workload().model)
    inputs = torch.arange(8.0).reshape(8, 1)
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(inputs), 3.0 * inputs)
    ratio = float(loss) / trained.validation["loss"]
    print(len(trained.losses), trained.losses[-1] == trained.loss, abs(ratio - 1) < 1e-5)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a TMPDIR in it. Not below tmp_path, which is long for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="weft-test-") as directory:
        Path(directory, "tmp").mkdir()
        yield Path(directory)


def start(home: Path, guard: str, steps: int) -> subprocess.Popen[str]:
    text = SCRIPT.replace("GUARD", guard).replace("STEPS", str(steps))
    (home / "script.py").write_text(text)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "XDG_"))}
    variables |= {"TMPDIR": str(home / "tmp"), "WEFT_RUNTIME_DIR": str(home / "none")}
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=home,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def left_in_tmp(home: Path) -> list[str]:
    return [path.name for path in (home / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


@pytest.mark.slow
def test_a_script_trains_its_own_workload_and_has_the_weights(home: Path) -> None:
    """No daemon answers, so it has one of its own, with the workers that two stages need."""
    with start(home, '__name__ == "__main__"', steps=4) as process:
        stdout, stderr = process.communicate(timeout=PROCESS_SECONDS)
    assert (process.returncode, stdout) == (0, "4 True True\n"), stderr
    assert "completed" in stderr
    assert (home / "runs" / "script-1" / "model.safetensors").is_file()
    assert left_in_tmp(home) == []


@pytest.mark.days(3)
@pytest.mark.slow
def test_a_script_that_would_run_itself_again_is_told_the_guard(home: Path) -> None:
    with start(home, "True", steps=4) as process:
        _, stderr = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == 1
    assert "JobFailed: script-1 failed (invalid-workload)" in stderr
    assert 'write the call below `if __name__ == "__main__":`' in stderr
    assert left_in_tmp(home) == []


@pytest.mark.days(3)
@pytest.mark.slow
def test_ctrl_c_cancels_the_job_and_ends_the_daemon_that_was_started_for_it(home: Path) -> None:
    with start(home, '__name__ == "__main__"', steps=100_000_000) as process:
        assert process.stderr is not None
        assert any("step " in text for text in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == -signal.SIGINT
    assert "script-1 cancelled; its files stay in" in stderr
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert left_in_tmp(home) == []
