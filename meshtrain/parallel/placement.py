"""Where each weight lies on a mesh, in plain numbers: split over tensor and pipeline, padded where sizes don't divide, ZeRO over data.

    axis       split over                                    padded
    layers     pipeline                                      each virtual stage to the longest
    heads      tensor                                        never: tensor divides them
    kv_heads   tensor, or nothing where it does not divide   never
    mlp        tensor                                        to a multiple
    vocab      pipeline x tensor, or tensor (vocab: edge)    to a multiple
    patch      as vocab                                      to a multiple
    others     nothing

ZeRO then splits one dimension more over data (the ranks of an island): the largest that data divides, else a whole one, padded. No JAX: `layout` makes arrays
of it, and the planner adds it up.
"""

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshtrain.config.model import LoraConfig, ModelConfig
from meshtrain.config.reduce import keeps
from meshtrain.config.reduce import scatters_at_use as scatters_at_use
from meshtrain.config.rows import filled_up
from meshtrain.config.schema import PIPELINE, TENSOR, Config, MeshConfig
from meshtrain.errors import ConfigError, nearest, short
from meshtrain.model.weights import Weight, every_weight, is_trained, weights

NO_LORA = LoraConfig()
BUCKETS = 8


@dataclass(frozen=True)
class Placed:
    """An array of the state on a mesh: a weight, or what an optimizer keeps of one."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]  # canonical
    whole: tuple[int, ...]  # live, over all devices, as the model uses it
    padded: tuple[int, ...]  # live, as it is held: longer along zero_dim where data does not divide it
    over: tuple[tuple[str, ...], ...]  # per dimension, the mesh axes that split it, without ZeRO
    ways: tuple[int, ...]  # per dimension, the devices along those axes
    zero_dim: int | None  # the dimension that ZeRO splits further, over data; None: not sharded over data
    decayed: bool = True
    trained: bool = True  # else frozen: no gradient, no optimizer state, no float32 master

    @property
    def stacked(self) -> bool:
        """Whether the first axis counts layers."""
        return self.axes[0] == "layers"

    @property
    def adapter(self) -> bool:
        """Whether it is one of LoRA's."""
        return "rank" in self.axes

    @property
    def unpadded(self) -> tuple[int, ...]:
        """The shape without padding but for that of the layers, which are in their live places."""
        return (self.padded[0], *self.shape[1:]) if self.stacked else self.shape

    @property
    def replicated(self) -> tuple[str, ...]:
        """Model-parallel axes over which it is whole, so that partial gradients are summed over them."""
        used = {axis for axes in self.over for axis in axes}
        return tuple(axis for axis in (TENSOR, PIPELINE) if axis not in used)

    def on_device(self) -> int:
        """Elements on one device as the model uses it."""
        return math.prod(n // w for n, w in zip(self.whole, self.ways, strict=True))

    def on_rank(self, data: int) -> int:
        """Elements on one device as it is held, where ZeRO shards over `data` ranks."""
        held = math.prod(n // w for n, w in zip(self.padded, self.ways, strict=True))
        return held if self.zero_dim is None else held // data


def splits(model: ModelConfig, mesh: MeshConfig, vocab: str) -> dict[str, tuple[str, ...]]:
    """The mesh axes over which each named axis of a weight is split, major first; axes not listed are whole everywhere."""
    vocabulary = (PIPELINE, TENSOR) if vocab == "spread" else (TENSOR,)
    return {
        "layers": (PIPELINE,),
        "heads": (TENSOR,),
        "kv_heads": (TENSOR,) if model.kv_heads % mesh.tensor == 0 else (),
        "mlp": (TENSOR,),
        "vocab": vocabulary,
        "patch": vocabulary,
    }


def place(
    weight: Weight,
    over: Mapping[str, tuple[str, ...]],
    mesh: MeshConfig,
    places: int,
    zero: bool,
    trained: bool = True,
) -> Placed:
    """A weight on a mesh with `places` live places for its layers; `zero`: sharded over data."""
    split = tuple(over.get(axis, ()) for axis in weight.axes)
    ways = tuple(_devices(mesh, axes) for axes in split)
    sizes = zip(weight.axes, weight.shape, ways, strict=True)
    whole = [places if axis == "layers" else filled_up(n, w) for axis, n, w in sizes]
    padded, zero_dim, data = list(whole), None, mesh.shards
    if zero and data > 1:
        local = {d: whole[d] // ways[d] for d in range(weight.stacked, len(whole))}
        exact = [d for d in local if local[d] % data == 0]
        # Padding inside a tensor rank's share would tear it apart.
        free = [d for d in local if ways[d] == 1]
        if exact:
            zero_dim = max(exact, key=lambda d: local[d])
        elif free:
            zero_dim = min(free, key=lambda d: filled_up(local[d], data) / local[d])
            padded[zero_dim] = filled_up(local[zero_dim], data)
    return Placed(
        weight.name, weight.axes, weight.shape, tuple(whole), tuple(padded), split, ways, zero_dim, weight.decayed, trained
    )  # fmt: skip


def part(placed: Placed, kept: Sequence[int], data: int, more: int = 0) -> Placed:
    """An array with the dimensions `kept` of a weight alone, unpadded, and `more` of size 1: split as that is where it divides."""
    live = tuple(placed.unpadded[d] for d in kept)
    divides = [n % placed.ways[d] == 0 for d, n in zip(kept, live, strict=True)]
    over = tuple(placed.over[d] if fits else () for d, fits in zip(kept, divides, strict=True))
    ways = tuple(placed.ways[d] if fits else 1 for d, fits in zip(kept, divides, strict=True))
    zero_dim = None
    if placed.zero_dim is not None and placed.zero_dim in kept:
        at = kept.index(placed.zero_dim)
        zero_dim = at if live[at] % (placed.ways[placed.zero_dim] * data) == 0 else None
    ones = (1,) * more
    axes = tuple(placed.axes[d] for d in kept) + ("one",) * more
    shape = tuple(placed.shape[d] for d in kept) + ones
    return Placed(
        placed.name, axes, shape, live + ones, live + ones, over + ((),) * more, ways + ones, zero_dim, placed.decayed, placed.trained
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def placed(
    model: ModelConfig,
    mesh: MeshConfig,
    vocab: str,
    places: int,
    zero_stage: int,
    lora: LoraConfig = NO_LORA,
    trainable: tuple[str, ...] = (),
) -> tuple[Placed, ...]:
    """Every weight of a model on a mesh, see `place`. ConfigError where a name of `trainable` is no weight's.

    Of what is frozen there is neither a gradient nor an optimizer's state to shard: ZeRO-3 alone shards it, since it shards weights.
    """
    over, every = splits(model, mesh, vocab), every_weight(model, lora)
    for pattern in trainable:
        if not any(is_trained(weight, lora, (pattern,)) for weight in weights(model)):
            names = [weight.name for weight in weights(model)]
            raise ConfigError(
                f"train.trainable has {short(repr(pattern))}, which no weight is called; they are {names[0]}, {names[1]} ... {names[-1]}"
                + (nearest(pattern, names) or ".")
            )
    found = []
    for weight in every:
        trained = is_trained(weight, lora, trainable)
        found.append(place(weight, over, mesh, places, zero_stage >= (1 if trained else 3), trained))
    return tuple(found)


@dataclass(frozen=True)
class Stages:
    """How the layers are dealt out to the virtual stages."""

    counts: tuple[int, ...]  # layers of each virtual stage, in model order
    chunks: int  # virtual stages on a device

    @functools.cached_property
    def longest(self) -> int:
        """Layers of the longest virtual stage, to which the others are padded."""
        return max(self.counts)

    @property
    def on_device(self) -> int:
        """Layers on a device, padding counted."""
        return self.longest * self.chunks


def stages(config: Config) -> Stages:
    """As parallel.layer_split asks for, else as even as can be, longer ones first."""
    parallel, pipeline = config.parallel, config.mesh.pipeline
    return _stages(config.model.layers, pipeline, parallel.virtual_stages, parallel.layer_split)


@functools.lru_cache(maxsize=65536)
def _stages(layers: int, pipeline: int, chunks: int, given: tuple[int, ...] | None) -> Stages:
    if pipeline == 1:
        return Stages((layers,), 1)
    virtual = pipeline * chunks
    return Stages(given or tuple(layers // virtual + (k < layers % virtual) for k in range(virtual)), chunks)


def all_placed(config: Config) -> tuple[Placed, ...]:
    """Every weight of a config, in the order of `model.weights`."""
    places, parallel = config.mesh.pipeline * stages(config).on_device, config.parallel
    return placed(
        config.model, config.mesh, parallel.vocab, places, parallel.zero_stage, config.lora, config.train.trainable
    )


def zero_ways(config: Config) -> int:
    """Over how many devices ZeRO shards masters and optimizer state."""
    return config.mesh.shards if config.parallel.zero_stage else 1


def gathers_at_use(config: Config) -> bool:
    """ZeRO-3 without holding: weights are gathered where they are used, forward and backward (see `zero`)."""
    return config.parallel.zero_stage == 3 and config.mesh.shards > 1 and not config.parallel.zero_hold


def closes_early(config: Config) -> bool:
    """Gradients that are held over the step are scattered over data as soon as they are complete, while the device goes on (see `zero`).

    A compression with a memory needs one reduction of all of a weight's gradient. With several islands the second sum has to wait for
    the first, and XLA then hides neither.
    """
    scatters = config.parallel.zero_stage > 0 and config.mesh.data > 1 and config.mesh.islands == 1
    return scatters and not scatters_at_use(config) and not keeps(config)


def buckets(layers: int) -> list[tuple[int, int]]:
    """(first, one behind the last) of the layers whose gradients are closed early together, where there is one stage.

    More buckets would have more travel under compute, and take longer to compile.
    """
    ends = [layers * i // BUCKETS for i in range(BUCKETS + 1)]
    return [(first, behind) for first, behind in itertools.pairwise(ends) if behind > first]


def notes(config: Config) -> list[str]:
    """What a mesh pads or cannot split, and what it costs, a sentence each."""
    return [*_split_notes(config), *_zero_notes(config)]


def _split_notes(config: Config) -> list[str]:
    """Of tensor and pipeline."""
    model, mesh, parallel, found = config.model, config.mesh, config.parallel, []
    over = splits(model, mesh, parallel.vocab)
    if not over["kv_heads"]:
        found.append(
            f"model.kv_heads {model.kv_heads} does not divide over mesh.tensor {mesh.tensor}: every tensor rank holds all key and value heads."
        )
    for name, size, axis in (("model.d_ff", model.d_ff, "mlp"), ("model.vocab_size", model.vocab_size, "vocab")):
        ways = _devices(mesh, over[axis])
        if (padded := filled_up(size, ways)) > size:
            found.append(
                f"{name} {size} does not divide over {ways} devices: padded to {padded}, {padded / size - 1:.1%} more work there."
            )
    dealt = stages(config)
    places = len(dealt.counts) * dealt.longest
    if model.layers < places and parallel.layer_split is None:
        found.append(
            f"model.layers {model.layers} does not divide over {len(dealt.counts)} stages: the longest has {dealt.longest}, "
            f"so {1 - model.layers / places:.0%} of the stages' time is idle."
        )
    return found


def _zero_notes(config: Config) -> list[str]:
    """Of ZeRO."""
    found, data = [], zero_ways(config)
    for weight in all_placed(config):
        held, used = math.prod(weight.padded), math.prod(weight.whole)
        if held > used:
            found.append(
                f"{weight.name} {weight.shape} is padded to {weight.padded} so that data {data} divides it: {held / used - 1:.1%} more."
            )
        if weight.zero_dim is None and data > 1 and weight.trained:
            found.append(
                f"{weight.name} {weight.shape} cannot be sharded over data {data}: "
                f"{4 * used:,} bytes stay on every data rank, for the master and for each optimizer moment."
            )
    return found


def _devices(mesh: MeshConfig, axes: Collection[str]) -> int:
    return math.prod(mesh.ways(axis) for axis in axes)
