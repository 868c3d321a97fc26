"""The rollouts of `train.objective: grpo` in a plan: bytes and seconds of drawing the answers that steps learn from;
of what `eval.samples` draws at an evaluation the bytes.

    synchronise   each device receives its part of the decoding weights, less what it has (`generate.resharding`)
    draw          prompts are read, once a rank; then rl.answers - 1 times a token of every slot: the weights and the
                  cache are read from memory, or the products take longer; sums and logits travel over tensor
    held          decoding weights, cache, logits: beside the state, when there are neither gradients nor activations

    slots a rank = answers of a step / ranks, where all ranks but tensor's have slots of their own

Prompt and answer are taken to be as long as a row holds, rl.answers of it the answer, as the rows are that a step
learns from. How long rewards take is theirs to say: their seconds are not planned.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.cluster.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config, MeshConfig
from meshtrain.config.check import MOST_SAMPLED, PROMPT
from meshtrain.config.mesh import TENSOR
from meshtrain.config.stacks import LINEAR, kinds_of_layers, layers_of_stacks
from meshtrain.parallel.placement import Placed, all_placed, placed
from meshtrain.plan import shapes
from meshtrain.plan.experts import reached
from meshtrain.plan.gradient_traffic import FLOAT32, Transfer
from meshtrain.plan.shapes import compute_size

LEAST_BUCKET = 16  # tokens that a prompt is padded to, at least
# What the compiled programs hold at once: float32 arrays of all logits as tokens are chosen, and of all tokens of the
# prompts the stream and the hidden activations of a gated MLP.
LOGITS = 4
READ = 2


def draws(config: Config) -> bool:
    """Returns whether steps learn from answers that the model draws."""
    return config.train.objective == "grpo"


@dataclass(frozen=True)
class RolloutSizes:
    """The sizes of a rollout on one device."""

    slots: int
    prompts: int  # that its slots answer
    bucket: int  # tokens that a prompt is padded to
    length: int  # positions of a slot

    @classmethod
    def make(cls, config: Config) -> "RolloutSizes":
        mesh = config.mesh
        row = config.train.sequence_length
        if draws(config):
            drawn = config.train.global_batch_size
            length = row + 1
            prompt = length - config.rl.answers
            group = config.rl.group
        else:
            drawn = config.eval.samples
            # of a conversation all that comes before its first answer
            is_chat = config.data.format == "chat"
            length = row if is_chat else min(PROMPT + MOST_SAMPLED, row)
            prompt = row - 1 if is_chat else min(PROMPT, row // 2)
            group = 1
        slots = -(-drawn * mesh.tensor // mesh.devices)
        bucket = min(length, max(LEAST_BUCKET, 1 << (prompt - 1).bit_length()))
        return cls(slots, _touched(slots, group), bucket, length)


def _touched(window: int, block: int) -> int:
    """Returns how many blocks of a row one of the windows touches that lie side by side over it, at most."""
    return (window - 1 + block - math.gcd(window, block)) // block + 1


# --- the weights on their way


def decoding_weights(config: Config) -> tuple[Placed, ...]:
    """Returns every weight as decoding has it: split over tensor alone."""
    mesh = config.mesh
    alone = MeshConfig(data=mesh.devices // mesh.tensor, tensor=mesh.tensor)
    stacks = layers_of_stacks(config.model)
    layers = tuple((stack, len(layers)) for stack, layers in stacks.items())
    return placed(
        config.model, alone, "edge", layers, 0, config.lora, config.train.trainable
    )


def synchronisation(config: Config) -> list[Transfer]:
    """Returns the collectives that lay the weights out for decoding; none where the objective draws nothing."""
    if not draws(config):
        return []
    pairs = zip(all_placed(config), decoding_weights(config), strict=True)
    sent = (transfer for pair in pairs for transfer in _transfers(config, *pair))
    return [transfer for transfer in sent if transfer.size > 1]


def _transfers(config: Config, trained: Placed, decoded: Placed) -> Iterator[Transfer]:
    """Yields a weight's collectives, in the order of `generate.resharding`."""
    nbytes: float = _size(config, trained) * trained.on_rank()
    zero = trained.zero_dim
    moved = [
        d for d, over in enumerate(trained.over) if TENSOR in over and over != (TENSOR,)
    ]
    split = [d for d, over in enumerate(decoded.over) if TENSOR in over]
    early = zero is None or moved == split or zero not in split

    if moved and early:
        yield (move := _move(config, trained, decoded, nbytes))
        nbytes = move.nbytes
    if zero is not None:
        nbytes *= trained.zero_degree
        yield _send(config, ALL_GATHER, trained.zero_axes, nbytes)
        nbytes *= trained.whole[zero] / trained.padded[zero]
    if moved and not early:
        yield (move := _move(config, trained, decoded, nbytes))
        nbytes = move.nbytes
    for over in trained.over:
        others = tuple(axis for axis in over if axis != TENSOR)
        nbytes *= math.prod(map(config.mesh.ways, others))
        yield _send(config, ALL_GATHER, others, nbytes)


