"""What a device holds while a step runs, item by item.

State between steps is sharded as in ZeRO (Rajbhandari et al. 2020, section 5); activations follow Korthikanti et al. 2022
(section 4), with flash attention, which keeps no scores (Dao et al. 2022). Sizes are of the longest stage.
"""

import functools
from dataclasses import dataclass

from meshtrain.config import Config, ModelConfig
from meshtrain.planner import shapes
from meshtrain.planner.shapes import Held

OPTIMIZER_SLOTS = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 1, "adafactor": 0}


@dataclass(frozen=True)
class Item:
    """Bytes that a device holds for one purpose; `kind` is the group that the report sums them by."""

    name: str
    kind: str  # parameters, gradients, optimizer_state or activations
    nbytes: float
    between_steps: bool = False


@dataclass(frozen=True)
class Depths:
    """How many entries each buffer of the pipeline has (see `parallel.pipeline.buffers`)."""

    stash: int
    f_inbox: int = 0
    b_inbox: int = 0
    cot: int = 0


ONE_STAGE = Depths(1)
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def zero_state(
    elements: float, stage: int, data: int, weight: float = 2, gradient: float = 2, state: float = 12
) -> float:
    """Bytes of model state per device in mixed-precision training (ZeRO, figure 1): `state` counts masters and two moments."""
    ways = [data if stage >= level else 1 for level in (3, 2, 1)]
    return elements * (weight / ways[0] + gradient / ways[1] + state / ways[2])


def items(config: Config, depths: Depths, cpu: bool = False) -> list[Item]:
    """Everything that a device holds at the fullest moment of a step."""
    return fullest(config, depths, cpu)[1]


def fullest(config: Config, depths: Depths, cpu: bool = False) -> tuple[str, list[Item]]:
    """The moment of a step at which a device holds most, and what it holds then."""
    always = [*state(config), *kept(config, depths, cpu)]
    moments = {name: [i for i in [*always, *found] if i.nbytes] for name, found in passing(config, cpu).items()}
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
    elements = _elements(config).shard
    slots = OPTIMIZER_SLOTS[config.optimizer.name]
    moments = 0 if config.parallel.offload_optimizer else 4 * slots * elements
    return [
        Item("float32 masters", "parameters", 4 * elements, True),
        Item(f"{config.optimizer.name} state", "optimizer_state", moments, True),
    ]


def _elements(config: Config) -> Held:
    """All weights on one device."""
    stage = shapes.stage(config)
    block, outer, _ = shapes.held(config.model, config.mesh.tensor, stage.vocab_ways, shapes.zero_ways(config))
    return block * stage.layers + outer


def _weights(config: Config) -> list[Item]:
    held, size = _elements(config), shapes.itemsize(config.precision.compute)
    if shapes.gathers_at_use(config):
        return [Item("weights in compute dtype, sharded", "parameters", size * held.shard if size < 4 else 0)]
    found = []
    if size < 4 or shapes.zero_ways(config) > 1:
        found.append(Item("weights in compute dtype", "parameters", size * held.whole))
    if shapes.scatters_at_use(config) and size < 4:
        found.append(Item("weights in compute dtype, sharded", "parameters", size * held.shard))
    return found


def _sums(config: Config) -> list[Item]:
    """Gradient sums over the microbatches, in float32; with one microbatch and one stage there is nothing to sum."""
    if config.parallel.microbatches == 1 and config.mesh.pipeline == 1:
        return []
    held = _elements(config)
    if shapes.scatters_at_use(config):
        return [Item("float32 gradient sums, sharded", "gradients", 4 * held.shard)]
    return [Item("float32 gradient sums", "gradients", 4 * held.whole)]


