"""The time that a step loses to its hosts: waits for the slowest of them, and checkpoints."""

import math

from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config

# Of a host's work in a step, over its mean: the median of nine published series of the same work a GPU on 16 to 2,304
# (`experiments/plan/dgxc.py`), which lose 0 to 5% beyond what grows with collectives.
SCATTER = 0.007


def straggling(cluster: Cluster, devices: int) -> float:
    """The share of its work that a host waits for the slowest: of n whose times scatter as a normal distribution with
    deviation `SCATTER` the largest lies sqrt(2 ln n) deviations above the mean (Cramér 1946, section 28.6).
    """
    return SCATTER * math.sqrt(2 * math.log(math.ceil(devices / cluster.devices_per_node)))


def save_seconds(cluster: Cluster, devices: int, nbytes: float) -> tuple[float, float]:
    """Returns the seconds of a checkpoint of `nbytes` a device: the stop of training, and the write beside it.

    Training stops for all hosts to agree and for the copy to the host. The slower of a node's way to the store and the
    store itself limits the write.
    """
    hosts = math.ceil(devices / cluster.devices_per_node)
    node = nbytes * cluster.devices_per_node / (cluster.storage_bandwidth * 1e9)
    store = nbytes * devices / (cluster.storage_bandwidth_total * 1e9)
    stop = cluster.save_seconds + cluster.save_seconds_per_host * hosts
    return stop + nbytes / (cluster.host_bandwidth * 1e9), max(node, store)


def checkpoint_seconds(config: Config, cluster: Cluster, nbytes: float, step: float) -> float:
    """Seconds a step for which checkpoints stop training: the copy to the host, and what of the write before is not
    done when the next one is due (`step` seconds a step).
    """
    every = config.checkpoint.every
    if not every:
        return 0.0
    copy, write = save_seconds(cluster, config.mesh.devices, nbytes)
    return (copy + max(0.0, write - every * step)) / every
