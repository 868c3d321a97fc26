"""How long a step takes, and what for: compute by shape, communication by the cheapest collective, the pipeline by its table."""

import dataclasses
import itertools
from dataclasses import dataclass

from meshtrain.config import Config
from meshtrain.config.mesh import DATA, ISLAND
from meshtrain.families import FAMILIES
from meshtrain.parallel.placement import buckets, closes_early, gathers_at_use, scatters_at_use, stages
from meshtrain.parallel.sync.when import summed_axes
from meshtrain.plan import activations, bringing, compute, reducing, shapes
from meshtrain.plan.cluster import algorithms, programs
from meshtrain.plan.cluster.accelerators import Accelerator
from meshtrain.plan.cluster.algorithms import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from meshtrain.plan.cluster.cluster import Cluster
from meshtrain.plan.compute import OURS, Practice, Seconds
from meshtrain.plan.traffic import BOTH, edge_flows, layer_flows


@dataclass(frozen=True)
class Pieces:
    """Seconds of one microbatch on one device, the parts from which a step is put together.

    `forward` and `backward` are of one layer; `*_sends` their collectives over tensor as they delay the device, `*_copies` what it
    waits for activations on the host: they leave while the layer goes on, but XLA has them back before its backward begins.
    """

    forward: Seconds
    backward: Seconds  # recomputation counted
    again: Seconds  # the recomputation alone
    weight_grad: float  # the weights' gradients alone, which are products
    forward_sends: float
    backward_sends: float
    forward_copies: float
    backward_copies: float
    head: Seconds  # forward and backward, on one device; of images with the product of the embedding
    head_sends: float  # its sums over tensor
    vocab_sends: float  # its sums over the stages that share the vocabulary
    message: float  # one hop to the next stage, while the stages work on
    waits: float  # the same where the stages wait for it
    layers: int  # of the longest virtual stage
    # a chunk and the head of dpo's forward without adapters, with their collectives
    reference: float = 0.0
    reference_head: float = 0.0
    leaving: float = (
        0.0  # what the input gradient of a layer writes for a weight gradient of its own, in tables that split the two
    )

    @property
    def head_total(self) -> float:
        """The loss head of one microbatch on one device, with its collectives."""
        return self.head.total + self.head_sends + self.vocab_sends

    @property
    def chunk_forward(self) -> float:
        """One microbatch through one model chunk, forward."""
        return self.layers * (self.forward.total + self.forward_sends + self.forward_copies) + self.waits

    @property
    def chunk_backward(self) -> float:
        return self.layers * (self.backward.total + self.backward_sends + self.backward_copies) + self.waits

    @property
    def chunk_weight_grad(self) -> float:
        """The part of the backward's products that only the weights need: half of them where all is trained."""
        return self.layers * self.weight_grad


