"""The timeline page of a real daemon: its JSON beside the job's recording, and the page itself in a real Chromium."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.prometheus.exporter import Exporter
from weft.metrics.recording.recording import Recording
from weft.metrics.views.page_data import timeline
from weft.plan.kinds import FIRST_STALL
from weft.scheduler.daemon.http.server import MetricsServer

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
_BROWSER = runpy.run_path(str(Path(__file__).with_name("browser.py")))
_RECORDED = runpy.run_path(str(Path(__file__).parents[1] / "metrics" / "views" / "recorded.py"))
RealDaemon, until, SECONDS = _REAL["RealDaemon"], _REAL["until"], _REAL["SECONDS"]
Browser, CHROMIUM = _BROWSER["Browser"], _BROWSER["CHROMIUM"]
wide_recording, TASK_NS = _RECORDED["wide_recording"], _RECORDED["TASK_NS"]

needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed")
PIPELINE = {"stages": 2, "microbatches": 4}
ENDLESS = 100_000_000
Serve = Callable[[Any], Awaitable[str]]  # what the page shows; where it is
VIEW = "(await import('./page.js')).view"
RAISES = """
def workload():
    raise ValueError("<img src=x onerror=alert(1)> is no learning rate")
"""


def asked(daemon: RealDaemon, path: str) -> Any:
    with urllib.request.urlopen(daemon.client.status()["metrics"] + path, timeout=SECONDS) as answer:
        return json.load(answer)


def refused(daemon: RealDaemon, path: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        asked(daemon, path)
    with caught.value as answer:
        return answer.code, json.load(answer)["error"]


# --- the JSON


@pytest.mark.slow
def test_an_ended_jobs_timeline_is_that_of_its_recording_and_its_curves_have_every_step(daemon: RealDaemon) -> None:
    result = daemon.run(daemon.spec(strategy=PIPELINE, steps=30))
    job = result["job"]
    recording = Recording.load(daemon.client.record(job))
    assert asked(daemon, f"/api/jobs/{job}/timeline?iterations=2") == json.loads(b"".join(timeline(recording, 2)))
    told = asked(daemon, f"/api/jobs/{job}")
    assert [step for step, _ in told["history"]["loss"]] == list(range(1, 31))
    assert told["history"]["loss"][-1][1] == pytest.approx(result["loss"])
    assert told["history"]["validation_loss"][-1][1] == pytest.approx(result["validation"]["loss"])
    assert told["state"] == "completed"
    assert told["time"] == daemon.client.show(job)["time"]
    assert asked(daemon, "/api/jobs")["jobs"][0]["job"] == job


@pytest.mark.slow
def test_a_running_jobs_timeline_is_made_of_rows_that_its_recording_has(daemon: RealDaemon) -> None:
    job = daemon.submit(daemon.spec(strategy=PIPELINE, steps=ENDLESS))
    path = f"/api/jobs/{job}/timeline?iterations=3"
    told = until(lambda: (each := asked(daemon, path))["iterations"] and each, "an iteration that is whole")
    newer = until(lambda: (each := asked(daemon, path))["iterations"] != told["iterations"] and each, "newer ones")
    recording = Recording.load(daemon.client.record(job))
    assert daemon.client.cancel(job) == "cancelled"
    assert len(newer["iterations"]) == 3
    ends = recording.iteration_ends
    begin = ends[newer["iterations"][0]["iteration"] - 1]
    for each in newer["iterations"]:
        assert each["end"] == ends[each["iteration"]] - begin
    assert [lane["lane"] for lane in newer["lanes"]] == list(recording.programs)
    for lane in newer["lanes"]:
        flat = iter(lane["rows"])
        rows = [(m, t, i, w, begin + s, begin + s + d) for m, t, i, w, s, d in zip(*[flat] * 6, strict=True)]
        assert rows or lane["lane"].startswith("loader-"), "who rests stamps that once it is over"
        assert set(rows) <= set(recording.rows[lane["lane"]])
    assert newer["planned"]["seconds"] > 0
    assert asked(daemon, f"/api/jobs/{job}")["state"] == "cancelled"


def test_an_unknown_job_and_a_bad_number_are_refused_with_what_to_do(daemon: RealDaemon) -> None:
    assert refused(daemon, "/api/jobs/nobody-1") == (404, "job: no job 'nobody-1'; /api/jobs lists them")
    assert refused(daemon, "/api/jobs/nobody-1/timeline")[0] == 404
    status, problem = refused(daemon, "/api/jobs/nobody-1/timeline?iterations=1000")
    assert (status, problem.partition(":")[0]) == (400, "iterations")


# --- the page in a browser


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[MetricsServer] = []

    async def start(source: Any) -> str:
        servers.append(MetricsServer(Exporter(), "127.0.0.1", 0, source))
        return await servers[-1].start()

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def browser(serve: Serve) -> AsyncIterator[Any]:  # which outlives it: a page asks again every second
    """After the test: no error on its console, and no request to anybody but the page's own server."""
    async with Browser() as browser:
        yield browser
        assert browser.errors == []
        hosts = {"/".join(url.split("/")[:3]) for url in browser.requests if not url.startswith("data:")}
        assert hosts <= {await browser.evaluate("location.origin"), "about:blank"}


