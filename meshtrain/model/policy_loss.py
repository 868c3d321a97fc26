"""Losses of reinforcement learning, from the log-probabilities of the answers that a model drew itself.

    log mu   of each token when it was drawn, under the distribution it was drawn from     batch["drawn"]
    log pi   of the same token now, at the same temperature                                 -losses
    ratio    exp(log pi - log mu): 1 at the first step after drawing, up to rounding
    A        advantage of the token's answer among those to the same prompt                 batch["advantages"]

    ppo_clip     -min(ratio A, clip(ratio) A)               Schulman et al. 2017, equation 7; GRPO: Shao et al. 2024
    cispo        -clip(ratio) A log pi, the first factor    MiniMax 2025 (MiniMax-M1), section 3.1
                 without gradient
    gspo         as ppo_clip, with the ratio of the whole   Zheng et al. 2025, equation 5
                 answer: exp(mean of log pi - log mu)
    reinforce    -A log pi                                  Williams 1992

Where `rl.beta` is above 0, each token also has beta (exp(d) - d - 1), d = log pi_ref - log pi (Schulman 2020, "k3").
"""

import jax.numpy as jnp
from jax import Array, lax

from meshtrain.config.rl import RlConfig
from meshtrain.model.collectives import Collectives
from meshtrain.model.loss import ONE_DEVICE, Arrays, sum_by_number

# No log-ratio counts for more: the engine may give a token a probability of 0.
MOST = 10.0


def policy_loss(
    losses: Array, batch: Arrays, rl: RlConfig, collectives: Collectives = ONE_DEVICE
) -> tuple[Array, Arrays]:
    """Returns the loss summed over the labels that count, each times its weight, and other sums over these labels.

    `losses`: negative log-likelihood of each label at the temperature of drawing, float32 [.., T]. `batch` has the
    arrays of `ANSWERS`, and `reference`, the reference's negative log-likelihood, where `rl.beta` is above 0. A label
    counts if its weight is not 0; the sums are divided by their number (see `model.loss.counted`).
    """
    counts = batch["weights"] != 0
    logprobs = -losses
    log_ratio = jnp.where(counts, jnp.clip(logprobs - batch["drawn"], -MOST, MOST), 0.0)
    if rl.loss == "gspo":
        log_ratio = _mean_over_answers(
            log_ratio, counts, batch["segments"], collectives
        )
    advantages = batch["advantages"]
    ratio = jnp.exp(log_ratio)
    low, high = rl.clip
    clipped = jnp.clip(ratio, 1 - low, 1 + high)
    if rl.loss == "reinforce":
        gain = advantages * logprobs
    elif rl.loss == "cispo":
        gain = lax.stop_gradient(clipped) * advantages * logprobs
    else:
        gain = jnp.minimum(ratio * advantages, clipped * advantages)
    each = -gain
    gap = jnp.abs(logprobs - batch["drawn"])
    measured = {
        "rl/gap_mean": gap,
        "rl/clipped": (clipped != ratio).astype(jnp.float32),
        # of what was drawn the mean of -log pi is an estimate of the entropy
        "rl/entropy": losses,
    }
    if rl.beta:
        distance = -batch["reference"] - logprobs
        kl = jnp.exp(distance) - distance - 1
        each = each + rl.beta * kl
        measured["rl/kl"] = kl
    loss = jnp.sum(jnp.where(counts, each * batch["weights"], 0.0))
    return loss, {
        name: jnp.sum(jnp.where(counts, x, 0.0)) for name, x in measured.items()
    }


def row_gaps(losses: Array, batch: Arrays) -> Array:
    """Returns the largest |log pi - log mu| of each row's labels that count, float32 [rows]; NaN where one is NaN."""
    counts = batch["weights"] != 0
    gap = jnp.where(counts, jnp.abs(-losses - batch["drawn"]), 0.0)
    return gap.reshape(-1, gap.shape[-1]).max(-1)


def _mean_over_answers(
    values: Array, counts: Array, segments: Array, collectives: Collectives
) -> Array:
    """Returns the mean of each answer's values at each of its labels."""
    length = segments.shape[-1]
    most = length * collectives.context
    total, number = (
        sum_by_number(x, segments, most, collectives)
        for x in (values, counts.astype(jnp.float32))
    )
    means = total / jnp.maximum(number, 1.0)
    by_row = segments.reshape(-1, length)
    return jnp.take_along_axis(means, by_row, axis=1).reshape(values.shape)
