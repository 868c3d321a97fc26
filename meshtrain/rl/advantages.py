"""Compares the answers to one prompt with each other: an answer's advantage is how far its reward is above the group's
mean (GRPO: Shao et al. 2024, DeepSeekMath, section 4.1.2).

    rl.scale: group    A_i = (r_i - mean(r)) / (std(r) + 1e-4)    as the paper, whose formula has no 1e-4
    rl.scale: none     A_i = r_i - mean(r)                        Dr. GRPO (Liu et al. 2025, section 3.2)

The paper does not say which standard deviation it takes. Here it is the sample's, with n - 1 in the denominator, and
1e-4 is added: so TRL computes it, which makes the two comparable.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPSILON = 1e-4


def group_advantages(
    rewards: ArrayLike, scale: Literal["group", "none"]
) -> NDArray[np.float32]:
    """Returns the advantages of rewards [groups, answers], in the same shape. Flat groups have exactly 0."""
    values = np.asarray(rewards, np.float64)
    flat = flat_groups(values)
    # A mean of equal numbers may be rounded to another one.
    advantages = np.where(
        flat[:, None], 0.0, values - values.mean(axis=1, keepdims=True)
    )
    if scale == "group" and not flat.all():
        advantages[~flat] /= values[~flat].std(axis=1, ddof=1, keepdims=True) + EPSILON
    return advantages.astype(np.float32)


def flat_groups(rewards: ArrayLike) -> NDArray[np.bool_]:
    """Returns which groups of rewards [groups, answers] have one reward for all answers, and so teach nothing.

    `rl.drop_flat_groups` leaves them out, as the dynamic sampling of DAPO does (Yu et al. 2025, section 3.2).
    """
    return np.ptp(np.asarray(rewards), axis=1) == 0