async def text(browser: Any, selector: str) -> str:
    value: str = await browser.evaluate(f"document.querySelector({selector!r})?.textContent ?? ''")
    return value


async def details(browser: Any) -> dict[str, str]:
    """What the page says of the chosen bar."""
    script = """Object.fromEntries([...document.querySelectorAll('#detail dl > div')]
        .map(each => [...each.children].map(part => part.textContent)))"""
    found: dict[str, str] = await browser.evaluate(script)
    return found


async def place_of(browser: Any, bar: str) -> tuple[float, float]:
    """The middle of a bar in the window, once it is in view. bar: an expression of `view`."""
    await browser.evaluate("document.getElementById('canvas').scrollIntoView({block: 'center'})")
    script = f"""(async () => {{ const view = {VIEW}; const box = view.canvas.getBoundingClientRect();
        const place = view.placeOf({bar}); return [box.left + place.x, box.top + place.y]; }})()"""
    x, y = await browser.evaluate(script)
    return x, y


async def chosen(browser: Any) -> Any:
    return await browser.evaluate(f"(async () => {VIEW}.chosen)()")


async def until_painted(browser: Any) -> None:
    """The canvas has more than a few colours on it: some frames after the numbers beside it."""
    script = """(async () => { const canvas = document.getElementById('canvas'); if (!canvas.height) return false;
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
        copy.drawImage(canvas, 0, 0);
        const colours = new Uint32Array(copy.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
        return new Set(colours).size > 5; })()"""
    await browser.until(script, "a picture")


@needs_chromium
@pytest.mark.slow
async def test_a_running_job_is_shown_and_updated_and_a_click_on_a_bar_tells_what_was_recorded(
    daemon: RealDaemon, browser: Any
) -> None:
    job = daemon.submit(daemon.spec(strategy=PIPELINE, steps=ENDLESS))
    await browser.open(daemon.client.status()["metrics"])
    await browser.until("document.querySelectorAll('#lanes tr').length === 3", "three lanes")
    window = await browser.until("document.getElementById('window').textContent", "a window")
    assert await text(browser, "#job-name") == job
    assert await text(browser, "#jobs a[aria-current]") != ""
    assert await browser.evaluate("document.querySelectorAll('#figures div').length") == 10
    await browser.until("document.querySelectorAll('#stalls tr').length >= 3", "waits")
    await browser.until("document.querySelectorAll('#loss .curve, #speed .curve').length >= 2", "two curves")
    await until_painted(browser)
    # a later window, and later steps, without a reload
    await browser.until(f"document.getElementById('window').textContent !== {window!r}", "a newer window")

    longest = f"""(async () => {{ const view = {VIEW}; const all = [];
        for (let index = 0; index < view.timeline.count(1); index += 1) all.push(view.timeline.bar(1, index));
        const forwards = all.filter(bar => bar.mode === 'forward' && bar.start > 0);
        return forwards.sort((a, b) => b.duration - a.duration)[0]; }})()"""
    await browser.evaluate("document.getElementById('live').click()")
    bar = await browser.evaluate(longest)
    x, y = await place_of(browser, json.dumps(bar))
    await browser.hover(x, y)
    assert "step " in await browser.until(
        "!document.getElementById('tip').hidden && document.getElementById('tip').textContent"
    )
    await browser.click(x, y)
    said = await details(browser)
    recording = Recording.load(daemon.client.record(job))
    assert daemon.client.cancel(job) == "cancelled"
    lane = list(recording.programs)[1]
    (row,) = [
        row for row in recording.rows[lane] if row[:3] == (0, bar["task"], bar["iteration"]) and row[0] < FIRST_STALL
    ]
    assert row[5] - row[4] == bar["duration"]
    assert said["task"] == recording.tasks[bar["task"]].name
    label = recording.label(bar["iteration"])
    assert label.startswith(("step ", "validation "))
    assert (said["lane"], said["kind"], said["iteration"]) == (lane, "forward", label)
    value, unit = said["duration"].split()
    assert float(value) * {"ms": 1e6, "µs": 1e3}[unit] == pytest.approx(bar["duration"], rel=0.006)
    assert await text(browser, "#live") == "resume"


