"""Back-off: how long to wait before the next try at what has failed. Twice as long each time, up to a bound."""

from __future__ import annotations

FIRST_SECONDS = 0.1
MAX_SECONDS = 10.0


def back_off(failures: int) -> float:
    """Seconds to wait after so many failures in a row: the first one costs nothing."""
    if failures < 2:
        return 0.0
    return float(min(FIRST_SECONDS * 2 ** min(failures - 2, 30), MAX_SECONDS))
