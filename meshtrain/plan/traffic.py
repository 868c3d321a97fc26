"""What a device sends in a step: every collective with its axis, kind, size and count.

    axis       what is sent                                                              how often
    tensor     sums of partial activations of each layer (Shoeybi et al. 2019)           4 a layer and pass, 1 more if recomputed
               or gathers and scatters of the sequence (Korthikanti et al. 2022)        10 a layer and pass, 1 more if recomputed
    data       weights gathered, gradients scattered or summed (ZeRO, section 7)         once a step, or a pass if not held
    island     what data scattered, summed                                               once a step
               or what islands moved by themselves (`bringing`)                          once in `parallel.sync.every` steps
    pipeline   activations down, cotangents up                                           a tick
               sums over the stages that share the vocabulary                            a tick, or a head

A pass is a microbatch without stages. With stages it is a tick: all devices run one program, so on accelerators a stage that idles
in a tick computes and sends all the same (its work is masked), and fills and drains cost traffic too.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from meshtrain.config import Config
from meshtrain.config.mesh import AXES
from meshtrain.config.schema import ACTIVATIONS
from meshtrain.parallel.placement import gathers_at_use, stages
from meshtrain.parallel.sync.when import summed_axes
from meshtrain.plan import bringing, shapes
from meshtrain.plan.cluster.algorithms import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from meshtrain.plan.flow import Flow, Trips
from meshtrain.plan.reducing import gradient_flows

BOTH = "tensor+pipeline"  # XLA joins sums over the two where one follows the other


def flows(config: Config, trips: Trips, reference: Trips | None = None) -> list[Flow]:
    """Every collective of a step on one device; `reference`: of dpo's forward without adapters, which comes first."""
    found = [_times(flow, trips.of(moment)) for moment, flow in [*layer_flows(config), *edge_flows(config)]]
    found += [*_data(config, trips), *_messages(config, trips), *_replicated(config)]
    found += _reference(config, reference) if reference is not None else []
    found += bringing.flows(config)
    return [flow for flow in found if flow.size > 1 and flow.count]


def _reference(config: Config, trips: Trips) -> list[Flow]:
    found = [_times(flow, trips.of(moment)) for moment, flow in [*layer_flows(config), *edge_flows(config)]]
    found += _messages(config, trips)
    stages, base = config.mesh.pipeline, shapes.held(config).block - shapes.trained(config).block
    if gathers_at_use(config):
        found += _gathers(config, trips, base.shard * config.mesh.shards)
    if config.parallel.vocab == "edge":
        losses = 4 * shapes.tokens(config) * config.parallel.microbatches
        found.append(Flow("pipeline", ALL_REDUCE, "losses to all stages", losses, 1, stages))
    return [replace(flow, what=f"reference: {flow.what}") for flow in found]


def by_axis(found: list[Flow]) -> dict[str, float]:
    """Bytes that one device sends in a step by mesh axis; sums over tensor and pipeline at once have a line of their own."""
    axes = dict.fromkeys([*AXES, *sorted({flow.axis for flow in found})])
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
    # of the layer's own output the backward has no use, unless a norm stands behind it
    again = ("attention_out" not in names) + (config.model.post_norms and "mlp_out" not in names)
    # Of products that are computed again the backward waits for the inputs; else only the weights' gradients take them.
    late = ("qkv" in names) + ("mlp_in" in names) if parallel.remat != "dots" else 2

    def over(moment: str, kind: str, what: str, count: int, hides: bool = False, nbytes: float = whole) -> Moment:
        return moment, Flow("tensor", kind, what, nbytes, count * layers, ranks, hides)

    scales = config.model.d_model * shapes.itemsize(config.precision.compute)
    shared = ("forward", *["backward"] * (parallel.remat != "none")) if config.model.post_norms else ()
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
        *[over(moment, ALL_REDUCE, "scales of norms in the stream shared", 2, nbytes=scales) for moment in shared],
    ]


def edge_flows(config: Config) -> list[Moment]:
    """Collectives of embedding and loss head, in one pass; a frozen embedding has no backward."""
    frozen = not shapes.trained(config).embedding.whole
    return [(moment, flow) for moment, flow in _edge_flows(config) if not (frozen and moment == "unembedding")]


