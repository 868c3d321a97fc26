"""A collective of a step, and those that gradients are sent by: over data, across islands, and of islands that step by
themselves.

    compression          over data                        across islands, of a shard
    none                 reduce-scatter, or all-reduce    all-reduce
    bfloat16, float8,    an all-to-all for each weight    2: a gather of all that is encoded; more: an all-to-all,
    int8, int4, topk                                      and a gather of the sums
    powersgd             an all-reduce of P and one of Q for each weight, over all that are compressed
    norms, biases        as with none

Islands that step by themselves (`parallel.sync`) send 2 (R - 1) / R of a device's float32 shard of the weights, R
islands, once in `every` steps; the first `start` steps, which sum gradients over all islands, are not in it.

Bytes are those of `meshtrain.parallel.reduce.sizes`, which the program stands on too.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from meshtrain.cluster.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    best,
    sent,
)
from meshtrain.cluster.cluster import Cluster
from meshtrain.cluster.topology import Group, Legs
from meshtrain.compression import COMPRESSIONS, codec_of
from meshtrain.config import Config, MeshConfig
from meshtrain.config.mesh import ISLAND
from meshtrain.config.reduce import ReduceConfig, scatters_at_use
from meshtrain.parallel.placement import Placed, all_placed, stages
from meshtrain.parallel.reduce.sizes import (
    as_matrix,
    chunk_length,
    compressed_part,
    compresses,
    crosses_compressed,
    message_length,
    over_islands,
    scatters_compressed,
    summed_over,
)
from meshtrain.parallel.sync.when import BESIDE, sent_compressed
from meshtrain.plan import shapes

FLOAT32 = 4  # bytes
# Passes over float32 numbers, as XLA fuses them: to encode, the largest of a block, the values, and the error for the
# metrics; PowerSGD multiplies its matrix twice, and writes what came of it and what was left out.
ENCODED = 3
MULTIPLIED = 4
# Bytes a number to find the largest of a row: a radix sort reads and writes key and place four times (CUB, for 32
# bits).
SORTED = 64


@dataclass(frozen=True)
class Iterations:
    """How often a device goes forward and backward through a chunk and through the loss head in a step.

    The embedding's passes, forward and backward (`unembedding`), and the messages `down` and `up` are as many where not
    given; the head's backward (`unhead`) comes with its forward.
    """

    forward: int
    head: int
    backward: int
    embedding: int | None = None
    unembedding: int | None = None
    unhead: int | None = None
    down: int | None = None
    up: int | None = None

    def passes(self, moment: str) -> int:
        """Passes through what one of the fields names."""
        count = getattr(self, moment)
        if count is not None:
            return count
        return {
            "embedding": self.forward,
            "down": self.forward,
            "unhead": self.head,
        }.get(moment, self.backward)


@dataclass(frozen=True)
class Transfer:
    """Collectives of one sort in a step: `nbytes` is the size S of the whole array (see `algorithms`), `count` how
    many.
    """

    axis: str
    kind: str
    what: str
    nbytes: float
    count: float  # of what does not come in every step, the mean over steps
    size: int  # devices that talk to each other
    # Products of the weights' gradients, which wait for nothing, can be computed meanwhile
    hides: bool = False
    legs: Legs = ()  # of a group that is a part of the axis: see `Cluster.join_legs`

    @property
    def times(self) -> str:
        """`count` for people: 1,024, or 1/10 of what comes every 10 steps."""
        if self.count == int(self.count):
            return f"{int(self.count):,}"
        return str(Fraction(self.count).limit_denominator(1_000_000))

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step."""
        return self.count * sent(self.kind, self.size, self.nbytes)

    def seconds(self, cluster: Cluster, mesh: MeshConfig) -> float:
        """Seconds of all of them, one after the other, before any of it hides behind compute."""
        return (
            self.count * best(self.kind, self.group(cluster, mesh), self.nbytes).seconds
        )

    def group(self, cluster: Cluster, mesh: MeshConfig) -> Group:
        """The devices that talk to each other."""
        if self.legs:
            return cluster.join_legs(self.legs)
        return cluster.axis(self.axis, mesh)


Moment = tuple[str, Transfer]  # a pass (see Iterations.passes), and what is sent in it


def layer_waits(
    config: Config,
    cluster: Cluster,
    transfers: list[Moment],
    seconds: Callable[[Transfer], float] | None = None,
) -> tuple[float, float]:
    """Returns the seconds, forward and backward, of one layer's part of a chunk's collectives, one after the other;
    `seconds` are the time of a transfer that is not a collective of XLA.
    """
    waits = {"forward": 0.0, "backward": 0.0}
    for moment, t in transfers:
        waits[moment] += (
            seconds(t) if seconds else t.seconds(cluster, config.mesh)
        ) / stages(config).longest
    return waits["forward"], waits["backward"]


