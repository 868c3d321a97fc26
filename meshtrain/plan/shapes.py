"""Sizes of what a device holds and works on, added up from `model.weights` and `parallel.placement`."""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshtrain.cluster.accelerators import ACCELERATORS, KINDS, canonical
from meshtrain.config import Config, MeshConfig, ModelConfig, follow
from meshtrain.config.follow import microbatch_rows
from meshtrain.config.model import LinearConfig, LoraConfig, patches_of, positions_of
from meshtrain.config.rl import has_reference
from meshtrain.config.schema import OptimizerConfig
from meshtrain.config.stacks import BLOCKS, LINEAR, count_global, kinds_of_layers
from meshtrain.families import FAMILIES
from meshtrain.model.weights import Weight, all_weights, is_trained, weights
from meshtrain.optimizers import OPTIMIZERS
from meshtrain.parallel.placement import Placed, part, placed, splits, stages
from meshtrain.plan.by_stack import held, stack_configs

PATCHES_WEIGHT = "embedding.patches"
FIRST = ("blocks.attention.q", "blocks.attention.k", "blocks.attention.v")


@dataclass(frozen=True)
class Elements:
    """Elements of some weights on one device: `full` as the model uses them, `shard` of what is split over data too."""

    full: float = 0
    shard: float = 0
    largest: int = 0  # full elements of the largest weight
    # What a gather over all token ranks makes of the shards; of experts, which fewer ranks gather, what sends as many
    # bytes.
    gathered: float = 0.0

    def __add__(self, other: "Elements") -> "Elements":
        largest = max(self.largest, other.largest)
        return Elements(
            self.full + other.full,
            self.shard + other.shard,
            largest,
            self.gathered + other.gathered,
        )

    def __sub__(self, other: "Elements") -> "Elements":
        """Without a part of it."""
        gathered = self.gathered - other.gathered
        return Elements(
            self.full - other.full, self.shard - other.shard, self.largest, gathered
        )

    def __mul__(self, count: float) -> "Elements":
        return Elements(
            self.full * count, self.shard * count, self.largest, self.gathered * count
        )


class WeightParts(NamedTuple):
    """Elements on one device of one layer, and of the weights outside the layers, by their place in the tree."""

    block: Elements
    embedding: Elements
    head: Elements
    tokens: Elements  # of the embedding
    output: Elements  # of the head: nothing where it is tied to the tokens
    # Of a layer, what its first products read: the projections into attention
    first: Elements
    predictions: Elements  # of further tokens

    @property
    def outer(self) -> Elements:
        """All outside the layers."""
        return self.embedding + self.head + self.predictions

    @property
    def vocabulary(self) -> Elements:
        return self.tokens + self.output


@held
def resident(config: Config) -> WeightParts:
    """Elements of a config's model on one device, adapters among them."""
    return _resident(_sizes(config), False)


@held
def trained(config: Config) -> WeightParts:
    """Elements on one device that are trained."""
    return _resident(_sizes(config), True)


Sizes = tuple[ModelConfig, MeshConfig, str, int, LoraConfig, tuple[str, ...]]


def _sizes(config: Config) -> Sizes:
    """Returns all that the weights on a device follow from; from stage 1 on ZeRO shards trained weights alike."""
    lora = config.lora
    trainable = config.train.trainable
    stage = (
        config.parallel.zero_stage
        if lora.rank or trainable
        else min(config.parallel.zero_stage, 1)
    )
    return config.model, config.mesh, config.parallel.vocab, stage, lora, trainable


@functools.lru_cache(maxsize=65536)
def _resident(sizes: Sizes, trained_only: bool) -> WeightParts:
    """Returns the weights on a device by part, or the trained ones only."""
    placed_weights = _one_layer(sizes)
    _, mesh, *_ = sizes

    def sum_weights(name: str | tuple[str, ...]) -> Elements:
        chosen = [
            p
            for p in placed_weights
            if p.name.startswith(name) and (p.trained or not trained_only)
        ]
        return _sum(
            Elements(
                p.on_device(), p.on_rank(), p.on_device(), _gathered(p, mesh.shards)
            )
            for p in chosen
        )

    names = (
        "blocks.",
        "embedding.",
        "head.",
        "embedding.tokens",
        "head.weight",
        FIRST,
        "mtp.",
    )
    return WeightParts(*(sum_weights(name) for name in names))


def _gathered(weight: Placed, ranks: int) -> float:
    if weight.zero_degree == ranks:
        return weight.on_rank() * ranks
    return weight.on_rank() * (weight.zero_degree - 1) * ranks / (ranks - 1)


def layer_weights(config: Config) -> list[Placed]:
    """Returns the weights of a layer of a config, adapters among them."""
    return [p for p in _one_layer(_sizes(config)) if p.stacked]


