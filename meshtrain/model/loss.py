"""Losses: cross-entropy over a vocabulary that is sharded over devices, and from it that of preferences (DPO)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshtrain.compat import vary, varying
from meshtrain.model.collectives import Collectives
from meshtrain.model.kernels import MASKED

Arrays = dict[str, Array]
ONE_DEVICE = Collectives()


class Vocabulary:
    """The ids as a loss sees them: each device has the logits of a share of them, [B, T, share], and meets the others
    in sums.

    The shares are equally long; those past `size` are padding, and must never receive probability.
    """

    def __init__(self, size: int, collectives: Collectives) -> None:
        self.size = size
        self._collectives = collectives

    def ids(self, logits_BTV: Array) -> Array:
        """The ids of this share's logits, int32 [share]; padding has `size` or more."""
        rows = logits_BTV.shape[-1]
        return self._collectives.first_token_id(rows) + jnp.arange(rows)

    def sum(self, x: Array) -> Array:
        """The sum over all shares of what each device has of its own, whatever the shape: one all-reduce."""
        return self._collectives.vocabulary_sum(x)

    def max(self, x: Array) -> Array:
        """The maximum over all shares; it carries no gradient."""
        return self._collectives.vocabulary_max(x)

    def no_padding(self, logits_BTV: Array, instead: float) -> Array:
        """float32 logits, or what is laid out as they are, with `instead` in place of the padding."""
        x = logits_BTV.astype(jnp.float32)
        # Where there is none, nothing is chosen from: a compiler would write the chosen logits out beside the logits
        # themselves.
        padded = x.shape[-1] * self._collectives.vocabulary_ranks > self.size
        if padded:
            return jnp.where(self.ids(x) < self.size, x, instead)
        return x

    def log_sum_exp(self, logits_BTV: Array) -> Array:
        """log Z = log of the sum of exp(logit) over the whole vocabulary, [B, T]."""
        logits = self.no_padding(logits_BTV, MASKED)
        top = self.max(jnp.max(logits, axis=-1))
        shifted = logits - top[..., None]
        total = self.sum(jnp.sum(jnp.exp(shifted), axis=-1))
        return top + jnp.log(total)

    def argmax(self, logits_BTV: Array) -> Array:
        """The id with the largest logit, int32 [B, T]: of equals the first, on whichever share it lies; `size` where a
        logit is NaN.
        """
        logits = self.no_padding(logits_BTV, MASKED)
        top = self.max(jnp.max(logits, axis=-1))[..., None]
        ids = jnp.where(logits == top, self.ids(logits), self.size)
        return -self.max(-jnp.min(ids, axis=-1))

    def of_label(self, logits_BTV: Array, labels_BT: Array) -> Array:
        """The logit of each label, [B, T]; of log-probabilities or whatever else is laid out as the logits are, too.

        jax.nn.log_softmax gives none: softmax, mean and one_hot over the last axis see one share only.
        Log-probabilities are the logits less `log_sum_exp` of them.
        """
        at_label = self.ids(logits_BTV) == labels_BT[..., None]
        return self.sum(jnp.sum(jnp.where(at_label, logits_BTV, 0), axis=-1))


class Mixed(NamedTuple):
    """The other class of what is mixed of two (mixup: Zhang et al. 2018; CutMix: Yun et al. 2019)."""

    labels: Array  # int32 [B, T]
    share: Array  # float32 [B, T]: of the first class; the rest is this one's


class LabelLosses(NamedTuple):
    """The loss of each label, [.., b, T]: one of a token, or of an image."""

    losses: Array  # float32: what training minimises
    # float32: the negative log-likelihood alone, without gradient, where losses hold more
    nll: Array | None = None
    correct: Array | None = None  # of images: float32, 1 where the argmax is the label


def cross_entropy(*given: Any, **how: Any) -> Array:
    """Returns the losses of `cross_entropies` alone, [B, T]."""
    return cross_entropies(*given, **how).losses