@functools.lru_cache(maxsize=65536)
def residuals(model: ModelConfig, tensor: int, sequence_parallel: bool, remat: str, size: int, length: int, kernel: str) -> float:  # fmt: skip
    """Bytes a token that one layer keeps for its backward: what `jax.vjp` of `model.layers.Block` holds besides weights.

    Counts of [token, width] arrays: `tests/planner/test_memory.py` compares them with the traced model. `kernel` is how
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
    return stream + size * ((2 + gated) * f + (2 * heads + 2 * groups) * k) + 4 * scores


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
    stage, parallel = shapes.stage(config), config.parallel
    stream = shapes.stream(config) * shapes.itemsize(config.precision.compute)
    layer = _layer(config, parallel.remat, cpu)
    if config.mesh.pipeline == 1:
        return [
            Item("activations kept for the backward", "activations", stage.layers * layer),
            Item("copies in another layout", "activations", _copies(config, 1) if parallel.remat != "full" else 0.0),
        ]
    entry = stage.longest * layer if parallel.remat != "full" else 0.0
    # A split backward leaves what its second half needs: about what a forward without recomputation does.
    left = stage.longest * _layer(config, "none", cpu) if depths.cot else 0.0
    return [
        Item("activations kept for the backward", "activations", depths.stash * (stream + entry)),
        Item("what weight gradients wait for", "activations", depths.cot * left),
        Item("activations waiting between stages", "activations", (depths.f_inbox + depths.b_inbox) * stream),
        Item("copies in another layout", "activations", _copies(config, depths.stash if entry else 1)),
    ]


def _copies(config: Config, stacked: int) -> float:
    """Sequence parallelism gathers along the sequence, which XLA wants as the first dimension: with several sequences a
    microbatch it copies what is stacked of one gathered array. It does not where a stage has several chunks."""
    if not config.parallel.sequence_parallel or shapes.sequences(config) == 1 or shapes.stage(config).chunks > 1:
        return 0.0
    array = shapes.tokens(config) * config.model.d_model * shapes.itemsize(config.precision.compute)
    return stacked * shapes.stage(config).longest * array


def passing(config: Config, cpu: bool = False) -> dict[str, list[Item]]:
    """What is held only for a moment, by moment: at the loss head, and in the backward of a layer.

    The counts of copies are what XLA's buffer assignment was seen to make; `experiments/bench_planner.py --compile` shows how well
    they hold.
    """
    stage = shapes.stage(config)
    size, tokens = shapes.itemsize(config.precision.compute), shapes.tokens(config)
    block, _, vocabulary = shapes.held(config.model, config.mesh.tensor, stage.vocab_ways, shapes.zero_ways(config))
    gathers, scatters = shapes.gathers_at_use(config), shapes.scatters_at_use(config)
    pipelined = config.mesh.pipeline > 1
    edge, layers = vocabulary.largest, stage.longest
    uses = 2 if config.model.tied_head and not gathers else 1  # a tied weight has a gradient of each use
    head = [
        Item("logits", "activations", 4 * tokens * stage.vocab_rows),
        Item("hidden states at the head", "activations", 3 * size * tokens * config.model.d_model),
        Item("gradient of the output head", "gradients", (size * uses + (4 if scatters else 0)) * edge),
        Item("gathered output head", "parameters", 2 * size * edge if gathers else 0),
    ]
    new = (block.shard if scatters else block.whole) * layers
    backward = [
        Item("activations computed again", "activations", _again(config, cpu)),
        Item("copies of a microbatch's activations", "activations", _entry_copies(config, cpu)),
        Item("copies of a chunk's weights", "parameters", size * block.whole * layers * _weight_copies(config)),
        Item("new gradients of the layers", "gradients", size * new),
        Item("new gradients of the vocabulary", "gradients", 0 if pipelined else size * edge),
        Item("gathered weights of a layer", "parameters", size * block.whole if gathers else 0),
        Item(
            "largest gradient of a layer, to be scattered", "gradients", (size + 4) * block.largest if scatters else 0
        ),
        Item("work of one layer", "activations", _work(config)),
    ]
    return {"loss head": head, "backward": backward}


def _last_tick_alone(config: Config) -> bool:
    """Two stages drain in one tick, which XLA compiles outside the loop: copies made there live beside the loop's."""
    return (
        config.mesh.pipeline == 2 and config.parallel.schedule in ("1f1b", "zb_h1") and config.parallel.remat != "none"
    )


def _again(config: Config, cpu: bool) -> float:
    """Activations that the backward computes again: of a layer, or of a stage, which the pipeline recomputes as a whole."""
    if config.parallel.remat == "none":
        return 0.0
    layer = _layer(config, "none", cpu)
    if config.mesh.pipeline == 1 or config.parallel.remat != "full":
        return layer
    twice = _last_tick_alone(config) and config.parallel.schedule == "1f1b"
    return (1 + twice) * shapes.stage(config).longest * layer


def _entry_copies(config: Config, cpu: bool) -> float:
    """A stashed microbatch is written as a whole and read as a whole: two copies beside the stash, and two of what W waits for."""
    if config.mesh.pipeline == 1:
        return 0.0
    stashed = _layer(config, config.parallel.remat, cpu) if config.parallel.remat != "full" else 0.0
    left = _layer(config, "none", cpu) if config.parallel.schedule.startswith("zb_") else 0.0
    return 2 * shapes.stage(config).longest * (stashed + left)


def _weight_copies(config: Config) -> int:
    """Copies of a chunk's weights: where it is picked among several, and where a tick stands alone."""
    alone = _last_tick_alone(config) and not shapes.gathers_at_use(config)
    return 2 * (shapes.stage(config).chunks > 1) + 2 * alone


def _work(config: Config) -> float:
    """Cotangents and products of one layer while it goes backward."""
    model, size, tokens = config.model, shapes.itemsize(config.precision.compute), shapes.tokens(config)
    inner = 9 if config.mesh.pipeline > 1 else 3
    return size * tokens * (4 * model.d_model + inner * (model.d_ff or 1) / config.mesh.tensor)