def _move(config: Config, trained: Placed, decoded: Placed, nbytes: float) -> Transfer:
    """Returns what gives each tensor rank its pieces of a weight; a device then has so many bytes of it."""
    (dim,) = (d for d, over in enumerate(trained.over) if TENSOR in over)
    ranks = config.mesh.tensor
    if TENSOR in decoded.over[dim]:
        # where there is no tensor rank more, or no other axis, the pieces are in order
        axes = trained.over[dim] if 1 < ranks < trained.ways[dim] else ()
        return _send(config, PERMUTE, axes, nbytes)
    for d, over in enumerate(decoded.over):
        if TENSOR in over:
            nbytes *= decoded.whole[d] / trained.whole[d]
            return _send(config, ALL_TO_ALL, (TENSOR,), nbytes)
    return _send(config, ALL_GATHER, (TENSOR,), nbytes * ranks)


def _send(config: Config, kind: str, axes: tuple[str, ...], nbytes: float) -> Transfer:
    several = [axis for axis in axes if config.mesh.ways(axis) > 1]
    ranks = math.prod(map(config.mesh.ways, several))
    return Transfer("+".join(several), kind, "weights for decoding", nbytes, 1, ranks)


def _size(config: Config, weight: Placed) -> int:
    """Returns the bytes of a number of a weight, as it travels and is decoded with."""
    return FLOAT32 if weight.float32 else compute_size(config)


# --- bytes


def weights_bytes(config: Config) -> float:
    """Returns the bytes of a device's decoding weights."""
    return float(
        sum(_size(config, w) * w.on_device() for w in decoding_weights(config))
    )


def cache_bytes(config: Config) -> float:
    """Returns the bytes of what the model remembers in a device's slots, as answers are drawn."""
    drawing = RolloutSizes.make(config)
    return bytes_remembered(config, drawing.slots, drawing.length)


