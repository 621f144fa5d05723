"""The clients, against a real socket that says what each test tells it to; waiting for a lost daemon without one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from weft.client.client import AsyncClient, Client, DaemonUnreachable, RequestRefused, default_socket_path
from weft.client.conversation import Close, Connect, Conversation, Deliver, Pause, Receive, Script, Send
from weft.spec.job_spec import JobSpec, SpecError
from weft.spec.settings import load_settings
from weft.transport.wire.frames import PROTOCOL, encode

_SCRIPTED = runpy.run_path(str(Path(__file__).parents[1] / "scripted_daemon.py"))
ScriptedDaemon, GREETING = _SCRIPTED["ScriptedDaemon"], _SCRIPTED["GREETING"]
HANG_UP, HOLD = _SCRIPTED["HANG_UP"], _SCRIPTED["HOLD"]

RESULT = {"job": "digits-1", "state": "completed", "reason": None, "exit_code": 0}
DONE = {"ok": {"result": RESULT}}
SPEC = JobSpec.parse({"job": {"entry": "digits.py:workload", "steps": 3, "batch_size": 4}, "directory": "/jobs"})


def log(text: str, offset: int) -> dict[str, Any]:
    return {"event": {"log": text, "offset": offset}}


def progress(step: int) -> dict[str, Any]:
    return {"event": {"progress": {"step": step, "steps": 9}}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weft.sock"


def blocking(path: Path, verb: str, *arguments: Any, timeout_of_client: float = 5.0, **options: Any) -> Any:
    answer = getattr(Client(path, timeout=timeout_of_client), verb)(*arguments, **options)
    return list(answer) if isinstance(answer, Iterator) else answer


def awaited(path: Path, verb: str, *arguments: Any, timeout_of_client: float = 5.0, **options: Any) -> Any:
    async def call() -> Any:
        answer = getattr(AsyncClient(path, timeout=timeout_of_client), verb)(*arguments, **options)
        return [item async for item in answer] if hasattr(answer, "__aiter__") else await answer

    return asyncio.run(call())


@pytest.fixture(params=[blocking, awaited])
def call(request: pytest.FixtureRequest) -> Any:
    """Either client: (path, verb, arguments) -> what the method returns, streams as lists."""
    return request.param


def test_each_verb_sends_its_fields_and_returns_the_reply(path: Path, call: Any) -> None:
    answers = {
        "submit": [[{"ok": {"job": "digits-1", "created": True}}]],
        "ps": [[{"ok": {"jobs": [{"job": "digits-1"}]}}]],
        "show": [[{"ok": {"job": "digits-1", "why": "no worker is free"}}]],
        "cancel": [[{"ok": {"state": "cancelled"}}]],
        "status": [[{"ok": {"pid": 1}}]],
        "wait": [[DONE]],
        "restart": [[{"ok": {"job": "digits-2", "created": True}}]],
        "remove": [[{"ok": {"job": "digits-1"}}]],
    }
    with ScriptedDaemon(path, answers) as daemon:
        assert call(path, "submit", SPEC, job="mine", priority=2) == {"job": "digits-1", "created": True}
        assert call(path, "jobs") == [{"job": "digits-1"}]
        assert call(path, "show", "digits-1")["why"] == "no worker is free"
        assert call(path, "cancel", "digits-1") == "cancelled"
        assert call(path, "status") == {"pid": 1}
        assert call(path, "wait", "digits-1") == RESULT
        assert call(path, "restart", "digits-1") == {"job": "digits-2", "created": True}
        assert call(path, "remove", "digits-1") == "digits-1"
    asked = [{key: value for key, value in request.items() if key != "id"} for request in daemon.requests]
    assert asked[0] == {"verb": "submit", "spec": SPEC.to_wire(), "job": "mine", "priority": 2}
    assert [request["verb"] for request in asked[1:]] == ["ps", "show", "cancel", "status", "wait", "restart", "remove"]


def test_jobs_that_ended_before_a_moment_are_asked_for_and_looked_through(path: Path, call: Any) -> None:
    """A daemon that does not know the field sends all, and whoever removes them must not remove those."""
    rows = [{"job": "old", "ended_at": 9.0}, {"job": "new", "ended_at": 10.0}, {"job": "runs", "ended_at": None}]
    with ScriptedDaemon(path, {"ps": [[{"ok": {"jobs": rows}}]]}) as daemon:
        assert call(path, "jobs", ended_before=10.0) == rows[:1]
    assert daemon.requests == [{"id": 1, "verb": "ps", "ended_before": 10.0}]


def test_follow_yields_events_and_last_the_result(path: Path, call: Any) -> None:
    with ScriptedDaemon(path, {"follow": [[log("hello\n", 6), progress(1), DONE]]}) as daemon:
        events = call(path, "follow", "digits-1")
    assert events == [{"log": "hello\n", "offset": 6}, {"progress": {"step": 1, "steps": 9}}, {"result": RESULT}]
    assert daemon.requests[0] == {"id": 1, "verb": "follow", "job": "digits-1", "offset": 0, "progress": True}


def test_follow_resumes_at_the_last_byte_offset_after_a_lost_connection(path: Path, call: Any) -> None:
    turns = [[log("añb", 4), progress(1), HANG_UP], [HANG_UP], [progress(1), log("c", 5), progress(2), DONE]]
    with ScriptedDaemon(path, {"follow": turns}) as daemon:
        events = call(path, "follow", "digits-1")
    assert [request["offset"] for request in daemon.requests] == [0, 4, 4]
    assert [event.get("log") or event.get("progress", {}).get("step") for event in events[:-1]] == ["añb", 1, "c", 2]
    assert events[-1] == {"result": RESULT}


def test_follow_goes_on_with_a_daemon_that_was_started_again(path: Path) -> None:
    with ScriptedDaemon(path, {"follow": [[log("a", 1), HOLD]]}):
        events = Client(path, timeout=180.0).follow("digits-1")
        assert next(events) == {"log": "a", "offset": 1}
    with ScriptedDaemon(path, {"follow": [[log("b", 2), DONE]]}) as second:
        assert [event.get("log") for event in events] == ["b", None]
    assert second.requests[0]["offset"] == 1


def test_wait_goes_on_after_a_lost_connection(path: Path, call: Any) -> None:
    restarting = {"error": {"code": "draining", "message": "the daemon stops"}}
    timed_out = {"error": {"code": "timed-out", "message": "still running"}}
    with ScriptedDaemon(path, {"wait": [[timed_out], [HANG_UP], [restarting], [DONE]]}) as daemon:
        assert call(path, "wait", "digits-1") == RESULT
    assert len(daemon.requests) == 4


def test_wait_and_follow_go_on_where_the_connection_was_lost_before_anything_was_said(path: Path, call: Any) -> None:
    """A wait that had begun less than half a minute before the daemon was replaced ended there."""
    for verb, delivered in (("wait", RESULT), ("follow", [{"result": RESULT}])):
        with ScriptedDaemon(path, {verb: [[HANG_UP], [DONE]]}) as daemon:
            assert call(path, verb, "digits-1") == delivered
        assert len(daemon.requests) == 2


def test_wait_with_a_timeout_is_refused_when_it_has_passed(path: Path, call: Any) -> None:
    timed_out = {"error": {"code": "timed-out", "message": "digits-1 is still running"}}
    with ScriptedDaemon(path, {"wait": [[timed_out]]}) as daemon, pytest.raises(RequestRefused) as refusal:
        call(path, "wait", "digits-1", timeout=0.0)
    assert refusal.value.code == "timed-out"
    assert refusal.value.message == "digits-1 has not ended within 0 s"
    assert [request["timeout"] for request in daemon.requests] == [0.0]


def test_what_a_signal_handler_raises_is_the_callers_whatever_it_is(path: Path) -> None:
    """A TimeoutError of an alarm was taken for the daemon's silence: the call went on, and the alarm was lost."""

    class Alarm:
        def __call__(self, number: int, frame: FrameType | None) -> None:
            raise TimeoutError("of the alarm")

    def alarm(number: int, frame: FrameType | None) -> None:
        Alarm()(number, frame)

    for handler in (alarm, Alarm()):
        before = signal.signal(signal.SIGALRM, handler)
        try:
            with ScriptedDaemon(path, {"wait": [[HOLD]]}):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(TimeoutError, match="of the alarm"):
                    blocking(path, "wait", "digits-1")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_log_ends_where_the_log_ends(path: Path, call: Any) -> None:
    with ScriptedDaemon(path, {"follow": [[log("a", 1), log("b", 2), {"ok": {"result": None}}]]}) as daemon:
        assert call(path, "log", "digits-1") == ["a", "b"]
    assert daemon.requests[0]["live"] is False


