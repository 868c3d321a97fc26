"""The config that a run goes on with on the nodes that are there: tensor x pipeline kept, the data axis as long as the
devices allow.

    128 nodes of 8 devices, tensor 8 x pipeline 8, batch 1024:  data 16
    one of them lost:                                           data 15 on 120 nodes, 1035 rows, 7 nodes to spare

Islands stay equally large: each loses as many ranks as the smallest has, or one island goes and the others stay as they
were, whichever keeps more ranks. Which nodes make an island follows from their order alone, as `mesh` numbers devices.

    4 islands of 8 data ranks, 31 left: data 28, 4 of 7        8 of 2, 15 left: data 14, 7 of 2

The batch keeps its size, and is filled up if the data axis does not divide it (`train.uneven_batch`). A microbatch gets
no more rows than before, since memory would run out for its activations. If tensor x pipeline itself does not fit, the
planner's search proposes another mesh. No JAX.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from meshtrain.cluster.accelerators import canonical
from meshtrain.cluster.cluster import Cluster, known, named, usual_cluster
from meshtrain.config import Config, SurviveConfig, check, resolve, short
from meshtrain.config.follow import microbatch_rows, padded_batch_size, put, row_shards
from meshtrain.config.mesh import MeshConfig
from meshtrain.plan.scaling import grown
from meshtrain.plan.search import candidates
from meshtrain.schedule.generators import SCHEDULES, make_table

# Share of a data rank's rows: more microbatches than must be are taken only to stay below it
WASTE = 0.02
TRIES = 256  # numbers of microbatches for which a schedule is asked
GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Formed:
    """Holds the config of a generation, and what was changed in it."""

    config: Config
    nodes: int  # used, of those that are there
    sentence: str  # what became of the data axis, the nodes and the rows


def formed(
    config: Config, nodes: int, cluster: Cluster | str | None = None
) -> Formed | None:
    """Returns what a run of `config`, written for survive.wanted nodes, does with `nodes` of them; None where it cannot
    run on so few.

    On as many as it was written for that is the config itself. `cluster` is asked where tensor x pipeline has no place:
    a cluster or the name of one, by default that of the GPU which is here, else `cpu`. The survive section keeps only
    `inject`.
    """
    each = config.mesh.devices // config.survive.wanted
    usable = min(nodes, config.survive.most)
    # The section's numbers of nodes are the run's: a generation's devices need not be a multiple of them.
    config = resolve(
        replace(config, survive=SurviveConfig(inject=config.survive.inject))
    )
    shrunk = _shrunk(config, usable * each)
    new = shrunk or _searched(config, usable, each, cluster)
    if new is None:
        return None
    used = math.ceil(new.mesh.devices / each)
    return Formed(
        new, used, _sentence(config, new, nodes, used, each, fits=shrunk is not None)
    )


def _shrunk(config: Config, devices: int) -> Config | None:
    """Returns the config with another data axis, the others kept; None where they do not fit, or nothing is legal."""
    mesh = config.mesh
    batch = config.train.global_batch_size
    data = devices // (mesh.devices // mesh.data)
    islands = mesh.islands
    if data != mesh.data:
        # A single island that takes local steps has nothing to synchronize with.
        fewest = min(2, mesh.islands) if config.parallel.sync.every else 1
        data, islands = _whole_islands(mesh, min(data, batch), fewest)
    if data == mesh.data:
        return config
    if data == 0:
        return None
    counts: Iterable[int] = [config.parallel.microbatches]
    # The table of a file is for one number of microbatches.
    if mesh.pipeline == 1 or not config.parallel.schedule.endswith(".csv"):
        counts = islice(
            microbatches(math.ceil(batch / data), microbatch_rows(config)), TRIES
        )
    sizes = {"data": data, "islands": islands}
    cut = (
        _even(put(config, mesh=sizes, parallel={"microbatches": count}))
        for count in counts
    )
    return next(filter(_legal, cut), None)


def _whole_islands(mesh: MeshConfig, most: int, fewest: int) -> tuple[int, int]:
    """Returns (data, islands) with the most data ranks up to `most`; where two have as many, the islands that stay as
    they were, so that no device gets more of ZeRO's state. At least `fewest` islands.
    """

    def cut(islands: int) -> tuple[int, int]:
        each = most // islands
        return islands * (
            each if islands == mesh.islands else min(each, mesh.data // mesh.islands)
        ), islands

    return max(
        map(cut, range(fewest, mesh.islands + 1)),
        key=lambda sizes: (sizes[0], -sizes[1]),
    )


def microbatches(rows: int, most: int) -> Iterator[int]:
    """Yields numbers of microbatches for a data rank's `rows`, none with more than `most`: the best number first, then
    the others.

    The best is the fewest that wastes little on empty rows. Before a microbatch has less than half of `most` rows,
    which makes matrices small and ZeRO's traffic large, more is wasted.
    """

    def wasted(count: int) -> tuple[float, int]:
        return max(count * math.ceil(rows / count) / rows - 1, WASTE), count

    halved = math.ceil(rows / math.ceil(most / 2))
    yield from sorted(range(math.ceil(rows / most), halved + 1), key=wasted)
    yield from range(halved + 1, halved + TRIES)


def _searched(
    config: Config, nodes: int, each: int, cluster: Cluster | str | None
) -> Config | None:
    """Returns the planner's fastest layout that fits and is near the config's, on all of these nodes, else on the
    largest power of two of them. All layouts simulated would take minutes; a supervisor may not be silent for so long.
    """
    padded = put(config, train={"uneven_batch": "pad"})
    counts = (nodes, 2 ** (nodes.bit_length() - 1)) if nodes > 0 else ()
    for devices in dict.fromkeys(count * each for count in counts):
        chosen = cluster or cluster_here(config)
        there = (
            grown(chosen, devices)
            if isinstance(chosen, Cluster)
            else named(chosen, devices)
        )
        usable = there.accelerator.usable_bytes
        own = {"uneven_batch": config.train.uneven_batch}
        fitting = [
            c
            for c in candidates(padded, there, devices, near=True)
            if c.nbytes <= usable
        ]
        ranked = (
            _even(put(c.config, train=own))
            for c in sorted(fitting, key=lambda c: c[:2])
        )
        if (best := next(filter(_legal, ranked), None)) is not None:
            return best
    return None


def _even(config: Config) -> Config:
    rows = config.data.rows_multiple if config.data.batching == "budget" else 0
    if (
        config.train.global_batch_size % row_shards(config) == 0
        and rows % row_shards(config) == 0
    ):
        return config
    return put(config, train={"uneven_batch": "pad"})


def _legal(config: Config) -> bool:
    stages = config.mesh.pipeline
    parallel = config.parallel
    try:
        check(config)
        # Schedules with formulas have a table for every size; of others the table itself must say.
        entry = SCHEDULES.get(parallel.schedule)
        if stages > 1 and not (entry and entry.formulas):
            make_table(
                parallel.schedule,
                stages,
                parallel.microbatches,
                parallel.virtual_stages,
            )
    except ValueError:
        return False
    return True


def cluster_here(config: Config) -> str:
    """Returns the known cluster of this machine's GPU; `cpu` without one, and for a GPU that none has what a run is
    usually planned for.
    """
    models = [path.read_text() for path in sorted(GPUS.glob("*/information"))]
    if not models:
        return "cpu"
    name = canonical(re.sub(r".*Model:([^\n]*).*", r"\1", models[0], flags=re.DOTALL))
    return name if name in known() else usual_cluster(config)


def _sentence(
    config: Config,
    new: Config,
    nodes: int,
    used: int,
    each: int,
    fits: bool,
) -> str:
    """Returns, for one: data 15 of 16: 7 of 127 nodes idle, 1.1% more rows, microbatches 23 in place of 16"""
    mesh = new.mesh
    before = config.mesh
    if fits:
        words = f"data {mesh.data} of {before.data}"
        if before.islands > 1:
            islands = (
                f"{mesh.islands} of {before.islands}"
                if mesh.islands < before.islands
                else f"{mesh.islands}"
            )
            words += f" in {islands} islands of {mesh.data // mesh.islands}"
    else:
        place = f"{nodes} nodes of {each} devices"
        words = f"tensor {before.tensor} x pipeline {before.pipeline} has no place on {place}, {mesh} in its stead"
    parts = [f"{nodes - used or 'none'} of {nodes} nodes idle"]
    if left := used * each - mesh.devices:
        parts.append(f"{left} devices of the others idle")
    if (more := padded_batch_size(new) / config.train.global_batch_size - 1) > 0:
        parts.append(f"{more:.1%} more rows")
    count = new.parallel.microbatches
    was = config.parallel.microbatches
    rows = microbatch_rows(new)
    rows_before = microbatch_rows(config)
    if count != was:
        parts.append(f"microbatches {count} in place of {was}")
    elif fits and rows > rows_before:
        table = short(new.parallel.schedule)
        parts.append(
            f"microbatches of {rows} rows in place of {rows_before} since {table} is for {count} of them"
        )
    return f"{words}: {', '.join(parts)}"