def bytes_remembered(
    config: Config, slots: int, length: int, drafts: bool = False
) -> float:
    """Returns the bytes of a device's slots of `length` positions: keys and values of each, or latents; of linear
    attention (`generate.linear_cache`) states and the last tokens, however many positions.

    With `drafts`, the layer that predicts a further token remembers, too.
    """
    model = config.model
    tensor = config.mesh.tensor
    heads = _touched(model.heads // tensor, model.heads // model.kv_heads)
    of_position = 2.0 * heads * model.head_dim
    if model.mla.kv_rank:
        of_position = model.mla.kv_rank + model.mla.rope
    linear = _linear_layers(config)
    sizes = model.linear
    keys = sizes.key_heads * sizes.key_dim
    values = sizes.value_heads * sizes.value_dim
    tails = (sizes.conv - 1) * (2 * keys + values) / tensor
    numbers = (model.layers - linear + drafts) * length * of_position + linear * tails
    states = linear * values * sizes.key_dim / tensor
    return slots * (compute_size(config) * numbers + FLOAT32 * states)


def _linear_layers(config: Config) -> int:
    return kinds_of_layers(config.model).count(LINEAR)


def held(config: Config) -> dict[str, tuple[str, float]]:
    """Returns the kind and bytes of what is held while answers, or samples, are drawn, by name."""
    if not (draws(config) or config.eval.samples):
        return {}
    drawing = RolloutSizes.make(config)
    model = config.model
    hidden = model.d_ff
    if model.moe.experts:
        hidden += model.moe.top_k * model.expert_width
    width = model.d_model + hidden / config.mesh.tensor
    size = compute_size(config)
    read = READ * size * drawing.prompts * drawing.bucket * width
    logits = LOGITS * FLOAT32 * drawing.slots * model.vocab_size
    return {
        "weights for decoding": ("parameters", weights_bytes(config)),
        "cache of keys and values": ("activations", cache_bytes(config)),
        "prompts as they are read, or logits": ("activations", max(read, logits)),
    }


# --- seconds


def seconds(config: Config, cluster: Cluster) -> tuple[float, float]:
    """Returns the seconds a step of synchronising and of drawing: of `rl.epochs` steps the mean."""
    if not draws(config):
        return 0.0, 0.0
    drawing = RolloutSizes.make(config)
    sent = sum(t.seconds(cluster, config.mesh) for t in synchronisation(config))
    prompts = drawing.prompts
    read = _forward(config, cluster, (prompts, drawing.bucket), drawing.bucket / 2, 0.0)
    cache = cache_bytes(config)
    token = _forward(config, cluster, (drawing.slots, 1), drawing.length, cache)
    drawn = read + (config.rl.answers - 1) * token
    return sent / config.rl.epochs, drawn / config.rl.epochs


def _forward(
    config: Config, cluster: Cluster, rows: tuple[int, int], keys: float, cache: float
) -> float:
    """Returns the seconds of a forward of (sequences, tokens of each) with the logits behind each sequence.

    A token attends to `keys` positions; `cache` bytes are read.
    """
    model = config.model
    mesh = config.mesh
    device = cluster.accelerator
    dtype = config.precision.compute
    size = shapes.itemsize(dtype)
    sequences, length = rows
    tokens = sequences * length
    moved, products = _through_weights(config, sequences, tokens)
    moved += cache
    linear = _linear_layers(config)
    scores = tokens * keys * (model.layers - linear) * model.heads / mesh.tensor
    flops = 2 * products + 2 * scores * (model.head_dim + model.value_width)
    sizes = model.linear
    states = linear * sizes.value_heads * sizes.key_dim * sizes.value_dim / mesh.tensor
    # a token finds what is under its key, replaces it, and reads what is under its query
    flops += 2 * 3 * tokens * states
    stream = size * tokens * model.d_model
    sums = Transfer(
        TENSOR, ALL_REDUCE, "sums", stream, 2 * model.layers + 1, mesh.tensor
    )
    logits = FLOAT32 * sequences * model.vocab_size
    gathered = Transfer(TENSOR, ALL_GATHER, "logits", logits, 1, mesh.tensor)
    sent = sums.seconds(cluster, mesh) + gathered.seconds(cluster, mesh)
    busy = flops / (device.flops(dtype) * device.efficiency.matmul)
    return max(moved / device.memory_rate, busy) + sent


def _through_weights(
    config: Config, sequences: int, tokens: int
) -> tuple[float, float]:
    """Returns the bytes of weights that a forward reads, and its multiplications by them."""
    model = config.model
    moved = 0.0
    products = 0.0
    for weight in decoding_weights(config):
        looked_up = weight.name.startswith("embedding.")
        if looked_up and not (model.tied_head and weight.name == "embedding.tokens"):
            continue
        chosen = reached(model.moe, 1) if "experts" in weight.axes else 1.0
        moved += (
            _size(config, weight) * weight.on_device() * (1 - (1 - chosen) ** tokens)
        )
        products += (
            weight.on_device() * chosen * (tokens if weight.stacked else sequences)
        )
    return moved, products
