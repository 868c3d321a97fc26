"""Hugging Face's names for our weights, and how the numbers lie in each: one row a weight, both ways.

    way        theirs                                          ours
    plain      as ours, heads and their widths in one axis      [H, K], [D] ...
    linear     [out, in] (torch.nn.Linear): transposed          [in, out], the heads' side cut into [H, K]
    third k    [in, 3 out] (GPT-2's Conv1D): the k-th third     [in, H, K]
    Patches    [out, channel, row, column] (torch.nn.Conv2d)    [(row, column, channel), out]

RoPE turns the pairs (i, i + K/2) in their files as it does here, so nothing is ever permuted (Llama's own release has them otherwise).
No JAX: `meshtrain.adopt.files` reads boxes of these, `meshtrain.adopt.writing` writes them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshtrain.config.model import ModelConfig
from meshtrain.families import FAMILIES
from meshtrain.model.weights import Weight, weights

Way = Literal["plain", "linear", "third"]
Box = tuple[slice, ...]  # of one layer's weight, a slice a dimension
Source = Callable[[Weight, int | None], np.ndarray]  # gives one layer's whole weight as ours, in any dtype


@dataclass(frozen=True)
class Row:
    """One weight. `theirs` has {} where the layer's number stands."""

    ours: str
    theirs: str
    way: Way = "plain"
    third: int = 0
    ones: int = 0  # of the way plain: dimensions of size 1 that theirs has before

    def name(self, layer: int | None) -> str:
        """Their name, of one layer where it is stacked."""
        return self.theirs if layer is None else self.theirs.format(layer)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """Of their tensor, of one layer."""
        *inner, last = (math.prod(side) for side in sides(weight))
        if self.way == "third":
            last *= 3
        return (last, *inner) if self.way == "linear" else (1,) * self.ones + (*inner, last)

    def box(self, weight: Weight, box: Box) -> Box:
        """The slices of their tensor that hold a box of our weight; `cut` takes it out of what they choose."""
        found, at = [], 0
        for side in sides(weight):
            within = math.prod(side[1:])
            found.append(slice(box[at].start * within, box[at].stop * within))
            at += len(side)
        if self.way == "third":
            before = self.third * math.prod(sides(weight)[-1])
            found[-1] = slice(before + found[-1].start, before + found[-1].stop)
        return tuple(reversed(found)) if self.way == "linear" else (slice(0, 1),) * self.ones + tuple(found)

    def first(self, weight: Weight) -> int:
        """Our dimension that is the outer one of theirs: boxes along it lie in one piece of their file."""
        return len(sides(weight)[0]) if self.way == "linear" else 0

    def cut(self, weight: Weight, box: Box, theirs: np.ndarray) -> np.ndarray:
        """A box of our weight from the slices of their tensor that `box` tells."""
        shape: list[int] = []
        rest: list[slice] = []
        for side in sides(weight):
            first = box[len(rest)]
            shape += [first.stop - first.start, *side[1:]]
            rest += [slice(None), *box[len(rest) + 1 : len(rest) + len(side)]]
        return (theirs.T if self.way == "linear" else theirs).reshape(shape)[tuple(rest)]

    def made(self, weight: Weight, ours: np.ndarray) -> np.ndarray:
        """Their tensor of one layer's whole weight; of thirds this one alone."""
        array = ours.reshape([math.prod(side) for side in sides(weight)])
        return array.T if self.way == "linear" else array.reshape((1,) * self.ones + array.shape)


