"""Seconds of a parameter server and of an all-reduce, in the alpha-beta model: alpha a message, beta a byte.

n workers, gradients of S bytes. A port sends one message and receives one at a time; what is summed goes out while the rest comes in.

    all-reduce                 the cheapest of ring, butterfly and tree, as the planner has them (`meshtrain.cluster.algorithms`)
    one server                 its port takes n S in and n S out               (n + 1) alpha + n S beta
    s servers, a part each     a port of theirs n S / s, a worker's S          (max(n, s) + 1) alpha + max(n / s, 1) S beta
    on the workers' machines   a port takes 2 S (n - 1) / n: what the ring sends, and as long

So servers of their own win over a ring where bytes count and they are more than n^2 / 2 (n - 1), somewhat more than half as many as
workers: they bring ports of their own (Jiang et al. 2020, BytePS, section 3). A worker's gradient takes T (1 + x), x exponential with
mean `spread`: of n workers the slowest takes T (1 + spread H_n) on average, H_n = 1 + 1/2 + ... + 1/n.
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
        return Group(workers, (Hop("rail", workers, self.latency, self.bytes_per_second, 1),))


def all_reduce(workers: int, nbytes: float, network: Network) -> float:
    return best(ALL_REDUCE, network.group(workers), nbytes).seconds


def server(workers: int, nbytes: float, servers: int, network: Network) -> float:
    """Push and pull of all workers in step, over `servers` machines of their own."""
    messages = max(workers, servers) + 1
    return messages * network.latency + max(workers / servers, 1.0) * nbytes / network.bytes_per_second


def slowest(workers: int, compute: float, spread: float) -> float:
    """Mean of the seconds of the slowest worker."""
    return compute * (1 + spread * sum(1 / k for k in range(1, workers + 1)))


def in_step(workers: int, nbytes: float, network: Network, compute: float, spread: float) -> float:
    """Seconds for a gradient of each worker, with an all-reduce that waits for all of them."""
    return slowest(workers, compute, spread) + all_reduce(workers, nbytes, network)


def out_of_step(workers: int, nbytes: float, servers: int, network: Network, compute: float, spread: float) -> float:
    """Seconds for as many gradients as workers, with servers that wait for nobody: a worker's round of computing, push and pull, or
    the time that a server's port needs for all of them, whichever is longer."""
    alone = compute * (1 + spread) + 2 * (network.latency * servers + nbytes / network.bytes_per_second)
    port = workers * (network.latency + nbytes / servers / network.bytes_per_second)
    return max(alone, port)
