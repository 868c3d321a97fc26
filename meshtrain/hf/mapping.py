"""Our weights in Hugging Face's tensors: which tensor holds a weight (`meshtrain.hf_families`), and where and how its
numbers lie in it.

    layout     theirs                                          ours
    plain      as ours, heads and their widths in one axis      [H, K], [D] ...
    linear     [out, in] (torch.nn.Linear): transposed          [in, out], the heads' side cut into [H, K]
    third k    [in, 3 out] (GPT-2's Conv1D): the k-th third     [in, H, K]
    patches    [out, channel, row, column] (torch.nn.Conv2d)    [(row, column, channel), out]
    experts    E tensors [out, in]                              [E, in, out]
    merged     as ours, of all experts                          [E, in, out], [E, out]
    alternating k   [..., 2 out] (gpt-oss): every second one, from the k-th on
    stacked    [E, out, in] of all experts                     [E, in, out]
    half k     [E, 2 out, in]: the k-th half                   [E, in, out]
    rows       [heads x rows of a head, (1,) in]: some of each  [in, H, K], [in, H]
    turned k   linear, whose last k outputs (of each head) are  [in, out], [in, H, K]
               pairs (2i, 2i + 1)
    joined k   [H (K + V), in]: of each head the keys' rows,    [in, H, K], [in, H, V]
               then the values'

RoPE turns the pairs (i, i + K/2) in their files as it does here, so nothing is permuted but DeepSeek's (Llama's own
release has them otherwise).
No JAX: `meshtrain.hf.loading` reads boxes of these, `meshtrain.adopt.exporting` writes them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.config.model import ModelConfig
from meshtrain.config.stacks import (
    BLOCKS,
    layers_of_stacks,
    model_of_stack,
    stack_of_layers,
)
from meshtrain.hf.hf_directory import TensorFiles
from meshtrain.hf_families import WeightName, hf_family
from meshtrain.model.weights import COUNTED, Weight, weights

LINEAR = ("linear", "turned")
ABSENT = -1
Box = tuple[slice, ...]  # of one layer's weight, a slice a dimension
Shape = tuple[int, ...]
# Returns one layer's full weight as ours, in any dtype.
Source = Callable[[Weight, int | None], np.ndarray]


@dataclass(frozen=True)
class TensorMapping:
    """A weight of ours and the tensor that holds it."""

    weight: Weight
    name: WeightName
    layers: tuple[int, ...] = ()  # of the model, that are stacked

    def at(self, layer: int | None) -> int | None:
        """Returns the place of a layer of the model in the stack, ABSENT if it has none; None outside of layers."""
        if (layer is None) == self.weight.stacked:
            return ABSENT
        if layer is None:
            return None
        return self.layers.index(layer) if layer in self.layers else ABSENT

    def tensors(self, layer: int | None) -> list[str]:
        """Returns the names of the tensors that hold it, of one layer of its stack where the weight is stacked."""
        return [
            self.name.theirs
            if layer is None
            else self.name.theirs.format(self.layers[layer])
        ]

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        """Returns a box of our weight, of one layer, in its tensor's dtype."""
        (name,) = self.tensors(layer)
        return self.cut(box, files.read(name, self.box(box)))

    @property
    def numbers(self) -> int:
        """Numbers of our weight, of one layer, in each of its tensors."""
        return math.prod(n for _, n in self.weight.dims)

    def shape(self) -> Shape:
        """Returns the shape of each of its tensors, of one layer."""
        *inner, last = (math.prod(side) for side in self._sides())
        if self.name.layout == "third":
            last *= 3
        if self.name.layout in LINEAR:
            return (last, *inner)
        return (1,) * self.name.ones + (*inner, last)

    def box(self, box: Box) -> Box:
        """Returns the slices of the tensor that hold a box of our weight; `cut` takes the box out of them."""
        slices = []
        dimension = 0
        for side in self._sides():
            width = math.prod(side[1:])
            slices.append(
                slice(box[dimension].start * width, box[dimension].stop * width)
            )
            dimension += len(side)
        if self.name.layout == "third":
            before = self.name.part * math.prod(self._sides()[-1])
            slices[-1] = slice(before + slices[-1].start, before + slices[-1].stop)
        if self.name.layout in LINEAR:
            return tuple(reversed(slices))
        return (slice(0, 1),) * self.name.ones + tuple(slices)

    def outer(self) -> Shape:
        """Returns our dimensions that are the outer ones of theirs: boxes along the last of them are contiguous in
        their file.
        """
        return (len(self._sides()[0]) if self.name.layout in LINEAR else 0,)

    def cut(self, box: Box, tensor: np.ndarray) -> np.ndarray:
        """Returns a box of our weight from the slices of the tensor that `self.box(box)` names."""
        shape: list[int] = []
        rest: list[slice] = []
        for side in self._sides():
            first = box[len(rest)]
            shape += [first.stop - first.start, *side[1:]]
            rest += [slice(None), *box[len(rest) + 1 : len(rest) + len(side)]]
        return (tensor.T if self.name.layout in LINEAR else tensor).reshape(shape)[
            tuple(rest)
        ]

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        """Returns one of the tensors of one layer's full weight; of thirds this one alone."""
        array = ours.reshape([math.prod(side) for side in self._sides()])
        if self.name.layout in LINEAR:
            return array.T
        return array.reshape((1,) * self.name.ones + array.shape)

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor that holds what `converted` gave of several weights, of which this is one."""
        return np.concatenate(arrays, -1)

    def _sides(self) -> list[list[int]]:
        """Returns the sizes of our dimensions by the dimension of their tensor that they make up: of a product its
        inputs, then its outputs.
        """
        axes = [axis for axis, _ in self.weight.dims]
        sizes = [n for _, n in self.weight.dims]
        if (
            axes[-1] == "head" and len(axes) == 2
        ):  # a bias of heads, or the scales of a norm over all of them
            return [sizes]
        if len(axes) == 3:
            if axes[1] == "head":
                return [sizes[:2], sizes[2:]]
            return [sizes[:1], sizes[1:]]
        return [[n] for n in sizes]


@dataclass(frozen=True)
class PatchMapping(TensorMapping):
    """The embedding of patches as a product, and the convolution whose stride is its width that holds it."""

    size: int = 1  # pixels of a patch's side

    def shape(self) -> Shape:
        (_, numbers), (_, width) = self.weight.dims
        return (width, numbers // self.size**2, self.size, self.size)

    def box(self, box: Box) -> Box:
        """Returns all of each kernel, since a box of a patch's numbers is not one of theirs."""
        return (box[1], *(slice(0, n) for n in self.shape()[1:]))

    def outer(self) -> Shape:
        return (1,)

    def cut(self, box: Box, tensor: np.ndarray) -> np.ndarray:
        return tensor.transpose(2, 3, 1, 0).reshape(-1, len(tensor))[box[0]]

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        width, channels, rows, columns = self.shape()
        return ours.reshape(rows, columns, channels, width).transpose(3, 2, 0, 1)


