"""The traffic of a device in a step: every collective with its axis, kind, size and count.

    axis       what is sent                                                       how often
    tensor     sums of partial activations of each layer (Shoeybi et al. 2019)    4 a layer and pass, 5 if recomputed
               or gathers and scatters of the sequence (Korthikanti et al. 2022)  10 a layer and pass, 11 if recomputed
    data       weights gathered, gradients scattered or summed (ZeRO, section 7)  once a step, or a pass if not held
    island     what data scattered, summed                                        once a step
               or what islands moved by themselves (`gradient_traffic`)           once in `parallel.sync.every` steps
    data+tensor, context too: matrices to the ranks that orthogonalize them       once a step, and back
    data, context, expert: each head's largest logit (`parallel.qk_clip`)         once a step
    pipeline   activations down, cotangents up                                    a clock
               sums over the stages that share the vocabulary                     a clock, or a head

A pass is a microbatch without stages. With stages it is a clock. All devices run one program, so on accelerators a
stage that idles in a clock computes and sends all the same; its work is masked. Fills and drains cost traffic too.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshtrain.cluster.algorithms import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from meshtrain.config import Config
from meshtrain.config.mesh import AXES, DATA, PIPELINE, TENSOR
from meshtrain.config.reduce import gathers_at_use
from meshtrain.config.schema import ACTIVATIONS
from meshtrain.families import FAMILIES
from meshtrain.parallel.placement import expert_axes, stages
from meshtrain.parallel.sync.when import summed_axes
from meshtrain.plan import float8, shapes
from meshtrain.plan.by_stack import last_config, stack_configs
from meshtrain.plan.compute import FrameworkProfile
from meshtrain.plan.context import context_transfers
from meshtrain.plan.experts import expert_transfers
from meshtrain.plan.gradient_traffic import (
    FLOAT32,
    Iterations,
    Moment,
    Transfer,
    gradient_transfers,
    sync_transfers,
)
from meshtrain.plan.orthogonal import orthogonal_transfers
from meshtrain.plan.prediction import prediction_transfers
from meshtrain.plan.shapes import compute_size

# What other frameworks send more or less often than our program, see `practised_count`.
GATHERED_FOR_WEIGHTS = "layer inputs gathered again for weights"
INPUTS_SUMMED = "input cotangents summed"
OUTPUTS_SCATTERED_AGAIN = "layer outputs scattered again"
OUTPUTS_SUMMED_AGAIN = "layer outputs summed again"
Transfers = list[Transfer]
BOTH = "tensor+pipeline"  # XLA joins sums over the two where one follows the other


def transfers(
    config: Config, iterations: Iterations, reference: Iterations | None = None
) -> Transfers:
    """Every collective of a step on one device; `reference`: of dpo's forward without adapters, which comes first."""
    transfers = _multiply(config, iterations)
    transfers += [
        *_data(config, iterations),
        *_messages(config, iterations),
        *_replicated(config),
    ]
    transfers += _reference(config, reference) if reference is not None else []
    transfers += [
        *orthogonal_transfers(config),
        *sync_transfers(config),
        *_maxima(config),
    ]
    return [t for t in transfers if t.size > 1 and t.count]


def _maxima(config: Config) -> Transfers:
    """Returns the collectives of the largest logits, of which the last gathers those of all layers and heads."""
    if not config.optimizer.qk_clip:
        return []
    mesh = config.mesh
    ranks = mesh.token_axes()
    layers = mesh.pipeline * stages(config).on_device
    largest = FLOAT32 * layers * config.model.heads
    own = mesh.pipeline * mesh.tensor
    what = "largest logits"
    return [
        Transfer(
            _joined(config, ranks),
            ALL_REDUCE,
            what,
            largest / own,
            1,
            mesh.devices // own,
        ),
        Transfer(
            _joined(config, (TENSOR, PIPELINE)), ALL_GATHER, what, largest, 1, own
        ),
    ]


def _reference(config: Config, iterations: Iterations) -> Transfers:
    transfers = _multiply(config, iterations)
    transfers += _messages(config, iterations)
    stages = config.mesh.pipeline
    base = shapes.resident(config).block - shapes.trained(config).block
    if gathers_at_use(config):
        transfers += _gathers(config, iterations, base.gathered)
    if config.parallel.vocab == "edge":
        losses = 4 * shapes.tokens(config) * config.parallel.microbatches
        transfers.append(
            Transfer("pipeline", ALL_REDUCE, "losses to all stages", losses, 1, stages)
        )
    return [replace(t, what=f"reference: {t.what}") for t in transfers]


