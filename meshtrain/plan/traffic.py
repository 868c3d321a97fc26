"""What a device sends in a step: every collective with its axis, kind, size and count.

    axis       what is sent                                                              how often
    tensor     sums of partial activations of each layer (Shoeybi et al. 2019)           4 a layer and pass, 1 more if recomputed
               or gathers and scatters of the sequence (Korthikanti et al. 2022)        10 a layer and pass, 1 more if recomputed
    data       weights gathered, gradients scattered or summed (ZeRO, section 7)         once a step, or a pass if not held
    pipeline   activations down, cotangents up                                           a tick
               sums over the stages that share the vocabulary                            a tick, or a head

A pass is a microbatch without stages. With stages it is a tick: all devices run one program, so on accelerators a stage that idles
in a tick computes and sends all the same (its work is masked), and fills and drains cost traffic too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshtrain.config import Config
from meshtrain.config.schema import ACTIVATIONS, AXES
from meshtrain.parallel.placement import gathers_at_use, scatters_at_use, stages
from meshtrain.plan import shapes
from meshtrain.plan.cluster.algorithms import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, sent

BOTH = "tensor+pipeline"  # XLA joins sums over the two where one follows the other


@dataclass(frozen=True)
class Trips:
    """How often a device goes forward and backward through a chunk and through the loss head in a step.

    The embedding's passes, forward and backward (`unembedding`), and the messages `down` and `up` are as many where not given.
    """

    forward: int
    head: int
    backward: int
    embedding: int | None = None
    unembedding: int | None = None
    down: int | None = None
    up: int | None = None

    def of(self, moment: str) -> int:
        """Passes through what one of the fields names."""
        own = getattr(self, moment)
        return own if own is not None else self.forward if moment in ("embedding", "down") else self.backward


@dataclass(frozen=True)
class Flow:
    """Collectives of one sort in a step: `nbytes` is the size S of the whole array (see `algorithms`), `count` how many."""

    axis: str
    kind: str
    what: str
    nbytes: float
    count: int
    size: int  # devices that talk to each other
    hides: bool = False  # products of the weights' gradients, which wait for nothing, can be computed meanwhile

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step."""
        return self.count * sent(self.kind, self.size, self.nbytes)


def flows(config: Config, trips: Trips) -> list[Flow]:
    """Every collective of a step on one device."""
    found = [_times(flow, trips.of(moment)) for moment, flow in [*layer_flows(config), *edge_flows(config)]]
    found += [*_data(config, trips), *_messages(config, trips), *_replicated(config)]
    return [flow for flow in found if flow.size > 1 and flow.count]


def by_axis(found: list[Flow]) -> dict[str, float]:
    """Bytes that one device sends in a step by mesh axis; sums over tensor and pipeline at once have a line of their own."""
    axes = [*AXES, *sorted({flow.axis for flow in found} - set(AXES))]
    return {axis: sum(f.sent for f in found if f.axis == axis) for axis in axes}


def _times(flow: Flow, times: int) -> Flow:
    return replace(flow, count=flow.count * times)


Moment = tuple[str, Flow]  # a pass (see Trips.of), and what is sent in it


def _whole(config: Config) -> int:
    """Bytes of the residual stream of one microbatch, not split along the sequence."""
    return shapes.tokens(config) * config.model.d_model * shapes.itemsize(config.precision.compute)


def layer_flows(config: Config) -> list[Moment]:
    """Collectives over tensor of a chunk's layers, in one pass."""
    parallel, ranks, whole = config.parallel, config.mesh.tensor, _whole(config)
    layers = stages(config).longest
    names = ACTIVATIONS if parallel.remat == "none" else (*parallel.names_kept, *parallel.remat_offload)
    again = 0 if "attention_out" in names else 1  # of the layer's own output the backward has no use
    # Of products that are computed again the backward waits for the inputs; else only the weights' gradients take them.
    late = ("qkv" in names) + ("mlp_in" in names) if parallel.remat != "dots" else 2

    def over(moment: str, kind: str, what: str, count: int, hides: bool = False) -> Moment:
        return moment, Flow("tensor", kind, what, whole, count * layers, ranks, hides)

    if parallel.sequence_parallel:
        return [
            over("forward", ALL_GATHER, "layer inputs gathered", 2),
            over("forward", REDUCE_SCATTER, "layer outputs scattered", 2),
            over("backward", ALL_GATHER, "layer inputs gathered again for weights", late, hides=True),
            over("backward", ALL_GATHER, "layer inputs gathered again for products", 2 - late),
            over("backward", REDUCE_SCATTER, "layer outputs scattered again", again),
            over("backward", ALL_GATHER, "output cotangents gathered", 2),
            over("backward", REDUCE_SCATTER, "input cotangents scattered", 2, hides=True),
        ]
    return [
        over("forward", ALL_REDUCE, "layer outputs summed", 2),
        over("backward", ALL_REDUCE, "layer outputs summed again", again),
        over("backward", ALL_REDUCE, "input cotangents summed", 2, hides=True),
    ]