def _one_layer(sizes: Sizes) -> tuple[Placed, ...]:
    """Every weight, where each stage has a single layer; of a model with one stack."""
    model, mesh, vocab, zero, lora, trainable = sizes
    return placed(model, mesh, vocab, ((BLOCKS, mesh.pipeline),), zero, lora, trainable)


def _sum(parts: Iterable[Elements]) -> Elements:
    return functools.reduce(Elements.__add__, parts, Elements())


@held
def optimizer_state(config: Config, layers: int) -> float:
    """Elements of all moments on one device with so many layers; counts and other scalars are left out."""
    block, outer = _moments(config.optimizer, _sizes(config))
    return block * layers + outer


@functools.lru_cache(maxsize=65536)
def _moments(o: OptimizerConfig, sizes: Sizes) -> tuple[int, int]:
    """Returns the elements of moments of one layer, and outside the layers."""
    kind = OPTIMIZERS[o.name]
    counts = {True: 0, False: 0}
    for weight in (p for p in _one_layer(sizes) if p.trained):
        for dims in kind.moments(o, weight):
            moment = (
                part(weight, [*range(weight.stacked), *dims])
                if kind.by_matrix
                else weight
            )
            counts[weight.stacked] += moment.on_rank()
    return counts[True], counts[False]


def replicated(config: Config, layers: int) -> dict[tuple[str, int], int]:
    """Elements, after ZeRO, of trained weights that are whole over model-parallel axes, by (axes, devices of the
    group); of `layers` layers.
    """
    mesh = config.mesh
    counts = dict[tuple[str, int], int]()
    several = stack_configs(config)
    assigned = stages(config)
    for number, (stack, one) in enumerate(several):
        places = layers if len(several) == 1 else assigned.places(stack)
        for weight in (
            p
            for p in _one_layer(_sizes(one))
            if p.trained and (p.stacked or not number)
        ):
            group = {
                axis: mesh.ways(axis)
                for axis in weight.replicated
                if mesh.ways(axis) > 1
            }
            if group:
                key = "+".join(group), math.prod(group.values())
                each = weight.on_rank() * (places if weight.stacked else 1)
                counts[key] = counts.get(key, 0) + each
    return counts


def rule_numbers(
    each: Sequence[float], sizes: LinearConfig, value: int, columns: int
) -> float:
    """Counts float32 numbers a token and head of linear attention's rule, of values of a width and states of so many
    columns: so many each of a key's width, of a value's, of the tokens of a chunk, and of the states of chunks.
    """
    widths = sizes.key_dim, value, sizes.chunk, sizes.key_dim * columns / sizes.chunk
    return sum(map(operator.mul, each, widths))


def vocabulary_degree(config: Config) -> int:
    """Devices that share the vocabulary."""
    return _vocabulary_degree(config.model, config.mesh, config.parallel.vocab)


@functools.lru_cache(maxsize=4096)
def _vocabulary_degree(model: ModelConfig, mesh: MeshConfig, vocab: str) -> int:
    return math.prod(
        getattr(mesh, axis) for axis in splits(model, mesh, vocab)["vocab"]
    )


def vocabulary_rows(config: Config) -> int:
    """Rows of it on one device."""
    return math.ceil(config.model.vocab_size / vocabulary_degree(config))


def length(config: Config) -> int:
    """Tokens of a row on one device."""
    return config.train.sequence_length // config.mesh.context


def tokens(config: Config) -> int:
    """Tokens of one microbatch on one device; of images the positions."""
    return microbatch_rows(config) * length(config)


def labels(model: ModelConfig, tokens: int) -> int:
    """Labels of so many tokens, and rows of logits: one of each, but one of all positions of an image."""
    return tokens // (positions_of(model) or 1)


def read(model: ModelConfig, tokens: int) -> int:
    """The tokens, of so many, that the head reads: all, but of images with a class token these alone."""
    if FAMILIES[model.family].images and model.pool == "class":
        return labels(model, tokens)
    return tokens


def loss_chunk(config: Config) -> int:
    """Labels of a microbatch whose logits are alive at once."""
    every = tokens(config)
    chunk = follow.loss_chunk(config, every, vocabulary_rows(config))
    return chunk or labels(config.model, every)


def loss_chunks(config: Config) -> int:
    """Chunks of a microbatch's loss, see `model.chunked_loss`."""
    return math.ceil(labels(config.model, tokens(config)) / loss_chunk(config))


def logits_again(config: Config) -> bool:
    """Returns whether our backward makes logits again: else a loop over chunks makes losses and gradients at once
    (`model.chunked_loss`).
    """
    return config.train.objective in ("dpo", "grpo") and loss_chunks(config) > 1


