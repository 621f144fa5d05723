"""A real headless Chromium for tests: one page, driven over the DevTools protocol on loopback.

Modules of this directory take it with `runpy`, since tests are no package.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = Path("/usr/bin/chromium")
SECONDS = 180.0  # for anything that is awaited: far above what it takes
POLL_SECONDS = 0.05
MAX_MESSAGE_BYTES = 1 << 26
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
# Of keys whose DevTools fields are not the character itself.
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Home": 36,
    "End": 35,
    "Tab": 9,
    "Escape": 27,
}


class Browser:
    """`async with Browser() as browser`. errors: what the page wrote to the console as an error, or threw.
    requests: the URL of every request that it made."""

    def __init__(self, width: int = 1280, height: int = 1000) -> None:
        self._size = width, height
        self._home = Path(tempfile.mkdtemp(prefix="wb-", dir="/tmp"))
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def __aenter__(self) -> Browser:
        self._process = self._start()
        try:
            self._session = aiohttp.ClientSession()
            self._socket = await self._session.ws_connect(await self._page_url(), max_msg_size=MAX_MESSAGE_BYTES)
            self._reader = asyncio.create_task(self._read(), name="browser")
            for domain in ("Page", "Runtime", "Network", "Log"):
                await self.call(f"{domain}.enable")
            await self.resize(*self._size)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if hasattr(self, "_reader"):
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
            await self._socket.close()
        if hasattr(self, "_session"):
            await self._session.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group that start_new_session made: its helpers too
        self._process.wait(SECONDS)
        with suppress(OSError):  # the directory of its socket, which it makes where there are temporary files
            shutil.rmtree((self._home / "profile" / "SingletonSocket").readlink().parent, ignore_errors=True)
        shutil.rmtree(self._home, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        size, profile = "{},{}".format(*self._size), self._home / "profile"
        with (self._home / "log").open("wb") as log:
            return subprocess.Popen(
                [str(CHROMIUM), *FLAGS, f"--window-size={size}", f"--user-data-dir={profile}", "about:blank"],
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(self._home)},
                start_new_session=True,
            )

    async def _page_url(self) -> str:
        port = self._home / "profile" / "DevToolsActivePort"
        await until(lambda: port.exists() and port.read_text().count("\n"), "the browser's port")
        number = int(port.read_text().split()[0])

        async def page() -> Any:
            async with self._session.get(f"http://127.0.0.1:{number}/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            return pages and pages[0]["webSocketDebuggerUrl"]

        url: str = await until(page, "the browser's page")
        return url

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            match message:
                case {"id": number} if number in self._answers:
                    self._answers.pop(number).set_result(message)
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                    self.errors.append(details.get("exception", {}).get("description") or details["text"])
                case {"method": "Runtime.consoleAPICalled", "params": {"type": "error" | "warning", "args": told}}:
                    self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in told))
                case {"method": "Log.entryAdded", "params": {"entry": {"level": "error" | "warning"} as entry}}:
                    self.errors.append(f"{entry['text']} {entry.get('url', '')}")
                case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                    self.requests.append(url)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(SECONDS):
            message = await answer
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str) -> None:
        """Returns once the page has been loaded."""
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'", "the page")

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, what: str = "") -> Any:
        """The expression's first true value."""
        return await until(lambda: self.evaluate(expression), what or expression)

    async def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    async def hover(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def press(self, key: str) -> None:
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS.get(key, 0)}
        if key not in KEYS:
            fields |= {"text": key, "code": "", "windowsVirtualKeyCode": ord(key.upper())}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **{k: v for k, v in fields.items() if k != "text"})


async def until(condition: Any, what: str) -> Any:
    """The first true value of a function, which may be a coroutine function."""
    deadline = asyncio.get_running_loop().time() + SECONDS
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert asyncio.get_running_loop().time() < deadline, f"not within {SECONDS} s: {what}"
        await asyncio.sleep(POLL_SECONDS)