def by_axis(transfers: Transfers) -> dict[str, float]:
    """Bytes that one device sends in a step by mesh axis; sums over tensor and pipeline at once have a line of their
    own.
    """
    axes = dict.fromkeys([*AXES, *sorted({t.axis for t in transfers})])
    return {axis: sum(t.sent for t in transfers if t.axis == axis) for axis in axes}


def _multiply(config: Config, iterations: Iterations) -> Transfers:
    edge = edge_transfers(config)
    transfers = [*edge]
    assigned = stages(config)
    for stack, one in stack_configs(config):
        of_layers = _list_layers(one)
        # Theirs are of as many layers as a chunk of such layers alone has; what all layers share is sent once.
        here, alone = assigned.slots.count(stack), stages(one).longest
        transfers += [
            (moment, replace(t, count=t.count // alone * here or t.count))
            for moment, t in of_layers
        ]
    last = last_config(config)
    transfers += prediction_transfers(last, _list_layers(last), edge)
    return [
        replace(t, count=t.count * iterations.passes(moment)) for moment, t in transfers
    ]


def _list_layers(config: Config) -> list[Moment]:
    return [
        *layer_transfers(config),
        *context_transfers(config),
        *expert_transfers(config),
    ]


def _stream_bytes(config: Config) -> int:
    """Bytes of the residual stream of one microbatch, not split along the sequence."""
    return shapes.tokens(config) * config.model.d_model * compute_size(config)


def layer_transfers(config: Config) -> list[Moment]:
    """Collectives over tensor of a chunk's layers, in one pass."""
    parallel = config.parallel
    ranks = config.mesh.tensor
    stream_bytes = _stream_bytes(config)
    layers = stages(config).longest
    halves, late, again = _count_sends(config)

    def transfer(
        moment: str,
        kind: str,
        what: str,
        count: int,
        hides: bool = False,
        nbytes: float = stream_bytes,
    ) -> Moment:
        return moment, Transfer(
            "tensor", kind, what, nbytes, count * layers, ranks, hides
        )

    size = compute_size(config)
    squares = 2 * FLOAT32 * shapes.tokens(config)
    # norms are always computed again
    over_heads = [
        transfer(
            moment,
            ALL_REDUCE,
            "squares of q and k over all heads",
            count,
            nbytes=squares,
        )
        for moment, count in (("forward", 1), ("backward", 2))
        if config.model.qk_norm and FAMILIES[config.model.family].joint_qk_norm
    ]
    if parallel.sequence_parallel:
        entering = stream_bytes * float8.entering_size(config) / size
        return [
            transfer(
                "forward", ALL_GATHER, "layer inputs gathered", halves, nbytes=entering
            ),
            transfer("forward", REDUCE_SCATTER, "layer outputs scattered", halves),
            transfer(
                "backward",
                ALL_GATHER,
                GATHERED_FOR_WEIGHTS,
                late,
                hides=True,
                nbytes=entering,
            ),
            transfer(
                "backward",
                ALL_GATHER,
                "layer inputs gathered again for products",
                halves - late,
                nbytes=entering,
            ),
            transfer("backward", REDUCE_SCATTER, OUTPUTS_SCATTERED_AGAIN, again),
            transfer("backward", ALL_GATHER, "output cotangents gathered", halves),
            transfer(
                "backward",
                REDUCE_SCATTER,
                "input cotangents scattered",
                halves,
                hides=True,
            ),
            *over_heads,
        ]
    shared_scales = [
        transfer(
            moment,
            ALL_REDUCE,
            "scales of norms in the stream shared",
            2,
            nbytes=config.model.d_model * size,
        )
        for moment in ("forward", *["backward"] * (parallel.remat != "none"))
        if config.model.post_norms
    ]
    return [
        transfer("forward", ALL_REDUCE, "layer outputs summed", 2),
        transfer("backward", ALL_REDUCE, OUTPUTS_SUMMED_AGAIN, again),
        transfer("backward", ALL_REDUCE, INPUTS_SUMMED, 2, hides=True),
        *shared_scales,
        *over_heads,
    ]


def _count_sends(config: Config) -> tuple[int, int, int]:
    """Returns how often a layer gathers its inputs, how often again for the weights' gradients alone, and how many
    outputs the backward sends again.
    """
    parallel = config.parallel
    names = (
        ACTIVATIONS
        if parallel.remat == "none"
        else (*parallel.names_kept, *parallel.remat_offload)
    )
    # where experts lie over tensor too nothing is gathered for them, but for shared ones
    halves = 1 + (config.model.d_ff > 0 or TENSOR not in expert_axes(config))
    # The backward waits for the inputs of products that are computed again; else only the weights' gradients take them.
    late = ("qkv" in names) + (halves - 1) * ("mlp_in" in names)
    # The backward has no use for the layer's own output, unless a norm stands behind it.
    again = ("attention_out" not in names) + (
        config.model.post_norms and "mlp_out" not in names
    )
    return halves, halves if parallel.remat == "dots" else late, again


def practised_count(what: str, count: float, profile: FrameworkProfile) -> float:
    """Returns how often another framework sends what our program sends `count` times a layer."""
    if what == INPUTS_SUMMED:
        return profile.input_sums
    if what == GATHERED_FOR_WEIGHTS and not profile.regathers:
        return 0.0
    # What computes a layer again as a whole sums both its outputs again, though no backward reads the second.
    whole = profile.recomputes is not None and profile.recomputes[0] == 1
    if whole and what in (OUTPUTS_SUMMED_AGAIN, OUTPUTS_SCATTERED_AGAIN):
        return 2.0
    return count


def edge_transfers(config: Config) -> list[Moment]:
    """Collectives of embedding and loss head, in one pass; a frozen embedding has no backward."""
    frozen = not shapes.trained(config).embedding.full
    return [
        (moment, t)
        for moment, t in _edge_transfers(config)
        if not (frozen and moment == "unembedding")
    ]


def _edge_transfers(config: Config) -> Iterator[Moment]:
    mesh, model, stream_bytes, tokens = (
        config.mesh,
        config.model,
        _stream_bytes(config),
        shapes.tokens(config),
    )
    labels = shapes.labels(model, tokens)
    read = shapes.read(model, tokens)
    stream = shapes.stream(config) * compute_size(config)
    position = stream_bytes // tokens
    # What the last stage sends on, and the ranks of a split sequence to each other: of an image a position from every
    # rank.
    last = read * position if read < tokens else stream
    pooled = labels * mesh.tensor * position if labels < tokens else stream_bytes
    shared = (
        config.parallel.vocab == "spread" and mesh.pipeline > 1
    )  # the stages share the vocabulary
    sums = BOTH if shared and mesh.tensor > 1 else "pipeline" if shared else "tensor"

    chunks = shapes.loss_chunks(config)
    again = shapes.logits_again(config)

    def transfer(
        moment: str, axis: str, kind: str, what: str, nbytes: float, count: int = 1
    ) -> Moment:
        size = math.prod(mesh.ways(part) for part in axis.split("+"))
        return moment, Transfer(axis, kind, what, nbytes / count, count, size)

    if config.parallel.sequence_parallel and mesh.tensor > 1:
        yield transfer(
            "embedding", "tensor", REDUCE_SCATTER, "embedding scattered", stream_bytes
        )
        if shared:
            yield transfer(
                "embedding", "pipeline", ALL_REDUCE, "embedding summed", stream
            )
        yield transfer(
            "unembedding",
            "tensor",
            ALL_GATHER,
            "embedding's cotangent gathered",
            stream_bytes,
        )
        yield transfer(
            "head", "tensor", ALL_GATHER, "last output gathered", pooled, chunks
        )
        if again:
            yield transfer(
                "unhead",
                "tensor",
                ALL_GATHER,
                "last output gathered again",
                pooled,
                chunks,
            )
        yield transfer(
            "unhead",
            "tensor",
            REDUCE_SCATTER,
            "last output's cotangent scattered",
            pooled,
            chunks,
        )
        if shared:
            yield transfer(
                "unhead",
                "pipeline",
                ALL_REDUCE,
                "last output's cotangent summed",
                last,
                chunks,
            )
    else:
        yield transfer("embedding", sums, ALL_REDUCE, "embedding summed", stream_bytes)
        yield transfer(
            "unhead", sums, ALL_REDUCE, "last output's cotangent summed", last, chunks
        )
    if shared:
        yield transfer(
            "head", "pipeline", ALL_REDUCE, "last output to all stages", last
        )
        yield transfer(
            "unembedding",
            "pipeline",
            ALL_REDUCE,
            "embedding's cotangent to all stages",
            stream,
        )
    smoothed = config.train.label_smoothing > 0
    for moment in ("head", *["unhead"] * again):
        yield transfer(
            moment,
            sums,
            ALL_REDUCE,
            "loss: sums of exponentials",
            4 * labels * (2 + smoothed),
            chunks,
        )
        yield transfer(
            moment, sums, ALL_REDUCE, "loss: largest logits", 4 * labels, chunks
        )


def _data(config: Config, iterations: Iterations) -> Transfers:
    ranks = config.mesh.shards
    zero = config.parallel.zero_stage
    transfers: Transfers = []
    # What is frozen is whole everywhere but in stage 3.
    gathered = shapes.resident(config) if zero == 3 else shapes.trained(config)
    if gathers_at_use(config):
        transfers += _gathers(config, iterations, gathered.block.gathered)
    elif zero:
        of_layers = gathered.block.gathered * float8.weight_size(config)
        outer = gathered.outer.gathered * compute_size(config)
        nbytes = of_layers * stages(config).on_device + outer
        axes = _zero_axes(config)
        transfers.append(
            Transfer(axes, ALL_GATHER, "weights gathered", nbytes, 1, ranks)
        )
    return [t for t in transfers + gradient_transfers(config, iterations) if t.nbytes]


def _zero_axes(config: Config) -> str:
    """The axes that ZeRO shards over, as a transfer names them."""
    return _joined(config, config.mesh.token_axes(across=False)) or DATA


def _joined(config: Config, axes: Iterable[str]) -> str:
    return "+".join(axis for axis in axes if config.mesh.ways(axis) > 1)


def _gathers(config: Config, iterations: Iterations, layer: float) -> Transfers:
    """Weights gathered where they are used, of a layer so many elements."""
    weight = compute_size(config)
    ranks = config.mesh.shards
    passes = stages(config).longest * (iterations.forward + iterations.backward)
    over = _zero_axes(config)
    transfers = [
        Transfer(
            over,
            ALL_GATHER,
            "weights of a layer gathered",
            layer * float8.weight_size(config),
            passes,
            ranks,
        )
    ]
    for moment, elements in edge_uses(config):
        what = f"weights of the {moment} gathered"
        times = iterations.passes(moment)
        transfers.append(
            Transfer(over, ALL_GATHER, what, elements * weight, times, ranks)
        )
    return transfers


def edge_uses(config: Config) -> list[tuple[str, float]]:
    """(embedding or head, elements) that are gathered where they are used.

    A tied weight is used twice: without stages it is gathered once for both uses. All further predictions take the
    embedding as it was gathered for the first.
    """
    resident = shapes.resident(config)
    embedding = resident.embedding.gathered
    head = resident.head.gathered
    if config.model.tied_head and config.mesh.pipeline > 1:
        head += resident.tokens.gathered
    again = embedding if config.model.mtp and config.mesh.pipeline > 1 else 0.0
    return [
        ("embedding", embedding),
        ("head", head + resident.predictions.gathered + again),
    ]


def _messages(config: Config, iterations: Iterations) -> Transfers:
    stages = config.mesh.pipeline
    size = compute_size(config)
    stream = shapes.stream(config) * size
    return [
        Transfer(
            "pipeline",
            PERMUTE,
            "activations sent on",
            stream,
            iterations.passes("down"),
            stages,
        ),
        Transfer(
            "pipeline",
            PERMUTE,
            "cotangents sent back",
            stream,
            iterations.passes("up"),
            stages,
        ),
    ]


def _replicated(config: Config) -> Transfers:
    """Gradients of weights that are whole on several model-parallel ranks, each of which has a part of the sum.

    Without ZeRO they are summed over data in the same go.
    """
    axes = summed_axes(config)
    data = (
        1
        if config.parallel.zero_stage
        else math.prod(config.mesh.ways(axis) for axis in axes)
    )
    transfers = []
    for (axis, size), elements in shapes.replicated(
        config, stages(config).on_device
    ).items():
        joined = _joined(config, (*axes, *axis.split("+"))) if data > 1 else axis
        transfers.append(
            Transfer(
                joined,
                ALL_REDUCE,
                "gradients of replicated weights",
                4 * elements,
                1,
                size * data,
            )
        )
    return transfers
