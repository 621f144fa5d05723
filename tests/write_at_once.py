"""A run writer for tests that have no event loop. Modules take it with `runpy`."""

from __future__ import annotations

from collections.abc import Callable

from weft.scheduler.runs.run_writer import Troubles


class WriteAtOnce:
    """In the caller's thread."""

    def __init__(self) -> None:
        self.troubles = Troubles()

    def put(self, write: Callable[[], None]) -> None:
        write()

    async def settled(self) -> None:
        pass
