"""What the gradients of a step are sent as: collectives over data and across islands, and the passes over memory of compressing them.

    compression              over data                            across islands, of a shard
    none                     reduce-scatter, or all-reduce        all-reduce
    bfloat16, float8,        an all-to-all for each weight        2: a gather of all that is encoded; more: an all-to-all,
    int8, int4, topk                                              and a gather of the sums
    powersgd                 an all-reduce of P and one of Q for each weight, over all that are compressed
    norms, biases            as with none

Bytes are those of `meshtrain.parallel.reduce.sizes` and `kept`, which the program stands on too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from meshtrain.config import Config
from meshtrain.config.mesh import DATA, ISLAND
from meshtrain.config.reduce import ReduceConfig
from meshtrain.parallel.placement import Placed, all_placed, scatters_at_use, stages
from meshtrain.parallel.reduce import kept
from meshtrain.parallel.reduce.sizes import chunk, crosses_compressed, scatters_compressed, sized
from meshtrain.parallel.sync.when import summed_axes
from meshtrain.plan import shapes
from meshtrain.plan.cluster.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, best
from meshtrain.plan.cluster.cluster import Cluster
from meshtrain.plan.flow import Flow, Trips

FLOAT32 = 4  # bytes
# Passes over float32 numbers, as XLA fuses them: to encode, the largest of a block, the values, and the error for the metrics; PowerSGD
# multiplies its matrix twice, and writes what came of it and what was left out.
ENCODED, MULTIPLIED = 3, 4
# Bytes a number to find the largest of a row: a radix sort reads and writes key and place four times (CUB, for 32 bits).
SORTED = 64


@dataclass
class _Tally:
    """Flows as they come up, added up where they are of one sort, and the bytes that pass over memory for them."""

    config: Config
    found: dict[tuple[tuple[str, ...], str, str, int], tuple[float, int]] = field(default_factory=dict)
    moved: float = 0.0

    def add(
        self, axes: tuple[str, ...], kind: str, what: str, nbytes: float, count: int = 1, alone: bool = False
    ) -> None:
        """`alone`: XLA joins it with no other of its sort."""
        key = axes, kind, what, count
        before, pieces = self.found.get(key, (0.0, 0))
        self.found[key] = before + nbytes, pieces + 1 if alone else 1

    def encoded(self, numbers: float, nbytes: float, summed: float, count: int = 1) -> None:
        """Numbers that become so many bytes, of which as many come back and are decoded to `summed` numbers."""
        passes = ENCODED * FLOAT32 + SORTED * (self.config.parallel.reduce.compression == "topk")
        self.moved += count * (passes * numbers + 3 * nbytes + FLOAT32 * summed)

    def flows(self) -> list[Flow]:
        mesh, found = self.config.mesh, []
        for (axes, kind, what, count), (nbytes, pieces) in self.found.items():
            there = [axis for axis in axes if mesh.ways(axis) > 1]
            size = math.prod(mesh.ways(axis) for axis in there)
            if there and nbytes:
                found.append(Flow("+".join(there), kind, what, nbytes / pieces, count * pieces, size))
        return found


def gradient_flows(config: Config, trips: Trips) -> list[Flow]:
    """Every collective that sums gradients over data and across islands in a step, but those of weights that are whole over tensor or
    pipeline without ZeRO, whose sums are over all at once (`traffic`)."""
    return _tally(config, trips).flows()


def seconds(config: Config, cluster: Cluster) -> tuple[float, float]:
    """Of all of them, one after the other; and of what encodes and decodes, as passes over memory."""
    m, v = config.parallel.microbatches, stages(config).chunks
    tally = _tally(config, Trips(m * v, m, m * v, unembedding=m))
    spent = [f.count * best(f.kind, cluster.axis(f.axis, config.mesh), f.nbytes).seconds for f in tally.flows()]
    return sum(spent), tally.moved / cluster.accelerator.memory_rate


def bytes_and_ratio(config: Config, trips: Trips) -> tuple[float, float]:
    """Bytes that a device sends in a step to sum gradients, and those of float32 over them; 1.0 where none are sent."""
    plain = replace(config, precision=replace(config.precision, reduce="float32"))
    plain = replace(plain, parallel=replace(config.parallel, reduce=ReduceConfig(feedback=False)))
    sent, whole = (sum(flow.sent for flow in gradient_flows(c, trips)) for c in (config, plain))
    return sent, whole / sent if sent else 1.0


def row(config: Config, trips: Trips) -> dict[str, float]:
    """The same for a row of metrics, where gradients are compressed."""
    if config.parallel.reduce.compression == "none" or config.mesh.data == 1:
        return {}
    sent, ratio = bytes_and_ratio(config, trips)
    return {"reduce_bytes": sent, "reduce_ratio": ratio}


def _tally(config: Config, trips: Trips) -> _Tally:
    tally = _Tally(config)
    for weight in all_placed(config):
        if weight.trained:
            _inside(tally, weight, trips)
            if not config.parallel.sync.every:
                _across(tally, weight)
    return tally


def _inside(tally: _Tally, weight: Placed, trips: Trips) -> None:
    """A weight's gradient, summed in an island."""
    config = tally.config
    ranks, reduce = config.mesh.shards, shapes.itemsize(config.precision.reduce)
    if weight.zero_dim is None:
        joined = any(config.mesh.ways(axis) > 1 for axis in weight.replicated)
        if config.parallel.zero_stage or not joined:
            axes = (DATA,) if crosses_compressed(config, weight) else summed_axes(config)
            tally.add(axes, ALL_REDUCE, "gradients summed", weight.on_device() * reduce)
    elif _low_rank(config, weight) and not kept.across_islands(config):
        _factors(tally, weight)
    else:
        for where, shard, count in _scatters(config, weight, trips):
            if scatters_compressed(config, weight):
                nbytes, what = ranks * sized(config.parallel.reduce).nbytes(shard), _as(config)
                tally.add((DATA,), ALL_TO_ALL, f"gradients{where} scattered{what}", nbytes, count, alone=True)
                tally.encoded(ranks * shard, nbytes, shard, count)
            else:
                tally.add((DATA,), REDUCE_SCATTER, f"gradients{where} scattered", ranks * shard * reduce, count)


