"""The place of each weight on a mesh, in plain numbers: split over tensor and pipeline, padded where sizes don't
divide, ZeRO over data.

    axis       split over                                    padded
    layers     pipeline                                      each virtual stage to the longest
    heads      tensor                                        never: tensor divides them
    kv_heads   tensor, or nothing where it does not divide   never
    mlp        tensor                                        to a multiple
    joined     tensor                                        never: tensor divides them
    vocab      pipeline x tensor, or tensor (vocab: edge)    to a multiple
    patch      as vocab                                      to a multiple
    experts    expert, context, tensor (see expert_axes)     never: they divide them
    others     nothing

ZeRO then splits one dimension more over data (the ranks of an island): the largest that data divides, else a whole one,
padded. No JAX: `layout` makes arrays of it, and the planner adds it up.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshtrain.config.auto import sends_parts
from meshtrain.config.follow import round_up
from meshtrain.config.mesh import PIPELINE, TENSOR, MeshAxes, MeshConfig
from meshtrain.config.model import LoraConfig, ModelConfig
from meshtrain.config.reduce import sends_by_table
from meshtrain.config.schema import Config
from meshtrain.config.stacks import is_uniform, stack_of, stack_of_layers
from meshtrain.errors import ConfigError, nearest, short
from meshtrain.model.weights import Weight, all_weights, is_trained, weights
from meshtrain.schedule.generators import SCHEDULES, make_table, with_sends
from meshtrain.schedule.table import Table, turned

Shape = tuple[int, ...]
Stacks = tuple[str, ...]  # one for each layer, or slot
NO_LORA = LoraConfig()
BUCKETS = 8
# context ranks whose maps of states are gathered; those of more travel by doubling distances (`row_pieces`)
MOST_GATHERED = 8


@dataclass(frozen=True)
class Placed:
    """An array of the state on a mesh: a weight, or what an optimizer keeps of one."""

    name: str
    axes: MeshAxes
    shape: Shape  # canonical
    whole: Shape  # live, over all devices, as the model uses it
    # live, as it is held: longer along zero_dim where zero_degree does not divide it
    padded: Shape
    # Per dimension, the mesh axes that split it, without ZeRO
    over: tuple[MeshAxes, ...]
    ways: Shape  # per dimension, the devices along those axes
    # The dimension that ZeRO splits further, over zero_axes; None: not sharded over them
    zero_dim: int | None
    # The mesh axes of an island along which tokens are split and the weight is not: its gradient is summed over them,
    # and they are ZeRO's.
    zero_axes: MeshAxes = ()
    zero_degree: int = 1  # the devices along them
    decayed: bool = True
    # Else frozen: no gradient, no optimizer state, no float32 master
    trained: bool = True
    float32: bool = False  # see `model.weights.Weight`; so `counts`
    counts: bool = False

    @property
    def updated(self) -> bool:
        """Returns whether the optimizer changes it."""
        return self.trained and not self.counts

    @property
    def stacked(self) -> bool:
        """Returns whether the first axis counts layers."""
        return self.axes[0] == "layers"

    @property
    def stack(self) -> str:
        """The stack of its layers, of a stacked one."""
        return stack_of(self.name)

    @property
    def adapter(self) -> bool:
        """Returns whether it is one of LoRA's."""
        return "rank" in self.axes

    @property
    def unpadded(self) -> Shape:
        """The shape without padding but for that of the layers, which are in their live places."""
        if self.stacked:
            return (self.padded[0], *self.shape[1:])
        return self.shape

    @property
    def replicated(self) -> MeshAxes:
        """Model-parallel axes over which it is whole, so that partial gradients are summed over them."""
        return unused((TENSOR, PIPELINE), self.over)

    @property
    def shard_over(self) -> tuple[MeshAxes, ...]:
        """Per dimension, the mesh axes that split it as it is held: with those of ZeRO."""
        return tuple(
            (*axes, *self.zero_axes) if d == self.zero_dim else axes
            for d, axes in enumerate(self.over)
        )

    def on_device(self) -> int:
        """Elements on one device as the model uses it."""
        sizes = zip(self.whole, self.ways, strict=True)
        return math.prod(size // devices for size, devices in sizes)

    def on_rank(self) -> int:
        """Elements on one device as it is held."""
        elements = math.prod(
            n // w for n, w in zip(self.padded, self.ways, strict=True)
        )
        if self.zero_dim is None:
            return elements
        return elements // self.zero_degree


def unused(axes: Iterable[str], over: Sequence[MeshAxes]) -> MeshAxes:
    """The mesh axes that split no dimension."""
    return tuple(axis for axis in axes if not any(axis in split for split in over))


def local_kv_heads(kv_heads: int, tensor: int) -> int:
    """Key and value heads on a tensor rank: its share, or all of them where tensor does not divide them."""
    if kv_heads % tensor:
        return kv_heads
    return kv_heads // tensor


def expert_axes(config: Config) -> MeshAxes:
    """The mesh axes that the experts of a layer lie over, major first.

    Tensor is one of them where rows are sent to their experts and sequence parallelism splits them: then each tensor
    rank sends its own, in place of all of them sending the same, and an expert's products are of its whole width.
    """
    axes = config.mesh.expert_axes
    if (
        axes
        and config.parallel.experts.dispatch == "all_to_all"
        and sends_parts(config)
    ):
        return (*axes, TENSOR)
    return axes


def expert_ranks(config: Config) -> int:
    """The devices that share the experts of a layer."""
    return _devices(config.mesh, expert_axes(config))


def expert_nodes(config: Config) -> int:
    """The nodes that these lie on, between which rows travel once: 1 where each row goes to each of its experts."""
    return expert_ranks(config) // (
        config.parallel.experts.ranks_per_node or expert_ranks(config)
    )