@dataclass(frozen=True)
class Patches(Row):
    """The embedding of patches of so many pixels in height and width: their convolution, whose stride is its width, as a product."""

    size: int = 0

    def shape(self, weight: Weight) -> tuple[int, ...]:
        (_, numbers), (_, width) = weight.dims
        return (width, numbers // self.size**2, self.size, self.size)

    def box(self, weight: Weight, box: Box) -> Box:
        """All of each kernel: a box of the numbers of a patch is none of theirs."""
        return (box[1], *(slice(0, n) for n in self.shape(weight)[1:]))

    def first(self, weight: Weight) -> int:
        return 1

    def cut(self, weight: Weight, box: Box, theirs: np.ndarray) -> np.ndarray:
        return theirs.transpose(2, 3, 1, 0).reshape(-1, len(theirs))[box[0]]

    def made(self, weight: Weight, ours: np.ndarray) -> np.ndarray:
        width, channels, rows, columns = self.shape(weight)
        return ours.reshape(rows, columns, channels, width).transpose(3, 2, 0, 1)


def sides(weight: Weight) -> list[list[int]]:
    """The sizes of our dimensions by the dimension of their tensor that they make up: of a product its inputs, then its outputs."""
    axes, sizes = [axis for axis, _ in weight.dims], [n for _, n in weight.dims]
    if axes[-1] == "head" and len(axes) == 2:  # a bias of heads
        return [sizes]
    if len(axes) == 3:
        return [sizes[:2], sizes[2:]] if axes[1] == "head" else [sizes[:1], sizes[1:]]
    return [[n] for n in sizes]


def rows(model: ModelConfig) -> dict[str, Row]:
    """By our names, of a resolved config's model."""
    family = FAMILIES[model.family]
    if family.images:
        named = _vit(model.patch_size)
    else:
        named = _gpt2() if family.positions == "learned" else _llama(model.post_norms)
    found = {row.ours: row for row in named}
    return {weight.name: found[weight.name] for weight in weights(model)}


def _llama(post_norms: bool) -> Iterator[Row]:
    """LlamaForCausalLM, and what has its names: Mistral, Qwen2, Qwen3; Gemma 2 and 3, where two of the norms have others."""
    layer = "model.layers.{}."
    yield Row("embedding.tokens", "model.embed_tokens.weight")
    yield Row("blocks.attention_norm.scale", f"{layer}input_layernorm.weight")
    if post_norms:
        yield Row("blocks.attention_post_norm.scale", f"{layer}post_attention_layernorm.weight")
        yield Row("blocks.mlp_norm.scale", f"{layer}pre_feedforward_layernorm.weight")
        yield Row("blocks.mlp_post_norm.scale", f"{layer}post_feedforward_layernorm.weight")
    else:
        yield Row("blocks.mlp_norm.scale", f"{layer}post_attention_layernorm.weight")
    for ours in "qkv":
        yield Row(f"blocks.attention.{ours}", f"{layer}self_attn.{ours}_proj.weight", "linear")
        yield Row(f"blocks.attention.{ours}_bias", f"{layer}self_attn.{ours}_proj.bias")
    yield Row("blocks.attention.out", f"{layer}self_attn.o_proj.weight", "linear")
    yield Row("blocks.attention.q_norm.scale", f"{layer}self_attn.q_norm.weight")
    yield Row("blocks.attention.k_norm.scale", f"{layer}self_attn.k_norm.weight")
    for ours in ("gate", "up", "down"):
        yield Row(f"blocks.mlp.{ours}", f"{layer}mlp.{ours}_proj.weight", "linear")
    yield Row("head.norm.scale", "model.norm.weight")
    yield Row("head.weight", "lm_head.weight", "linear")


def _gpt2() -> Iterator[Row]:
    """GPT2LMHeadModel, whose Conv1D holds [in, out] as we do."""
    layer = "transformer.h.{}."
    yield Row("embedding.tokens", "transformer.wte.weight")
    yield Row("embedding.positions", "transformer.wpe.weight")
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        yield Row(f"blocks.{ours}.scale", f"{layer}{theirs}.weight")
        yield Row(f"blocks.{ours}.bias", f"{layer}{theirs}.bias")
    for third, ours in enumerate("qkv"):
        yield Row(f"blocks.attention.{ours}", f"{layer}attn.c_attn.weight", "third", third)
        yield Row(f"blocks.attention.{ours}_bias", f"{layer}attn.c_attn.bias", "third", third)
    for ours, theirs in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
        yield Row(f"blocks.{ours}", f"{layer}{theirs}.weight")
        yield Row(f"blocks.{ours}_bias", f"{layer}{theirs}.bias")
    yield Row("head.norm.scale", "transformer.ln_f.weight")
    yield Row("head.norm.bias", "transformer.ln_f.bias")
    yield Row("head.weight", "lm_head.weight", "linear")


def _vit(patch_size: int) -> Iterator[Row]:
    """ViTForImageClassification: the names in its files, which transformers 4 has in memory too, and 5 others."""
    layer = "vit.encoder.layer.{}."
    embeddings = "vit.embeddings."
    yield Patches("embedding.patches", f"{embeddings}patch_embeddings.projection.weight", size=patch_size)
    yield Row("embedding.bias", f"{embeddings}patch_embeddings.projection.bias")
    yield Row("embedding.class_token", f"{embeddings}cls_token", ones=2)
    yield Row("embedding.positions", f"{embeddings}position_embeddings", ones=1)
    for ours, theirs in (("attention_norm", "layernorm_before"), ("mlp_norm", "layernorm_after")):
        yield Row(f"blocks.{ours}.scale", f"{layer}{theirs}.weight")
        yield Row(f"blocks.{ours}.bias", f"{layer}{theirs}.bias")
    for ours, theirs in (
        ("attention.q", "attention.attention.query"), ("attention.k", "attention.attention.key"), ("attention.v", "attention.attention.value"),
        ("attention.out", "attention.output.dense"), ("mlp.up", "intermediate.dense"), ("mlp.down", "output.dense"),
    ):  # fmt: skip
        yield Row(f"blocks.{ours}", f"{layer}{theirs}.weight", "linear")
        yield Row(f"blocks.{ours}_bias", f"{layer}{theirs}.bias")
    yield Row("head.norm.scale", "vit.layernorm.weight")
    yield Row("head.norm.bias", "vit.layernorm.bias")
    yield Row("head.weight", "classifier.weight", "linear")
    yield Row("head.bias", "classifier.bias")


def whole(weight: Weight) -> Box:
    """The box that is all of one layer's weight."""
    return tuple(slice(0, n) for _, n in weight.dims)


def layers(weight: Weight) -> Sequence[int | None]:
    """The layers of a stacked weight; of another only None."""
    return range(weight.layers) if weight.stacked else (None,)
