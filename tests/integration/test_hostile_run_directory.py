"""Whatever stands in a run directory: each verb answers, the daemon lives, and nothing elsewhere is read or written.

A job's code runs beside its files as the same user. `follow` of a log that was a directory, or a link to itself, ended
the daemon with every job; a FIFO in the log's place stopped its event loop; a link to a device was sent for ever.
"""

from __future__ import annotations

import io
import json
import runpy
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from weft.cli.exits import of_result
from weft.cli.verbs.app import app
from weft.client.client import RequestRefused
from weft.client.follower import follow
from weft.plan.worker_profile import WorkerProfile
from weft.scheduler.runs.removal import MARK

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until, SECONDS, LINE = (_REAL[name] for name in ("RealDaemon", "until", "SECONDS", "LINE"))
_HOSTILE = runpy.run_path(str(Path(__file__).parents[1] / "hostile_files.py"))
KINDS, FOREIGN, SECRET, put, clear = (_HOSTILE[name] for name in ("KINDS", "FOREIGN", "SECRET", "put", "clear"))

MAX_GROWTH_BYTES = 128 << 20  # of the daemon over all of it: a log has 64 MiB at most
MAX_SAID = 1 << 17  # characters of one verb, but for a log's own content
CODES = (0, 2, 4, 74)
VERBS_OF_FILE: dict[str, tuple[str, ...]] = {
    "job.log": ("logs", "logs -f"),
    "metrics.jsonl": ("plot", "plot --tensorboard", "trace"),
    "recording.msgpack": ("whatif", "trace", "plot", "page"),
    "profile-cpu-0.msgpack": ("trace",),
    "profiled.msgpack": ("trace --profiled",),
    "model.safetensors": ("show", "wait", "logs -f"),
    "plan.json": ("show",),
    "code.json": ("show",),
    "spec.json": ("show",),
}
# A model that is no file is none; plan and spec are for people alone, code for the next daemon; a picture without a
# recording has no stalls.
_NOT_NEEDED = ("model.safetensors", "plan.json", "spec.json", "code.json")
DO_WITHOUT = {(file, verb) for file in _NOT_NEEDED for verb in VERBS_OF_FILE[file]}
DO_WITHOUT.add(("recording.msgpack", "plot"))


@pytest.fixture(scope="module")
def ended_job(shared_daemon: Any) -> Any:
    """A job that has ended, with every file that a run directory may have."""
    result = shared_daemon.run(shared_daemon.spec(strategy={"stages": 2}))
    assert result["state"] == "completed"
    directory = Path(result["run_dir"])
    about = {"job": result["job"], "attempt": 1, "worker": "cpu-0", "first": 1, "last": 1, "names": (), "tracks": ()}
    WorkerProfile(**about, start_ns=0, end_ns=1, clock_error_ns=0, dropped=0).save(directory)
    shutil.copy(directory / "recording.msgpack", directory / "profiled.msgpack")
    assert {path.name for path in directory.iterdir()} == VERBS_OF_FILE.keys() | {
        MARK
    }  # tests of removal have the mark
    made = directory.with_name("made.svg")  # matplotlib keeps its fonts open from its first picture on
    assert CliRunner().invoke(app, ["plot", str(directory), "-o", str(made)]).exit_code == 0
    made.unlink()
    return result


@pytest.fixture
def whole(ended_job: Any, tmp_path: Path) -> Iterator[Path]:
    """The ended job's run directory, which is put back afterwards."""
    directory = Path(ended_job["run_dir"])
    shutil.copytree(directory, tmp_path / "kept")
    yield directory
    clear(directory)
    shutil.copytree(tmp_path / "kept", directory)


