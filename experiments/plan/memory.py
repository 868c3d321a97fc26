"""Published gigabytes of frameworks that hold things in other ways than ours, so that they can be compared at all.

No number is fitted, but the formulas were made with the rows in sight.

    torchtitan   benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 6, all rows without context parallelism whose layout is given (of
                 the interleaved schedule neither chunks nor microbatches are): GiB that the allocator reserved. Float8
                 moves them by 0.2 GiB (tables 1 and 3), so that its rows stand for bfloat16. Pipelines have as many
                 microbatches as stages, the default then.
    Aleph Alpha  see `aleph_alpha`: 578 layouts that ran or ran out of memory (`called_right`). Weights and gradients
    are in 16 bits, whole; what
                 autograd keeps of a layer is counted operation by operation in the team's own library
                 (Aleph-Alpha/scaling), logits are gathered. Chosen on these rows: that the allocator loses 15% of
                 activations.
    KempnerForge see `kempner`: GiB that tensors took at most. Its weights and moments are in bfloat16, and where there
    are several
                 microbatches these add to a gradient in float32 that is not sharded (175b_360gpu, "the path to 47.7%").

Both are PyTorch's FSDP2, with sequence parallelism where there is tensor parallelism. A device holds most in one of two
moments: at the loss, whose logits are all there at once, or in the backward of a layer.
"""

import math
from dataclasses import dataclass

from experiments.bench import LLAMA_3, config_of
from meshtrain.cluster.accelerators import ACCELERATORS
from meshtrain.config import Config
from meshtrain.parallel.placement import stages
from meshtrain.plan import activations, shapes

from . import PUBLISHED, aleph_alpha, kempner

GIB = 2**30


@dataclass(frozen=True)
class Holding:
    """How a framework holds what it trains, in bytes an element."""

    state: float  # weights, moments and gradients, all sharded
    # At the loss: as the head gives them, in float32, their log-softmax, cotangents
    logits: float
    # each tensor rank embeds, and takes the loss of, its share of it; else only its output is split, and gathered
    shares_vocabulary: bool
    summed: float = 4.0  # gradient, not sharded, where several microbatches add to it
    selective: bool = (
        # Every second product's output is kept, and attention's; else a layer's input
        False
    )
    gathered: bool = False  # weights stay gathered between microbatches
    # What the allocator asks for, in what tensors take: blocks that are free, but too small
    reserved: float = 1.0


# The head's logits in bfloat16, float() of them, log_softmax and its gradient.
TORCHTITAN = Holding(state=16, logits=14, shares_vocabulary=True, reserved=1.05)
SELECTIVE = Holding(
    state=16, logits=14, shares_vocabulary=True, selective=True, reserved=1.05
)
PIPELINE = Holding(
    state=16, logits=14, shares_vocabulary=True, gathered=True, reserved=1.05
)
# All four in bfloat16; of the gradient, the sharded one is there only when the summed one has gone.
KEMPNER = Holding(state=6, logits=8, shares_vocabulary=False)


@dataclass(frozen=True)
class Row:
    source: str
    name: str
    config: Config
    holding: Holding
    reported: float  # GiB

    @property
    def predicted(self) -> float:
        """GiB at the fullest moment."""
        return fullest(self.config, self.holding) / GIB


def fullest(config: Config, holding: Holding) -> float:
    """Bytes that a device of the first stage holds at most."""
    held, stage, mesh, size = shapes.resident(config), stages(config), config.mesh, 2
    layers, several = stage.on_device, config.parallel.microbatches > 1
    again = held.tokens * (
        0 if holding.shares_vocabulary else mesh.tensor - 1
    )  # the other ranks' shares of the embedding
    weights = held.block * layers + held.outer + again
    always = holding.state * weights.shard
    always += holding.summed * weights.full if several else 0.0
    always += size * weights.full if holding.gathered else 0.0
    # In 1F1B the first of p stages has p microbatches on their way, its own program running ahead of the others'.
    depth = min(mesh.pipeline, config.parallel.microbatches)
    always += depth * layers * shapes.tokens(config) * _kept(config, holding)
    vocabulary = 0.0 if holding.gathered else size * (held.vocabulary + again).full
    loss = float(vocabulary)
    if mesh.pipeline == 1:
        ways = mesh.tensor if holding.shares_vocabulary else 1
        loss += holding.logits * shapes.tokens(config) * config.model.vocab_size / ways
    block = held.block.full
    # Its weights and the next layer's, gathered; its gradient as the products give it and as it is summed over data.
    layer = (
        activations.work(config, "gpu")
        + block * (0 if holding.gathered else 2 * size)
        + block * (size + 4)
    )
    return holding.reserved * (always + max(loss, vocabulary + layer))