@needs_chromium
@pytest.mark.slow
async def test_an_ended_job_is_shown_from_its_recording_and_the_keys_go_from_bar_to_bar(
    daemon: RealDaemon, browser: Any
) -> None:
    job = daemon.run(daemon.spec(strategy=PIPELINE, steps=20))["job"]
    await browser.open(f"{daemon.client.status()['metrics']}/#job={job}")
    await browser.until(f"(async () => {VIEW}.timeline?.iterations.length === 4)()", "four iterations")
    assert await text(browser, "#job-state") == "completed"
    await browser.evaluate("document.getElementById('canvas').focus()")
    await browser.press("ArrowRight")
    if (await chosen(browser))["lane"] == 0:  # a loader's: it may have one bar left, or none
        await browser.press("ArrowDown")
        await browser.press("Home")
    first = await chosen(browser)
    await browser.press("ArrowRight")
    second = await chosen(browser)
    assert (second["lane"], second["index"]) == (first["lane"], first["index"] + 1)
    await browser.press("ArrowDown")
    below = await chosen(browser)
    assert below["lane"] == first["lane"] + 1
    spoken = await text(browser, "#said")
    assert (await details(browser))["lane"] in spoken
    await browser.press("ArrowUp")
    assert await text(browser, "#said") != spoken
    await browser.press("n")
    assert await browser.evaluate(
        f"(async () => {{ const view = {VIEW}; return view.timeline.isOnPath(view.chosen); }})()"
    )
    await browser.press("+")
    assert await browser.evaluate(f"(async () => {VIEW}.view.to - {VIEW}.view.from < 1)()")
    await browser.press("0")
    assert await browser.evaluate(f"(async () => {VIEW}.view)()") == {"from": 0, "to": 1}
    await browser.press("Escape")
    assert await chosen(browser) is None
    # an update leaves the choice where it is, also among bars that only time tells apart
    assert await browser.evaluate(f"""(async () => {{ const view = {VIEW}, before = view.timeline.told;
        const told = structuredClone(before);
        const lane = told.lanes.findIndex(({{ rows }}) => rows.length >= 18), {{ rows }} = told.lanes[lane];
        for (const at of [0, 1, 2]) rows[6 + at] = rows[12 + at] = rows[at];
        view.show(told);
        view.choose(view.timeline.bar(lane, 1));
        const later = structuredClone(told);
        later.ended_at += 1e-3;
        for (const {{ rows }} of later.lanes) for (let at = 4; at < rows.length; at += 6) rows[at] -= 1e6;
        const found = [told, later].map((each) => {{ view.show(structuredClone(each)); return view.chosen.index; }});
        view.show(before);
        return found; }})()""") == [1, 1]
    await browser.press("Escape")
    # from a wait to what it waited for
    found = await browser.evaluate(f"""(async () => {{ const view = {VIEW};
        for (let lane = 0; lane < view.timeline.lanes.length; lane += 1)
            for (let index = 0; index < view.timeline.count(lane); index += 1) {{
                const bar = view.timeline.bar(lane, index);
                if (view.timeline.isWait(bar) && view.timeline.waitedFor(bar)) {{ view.choose(bar); return bar; }}
            }} }})()""")
    await browser.press("w")
    awaited = await chosen(browser)
    assert awaited["task"] == found["waitedFor"]
    assert awaited["start"] <= found["start"] + found["duration"]


