"""The mesh: the section `mesh`, and the names of its axes.

Data is cut into islands of equal size; `MeshConfig.shape` has the axes of the mesh that follows.

    data 4, islands 2:      island 0   data 0, 1        links within an island are fast,
                            island 1   data 0, 1        those across are slow
    data 2, context 2:      data 0     context 0, 1     each data rank's rows are cut along the sequence over
                            data 1     context 0, 1     its context ranks (see `parallel.context`)
    data 4, expert 2:       data 0     expert 0, 1      the ranks of expert have rows of their own, and share the
                            data 1     expert 0, 1      experts of a layer between them (see `parallel.experts`)
    data 2, context 2, expert 4: more than data has, so that all context ranks of 4 / 2 data ranks share them; the axis
                            expert is of these data ranks alone
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshtrain.config.key import key
from meshtrain.errors import ConfigError, listed_divisors, nearest, short

MeshAxes = tuple[str, ...]

DATA, TENSOR, PIPELINE = AXES = ("data", "tensor", "pipeline")
ISLAND = "island"
EXPERT = "expert"
CONTEXT = "context"
ALL_AXES = (ISLAND, DATA, EXPERT, CONTEXT, TENSOR, PIPELINE)
ORDER = (ISLAND, PIPELINE, DATA, TENSOR)  # outermost first


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class MeshConfig:
    data: int = key(
        1, "data-parallel replicas; ZeRO shards state over this axis, or over its part in an island",
        least=1
    )
    tensor: int = key(1, "tensor-parallel ranks: heads, d_ff and vocabulary are split over this axis", least=1)
    pipeline: int = key(1, "pipeline stages: layers are split over this axis", least=1)
    islands: int = key(
        1, "islands that data consists of, with slow links between them: ZeRO shards within each, and each has all of "
           "the state (HSDP)", least=1
    )
    context: int = key(
        1, "context-parallel ranks: the tokens of a row are split over this axis, and ZeRO shards state over it too; "
           "the row must divide by twice as many",
        least=1
    )
    expert: int = key(
        1, "ranks that share the experts of a layer between them, a part of data, or of data with all of context: the "
           "rows that choose an expert travel to its rank", least=1
    )
    order: tuple[str, ...] = key(
        ORDER, "axes in the order in which devices are numbered, the outermost first: neighbours talk over the last "
               f"one; legal are {', '.join(ORDER)}; "
        "context may stand among them, else it is next to tensor, outside of it; and expert, else inside data"
    )
    cluster: str | None = key(
        None, "a cluster file with a device_order, as the probe writes it where links join other devices than JAX "
              "numbers as neighbours: the mesh takes them so", path=True
    )

    @classmethod
    def make(cls, sizes: Mapping[str, int]) -> "MeshConfig":
        """Makes the section from the axes of a mesh and their sizes, as `shape` has them."""
        islands = sizes.get(ISLAND, 1)
        expert = sizes.get(EXPERT, 1)
        data = sizes[DATA] * islands * expert
        return cls(data, sizes[TENSOR], sizes[PIPELINE], islands, sizes.get(CONTEXT, 1), expert)

    @classmethod
    def read(cls, text: str, axes: tuple[str, ...] = (*AXES, "islands"), why: str = ".") -> "MeshConfig":
        """Reads data=2,tensor=4 of these axes: what is not named is 1.

        ConfigError, with `why` others are not legal, for another text.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in axes:
                legal = nearest(name, axes) or f"; legal are {', '.join(axes)}{why}"
                raise ConfigError(f"--mesh {short(text)}: there is no axis {short(repr(name))}{legal}")
            if name in sizes:
                raise ConfigError(f"--mesh {short(text)}: {name} is given twice.")
            if not re.fullmatch("[1-9][0-9]{0,6}", number):
                raise ConfigError(f"--mesh: {name} is {short(repr(number))}; it must be a whole number of at least 1.")
            sizes[name] = int(number)
        mesh = cls(**sizes)  # type: ignore[arg-type]
        check(mesh)
        return mesh

    @property
    def devices(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def shards(self) -> int:
        """Devices that ZeRO shards state over: the data ranks of an island times the context ranks."""
        return self.data // self.islands * self.context

    @property
    def shape(self) -> dict[str, int]:
        """The axes of the mesh and their sizes: islands, expert and context only where there are several."""
        optional = {axis: n for axis in (ISLAND, EXPERT, CONTEXT) if (n := self.ways(axis)) > 1}
        sizes = {DATA: self.ways(DATA), TENSOR: self.tensor, PIPELINE: self.pipeline} | optional
        return {axis: sizes[axis] for axis in ALL_AXES if axis in sizes}

    @property
    def axes(self) -> MeshAxes:
        return tuple(self.shape)

    @property
    def data_axes(self) -> MeshAxes:
        """The axes over which the rows of a batch are split, major first."""
        is_split = lambda axis: axis == DATA or self.ways(axis) > 1
        return tuple(filter(is_split, (ISLAND, DATA, EXPERT)))

    @property
    def folds_experts(self) -> bool:
        """Says whether experts lie over context too: data has not as many ranks as share them."""
        return self.data // self.islands % self.expert > 0

    @property
    def expert_axes(self) -> MeshAxes:
        """The axes that experts lie over, major first, without tensor."""
        axes = (EXPERT, CONTEXT) if self.folds_experts else (EXPERT,)
        return tuple(axis for axis in axes if self.ways(axis) > 1)

    @property
    def splits_layers(self) -> bool:
        """Says whether the devices of a layer send each other messages in every microbatch."""
        return self.tensor * self.expert * self.context > 1

    def token_axes(self, across: bool = True) -> MeshAxes:
        """Returns the axes along which the tokens of a batch are split, major first; without `across` those of an
        island alone.
        """
        context = (CONTEXT,) if self.context > 1 else ()
        return tuple(axis for axis in (*self.data_axes, *context) if across or axis != ISLAND)

    def ways(self, axis: str) -> int:
        """Devices along an axis, 1 for one that the mesh lacks."""
        if axis == DATA:
            return self.data // self.islands // self.ways(EXPERT)
        if axis == EXPERT:
            if self.folds_experts:
                return max(1, self.expert // self.context)
            return self.expert
        size: int = self.islands if axis == ISLAND else getattr(self, axis, 1)
        return size

    def stride(self, axis: str) -> int:
        """Returns how far apart in the numbering of devices two neighbours along an axis are."""
        order = self.every_axis_in_order
        return math.prod(self.ways(inner) for inner in order[order.index(axis) + 1 :])

    @property
    def every_axis_in_order(self) -> MeshAxes:
        """`order`, with expert and context."""
        order = list(self.order)
        for axis, outside in ((CONTEXT, order.index(TENSOR)), (EXPERT, order.index(DATA) + 1)):
            if axis not in order:
                order.insert(outside, axis)
        return tuple(order)

    def __str__(self) -> str:
        named = [axis for axis in self.axes if axis not in (ISLAND, EXPERT)]
        words = " x ".join(f"{axis} {getattr(self, axis)}" for axis in named)
        words += f", expert {self.expert}" if self.expert > 1 else ""
        if self.islands > 1:
            return f"{words}, {self.islands} islands"
        return words
# fmt: on


def problems(mesh: MeshConfig) -> Iterator[str]:
    """Yields a sentence on islands and expert ranks that data cannot be cut into, and on an order that is none of the
    axes.
    """
    if mesh.data % mesh.islands:
        legal = listed_divisors(mesh.data)
        yield f"mesh.islands {mesh.islands} does not divide mesh.data {mesh.data}; legal are {legal}."
    must_be = f"it must be {', '.join(ORDER)} in any order"
    for axis in mesh.order:
        if axis not in ALL_AXES:
            yield f"mesh.order has {short(repr(axis))}; {must_be}{nearest(axis, ORDER) or '.'}"
    ranks = mesh.data // mesh.islands
    if mesh.folds_experts and (mesh.expert % mesh.context or ranks % mesh.ways(EXPERT)):
        of_island = f"mesh.data {ranks}"
        if mesh.islands > 1:
            of_island = f"the {ranks} data ranks of an island"
        legal = listed_divisors(ranks)
        if mesh.context > 1:
            legal += f", and mesh.context {mesh.context} times one of them"
        yield f"mesh.expert {mesh.expert} does not divide {of_island}; legal are {legal}."
    named = set(mesh.order)
    if len(named) < len(mesh.order) or not set(ORDER) <= named <= set(ALL_AXES):
        yield f"mesh.order is [{', '.join(mesh.order)}]; {must_be}, each once."


def check(mesh: MeshConfig) -> None:
    """Raises ConfigError for a section that contradicts itself."""
    for sentence in problems(mesh):
        raise ConfigError(sentence)
