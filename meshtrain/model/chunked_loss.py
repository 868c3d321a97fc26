"""A loss whose logits are never whole: a loop over chunks of tokens with the head inside, forward and backward.

                 forward                                            backward
    chunk 0   x [n, D] ─head─► logits ─► losses [n]       head and loss again ─► gradient of x [n, D]
    chunk 1   x [n, D] ─head─► logits ─► losses [n]                           ─► + that of the head's weights, float32
    ...

The stream is all that is kept: n x V / shares logits are alive at a time, and no more of what is gathered of a split sequence. The
losses come out token by token, so that weights, pairs (DPO) and means are what they are without chunks. The price is the head's
product once more. It is asked for by `train.loss_chunk`; see `config.follow.loss_chunk`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.compat import vary, varying

Tree = Any
# (head's weights, stream [1, n, D], labels [1, n ranks]) -> losses [1, n ranks]
Loss = Callable[[Tree, jax.Array, jax.Array], jax.Array]


def by_chunks(loss: Loss, weights: Tree, x_BTD: jax.Array, labels_BL: jax.Array, chunk: int) -> jax.Array:
    """Returns the loss of each label, [B, L], from chunks of at most `chunk` labels; L is T times the ranks that split the sequence.

    A chunk has as many tokens of every rank, one after the other, as a gather gives them. Chunks are as even as they can be; what the
    last one lacks is zeros, whose losses are left out.
    """
    rows, local = x_BTD.shape[:2]
    ranks = labels_BL.shape[1] // local
    tokens = rows * local
    count = -(-tokens * ranks // chunk)
    size = -(-tokens // count)

    def cut(a: jax.Array) -> jax.Array:
        """[B*T, ..] to [count, 1, size, ..]"""
        short = count * size - tokens
        padded = jnp.pad(a, ((0, short), *((0, 0) for _ in a.shape[1:]))) if short else a
        return padded.reshape(count, 1, size, *a.shape[1:])

    labels = cut(labels_BL.reshape(rows, ranks, local).swapaxes(1, 2).reshape(tokens, ranks))
    xs = cut(x_BTD.reshape(tokens, -1))
    losses = _loop(loss)(weights, xs, labels.swapaxes(2, 3).reshape(count, 1, -1))
    by_token = losses.reshape(count, ranks, size).swapaxes(1, 2).reshape(-1, ranks)[:tokens]
    return by_token.reshape(rows, local, ranks).swapaxes(1, 2).reshape(labels_BL.shape)


def _loop(loss: Loss) -> Callable[[Tree, jax.Array, jax.Array], jax.Array]:
    """The losses of chunks, one after the other; of frozen weights no gradient is made."""

    def run(weights: Tree, xs: jax.Array, labels: jax.Array) -> jax.Array:
        return lax.map(lambda of: loss(weights, *of), (xs, labels))

    def forward(weights: Tree, xs: CustomVJPPrimal, labels: CustomVJPPrimal) -> tuple[jax.Array, tuple[Any, ...]]:
        primals, tree = jax.tree.flatten(weights, is_leaf=lambda w: isinstance(w, CustomVJPPrimal))
        trained, frozen = (
            jax.tree.unflatten(tree, [w.value if w.perturbed == which else None for w in primals])
            for which in (True, False)
        )
        x, ids = xs.value, labels.value
        return run(_joined(trained, frozen), x, ids), (trained, frozen, x, ids)

    def backward(residuals: tuple[Any, ...], g: jax.Array) -> tuple[Tree, jax.Array, None]:
        trained, frozen, xs, labels = residuals

        def chunk(sums: Tree, of: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Tree, jax.Array]:
            x, ids, g = of
            _, vjp = jax.vjp(lambda weights, x: loss(_joined(weights, frozen), x, ids), trained, x)
            gradient, gx = vjp(g)
            return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, gradient), gx

        zeros = jax.tree.map(lambda w: vary(jnp.zeros(w.shape, jnp.float32), varying(w)), trained)
        sums, gx = lax.scan(chunk, zeros, (xs, labels, g))
        return jax.tree.map(lambda total, w: total.astype(w.dtype), sums, trained), gx, None

    losses = jax.custom_vjp(run)
    losses.defvjp(forward, backward, symbolic_zeros=True)
    return losses


def _joined(weights: Tree, others: Tree) -> Tree:
    """Weights of two trees, of which one has None where the other has a weight."""
    return jax.tree.map(lambda w, other: other if w is None else w, weights, others, is_leaf=lambda w: w is None)