@needs_chromium
@pytest.mark.slow
async def test_the_page_follows_the_readers_theme_and_has_a_table_beside_the_picture(
    daemon: RealDaemon, browser: Any
) -> None:
    job = daemon.run(daemon.spec(strategy=PIPELINE, steps=20))["job"]
    await browser.prefer("light")
    await browser.open(f"{daemon.client.status()['metrics']}/#job={job}")
    await browser.until(f"(async () => {VIEW}.timeline?.iterations.length)()", "iterations")
    back = "getComputedStyle(document.documentElement).backgroundColor"
    light = await browser.evaluate(back)
    await browser.prefer("dark")
    await browser.until(f"{back} !== {light!r}", "a dark page")
    await until_painted(browser)
    await browser.evaluate("document.getElementById('rows').open = true")
    await browser.until("document.querySelectorAll('#rows-body tr').length", "rows")
    rows = await browser.evaluate("document.querySelectorAll('#rows-body tr').length")
    lane = "Number(document.getElementById('rows-lane').value)"
    assert rows == await browser.evaluate(f"(async () => {VIEW}.timeline.count({lane}))()")
    for width in (1024, 1920):
        await browser.resize(width, 900)
        await browser.until(f"document.documentElement.clientWidth > {width - 40}", "the width")
        assert await browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.days(2)
@needs_chromium
@pytest.mark.slow
async def test_a_page_without_jobs_says_so_and_shows_what_is_submitted_then_its_error_as_text(
    own_daemon: Callable[..., RealDaemon], browser: Any
) -> None:
    daemon = own_daemon()
    await browser.open(daemon.client.status()["metrics"])
    await browser.until("document.getElementById('notice').textContent.includes('No job yet')", "an empty page")
    result = daemon.run(daemon.spec(RAISES))
    assert result["state"] == "failed"
    await browser.until("document.getElementById('job-notice').classList.contains('failed')", "the failed job")
    assert "<img src=x onerror=alert(1)> is no learning rate" in await text(browser, "#job-notice pre")
    assert await browser.evaluate("document.querySelectorAll('main img').length") == 0
    assert (await text(browser, "#job-notice h3")).startswith("Failed: user-error")


@needs_chromium
@pytest.mark.slow
async def test_a_job_that_waits_says_why(daemon: RealDaemon, browser: Any) -> None:
    first = daemon.submit(daemon.spec(strategy={"stages": 3}, steps=ENDLESS))
    until(lambda: daemon.client.show(first)["state"] == "running", "a running job")
    second = daemon.submit(daemon.spec(strategy={"stages": 3}))
    await browser.open(f"{daemon.client.status()['metrics']}/#job={second}")
    await browser.until("document.querySelector('#job-notice h3')?.textContent === 'It waits'", "a reason")
    assert first in await text(browser, "#job-notice p")
    assert not await browser.evaluate("document.getElementById('canvas').checkVisibility()")
    await browser.until(f"document.querySelector('#jobs a[data-job={first}]') !== null", "the list of jobs")
    await browser.evaluate(f"document.querySelector('#jobs a[data-job={first}]').click()")
    await browser.until(f"document.getElementById('job-name').textContent === '{first}'", "the other job")
    await browser.until("document.getElementById('canvas').checkVisibility()", "its timeline")
    assert await text(browser, "#jobs a[aria-current] strong") == first
    for job in (second, first):
        assert daemon.client.cancel(job) == "cancelled"