def stream(config: Config) -> int:
    """Elements of the residual stream of one microbatch on one device: 1/tensor of the sequence if sequence
    parallel.
    """
    split = config.mesh.tensor if config.parallel.sequence_parallel else 1
    return tokens(config) * config.model.d_model // split


def seen(model: ModelConfig, length: int) -> float:
    """Keys that a query of a sequence sees, as FLOPs are counted (PaLM): `length`, also where it sees those before it
    alone, which is twice their mean; over the layers with attention, fewer in a window.
    """
    near = min(model.window or length, length)
    attending = [at for at, kind in enumerate(kinds_of_layers(model)) if kind != LINEAR]
    everywhere = count_global(model, attending) / max(1, len(attending))
    return everywhere * length + (1 - everywhere) * (2 * near - near * near / length)


def itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def compute_size(config: Config) -> int:
    """Returns the bytes of an element of what is computed."""
    return itemsize(config.precision.compute)


def active_size(model: ModelConfig, weight: Weight) -> float:
    """Elements of a weight that one token is computed with: of experts the share that it chooses."""
    return weight.size * (
        model.moe.top_k / model.moe.experts if "experts" in weight.axes else 1
    )


def active_parameters(model: ModelConfig) -> int:
    """Parameters of the model that one token is computed with."""
    return round(sum(active_size(model, weight) for weight in weights(model)))


def model_flops(config: Config) -> float:
    """Returns the FLOPs of forward and backward for one step, without recomputation and rows that fill up a batch.

    PaLM, appendix B: 6 N + 12 L H Q T a token; frozen weights take 4 N, since their gradient is not computed. dpo's
    reference adds a forward without adapters: 2 N + 4 L H Q T. For an image the head's N counts once, and the patches,
    which need no gradient of their inputs, take 4 N.
    """
    model = config.model
    train = config.train
    length = train.sequence_length
    reference = 2 if has_reference(config) else 0

    def count_flops(weight: Weight) -> float:
        passes = 6 if is_trained(weight, config.lora, train.trainable) else 4
        return (passes + (0 if weight.adapter else reference)) * active_size(
            model, weight
        )

    every = all_weights(model, config.lora)
    in_layer = lambda weight: weight.stacked or weight.name.startswith("mtp.")
    matrices = sum(
        count_flops(weight) for weight in every if in_layer(weight) and weight.decayed
    )
    head = next(
        count_flops(weight)
        for weight in every
        if weight.name == ("embedding.tokens" if model.tied_head else "head.weight")
    )
    head *= 1 + model.mtp
    linear = kinds_of_layers(model).count(LINEAR)
    # a state is read twice, by mamba2 once, and written once, whatever the length
    sizes = model.linear
    states = linear * sizes.value_heads * sizes.key_dim * sizes.value_dim
    passes = 3 - (sizes.kind == "mamba2")
    per_token = matrices + score_flops(config) + (6 + reference) * passes * states
    if not FAMILIES[model.family].images:
        return float((per_token + head) * train.global_batch_size * length)
    number, _ = patches_of(model)
    embedding = sum(
        count_flops(weight) - 2 * weight.size
        for weight in every
        if weight.name == PATCHES_WEIGHT
    )
    return float(
        (per_token * length + head + embedding * number) * train.global_batch_size
    )


def score_flops(config: Config) -> float:
    """Returns the FLOPs of attention's scores and values a token, all keys counted as `seen` has it."""
    model = config.model
    reference = 2 if has_reference(config) else 0
    widths = (model.head_dim + model.value_width) / 2
    layers = model.layers - kinds_of_layers(model).count(LINEAR) + model.mtp
    scores = layers * model.heads * widths * seen(model, config.train.sequence_length)
    return (12 + 2 * reference) * scores


def half_model_flops(config: Config) -> float:
    """Returns `model_flops` where a causal mask's half of the scores is not counted, as Megatron and others do."""
    if not FAMILIES[config.model.family].causal:
        return model_flops(config)
    train = config.train
    tokens = train.global_batch_size * train.sequence_length
    return model_flops(config) - tokens * score_flops(config) / 2


def tokens_at_peak(config: Config, kind: str, devices: int) -> float | None:
    """Tokens a second, were every device of this kind to do nothing but the model's FLOPs at its peak rate; None if
    that is not known.

    A run's tokens a second over these are its model FLOPs utilisation (PaLM, appendix B).
    """
    if (name := canonical(kind)) not in KINDS.values():
        return None
    flops_per_token = model_flops(config) / (
        config.train.global_batch_size * config.train.sequence_length
    )
    return (
        devices * ACCELERATORS[name].flops(config.precision.compute) / flops_per_token
    )