class ExpertMapping(TensorMapping):
    """The matrices of all experts of a layer, and the tensors that hold one of them each."""

    def tensors(self, layer: int | None) -> list[str]:
        # those of further predictions have their number in the name
        number = None if layer is None else self.layers[layer]
        return [
            self.name.theirs.format(number, expert)
            for expert in range(self.weight.dims[0][1])
        ]

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        experts, inputs, outputs = box
        return np.stack(
            [
                files.read(name, (outputs, inputs)).T
                for name in self.tensors(layer)[experts]
            ]
        )

    @property
    def numbers(self) -> int:
        return math.prod(self.shape())

    def shape(self) -> Shape:
        _, (_, inputs), (_, outputs) = self.weight.dims
        return (outputs, inputs)

    def outer(self) -> Shape:
        return (0, 2)

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        return ours[tensor].T


class MergedMapping(TensorMapping):
    """A weight of all experts of a layer in one tensor, its last dimension alternating with that of another weight or
    not.
    """

    @property
    def parts(self) -> int:
        return 2 if self.name.layout == "alternating" else 1

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        (name,), last = (
            self.tensors(layer),
            slice(box[-1].start * self.parts, box[-1].stop * self.parts),
        )
        return files.read(name, (*box[:-1], last))[..., self.name.part :: self.parts]

    def shape(self) -> Shape:
        *outer, (_, last) = self.weight.dims
        return (*(n for _, n in outer), last * self.parts)

    def outer(self) -> Shape:
        return tuple(range(len(self.weight.dims) - 1))

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        return ours

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(arrays, -1).reshape(self.shape())


