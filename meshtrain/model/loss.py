"""Cross-entropy over a vocabulary whose shares lie on different devices: the full logits are never in one place."""

import jax
import jax.numpy as jnp

from meshtrain.model.collectives import Collectives

MASKED = -1e30


class Vocabulary:
    """The ids as a loss sees them: each device has the logits of a share of them, [B, T, share], and meets the others in sums.

    The shares are equally long; those past `size` are padding, and must never receive probability.
    """

    def __init__(self, size: int, collectives: Collectives) -> None:
        self.size, self._collectives = size, collectives

    def ids(self, logits_BTV: jax.Array) -> jax.Array:
        """The ids of this share's logits, int32 [share]; padding has `size` or more."""
        rows = logits_BTV.shape[-1]
        return self._collectives.first_token_id(rows) + jnp.arange(rows)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over all shares of what each device has of its own, whatever the shape: one all-reduce."""
        return self._collectives.vocabulary_sum(x)

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over all shares; it carries no gradient."""
        return self._collectives.vocabulary_max(x)

    def log_sum_exp(self, logits_BTV: jax.Array) -> jax.Array:
        """log Z = log of the sum of exp(logit) over the whole vocabulary, [B, T]."""
        logits = jnp.where(self.ids(logits_BTV) < self.size, logits_BTV.astype(jnp.float32), MASKED)
        top = self.max(jnp.max(logits, axis=-1))
        return top + jnp.log(self.sum(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1)))

    def of_label(self, logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
        """The logit of each label, [B, T]; of log-probabilities or whatever else is laid out as the logits are, too.

        jax.nn.log_softmax gives none: softmax, mean and one_hot over the last axis see one share only. Log-probabilities are
        the logits less `log_sum_exp` of them.
        """
        here = self.ids(logits_BTV) == labels_BT[..., None]
        return self.sum(jnp.sum(jnp.where(here, logits_BTV, 0), axis=-1))


def cross_entropy(
    logits_BTV: jax.Array,
    labels_BT: jax.Array,
    vocabulary: Vocabulary,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Negative log-likelihood per token, [B, T] in float32, from this device's share of the logits (Megatron-LM, section 3).

    `label_smoothing` spreads that share of the target evenly over the vocabulary (Szegedy et al. 2016); `z_loss` adds
    z_loss * log(Z)² (PaLM, section 5). All sums travel together, in one all-reduce.
    """
    ids = vocabulary.ids(logits_BTV)
    real = ids < vocabulary.size
    logits = jnp.where(real, logits_BTV.astype(jnp.float32), MASKED)
    top = vocabulary.max(jnp.max(logits, axis=-1))
    shifted = logits - top[..., None]
    sums = [jnp.sum(jnp.exp(shifted), axis=-1), jnp.sum(jnp.where(ids == labels_BT[..., None], shifted, 0.0), axis=-1)]
    if label_smoothing:
        sums.append(jnp.sum(jnp.where(real, shifted, 0.0), axis=-1))
    total, target, *everything = vocabulary.sum(jnp.stack(sums))
    log_z = jnp.log(total)
    loss = log_z - target
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_z - everything[0] / vocabulary.size)
    return loss + z_loss * (log_z + top) ** 2 if z_loss else loss
