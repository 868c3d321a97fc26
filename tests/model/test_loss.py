"""Cross-entropy from shards of the logits is that of the whole, at the edges of the numbers too; the loss of pairs is
TRL's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.model.collectives import Collectives
from meshtrain.model.loss import Mixed, Vocabulary, counted, cross_entropy, dpo

VOCABULARY = 11


def example() -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    logits = jnp.asarray(3 * random.standard_normal((2, 5, VOCABULARY)), jnp.float32)
    return logits, jnp.asarray(random.integers(0, VOCABULARY, (2, 5)))


def definition(
    logits: jax.Array, labels: jax.Array, smoothing: float = 0.0, z_loss: float = 0.0
) -> jax.Array:
    target = (1 - smoothing) * jax.nn.one_hot(
        labels, logits.shape[-1]
    ) + smoothing / logits.shape[-1]
    return (
        -(target * jax.nn.log_softmax(logits)).sum(-1)
        + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    )


@pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.3, 0.1)]
)
def test_loss_and_gradient_are_those_of_the_definition(smoothing, z_loss):
    logits, labels = example()
    mine = lambda z: cross_entropy(
        z, labels, Vocabulary(VOCABULARY, Collectives()), smoothing, z_loss
    )
    np.testing.assert_allclose(
        mine(logits), definition(logits, labels, smoothing, z_loss), rtol=1e-5
    )
    gradient = jax.grad(lambda z: mine(z).sum())(logits)
    right = jax.grad(lambda z: definition(z, labels, smoothing, z_loss).sum())(logits)
    np.testing.assert_allclose(gradient, right, atol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient(smoothing):
    logits, labels = example()
    padded = jnp.concatenate(
        [logits, jnp.full((2, 5, 3), 50.0)], axis=-1
    )  # far above every real logit
    loss = cross_entropy(
        padded, labels, Vocabulary(VOCABULARY, Collectives()), smoothing, 0.1
    )
    np.testing.assert_allclose(
        loss, definition(logits, labels, smoothing, 0.1), rtol=1e-5
    )
    gradient = jax.grad(
        lambda z: cross_entropy(
            z, labels, Vocabulary(VOCABULARY, Collectives()), smoothing, 0.1
        ).sum()
    )(padded)
    assert not gradient[..., VOCABULARY:].any()


def mixed_labels(of: jax.Array) -> Mixed:
    """Other labels, of which some are the first ones again, and shares from 0 to 1."""
    other = jnp.where(
        jnp.arange(of.size).reshape(of.shape) % 4 == 1, of, (of + 3) % VOCABULARY
    )
    return Mixed(
        other, jnp.linspace(0, 1, of.size, dtype=jnp.float32).reshape(of.shape)
    )


def soft(
    logits: jax.Array, labels: jax.Array, mixed: Mixed, smoothing: float, z_loss: float
) -> jax.Array:
    """Against a distribution over the classes, written out (Zhang et al. 2018, equation 1, with Szegedy et al. 2016,
    section 7).
    """
    size, share = logits.shape[-1], mixed.share[..., None]
    target = share * jax.nn.one_hot(labels, size) + (1 - share) * jax.nn.one_hot(
        mixed.labels, size
    )
    target = (1 - smoothing) * target + smoothing / size
    return (
        -(target * jax.nn.log_softmax(logits)).sum(-1)
        + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    )


class Ranks(Collectives):
    """Shares of the vocabulary along an axis of vmap."""

    def __init__(self, ranks: int) -> None:
        self.vocabulary, self.vocabulary_ranks = ("ranks",), ranks

    def first_token_id(self, rows: int) -> jax.Array:
        return jax.lax.axis_index("ranks") * rows

    def vocabulary_sum(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "ranks")

    def vocabulary_max(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(jax.lax.stop_gradient(x), "ranks")


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.2, 0.1)])
def test_labels_that_are_mixed_of_two_have_the_loss_and_the_gradient_of_soft_ones(
    ranks, smoothing, z_loss
):
    logits, labels = example()
    mixed, rows = mixed_labels(labels), -(-VOCABULARY // ranks)
    padding = ((0, 0), (0, 0), (0, rows * ranks - VOCABULARY))
    shares = jnp.stack(
        jnp.split(jnp.pad(logits, padding, constant_values=50.0), ranks, axis=-1)
    )

    def mine(share):
        vocabulary = Vocabulary(VOCABULARY, Ranks(ranks))
        losses, vjp = jax.vjp(
            lambda z: cross_entropy(z, labels, vocabulary, smoothing, z_loss, mixed),
            share,
        )
        return losses, *vjp(jnp.arange(1.0, 11).reshape(labels.shape))

    losses, gradient = jax.jit(jax.vmap(mine, axis_name="ranks"))(shares)
    right, vjp = jax.vjp(lambda z: soft(z, labels, mixed, smoothing, z_loss), logits)
    np.testing.assert_allclose(losses, jnp.broadcast_to(right, losses.shape), rtol=1e-5)
    whole = jnp.concatenate(list(gradient), axis=-1)
    np.testing.assert_allclose(
        whole[..., :VOCABULARY],
        *vjp(jnp.arange(1.0, 11).reshape(labels.shape)),
        atol=2e-5,
    )
    assert not whole[..., VOCABULARY:].any()


def test_mixed_labels_take_no_more_sums_over_the_vocabulary():
    logits, labels = example()

    def sums(mixed: Mixed | None) -> int:
        run = lambda z: cross_entropy(
            z, labels, Vocabulary(VOCABULARY, Ranks(1)), 0.1, 0.0, mixed
        )
        graded = lambda z: jax.vjp(run, z)[1](jnp.ones(labels.shape))
        return str(jax.make_jaxpr(graded, axis_env=[("ranks", 1)])(logits)).count(
            "psum"
        )

    assert sums(mixed_labels(labels)) == sums(None) == 1


def test_large_logits_neither_overflow_nor_vanish():
    logits = jnp.array([[[3e4, 0.0, -3e4], [-3e4, -3e4, -3e4]]])
    loss = cross_entropy(logits, jnp.array([[0, 1]]), Vocabulary(3, Collectives()))
    np.testing.assert_allclose(loss, [[0.0, np.log(3)]], rtol=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits, labels = example()
    loss = cross_entropy(
        logits.astype(jnp.bfloat16), labels, Vocabulary(VOCABULARY, Collectives())
    )
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(
        loss,
        definition(logits.astype(jnp.bfloat16).astype(jnp.float32), labels),
        rtol=1e-5,
    )


# Log-probabilities of four chosen and rejected answers, under the model and under the reference.
CHOSEN, REJECTED = (-12.5, -40.25, -3.125, -7.0), (-15.0, -30.5, -3.0, -70.0)
CHOSEN_REFERENCE, REJECTED_REFERENCE = (
    (-13.25, -41.0, -2.5, -9.5),
    (-14.0, -33.0, -4.75, -20.0),
)
# What TRL's DPOTrainer makes of them at beta 0.3, computed with torch 2.9 in float64 from the lines of `dpo_loss` and
# of the metrics in huggingface/trl, trl/trainer/dpo_trainer.py (commit 9d58faa).
TRL = {"chosen": 0.253125, "rejected": -3.50625, "margins": 3.759375, "accuracies": 0.5}
TRL_LOSSES = (
    0.46471175467299347,
    0.9897117546729934,
    1.1115556930046617,
    1.4449801417108594e-07,
)


def batch_of(*rows: tuple[int, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses [rows, 16] and the batch of rows with these of the four pairs; each answer has three labels, after one
    that is not learned.
    """
    losses, weights, pairs, reference = np.full((4, len(rows), 16), 50.0, np.float32)
    weights[:], pairs[:] = 0, 0
    for row, numbers in enumerate(rows):
        for place, n in enumerate(numbers):
            pairs[row, 8 * place : 8 * place + 8] = place + 1
            for side, (now, before, sign) in enumerate(
                ((CHOSEN, CHOSEN_REFERENCE, 1), (REJECTED, REJECTED_REFERENCE, -1))
            ):
                answer = slice(8 * place + 4 * side + 1, 8 * place + 4 * side + 4)
                weights[row, answer] = sign
                losses[row, answer] = -now[n] * np.array([0.5, 0.25, 0.25])
                reference[row, answer] = -before[n] * np.array([0.125, 0.5, 0.375])
    batch = {
        "weights": weights,
        "pairs": pairs.astype(np.int32),
        "reference": reference,
    }
    return jnp.asarray(losses), jax.tree.map(jnp.asarray, batch)