def pieces_of(config: Config, cluster: Cluster, practice: Practice = OURS) -> Pieces:
    """What one microbatch costs on one device of a cluster."""
    device, mesh, parallel = cluster.accelerator, config.mesh, config.parallel
    dtype, stage = config.precision.compute, stages(config)
    length, causal = config.train.sequence_length, FAMILIES[config.model.family].causal
    layer = compute.layer(config.model, device, dtype, shapes.sequences(config), length, mesh.tensor, parallel.sequence_parallel, practice)  # fmt: skip
    again = compute.recomputed(config, layer, practice)
    adapters, share = compute.adapters(config, device), compute.trained_share(config)
    again += adapters * (config.parallel.remat != "none")
    weight_grad = layer.forward.matmul * share + adapters.matmul
    copy = activations.offloaded(config) / (cluster.host_bandwidth * 1e9)
    tensor = cluster.axis("tensor", mesh)
    exposed = device.efficiency.exposed if practice.overlap_tensor else 1.0
    pipeline = cluster.axis("pipeline", mesh)
    groups = {"tensor": tensor, "pipeline": pipeline, BOTH: cluster.axis(BOTH, mesh)}
    sends, hiding = {"forward": 0.0, "backward": 0.0}, 0.0
    for moment, f in layer_flows(config):
        seconds = f.count * algorithms.best(f.kind, tensor, f.nbytes).seconds * exposed / stage.longest
        if f.hides and practice.compiled and device.platform != "cpu":
            hiding += seconds
        else:
            sends[moment] += seconds
    sends["backward"] += max(0.0, hiding - weight_grad)
    copies = _copies(config, device) if practice.compiled and device.platform == "gpu" else (Seconds(), Seconds())
    edges, first = {axis: 0.0 for axis in groups}, list[float]()
    for moment, f in edge_flows(config):
        spent = f.count * algorithms.best(f.kind, groups[f.axis], f.nbytes).seconds
        edges[f.axis] += spent
        first += [spent] if moment in ("embedding", "head") else []
    head = compute.head(
        config.model, device, dtype, shapes.tokens(config), shapes.vocabulary_ways(config),
        practice, _head_is_trained(config),
    )  # fmt: skip
    head += compute.embedding(
        config.model, device, dtype, shapes.tokens(config), shapes.vocabulary_ways(config), bool(shapes.trained(config).embedding.whole)
    )  # fmt: skip
    dpo = config.train.objective == "dpo"
    head_forward = compute.head_forward(config.model, device, dtype, shapes.tokens(config), shapes.vocabulary_ways(config))  # fmt: skip
    stream = shapes.stream(config) * shapes.itemsize(dtype)
    message = 0.0
    if mesh.pipeline > 1:
        shared = 1 if not practice.scatter_messages or parallel.sequence_parallel else mesh.tensor
        message = algorithms.best(PERMUTE, pipeline, stream / shared).seconds
        message += algorithms.best(ALL_GATHER, tensor, stream).seconds if shared > 1 else 0.0
    return Pieces(
        forward=layer.forward + adapters + copies[0],
        backward=compute.layer_backward(layer.forward, device, compute.looped(length, causal), practice, share)
        + adapters * 2
        + copies[1]
        + compute.weight_passes(config, device, practice)
        + again,
        again=again,
        weight_grad=weight_grad,
        forward_sends=sends["forward"],
        backward_sends=sends["backward"],
        forward_copies=max(0.0, copy - layer.forward.total),
        backward_copies=copy,
        head=head,
        head_sends=edges["tensor"],
        vocab_sends=edges["pipeline"] + edges[BOTH],
        message=message if practice.overlap_pipeline else 0.0,
        waits=0.0 if practice.overlap_pipeline else message,
        layers=stage.longest,
        reference=dpo * (stage.longest * (layer.forward.total + sends["forward"])),
        reference_head=dpo * (head_forward.total + sum(first)),
        leaving=2 * activations.left(config) / device.memory_rate
        if practice.compiled and device.platform == "gpu"
        else 0.0,
    )


def _head_is_trained(config: Config) -> bool:
    held = shapes.trained(config)
    return bool(held.tokens.whole if config.model.tied_head else held.output.whole)


