"""Which links each axis of the mesh lies on, what it sends over them, and whether another order of the axes is faster.

    order, outermost first     pipeline 2      data 8            tensor 4
    neighbours are             32 apart        4 apart           1 apart
    levels crossed             rail 2          node 2, rail 4    node 4

Devices are numbered so that neighbours of the last axis are next to each other, on the fastest links: it should be the
one that sends most. A good order leaves almost nothing to gain (`docs/benchmarks.md`, Communication); one that is wrong
for the links costs whole levels.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.cluster.cluster import Cluster
from meshtrain.config import MeshConfig, replaced
from meshtrain.plan.estimate import Plan, estimate
from meshtrain.plan.gradient_traffic import Transfer

WORTH = 0.01  # of a step: an order that gains less is not named
TRIED = 3  # orders that are planned as a whole


@dataclass(frozen=True)
class AxisOnLinks:
    """An axis, or several that a collective goes over at once."""

    axis: str
    size: int
    apart: int
    # (name, blocks that meet there), the lowest first
    levels: tuple[tuple[str, int], ...]
    sent: float  # bytes of a device in a step
    seconds: float  # of its collectives, one after the other


def axes_on_links(plan: Plan) -> list[AxisOnLinks]:
    """Axes that send something, in the mesh's order, the outermost first; joined ones after them."""
    mesh = plan.config.mesh
    entries = []
    for axis in dict.fromkeys(
        [
            *(a for a in mesh.every_axis_in_order if mesh.ways(a) > 1),
            *(t.axis for t in plan.transfers),
        ]
    ):
        group = plan.cluster.axis(axis, mesh)
        transfers = [t for t in plan.transfers if t.axis == axis]
        levels = tuple((hop.level, hop.fan) for hop in group.hops)
        apart = min(mesh.stride(part) for part in axis.split("+"))
        sent = sum(t.sent for t in transfers)
        spent = seconds(transfers, plan.cluster, mesh)
        entries.append(AxisOnLinks(axis, group.size, apart, levels, sent, spent))
    return entries


def seconds(transfers: list[Transfer], cluster: Cluster, mesh: MeshConfig) -> float:
    """Seconds of collectives one after the other, none of them hidden behind compute."""
    return sum(transfer.seconds(cluster, mesh) for transfer in transfers)


def faster_order(plan: Plan) -> tuple[tuple[str, ...], float] | None:
    """(order, share of the step that it saves) of the axes' fastest order, if it saves more than `WORTH`."""
    own, *others = (
        (seconds(plan.transfers, plan.cluster, mesh), mesh.order)
        for mesh in _orders(plan.config.mesh)
    )
    # What hides behind compute is worth less, so that those which promise most are planned as a whole.
    promising = sorted(
        other for other in others if own[0] - other[0] > WORTH * plan.seconds
    )[:TRIED]
    plans = [
        estimate(replaced(plan.config, mesh={"order": order}), plan.cluster)
        for _, order in promising
    ]
    best, order = min(
        ((other.seconds, other.config.mesh.order) for other in plans),
        default=(plan.seconds, ()),
    )
    saved = 1 - best / plan.seconds
    return (order, saved) if saved > WORTH else None


def _orders(mesh: MeshConfig) -> Iterator[MeshConfig]:
    """The mesh with its axes of several devices in every order, its own first."""
    own = mesh.every_axis_in_order if mesh.context > 1 else mesh.order
    several = [axis for axis in own if mesh.ways(axis) > 1]
    for other in itertools.permutations(several):
        left = iter(other)
        order = tuple(next(left) if axis in several else axis for axis in own)
        yield MeshConfig(**(vars(mesh) | {"order": order}))


def notes(plan: Plan) -> list[str]:
    """Sentences on what should be changed of the order of axes or devices."""
    sentences = []
    file = plan.config.mesh.cluster
    if (better := faster_order(plan)) is not None:
        order, saved = better
        sentences.append(
            f"mesh.order=[{', '.join(order)}] makes a step {saved:.1%} faster: heavier axes lie on faster links then."
        )
    if plan.cluster.device_order and not file:
        sentences.append(
            f"{plan.cluster.name} says in which order its devices stand by their links; mesh.cluster=FILE has the "
            "mesh take them so."
        )
    return sentences


def as_json(plan: Plan) -> dict:
    """`axes` of `plan --json`: where each lies, and the order that is faster, if one is."""
    better = faster_order(plan)
    return {
        "topology": plan.cluster.topology,
        "bisection": plan.cluster.bisection,
        "order": list(plan.config.mesh.order),
        "faster_order": list(better[0]) if better else None,
        "faster_by": better[1] if better else 0.0,
        "on": [
            {
                "axis": a.axis,
                "devices": a.size,
                "apart": a.apart,
                "levels": dict(a.levels),
                "bytes": int(a.sent),
                "seconds": a.seconds,
            }
            for a in axes_on_links(plan)
        ],
    }
