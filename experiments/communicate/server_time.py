"""Seconds of a parameter server and of an all-reduce, in the alpha-beta model: alpha a message, beta a byte.

n workers, gradients of S bytes. A port sends one message and receives one at a time; what is summed goes out while the
rest comes in.

    all-reduce                 the cheapest of ring, butterfly and tree, as the planner has them (`meshtrain.cluster.algorithms`)
    one server                 its port takes n S in and n S out               (n + 1) alpha + n S beta
    s servers, a part each     a port of theirs n S / s, a worker's S          (max(n, s) + 1) alpha + max(n / s, 1) S beta
    on the workers' machines   a port takes 2 S (n - 1) / n: what the ring sends, and as long

So servers of their own win over a ring where bytes count and they are more than n^2 / 2 (n - 1), somewhat more than
half as many as
workers: they bring ports of their own (Jiang et al. 2020, BytePS, section 3).
"""

from dataclasses import dataclass

from meshtrain.cluster.algorithms import ALL_REDUCE, best
from meshtrain.cluster.topology import Group, Hop


@dataclass(frozen=True)
class Network:
    """What a port does: seconds a message, bytes a second each way."""

    latency: float
    bytes_per_second: float

    def group(self, workers: int) -> Group:
        return Group(
            workers, (Hop("rail", workers, self.latency, self.bytes_per_second, 1),)
        )


def all_reduce(workers: int, nbytes: float, network: Network) -> float:
    return best(ALL_REDUCE, network.group(workers), nbytes).seconds


def server(workers: int, nbytes: float, servers: int, network: Network) -> float:
    """Push and pull of all workers in step, over `servers` machines of their own."""
    messages = max(workers, servers) + 1
    return (
        messages * network.latency
        + max(workers / servers, 1.0) * nbytes / network.bytes_per_second
    )