@dataclass
class _Tally:
    """Transfers as they come up, added up where they are of one sort, and the bytes that pass over memory for them."""

    config: Config
    entries: dict[tuple[tuple[str, ...], str, str, int], tuple[float, int]] = field(
        default_factory=dict
    )
    moved: float = 0.0

    def add(
        self,
        axes: tuple[str, ...],
        kind: str,
        what: str,
        nbytes: float,
        count: int = 1,
        alone: bool = False,
    ) -> None:
        """Counts a collective; `alone`: XLA joins it with no other of its sort."""
        key = axes, kind, what, count
        before, parts = self.entries.get(key, (0.0, 0))
        self.entries[key] = before + nbytes, parts + 1 if alone else 1

    def encoded(
        self, numbers: float, nbytes: float, summed: float, count: int = 1
    ) -> None:
        """Numbers that become so many bytes, of which as many come back and are decoded to `summed` numbers."""
        passes = (
            ENCODED * FLOAT32
            + SORTED * COMPRESSIONS[self.config.parallel.reduce.compression].sorts
        )
        self.moved += count * (passes * numbers + 3 * nbytes + FLOAT32 * summed)

    def transfers(self) -> list[Transfer]:
        mesh = self.config.mesh
        transfers = []
        for (axes, kind, what, count), (nbytes, parts) in self.entries.items():
            split = [axis for axis in axes if mesh.ways(axis) > 1]
            size = math.prod(mesh.ways(axis) for axis in split)
            if split and nbytes:
                transfers.append(
                    Transfer(
                        "+".join(split), kind, what, nbytes / parts, count * parts, size
                    )
                )
        return transfers


def gradient_transfers(config: Config, iterations: Iterations) -> list[Transfer]:
    """Returns every collective that sums gradients over data and across islands in a step.

    Without ZeRO, weights replicated over tensor or pipeline are left out: one sum covers all axes (`traffic`).
    """
    return _tally(config, iterations).transfers()


def seconds(config: Config, cluster: Cluster) -> tuple[float, float]:
    """Seconds of all of them, one after the other; and of what encodes and decodes, as passes over memory."""
    m = config.parallel.microbatches
    v = stages(config).chunks
    tally = _tally(config, Iterations(m * v, m, m * v, unembedding=m))
    spent = [transfer.seconds(cluster, config.mesh) for transfer in tally.transfers()]
    return sum(spent), tally.moved / cluster.accelerator.memory_rate


def bytes_and_ratio(config: Config, iterations: Iterations) -> tuple[float, float]:
    """Bytes that a device sends in a step to sum gradients, and those of float32 over them; 1.0 where none are sent."""
    plain = replace(config, precision=replace(config.precision, reduce="float32"))
    plain = replace(
        plain, parallel=replace(config.parallel, reduce=ReduceConfig(feedback=False))
    )
    sent, uncompressed = (
        sum(transfer.sent for transfer in gradient_transfers(c, iterations))
        for c in (config, plain)
    )
    return sent, uncompressed / sent if sent else 1.0


def row(config: Config, iterations: Iterations) -> dict[str, float]:
    """`bytes_and_ratio` for a row of metrics, where gradients are compressed."""
    if config.parallel.reduce.compression == "none" or config.mesh.data == 1:
        return {}
    sent, ratio = bytes_and_ratio(config, iterations)
    return {"reduce_bytes": sent, "reduce_ratio": ratio}


def _tally(config: Config, iterations: Iterations) -> _Tally:
    tally = _Tally(config)
    for weight in all_placed(config):
        if weight.trained:
            _inside(tally, weight, iterations)
            if not config.parallel.sync.every:
                _across(tally, weight)
    return tally


def _inside(tally: _Tally, weight: Placed, iterations: Iterations) -> None:
    """A weight's gradient, summed in an island."""
    config = tally.config
    ranks = weight.zero_degree
    reduce = shapes.itemsize(config.precision.reduce)
    if weight.zero_dim is None:
        joined = any(config.mesh.ways(axis) > 1 for axis in weight.replicated)
        if config.parallel.zero_stage or not joined:
            summed = config.mesh.islands > 1 and not config.parallel.sync.every
            at_once = summed and not crosses_compressed(config, weight)
            axes = (ISLAND, *weight.zero_axes) if at_once else weight.zero_axes
            tally.add(axes, ALL_REDUCE, "gradients summed", weight.on_device() * reduce)
    elif _low_rank(config, weight) and not over_islands(config):
        _factors(tally, weight)
    else:
        for where, shard, count in _scatters(config, weight, iterations):
            if scatters_compressed(config, weight):
                nbytes = ranks * codec_of(config.parallel.reduce).nbytes(shard)
                what = _name_compression(config)
                tally.add(
                    weight.zero_axes,
                    ALL_TO_ALL,
                    f"gradients{where} scattered{what}",
                    nbytes,
                    count,
                    alone=True,
                )
                tally.encoded(ranks * shard, nbytes, shard, count)
            else:
                nbytes = ranks * shard * reduce
                what = f"gradients{where} scattered"
                tally.add(weight.zero_axes, REDUCE_SCATTER, what, nbytes, count)


