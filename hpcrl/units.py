"""Formats sizes and durations for people."""

from __future__ import annotations

import math


def readable_size(size: float) -> str:
    """Return a number of bytes as 512 B, 1.5 GiB or 4.0 TiB."""
    if size < 1024:
        return f"{size:.0f} B"
    power = min(4, int(math.log(size, 1024)))
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def duration(seconds: float) -> str:
    """Return a duration as 12 s, 3:05 or 2:03:05."""
    if seconds < 60:
        return f"{max(0, round(seconds))} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rough_duration(seconds: float) -> str:
    """Return a duration in its largest unit: 12 s, 3 min, 2 h or 5 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
