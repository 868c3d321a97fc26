"""Tables of figures, as text."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.survive.cluster import median
from meshtrain.config.inject import KINDS
from meshtrain.draw.picture import columns

TIMES = ("verdict", "ended", "started", "first")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return columns([head, *(list(map(str, row)) for row in rows)])


def of_kinds(found: list[dict[str, Any]]) -> str:
    """A line each kind and number of processes; times as median, worst in seconds, each from the moment of the one
    before.
    """
    times = (f"{t} s" for t in TIMES)
    head = (
        "kind",
        "processes",
        "tried",
        "named",
        "wrong",
        *times,
        "steps lost",
        "loss off",
        "load",
    )
    rows, wrong = [], []
    for kind in sorted(
        {one["kind"] for one in found},
        key=lambda k: KINDS[k].number if k in KINDS else 0,
    ):
        for processes in sorted(
            {one["processes"] for one in found if one["kind"] == kind}
        ):
            of = [
                one
                for one in found
                if (one["kind"], one["processes"]) == (kind, processes)
            ]
            lost = [one["lost"] for one in of if one["lost"] is not None]
            number = f"{KINDS[kind].number} " if kind in KINDS else ""
            rows.append(
                (
                    number + kind,
                    processes,
                    len(of),
                    sum(one["named"] for one in of),
                    sum(bool(one["problems"]) for one in of),
                    *(
                        _spread([one[t] for one in of if one[t] is not None])
                        for t in TIMES
                    ),
                    max(lost, default="-"),
                    f"{max(one['off'] for one in of):.0e}",
                    f"{median(one['load'] for one in of):.1f}",
                )
            )
            for one in of:
                if one["problems"]:
                    where = f"{kind}@{one['step']}:{one['rank']} of {processes}"
                    wrong.append(f"{where}: {'; '.join(one['problems'])}")
    named = {one["kind"] for one in found} - {
        one["kind"] for one in found if not one["named"]
    }
    kinds = len({one["kind"] for one in found})
    summary = f"{len(found)} faults of {kinds} kinds; always named rightly: {len(named)} kinds; wrong: {len(wrong)}"
    return "\n".join([table(head, rows), summary, *wrong])


def _spread(values: list[float]) -> str:
    return f"{median(values):.1f}, {max(values):.1f}" if values else "-"