class Verbs:
    """Each answers with its exit code, and all that it said."""

    def __init__(self, daemon: Any, here: Path) -> None:
        self._daemon = daemon
        self._here = here
        self._num_asked = 0

    def ask(self, verb: str, job: str) -> tuple[int, str]:
        if verb == "page":
            return self._page(job)
        if verb == "logs -f":
            return self._follow(job)
        name, *options = verb.split()
        arguments = [name, *options, *([str(self._here)] if "--tensorboard" in options else []), job]
        arguments += ["-o", str(self._here / "made.svg")] if name in ("trace", "plot") else []
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), (verb, done.exception)
        return done.exit_code, done.output + done.stderr

    def _follow(self, job: str) -> tuple[int, str]:
        said = io.StringIO()
        return of_result(follow(self._daemon.client.follow(job), said, said)), said.getvalue()

    def _page(self, job: str) -> tuple[int, str]:
        self._num_asked += 1  # another number of iterations each time: the answer of an ended job stands
        url = f"{self._daemon.client.status()['metrics']}/api/jobs/{job}/timeline?iterations={self._num_asked}"
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return 0, answer.read().decode()


@pytest.fixture
def verbs(daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verbs:
    monkeypatch.setenv("WEFT_RUNTIME_DIR", str(daemon.runtime))
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "here").mkdir()
    return Verbs(daemon, tmp_path / "here")