def cross_entropies(
    logits_BTV: Array,
    labels_BT: Array,
    vocabulary: Vocabulary,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    mixed: Mixed | None = None,
) -> LabelLosses:
    """Negative log-likelihood per token, [B, T] in float32, from this device's share of the logits (Megatron-LM,
    section 3).

    `label_smoothing` spreads that share of the target evenly over the vocabulary (Szegedy et al. 2016); `z_loss` adds
    z_loss * log(Z)² (PaLM, section 5). With `mixed` the target is shared between two labels: share * loss of the one +
    (1 - share) * loss of the other. All sums travel together, in one all-reduce. The gradient is that of the formula, p
    (1 + 2 z_loss log Z) - target: from the logits and log Z, so that nothing else of the logits' size is ever written.
    """
    ids = vocabulary.ids(logits_BTV)
    even = label_smoothing / vocabulary.size

    def targeted(labels: Array, mixed: Mixed | None, value: Array | float) -> Array:
        """Returns `value` at the ids of the labels, by their shares, 0 elsewhere: [B, T, V share]."""
        first = jnp.where(ids == labels[..., None], value, 0.0)
        if mixed is None:
            return first
        share = mixed.share[..., None]
        other = jnp.where(ids == mixed.labels[..., None], value, 0.0)
        return share * first + (1 - share) * other

    def forward(
        logits: Array, labels: Array, mixed: Mixed | None
    ) -> tuple[LabelLosses, tuple[Any, ...]]:
        x = vocabulary.no_padding(logits, MASKED)
        top = vocabulary.max(jnp.max(x, axis=-1))
        shifted = x - top[..., None]
        label = targeted(labels, mixed, shifted)
        sums = [
            jnp.sum(jnp.exp(shifted), axis=-1),
            jnp.sum(label, axis=-1),
        ]
        if label_smoothing:
            sums.append(jnp.sum(vocabulary.no_padding(shifted, 0.0), axis=-1))
        total, target, *everything = vocabulary.sum(jnp.stack(sums))
        log_z = jnp.log(total)
        loss = nll = log_z - target
        if label_smoothing:
            loss = (
                (1 - label_smoothing) * loss
                + label_smoothing * log_z
                - even * everything[0]
            )
        log_z = log_z + top
        if z_loss:
            loss = loss + z_loss * log_z**2
        return LabelLosses(loss, None if loss is nll else nll), (
            logits,
            labels,
            mixed,
            log_z,
        )

    def backward(
        residuals: tuple[Any, ...], g: LabelLosses
    ) -> tuple[Array, None, None]:
        logits, labels, mixed, log_z = residuals
        p = jnp.exp(vocabulary.no_padding(logits, MASKED) - log_z[..., None])
        target = targeted(labels, mixed, 1 - label_smoothing)
        if label_smoothing:
            target = target + vocabulary.no_padding(jnp.full_like(p, even), 0.0)
        if z_loss:
            p = p * (1 + 2 * z_loss * log_z)[..., None]
        gradient = g.losses[..., None] * (p - target)
        return gradient.astype(logits.dtype), None, None

    losses = jax.custom_vjp(lambda *given: forward(*given)[0])
    losses.defvjp(forward, backward)
    return losses(logits_BTV, labels_BT, mixed)


# --- direct preference optimisation


def dpo(
    losses: Array, batch: Arrays, beta: float, collectives: Collectives = ONE_DEVICE
) -> tuple[Array, Arrays]:
    """Returns the loss of direct preference optimisation (Rafailov et al. 2023) summed over the pairs of a batch, and
    likewise the rewards that TRL's DPOTrainer reports.

        reward of an answer y to x     r(y) = beta (log p(y | x) - log p_ref(y | x))
        loss of a pair                 -log sigmoid(r(chosen) - r(rejected))                (equation 7)

    A pair is two segments of one row, so that it is never on two devices or in two microbatches; of its labels those of
    the chosen answer weigh 1, those of the rejected one -1 (see `data.token_rows`). A batch's loss is divided by its
    number of pairs.

    `losses`: negative log-likelihood of each label, float32 [.., T]; `batch` has the same under the reference as
    `reference`, and weights and pairs. Where rows are split over context, `collectives` sums a pair's labels before the
    logarithm.
    """
    rewards = beta * (batch["reference"] - losses)
    weights = batch["weights"]
    chosen, rejected = (
        _sum_pairs(rewards * jnp.maximum(w, 0), batch["pairs"], collectives)
        for w in (weights, -weights)
    )
    margins = chosen - rejected
    learned = _learned(batch, collectives)

    def total(x: Array) -> Array:
        return _part(jnp.sum(jnp.where(learned, x, 0.0)), losses, collectives)

    measured = {
        "chosen": chosen,
        "rejected": rejected,
        "margins": margins,
        "accuracies": margins > 0,
    }
    return total(-jax.nn.log_sigmoid(margins)), {
        f"rewards_{name}": total(x) for name, x in measured.items()
    }


def counted(batch: Arrays, collectives: Collectives = ONE_DEVICE) -> Array:
    """Returns the divisor of the summed loss of a batch that has weights: its pairs, if there are any, or the weights
    of its labels; of answers, whose weights say what they count, the number of labels that do.
    """
    if "advantages" in batch:
        return jnp.sum(batch["weights"] != 0, dtype=jnp.float32)
    if "pairs" not in batch:
        return jnp.sum(batch["weights"])
    return _part(
        jnp.sum(_learned(batch, collectives), dtype=jnp.float32),
        batch["weights"],
        collectives,
    )


def _learned(batch: Arrays, collectives: Collectives) -> Array:
    """Returns whether a pair counts, bool [rows, T // 2 + 1]: it does if one of its labels weighs."""
    learned = _sum_pairs(jnp.abs(batch["weights"]), batch["pairs"], collectives) > 0
    return learned.at[:, 0].set(False)


def _sum_pairs(values: Array, pairs: Array, collectives: Collectives) -> Array:
    """Sums over each pair of each row, [.., T] to float32 [rows, T // 2 + 1]: first of what is of no pair, then by the
    pairs' numbers.
    """
    # A pair has two labels at least.
    most = pairs.shape[-1] * collectives.context // 2
    return sum_by_number(values, pairs, most, collectives)


def sum_by_number(
    values: Array, numbers: Array, most: int, collectives: Collectives
) -> Array:
    """Sums each row's values by their numbers, 0 to `most`, over all its parts: [.., T] to float32 [rows, most + 1]."""
    length = numbers.shape[-1]
    values = values.reshape(-1, length)
    numbers = numbers.reshape(-1, length)
    rows = jnp.arange(len(numbers))[:, None]
    zeros = vary(
        jnp.zeros((len(numbers), most + 1), jnp.float32),
        varying(values) | varying(numbers),
    )
    return collectives.row_sum(zeros.at[rows, numbers].add(values))


def _part(total: Array, like: Array, collectives: Collectives) -> Array:
    """A part of a row's share of what all parts know alike, so that their sum is it."""
    if collectives.context == 1:
        return total
    return vary(total / collectives.context, varying(like))