def _copies(config: Config, device: Accelerator) -> tuple[Seconds, Seconds]:
    """What our compiled program copies of one layer and microbatch, forward and backward, as seen in it (`plan.timed`).

    Each copy is a read and a write: of the layer's weights out of the stacked ones, forward and backward; of what it keeps into the
    stash; and of several sequences that were gathered over tensor, or are to be scattered, into the order of the other side.
    """
    size, sliced = shapes.itemsize(config.precision.compute), 0.0
    if not gathers_at_use(config):
        sliced = 2 * size * shapes.held(config).block.whole
    moved = {"forward": sliced + 2 * activations.kept(config, config.parallel.remat), "backward": sliced}
    if config.parallel.sequence_parallel and config.mesh.tensor > 1 and shapes.sequences(config) > 1:
        for moment, flow in layer_flows(config):
            moved[moment] += 2 * flow.nbytes * flow.count / stages(config).longest
    return Seconds(memory=moved["forward"] / device.memory_rate), Seconds(memory=moved["backward"] / device.memory_rate)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on; the device waits in `tensor`, `pipeline`, `data`, `host` and `bubble`."""

    matmul: float
    attention: float
    memory: float
    recompute: float
    head: float
    tensor: float
    pipeline: float
    data: float
    host: float
    bubble: float
    optimizer: float
    checkpoint: float
    reference: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def parts(self) -> list[tuple[str, float]]:
        return list(dataclasses.asdict(self).items())

    @property
    def bound(self) -> str:
        """What takes the largest share: compute, memory, communication or bubble."""
        groups = {
            "compute": self.matmul + self.attention + self.recompute + self.head + self.reference,
            "memory": self.memory + self.optimizer + self.checkpoint,
            "communication": self.tensor + self.pipeline + self.data + self.host,
            "bubble": self.bubble,
        }
        return max(groups, key=lambda name: groups[name])


def data_seconds(config: Config, cluster: Cluster, practice: Practice = OURS) -> float:
    """Gathers and reductions over data of one step, before any of it hides behind compute."""
    mesh = config.mesh
    if mesh.data == 1:
        return 0.0
    ranks, stage, zero = mesh.shards, stages(config), config.parallel.zero_stage
    algorithm = config.parallel.reduce.algorithm
    trained = shapes.trained(config)
    gathered = shapes.held(config) if zero == 3 else trained
    weight = shapes.itemsize(config.precision.compute)
    reduce = shapes.itemsize(config.precision.reduce) if practice is OURS else practice.gradient_bytes
    compressed = practice is OURS and config.parallel.reduce.compression != "none"
    if not zero and not compressed:
        whole = trained.block.whole * stage.on_device + trained.outer.whole
        by_themselves = bringing.seconds(config, cluster)
        return by_themselves + programs.seconds(
            algorithm, ALL_REDUCE, summed_axes(config), mesh, cluster, whole * reduce
        )
    m, seconds, sends = config.parallel.microbatches, bringing.seconds(config, cluster), []
    if zero:
        sends.append((ALL_GATHER, weight, gathers_at_use(config), 2, gathered, "psum"))
    if compressed:
        seconds += sum(reducing.seconds(config, cluster))
    else:
        sends.append((REDUCE_SCATTER, reduce, scatters_at_use(config), 1, trained, algorithm))
    for kind, size, at_use, times, sent, by in sends:
        block, outer = sent.block, sent.outer
        if at_use:  # layer by layer, so the steps of each collective count every time
            layer = programs.seconds(by, kind, (DATA,), mesh, cluster, block.shard * ranks * size)
            seconds += times * m * (stage.on_device * layer)
            seconds += times * m * programs.seconds(by, kind, (DATA,), mesh, cluster, outer.shard * ranks * size)
        else:
            whole = (block.shard * stage.on_device + outer.shard) * ranks * size
            seconds += programs.seconds(by, kind, (DATA,), mesh, cluster, whole)
    if mesh.islands > 1 and not compressed and not config.parallel.sync.every:
        across = (trained.block.shard * stage.on_device + trained.outer.shard) * reduce
        seconds += programs.seconds(algorithm, ALL_REDUCE, (ISLAND,), mesh, cluster, across)
    return seconds


def hidden_seconds(config: Config, cluster: Cluster, pieces: Pieces) -> float:
    """Seconds of the reductions of gradients that our program hides on accelerators (`parallel.accumulate`): where there is one stage, a
    bucket of layers is on its way while the last microbatch goes back through the one before; nothing hides the first bucket, nor the
    embedding and the head.
    """
    if config.mesh.pipeline > 1 or not closes_early(config) or cluster.accelerator.platform == "cpu":
        return 0.0
    trained, layers = shapes.trained(config), stages(config).on_device
    gathered = shapes.held(config) if config.parallel.zero_stage == 3 else trained
    whole = (gathered.block.shard * layers + gathered.outer.shard) * config.mesh.shards
    size = whole * shapes.itemsize(config.precision.compute)
    gathers = programs.seconds("psum", ALL_GATHER, (DATA,), config.mesh, cluster, size)
    share = trained.block.whole / (trained.block.whole * layers + trained.outer.whole)
    sent = (data_seconds(config, cluster) - bringing.seconds(config, cluster) - gathers) * share
    back = pieces.chunk_backward / layers
    sizes = [behind - first for first, behind in buckets(layers)]
    return sum(min(later * sent, before * back) for before, later in itertools.pairwise(sizes))


def save_seconds(cluster: Cluster, held_bytes: float) -> tuple[float, float]:
    """Seconds of a checkpoint of `held_bytes` a device: the stop of training, for the copy to the host, and the write beside it."""
    write = held_bytes * cluster.devices_per_node / (cluster.storage_bandwidth * 1e9)
    return cluster.save_seconds + held_bytes / (cluster.host_bandwidth * 1e9), write


def checkpoint_seconds(config: Config, cluster: Cluster, held_bytes: float, step: float) -> float:
    """Seconds a step for which checkpoints stop training: the copy to the host, and what of the write before is not done when the
    next one is due (`step` seconds a step)."""
    every = config.checkpoint.every
    if not every:
        return 0.0
    copy, write = save_seconds(cluster, held_bytes)
    return (copy + max(0.0, write - every * step)) / every
