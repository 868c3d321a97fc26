"""How long a step takes, and what for: compute by shape, communication by the cheapest collective, the pipeline by its
table.

    layer_cost ──┐
    edge_cost ───┼──► MicrobatchCosts ──► the pipeline's table, or microbatches one after another ──► StepTime
    message_cost ┘

data_seconds, hidden_seconds, and those of `hosts`: outside the microbatches
"""

import dataclasses
import itertools
from dataclasses import dataclass

from meshtrain.cluster.algorithms import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, best
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config
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
from meshtrain.plan.compute import DEFAULT_PROFILE, FrameworkProfile, Seconds
from meshtrain.plan.layer_costs import LayerCost, layer_cost
from meshtrain.plan.traffic import BOTH, edge_transfers


@dataclass(frozen=True)
class EdgeCost:
    """Seconds of one microbatch in embedding and loss head on one device."""

    head: Seconds  # forward and backward; of images with the product of the embedding
    head_sends: float  # its sums over tensor
    vocab_sends: float  # its sums over the stages that share the vocabulary
    reference: float  # dpo's forward without adapters, with its collectives

    @property
    def total(self) -> float:
        return self.head.total + self.head_sends + self.vocab_sends


@dataclass(frozen=True)
class MessageCost:
    """Seconds of one hop to the next stage: one of the two is 0."""

    overlapped: float  # while the stages work on
    waits: float  # where the stages wait for it


@dataclass(frozen=True)
class MicrobatchCosts:
    """Seconds of one microbatch on one device, from which a step is put together.

    A chunk has the layers of the longest virtual stage.
    """

    layer: LayerCost
    edge: EdgeCost
    message: MessageCost
    layers: int  # of a chunk
    chunks: int  # of a stage

    @property
    def stage(self) -> float:
        """All chunks of a stage, forward, head and backward."""
        return self.chunks * (self.chunk_forward + self.chunk_backward) + self.edge.total

    @property
    def chunk_forward(self) -> float:
        layer = self.layer
        return (
            self.layers * (layer.forward.total + layer.forward_sends + layer.forward_copies)
            + self.message.waits
        )

    @property
    def chunk_backward(self) -> float:
        layer = self.layer
        return (
            self.layers * (layer.backward.total + layer.backward_sends + layer.backward_copies)
            + self.message.waits
        )

    @property
    def chunk_weight_grad(self) -> float:
        """The part of the backward's products that only the weights need: half of them where all is trained."""
        return self.layers * self.layer.weight_grad

    @property
    def chunk_residuals(self) -> float:
        return self.layers * self.layer.residuals

    @property
    def chunk_reference(self) -> float:
        return self.layers * self.layer.reference


