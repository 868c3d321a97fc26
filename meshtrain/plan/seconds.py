"""Seconds of a step by what they are spent on: compute by shape, communication by the cheapest collective, the pipeline
by its table.

    layer_cost ──┐
    edge_cost ───┼──► MicrobatchCosts ──► the pipeline's table, or microbatches one after another ──┐
    message_cost ┘                                                                                  ├──► StepTime
    outside the microbatches: data_seconds - hidden_seconds, the optimizer, waits for hosts ────────┘
"""

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from meshtrain.cluster.accelerators import Accelerator
from meshtrain.cluster.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    REDUCE_SCATTER,
    best,
)
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config, ModelConfig
from meshtrain.config.follow import runs_table
from meshtrain.config.mesh import ISLAND
from meshtrain.config.reduce import (
    gathers_at_use,
    overlaps_reduce_scatter,
    scatters_at_use,
    sends_by_table,
)
from meshtrain.parallel.placement import buckets, stages
from meshtrain.parallel.sync.when import summed_axes
from meshtrain.plan import compute, float8, gradient_traffic, programs, shapes
from meshtrain.plan.by_stack import last_config
from meshtrain.plan.compute import DEFAULT_PROFILE, FrameworkProfile, Seconds
from meshtrain.plan.layer_costs import LayerCost, layer_cost, stage_layers
from meshtrain.plan.prediction import join_seconds, join_transfers
from meshtrain.plan.traffic import BOTH, edge_transfers


@dataclass(frozen=True)
class EdgeCost:
    """Seconds of one microbatch in embedding and loss head on one device."""

    head: Seconds  # its forward and backward, and those of the embedding of images
    head_sends: float  # sums over tensor
    vocab_sends: float  # sums over the stages that share the vocabulary
    forward: float  # alone, as of dpo's reference and of an evaluation, with its sums

    @property
    def total(self) -> float:
        """Seconds of a step, without those of the reference."""
        return self.head.total + self.head_sends + self.vocab_sends


@dataclass(frozen=True)
class MessageCost:
    """Seconds of one hop to the next stage, which either travels while the stages work on or is waited for."""

    overlapped: float
    waits: float


@dataclass(frozen=True)
class MicrobatchCosts:
    """Seconds of one microbatch on one device, from which a step is put together."""

    layer: LayerCost
    edge: EdgeCost
    message: MessageCost
    layers: float  # of a chunk, as long as the longest virtual stage
    chunks: int  # of a stage
    # those of each virtual stage; of several kinds as many of the mean cost as take its seconds
    of_stages: tuple[float, ...] = ()

    @property
    def stage(self) -> float:
        """All chunks of a stage, forward, head and backward."""
        return (
            self.chunks * (self.chunk_forward + self.chunk_backward) + self.edge.total
        )

    @property
    def chunk_forward(self) -> float:
        layer = self.layer
        seconds = layer.forward.total + layer.forward_sends + layer.forward_copies
        return self.layers * seconds + self.message.waits

    @property
    def chunk_backward(self) -> float:
        layer = self.layer
        seconds = layer.backward.total + layer.backward_sends + layer.backward_copies
        return self.layers * seconds + self.message.waits

    @property
    def chunk_weight_grad(self) -> float:
        """The part of the backward's products that only the weights need: half of them where all is trained."""
        return self.layers * self.layer.weight_grad

    @property
    def chunk_residuals(self) -> float:
        """Writing and reading what a split backward leaves for W."""
        return self.layers * self.layer.residuals

    @property
    def chunk_reference(self) -> float:
        """The forward of dpo's reference."""
        return self.layers * self.layer.reference


