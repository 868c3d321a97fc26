"""Direct preference optimisation (Rafailov et al. 2023): the losses of tokens under model and reference to one loss a pair.

    reward of an answer y to x     r(y) = beta (log p(y | x) - log p_ref(y | x))
    loss of a pair                 -log sigmoid(r(chosen) - r(rejected))                (equation 7)

A pair is two segments of one row, so that it is never on two devices or in two microbatches; of its labels those of the chosen
answer weigh 1, those of the rejected one -1 (see `data.stretches`). What a batch's loss is divided by is its number of pairs.
"""

import jax
import jax.numpy as jnp

from meshtrain.compat import vary, varying

Arrays = dict[str, jax.Array]


def dpo(losses: jax.Array, batch: Arrays, beta: float) -> tuple[jax.Array, Arrays]:
    """The loss summed over the pairs of a batch, and likewise the rewards that TRL's DPOTrainer reports.

    `losses`: negative log-likelihood of each label, float32 [.., T]; `batch` has the same under the reference as `reference`,
    and weights and pairs.
    """
    rewards, weights = beta * (batch["reference"] - losses), batch["weights"]
    chosen, rejected = (_of_pairs(rewards * jnp.maximum(w, 0), batch["pairs"]) for w in (weights, -weights))
    margins, learned = chosen - rejected, _learned(batch)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(learned, x, 0.0))

    measured = {"chosen": chosen, "rejected": rejected, "margins": margins, "accuracies": margins > 0}
    return total(-jax.nn.log_sigmoid(margins)), {f"rewards_{name}": total(x) for name, x in measured.items()}


def counted(batch: Arrays) -> jax.Array:
    """What the summed loss of a batch that has weights is divided by: its pairs, if there are any, or the weights of its labels."""
    return jnp.sum(_learned(batch), dtype=jnp.float32) if "pairs" in batch else jnp.sum(batch["weights"])


def _learned(batch: Arrays) -> jax.Array:
    """Whether anything is learned of a pair, bool [rows, T // 2 + 1]: it has a label that weighs."""
    found = _of_pairs(jnp.abs(batch["weights"]), batch["pairs"]) > 0
    return found.at[:, 0].set(False)


def _of_pairs(values: jax.Array, pairs: jax.Array) -> jax.Array:
    """Sums over each pair of each row, [.., T] to float32 [rows, T // 2 + 1]: first of what is of no pair, then by the pairs' numbers."""
    length = pairs.shape[-1]
    values, pairs = values.reshape(-1, length), pairs.reshape(-1, length)
    rows = jnp.arange(len(pairs))[:, None]
    # A pair has two labels at least.
    zeros = vary(jnp.zeros((len(pairs), length // 2 + 1), jnp.float32), varying(values) | varying(pairs))
    return zeros.at[rows, pairs].add(values)
