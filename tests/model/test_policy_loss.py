"""The losses of `rl.loss` beside their formulas, written in NumPy's float64, answer by answer."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.rl import RlConfig
from meshtrain.model.loss import counted
from meshtrain.model.policy_loss import policy_loss, row_gaps

KINDS = ["ppo_clip", "cispo", "gspo", "reinforce"]
# Answers of each row: (labels of the prompt, labels of the answer).
ROWS = [[(3, 4), (2, 5)], [(1, 1), (4, 2), (2, 3)], [(5, 7)]]
LENGTH = 15


def drawn_batch(seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the losses of labels, float32 [rows, LENGTH], and the batch of the answers of ROWS."""
    random = np.random.default_rng(seed)
    shape = (len(ROWS), LENGTH)
    names = ("weights", "advantages", "drawn", "reference")
    batch = {name: np.zeros(shape, np.float32) for name in names}
    batch["segments"] = np.zeros(shape, np.int32)
    losses = random.gamma(2.0, 1.0, shape).astype(np.float32)
    batch["drawn"] = (-losses + random.normal(0, 0.4, shape)).astype(np.float32)
    batch["reference"] = (losses + random.normal(0, 0.3, shape)).astype(np.float32)
    for row, answers in enumerate(ROWS):
        begin = 0
        for number, (prompt, answer) in enumerate(answers, 1):
            end = begin + prompt + answer
            batch["segments"][row, begin:end] = number
            batch["weights"][row, begin + prompt : end] = random.uniform(0.5, 2)
            batch["advantages"][row, begin + prompt : end] = random.normal()
            begin = end
    return losses, batch


def by_formula(losses: np.ndarray, batch: dict[str, np.ndarray], rl: RlConfig) -> float:
    """Returns the sum over answers of what the papers' formulas give for their tokens, times their weights."""
    total = 0.0
    low, high = rl.clip
    for row in range(len(losses)):
        for number in range(1, batch["segments"][row].max() + 1):
            here = (batch["segments"][row] == number) & (batch["weights"][row] != 0)
            pi, mu, reference, advantage, weight = (
                x[row][here].astype(np.float64)
                for x in (
                    -losses,
                    batch["drawn"],
                    -batch["reference"],
                    batch["advantages"],
                    batch["weights"],
                )
            )
            ratio = np.exp(pi - mu)
            if rl.loss == "gspo":
                ratio = np.full_like(ratio, np.exp(np.mean(pi - mu)))
            clipped = np.clip(ratio, 1 - low, 1 + high)
            each = -np.minimum(ratio * advantage, clipped * advantage)
            if rl.loss == "cispo":
                each = -clipped * advantage * pi
            if rl.loss == "reinforce":
                each = -advantage * pi
            each = each + rl.beta * (np.exp(reference - pi) - (reference - pi) - 1)
            total += float((each * weight).sum())
    return total


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_formula(kind, beta):
    rl = RlConfig(loss=kind, beta=beta)
    losses, batch = drawn_batch()
    loss, _ = policy_loss(jnp.asarray(losses), batch, rl)
    assert float(loss) == pytest.approx(by_formula(losses, batch, rl), rel=1e-6)


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "reinforce"])
def test_its_gradient_is_that_of_the_formula(kind):
    rl = RlConfig(loss=kind, beta=0.2)
    losses, batch = drawn_batch(1)
    gradient = jax.grad(lambda x: policy_loss(x, batch, rl)[0])(jnp.asarray(losses))
    step = 1e-5
    for row, place in np.ndindex(*losses.shape):
        low, high = (losses.astype(np.float64) for _ in range(2))
        low[row, place] -= step
        high[row, place] += step
        right = (by_formula(high, batch, rl) - by_formula(low, batch, rl)) / (2 * step)
        assert float(gradient[row, place]) == pytest.approx(right, rel=1e-4, abs=1e-5)


def test_the_clipped_ratio_of_cispo_has_no_gradient():
    losses, batch = drawn_batch()
    rl = RlConfig(loss="cispo")
    gradient = jax.grad(lambda x: policy_loss(x, batch, rl)[0])(jnp.asarray(losses))
    ratio = np.exp(-losses - batch["drawn"])
    weight = np.clip(ratio, 1 - rl.clip[0], 1 + rl.clip[1])
    right = weight * batch["advantages"] * batch["weights"]
    np.testing.assert_allclose(gradient, right, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_weigh_nothing_change_nothing(kind):
    losses, batch = drawn_batch()
    rl = RlConfig(loss=kind, beta=0.1)
    loss, measured = policy_loss(jnp.asarray(losses), batch, rl)
    silent = batch["weights"] == 0
    other = {
        name: np.where(silent, np.float32(1e3), x)
        for name, x in batch.items()
        if name != "segments"
    }
    other |= {"segments": batch["segments"], "weights": batch["weights"]}
    again, others = policy_loss(jnp.where(silent, 77.0, losses), other, rl)
    assert float(again) == float(loss)
    assert {name: float(x) for name, x in measured.items()} == {
        name: float(x) for name, x in others.items()
    }


def test_answers_are_divided_by_the_labels_that_count():
    _, batch = drawn_batch()
    assert float(counted(batch)) == sum(answer for row in ROWS for _, answer in row)


def test_a_row_tells_its_largest_gap_and_a_nan():
    losses, batch = drawn_batch()
    gaps = row_gaps(jnp.asarray(losses), batch)
    right = np.where(batch["weights"] != 0, np.abs(-losses - batch["drawn"]), 0).max(1)
    np.testing.assert_allclose(gaps, right, rtol=1e-6)
    batch["drawn"][1, 1] = np.nan
    assert np.isnan(row_gaps(jnp.asarray(losses), batch)).tolist() == [
        False,
        True,
        False,
    ]


def test_a_token_that_was_never_to_be_drawn_counts_for_a_bounded_ratio():
    losses, batch = drawn_batch()
    batch["drawn"][0, 3] = -1e9
    for kind in KINDS:
        loss, _ = policy_loss(
            jnp.asarray(losses), batch, replace(RlConfig(), loss=kind)
        )
        assert np.isfinite(loss)