@pytest.mark.slow
@pytest.mark.pairs(2, file=VERBS_OF_FILE)
def test_every_verb_answers_whatever_stands_in_the_place_of_a_file(
    daemon: Any, whole: Path, ended_job: Any, verbs: Verbs, tmp_path: Path, file: str
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    process = psutil.Process(daemon.process.pid)
    before = process.memory_info().rss
    for kind in KINDS:
        put(kind, whole / file, tmp_path / "secret")
        for verb in VERBS_OF_FILE[file]:
            code, said = verbs.ask(verb, ended_job["job"])
            assert code in CODES, (kind, verb, said)
            assert SECRET.strip() not in said, (kind, verb)
            assert "Traceback" not in said, (kind, verb)
            is_log = file == "job.log" and kind == "sparse"
            assert is_log or len(said) < MAX_SAID, (kind, verb, len(said))
            if kind in FOREIGN and (file, verb) not in DO_WITHOUT:
                assert file in said, (kind, verb, said)
                is_read_all_the_same = kind == "another user's" and verb.split()[0] in ("trace", "plot")
                assert is_read_all_the_same or "remove it" in said, (kind, verb, said)
    assert (tmp_path / "secret").read_text() == SECRET
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
    assert daemon.process.poll() is None


@pytest.mark.slow
@pytest.mark.pairs(2, kind=[*FOREIGN, "gone", "garbage"])
def test_every_verb_answers_whatever_stands_in_the_place_of_the_directory(
    daemon: Any, whole: Path, ended_job: Any, verbs: Verbs, tmp_path: Path, kind: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in VERBS_OF_FILE:
        (outside / file).write_text(SECRET)
    clear(whole)
    put(kind, whole, outside)
    for verb in sorted({verb for several in VERBS_OF_FILE.values() for verb in several}):
        code, said = verbs.ask(verb, ended_job["job"])
        assert code in CODES, (verb, said)
        assert SECRET.strip() not in said, verb
        assert "Traceback" not in said, verb
    result = daemon.client.wait(ended_job["job"], SECONDS)
    assert (result["state"], result["model"]) == ("completed", None)
    assert {path.name for path in outside.iterdir()} == VERBS_OF_FILE.keys()
    assert all(path.read_text() == SECRET for path in outside.iterdir())


# --- while a job runs

REPLACING = (
    "import runpy\n"
    "_put = runpy.run_path({hostile!r})['put']\n"
    "def replace_all():\n"
    "    from pathlib import Path\n"
    "    directory = Path(os.environ['WEFT_RUN_DIR'])\n"
    "    for file in {files!r}:\n"
    "        _put({kind!r}, directory / file, Path({secret!r}))\n"
    "    Path({secret!r}).with_name('replaced').touch()\n"
)


def source_that_replaces(kind: str, files: list[str], secret: Path) -> str:
    """All that its directory has, before it stops at the gate of its training."""
    hostile = str(Path(__file__).parents[1] / "hostile_files.py")
    setup = REPLACING.format(hostile=hostile, kind=kind, files=files, secret=str(secret))
    gate = 'pass_gate(gate, "of training")'
    assert gate in LINE
    return LINE.replace(gate, f"replace_all(); {gate}") + setup


@pytest.mark.days(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_whose_code_replaces_its_files_ends_by_itself_and_no_other_is_touched(
    daemon: Any, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    gate = daemon.gate()
    source = source_that_replaces(kind, [*VERBS_OF_FILE, ".recording.msgpack.partial"], tmp_path / "secret")
    beside = daemon.submit(daemon.spec())
    spec = daemon.spec(source, args={"gate": str(gate), "gate_at": 12}, strategy={"stages": 2, "microbatches": 4})
    job = daemon.submit(spec)
    try:
        directory = Path(daemon.client.show(job)["run_dir"])
        until(lambda: (tmp_path / "replaced").exists(), "what its code puts there")
        assert asks_of_a_running_job(daemon, job) is not None
    finally:
        gate.open()
    *_, last = daemon.client.follow(job, progress=False)
    result = last["result"]
    if kind == "directory":  # which no rename takes the place of
        assert (result["state"], result["reason"], result["exit_code"]) == ("failed", "run-directory", 74)
        assert "model.safetensors" in result["error"]
        assert "is a directory" in result["error"].lower()
    else:
        assert (result["state"], result["reason"]) == ("completed", None), result["error"]
        assert Path(result["model"]).is_file()
    assert (tmp_path / "secret").read_text() == SECRET
    assert daemon.client.wait(beside, SECONDS)["state"] == "completed"
    put("gone", directory, tmp_path / "secret")


def asks_of_a_running_job(daemon: Any, job: str) -> dict[str, Any] | None:
    for path in ("", "/timeline?iterations=2"):
        url = f"{daemon.client.status()['metrics']}/api/jobs/{job}{path}"
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            json.load(answer)
    for ask in (daemon.client.record, daemon.log_of):
        refused(ask, job)
    shown: dict[str, Any] = daemon.client.show(job, path=True)
    return shown


def refused(ask: Callable[[str], object], job: str) -> None:
    """Or answered."""
    try:
        ask(job)
    except RequestRefused as error:
        told = error
    else:
        return
    assert told.code == "nothing-recorded"
    assert told.message.endswith("remove it")


@pytest.mark.slow
def test_an_offset_far_behind_a_logs_end_is_answered_with_nothing(daemon: Any, ended_job: Any) -> None:
    """EINVAL of one seek ended the daemon."""
    with daemon.connected() as client:
        for offset in (2**31, 2**44, 2**62, 2**63 - 1):
            client.send({"id": 1, "verb": "follow", "job": ended_job["job"], "offset": offset})
            answer = client.receive()
            assert answer.get("error", {}).get("code") == "bad-field" or answer["ok"]["result"]["state"] == "completed"


@pytest.mark.slow
def test_jobs_that_wait_hold_no_descriptor(daemon: Any) -> None:
    """Each held two: a thousand of them, which max_queued allows, were above a common limit of a process."""
    gate = daemon.gate()
    spec = daemon.spec(args={"gate": str(gate), "gate_at": 12}, strategy={"stages": 3, "microbatches": 4})
    jobs = [daemon.submit(spec)]
    try:
        daemon.until_logged(jobs[0], "at the gate of training")
        before = psutil.Process(daemon.process.pid).num_fds()
        jobs += [daemon.submit(spec) for _ in range(40)]
        assert daemon.client.show(jobs[-1])["state"] == "queued"
        assert Path(daemon.client.show(jobs[-1])["run_dir"]).is_dir()
        until(lambda: psutil.Process(daemon.process.pid).num_fds() <= before, "as many descriptors as before")
    finally:
        for job in jobs[1:]:
            daemon.client.cancel(job)
        gate.open()
        daemon.client.wait(jobs[0], SECONDS)