def splits(
    model: ModelConfig, mesh: MeshConfig, vocab: str, experts: MeshAxes = ()
) -> dict[str, MeshAxes]:
    """The mesh axes over which each named axis of a weight is split, major first; axes not listed are whole everywhere.

    `experts`: those of `expert_axes`, by default without tensor.
    """
    vocabulary = (PIPELINE, TENSOR) if vocab == "spread" else (TENSOR,)
    split_kv = (
        local_kv_heads(model.kv_heads, mesh.tensor) * mesh.tensor == model.kv_heads
    )
    return {
        "layers": (PIPELINE,),
        "heads": (TENSOR,),
        "kv_heads": (TENSOR,) if split_kv else (),
        "mlp": (TENSOR,),
        "joined": (TENSOR,),
        "vocab": vocabulary,
        "patch": vocabulary,
        "experts": experts or mesh.expert_axes,
    }


def place(
    weight: Weight,
    over: Mapping[str, MeshAxes],
    mesh: MeshConfig,
    places: int,
    zero: bool,
    trained: bool = True,
) -> Placed:
    """A weight on a mesh with `places` live places for its layers; `zero`: sharded over the axes along which tokens are
    split.
    """
    split = tuple(over.get(axis, ()) for axis in weight.axes)
    # what splits the experts splits nothing within them
    split = tuple(unused(axes, split[:d]) for d, axes in enumerate(split))
    ways = tuple(_devices(mesh, axes) for axes in split)
    sizes = zip(weight.axes, weight.shape, ways, strict=True)
    whole = [places if axis == "layers" else round_up(n, w) for axis, n, w in sizes]
    padded = list(whole)
    zero_dim = None
    zero_axes = unused(mesh.token_axes(across=False), split)
    degree = _devices(mesh, zero_axes)
    if zero and degree > 1 and not weight.counts:
        dims = range(weight.stacked, len(whole))
        local = {d: whole[d] // ways[d] for d in dims}
        zero_dim = _choose_zero_dim(local, ways, degree)
        if zero_dim is not None:
            padded[zero_dim] = round_up(local[zero_dim], degree) * ways[zero_dim]
    return Placed(
        weight.name,
        weight.axes,
        weight.shape,
        whole=tuple(whole),
        padded=tuple(padded),
        over=split,
        ways=ways,
        zero_dim=zero_dim,
        zero_axes=zero_axes,
        zero_degree=degree,
        decayed=weight.decayed,
        trained=trained,
        float32=weight.float32,
        counts=weight.counts,
    )


def _choose_zero_dim(
    local: Mapping[int, int], ways: Sequence[int], degree: int
) -> int | None:
    """Returns the dimension that `degree` ranks shard: the longest that divides, else the one that padding lengthens
    least; None if there is none. `local`: lengths on a device, `ways`: the devices that split each.
    """
    exact = [d for d in local if local[d] % degree == 0]
    if exact:
        return max(exact, key=lambda d: local[d])
    # Padding inside a tensor rank's share would tear it apart.
    free = [d for d in local if ways[d] == 1]

    def lengthening(d: int) -> float:
        return round_up(local[d], degree) / local[d]

    return min(free, key=lengthening, default=None)


def part(placed: Placed, dims: Sequence[int], more: int = 0) -> Placed:
    """An array with the dimensions `dims` of a weight alone, unpadded, and `more` of size 1: split as that is where it
    divides.
    """
    live = tuple(placed.unpadded[d] for d in dims)
    over: tuple[MeshAxes, ...] = ()
    ways: Shape = ()
    for d, length in zip(dims, live, strict=True):
        divides = length % placed.ways[d] == 0
        over += (placed.over[d] if divides else (),)
        ways += (placed.ways[d] if divides else 1,)
    zero_dim = None
    if placed.zero_dim is not None and placed.zero_dim in dims:
        at = dims.index(placed.zero_dim)
        shards = placed.ways[placed.zero_dim] * placed.zero_degree
        if live[at] % shards == 0:
            zero_dim = at
    ones = (1,) * more
    axes = tuple(placed.axes[d] for d in dims)
    shape = tuple(placed.shape[d] for d in dims)
    return Placed(
        placed.name,
        axes + ("one",) * more,
        shape + ones,
        live + ones,
        live + ones,
        over + ((),) * more,
        ways + ones,
        zero_dim,
        placed.zero_axes,
        placed.zero_degree,
        placed.decayed,
        placed.trained,
    )


@functools.lru_cache(maxsize=4096)
def placed(
    model: ModelConfig,
    mesh: MeshConfig,
    vocab: str,
    places: tuple[tuple[str, int], ...],
    zero_stage: int,
    lora: LoraConfig = NO_LORA,
    trainable: tuple[str, ...] = (),
    experts: MeshAxes = (),
) -> tuple[Placed, ...]:
    """Every weight of a model on a mesh, see `place`; `places` has those of each stack. ConfigError where `trainable`
    names a weight that does not exist.

    A frozen weight has neither a gradient nor an optimizer's state to shard: ZeRO-3 alone shards it, since it shards
    weights.
    """
    over = splits(model, mesh, vocab, experts)
    every = all_weights(model, lora)
    for pattern in trainable:
        if not any(is_trained(weight, lora, (pattern,)) for weight in weights(model)):
            names = [weight.name for weight in weights(model)]
            ending = nearest(pattern, names) or "."
            raise ConfigError(
                f"train.trainable has {short(repr(pattern))}, which no weight is called; they are {names[0]}, "
                f"{names[1]} ... {names[-1]}{ending}"
            )
    by_stack = dict(places)
    weights_placed = []
    for weight in every:
        trained = is_trained(weight, lora, trainable)
        sharded = zero_stage >= (1 if trained else 3)
        layers = by_stack.get(stack_of(weight.name), 0)
        weights_placed.append(place(weight, over, mesh, layers, sharded, trained))
    return tuple(weights_placed)


@dataclass(frozen=True)
class Stages:
    """Returns how the layers are assigned to the virtual stages.

    A virtual stage has slots of kinds, the same on all, since all run one program. Its layers take the first slots that
    they fit into, in order; the others are padding. Layers of one kind have as many slots as the longest
    stage has layers.

        slots                     dense  blocks  blocks  blocks
        virtual stage 0             0       1       2       ·
        virtual stage 1             ·       3       4       5

    Weights of several kinds have no more places than a device has layers of their kind; its chunks share them, but
    where products are in float8.
    """

    counts: tuple[int, ...]  # layers of each virtual stage, in model order
    chunks: int  # virtual stages on a device
    slots: Stacks  # of a virtual stage: the stacks that their layers are of
    # Of several stacks: the most layers that a device has
    held: tuple[tuple[str, int], ...] = ()

    @property
    def longest(self) -> int:
        """The slots of a virtual stage, padding counted."""
        return len(self.slots)

    def places(self, stack: str) -> int:
        """Returns the layers of a stack that a device has places for."""
        return dict(self.held).get(stack, self.slots.count(stack) * self.chunks)

    @property
    def on_device(self) -> int:
        """Layers that a device has places for."""
        return sum(n for _, n in self.held) or self.longest * self.chunks


def stages(config: Config) -> Stages:
    """As parallel.layer_split asks for, else as even as can be, longer ones first, or last where that takes fewer
    slots; cut at the periods of a pattern where there are enough of them.
    """
    parallel = config.parallel
    model = config.model
    pipeline = config.mesh.pipeline
    period = len(model.pattern) or 1
    kinds = stack_of_layers(model)
    # in float8 some layers of a stack have arrays that others lack, chunk by chunk
    placement = None
    if config.precision.matmul == "compute":
        placement = "loop"
    if (
        placement
        and pipeline > 1
        and parallel.virtual_stages > 1
        and not is_uniform(model)
    ):
        named = SCHEDULES.get(parallel.schedule)
        sizes = pipeline, parallel.microbatches, parallel.virtual_stages
        placement = (named or make_table(parallel.schedule, *sizes)).placement
    return _stages(
        kinds,
        period,
        pipeline,
        parallel.virtual_stages,
        parallel.layer_split,
        placement,
    )


@functools.lru_cache(maxsize=65536)
def _stages(
    kinds: Stacks,
    period: int,
    pipeline: int,
    chunks: int,
    layer_split: tuple[int, ...] | None,
    placement: str | None,
) -> Stages:
    layers = len(kinds)
    if pipeline == 1:
        return Stages((layers,), 1, kinds)
    virtual = pipeline * chunks
    if layers % period or layers // period < virtual:
        period = 1
    each, more = divmod(layers // period, virtual)
    even = tuple(period * (each + (k < more)) for k in range(virtual))
    if len({*kinds}) == 1:
        counts = layer_split or even
        return Stages(counts, chunks, kinds[: max(counts)])
    splits = [layer_split] if layer_split else [even, even[::-1]]
    candidates = [_stacks_of(kinds, counts) for counts in splits]
    stacks = min(candidates, key=lambda stacks: len(_slots_of(stacks)))
    slots = _slots_of(stacks)
    if placement is None:
        return Stages(tuple(map(len, stacks)), chunks, slots)
    on_stages: list[list[str]] = [[] for _ in range(pipeline)]
    for k, here in enumerate(stacks):
        on_stages[turned(placement, pipeline, *divmod(k, pipeline))] += here
    held = [
        (stack, max(here.count(stack) for here in on_stages))
        for stack in dict.fromkeys(slots)
    ]
    return Stages(tuple(map(len, stacks)), chunks, slots, tuple(held))


def _stacks_of(kinds: Stacks, counts: tuple[int, ...]) -> list[Stacks]:
    """Returns the stacks of the layers of each virtual stage, of so many layers each."""
    ends = itertools.accumulate(counts)
    return [kinds[end - n : end] for end, n in zip(ends, counts, strict=True)]


def _slots_of(stacks: list[Stacks]) -> Stacks:
    return functools.reduce(_slots_of_both, dict.fromkeys(stacks))


def _slots_of_both(one: Stacks, other: Stacks) -> Stacks:
    """Returns the shortest sequence of kinds that has both in it, in their order: a common supersequence."""
    best: dict[tuple[int, int], Stacks] = {}
    ends_of_one = range(len(one), -1, -1)
    ends_of_other = range(len(other), -1, -1)
    for i, j in itertools.product(ends_of_one, ends_of_other):
        if i == len(one) or j == len(other):
            best[i, j] = one[i:] + other[j:]
        elif one[i] == other[j]:
            rest = best[i + 1, j + 1]
            best[i, j] = (one[i], *rest)
        else:
            from_one = (one[i], *best[i + 1, j])
            from_other = (other[j], *best[i, j + 1])
            best[i, j] = min(from_one, from_other, key=len)
    return best[0, 0]


def slots_of_stages(config: Config) -> list[list[int]]:
    """Returns for each virtual stage the layer in each of its slots, -1 for padding."""
    assigned = stages(config)
    kinds = stack_of_layers(config.model)
    layer = 0
    rows = []
    for count in assigned.counts:
        behind = layer + count
        row = []
        for kind in assigned.slots:
            here = layer < behind and kinds[layer] == kind
            row.append(layer if here else -1)
            layer += here
        rows.append(row)
    return rows


def all_placed(config: Config) -> tuple[Placed, ...]:
    """Every weight of a config, in the order of `model.weights`."""
    assigned = stages(config)
    parallel = config.parallel
    places = {
        stack: config.mesh.pipeline * assigned.places(stack)
        for stack in sorted({*assigned.slots})
    }
    return placed(
        config.model,
        config.mesh,
        parallel.vocab,
        tuple(places.items()),
        parallel.zero_stage,
        config.lora,
        config.train.trainable,
        expert_axes(config),
    )


def zero_ways(config: Config) -> int:
    """Returns over how many devices ZeRO shards masters and optimizer state."""
    return config.mesh.shards if config.parallel.zero_stage else 1


def table(config: Config) -> Table:
    """The table of a config's schedule: with G and R where it says when they are sent over data.

    ConfigError for one that cannot run.
    """
    parallel = config.parallel
    made = make_table(
        parallel.schedule,
        config.mesh.pipeline,
        parallel.microbatches,
        stages(config).chunks,
    )
    if made.has_sends == sends_by_table(config):
        return made
    if made.has_sends:
        return made.drop_sends()
    return with_sends(made)


def buckets(layers: int) -> list[tuple[int, int]]:
    """(first, one behind the last) of the layers whose gradients are reduced together during the backward, where there
    is one stage.

    More buckets would have more travel under compute, and take longer to compile.
    """
    ends = [layers * i // BUCKETS for i in range(BUCKETS + 1)]
    return [
        (first, behind) for first, behind in itertools.pairwise(ends) if behind > first
    ]


def notes(config: Config) -> list[str]:
    """Returns what a mesh pads or cannot split, and the cost, a sentence each."""
    model = config.model
    mesh = config.mesh
    parallel = config.parallel
    notes = []
    over = splits(model, mesh, parallel.vocab)
    if not over["kv_heads"]:
        notes.append(
            f"model.kv_heads {model.kv_heads} does not divide over mesh.tensor {mesh.tensor}: every tensor rank holds "
            "all key and value heads."
        )
    for name, size, axis in (
        ("model.d_ff", model.d_ff, "mlp"),
        ("model.vocab_size", model.vocab_size, "vocab"),
    ):
        ways = _devices(mesh, over[axis])
        if (padded := round_up(size, ways)) > size:
            notes.append(
                f"{name} {size} does not divide over {ways} devices: padded to {padded}, {padded / size - 1:.1%} more "
                "work there."
            )
    assigned = stages(config)
    places = len(assigned.counts) * assigned.longest
    if model.layers < places and parallel.layer_split is None:
        notes.append(
            f"model.layers {model.layers} does not fill {len(assigned.counts)} stages evenly: the longest "
            f"has {assigned.longest} places, so {1 - model.layers / places:.0%} of the stages' time is idle."
        )
    return [*notes, *_shard_notes(config)]


def _shard_notes(config: Config) -> Iterator[str]:
    """Yields a sentence on each weight that is padded for ZeRO, or that it cannot shard."""
    data = zero_ways(config)
    for weight in all_placed(config):
        padded = math.prod(weight.padded)
        used = math.prod(weight.whole)
        if padded > used:
            yield (
                f"{weight.name} {weight.shape} is padded to {weight.padded} so that data {data} divides it: "
                f"{padded / used - 1:.1%} more."
            )
        is_split = weight.zero_dim is not None or weight.zero_degree == 1
        if config.parallel.zero_stage and weight.updated and not is_split:
            yield (
                f"{weight.name} {weight.shape} cannot be sharded over data {data}: "
                f"{4 * used:,} bytes stay on every data rank, for the master and for each optimizer moment."
            )


def _devices(mesh: MeshConfig, axes: Collection[str]) -> int:
    return math.prod(mesh.ways(axis) for axis in axes)