@pytest.mark.thorough
def test_losses_and_rewards_are_trls():
    for rows in (((0, 1), (2, 3)), ((2,), (0,), (), (3, 1))):
        losses, batch = batch_of(*rows)
        total, measured = dpo(losses, batch, 0.3)
        assert counted(batch) == 4
        np.testing.assert_allclose(total, sum(TRL_LOSSES), rtol=1e-6)
        for name, right in TRL.items():
            np.testing.assert_allclose(
                measured.pop(f"rewards_{name}") / 4, right, rtol=1e-6
            )
        assert not measured


@pytest.mark.thorough
def test_where_model_and_reference_agree_a_pair_costs_log_2_and_its_labels_are_drawn_to_and_fro_by_half_of_beta():
    losses, batch = batch_of((0, 1), (2,))
    agreeing = {**batch, "reference": losses}
    total, gradient = jax.value_and_grad(lambda x: dpo(x, agreeing, 0.3)[0])(losses)
    np.testing.assert_allclose(total, 3 * np.log(2), rtol=1e-7)
    np.testing.assert_allclose(gradient, 0.15 * np.asarray(batch["weights"]), rtol=1e-6)


@pytest.mark.thorough
def test_a_pair_of_which_nothing_is_learned_is_none():
    losses, batch = batch_of((0, 1), (2, 3))
    batch["weights"] = batch["weights"].at[0, 8:].set(0)
    assert counted(batch) == 3
    np.testing.assert_allclose(
        dpo(losses, batch, 0.3)[0], sum(np.delete(TRL_LOSSES, 1)), rtol=1e-6
    )
