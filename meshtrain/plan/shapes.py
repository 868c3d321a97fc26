"""Sizes of what a device holds and works on, added up from `model.weights` and `parallel.placement`."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from meshtrain.config import Config, MeshConfig, ModelConfig
from meshtrain.config.model import LoraConfig, patches_of, positions_of
from meshtrain.config.rows import sequences
from meshtrain.config.schema import OptimizerConfig
from meshtrain.families import FAMILIES
from meshtrain.model.weights import Weight, every_weight, is_trained
from meshtrain.optimizers import OPTIMIZERS
from meshtrain.parallel.placement import Placed, part, placed, splits, zero_ways

PATCHES_WEIGHT = "embedding.patches"


@dataclass(frozen=True)
class Held:
    """Elements of some weights on one device: `whole` as the model uses them, `shard` of what is split over data too."""

    whole: int = 0
    shard: int = 0
    largest: int = 0  # whole elements of the largest weight

    def __add__(self, other: "Held") -> "Held":
        return Held(self.whole + other.whole, self.shard + other.shard, max(self.largest, other.largest))

    def __sub__(self, other: "Held") -> "Held":
        """Without a part of it."""
        return Held(self.whole - other.whole, self.shard - other.shard, self.largest)

    def __mul__(self, count: int) -> "Held":
        return Held(self.whole * count, self.shard * count, self.largest)


class Parts(NamedTuple):
    """What one device holds of one layer, and of the weights outside the layers, by their place in the tree."""

    block: Held
    embedding: Held
    head: Held
    tokens: Held  # of the embedding
    output: Held  # of the head: nothing where it is tied to the tokens

    @property
    def outer(self) -> Held:
        """All outside the layers."""
        return self.embedding + self.head

    @property
    def vocabulary(self) -> Held:
        return self.tokens + self.output


def held(config: Config) -> Parts:
    """What one device holds of a config's model, adapters among it."""
    return _held(*_sizes(config), False)


def trained(config: Config) -> Parts:
    """The part of it that is trained."""
    return _held(*_sizes(config), True)


Sizes = tuple[ModelConfig, MeshConfig, str, int, LoraConfig, tuple[str, ...]]


def _sizes(config: Config) -> Sizes:
    """What the weights on a device follow from. Of what is trained ZeRO shards as much in every stage from 1 on."""
    lora, trainable = config.lora, config.train.trainable
    stage = config.parallel.zero_stage if lora.rank or trainable else min(config.parallel.zero_stage, 1)
    return config.model, config.mesh, config.parallel.vocab, stage, lora, trainable


@functools.lru_cache(maxsize=65536)
def _held(model: ModelConfig, mesh: MeshConfig, vocab: str, zero: int, lora: LoraConfig, trainable: tuple[str, ...], alone: bool) -> Parts:  # fmt: skip
    """`alone`: of what is trained."""
    found, data = _of_one_layer((model, mesh, vocab, zero, lora, trainable)), mesh.shards if zero else 1

    def under(name: str) -> Held:
        chosen = [p for p in found if p.name.startswith(name) and (p.trained or not alone)]
        return _sum(Held(p.on_device(), p.on_rank(data), p.on_device()) for p in chosen)

    return Parts(*map(under, ("blocks.", "embedding.", "head.", "embedding.tokens", "head.weight")))


def _of_one_layer(sizes: Sizes) -> tuple[Placed, ...]:
    """Every weight, where each stage has a single layer."""
    model, mesh, vocab, zero, lora, trainable = sizes
    return placed(model, mesh, vocab, mesh.pipeline, zero, lora, trainable)


def _sum(parts: Iterable[Held]) -> Held:
    return functools.reduce(Held.__add__, parts, Held())


def optimizer_state(config: Config, layers: int) -> float:
    """Elements of all moments on one device with so many layers; counts and other scalars are left out."""
    block, outer = _moments(config.optimizer, *_sizes(config))
    return block * layers + outer


@functools.lru_cache(maxsize=65536)
def _moments(o: OptimizerConfig, model: ModelConfig, mesh: MeshConfig, vocab: str, zero: int, lora: LoraConfig, trainable: tuple[str, ...]) -> tuple[int, int]:  # fmt: skip
    """(of one layer, outside the layers)."""
    kind, data = OPTIMIZERS[o.name], mesh.shards if zero else 1
    found = {True: 0, False: 0}
    for weight in (p for p in _of_one_layer((model, mesh, vocab, zero, lora, trainable)) if p.trained):
        for dims in kind.moments(o, weight):
            moment = part(weight, [*range(weight.stacked), *dims], data) if kind.by_matrix else weight
            found[weight.stacked] += moment.on_rank(data)
    return found[True], found[False]