def _edge_flows(config: Config) -> Iterator[Moment]:
    mesh, model, whole, tokens = config.mesh, config.model, _whole(config), shapes.tokens(config)
    labels, read = shapes.labels(model, tokens), shapes.read(model, tokens)
    stream = shapes.stream(config) * shapes.itemsize(config.precision.compute)
    position = whole // tokens
    # What the last stage sends on, and the ranks of a split sequence to each other: of an image a position from every rank.
    last = read * position if read < tokens else stream
    pooled = labels * mesh.tensor * position if labels < tokens else whole
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
        yield flow("head", "tensor", ALL_GATHER, "last output gathered", pooled, mesh.tensor)
        yield flow("unhead", "tensor", REDUCE_SCATTER, "last output's cotangent scattered", pooled, mesh.tensor)
        if shared:
            yield flow("unhead", "pipeline", ALL_REDUCE, "last output's cotangent summed", last, mesh.pipeline)
    else:
        yield flow("embedding", sums[0], ALL_REDUCE, "embedding summed", whole, sums[1])
        yield flow("unhead", sums[0], ALL_REDUCE, "last output's cotangent summed", last, sums[1])
    if shared:
        yield flow("head", "pipeline", ALL_REDUCE, "last output to all stages", last, mesh.pipeline)
        yield flow("unembedding", "pipeline", ALL_REDUCE, "embedding's cotangent to all stages", stream, mesh.pipeline)
    smoothed = config.train.label_smoothing > 0
    yield flow("head", sums[0], ALL_REDUCE, "loss: sums of exponentials", 4 * labels * (2 + smoothed), sums[1])
    yield flow("head", sums[0], ALL_REDUCE, "loss: largest logits", 4 * labels, sums[1])


def _data(config: Config, trips: Trips) -> list[Flow]:
    ranks, zero = config.mesh.shards, config.parallel.zero_stage
    found: list[Flow] = []
    # What is frozen is whole everywhere but in stage 3.
    gathered = shapes.held(config) if zero == 3 else shapes.trained(config)
    if gathers_at_use(config):
        found += _gathers(config, trips, gathered.block.shard * ranks)
    elif zero:
        everything = (gathered.block.shard * stages(config).on_device + gathered.outer.shard) * ranks
        weight = shapes.itemsize(config.precision.compute)
        found.append(Flow("data", ALL_GATHER, "weights gathered", everything * weight, 1, ranks))
    return [flow for flow in found + gradient_flows(config, trips) if flow.nbytes]


def _gathers(config: Config, trips: Trips, layer: float) -> list[Flow]:
    """Weights gathered where they are used, of a layer so many elements."""
    weight, ranks = shapes.itemsize(config.precision.compute), config.mesh.shards
    passes = stages(config).longest * (trips.forward + trips.backward)
    found = [Flow("data", ALL_GATHER, "weights of a layer gathered", layer * weight, passes, ranks)]
    for moment, elements in edge_uses(config):
        times = trips.of(moment)
        found.append(Flow("data", ALL_GATHER, f"weights of the {moment} gathered", elements * weight, times, ranks))
    return found


def edge_uses(config: Config) -> list[tuple[str, float]]:
    """(embedding or head, elements) that are gathered where they are used. A tied weight is used twice: without stages it is gathered
    once for both uses."""
    held, ranks = shapes.held(config), config.mesh.shards
    embedding, head = held.embedding.shard * ranks, held.head.shard * ranks
    if config.model.tied_head and config.mesh.pipeline > 1:
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
    axes = summed_axes(config)
    data = 1 if config.parallel.zero_stage else math.prod(config.mesh.ways(axis) for axis in axes)
    found = []
    for (axis, size), elements in _partial(config).items():
        joined = "+".join((*axes, axis)) if data > 1 else axis
        found.append(Flow(joined, ALL_REDUCE, "gradients of replicated weights", 4 * elements, 1, size * data))
    return found


def _partial(config: Config) -> dict[tuple[str, int], int]:
    """Elements of those weights on one device, by (axes, devices of the group)."""
    return shapes.replicated(config, stages(config).on_device)
