"""Sizes of what a device holds of a model, in plain numbers: the arithmetic of `parallel.layout`, without JAX.

A leaf is split over tensor and pipeline, padded where that does not divide, and with ZeRO split further over data along one
of its dimensions. All layers are alike, so sizes are of one layer and of what stands outside the layers.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshtrain.config import Config, ModelConfig

Named = tuple[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class Leaf:
    """A weight: its name and the (axis, size) of its dimensions, without the axis of layers."""

    name: str
    dims: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return math.prod(n for _, n in self.dims)


@functools.lru_cache(maxsize=256)
def leaves(model: ModelConfig) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """(weights of one layer, weights outside the layers)."""
    d, h, g = model.d_model, model.heads, model.kv_heads or model.heads
    k, f, v = model.head_dim or d // h, model.d_ff or 1, model.vocab_size
    gpt2 = model.family == "gpt2"
    embed, heads, groups, width, mlp = ("embed", d), ("heads", h), ("kv_heads", g), ("head", k), ("mlp", f)
    norms: list[Named] = [(name, (embed,)) for name in ("norm.scale", "norm.bias")[: 1 + gpt2]]
    block: list[Named] = [(f"attention_{n}", dims) for n, dims in norms] + [(f"mlp_{n}", dims) for n, dims in norms]
    block += [("q", (embed, heads, width)), ("k", (embed, groups, width)), ("v", (embed, groups, width))]
    block += [("out", (heads, width, embed)), ("up", (embed, mlp)), ("down", (mlp, embed))]
    if gpt2:
        block += [("q_bias", (heads, width)), ("k_bias", (groups, width)), ("v_bias", (groups, width))]
        block += [("out_bias", (embed,)), ("up_bias", (mlp,)), ("down_bias", (embed,))]
    else:
        block.append(("gate", (embed, mlp)))
    outer: list[Named] = [("tokens", (("vocab", v), embed))]
    if gpt2:
        outer.append(("positions", (("positions", model.max_positions or 1), embed)))
    outer += [(f"head_{n}", dims) for n, dims in norms]
    if not model.tied_head:
        outer.append(("head", (embed, ("vocab", v))))
    return tuple(Leaf(*leaf) for leaf in block), tuple(Leaf(*leaf) for leaf in outer)


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without any padding."""
    block, outer = leaves(model)
    return model.layers * sum(leaf.size for leaf in block) + sum(leaf.size for leaf in outer)


@dataclass(frozen=True)
class Held:
    """Elements of some weights on one device: `whole` as the model uses them, `shard` of what is split over data too."""

    whole: int = 0
    shard: int = 0
    largest: int = 0  # whole elements of the largest weight

    def __add__(self, other: "Held") -> "Held":
        return Held(self.whole + other.whole, self.shard + other.shard, max(self.largest, other.largest))

    def __mul__(self, count: int) -> "Held":
        return Held(self.whole * count, self.shard * count, self.largest)


def ways(model: ModelConfig, tensor: int, vocab_ways: int) -> dict[str, int]:
    """Over how many devices the axes of weights are split, without ZeRO; those that are not named are whole."""
    split_kv = (model.kv_heads or model.heads) % tensor == 0
    return {"heads": tensor, "mlp": tensor, "vocab": vocab_ways, "kv_heads": tensor if split_kv else 1}


def zero_dimension(leaf: Leaf, by_dim: Sequence[int], data: int) -> int | None:
    """The dimension that ZeRO splits, by `parallel.layout`: the largest that divides, else the free one that padding grows least,
    else none. `by_dim` is over how many devices each is split already."""
    if data == 1:
        return None
    local = [math.ceil(n / w) for (_, n), w in zip(leaf.dims, by_dim, strict=True)]
    exact = [d for d, n in enumerate(local) if n % data == 0]
    if exact:
        return max(exact, key=lambda d: local[d])
    free = [d for d, w in enumerate(by_dim) if w == 1]
    return min(free, key=lambda d: math.ceil(local[d] / data) * data / local[d], default=None)


