"""What it takes to bring islands together that step by themselves (`parallel.sync`): bytes, seconds and memory, as means over steps.

    sent across islands by a device a step    2 (R - 1) / R of its float32 shard of the weights, over `every`; R islands
    held besides                              a float32 shard each: the islands' own weights, the outer momentum, what is under way

The first `start` steps, which sum gradients over all islands, are not in it.
"""

from meshtrain.config import Config
from meshtrain.config.mesh import ISLAND
from meshtrain.parallel.placement import all_placed
from meshtrain.parallel.reduce.sizes import chunk, sized
from meshtrain.parallel.sync.when import sent_compressed
from meshtrain.plan.cluster import algorithms
from meshtrain.plan.cluster.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from meshtrain.plan.cluster.cluster import Cluster
from meshtrain.plan.flow import Flow

FLOAT32 = 4  # bytes


def flows(config: Config) -> list[Flow]:
    """Collectives across islands; a fragment's are one of `every` steps. Fragments are taken to be equal."""
    sync, islands = config.parallel.sync, config.mesh.islands
    if not sync.every:
        return []
    times, what = sync.fragments / sync.every, "islands brought together"
    counts = {True: 0, False: 0}
    for weight in all_placed(config):
        if weight.trained:
            counts[sent_compressed(config, weight)] += weight.on_rank(config.mesh.shards)
    plain, packed = (counts[kind] / sync.fragments for kind in (False, True))
    # one number more says how many islands took part
    found = [Flow(ISLAND, ALL_REDUCE, what, FLOAT32 * (plain + 1), times, islands)]
    if packed:
        named = f"{what}, as {config.parallel.reduce.compression}"
        if islands == 2:
            nbytes = islands * sized(config.parallel.reduce).nbytes(round(packed))
            return [*found, Flow(ISLAND, ALL_GATHER, named, nbytes, times, islands)]
        nbytes = islands * sized(config.parallel.reduce).nbytes(chunk(round(packed), islands))
        found += [Flow(ISLAND, kind, named, nbytes, times, islands) for kind in (ALL_TO_ALL, ALL_GATHER)]
    return found


def seconds(config: Config, cluster: Cluster) -> float:
    """Of a step, on average, before any of it hides behind compute."""
    return sum(
        flow.count * algorithms.best(flow.kind, cluster.axis(ISLAND, config.mesh), flow.nbytes).seconds
        for flow in flows(config)
    )


def copies(config: Config) -> list[str]:
    """What is held besides the weights, each as large as a float32 shard of what is trained."""
    sync = config.parallel.sync
    held = {
        "islands' own weights": sync.every,
        "outer momentum": sync.outer_momentum,
        "outer step under way": sync.delay,
    }
    return [name for name, wanted in held.items() if wanted and sync.every]