class StackedMapping(TensorMapping):
    """The matrices of all experts of a layer in one tensor, which may be half of each of its matrices."""

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        (name,) = self.tensors(layer)
        (experts, inputs, outputs) = box
        before = self.name.part * self.weight.dims[-1][1]
        rows = slice(before + outputs.start, before + outputs.stop)
        return files.read(name, (experts, rows, inputs)).swapaxes(1, 2)

    def shape(self) -> Shape:
        (_, experts), (_, inputs), (_, outputs) = self.weight.dims
        return (experts, outputs * (2 if self.name.layout == "half" else 1), inputs)

    def outer(self) -> Shape:
        return (0, 2)


class RowsMapping(TensorMapping):
    """A weight whose outputs are some of the rows of each of its tensor's heads (`WeightName.rows`)."""

    @property
    def each(self) -> int:
        """The rows of a head that are ours."""
        return math.prod(n for _, n in self.weight.dims[1:]) // self.name.rows[0]

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        (name,) = self.tensors(layer)
        (_, _), (_, _), *widths = self.weight.dims
        width = widths[0][1] if widths else 1
        _, rows, first = self.name.rows
        start, stop = (end * width for end in (box[1].start, box[1].stop))
        heads = range(start // self.each, -(-stop // self.each))
        shape = self.shape()
        between = (slice(0, 1),) * (len(shape) - 2)
        parts = []
        for head in heads:
            ours = slice(
                max(start - head * self.each, 0),
                min(stop - head * self.each, self.each),
            )
            before = head * rows + first
            at = slice(before + ours.start, before + ours.stop)
            parts.append(files.read(name, (at, *between, box[0])))
        array = np.concatenate(parts).reshape(stop - start, -1).T
        array = array.reshape(-1, box[1].stop - box[1].start, *(n for _, n in widths))
        return array[(slice(None), slice(None), *box[2:])]

    def shape(self) -> Shape:
        heads, rows, _ = self.name.rows
        (axis, inputs), *_ = self.weight.dims
        # of a convolution over channels apart
        return (heads * rows, *(1,) * (axis == "conv"), inputs)

    def outer(self) -> Shape:
        return (1,)

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        heads = self.name.rows[0]
        return ours.reshape(len(ours), heads, -1).transpose(1, 2, 0)

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays, 1).reshape(self.shape())


@dataclass(frozen=True)
class TurnedMapping(TensorMapping):
    """A product whose last outputs are turned in neighbouring pairs in their files, here in pairs half a width apart:
    of each head, where there are heads.
    """

    @property
    def order(self) -> np.ndarray:
        """The place in their tensor of each of our outputs along the last dimension."""
        width = self.weight.dims[-1][1]
        turned = np.arange(width - self.name.part, width)
        return np.concatenate(
            [np.arange(width - self.name.part), turned[::2], turned[1::2]]
        )

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        all_outputs = (*box[:-1], slice(0, self.weight.dims[-1][1]))
        return super().read(files, layer, all_outputs)[..., self.order[box[-1]]]

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        return super().converted(ours[..., np.argsort(self.order)])