def microbatch_costs(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> MicrobatchCosts:
    """Costs of one microbatch on one device of a cluster."""
    stage = stages(config)
    return MicrobatchCosts(
        layer=layer_cost(config, cluster, profile),
        edge=edge_cost(config, cluster, profile),
        message=message_cost(config, cluster, profile),
        layers=stage.longest,
        chunks=stage.chunks,
    )


def edge_cost(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> EdgeCost:
    """Costs of a microbatch in embedding and loss head."""
    model = config.model
    trained = shapes.trained(config)
    dtype = config.precision.compute
    degree = shapes.vocabulary_degree(config)
    sizes = model, cluster.accelerator, dtype, shapes.tokens(config), degree
    head_is_trained = bool(trained.tokens.full if model.tied_head else trained.output.full)
    head = compute.head(*sizes, profile, head_is_trained) + compute.embedding(
        *sizes, bool(trained.embedding.full)
    )
    if (chunks := shapes.loss_chunks(config)) > 1:
        # a sum of gradients that every chunk reads and writes; and the forward again, but where ours makes the
        # gradients with the losses
        weight = (trained.tokens if model.tied_head else trained.output).full
        head += Seconds(memory=8 * chunks * weight / cluster.accelerator.memory_rate)
        if not profile.compiled or shapes.logits_again(config):
            head += compute.head_forward(*sizes)
    sends, forward = _edge_sends(config, cluster)
    if profile.whole_logits:
        nbytes = (
            shapes.labels(model, shapes.tokens(config)) * model.vocab_size * shapes.itemsize(dtype)
        )
        sends["tensor"] += best(ALL_GATHER, cluster.axis("tensor", config.mesh), nbytes).seconds
    return EdgeCost(
        head=head,
        head_sends=sends["tensor"],
        vocab_sends=sends["pipeline"] + sends[BOTH],
        reference=compute.head_forward(*sizes).total + forward
        if config.train.objective == "dpo"
        else 0.0,
    )


def _edge_sends(config: Config, cluster: Cluster) -> tuple[dict[str, float], float]:
    """Returns seconds that embedding and head of a microbatch wait for messages, by axis; and those of a forward."""
    sends = {"tensor": 0.0, "pipeline": 0.0, BOTH: 0.0}
    forward = 0.0
    for moment, t in edge_transfers(config):
        spent = t.count * best(t.kind, cluster.axis(t.axis, config.mesh), t.nbytes).seconds
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
    nbytes = shapes.stream(config) * shapes.itemsize(config.precision.compute)
    parts = mesh.tensor if profile.scatter_messages and not config.parallel.sequence_parallel else 1
    seconds = best(PERMUTE, cluster.axis("pipeline", mesh), nbytes / parts).seconds
    if parts > 1:
        seconds += best(ALL_GATHER, cluster.axis("tensor", mesh), nbytes).seconds
    return MessageCost(seconds, 0.0) if profile.overlap_pipeline else MessageCost(0.0, seconds)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on; the device waits in `tensor`, `context`, `expert`, `pipeline`,
    `data`, `host`, `bubble` and `stragglers`.
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
    reference: float
    stragglers: float = 0.0

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def parts(self) -> list[tuple[str, float]]:
        return list(dataclasses.asdict(self).items())

    @property
    def work(self) -> float:
        """Seconds that the device works, and does not wait."""
        return (
            self.matmul
            + self.attention
            + self.memory
            + self.recompute
            + self.head
            + self.optimizer
            + self.reference
        )

    @property
    def bound(self) -> str:
        """Returns the largest share: compute, memory, communication or bubble."""
        groups = {
            "compute": self.matmul + self.attention + self.recompute + self.head + self.reference,
            "memory": self.memory + self.optimizer + self.checkpoint,
            "communication": self.tensor
            + self.context
            + self.expert
            + self.pipeline
            + self.data
            + self.host
            + self.stragglers,
            "bubble": self.bubble,
        }
        return max(groups, key=lambda name: groups[name])


def data_seconds(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> float:
    """Gathers and reductions over data of one step, before any of it hides behind compute."""
    mesh, parallel, layers = config.mesh, config.parallel, stages(config).on_device
    if mesh.data * mesh.context == 1:
        return 0.0
    trained = shapes.trained(config)
    tokens = mesh.token_axes(across=False)
    weight = shapes.itemsize(config.precision.compute)
    reduce = profile.gradient_bytes
    if profile is DEFAULT_PROFILE:
        reduce = shapes.itemsize(config.precision.reduce)
    compressed = profile is DEFAULT_PROFILE and parallel.reduce.compression != "none"

    def send(
        kind: str, axes: tuple[str, ...], nbytes: float, algorithm: str = parallel.reduce.algorithm
    ) -> float:
        return programs.seconds(algorithm, kind, axes, mesh, cluster, nbytes)

    seconds = gradient_traffic.sync_seconds(config, cluster)
    if not parallel.zero_stage and not compressed:
        elements_summed = trained.block.full * layers + trained.outer.full
        return seconds + send(ALL_REDUCE, summed_axes(config), elements_summed * reduce)
    # (kind, bytes an element, layer by layer, times a layer and microbatch then, elements, algorithm)
    sends = []
    if parallel.zero_stage:
        gathered = shapes.resident(config) if parallel.zero_stage == 3 else trained
        sends.append((ALL_GATHER, weight, gathers_at_use(config), 2, gathered, "psum"))
    if compressed:
        seconds += sum(gradient_traffic.seconds(config, cluster))
    else:
        sends.append(
            (REDUCE_SCATTER, reduce, scatters_at_use(config), 1, trained, parallel.reduce.algorithm)
        )
    for kind, size, at_use, times, elements, algorithm in sends:
        block = elements.block
        outer = elements.outer
        # At use the steps of each collective count every time; our program's backward gathers embedding and head no
        # second time.
        if at_use:
            size_of_layer = float8.weight_size(config) if kind == ALL_GATHER else size
            layer = send(kind, tokens, block.gathered * size_of_layer, algorithm)
            around = send(kind, tokens, outer.gathered * size, algorithm)
            seconds += parallel.microbatches * (
                times * layers * layer + (1 if profile.compiled else times) * around
            )
        else:
            seconds += send(
                kind, tokens, (block.gathered * layers + outer.gathered) * size, algorithm
            )
    if mesh.islands > 1 and not compressed and not parallel.sync.every:
        seconds += send(
            ALL_REDUCE, (ISLAND,), (trained.block.shard * layers + trained.outer.shard) * reduce
        )
    return seconds


def hidden_seconds(config: Config, cluster: Cluster, costs: MicrobatchCosts) -> float:
    """Seconds over data that our program hides on accelerators; of the embedding and the head it hides nothing.

    Gradients that are held are reduced in buckets of layers: one is on its way while the last microbatch goes back
    through the one before (`parallel.accumulate`); nothing hides the first. In a pipeline weights and gradients travel
    by chunks, each beside at least as many clocks as there are stages; nothing hides the first chunk's weights and the
    last one's gradient (`pipeline.timeline` is exact).
    """
    if cluster.accelerator.platform == "cpu":
        return 0.0
    if config.mesh.pipeline > 1:
        gather, reduce, head = chunk_seconds(config, cluster)
        beside = [(gather, costs.chunk_forward), (reduce, costs.chunk_backward)]
        chunk = sum(min(sent, config.mesh.pipeline * clock) for sent, clock in beside)
        return (stages(config).chunks - 1) * chunk + head
    if runs_table(config):
        return 0.0
    if scatters_at_use(config):
        return _hidden_at_use(config, cluster, costs.layer)
    if not overlaps_reduce_scatter(config):
        return 0.0
    layers = stages(config).on_device
    (_, sent) = _held_seconds(config, cluster)
    back = costs.chunk_backward / layers
    sizes = [behind - first for first, behind in buckets(layers)]
    return sum(min(later * sent, before * back) for before, later in itertools.pairwise(sizes))


def chunk_seconds(config: Config, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of gathering the weights of one chunk over data, of reducing its gradient, and of reducing the head's,
    where the table says when (`sends_by_table`).
    """
    if not sends_by_table(config) or cluster.accelerator.platform == "cpu":
        return 0.0, 0.0, 0.0
    (gather, reduce), layers, trained = (
        _held_seconds(config, cluster),
        stages(config).longest,
        shapes.trained(config),
    )
    return layers * gather, layers * reduce, reduce * trained.head.full / trained.block.full


def _held_seconds(config: Config, cluster: Cluster) -> tuple[float, float]:
    """A layer's share of gathering all weights over data, and of reducing all gradients, of those that are held over
    the step.
    """
    trained = shapes.trained(config)
    layers = stages(config).on_device
    gathered = shapes.resident(config) if config.parallel.zero_stage == 3 else trained
    elements = gathered.block.gathered * layers + gathered.outer.gathered
    size = elements * shapes.itemsize(config.precision.compute)
    gathers = programs.seconds(
        "psum", ALL_GATHER, config.mesh.token_axes(across=False), config.mesh, cluster, size
    )
    share = trained.block.full / (trained.block.full * layers + trained.outer.full)
    sent = data_seconds(config, cluster) - gradient_traffic.sync_seconds(config, cluster) - gathers
    return gathers * gathered.block.gathered / elements if elements else 0.0, sent * share


def _hidden_at_use(config: Config, cluster: Cluster, layer: LayerCost) -> float:
    """Seconds of the gathers and scatters at the layers that hide under a layer's own work, as in the compiled program
    (`tests/parallel/test_gpu_overlap.py`): a layer's gathers start with it, and its gradients travel during the next
    one's backward. The layer waits for the weights of its first matmuls: projections into attention, and in the
    backward at most the largest weight.
    """

    def send(kind: str, elements: float, dtype: str) -> float:
        nbytes = elements * shapes.itemsize(dtype)
        return programs.seconds(
            "psum", kind, config.mesh.token_axes(across=False), config.mesh, cluster, nbytes
        )

    resident = shapes.resident(config)
    forward = 0.0
    backward = send(REDUCE_SCATTER, shapes.trained(config).block.gathered, config.precision.reduce)
    if gathers_at_use(config):
        gathered = send(ALL_GATHER, resident.block.gathered, config.precision.compute)
        forward = max(
            0.0, gathered - send(ALL_GATHER, resident.first.full, config.precision.compute)
        )
        backward += max(
            0.0, gathered - send(ALL_GATHER, resident.block.largest, config.precision.compute)
        )
    hidden = min(forward, layer.forward.total) + min(backward, layer.backward.total)
    # what is compressed, or gathered in float8, is less than the bytes above
    return min(
        config.parallel.microbatches * stages(config).on_device * hidden,
        data_seconds(config, cluster),
    )
