"""A worker's connection to the daemon. Its end, at whichever side, is the worker's."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from weft.transport.wire.frames import LINK_GONE_EXIT, MAX_WORKER_FRAME_BYTES, FrameReader, Message, WireError, encode

RECEIVE_BYTES = 1 << 16


class Connection:
    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """From any thread."""
        with self._lock:
            try:
                self._socket.sendall(encode(message))
            except ConnectionError:
                os._exit(0)  # the daemon is gone
            except OSError:
                leave_without_link()

    def listen(self, route: Callable[[Message], None]) -> NoReturn:
        """The body of the control thread: `route` gets every message that comes."""
        reader = FrameReader(MAX_WORKER_FRAME_BYTES)
        try:
            while data := self._socket.recv(RECEIVE_BYTES):
                for message in reader.feed(data):
                    route(message)
        except ConnectionError:
            pass
        except (OSError, WireError):
            leave_without_link()
        except Exception:  # a fault of ours, and a worker that hears no more: as if it had been killed from outside
            traceback.print_exc(file=sys.__stderr__)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)  # the daemon is gone; the main thread may be deep in the user's code

    def close(self) -> None:
        """Of a process that has it by a fork alone."""
        self._socket.close()


def leave_without_link() -> NoReturn:
    """The job's code has closed a socket, put something else in its place or read from it."""
    os._exit(LINK_GONE_EXIT)