def edge_flows(config: Config) -> Iterator[Moment]:
    """Collectives of embedding and loss head, in one pass."""
    mesh, whole, tokens = config.mesh, _whole(config), shapes.tokens(config)
    stream = shapes.stream(config) * shapes.itemsize(config.precision.compute)
    shared = config.parallel.vocab == "spread" and mesh.pipeline > 1  # the stages share the vocabulary
    both = mesh.tensor * mesh.pipeline
    sums = (BOTH, both) if shared and mesh.tensor > 1 else ("pipeline", mesh.pipeline) if shared else ("tensor", mesh.tensor)  # fmt: skip

    def flow(moment: str, axis: str, kind: str, what: str, nbytes: float, size: int) -> Moment:
        return moment, Flow(axis, kind, what, nbytes, 1, size)

    if config.parallel.sequence_parallel and mesh.tensor > 1:
        yield flow("embedding", "tensor", REDUCE_SCATTER, "embedding scattered", whole, mesh.tensor)
        if shared:
            yield flow("embedding", "pipeline", ALL_REDUCE, "embedding summed", stream, mesh.pipeline)
        yield flow("unembedding", "tensor", ALL_GATHER, "embedding's cotangent gathered", whole, mesh.tensor)
        yield flow("head", "tensor", ALL_GATHER, "last output gathered", whole, mesh.tensor)
        yield flow("head", "tensor", REDUCE_SCATTER, "last output's cotangent scattered", whole, mesh.tensor)
        if shared:
            yield flow("head", "pipeline", ALL_REDUCE, "last output's cotangent summed", stream, mesh.pipeline)
    else:
        yield flow("embedding", sums[0], ALL_REDUCE, "embedding summed", whole, sums[1])
        yield flow("head", sums[0], ALL_REDUCE, "last output's cotangent summed", whole, sums[1])
    if shared:
        yield flow("head", "pipeline", ALL_REDUCE, "last output to all stages", stream, mesh.pipeline)
        yield flow("unembedding", "pipeline", ALL_REDUCE, "embedding's cotangent to all stages", stream, mesh.pipeline)
    smoothed = config.train.label_smoothing > 0
    yield flow("head", sums[0], ALL_REDUCE, "loss: sums of exponentials", 4 * tokens * (2 + smoothed), sums[1])
    yield flow("head", sums[0], ALL_REDUCE, "loss: largest logits", 4 * tokens, sums[1])


def _data(config: Config, trips: Trips) -> list[Flow]:
    ranks, zero = config.mesh.data, config.parallel.zero_stage
    weight, reduce = shapes.itemsize(config.precision.compute), shapes.itemsize(config.precision.reduce)
    stage = stages(config)
    held = shapes.held(config)
    block, outer = held.block, held.outer
    if not zero:
        summed = block.whole * stage.on_device + outer.whole - sum(_partial(config).values())
        return [Flow("data", ALL_REDUCE, "gradients summed", summed * reduce, 1, ranks)]
    layers, edge = block.shard * ranks, outer.shard * ranks
    everything = layers * stage.on_device + edge
    found: list[Flow] = []
    elements: float
    if gathers_at_use(config):
        passes = stage.longest * (trips.forward + trips.backward)
        found.append(Flow("data", ALL_GATHER, "weights of a layer gathered", layers * weight, passes, ranks))
        for moment, elements in edge_uses(config):
            times = trips.of(moment)
            found.append(Flow("data", ALL_GATHER, f"weights of the {moment} gathered", elements * weight, times, ranks))
    else:
        found.append(Flow("data", ALL_GATHER, "weights gathered", everything * weight, 1, ranks))
    if scatters_at_use(config):
        passes = stage.longest * trips.backward
        found.append(Flow("data", REDUCE_SCATTER, "gradients of a layer scattered", layers * reduce, passes, ranks))
        for moment, elements in edge_uses(config, scattered=True):
            times = trips.of("head" if moment == "head" else "unembedding")
            found.append(Flow("data", REDUCE_SCATTER, f"gradients of the {moment} scattered", elements * reduce, times, ranks))  # fmt: skip
    else:
        found.append(Flow("data", REDUCE_SCATTER, "gradients scattered", everything * reduce, 1, ranks))
    return found


def edge_uses(config: Config, scattered: bool = False) -> list[tuple[str, float]]:
    """(embedding or head, elements) that are gathered or scattered where they are used. A tied weight is used twice: without
    stages it is gathered once for both uses, but its gradients are scattered one by one."""
    held, ranks = shapes.held(config), config.mesh.data
    embedding, head = held.embedding.shard * ranks, held.head.shard * ranks
    if config.model.tied_head and (scattered or config.mesh.pipeline > 1):
        head += held.tokens.shard * ranks
    return [("embedding", embedding), ("head", head)]


def _messages(config: Config, trips: Trips) -> list[Flow]:
    stages, size = config.mesh.pipeline, shapes.itemsize(config.precision.compute)
    stream = shapes.stream(config) * size
    return [
        Flow("pipeline", PERMUTE, "activations sent on", stream, trips.of("down"), stages),
        Flow("pipeline", PERMUTE, "cotangents sent back", stream, trips.of("up"), stages),
    ]


def _replicated(config: Config) -> list[Flow]:
    """Gradients of weights that are whole on several model-parallel ranks, each of which has a part of the sum. Without ZeRO they
    are summed over data in the same go."""
    data = 1 if config.parallel.zero_stage else config.mesh.data
    found = []
    for (axis, size), elements in _partial(config).items():
        joined = f"data+{axis}" if data > 1 else axis
        found.append(Flow(joined, ALL_REDUCE, "gradients of replicated weights", 4 * elements, 1, size * data))
    return found


def _partial(config: Config) -> dict[tuple[str, int], int]:
    """Elements of those weights on one device, by (axes, devices of the group)."""
    return shapes.replicated(config, stages(config).on_device)