def _across(tally: _Tally, weight: Placed) -> None:
    """Its shard, summed across islands."""
    config, what = tally.config, "gradients summed across islands"
    islands, k = config.mesh.islands, weight.on_rank(config.mesh.shards)
    if not crosses_compressed(config, weight):
        if weight.zero_dim is not None and not _low_rank(config, weight):
            tally.add((ISLAND,), ALL_REDUCE, what, k * shapes.itemsize(config.precision.reduce))
    elif _low_rank(config, weight):
        _factors(tally, weight)
    elif islands == 2:
        nbytes = islands * sized(config.parallel.reduce).nbytes(k)
        tally.add((ISLAND,), ALL_GATHER, what + _as(config), nbytes)
        tally.encoded(k, nbytes, k)
    else:
        each = chunk(k, islands)
        nbytes = islands * sized(config.parallel.reduce).nbytes(each)
        tally.add((ISLAND,), ALL_TO_ALL, what + _as(config), nbytes, alone=True)
        tally.add((ISLAND,), ALL_GATHER, f"sums across islands gathered{_as(config)}", nbytes)
        tally.encoded(k + each, 2 * nbytes, k + each)


def _scatters(config: Config, weight: Placed, trips: Trips) -> Iterator[tuple[str, int, int]]:
    """(where, numbers of a shard, how often) of the scatters of a weight's gradient."""
    shard = weight.on_rank(config.mesh.shards)
    if not scatters_at_use(config):
        yield "", shard, 1
    elif weight.stacked:
        stage = stages(config)
        yield " of a layer", shard // stage.on_device, stage.longest * trips.backward
    else:
        part, _, name = weight.name.partition(".")
        # A tied weight is used twice, and its gradients are scattered one by one.
        tied = config.model.tied_head and name == "tokens"
        for at in (part, "head") if tied else (part,):
            yield f" of the {at}", shard, trips.of("head" if at == "head" else "unembedding")


def _low_rank(config: Config, weight: Placed) -> bool:
    return config.parallel.reduce.compression == "powersgd" and kept.compresses(config, weight)


def _factors(tally: _Tally, weight: Placed) -> None:
    """PowerSGD's two sums of matrices [n, r] and [c, r], one of each for every layer."""
    config = tally.config
    seen = kept.matrix(config, weight)
    assert seen is not None
    local, first = kept.compressed(config, weight).local(config), int(weight.stacked)
    layers, n, c = (
        math.prod(local[a:b]) for a, b in ((0, first), (first, first + seen.rows), (first + seen.rows, None))
    )
    axes = kept.ranks(config, weight)
    for side, rows in (("P", n), ("Q", c)):
        tally.add(axes, ALL_REDUCE, f"gradients as PowerSGD's {side}", FLOAT32 * layers * rows * seen.rank)
    tally.moved += MULTIPLIED * FLOAT32 * layers * n * c


def _as(config: Config) -> str:
    return f" as {config.parallel.reduce.compression}"
