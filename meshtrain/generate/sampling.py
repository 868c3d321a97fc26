"""Which token comes next: the likeliest, or one drawn among those that temperature, top-k and top-p leave.

    logits ── (x - max) / temperature ──► sorted, the likeliest first, of equals the lower id
                                          ├─ top_k  ranks below k
                                          └─ top_p  of these the fewest whose probabilities sum to p
    those left + Gumbel noise ── the largest ──► the token

Nucleus (top_p): Holtzman et al. 2020. Gumbel-max: Maddison et al. 2014. A token's noise follows from the seed, its
position and its id alone. So a sequence gets the same tokens in any slot, whatever runs beside it and however the
vocabulary is padded.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from meshtrain.compat import vary, varying
from meshtrain.generate.request import Sampling


class SamplingArrays(NamedTuple):
    """`Sampling` of each slot, as arrays [S]; of one request alone, []."""

    temperature: jax.Array | np.ndarray  # float32; 0: greedy
    top_k: jax.Array | np.ndarray  # int32; 0: all
    top_p: jax.Array | np.ndarray  # float32
    seed: jax.Array | np.ndarray  # uint32

    @classmethod
    def of(cls, sampling: Sampling) -> "SamplingArrays":
        """Returns the arrays of one request, with the lowest 32 bits of its seed."""
        return cls(
            np.array(sampling.temperature, np.float32),
            np.array(sampling.top_k, np.int32),
            np.array(sampling.top_p, np.float32),
            np.array(sampling.seed % (1 << 32), np.uint32),
        )


class Drawn(NamedTuple):
    """Chosen tokens, and the log-probability with which each was drawn: of what temperature, top-k and top-p leave."""

    tokens: jax.Array  # int32 [S]
    logprobs: jax.Array  # float32 [S]; 0 where the argmax is taken


def sample(
    logits_SV: jax.Array, how: SamplingArrays, positions_S: jax.Array
) -> jax.Array:
    """The tokens that `draw` chooses, int32 [S]."""
    return draw(logits_SV, how, positions_S).tokens


def draw(logits_SV: jax.Array, how: SamplingArrays, positions_S: jax.Array) -> Drawn:
    """Chooses the token of each slot from float32 logits [S, V]; `positions_S`: where it will stand in its sequence.

    Traceable. Greedy is the argmax exactly, of equals the first. Noise is made only if a slot draws, a sort only if one
    that draws has top_k or top_p; what a slot gets depends on neither.
    """
    how = SamplingArrays(*map(jnp.asarray, how))
    draws_S = how.temperature > 0
    cuts_S = draws_S & (
        ((how.top_k > 0) & (how.top_k < logits_SV.shape[1])) | (how.top_p < 1)
    )
    greedy_S = jnp.argmax(logits_SV, axis=1).astype(jnp.int32)
    certain_S = jnp.zeros_like(logits_SV[:, 0])

    def drawn() -> Drawn:
        # The largest is subtracted first, so that no temperature is too low.
        distance_SV = logits_SV - jnp.max(logits_SV, axis=1, keepdims=True)
        scaled_SV = distance_SV / jnp.where(draws_S, how.temperature, 1)[:, None]
        kept_SV = jax.lax.cond(
            jnp.any(cuts_S),
            lambda: kept(scaled_SV, how.top_k, how.top_p),
            lambda: vary(jnp.ones(scaled_SV.shape, bool), varying(scaled_SV)),
        )
        noise_SV = jax.vmap(_noise, (0, 0, None))(
            how.seed, positions_S, logits_SV.shape[1]
        )
        left_SV = jnp.where(kept_SV, scaled_SV, -jnp.inf)
        drawn_S = jnp.argmax(left_SV + noise_SV, axis=1)
        tokens_S = jnp.where(draws_S, drawn_S.astype(jnp.int32), greedy_S)
        logprobs_SV = jax.nn.log_softmax(left_SV)
        logprobs_S = jnp.take_along_axis(logprobs_SV, tokens_S[:, None], axis=1)[:, 0]
        return Drawn(tokens_S, jnp.where(draws_S, logprobs_S, certain_S))

    return jax.lax.cond(jnp.any(draws_S), drawn, lambda: Drawn(greedy_S, certain_S))


def kept(scaled_SV: jax.Array, top_k_S: ArrayLike, top_p_S: ArrayLike) -> jax.Array:
    """Returns whether top-k and top-p leave a token, bool [S, V], of logits over their temperature [S, V].

    The likeliest is always left.
    """
    top_k_S = jnp.asarray(top_k_S)
    top_p_S = jnp.asarray(top_p_S)
    vocabulary = scaled_SV.shape[1]
    ids_SV = jnp.broadcast_to(jnp.arange(vocabulary), scaled_SV.shape)
    falling_SV, order_SV = jax.lax.sort(
        (-scaled_SV, ids_SV), dimension=1, is_stable=True, num_keys=1
    )
    most_S = jnp.where(top_k_S > 0, jnp.minimum(top_k_S, vocabulary), vocabulary)
    among_SV = jnp.where(ids_SV < most_S[:, None], -falling_SV, -jnp.inf)
    reached_SV = (
        jnp.cumsum(jax.nn.softmax(among_SV, axis=1), axis=1) >= top_p_S[:, None]
    )
    # Sums of float32 may reach 1 before all are in, or never.
    enough_S = jnp.where(
        jnp.any(reached_SV, axis=1), jnp.argmax(reached_SV, axis=1) + 1, vocabulary
    )
    count_S = jnp.minimum(most_S, jnp.where(top_p_S < 1, enough_S, vocabulary))
    # In order of ids again: what is larger than the last one left, and its equals of no higher id.
    last_S1 = count_S[:, None] - 1
    least_S1 = -jnp.take_along_axis(falling_SV, last_S1, axis=1)
    highest_S1 = jnp.take_along_axis(order_SV, last_S1, axis=1)
    return (scaled_SV > least_S1) | ((scaled_SV == least_S1) & (ids_SV <= highest_S1))


def _noise(seed: ArrayLike, position: jax.Array, vocabulary: int) -> jax.Array:
    # Which generator JAX uses otherwise is a setting.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocabulary,), jnp.float32)
