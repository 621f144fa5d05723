"""Quantities, as people read them: durations, sizes, numbers, shares."""

from __future__ import annotations

import math

LARGE = 1e9  # from here on a number has a power of ten
_NONE = "-"


def duration(seconds: float | None) -> str:
    """For people: 12 µs, 4.5 ms, 3.25 s, 4 min 05 s, 2 h 03 min, 3 d 04 h."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size:02d} {smaller}"
    raise AssertionError("a minute is at least one unit")


def size(num_bytes: float | None) -> str:
    """In binary units: 512 B, 1.5 KiB, 24.0 MiB."""
    if num_bytes is None:
        return _NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def number(value: float | None, digits: int = 4) -> str:
    """So many digits, and all of those before the point, as far as anybody reads them."""
    if value is None:
        return _NONE
    return f"{value:.0f}" if 10**digits <= abs(value) < LARGE else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f} %"
