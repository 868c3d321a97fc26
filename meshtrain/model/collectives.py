"""The places in a decoder where devices must meet, named; on one device none of them does anything.

        x ──norm── enter ──column-parallel── · ──row-parallel── leave ── + ── x
     (replicated          (this rank's heads or             (summed over the
      or 1/T of the        d_ff columns)                     ranks again)
      sequence)

The model calls these methods and knows nothing of a mesh; `parallel.tensor` overrides them with explicit collectives.
"""

from typing import Any

import jax
import numpy as np


class Collectives:
    """One device: every method is the identity. `platform` chooses between implementations of attention."""

    platform: str = "cpu"
    vocabulary: tuple[str, ...] = ()  # mesh axes that share the vocabulary, major first
    vocabulary_ranks: int = 1  # how many they share it between
    # Ranks that the tokens of a row are split over, see `parallel.context`
    context: int = 1
    # whether attention swaps these tokens for heads (Ulysses); else they are in zigzag order
    by_heads: bool = False

    @property
    def pieces(self) -> int:
        """The pieces of a row that are here, each of tokens that follow one another."""
        return 1 if self.context == 1 else 2

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Before a column-parallel weight: the whole sequence, on every tensor rank."""
        return x_BTD

    def leave(self, y_BTD: jax.Array) -> jax.Array:
        """After a row-parallel weight: partial sums over the tensor ranks become the residual stream."""
        return y_BTD

    def enter_head(self, x_BTD: jax.Array) -> jax.Array:
        """Before the output head: the whole sequence, on every rank that holds a share of the vocabulary."""
        return x_BTD

    def leave_embedding(self, x_BTD: jax.Array) -> jax.Array:
        """After the lookup in this rank's share of the vocabulary: partial sums become the residual stream."""
        return x_BTD

    def share(self, weight: jax.Array) -> jax.Array:
        """A bias that every rank adds before `leave` sums them: divided by the number of ranks."""
        return weight

    def share_embedding(self, weight: jax.Array) -> jax.Array:
        """Does the same for a bias added before `leave_embedding`."""
        return weight

    def share_stream(self, weight: jax.Array) -> jax.Array:
        """A weight that works on the residual stream itself, after `leave`: the same on all ranks that hold the same of
        the stream.
        """
        return weight

    def mean_over_heads(self, x: jax.Array) -> jax.Array:
        """Mean over the tensor ranks, of what each has of its heads; where all have the same heads, it is what it
        was.
        """
        return x

    def first_head(self, heads: int) -> jax.Array | int:
        """Global index of this rank's first of `heads` local query heads."""
        return 0

    def first_token_id(self, rows: int) -> jax.Array | int:
        """Global id of the first of `rows` local rows of the vocabulary."""
        return 0

    def column_order(self, length: int) -> np.ndarray | None:
        """Returns the positions of a row's `length` tokens in the order of the ranks; None where one has them all."""
        return None

    def first_position(self, length: int) -> jax.Array | int:
        """Position in the sequence of the first of `length` local entries of the residual stream.

        With context parallelism, where entries need not follow one another, of each what its position is more than its
        place [length].
        """
        return 0

    def positions(self, length: int) -> jax.Array:
        """Positions in the sequence of the `length` tokens of a row that are here, before the tensor ranks share
        them.
        """
        return jax.numpy.arange(length)

    def gather_row(self, latents: Any) -> Any:
        """Returns arrays of a row's tokens [B, T, ...] as attention takes them to make keys and values of: of all
        ranks, [N, B, T, ...], where keys and values would be gathered.
        """
        return latents

    def attend_in_zigzag(
        self,
        kernel: Any,
        scoring: Any,
        heads: Any,
        masks: Any,
        sinks: Any = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Attention, by a kernel of `model.attention`, of the queries that are here to the keys and values of the whole
        row.
        """
        raise NotImplementedError("all tokens of a row are here")

    def attend_by_heads(
        self,
        attend: Any,
        heads: Any,
        of_tokens: Any,
        dropout: Any,
        sinks: Any = None,
    ) -> Any:
        """Computes the same by `attend`, for all tokens and a share of the heads."""
        raise NotImplementedError("all tokens of a row are here")

    def tails_before(self, tails: Any) -> Any:
        """Returns, for each piece of a row that is here, what the piece before it has of arrays [B * pieces, ...];
        zeros before the first.
        """
        return jax.tree.map(jax.numpy.zeros_like, tails)

    def states_before(self, maps: jax.Array, reverse: bool) -> jax.Array:
        """Returns the state of linear attention before each piece of a row that is here, from the maps of all pieces
        (`model.delta_rule`); with `reverse` of the row from its end.
        """
        raise NotImplementedError("all tokens of a row are here")

    def stream_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the residual stream varies besides data and pipeline."""
        return ()

    def row_sum(self, x: jax.Array) -> jax.Array:
        """Sum over the parts of each row."""
        return x

    def row_max(self, x: jax.Array) -> jax.Array:
        """Maximum over the parts of each row."""
        return x

    def dispatch(
        self,
        compute: Any,
        experts: int,
        rows: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of the chosen experts for rows [N, D], computed by `model.experts.Experts.compute`, and
        what is noted of it: the pairs that a capacity dropped, without one the rounds of each token.
        """
        return compute(rows, chosen, weights, chosen.size)

    def expert_collectives(self) -> "Collectives":
        """Returns the collectives of a layer's experts: they differ where each tensor rank sends its own part of the
        sequence to them.
        """
        return self

    def own_part(self, x_BT: jax.Array) -> jax.Array:
        """Selects, from one value for each token, the values of the rows that this rank's router is given."""
        return x_BT

    def once(self, x: jax.Array) -> jax.Array:
        """Returns a value common to all tensor ranks on one of them, and zeros on the others: for gradients, which are
        summed over the ranks.
        """
        return x

    def vocabulary_sum(self, x: jax.Array) -> jax.Array:
        """Sum over all shares of the vocabulary."""
        return x

    def vocabulary_max(self, x: jax.Array) -> jax.Array:
        """Maximum over all shares of the vocabulary (of a value that carries no gradient)."""
        return jax.lax.stop_gradient(x)


class VocabularyShards(Collectives):
    """The vocabulary alone sharded, over named axes of a mesh or of vmap."""

    def __init__(self, vocabulary: tuple[str, ...], ranks: int) -> None:
        self.vocabulary = vocabulary
        self.vocabulary_ranks = ranks

    def first_token_id(self, rows: int) -> jax.Array:
        return jax.lax.axis_index(self.vocabulary) * rows

    def vocabulary_sum(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.vocabulary)

    def vocabulary_max(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(jax.lax.stop_gradient(x), self.vocabulary)
