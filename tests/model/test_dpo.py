"""The loss of pairs alone: its values, its gradient where model and reference agree, and what it is divided by."""

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.model.dpo import counted, dpo

# Log-probabilities of four chosen and rejected answers, under the model and under the reference.
CHOSEN, REJECTED = (-12.5, -40.25, -3.125, -7.0), (-15.0, -30.5, -3.0, -70.0)
CHOSEN_REFERENCE, REJECTED_REFERENCE = (-13.25, -41.0, -2.5, -9.5), (-14.0, -33.0, -4.75, -20.0)
# What TRL's DPOTrainer makes of them at beta 0.3, computed with torch 2.9 in float64 from the lines of `dpo_loss` and of the metrics in
# huggingface/trl, trl/trainer/dpo_trainer.py (commit 9d58faa).
TRL = {"chosen": 0.253125, "rejected": -3.50625, "margins": 3.759375, "accuracies": 0.5}
TRL_LOSSES = (0.46471175467299347, 0.9897117546729934, 1.1115556930046617, 1.4449801417108594e-07)


def batch_of(*rows: tuple[int, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses [rows, 16] and the batch of rows with these of the four pairs; each answer has three labels, after one that is not learned."""
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
    batch = {"weights": weights, "pairs": pairs.astype(np.int32), "reference": reference}
    return jnp.asarray(losses), jax.tree.map(jnp.asarray, batch)


def test_losses_and_rewards_are_trls():
    for rows in (((0, 1), (2, 3)), ((2,), (0,), (), (3, 1))):
        losses, batch = batch_of(*rows)
        total, measured = dpo(losses, batch, 0.3)
        assert counted(batch) == 4
        np.testing.assert_allclose(total, sum(TRL_LOSSES), rtol=1e-6)
        for name, right in TRL.items():
            np.testing.assert_allclose(measured.pop(f"rewards_{name}") / 4, right, rtol=1e-6)
        assert not measured


def test_where_model_and_reference_agree_a_pair_costs_log_2_and_its_labels_are_drawn_to_and_fro_by_half_of_beta():
    losses, batch = batch_of((0, 1), (2,))
    agreeing = {**batch, "reference": losses}
    total, gradient = jax.value_and_grad(lambda x: dpo(x, agreeing, 0.3)[0])(losses)
    np.testing.assert_allclose(total, 3 * np.log(2), rtol=1e-7)
    np.testing.assert_allclose(gradient, 0.15 * np.asarray(batch["weights"]), rtol=1e-6)


def test_a_pair_of_which_nothing_is_learned_is_none():
    losses, batch = batch_of((0, 1), (2, 3))
    batch["weights"] = batch["weights"].at[0, 8:].set(0)
    assert counted(batch) == 3
    np.testing.assert_allclose(dpo(losses, batch, 0.3)[0], sum(np.delete(TRL_LOSSES, 1)), rtol=1e-6)