def _across(tally: _Tally, weight: Placed) -> None:
    """Its shard, summed across islands."""
    config = tally.config
    what = "gradients summed across islands"
    islands = config.mesh.islands
    k = weight.on_rank()
    if not crosses_compressed(config, weight):
        if weight.zero_dim is not None and not _low_rank(config, weight):
            tally.add(
                (ISLAND,),
                ALL_REDUCE,
                what,
                k * shapes.itemsize(config.precision.reduce),
            )
    elif _low_rank(config, weight):
        _factors(tally, weight)
    elif islands == 2:
        nbytes = islands * codec_of(config.parallel.reduce).nbytes(k)
        tally.add((ISLAND,), ALL_GATHER, what + _name_compression(config), nbytes)
        tally.encoded(k, nbytes, k)
    else:
        each = chunk_length(k, islands)
        nbytes = islands * codec_of(config.parallel.reduce).nbytes(each)
        tally.add(
            (ISLAND,), ALL_TO_ALL, what + _name_compression(config), nbytes, alone=True
        )
        tally.add(
            (ISLAND,),
            ALL_GATHER,
            f"sums across islands gathered{_name_compression(config)}",
            nbytes,
        )
        tally.encoded(k + each, 2 * nbytes, k + each)


def _scatters(
    config: Config, weight: Placed, iterations: Iterations
) -> Iterator[tuple[str, int, int]]:
    """(where, numbers of a shard, how often) of the scatters of a weight's gradient."""
    shard = weight.on_rank()
    if not scatters_at_use(config):
        yield "", shard, 1
    elif weight.stacked:
        stage = stages(config)
        layers = stage.slots.count(weight.stack)
        yield (
            " of a layer",
            shard // (layers * stage.chunks),
            layers * iterations.backward,
        )
    else:
        part, _, name = weight.name.partition(".")
        # A tied weight is used twice, and its gradients are scattered one by one.
        tied = config.model.tied_head and name == "tokens"
        # So are those of an embedding that further predictions use.
        again = ("head",) * config.model.mtp if part == "embedding" else ()
        for at in (part, "head", *again) if tied else (part, *again):
            yield (
                f" of the {at}",
                shard,
                iterations.passes("head" if at in ("head", "mtp") else "unembedding"),
            )


def _low_rank(config: Config, weight: Placed) -> bool:
    return COMPRESSIONS[config.parallel.reduce.compression].low_rank and compresses(
        config, weight
    )


def _factors(tally: _Tally, weight: Placed) -> None:
    """PowerSGD's two sums of matrices [n, r] and [c, r], one of each for every layer."""
    config = tally.config
    matrix = as_matrix(config, weight)
    assert matrix is not None
    local = compressed_part(config, weight).local(config)
    first = matrix.first
    layers, n, c = (
        math.prod(local[a:b])
        for a, b in (
            (0, first),
            (first, first + matrix.rows),
            (first + matrix.rows, None),
        )
    )
    axes = summed_over(config, weight)
    for side, rows in (("P", n), ("Q", c)):
        tally.add(
            axes,
            ALL_REDUCE,
            f"gradients as PowerSGD's {side}",
            FLOAT32 * layers * rows * matrix.rank,
        )
    tally.moved += MULTIPLIED * FLOAT32 * layers * n * c


def _name_compression(config: Config) -> str:
    return f" as {config.parallel.reduce.compression}"


def sync_transfers(config: Config) -> list[Transfer]:
    """Collectives that synchronize islands which step by themselves; a fragment's are one of `every` steps.

    Fragments are taken to be equal.
    """
    sync = config.parallel.sync
    islands = config.mesh.islands
    if not sync.every:
        return []
    times = sync.fragments / sync.every
    what = "islands brought together"
    numbers: dict[bool, list[float]] = {True: [], False: []}
    for weight in all_placed(config):
        if weight.trained:
            numbers[sent_compressed(config, weight)].append(
                weight.on_rank() / sync.fragments
            )
    plain = Transfer(
        ISLAND,
        ALL_REDUCE,
        what,
        FLOAT32 * (sum(numbers[False]) + BESIDE),
        times,
        islands,
    )
    if not numbers[True]:
        return [plain]
    reduce = config.parallel.reduce
    what = f"{what}, as {reduce.compression}"
    k = message_length(reduce, map(round, numbers[True]), islands)
    kinds = (ALL_GATHER,) if islands == 2 else (ALL_TO_ALL, ALL_GATHER)
    nbytes = islands * codec_of(reduce).nbytes(
        k if islands == 2 else chunk_length(k, islands)
    )
    return [
        plain,
        *(Transfer(ISLAND, kind, what, nbytes, times, islands) for kind in kinds),
    ]


def sync_seconds(config: Config, cluster: Cluster) -> float:
    """Seconds of synchronizing islands in a step, on average, before any of it hides behind compute."""
    return sum(
        transfer.seconds(cluster, config.mesh) for transfer in sync_transfers(config)
    )


def sync_copies(config: Config) -> list[str]:
    """Names what islands that step by themselves hold besides the weights, each as large as a float32 shard of what is
    trained.
    """
    sync = config.parallel.sync
    copies = {
        "islands' own weights": sync.every,
        "outer momentum": sync.outer_momentum,
        "outer step under way": sync.delay,
    }
    return [name for name, wanted in copies.items() if wanted and sync.every]