def _held(leaf: Leaf, tensor: int, vocab_ways: int, data: int, model: ModelConfig) -> Held:
    axis_ways = ways(model, tensor, vocab_ways)
    by_dim = [axis_ways.get(axis, 1) for axis, _ in leaf.dims]
    local = [math.ceil(n / w) for (_, n), w in zip(leaf.dims, by_dim, strict=True)]
    whole = math.prod(local)
    zero = zero_dimension(leaf, by_dim, data)
    return Held(whole, whole if zero is None else whole // local[zero] * math.ceil(local[zero] / data), whole)


@functools.lru_cache(maxsize=65536)
def held(model: ModelConfig, tensor: int, vocab_ways: int, data: int) -> tuple[Held, Held, Held]:
    """What one device holds of (one layer, what stands outside the layers, the vocabulary's weights among those).

    `vocab_ways` is how many devices share the vocabulary; `data` over how many ZeRO shards (1: it does not).
    """

    def one(leaf: Leaf) -> Held:
        return _held(leaf, tensor, vocab_ways, data, model)

    block, outer = leaves(model)
    vocabulary = [leaf for leaf in outer if leaf.name in ("tokens", "head")]
    return tuple(functools.reduce(Held.__add__, map(one, group)) for group in (block, outer, vocabulary))  # type: ignore[return-value]


@functools.lru_cache(maxsize=65536)
def edge(model: ModelConfig, tensor: int, vocab_ways: int, data: int) -> dict[str, Held]:
    """What one device holds of the `embedding`, of the `head`, and of the `tokens` in the former."""
    sizes = {leaf.name: _held(leaf, tensor, vocab_ways, data, model) for leaf in leaves(model)[1]}
    embedding = [held for name, held in sizes.items() if name in ("tokens", "positions")]
    head = [held for name, held in sizes.items() if name not in ("tokens", "positions")]
    return {"embedding": functools.reduce(Held.__add__, embedding), "head": functools.reduce(Held.__add__, head), "tokens": sizes["tokens"]}  # fmt: skip


def replicated(model: ModelConfig, tensor: int, pipeline: int, stage: "Stage", data: int) -> dict[tuple[str, int], int]:
    """Elements, after ZeRO over `data`, of weights that are whole over model-parallel axes, by (axes, devices of the group)."""
    found: dict[tuple[str, int], int] = {}
    block, outer = leaves(model)
    split_kv = (model.kv_heads or model.heads) % tensor == 0
    for leaf, layers in [(leaf, stage.layers) for leaf in block] + [(leaf, 0) for leaf in outer]:
        axes = {axis for axis, _ in leaf.dims}
        over_tensor = bool(axes & {"heads", "mlp", "vocab"}) or ("kv_heads" in axes and split_kv)
        over_pipeline = layers > 0 or ("vocab" in axes and stage.vocab_ways > tensor)
        group = [(name, n) for name, n, split in (("tensor", tensor, over_tensor), ("pipeline", pipeline, over_pipeline)) if not split and n > 1]  # fmt: skip
        if group:
            key = "+".join(name for name, _ in group), math.prod(n for _, n in group)
            found[key] = found.get(key, 0) + _held(leaf, tensor, stage.vocab_ways, data, model).shard * max(layers, 1)
    return found


@dataclass(frozen=True)
class Stage:
    """How layers and vocabulary lie on the devices."""

    chunks: int  # model chunks on a device
    split: tuple[int, ...]  # layers of each virtual stage in model order
    layers: int  # layers on a device, padding counted
    longest: int  # layers of the longest virtual stage
    vocab_ways: int  # devices that share the vocabulary
    vocab_rows: int  # of it on one device


def stage(config: Config) -> Stage:
    return _stage(config.model, config.mesh.pipeline, config.mesh.tensor, config.parallel.virtual_stages, config.parallel.layer_split, config.parallel.vocab)  # fmt: skip


@functools.lru_cache(maxsize=65536)
def _stage(
    model: ModelConfig, stages: int, tensor: int, chunks: int, given: tuple[int, ...] | None, vocab: str
) -> Stage:
    chunks = chunks if stages > 1 else 1
    slots = stages * chunks
    split = tuple(model.layers // slots + (k < model.layers % slots) for k in range(slots))
    if given is not None and stages > 1:
        split = given
    ways = tensor * (stages if vocab == "spread" else 1)
    return Stage(chunks, split, max(split) * chunks, max(split), ways, math.ceil(model.vocab_size / ways))


def sequences(config: Config) -> int:
    """Sequences of one microbatch on one data rank."""
    return config.train.global_batch_size // config.mesh.data // config.parallel.microbatches


def tokens(config: Config) -> int:
    """Tokens of one microbatch on one data rank."""
    return sequences(config) * config.train.sequence_length


def stream(config: Config) -> int:
    """Elements of the residual stream of one microbatch on one device: 1/tensor of the sequence if sequence parallel."""
    split = config.mesh.tensor if config.parallel.sequence_parallel else 1
    return tokens(config) * config.model.d_model // split


def gathers_at_use(config: Config) -> bool:
    """ZeRO-3 without holding: weights are gathered layer by layer, forward and backward (`parallel.zero`)."""
    return config.parallel.zero_stage == 3 and config.mesh.data > 1 and not _holds(config)


def scatters_at_use(config: Config) -> bool:
    """ZeRO-2/3 without holding: gradients are scattered layer by layer in the backward."""
    return config.parallel.zero_stage >= 2 and config.mesh.data > 1 and not _holds(config)


def _holds(config: Config) -> bool:
    if config.parallel.zero_hold is not None:
        return config.parallel.zero_hold
    return config.parallel.zero_stage < 3 and (config.parallel.microbatches > 1 or config.mesh.pipeline > 1)


def zero_ways(config: Config) -> int:
    """Over how many devices ZeRO shards masters and optimizer state."""
    return config.mesh.data if config.parallel.zero_stage else 1


def itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def model_flops(config: Config) -> float:
    """FLOPs of forward and backward for one step, recomputation not counted (PaLM, appendix B: 6 N + 12 L H Q T a token)."""
    model, train = config.model, config.train
    block, _ = leaves(model)
    matrices = sum(leaf.size for leaf in block if len(leaf.dims) > 1 and "bias" not in leaf.name) * model.layers
    head = model.d_model * model.vocab_size
    width = model.heads * (model.head_dim or 1)
    per_token = 6 * (matrices + head) + 12 * model.layers * width * train.sequence_length
    return float(per_token * train.global_batch_size * train.sequence_length)


def replaced(config: Config, **sections: dict) -> Config:
    """The config with some keys of some sections changed: replaced(config, mesh={"data": 2}).

    A few times as fast as `dataclasses.replace`, which searches notice.
    """
    held = vars(config)
    changed = {name: type(held[name])(**(vars(held[name]) | keys)) for name, keys in sections.items()}
    return Config(**(held | changed))
