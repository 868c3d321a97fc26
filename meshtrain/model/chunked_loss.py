"""A loss whose logits are never whole: a loop over chunks of tokens with the head inside.

    chunk 0   x [n, D] ─head─► logits ─► losses [n] ─► gradient of x [n, D]
    chunk 1   x [n, D] ─head─► logits ─► losses [n] ─► gradient of x [n, D], + that of the head's weights, float32
    ...

The stream is all that is kept: n x V / shares logits are alive at a time, and no more of what is gathered of a split
sequence. Where it is known what each loss counts (`sum_chunk_losses`), one loop makes losses and gradients. Where that
hangs on the losses, as in DPO's, they come out token by token first, and a second loop makes the logits again
(`chunk_losses`): the price is the head's product once more. Chunks are asked for by `train.loss_chunk`; see
`config.follow.loss_chunk`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.compat import vary, varying
from meshtrain.model.loss import LabelLosses

Tree = Any
# (head's weights, stream [1, n, D], labels [1, n ranks]) -> losses [1, n ranks]
Loss = Callable[[Tree, jax.Array, jax.Array], LabelLosses]


def chunk_losses(
    loss: Loss,
    weights: Tree,
    x_BTD: jax.Array,
    labels_BL: jax.Array,
    chunk: int,
) -> LabelLosses:
    """Returns the loss of each label, [B, L], from chunks of at most `chunk` labels; L is T times the ranks that split
    the sequence.

    A chunk has as many tokens of every rank, one after the other, as a gather gives them. Chunks are as even as they
    can be; what the last one lacks is zeros, whose losses are left out.
    """
    cuts = _Cuts(x_BTD, labels_BL, chunk)
    losses = _loop(loss)(weights, cuts.cut_stream(x_BTD), cuts.cut_labels(labels_BL))
    return jax.tree.map(cuts.joined, losses)


def sum_chunk_losses(
    loss: Loss,
    weights: Tree,
    x_BTD: jax.Array,
    labels_BL: jax.Array,
    counts_BL: jax.Array,
    chunk: int,
) -> tuple[jax.Array, LabelLosses]:
    """Returns the sum of the losses of `chunk_losses` times what each counts, whose gradient is made with it, and the
    losses, which have none.
    """
    cuts = _Cuts(x_BTD, labels_BL, chunk)
    given = (
        cuts.cut_stream(x_BTD),
        cuts.cut_labels(labels_BL),
        cuts.cut_labels(counts_BL),
    )
    total, losses = _summed(loss)(weights, *given)
    return total, jax.tree.map(cuts.joined, lax.stop_gradient(losses))


class _Cuts:
    """The cuts of tokens and labels into chunks."""

    def __init__(self, x_BTD: jax.Array, labels_BL: jax.Array, chunk: int) -> None:
        self.rows, self.local = x_BTD.shape[:2]
        self.ranks = labels_BL.shape[1] // self.local
        self.tokens = self.rows * self.local
        self.count = -(-self.tokens * self.ranks // chunk)
        self.size = -(-self.tokens // self.count)

    def cut_stream(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [count, 1, size, D]."""
        return self._cut(x_BTD.reshape(self.tokens, -1))

    def cut_labels(self, labels_BL: jax.Array) -> jax.Array:
        """[B, L] to [count, 1, ranks size]."""
        by_token = labels_BL.reshape(self.rows, self.ranks, self.local).swapaxes(1, 2)
        cut = self._cut(by_token.reshape(self.tokens, self.ranks))
        return cut.swapaxes(2, 3).reshape(self.count, 1, -1)

    def joined(self, losses: jax.Array) -> jax.Array:
        """[count, 1, ranks size] to [B, L]."""
        by_token = (
            losses.reshape(self.count, self.ranks, self.size)
            .swapaxes(1, 2)
            .reshape(-1, self.ranks)
        )
        return (
            by_token[: self.tokens]
            .reshape(self.rows, self.local, self.ranks)
            .swapaxes(1, 2)
            .reshape(self.rows, -1)
        )

    def _cut(self, a: jax.Array) -> jax.Array:
        short = self.count * self.size - self.tokens
        padded = (
            jnp.pad(a, ((0, short), *((0, 0) for _ in a.shape[1:]))) if short else a
        )
        return padded.reshape(self.count, 1, self.size, *a.shape[1:])


