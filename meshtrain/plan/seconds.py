"""How long a step takes, and what for: compute by shape, communication by the cheapest collective, the pipeline by its table."""

import dataclasses
from dataclasses import dataclass

from meshtrain.config import Config
from meshtrain.parallel.placement import gathers_at_use, scatters_at_use, stages
from meshtrain.plan import activations, compute, shapes
from meshtrain.plan.cluster import algorithms
from meshtrain.plan.cluster.accelerators import Accelerator
from meshtrain.plan.cluster.algorithms import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from meshtrain.plan.cluster.cluster import Cluster, Group
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
    forward_sends: float
    backward_sends: float
    forward_copies: float
    backward_copies: float
    head: Seconds  # forward and backward, on one device
    head_sends: float  # its sums over tensor
    vocab_sends: float  # its sums over the stages that share the vocabulary
    message: float  # one hop to the next stage, while the stages work on
    waits: float  # the same where the stages wait for it
    layers: int  # of the longest virtual stage
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
        """The half of the backward's products that only the weights need."""
        return self.layers * (self.backward.matmul - self.again.matmul) / 2


def pieces_of(config: Config, cluster: Cluster, practice: Practice = OURS) -> Pieces:
    """What one microbatch costs on one device of a cluster."""
    device, mesh, parallel = cluster.accelerator, config.mesh, config.parallel
    dtype, stage = config.precision.compute, stages(config)
    length = config.train.sequence_length
    layer = compute.layer(config.model, device, dtype, shapes.sequences(config), length, mesh.tensor, parallel.sequence_parallel, practice)  # fmt: skip
    again = compute.recomputed(config, layer, practice)
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
    # The weights' gradients are half of the backward's products.
    sends["backward"] += max(0.0, hiding - layer.forward.matmul)
    copies = _copies(config, device) if practice.compiled and device.platform == "gpu" else (Seconds(), Seconds())
    edges = {axis: 0.0 for axis in groups}
    for _, f in edge_flows(config):
        edges[f.axis] += f.count * algorithms.best(f.kind, groups[f.axis], f.nbytes).seconds
    head = compute.head(config.model, device, dtype, shapes.tokens(config), shapes.vocabulary_ways(config), practice)
    stream = shapes.stream(config) * shapes.itemsize(dtype)
    message = 0.0
    if mesh.pipeline > 1:
        shared = 1 if not practice.scatter_messages or parallel.sequence_parallel else mesh.tensor
        message = algorithms.best(PERMUTE, pipeline, stream / shared).seconds
        message += algorithms.best(ALL_GATHER, tensor, stream).seconds if shared > 1 else 0.0
    return Pieces(
        forward=layer.forward + copies[0],
        backward=compute.layer_backward(layer.forward, device, length, practice)
        + copies[1]
        + compute.weight_passes(config, device, practice)
        + again,
        again=again,
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
        leaving=2 * activations.left(config) / device.memory_rate
        if practice.compiled and device.platform == "gpu"
        else 0.0,
    )


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

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def parts(self) -> list[tuple[str, float]]:
        return list(dataclasses.asdict(self).items())

    @property
    def bound(self) -> str:
        """What takes the largest share: compute, memory, communication or bubble."""
        groups = {
            "compute": self.matmul + self.attention + self.recompute + self.head,
            "memory": self.memory + self.optimizer + self.checkpoint,
            "communication": self.tensor + self.pipeline + self.data + self.host,
            "bubble": self.bubble,
        }
        return max(groups, key=lambda name: groups[name])


def data_seconds(config: Config, group: Group, practice: Practice = OURS) -> float:
    """Gathers and reductions over data of one step, before any of it hides behind compute."""
    if group.size == 1:
        return 0.0
    stage, zero = stages(config), config.parallel.zero_stage
    held = shapes.held(config)
    block, outer = held.block, held.outer
    weight = shapes.itemsize(config.precision.compute)
    reduce = shapes.itemsize(config.precision.reduce) if practice is OURS else practice.gradient_bytes
    if not zero:
        return algorithms.best(ALL_REDUCE, group, (block.whole * stage.on_device + outer.whole) * reduce).seconds
    m, seconds = config.parallel.microbatches, 0.0
    for kind, size, at_use, times in (
        (ALL_GATHER, weight, gathers_at_use(config), 2),
        (REDUCE_SCATTER, reduce, scatters_at_use(config), 1),
    ):
        if at_use:  # layer by layer, so the steps of each collective count every time
            layer = algorithms.best(kind, group, block.shard * group.size * size).seconds
            seconds += times * m * (stage.on_device * layer)
            seconds += times * m * algorithms.best(kind, group, outer.shard * group.size * size).seconds
        else:
            seconds += algorithms.best(
                kind, group, (block.shard * stage.on_device + outer.shard) * group.size * size
            ).seconds
    return seconds


def save_seconds(cluster: Cluster, held_bytes: float) -> tuple[float, float]:
    """Seconds of a checkpoint of `held_bytes` a device: the copy to the host, which stops training, and the write beside it."""
    write = held_bytes * cluster.devices_per_node / (cluster.storage_bandwidth * 1e9)
    return held_bytes / (cluster.host_bandwidth * 1e9), write


def checkpoint_seconds(config: Config, cluster: Cluster, held_bytes: float, step: float) -> float:
    """Seconds a step for which checkpoints stop training: the copy to the host, and what of the write before is not done when the
    next one is due (`step` seconds a step)."""
    every = config.checkpoint.every
    if not every:
        return 0.0
    copy, write = save_seconds(cluster, held_bytes)
    return (copy + max(0.0, write - every * step)) / every
