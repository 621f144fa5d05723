"""Something that changes again and again, and may be waited on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Changed:
    """Something to wait on that happens again and again: each `notify` ends every `wait` that has begun.

    num_times: that it has happened, for those who only look now and then.
    """

    def __init__(self) -> None:
        self.num_times = 0
        self._next: asyncio.Future[None] | None = None

    def notify(self) -> None:
        self.num_times += 1
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)


Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