@dataclass(frozen=True)
class JoinedMapping(TensorMapping):
    """Keys or values from latents, whose rows lie beside one another in their tensor, head by head."""

    widths: tuple[int, int] = (0, 0)  # of a head's keys and values there

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        (name,) = self.tensors(layer)
        latents, heads, own = box
        both = sum(self.widths)
        rows = files.read(name, (slice(heads.start * both, heads.stop * both), latents))
        before = self.name.part * self.widths[0]
        by_head = rows.reshape(-1, both, rows.shape[-1])[
            :, before + own.start : before + own.stop
        ]
        return by_head.transpose(2, 0, 1)

    def shape(self) -> Shape:
        (_, latents), (_, heads), _ = self.weight.dims
        return (heads * sum(self.widths), latents)

    def outer(self) -> Shape:
        return (1,)

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        return ours.transpose(1, 2, 0)

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays, 1).reshape(self.shape())


class LoadMapping(TensorMapping):
    """The load of a layer's experts, of which their files have the bias that is added to scores."""

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        (name,) = self.tensors(layer)
        bias = files.tensor(name).astype(np.float32)
        return np.pad(bias, (0, COUNTED))[box]

    def shape(self) -> Shape:
        return (self.numbers,)

    @property
    def numbers(self) -> int:
        return super().numbers - COUNTED

    def converted(self, ours: np.ndarray, tensor: int = 0) -> np.ndarray:
        return ours[:-COUNTED]


MAPPINGS = {
    "rows": RowsMapping,
    "experts": ExpertMapping,
    "merged": MergedMapping,
    "alternating": MergedMapping,
    "stacked": StackedMapping,
    "half": StackedMapping,
    "turned": TurnedMapping,
    "load": LoadMapping,
}


class NoTensor(TensorMapping):
    """The load of a layer's experts, which their files do not have and which begins with zeros."""

    def tensors(self, layer: int | None) -> list[str]:
        return []

    def read(self, files: TensorFiles, layer: int | None, box: Box) -> np.ndarray:
        return np.zeros([s.stop - s.start for s in box], np.float32)


def mappings(
    model: ModelConfig, files: TensorFiles | None = None
) -> dict[str, TensorMapping]:
    """Returns the mapping of each weight by our name, of a resolved config's model: as they are written or, with files,
    as these have them.
    """
    stacks = layers_of_stacks(model)
    family = hf_family(model.family)
    merged = (
        any(".experts.gate_up_proj" in name for name in files.names) if files else False
    )
    by_stack = {}
    for stack in stacks:
        fields = vars(model_of_stack(model, stack))
        by_stack[stack] = {name.ours: name for name in family.names(fields)}
        if merged and family.in_memory:
            by_stack[stack] |= {name.ours: name for name in family.in_memory(fields)}

    def mapping(weight: Weight) -> TensorMapping:
        stack, _, ours = weight.name.partition(".")
        layers = stacks.get(stack, ())
        by_name = by_stack[stack if layers else stack_of_layers(model)[-1]]
        known = f"{BLOCKS}.{ours}" if layers else weight.name
        if weight.counts and known not in by_name:
            return NoTensor(weight, WeightName(weight.name, ""), layers)
        name = by_name[known]
        if name.layout == "patches":
            return PatchMapping(weight, name, layers, model.patch_size)
        if name.layout == "joined":
            return JoinedMapping(
                weight, name, layers, (model.mla.nope, model.mla.value)
            )
        return MAPPINGS.get(name.layout, TensorMapping)(weight, name, layers)

    return {weight.name: mapping(weight) for weight in weights(model)}


def full_box(weight: Weight) -> Box:
    return tuple(slice(0, n) for _, n in weight.dims)


def layers(weight: Weight) -> Sequence[int | None]:
    """Returns the layers of a stacked weight; of another only None."""
    return range(weight.layers) if weight.stacked else (None,)
