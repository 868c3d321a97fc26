"""Seconds of sums by XLA's algorithms or our own programs of messages, which cost what `meshtrain.allreduce` says."""

from collections.abc import Sequence

from meshtrain.allreduce import ALGORITHMS
from meshtrain.cluster.algorithms import ALL_REDUCE, best
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import MeshConfig


def seconds(
    algorithm: str,
    kind: str,
    axes: Sequence[str],
    mesh: MeshConfig,
    cluster: Cluster,
    nbytes: float,
) -> float:
    """Seconds of an all-reduce, or one of its halves, of `nbytes` over the mesh axes, by what
    `parallel.reduce.algorithm` names.
    """
    one_pass = ALGORITHMS[algorithm].seconds
    passes = 2 if kind == ALL_REDUCE else 1
    if one_pass is None:
        return best(kind, cluster.axis("+".join(axes), mesh), nbytes).seconds
    if ALGORITHMS[algorithm].by_levels and len(axes) == 2:
        across, inside = (cluster.axis(axis, mesh) for axis in axes)
        return passes * (
            one_pass(inside, nbytes) + one_pass(across, nbytes / inside.size)
        )
    group = cluster.axis("+".join(axes), mesh)
    return passes * one_pass(group, nbytes) if group.size > 1 else 0.0
