"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(size_bytes: float) -> str:
    """``1.5 GB`` for 1.5e9: decimal units, as disks are sold and quotas are set."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} PB"


def format_seconds(seconds: float) -> str:
    """``0.25 s``, ``12.3 s``, ``4 m 05 s``, ``2 h 03 m``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"
