"""Losses and their gradients on frozen tokens are those of TRL, which need not be there: its numbers are recorded.

TRL 1.16.0 with torch 2.14.1, `GRPOTrainer._compute_loss`, as `python -m experiments.rl_parity` calls it.
"""

import numpy as np
import pytest

from experiments.rl_parity import CASES, frozen, ours

# (rl.loss, rl.average, rl.beta): the loss, and its derivatives by tokens times cos(0), cos(1), ...
TRL = {
    ("ppo_clip", "token", 0.0): (-0.38083616, -0.16153712),
    ("ppo_clip", "token", 0.1): (-0.37856773, -0.16087353),
    ("ppo_clip", "sequence", 0.0): (-0.15020815, -0.28623043),
    ("ppo_clip", "sequence", 0.1): (-0.14806826, -0.28622264),
    ("ppo_clip", "constant", 0.0): (-0.23802260, -0.10096070),
    ("ppo_clip", "constant", 0.1): (-0.23660482, -0.10054596),
    ("gspo", "sequence", 0.0): (-0.16881591, -0.30446055),
    ("gspo", "sequence", 0.1): (-0.16667597, -0.30445277),
    ("cispo", "token", 0.0): (0.72046649, -0.14462685),
    ("cispo", "token", 0.1): (0.72273499, -0.14396326),
}


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.loss}-{case.average}-{case.beta}"
)
def test_losses_and_gradients_are_those_of_trl(case):
    loss, gradient = ours(case, frozen())
    found = loss, gradient @ np.cos(np.arange(len(gradient)))
    assert found == pytest.approx(TRL[case.loss, case.average, case.beta], abs=1e-6)


def test_the_frozen_tokens_are_clipped_on_both_sides_and_drawn_in_all_lengths():
    tokens = frozen()
    ratio = np.exp(np.concatenate(tokens.now) - np.concatenate(tokens.drawn))
    signs = np.repeat(tokens.advantages, [len(of) for of in tokens.now])
    assert ((ratio > 1.28) & (signs > 0)).any() and ((ratio < 0.8) & (signs < 0)).any()
    assert len({len(of) for of in tokens.now}) > 4
