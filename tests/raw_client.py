"""A client of the daemon's socket that sends what it likes. Modules take it with `runpy`: tests are no package."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.transport.wire.frames import MAX_REPLY_BYTES, FrameReader, encode

SECONDS = 180.0  # for an answer


class RawClient:
    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS)
        self.socket.connect(str(path))
        self._reader = FrameReader(2 * MAX_REPLY_BYTES)
        self._messages: list[dict[str, Any]] = []

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *messages: Mapping[str, Any]) -> None:
        self.socket.sendall(b"".join(encode(dict(message)) for message in messages))

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """The answer, events passed over."""
        self.send({"id": 1, "verb": verb, **fields})
        while "event" in (message := self.receive()):
            pass
        return message

    def receive(self) -> dict[str, Any]:
        """The next message; {} at the end of the stream. A reset is an error: it takes with it what was said before."""
        while not self._messages:
            data = self.socket.recv(1 << 16)
            if not data:
                return {}
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def is_closed(self) -> bool:
        """Waits for the daemon to close, whatever it says before."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def deafen(self) -> None:
        """It takes as little as the kernel allows."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