def _kept(config: Config, holding: Holding) -> float:
    """Bytes a token that one layer keeps for its backward."""
    w = activations.widths(config.model, config.mesh.tensor, True)
    if not holding.selective:
        return 2 * w.stream
    # of q, k, v, o, gate, up, down: q, v, gate, down; attention's output, and its sums in float32
    return (
        2 * (w.stream + w.query + w.key + w.hidden + w.stream + w.query) + 4 * w.heads
    )


HOLDINGS = {"layers": TORCHTITAN, "selective": SELECTIVE, "stages": PIPELINE}


def _row(
    name: str,
    model: str,
    mesh: tuple[int, int, int],
    sequences: int,
    microbatches: int,
    length: int,
    holding: str,
    gib: float,
) -> Row:
    """`sequences` are those of a microbatch on one data rank."""
    data, tensor, pipeline = mesh
    parallel = {
        "zero_stage": 3,
        "zero_hold": False,
        "sequence_parallel": tensor > 1,
        "remat": "full",
        "microbatches": microbatches,
        "schedule": "1f1b",
        "vocab": "edge",
    }
    degrees = {"data": data, "tensor": tensor, "pipeline": pipeline}
    rows = sequences * microbatches * data
    config = config_of(LLAMA_3[model], degrees, rows, length, parallel)
    return Row("torchtitan", name, config, HOLDINGS[holding], gib)


ROWS = (
    *(_row(*row) for row in PUBLISHED["memory"]),
    *(
        Row(run.source, run.name, run.config, KEMPNER, run.gib)
        for run in kempner.RUNS
        if run.gib
    ),
)

# GiB that CUDA's context and NCCL's buffers take of a device; what the allocator asks for of activations; bytes of a
# logit at the loss: in 16 bits and float32, its log-softmax, and the cotangents of both in float32.
OUTSIDE, LOST, LOGIT = 3.0, 1.15, 18


def held(row: dict[str, str]) -> float:
    """GiB that the fullest stage of one of Aleph Alpha's layouts asks for."""
    config = aleph_alpha.config(row)
    model, mesh, sizes = config.model, config.mesh, shapes.resident(config)
    layers, width = math.ceil(model.layers / mesh.pipeline), model.d_model
    split = mesh.tensor if config.parallel.sequence_parallel else 1
    # Both norms' inputs, and their outputs, which are gathered; norms kernel by kernel keep as much again. Then q, k
    # and v with rotated copies of two, attention's output, and four of the MLP's width.
    norms = (
        4 * width / split
        + 4 * width
        + (4 * width / split if row["kernel"] == "flash2" else 0)
    )
    everything = norms + (12 * width + 8 * model.d_ff) / mesh.tensor
    kept = 2 * width / split if config.parallel.remat == "full" else everything
    tokens = LOST * shapes.tokens(config)
    state = (4 + 12 / mesh.data) * (
        sizes.block.full * layers
        + (sizes.outer if mesh.pipeline == 1 else sizes.tokens).full
    )
    # The first stage holds a microbatch for each stage, the last the logits of one.
    depth = min(mesh.pipeline, config.parallel.microbatches)
    first = depth * layers * kept + (everything if kept < everything else 0)
    last = layers * kept + LOGIT / LOST * model.vocab_size
    return (state + tokens * max(first, last)) / GIB


def called_right() -> tuple[int, int]:
    """(right, all) of Aleph Alpha's layouts that ran or ran out of memory."""
    usable = ACCELERATORS["a100-80"].memory - OUTSIDE
    rows = aleph_alpha.rows()
    return sum((held(row) <= usable) == (row["seconds"] != "oom") for row in rows), len(
        rows
    )
