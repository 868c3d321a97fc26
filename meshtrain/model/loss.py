"""Cross-entropy over a vocabulary whose shares lie on different devices: the full logits are never in one place."""

import jax
import jax.numpy as jnp

from meshtrain.model.collectives import Collectives

MASKED = -1e30


def cross_entropy(
    logits_BTV: jax.Array,
    labels_BT: jax.Array,
    vocab_size: int,
    collectives: Collectives,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Negative log-likelihood per token, [B, T] in float32, from this device's share of the logits (Megatron-LM, section 3).

    Rows past `vocab_size` are padding and never receive probability. `label_smoothing` spreads that share of the target evenly
    over the vocabulary (Szegedy et al. 2016); `z_loss` adds z_loss * log(Z)² (PaLM, section 5).
    """
    rows = logits_BTV.shape[-1]
    ids = collectives.first_token_id(rows) + jnp.arange(rows)
    logits = jnp.where(ids < vocab_size, logits_BTV.astype(jnp.float32), MASKED)
    top = collectives.vocabulary_max(jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
    shifted = logits - top[..., None]
    sums = [jnp.sum(jnp.exp(shifted), axis=-1), jnp.sum(jnp.where(ids == labels_BT[..., None], shifted, 0.0), axis=-1)]
    if label_smoothing:
        sums.append(jnp.sum(jnp.where(ids < vocab_size, shifted, 0.0), axis=-1))
    total, target, *everything = collectives.vocabulary_sum(jnp.stack(sums))
    log_z = jnp.log(total)
    loss = log_z - target
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_z - everything[0] / vocab_size)
    return loss + z_loss * (log_z + top) ** 2 if z_loss else loss
