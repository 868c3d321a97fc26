"""The table of faults."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from experiments.bench import Table
from experiments.survive.cluster import median
from meshtrain.config.inject import KINDS

TIMES = ("verdict", "ended", "started", "first")
Found = dict[str, Any]


def print_kinds(found: Sequence[Found]) -> None:
    """Prints a row for each kind and number of processes, and what went wrong.

    Times are median and worst in seconds, each from the moment of the one before.
    """
    groups: dict[tuple[int, str, int], list[Found]] = defaultdict(list)
    for one in found:
        kind = one["kind"]
        number = KINDS[kind].number if kind in KINDS else 0
        groups[number, kind, one["processes"]].append(one)
    times = (f"{t} s".ljust(10) for t in TIMES)
    counts = "processes", "tried", "named", "wrong"
    table = Table("kind".ljust(22), *counts, *times, "steps lost", "loss off", "load")
    for (number, kind, processes), of in sorted(groups.items()):
        lost = [one["lost"] for one in of if one["lost"] is not None]
        spreads = []
        for t in TIMES:
            taken = [one[t] for one in of if one[t] is not None]
            spreads.append(f"{median(taken):.1f}, {max(taken):.1f}" if taken else "-")
        table.row(
            f"{number} {kind}",
            processes,
            len(of),
            sum(one["named"] for one in of),
            sum(bool(one["problems"]) for one in of),
            *spreads,
            max(lost, default="-"),
            f"{max(one['off'] for one in of):.0e}",
            f"{median(one['load'] for one in of):.1f}",
        )
    kinds = {one["kind"] for one in found}
    named = kinds - {one["kind"] for one in found if not one["named"]}
    wrong = [one for one in found if one["problems"]]
    print(f"{len(found)} faults of {len(kinds)} kinds", end="; ")
    print(f"always named rightly: {len(named)} kinds; wrong: {len(wrong)}")
    for one in wrong:
        where = f"{one['kind']}@{one['step']}:{one['rank']} of {one['processes']}"
        print(f"{where}: {'; '.join(one['problems'])}")
