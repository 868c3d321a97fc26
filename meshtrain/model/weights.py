"""Every weight of a decoder, in one table without JAX: its name, the axes of its dimensions, its shape, how it begins.

The modules of `model` make their parameters from it, `parallel.placement` says where each lies on a mesh, the planner counts them,
and checkpoints name them. The blocks' weights are stacked along a first axis `layers`, whatever the mesh.
"""

import functools
import math
from dataclasses import dataclass

from meshtrain.config.schema import ModelConfig
from meshtrain.families import FAMILIES

BLOCKS = "blocks."


@dataclass(frozen=True)
class Weight:
    """One weight of the canonical layout."""

    name: str  # its path in the tree of parameters
    dims: tuple[tuple[str, int], ...]  # (axis, size) of each dimension, of one layer
    std: float  # of its normal initialisation; 0: all are `fill`
    fill: float = 0.0
    layers: int = 0  # that are stacked; 0: it stands outside the blocks

    @property
    def stacked(self) -> bool:
        return self.layers > 0

    @property
    def axes(self) -> tuple[str, ...]:
        return ("layers",) * self.stacked + tuple(axis for axis, _ in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.layers,) * self.stacked + tuple(n for _, n in self.dims)

    @property
    def size(self) -> int:
        """Elements, of all layers."""
        return math.prod(self.shape)

    @property
    def decayed(self) -> bool:
        """Weight decay applies: to matrices, which begin at random, not to norms and biases."""
        return self.std > 0


@functools.lru_cache(maxsize=256)
def weights(model: ModelConfig) -> tuple[Weight, ...]:
    """The weights of a resolved config's model. A module draws its own in this order, so that a seed gives the same numbers for ever."""
    family, std = FAMILIES[model.family], model.init_std
    into_stream = std / (2 * model.layers) ** 0.5
    embed, heads, groups = ("embed", model.d_model), ("heads", model.heads), ("kv_heads", model.kv_heads)
    head, mlp, vocab = ("head", model.head_dim), ("mlp", model.d_ff), ("vocab", model.vocab_size)
    found: list[Weight] = []

    def add(name: str, dims: tuple[tuple[str, int], ...], std: float = 0.0, fill: float = 0.0) -> None:
        found.append(Weight(name, dims, std, fill, model.layers if name.startswith(BLOCKS) else 0))

    def norm(name: str) -> None:
        add(f"{name}.scale", (embed,), fill=1.0)
        if family.centred_norms:
            add(f"{name}.bias", (embed,))

    add("embedding.tokens", (vocab, embed), std)
    if family.positions == "learned":
        add("embedding.positions", (("positions", model.max_positions), embed), std)

    norm("blocks.attention_norm")
    add("blocks.attention.q", (embed, heads, head), std)
    add("blocks.attention.k", (embed, groups, head), std)
    add("blocks.attention.v", (embed, groups, head), std)
    add("blocks.attention.out", (heads, head, embed), into_stream)
    if family.biases:
        add("blocks.attention.q_bias", (heads, head))
        add("blocks.attention.k_bias", (groups, head))
        add("blocks.attention.v_bias", (groups, head))
        add("blocks.attention.out_bias", (embed,))

    norm("blocks.mlp_norm")
    if family.gated:
        add("blocks.mlp.gate", (embed, mlp), std)
    add("blocks.mlp.up", (embed, mlp), std)
    add("blocks.mlp.down", (mlp, embed), into_stream)
    if family.biases:
        add("blocks.mlp.up_bias", (mlp,))
        add("blocks.mlp.down_bias", (embed,))

    norm("head.norm")
    if not model.tied_head:
        add("head.weight", (embed, vocab), std)
    return tuple(found)


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without any padding."""
    return sum(weight.size for weight in weights(model))