def _loop(loss: Loss) -> Callable[[Tree, jax.Array, jax.Array], LabelLosses]:
    """The losses of chunks, one after the other; of frozen weights no gradient is made."""

    def run(weights: Tree, xs: jax.Array, labels: jax.Array) -> LabelLosses:
        return lax.map(lambda of: loss(weights, *of), (xs, labels))

    def forward(
        weights: Tree, xs: CustomVJPPrimal, labels: CustomVJPPrimal
    ) -> tuple[LabelLosses, tuple[Any, ...]]:
        trained, frozen = _parted(weights)
        x = xs.value
        ids = labels.value
        return run(_joined(trained, frozen), x, ids), (trained, frozen, x, ids)

    def backward(
        residuals: tuple[Tree, Tree, jax.Array, jax.Array], g: LabelLosses
    ) -> tuple[Tree, jax.Array, None]:
        _, sums, gx = _gradients(loss, *residuals, g.losses)
        return sums, gx, None

    losses = jax.custom_vjp(run)
    losses.defvjp(forward, backward, symbolic_zeros=True)
    return losses


def _summed(
    loss: Loss,
) -> Callable[[Tree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, LabelLosses]]:
    """The sum of what chunks' losses count, and the losses.

    Its forward makes the gradients too, while the logits are there.
    """

    def run(
        weights: Tree, xs: jax.Array, labels: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, LabelLosses]:
        found = _loop(loss)(weights, xs, labels)
        return jnp.sum(counts * found.losses), found

    def forward(
        weights: Tree, *others: CustomVJPPrimal
    ) -> tuple[tuple[jax.Array, LabelLosses], tuple[Tree, jax.Array]]:
        xs, labels, counts = (a.value for a in others)
        found, *gradients = _gradients(loss, *_parted(weights), xs, labels, counts)
        return (jnp.sum(counts * found.losses), found), tuple(gradients)

    def backward(
        gradients: tuple[Tree, jax.Array], g: tuple[Any, Any]
    ) -> tuple[Any, ...]:
        return *jax.tree.map(lambda a: g[0].astype(a.dtype) * a, gradients), None, None

    total = jax.custom_vjp(run)
    total.defvjp(forward, backward, symbolic_zeros=True)
    return total


def _gradients(
    loss: Loss,
    trained: Tree,
    frozen: Tree,
    xs: jax.Array,
    labels: jax.Array,
    cotangents: jax.Array,
) -> tuple[LabelLosses, Tree, jax.Array]:
    """Returns the losses of chunks, and the gradients of the trained weights and of the stream, where theirs are
    `cotangents`.
    """

    def chunk(
        sums: Tree, of: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[Tree, tuple[LabelLosses, jax.Array]]:
        x, ids, g = of

        def losses(weights: Tree, x: jax.Array) -> tuple[jax.Array, LabelLosses]:
            found = loss(_joined(weights, frozen), x, ids)
            return found.losses, found

        cut_labels, vjp, found = jax.vjp(losses, trained, x, has_aux=True)
        gradient, gx = vjp(vary(g, varying(cut_labels)))
        return jax.tree.map(
            lambda total, new: total + new.astype(jnp.float32), sums, gradient
        ), (
            found,
            gx,
        )

    zeros = jax.tree.map(
        lambda w: vary(jnp.zeros(w.shape, jnp.float32), varying(w)), trained
    )
    sums, (found, gx) = lax.scan(chunk, zeros, (xs, labels, cotangents))
    return (
        found,
        jax.tree.map(lambda total, w: total.astype(w.dtype), sums, trained),
        gx,
    )


def _parted(weights: Tree) -> tuple[Tree, Tree]:
    """Returns the weights that have a gradient to come, and the others."""
    primals, tree = jax.tree.flatten(
        weights, is_leaf=lambda w: isinstance(w, CustomVJPPrimal)
    )
    of_kind = lambda which: [w.value if w.perturbed == which else None for w in primals]
    return jax.tree.unflatten(tree, of_kind(True)), jax.tree.unflatten(
        tree, of_kind(False)
    )


def _joined(weights: Tree, others: Tree) -> Tree:
    """Weights of two trees, of which one has None where the other has a weight."""
    return jax.tree.map(
        lambda w, other: other if w is None else w,
        weights,
        others,
        is_leaf=lambda w: w is None,
    )