def replicated(config: Config, layers: int) -> dict[tuple[str, int], int]:
    """Elements, after ZeRO, of trained weights that are whole over model-parallel axes, by (axes, devices of the group); of `layers` layers."""
    mesh, data, found = config.mesh, zero_ways(config), dict[tuple[str, int], int]()
    for weight in (p for p in _of_one_layer(_sizes(config)) if p.trained):
        group = {axis: getattr(mesh, axis) for axis in weight.replicated if getattr(mesh, axis) > 1}
        if group:
            key = "+".join(group), math.prod(group.values())
            found[key] = found.get(key, 0) + weight.on_rank(data) * (layers if weight.stacked else 1)
    return found


def vocabulary_ways(config: Config) -> int:
    """Devices that share the vocabulary."""
    return _vocabulary_ways(config.model, config.mesh, config.parallel.vocab)


@functools.lru_cache(maxsize=4096)
def _vocabulary_ways(model: ModelConfig, mesh: MeshConfig, vocab: str) -> int:
    return math.prod(getattr(mesh, axis) for axis in splits(model, mesh, vocab)["vocab"])


def vocabulary_rows(config: Config) -> int:
    """Rows of it on one device."""
    return math.ceil(config.model.vocab_size / vocabulary_ways(config))


def tokens(config: Config) -> int:
    """Tokens of one microbatch on one data rank; of images the positions."""
    return sequences(config) * config.train.sequence_length


def labels(model: ModelConfig, tokens: int) -> int:
    """Labels of so many tokens, and rows of logits: one of each, but one of all positions of an image."""
    return tokens // (positions_of(model) or 1)


def read(model: ModelConfig, tokens: int) -> int:
    """Of so many tokens those that the head reads: all, but of images with a class token these alone."""
    return labels(model, tokens) if FAMILIES[model.family].images and model.pool == "class" else tokens


def stream(config: Config) -> int:
    """Elements of the residual stream of one microbatch on one device: 1/tensor of the sequence if sequence parallel."""
    split = config.mesh.tensor if config.parallel.sequence_parallel else 1
    return tokens(config) * config.model.d_model // split


def seen(model: ModelConfig, length: int) -> float:
    """Keys that a query of a sequence sees, as FLOPs are counted (PaLM): `length`, also where it sees those before it alone, which is
    twice their mean; over the layers, fewer in a window."""
    near = min(model.window or length, length)
    whole = model.layers // model.global_every / model.layers if model.global_every else 0.0
    return whole * length + (1 - whole) * (2 * near - near * near / length)


def itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def model_flops(config: Config) -> float:
    """FLOPs of forward and backward for one step, recomputation and rows that fill up a batch not counted
    (PaLM, appendix B: 6 N + 12 L H Q T a token; of what is frozen 4 N, since its gradient is not made). dpo's reference has a forward
    more, without adapters: 2 N + 4 L H Q T. Of an image N of the head counts once, and of the patches, which ask for no gradient, 4 N."""
    model, train = config.model, config.train
    length = train.sequence_length
    reference = 2 if train.objective == "dpo" else 0

    def of(weight: Weight) -> int:
        passes = 6 if is_trained(weight, config.lora, train.trainable) else 4
        return (passes + (0 if weight.adapter else reference)) * weight.size

    every = every_weight(model, config.lora)
    matrices = sum(of(weight) for weight in every if weight.stacked and weight.decayed)
    head = next(
        of(weight) for weight in every if weight.name == ("embedding.tokens" if model.tied_head else "head.weight")
    )
    scores = model.layers * model.heads * model.head_dim * seen(model, length)
    per_token = matrices + (12 + 2 * reference) * scores
    if not FAMILIES[model.family].images:
        return float((per_token + head) * train.global_batch_size * length)
    number, _ = patches_of(model)
    embedding = sum(of(weight) - 2 * weight.size for weight in every if weight.name == PATCHES_WEIGHT)
    return float((per_token * length + head + embedding * number) * train.global_batch_size)
