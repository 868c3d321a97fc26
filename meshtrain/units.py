"""Sizes, durations and counts as text for people: three digits and a unit."""


def size(nbytes: float) -> str:
    """Returns bytes in a binary unit: 512 B, 1.5 KiB, 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    if nbytes < 1000:
        return f"{nbytes:,.3g} TiB"
    return f"{nbytes:,.0f} TiB"


def duration(seconds: float) -> str:
    """Returns seconds in the units of a clock: 250 µs, 2.5 s, 4 min 5 s, 6 h 7 min, 5.2 days."""
    for unit, factor in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3)):
        if abs(seconds) * factor < 1000:
            if seconds:
                return f"{seconds * factor:.3g} {unit}"
            return "0 s"
    if abs(seconds) < 100:
        return f"{seconds:.3g} s"
    if not abs(seconds) < 100 * 3600:
        return f"{seconds / 86400:,.1f} days"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def count(number: float) -> str:
    """Returns a large number in a decimal unit: 8.03 B."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.3g}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: 1 node, 2 nodes."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