@needs_chromium
@pytest.mark.slow
async def test_iterations_are_counted_as_training_steps_wherever_they_are_named(
    daemon: RealDaemon, browser: Any
) -> None:
    """The page of a job of 126 steps said "iterations 126 to 129": validations were counted."""
    job = daemon.run(daemon.spec(strategy=PIPELINE, steps=20))["job"]
    recording = Recording.load(daemon.client.record(job))
    assert recording.itinerary is not None
    assert recording.itinerary.num_iterations > 20, "with validations"
    await browser.open(f"{daemon.client.status()['metrics']}/#job={job}")
    await browser.until(f"(async () => {VIEW}.timeline?.iterations.length)()", "iterations")
    every = list(range(recording.itinerary.num_iterations))
    script = f"(async () => {{ const view = {VIEW}; return {every}.map(each => view.timeline.label(each)); }})()"
    labels = await browser.evaluate(script)
    assert labels == [recording.label(each) for each in every]
    window = await browser.until("document.getElementById('window').textContent", "the window")
    assert int(re.split(r"[ ,]", window.partition(", ")[0])[-1]) == 20
    await browser.evaluate("document.getElementById('rows').open = true")
    await browser.until("document.querySelectorAll('#rows-body tr').length", "rows")
    told = await browser.evaluate(
        "[...document.querySelectorAll('#rows-body tr')].map(row => row.cells[0].textContent)"
    )
    assert set(told) <= {"–", *labels}


@needs_chromium
@pytest.mark.slow
async def test_a_narrow_page_begins_with_the_job_and_fits(daemon: RealDaemon, browser: Any) -> None:
    job = daemon.run(daemon.spec(strategy=PIPELINE, steps=20))["job"]
    await browser.open(f"{daemon.client.status()['metrics']}/#job={job}")
    await browser.until("document.querySelectorAll('#stalls tr').length", "the job")
    top = "document.querySelector('{}').getBoundingClientRect().top"
    for width, job_first in ((390, True), (690, True), (1280, False)):
        await browser.resize(width, 900)
        await browser.until(f"Math.abs(document.documentElement.clientWidth - {width}) < 40", "the width")
        assert await browser.evaluate(f"{top.format('main')} < {top.format('nav')}") == job_first
        assert await browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@needs_chromium
@pytest.mark.slow
async def test_a_page_that_has_not_heard_from_the_daemon_does_not_say_that_there_is_no_job(
    browser: Any, serve: Serve
) -> None:
    """With a job in its address it said "none yet" while it was connecting."""
    await browser.open(f"{await serve(_Silent())}/#job=wide-1")
    await browser.until("document.getElementById('jobs').textContent", "the list of jobs")
    assert await text(browser, "#jobs") == "not known yet"
    assert not await browser.evaluate("document.body.textContent.includes('No job yet')")


class _Wide:
    """A source of one recording of 32 lanes with 200 tasks each."""

    def __init__(self) -> None:
        self.recording = wide_recording()

    async def jobs(self) -> list[dict[str, Any]]:
        return [{"job": "wide-1", "state": "completed", "step": 6, "steps": 6}]

    async def job(self, job: str) -> bytes | None:
        return json.dumps({**(await self.jobs())[0], "attempt": 1, "time": {"lanes": {}, "stalls": []}}).encode()

    async def timeline(self, job: str, iterations: int) -> bytes | None:
        return b"".join(timeline(self.recording, iterations))

    def live(self) -> dict[str, Any]:
        return {"jobs": {}, "progress": {}}


class _Silent(_Wide):
    """It has not told of its jobs yet."""

    async def jobs(self) -> list[dict[str, Any]]:
        return await asyncio.Future()

    async def job(self, job: str) -> bytes | None:
        return await asyncio.Future()


@needs_chromium
@pytest.mark.slow
async def test_32_lanes_of_200_tasks_are_drawn_and_each_bar_can_be_clicked(browser: Any, serve: Serve) -> None:
    await browser.open(await serve(_Wide()))
    await browser.until(f"(async () => {VIEW}.timeline?.iterations.length === 4)()", "four iterations")
    await browser.until("document.getElementById('canvas').height > 700", "32 lanes")
    await until_painted(browser)
    for lane, index in ((0, 1999), (31, 1505), (17, 1901)):
        bar = f"view.timeline.bar({lane}, {index % 1000})"
        await browser.evaluate(f"(async () => {{ const view = {VIEW}; const bar = {bar};"
                               " view.zoomAll(); view.zoom(200, bar.start / view.timeline.duration); })()")  # fmt: skip
        await browser.click(*await place_of(browser, bar))
        picked = await chosen(browser)
        assert (picked["lane"], picked["index"]) == (lane, index % 1000)
        if not picked["mode"].startswith("stall"):
            assert picked["duration"] == TASK_NS
        assert (await details(browser))["lane"] == f"cpu-{lane}/compute"
