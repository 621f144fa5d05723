"""A daemon that says what a test tells it to: a real asyncio server on a real Unix socket, in a thread of its own.

    answers = {"follow": [[{"event": {...}}, HANG_UP], [{"ok": {...}}]]}

For each verb: one list of actions for each request, in turn (the last list serves all later ones). An action is a
message (it gets the request's id), raw bytes, HANG_UP (close at once) or HOLD (say nothing until the client leaves).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.transport.wire.frames import MAX_CLIENT_FRAME_BYTES, PROTOCOL, FrameReader, encode

HANG_UP = object()
HOLD = object()
GREETING = {"hello": {"protocol": PROTOCOL, "version": "0.1.0", "pid": 4242}}
START_SECONDS = 180.0


class ScriptedDaemon:
    """requests: what clients have asked, in order. held: set once a HOLD is reached."""

    def __init__(
        self, socket_path: Path, answers: Mapping[str, Sequence[Sequence[Any]]], greeting: Sequence[Any] = (GREETING,)
    ) -> None:
        self.socket_path = socket_path
        self.requests: list[dict[str, Any]] = []
        self.held = threading.Event()
        self._answers = {verb: list(turns) for verb, turns in answers.items()}
        self._greeting = greeting
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="scripted-daemon")
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def __enter__(self) -> ScriptedDaemon:
        self._thread.start()
        assert self._ready.wait(START_SECONDS), "the scripted daemon does not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(asyncio.create_task(self._converse(reader, writer)))

        server = await asyncio.start_unix_server(connected, self.socket_path)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in connections:
            task.cancel()
        for outcome in await asyncio.gather(*connections, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
                raise outcome
        os.unlink(self.socket_path)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader(MAX_CLIENT_FRAME_BYTES)
        try:
            while data := await reader.read(1 << 16):
                for message in frames.feed(data):
                    if not await self._perform(self._turn(message), message.get("id"), reader, writer):
                        return
        finally:
            writer.close()

    def _turn(self, message: dict[str, Any]) -> Sequence[Any]:
        if "hello" in message:
            return self._greeting
        self.requests.append(message)
        turns = self._answers[message["verb"]]
        return turns.pop(0) if len(turns) > 1 else turns[0]

    async def _perform(
        self, actions: Sequence[Any], request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        for action in actions:
            if action is HANG_UP:
                return False
            if action is HOLD:
                self.held.set()
                await reader.read()
                return False
            if isinstance(action, bytes):
                writer.write(action)
            else:
                writer.write(encode(action if request is None else {"id": request} | action))
            await writer.drain()
        return True