def microbatch_costs(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> MicrobatchCosts:
    """Costs of one microbatch on one device of a cluster."""
    stage = stages(config)
    of_stages = stage_layers(config, cluster, profile)
    return MicrobatchCosts(
        layer=layer_cost(config, cluster, profile),
        edge=edge_cost(config, cluster, profile),
        message=message_cost(config, cluster, profile),
        layers=max(of_stages),
        chunks=stage.chunks,
        of_stages=of_stages,
    )


def edge_cost(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> EdgeCost:
    """Costs of a microbatch in embedding and loss head."""
    model = config.model
    sizes = _head_sizes(config, cluster)
    head = _head_seconds(config, sizes, cluster, profile)
    sends, forward = _edge_sends(config, cluster)
    if model.mtp:
        # A prediction of a further token is a layer, and embedding and head again.
        layer = layer_cost(last_config(config), cluster, profile)
        join = join_seconds(config, cluster.accelerator)
        head += (head + layer.forward + layer.backward + join) * model.mtp
        joins = sum(t.seconds(cluster, config.mesh) for _, t in join_transfers(config))
        sends = {axis: (1 + model.mtp) * seconds for axis, seconds in sends.items()}
        sends["tensor"] += model.mtp * (layer.sends + joins)
    if profile.whole_logits:
        logits = shapes.labels(model, shapes.tokens(config)) * model.vocab_size
        nbytes = logits * shapes.compute_size(config)
        links = cluster.axis("tensor", config.mesh)
        sends["tensor"] += best(ALL_GATHER, links, nbytes).seconds
    return EdgeCost(
        head=head,
        head_sends=sends["tensor"],
        vocab_sends=sends["pipeline"] + sends[BOTH],
        forward=forward + compute.head_forward(*sizes).total,
    )


HeadSizes = tuple[ModelConfig, Accelerator, str, int, int]


def _head_sizes(config: Config, cluster: Cluster) -> HeadSizes:
    """Returns the arguments that the times of embedding and head in `plan.compute` have in common."""
    dtype = config.precision.compute
    degree = shapes.vocabulary_degree(config)
    return config.model, cluster.accelerator, dtype, shapes.tokens(config), degree


def _head_seconds(
    config: Config, sizes: HeadSizes, cluster: Cluster, profile: FrameworkProfile
) -> Seconds:
    """Returns the compute time of embedding and loss head, without predictions of further tokens."""
    trained = shapes.trained(config)
    weight = (trained.tokens if config.model.tied_head else trained.output).full
    head = compute.head(*sizes, profile, bool(weight))
    head += compute.embedding(*sizes, bool(trained.embedding.full))
    if (chunks := shapes.loss_chunks(config)) > 1:
        # Every chunk reads and writes the float32 sum of the weight's gradients.
        nbytes = 2 * 4 * chunks * weight
        head += Seconds(memory=nbytes / cluster.accelerator.memory_rate)
        # Our backward has the gradients already, unless the logits are made again.
        if not profile.compiled or shapes.logits_again(config):
            head += compute.head_forward(*sizes)
    return head


def _edge_sends(config: Config, cluster: Cluster) -> tuple[dict[str, float], float]:
    """Returns seconds that embedding and head of a microbatch wait for messages, by axis; and those of a forward."""
    sends = {"tensor": 0.0, "pipeline": 0.0, BOTH: 0.0}
    forward = 0.0
    for moment, t in edge_transfers(config):
        links = cluster.axis(t.axis, config.mesh)
        spent = t.count * best(t.kind, links, t.nbytes).seconds
        sends[t.axis] += spent
        if moment in ("embedding", "head"):
            forward += spent
    return sends, forward


def message_cost(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> MessageCost:
    """Costs of one hop of a microbatch to the next stage."""
    mesh = config.mesh
    if mesh.pipeline == 1:
        return MessageCost(0.0, 0.0)
    nbytes = shapes.stream(config) * shapes.compute_size(config)
    parts = 1
    if profile.scatter_messages and not config.parallel.sequence_parallel:
        parts = mesh.tensor
    seconds = best(PERMUTE, cluster.axis("pipeline", mesh), nbytes / parts).seconds
    if parts > 1:
        seconds += best(ALL_GATHER, cluster.axis("tensor", mesh), nbytes).seconds
    if profile.overlap_pipeline:
        return MessageCost(overlapped=seconds, waits=0.0)
    return MessageCost(overlapped=0.0, waits=seconds)


COMPUTE = ("matmul", "attention", "recompute", "head", "reference")
# fields of `StepTime`, by what bounds a step where they are the largest share
BOUNDS = {
    "compute": (*COMPUTE, "evaluation"),
    "memory": ("memory", "optimizer", "checkpoint"),
    "communication": (
        "tensor",
        "context",
        "expert",
        "pipeline",
        "data",
        "host",
        "stragglers",
        "synchronise",
    ),
    "bubble": ("bubble",),
    "drawing": ("draw",),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on; the device waits in `tensor`, `context`, `expert`, `pipeline`,
    `data`, `host`, `bubble`, `stragglers` and `synchronise`. The last two are of rollouts (`plan.rollouts`).
    """

    matmul: float
    attention: float
    memory: float
    recompute: float
    head: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    host: float
    bubble: float
    optimizer: float
    checkpoint: float
    evaluation: float
    reference: float
    stragglers: float = 0.0
    synchronise: float = 0.0
    draw: float = 0.0

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def parts(self) -> list[tuple[str, float]]:
        parts = dataclasses.asdict(self)
        if not self.draw:
            del parts["synchronise"], parts["draw"]
        return list(parts.items())

    @property
    def train(self) -> float:
        """Seconds without those of rollouts."""
        return self.total - self.synchronise - self.draw

    @property
    def work(self) -> float:
        """Seconds that the device works, and does not wait."""
        return self._sum((*COMPUTE, "memory", "optimizer"))

    @property
    def bound(self) -> str:
        """Returns the largest share: compute, memory, communication, bubble or drawing."""
        return max(BOUNDS, key=lambda bound: self._sum(BOUNDS[bound]))

    def _sum(self, names: Iterable[str]) -> float:
        return sum(getattr(self, name) for name in names)


def data_seconds(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> float:
    """Gathers and reductions over data of one step, before any of it hides behind compute."""
    if config.mesh.data * config.mesh.context == 1:
        return 0.0
    return (
        gradient_traffic.sync_seconds(config, cluster)
        + _gather_seconds(config, cluster, profile)
        + _reduce_seconds(config, cluster, profile)
    )


def _gather_seconds(
    config: Config, cluster: Cluster, profile: FrameworkProfile
) -> float:
    """Returns the seconds of gathering sharded weights, once a step or at use."""
    if not config.parallel.zero_stage:
        return 0.0
    layers = stages(config).on_device
    layer, outer = _gathered_bytes(config)
    if not gathers_at_use(config):
        return _gather(config, cluster, layers * layer + outer)
    # Our backward gathers embedding and head no second time.
    outer_passes = 1 if profile.compiled else 2
    return config.parallel.microbatches * (
        2 * layers * _gather(config, cluster, layer)
        + outer_passes * _gather(config, cluster, outer)
    )


def _gathered_bytes(config: Config) -> tuple[float, float]:
    """Returns the bytes of a layer's gathered weights, and of those of embedding and head."""
    sharded = shapes.trained(config)
    if config.parallel.zero_stage == 3:
        sharded = shapes.resident(config)
    layer = sharded.block.gathered * float8.weight_size(config)
    return layer, sharded.outer.gathered * shapes.compute_size(config)


def _gather(config: Config, cluster: Cluster, nbytes: float) -> float:
    axes = config.mesh.token_axes(across=False)
    return programs.seconds("psum", ALL_GATHER, axes, config.mesh, cluster, nbytes)


def _reduce_seconds(
    config: Config, cluster: Cluster, profile: FrameworkProfile
) -> float:
    """Returns the seconds of reducing all gradients: compressed, whole, or scattered and then summed over islands."""
    mesh = config.mesh
    parallel = config.parallel
    size = profile.gradient_bytes
    if profile is DEFAULT_PROFILE:
        if parallel.reduce.compression != "none":
            return sum(gradient_traffic.seconds(config, cluster))
        size = shapes.itemsize(config.precision.reduce)
    trained = shapes.trained(config)
    layers = stages(config).on_device

    def send(kind: str, axes: tuple[str, ...], elements: float) -> float:
        nbytes = elements * size
        algorithm = parallel.reduce.algorithm
        return programs.seconds(algorithm, kind, axes, mesh, cluster, nbytes)

    if not parallel.zero_stage:
        elements = layers * trained.block.full + trained.outer.full
        return send(ALL_REDUCE, summed_axes(config), elements)
    tokens = mesh.token_axes(across=False)
    layer = trained.block.gathered
    outer = trained.outer.gathered
    if scatters_at_use(config):
        microbatch = layers * send(REDUCE_SCATTER, tokens, layer)
        microbatch += send(REDUCE_SCATTER, tokens, outer)
        seconds = parallel.microbatches * microbatch
    else:
        seconds = send(REDUCE_SCATTER, tokens, layers * layer + outer)
    if mesh.islands > 1 and not parallel.sync.every:
        elements = layers * trained.block.shard + trained.outer.shard
        seconds += send(ALL_REDUCE, (ISLAND,), elements)
    return seconds


def hidden_seconds(config: Config, cluster: Cluster, costs: MicrobatchCosts) -> float:
    """Seconds over data that our program hides on accelerators.

    Several stages: weights and gradients travel chunk by chunk, each beside at least as many clocks as there are
    stages. Nothing hides the first chunk's weights and the last one's gradient (`pipeline.timeline` is exact). The
    head's gradient is hidden, all else of embedding and head is not.

    One stage: gradients that are held until the step's end are reduced in buckets of layers, while the last
    microbatch's backward goes on to the bucket before (`parallel.accumulate`). Nothing hides the first bucket.
    Gradients that are not held: `_hidden_at_use`. Pairs on one stage hide nothing.
    """
    if cluster.accelerator.platform == "cpu":
        return 0.0
    if config.mesh.pipeline > 1:
        gather, reduce, head = chunk_seconds(config, cluster)
        hidden_gather = min(gather, config.mesh.pipeline * costs.chunk_forward)
        hidden_reduce = min(reduce, config.mesh.pipeline * costs.chunk_backward)
        return (stages(config).chunks - 1) * (hidden_gather + hidden_reduce) + head
    if runs_table(config):
        return 0.0
    if scatters_at_use(config):
        return _hidden_at_use(config, cluster, costs.layer)
    if not overlaps_reduce_scatter(config):
        return 0.0
    layers = stages(config).on_device
    _, reduce = _held_seconds(config, cluster)
    backward = costs.chunk_backward / layers
    sizes = [behind - first for first, behind in buckets(layers)]
    return sum(
        min(later * reduce, before * backward)
        for before, later in itertools.pairwise(sizes)
    )


def chunk_seconds(config: Config, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of gathering the weights of one chunk over data, of reducing its gradient, and of reducing the head's,
    where the table says when (`sends_by_table`).
    """
    if not sends_by_table(config) or cluster.accelerator.platform == "cpu":
        return 0.0, 0.0, 0.0
    gather, reduce = _held_seconds(config, cluster)
    # a chunk's share of all that a device holds
    assigned = stages(config)
    layers = assigned.on_device / assigned.chunks
    trained = shapes.trained(config)
    head = reduce * trained.head.full / trained.block.full
    return layers * gather, layers * reduce, head


def evaluation_gathers(config: Config, cluster: Cluster, forward: float) -> float:
    """Seconds that an evaluation's batch waits for weights that are gathered over data: of layers that gather them at
    use what their `forward` seconds do not hide.
    """
    if not config.parallel.zero_stage or config.mesh.shards == 1:
        return 0.0
    layers = stages(config).on_device
    gather, _ = _held_seconds(config, cluster)
    if gathers_at_use(config):
        return config.parallel.microbatches * layers * max(0.0, gather - forward)
    return layers * gather


def _held_seconds(config: Config, cluster: Cluster) -> tuple[float, float]:
    """A layer's share of the seconds of gathering all weights over data, and of reducing all gradients, where both are
    held over the step.
    """
    layers = stages(config).on_device
    of_layer, outer = _gathered_bytes(config)
    nbytes = layers * of_layer + outer
    gathers = _gather(config, cluster, nbytes)
    reduces = _reduce_seconds(config, cluster, DEFAULT_PROFILE)
    trained = shapes.trained(config)
    share = trained.block.full / (trained.block.full * layers + trained.outer.full)
    gather = gathers * of_layer / nbytes if nbytes else 0.0
    return gather, reduces * share


def _hidden_at_use(config: Config, cluster: Cluster, layer: LayerCost) -> float:
    """Seconds of the gathers and scatters at the layers that hide under a layer's own work.

    In the compiled program (`tests/parallel/test_gpu_overlap.py`) a layer's gathers start with it, and its gradients
    travel during the next one's backward. The layer waits for the weights of its first products: in the forward the
    projections into attention, in the backward at most the largest weight.
    """
    axes = config.mesh.token_axes(across=False)
    precision = config.precision

    def send(kind: str, elements: float, dtype: str) -> float:
        nbytes = elements * shapes.itemsize(dtype)
        return programs.seconds("psum", kind, axes, config.mesh, cluster, nbytes)

    forward = 0.0
    backward = send(
        REDUCE_SCATTER, shapes.trained(config).block.gathered, precision.reduce
    )
    if gathers_at_use(config):
        resident = shapes.resident(config)
        gathered = send(ALL_GATHER, resident.block.gathered, precision.compute)
        first = send(ALL_GATHER, resident.first.full, precision.compute)
        largest = send(ALL_GATHER, resident.block.largest, precision.compute)
        forward = max(0.0, gathered - first)
        backward += max(0.0, gathered - largest)
    hidden = min(forward, layer.forward.total) + min(backward, layer.backward.total)
    step_hidden = config.parallel.microbatches * stages(config).on_device * hidden
    # Compressed gradients, and weights gathered in float8, are fewer bytes than these.
    return min(step_hidden, data_seconds(config, cluster))
