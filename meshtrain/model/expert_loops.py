"""The products of experts as one loop over the blocks in use: how a layer of experts is computed where no kernels do
it.

    forward               a block's rows, read in place ─► gate and up ─► hidden x weight ─► down; tokens sum slots
    gradient of rows      gate and up once more, and back; what the next loop multiplies lies in slots
    gradient of weights   sums over the blocks of each expert; a loop of its own, since a zero-bubble schedule has it in
                          another half

There is room for more rows than come. To write and read arrays of that length takes as long as the products, so that
none is kept for the backward: rows are, as they came.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.compat import vary, varying
from meshtrain.model.grouped import block_of, dot, map_blocks, sums_by_expert
from meshtrain.model.slots import ExpertSlots, summed, taken

Hidden = Callable[[jax.Array, jax.Array], jax.Array]


class LoopedWeights(NamedTuple):
    """The weights of experts, and their biases where there are any."""

    gate: jax.Array  # [E, D, F]
    up: jax.Array  # [E, D, F]
    down: jax.Array  # [E, F, D]
    gate_bias: jax.Array | None  # [E, F]
    up_bias: jax.Array | None  # [E, F]
    down_bias: jax.Array | None  # [E, D]


class OneExpert(NamedTuple):
    """Returns the weights of one expert, gate beside up: one product of both is faster than two."""

    into: jax.Array  # [D, 2 F]
    down: jax.Array  # [F, D]
    into_bias: jax.Array | None  # [2 F]
    down_bias: jax.Array | None  # [D]


def looped(
    hidden: Hidden,
    weights: LoopedWeights,
    rows_ND: jax.Array,
    weights_NK: jax.Array,
    slots: ExpertSlots,
) -> jax.Array:
    """Returns [N, D] in the rows' dtype: what experts make of the rows in their slots, times the weights and summed
    over K.

    Products are summed in float32, and so are the weights' gradients, in the blocks' order.
    """
    operands = weights, rows_ND, weights_NK, slots
    return _looped(
        hidden,
        *vary(
            operands, frozenset[str]().union(*map(varying, jax.tree.leaves(operands)))
        ),
    )


def weighted_hidden(hidden: Hidden, weights: jax.Array, *into: jax.Array) -> jax.Array:
    """Returns what goes into the last product, of gate beside up [S, 2 F], or of each: hidden activations [S, F] times
    the weights [S, 1] of their slots.
    """
    gate, up = into if len(into) > 1 else jnp.split(into[0], 2, axis=1)
    return hidden(gate, up) * weights.astype(gate.dtype)


class _Blocks(NamedTuple):
    """Returns the values that a loop reads for block i."""

    weights: LoopedWeights
    rows: jax.Array
    weights_NK: jax.Array
    slots: ExpertSlots

    @property
    def length(self) -> int:
        return len(self.slots.pairs) // len(self.slots.expert_of_block)

    def take_rows(self, x_ND: jax.Array, i: jax.Array) -> jax.Array:
        return taken(
            x_ND, block_of(self.slots.pairs, i, self.length) // self.weights_NK.shape[1]
        )

    def weight(self, i: jax.Array) -> jax.Array:
        return taken(
            self.weights_NK.reshape(-1, 1), block_of(self.slots.pairs, i, self.length)
        )


def _one(weights: LoopedWeights) -> OneExpert:
    gate, up, down, gate_bias, up_bias, down_bias = weights
    into_bias = (
        None
        if gate_bias is None or up_bias is None
        else jnp.concatenate([gate_bias, up_bias])
    )
    return OneExpert(jnp.concatenate([gate, up], 1), down, into_bias, down_bias)


def _into(expert: OneExpert, x: jax.Array) -> jax.Array:
    """Gate beside up, [L, 2 F]."""
    y = dot(x, expert.into, 1, 0)
    return (y if expert.into_bias is None else y + expert.into_bias).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _looped(
    hidden: Hidden,
    weights: LoopedWeights,
    rows: jax.Array,
    weights_NK: jax.Array,
    slots: ExpertSlots,
) -> jax.Array:
    blocks = _Blocks(weights, rows, weights_NK, slots)

    def block(own: LoopedWeights, i: jax.Array) -> jax.Array:
        expert = _one(own)
        weight = blocks.weight(i)
        y = dot(
            weighted_hidden(hidden, weight, _into(expert, blocks.take_rows(rows, i))),
            expert.down,
            1,
            0,
        )
        return (
            y if expert.down_bias is None else y + weight * expert.down_bias
        ).astype(rows.dtype)

    return summed(
        map_blocks(block, weights, slots.expert_of_block, slots.blocks), slots.places
    )


def _backward(
    hidden: Hidden, operands: Any, g_ND: jax.Array
) -> tuple[LoopedWeights, jax.Array, jax.Array, None]:
    blocks = _Blocks(*operands)
    weights, rows, _, slots = blocks

    def differentiate_rows(
        own: LoopedWeights, i: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        expert = _one(own)
        g = blocks.take_rows(g_ND, i)
        into = _into(expert, blocks.take_rows(rows, i))
        h, between_vjp = jax.vjp(
            partial(weighted_hidden, hidden), blocks.weight(i), into
        )
        to_weight, to_into = between_vjp(dot(g, expert.down, 1, 1).astype(g.dtype))
        if expert.down_bias is not None:
            to_weight = to_weight + jnp.sum(g * expert.down_bias, 1, keepdims=True)
        return (
            dot(to_into, expert.into, 1, 1).astype(g.dtype),
            to_weight,
            jnp.concatenate([h, to_into], 1),
        )

    to_rows, to_weights, multiplied = map_blocks(
        differentiate_rows, weights, slots.expert_of_block, slots.blocks
    )

    def differentiate_weights(i: jax.Array) -> LoopedWeights:
        x = blocks.take_rows(rows, i)
        g = blocks.take_rows(g_ND, i)
        h, to_into = jnp.split(
            block_of(multiplied, i, blocks.length), [weights.down.shape[1]], axis=1
        )
        to_gate, to_up = jnp.split(dot(x, to_into, 0, 0), 2, axis=1)
        to_biases = (
            *jnp.split(jnp.sum(to_into, 0, jnp.float32), 2),
            jnp.sum(g * blocks.weight(i), 0, jnp.float32),
        )
        of_biases = [
            None if w is None else s
            for w, s in zip(weights[3:], to_biases, strict=True)
        ]
        return LoopedWeights(to_gate, to_up, dot(h, g, 0, 0), *of_biases)

    to_experts = sums_by_expert(
        differentiate_weights, weights, slots.expert_of_block, slots.blocks
    )
    return (
        to_experts,
        summed(to_rows, slots.places),
        taken(to_weights[:, 0], slots.places),
        None,
    )


_looped.defvjp(
    lambda hidden, *operands: (_looped(hidden, *operands), operands), _backward
)