def test_leaving_a_follower_early_closes_its_connection(path: Path) -> None:
    follow = Client(path, timeout=180.0).follow("digits-1")
    with ScriptedDaemon(path, {"follow": [[log("a", 1), HOLD]]}), contextlib.closing(follow) as events:
        next(events)
    # a socket left open would warn


def test_a_missing_socket_names_its_path_and_the_remedy(path: Path, call: Any) -> None:
    with pytest.raises(DaemonUnreachable, match=r"weft\.sock: no such socket; .*`weft daemon`.*systemctl --user start"):
        call(path, "jobs")


def test_follow_and_wait_do_not_look_for_a_daemon_that_never_answered(path: Path, call: Any) -> None:
    for verb in ("follow", "wait"):
        with pytest.raises(DaemonUnreachable, match="no such socket"):
            call(path, verb, "digits-1")


def test_a_socket_that_nobody_listens_on_is_unreachable(path: Path, call: Any) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with pytest.raises(DaemonUnreachable, match="nobody listens"):
        call(path, "jobs")


def test_a_full_queue_of_clients_is_waited_for_and_then_named(path: Path, call: Any) -> None:
    """Of 500 that connected at once some were told that the resource is temporarily unavailable."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(path))
        with pytest.raises(DaemonUnreachable, match="too many clients connect at once"):
            call(path, "jobs", timeout_of_client=0.2)
    path.unlink()


def test_who_finds_the_queue_full_tries_again() -> None:
    rehearsal = Rehearsal(good=1, received=[encode(GREETING), encode({"id": 1, "ok": {"jobs": []}})], crowded=3)
    rehearsal.perform(conversation(rehearsal).jobs())
    assert (rehearsal.delivered, rehearsal.pauses) == ([[]], [0.05] * 3)


def test_a_path_too_long_for_a_socket_is_unreachable(tmp_path: Path, call: Any) -> None:
    with pytest.raises(DaemonUnreachable, match="too long"):
        call(tmp_path / ("x" * 120), "jobs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every directory")
def test_a_socket_in_somebody_elses_directory_is_not_ours(tmp_path: Path, call: Any) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    with pytest.raises(RequestRefused, match="WEFT_RUNTIME_DIR") as refusal:
        call(closed / "weft.sock", "jobs")
    assert refusal.value.code == "not-yours"


@pytest.mark.parametrize("code", ["no-such-job", "not-yours", "queue-full", "invented-by-a-newer-daemon"])
def test_a_refusal_carries_the_daemons_code_and_message(path: Path, call: Any, code: str) -> None:
    refused = {"error": {"code": code, "message": "because"}}
    with ScriptedDaemon(path, {"show": [[refused]]}), pytest.raises(RequestRefused, match="because") as refusal:
        call(path, "show", "digits-1")
    assert refusal.value.code == code


def test_a_refusal_in_place_of_the_greeting_is_told_even_when_the_daemon_has_hung_up(path: Path, call: Any) -> None:
    refused = [{"error": {"code": "too-many-connections", "message": "at most 64"}}, HANG_UP]
    with ScriptedDaemon(path, {}, refused), pytest.raises(RequestRefused, match="at most 64") as refusal:
        call(path, "jobs")
    assert refusal.value.code == "too-many-connections"


def test_a_daemon_of_another_protocol_is_refused_with_the_remedy(path: Path, call: Any) -> None:
    greeting = [{"hello": {"protocol": PROTOCOL + 1, "version": "9"}}]
    with ScriptedDaemon(path, {}, greeting), pytest.raises(RequestRefused, match="restart the daemon") as refusal:
        call(path, "jobs")
    assert refusal.value.code == "wrong-protocol"


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x01\xc0", {"hi": 1}])
def test_what_is_no_daemon_is_named_so(path: Path, call: Any, greeting: Any) -> None:
    with ScriptedDaemon(path, {}, [greeting]), pytest.raises(DaemonUnreachable, match="no weft daemon"):
        call(path, "jobs")


@pytest.mark.parametrize("cut", [0, 3, 11])
def test_a_reply_that_is_cut_short_is_a_closed_connection(path: Path, call: Any, cut: int) -> None:
    part = encode({"id": 1, "ok": {"jobs": []}})[:cut]
    with ScriptedDaemon(path, {"ps": [[part, HANG_UP]]}), pytest.raises(DaemonUnreachable, match="closed the conn"):
        call(path, "jobs")


@pytest.mark.parametrize("greeting", [[HOLD], [GREETING]])
def test_a_daemon_that_says_nothing_is_given_up_after_the_timeout(path: Path, call: Any, greeting: Any) -> None:
    with ScriptedDaemon(path, {"ps": [[HOLD]]}, greeting), pytest.raises(DaemonUnreachable, match="does not answer"):
        call(path, "jobs", timeout_of_client=0.05)


@pytest.mark.parametrize("verb", ["show", "cancel", "wait", "remove"])
def test_an_id_that_no_frame_can_hold_is_of_no_job(path: Path, call: Any, verb: str) -> None:
    """A shell hands on any bytes; it was told to use numbers, strings, lists and maps only."""
    with ScriptedDaemon(path, {}), pytest.raises(RequestRefused, match=r"no job 'd\\udcff'; `weft ps") as refusal:
        call(path, verb, "d\udcff")
    assert refusal.value.code == "no-such-job"


def test_a_spec_that_no_frame_can_hold_is_refused_before_it_is_sent(path: Path, call: Any) -> None:
    with ScriptedDaemon(path, {}) as daemon:
        with pytest.raises(RequestRefused, match=r"keep data out of job\.args") as refusal:
            call(path, "submit", {"job": {"args": {"blob": b"x" * (1 << 20)}}})
        assert refusal.value.code == "frame-too-large"
        with pytest.raises(RequestRefused, match="cannot be sent") as refusal:
            call(path, "submit", {"job": {"args": {"when": object()}}})
        assert refusal.value.code == "bad-field"
    assert daemon.requests == []


class Rehearsal:
    """Performs a script without a socket, in virtual time: each attempt to connect fails, but for the first `good`."""

    def __init__(self, good: int, received: list[bytes | type[OSError]], crowded: int = 0) -> None:
        self._crowded = crowded
        self.now = 0.0
        self.pauses: list[float] = []
        self.delivered: list[Any] = []
        self._good = good
        self._received = received

    def perform(self, script: Script) -> None:
        step = next(script)
        with contextlib.suppress(StopIteration):
            while True:
                step = self._answer(script, step)

    def _answer(self, script: Script, step: Any) -> Any:
        match step:
            case Connect() if self._crowded > 0:
                self._crowded -= 1
                return script.throw(BlockingIOError())
            case Connect():
                self._good -= 1
                return script.send(b"") if self._good >= 0 else script.throw(FileNotFoundError())
            case Receive(timeout):
                data = self._received.pop(0)
                if isinstance(data, bytes):
                    return script.send(data)
                self.now += timeout
                return script.throw(data())
            case Pause(seconds):
                self.pauses.append(seconds)
                self.now += seconds
            case Deliver(item):
                self.delivered.append(item)
            case Send() | Close():
                pass
        return script.send(b"")


def conversation(rehearsal: Rehearsal, reconnect_seconds: float = 60.0) -> Conversation:
    return Conversation(Path("weft.sock"), 10.0, reconnect_seconds, clock=lambda: rehearsal.now)


def test_a_daemon_that_stays_away_is_given_up_after_sixty_seconds_of_growing_pauses() -> None:
    rehearsal = Rehearsal(good=1, received=[encode(GREETING), encode({"id": 1} | progress(1)), b""])
    with pytest.raises(DaemonUnreachable, match="no such socket"):
        rehearsal.perform(conversation(rehearsal).follow("digits-1", 0, True))
    assert rehearsal.pauses[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert 57.0 < rehearsal.now <= 60.0


def test_a_daemon_that_greets_and_hangs_up_for_ever_is_given_up_too() -> None:
    rehearsal = Rehearsal(good=1000, received=[encode(GREETING), encode({"id": 1} | log("a", 1)), b""])
    rehearsal._received += [encode(GREETING), b""] * 1000
    with pytest.raises(DaemonUnreachable, match=r"closed the connection; it is stopping, .* try again$"):
        rehearsal.perform(conversation(rehearsal).follow("digits-1", 0, True))
    assert 57.0 < rehearsal.now <= 60.0


def test_a_job_that_is_silent_for_hours_is_followed_on_a_new_connection_every_half_minute() -> None:
    silence: list[bytes | type[OSError]] = [encode(GREETING), TimeoutError]
    rehearsal = Rehearsal(good=1000, received=[*silence * 240, encode(GREETING), encode({"id": 1} | DONE)])
    rehearsal.perform(conversation(rehearsal).follow("digits-1", 0, True))
    assert rehearsal.delivered == [{"result": RESULT}]
    assert rehearsal.now > 7200.0


def test_wait_looks_for_a_lost_daemon_no_longer_than_its_own_timeout() -> None:
    timed_out = encode({"id": 1, "error": {"code": "timed-out", "message": ""}})
    rehearsal = Rehearsal(good=1, received=[encode(GREETING), timed_out])
    with pytest.raises(DaemonUnreachable):
        rehearsal.perform(conversation(rehearsal).wait("digits-1", 5.0))
    assert 3.0 < rehearsal.now <= 5.0


@pytest.mark.parametrize(
    "environment",
    [{}, {"WEFT_RUNTIME_DIR": "mine"}, {"WEFT_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "/x"}, {"XDG_RUNTIME_DIR": ""}],
)
@pytest.mark.parametrize("file", [None, "", "[daemon]\nworkers = 2\n", '[daemon]\nruntime_dir = "/srv/weft"\n'])
def test_the_default_socket_is_that_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], file: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if file is not None:
        Path("weft.toml").write_text(file)
    assert default_socket_path(environment).absolute() == load_settings({}, environment, None).socket_path


@pytest.mark.parametrize("text", ["[daemon", "[daemon]\nruntime_dir = 3\n"])
def test_a_broken_weft_toml_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weft.toml").write_text(text)
    with pytest.raises(SpecError, match=r"weft\.toml|runtime_dir"):
        default_socket_path({})


def test_no_part_of_the_command_line_imports_torch() -> None:
    code = (
        "import sys, weft, weft.client.client, weft.client.embedded, weft.cli.main, weft.cli.screens.display\n"
        "import weft.client.follower, weft.cli.verbs.app, weft.cli.verbs.job_list, weft.reference.run\n"
        "import weft.spec.job_spec, weft.spec.settings\n"
        "assert all(getattr(weft, name) for name in weft.__all__ if name != 'Workload')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 0


def test_the_list_of_jobs_waits_for_no_heavy_import() -> None:
    heavy = ["asyncio", "pydantic", "rich", "typer", "torch"]
    code = "import sys, weft.cli.main, weft.cli.exits, weft.cli.verbs.job_list\n"
    code += f"sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 0


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"socket": 3}, "socket: 3 is no path; give a str or a pathlib.Path, or leave it out"),
        ({"socket": "a\0b"}, r"socket: 'a.x00b' is no path"),
        ({"timeout": None}, r"timeout: None is no number of seconds; write for example 10\.0"),
        ({"timeout": float("nan")}, "timeout: nan is no number"),
        ({"timeout": -1}, "timeout: -1 is no number"),
        ({"reconnect_seconds": "60"}, "reconnect_seconds: '60' is no number of seconds; write for example 60"),
    ],
)
def test_arguments_of_a_client_are_refused_by_name(client: Any, arguments: dict[str, Any], sentence: str) -> None:
    """They were a TypeError or ValueError out of Weft's own lines, at the first call."""
    with pytest.raises(SpecError, match=f"weft.Client: {sentence}"):
        client(**arguments)
