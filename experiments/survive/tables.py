"""Tables of figures, as text."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.survive.cluster import median
from meshtrain.config.inject import KINDS

TIMES = ("verdict", "ended", "started", "first")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they must be, the first to the left."""
    texts = [list(head), *([str(cell) for cell in row] for row in rows)]
    wide = [max(len(row[i]) for row in texts) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in texts
    )


def of_kinds(found: list[dict[str, Any]]) -> str:
    """A line each kind and number of processes; times as median, worst in seconds, each from the moment of the one before."""
    head = (
        "kind",
        "processes",
        "tried",
        "named",
        "wrong",
        *(f"{t} s" for t in TIMES),
        "steps lost",
        "loss off",
        "load",
    )
    rows, wrong = [], []
    for kind in sorted({one["kind"] for one in found}, key=lambda k: KINDS[k].number if k in KINDS else 0):
        for processes in sorted({one["processes"] for one in found if one["kind"] == kind}):
            of = [one for one in found if (one["kind"], one["processes"]) == (kind, processes)]
            lost = [one["lost"] for one in of if one["lost"] is not None]
            number = f"{KINDS[kind].number} " if kind in KINDS else ""
            rows.append((
                number + kind, processes, len(of), sum(one["named"] for one in of), sum(bool(one["problems"]) for one in of),
                *(_spread([one[t] for one in of if one[t] is not None]) for t in TIMES), max(lost, default="-"),
                f"{max(one['off'] for one in of):.0e}",
                f"{median(one['load'] for one in of):.1f}",
            ))  # fmt: skip
            wrong += [
                f"{kind}@{one['step']}:{one['rank']} of {processes}: {'; '.join(one['problems'])}"
                for one in of
                if one["problems"]
            ]
    named = {one["kind"] for one in found} - {one["kind"] for one in found if not one["named"]}
    summary = f"{len(found)} faults of {len({one['kind'] for one in found})} kinds; always named rightly: {len(named)} kinds; wrong: {len(wrong)}"
    return "\n".join([table(head, rows), summary, *wrong])


def _spread(values: list[float]) -> str:
    return f"{median(values):.1f}, {max(values):.1f}" if values else "-"
