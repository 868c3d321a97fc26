"""What a device holds while a step runs, item by item.

State between steps is sharded as in ZeRO (Rajbhandari et al. 2020, section 5); activations follow Korthikanti et al. 2022
(section 4), with flash attention, which keeps no scores (Dao et al. 2022). Sizes are of the longest stage.
"""

import functools
import math
from dataclasses import dataclass

from meshtrain.config import Config, ModelConfig
from meshtrain.parallel.placement import gathers_at_use, scatters_at_use, stages, zero_ways
from meshtrain.plan import shapes
from meshtrain.plan.shapes import Held
from meshtrain.schedule.buffers import Depths
from meshtrain.schedule.facts import Facts


@dataclass(frozen=True)
class Item:
    """Bytes that a device holds for one purpose; `kind` is the group that the report sums them by."""

    name: str
    kind: str  # parameters, gradients, optimizer_state or activations
    nbytes: float
    between_steps: bool = False


KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def zero_state(
    elements: float, stage: int, data: int, weight: float = 2, gradient: float = 2, state: float = 12
) -> float:
    """Bytes of model state per device in mixed-precision training (ZeRO, figure 1): `state` counts masters and two moments."""
    ways = [data if stage >= level else 1 for level in (3, 2, 1)]
    return elements * (weight / ways[0] + gradient / ways[1] + state / ways[2])


def items(config: Config, facts: Facts, cpu: bool = False) -> list[Item]:
    """Everything that a device holds at the fullest moment of a step, with the schedule's `facts` (see `ticks.facts`)."""
    return fullest(config, facts, cpu)[1]


def fullest(config: Config, facts: Facts, cpu: bool = False) -> tuple[str, list[Item]]:
    """The moment of a step at which a device holds most, and what it holds then."""
    always = [*state(config), *kept(config, facts.depths, cpu)]
    moments = {name: [i for i in [*always, *found] if i.nbytes] for name, found in passing(config, facts, cpu).items()}
    return max(moments.items(), key=lambda moment: total(moment[1]))


def by_kind(found: list[Item]) -> dict[str, float]:
    return {kind: sum(i.nbytes for i in found if i.kind == kind) for kind in KINDS}


def total(found: list[Item]) -> float:
    return sum(item.nbytes for item in found)


def state(config: Config) -> list[Item]:
    """Masters, optimizer state, weights and gradient sums: what does not depend on the activations."""
    return [*between_steps(config), *_weights(config), *_sums(config)]


def between_steps(config: Config) -> list[Item]:
    """Masters and optimizer state."""
    state = 0 if config.parallel.offload_optimizer else 4 * shapes.optimizer_state(config, stages(config).on_device)
    return [
        Item("float32 masters", "parameters", 4 * _elements(config).shard, True),
        Item(f"{config.optimizer.name} state", "optimizer_state", state, True),
    ]


def _elements(config: Config) -> Held:
    """All weights on one device."""
    stage = stages(config)
    held = shapes.held(config)
    return held.block * stage.on_device + held.outer


def _weights(config: Config) -> list[Item]:
    held, size = _elements(config), shapes.itemsize(config.precision.compute)
    if gathers_at_use(config):
        return [Item("weights in compute dtype, sharded", "parameters", size * held.shard if size < 4 else 0)]
    found = []
    if size < 4 or zero_ways(config) > 1:
        found.append(Item("weights in compute dtype", "parameters", size * held.whole))
    if scatters_at_use(config) and size < 4:
        found.append(Item("weights in compute dtype, sharded", "parameters", size * held.shard))
    return found


def _sums(config: Config) -> list[Item]:
    """Gradient sums over the microbatches, in float32; with one microbatch and one stage there is nothing to sum."""
    if config.parallel.microbatches == 1 and config.mesh.pipeline == 1:
        return []
    held = _elements(config)
    if scatters_at_use(config):
        return [Item("float32 gradient sums, sharded", "gradients", 4 * held.shard)]
    return [Item("float32 gradient sums", "gradients", 4 * held.whole)]


