"""The wall shared among what ran: at each instant equally among those of the first rank that is there, so that the shares sum to the wall.

    rank 0   ████████          ███     a ran alone, then a and b half each, then c
    rank 0       ███████
    rank 1          █████████████      counts only where nothing of rank 0 runs
             a   a,b b   1    c  1

Summed durations mislead: on fake devices, more of which run than there are cores, they are several times the wall.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

from meshtrain.report.trace.read import Span

Key = TypeVar("Key", bound=Hashable)


def share(spans: Iterable[tuple[float, float, int, Key]], window: Span) -> tuple[dict[Key, float], float, float]:
    """Of spans (begin, end, rank, key): the time of each key in a window, that before the first and after the last span, and what
    is left over between them."""
    begin, end = window
    edges = []
    for a, b, rank, key in spans:
        a, b = max(a, begin), min(b, end)
        if b > a:
            edges += [(a, 1, rank, key), (b, -1, rank, key)]
    if not edges:
        return {}, end - begin, 0.0
    edges.sort(key=lambda edge: edge[0])
    live: dict[int, Counter[Key]] = defaultdict(Counter)
    found: dict[Key, float] = defaultdict(float)
    gaps, last = 0.0, edges[0][0]
    for at, more, rank, key in edges:
        if at > last:
            running = next((live[r] for r in sorted(live) if live[r]), None)
            if running is None:
                gaps += at - last
            else:
                each = (at - last) / running.total()
                for one, count in running.items():
                    found[one] += each * count
            last = at
        live[rank][key] += more
        if not live[rank][key]:
            del live[rank][key]
    return dict(found), (edges[0][0] - begin) + (end - last), gaps
