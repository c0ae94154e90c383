"""Numbers as people read them."""

from __future__ import annotations


def count(n: float, unit: str = "") -> str:
    """`1.23 M`: three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(n) < 999.5 or prefix == "P":
            break
        n /= 1000
    digits = f"{n:.0f}" if prefix == "" and n == int(n) else f"{n:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()


def size(n: float) -> str:
    """Bytes with a binary prefix: `1.5 MiB`."""
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if abs(n) < 1023.5 or prefix == "Ti":
            break
        n /= 1024
    return f"{n:.3g} {prefix}B" if prefix else f"{n:.0f} B"


def seconds(t: float) -> str:
    """Formats seconds as s, ms or us, to three digits."""
    if t >= 100:
        return f"{t:,.0f} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if t >= factor:
            return f"{t / factor:.3g} {unit}"
    return f"{t / 1e-6:.3g} us"