@functools.lru_cache(maxsize=65536)
def residuals(model: ModelConfig, tensor: int, sequence_parallel: bool, remat: str, size: int, length: int, kernel: str) -> float:  # fmt: skip
    """Bytes a token that one layer keeps for its backward: what `jax.vjp` of `model.layers.Block` holds besides weights.

    Counts of [token, width] arrays: `tests/plan/test_memory.py` compares them with the traced model. `kernel` is how
    attention is computed: flash (one kernel, which keeps no scores), scores (all of them) or blocks (off the GPU).
    """
    d, k, f = model.d_model, model.head_dim or 1, -(-(model.d_ff or 1) // tensor)
    heads, groups = model.heads // tensor, model.kv_heads or model.heads
    groups = groups // tensor if groups % tensor == 0 else heads  # replicated ones are spread out to the query heads
    split = tensor if sequence_parallel else 1
    gated = model.family == "llama"
    if remat == "full":
        return size * d / split
    if remat == "dots":  # layer input, attention's output; up (and gate); q, k, v
        return size * (d / split + d + (1 + gated) * f + (heads + 2 * groups) * k)
    stream = size * (4 * d / split + 2 * d)  # twice: input, normalised, and scaled (gathered) as the products' input
    scores = 2 * heads * length if kernel == "scores" else heads  # the log of each query's sum, where none are kept
    outputs = 2 if kernel == "flash" else 1  # as the kernel made it, and as the rows of the product that follows
    return stream + size * ((2 + gated) * f + ((1 + outputs) * heads + 2 * groups) * k) + 4 * scores


def _left(config: Config, recomputed: bool) -> float:
    """Bytes that the input gradient of a layer and a microbatch leaves for the weight gradient (`parallel.pipeline.split_backward`): cotangents
    of what the products and norms give, and where the layer was `recomputed` what these were given too.
    """
    model, split = config.model, config.mesh.tensor if config.parallel.sequence_parallel else 1
    d, k, f = model.d_model, model.head_dim or 1, (model.d_ff or 1) / config.mesh.tensor
    heads, groups = model.heads / config.mesh.tensor, (model.kv_heads or model.heads) / config.mesh.tensor
    stream = 2 * d + 2 * d / split
    width = stream + (1 + (model.family == "llama")) * f + (heads + 2 * groups) * k
    if recomputed:
        width += stream + f + heads * k
    return shapes.itemsize(config.precision.compute) * shapes.tokens(config) * width


def kernel(config: Config, cpu: bool) -> str:
    """How attention is computed (see `model.attention.attend`)."""
    if cpu:
        return "blocks"
    half = config.precision.compute != "float32" and (config.model.head_dim or 1) % 8 == 0
    return "flash" if half else "scores"


def _layer(config: Config, remat: str, cpu: bool) -> float:
    """Bytes that one layer keeps of one microbatch."""
    size = shapes.itemsize(config.precision.compute)
    a_token = residuals(config.model, config.mesh.tensor, config.parallel.sequence_parallel, remat, size, config.train.sequence_length, kernel(config, cpu))  # fmt: skip
    return shapes.tokens(config) * a_token


def kept(config: Config, depths: Depths, cpu: bool = False) -> list[Item]:
    """What the microbatches in flight keep for their backward, and what waits between stages."""
    stage, parallel = stages(config), config.parallel
    stream = shapes.stream(config) * shapes.itemsize(config.precision.compute)
    layer = _layer(config, parallel.remat, cpu)
    if config.mesh.pipeline == 1:
        return [Item("activations kept for the backward", "activations", stage.on_device * layer)]
    entry = stage.longest * layer if parallel.remat != "full" else 0.0
    return [
        Item("activations kept for the backward", "activations", depths.stash * (stream + entry)),
        Item(
            "what weight gradients wait for",
            "activations",
            depths.cot * stage.longest * _left(config, parallel.remat != "none"),
        ),
        Item("activations waiting between stages", "activations", (depths.f_inbox + depths.b_inbox) * stream),
    ]


def passing(config: Config, facts: Facts, cpu: bool = False) -> dict[str, list[Item]]:
    """What is held only for a moment, by moment.

    What lives at once in them was read off XLA's live ranges; `experiments/bench_planner.py --compile` shows how well it holds.
    """
    return _of_stages(config, facts, cpu) if config.mesh.pipeline > 1 else _of_one_stage(config, cpu)


def _of_one_stage(config: Config, cpu: bool) -> dict[str, list[Item]]:
    """Moments of a step without pipeline stages.

    XLA makes the gradient of the output head, which nothing waits for, at the very end: until then its factors, hidden states and
    the logits' cotangent, are held through the backward. In a loop over microbatches it does so only where collectives stand between.
    """
    size, tensor, several = _itemsize(config), config.mesh.tensor, config.parallel.microbatches > 1
    gathers, scatters = gathers_at_use(config), scatters_at_use(config)
    held = shapes.held(config)
    block, vocabulary = held.block, held.vocabulary
    waits = gathers or not several
    head = [
        Item("logits", "activations", _logits(config)),
        Item("hidden states at the head", "activations", _hidden(config)),
    ]
    gradients = [Item("new gradients of the layers", "gradients", _new_gradients(config))]
    made = [Item("new gradients of the vocabulary", "gradients", 0 if waits else size * vocabulary.whole)]
    early = several and not (config.parallel.remat == "dots" and tensor == 1)  # set to zero before the head
    largest = [
        Item("gathered output head", "parameters", size * vocabulary.largest if gathers else 0),
        Item("gradient of the output head", "gradients", (size + 4 * scatters) * vocabulary.largest),
    ]
    layer = [
        Item("gathered weights of a layer", "parameters", size * block.largest if gathers else 0),
        Item("work of one layer", "activations", _work(config, cpu)),
        Item("gradients of a layer, to be scattered", "gradients", 4 * block.whole if scatters else 0),
    ]
    return {
        "loss head": [*head, *(made if several and not waits else largest), *(gradients if early else [])],
        "backward": [*gradients, *made, *layer, *(head if waits else [])],
    }


def _of_stages(config: Config, facts: Facts, cpu: bool) -> dict[str, list[Item]]:
    """Moments of a tick: a chunk goes forward, another backward, and the loss head between them.

    A stashed microbatch is made as a whole and read as a whole, and XLA reads one before the other is written: two beside the stash.
    """
    size, parallel, stage = _itemsize(config), config.parallel, stages(config)
    gathers, scatters = gathers_at_use(config), scatters_at_use(config)
    held = shapes.held(config)
    block = held.block
    # On CPU idle work is skipped by conditionals, whose branches share nothing and which leave the weights where they are.
    # Elsewhere ticks that are compiled alone, or beside another in one turn of a loop, hold what they make beside the rest.
    alone, beside = (0, 0) if cpu else (facts.alone, facts.beside)
    chunk = size * block.whole * stage.longest
    full = parallel.remat == "full"
    entry = 0.0 if full else stage.longest * _layer(config, parallel.remat, cpu)
    copied = 1 if cpu else 2 + beside + facts.turns
    left = 0.0  # by I for W: one whole that W reads, and what I makes besides that which it computed again
    if facts.split:
        made = 0 if cpu else (1 + alone) * _left(config, False)
        left = stage.longest * (_left(config, parallel.remat != "none") + made)
    again = stage.longest * _layer(config, "none", cpu) * (1 + alone + beside) if full else 0.0
    layer = _layer(config, "none", cpu) if parallel.remat == "dots" else 0.0
    weights = 0 if gathers or cpu else 2 * (1 + beside) * (stage.chunks > 1) + alone
    always = [
        Item("copies of a chunk's weights", "parameters", chunk * weights),
        Item("new gradients of the layers", "gradients", _new_gradients(config) * (1 + alone + beside)),
        Item("new gradients of the vocabulary", "gradients", size * held.tokens.whole),
        Item("gathered weights of a layer", "parameters", size * block.largest if gathers else 0),
        Item("gradients of a layer, to be scattered", "gradients", 4 * block.whole if scatters else 0),
    ]
    logits = Item("logits", "activations", _logits(config))
    waiting = [logits] if config.mesh.tensor == 1 else []  # for the gradient of the head, see _of_one_stage
    work = Item("work of one layer", "activations", _work(config, cpu))
    copies = "copies of a microbatch's activations"
    recomputed = Item("activations computed again", "activations", again + layer)
    return {
        "forward": [*always, Item(copies, "activations", copied * entry + left), work],
        "loss head": [*always, Item(copies, "activations", (1 + beside) * entry + left), recomputed, logits],
        "backward": [*always, Item(copies, "activations", (1 + beside) * entry + left), recomputed, work, *waiting],
    }


def _itemsize(config: Config) -> int:
    return shapes.itemsize(config.precision.compute)


def _logits(config: Config) -> float:
    return 4 * shapes.tokens(config) * shapes.vocabulary_rows(config)


def _hidden(config: Config) -> float:
    """The last layer's output, normalised, and its cotangent."""
    return 3 * _itemsize(config) * shapes.tokens(config) * config.model.d_model


def _new_gradients(config: Config) -> float:
    """One microbatch's gradients of a chunk's layers, stacked."""
    stage = stages(config)
    block = shapes.held(config).block
    return _itemsize(config) * (block.shard if scatters_at_use(config) else block.whole) * stage.longest


def _work(config: Config, cpu: bool) -> float:
    """What one layer's backward has at hand when it is in the MLP: hidden activations and their cotangents, and the residual
    stream in the forms that the products and the attention want it in. Off the GPU also blocks of attention scores, and if the
    layer is computed again its forward's beside its backward's.
    """
    model, mesh, length = config.model, config.mesh, config.train.sequence_length
    matrices, heads = 1 + (model.family == "llama"), model.heads // mesh.tensor
    hidden, split = (model.d_ff or 1) / mesh.tensor, mesh.tensor if config.parallel.sequence_parallel else 1
    streams = 4 * model.d_model + 3 * model.d_model / split + 3 * heads * (model.head_dim or 1)
    mlp = _itemsize(config) * (2 * matrices * hidden + streams)
    if cpu:
        block = 4 * heads * min(length, max(128, math.ceil(length / 8)))  # see model.attention.BLOCKS
        if config.parallel.remat == "none":
            return shapes.tokens(config) * max(mlp, 6 * block + 2 * _itemsize(config) * model.d_model)
        mlp += _itemsize(config) * matrices * hidden + 3 * block
    elif kernel(config, cpu) == "scores":
        mlp += 3 * 4 * heads * length
    return shapes.tokens(config) * mlp
