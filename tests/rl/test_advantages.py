"""An answer's advantage is what its group says of it."""

import numpy as np
import pytest

from meshtrain.rl.advantages import flat_groups, group_advantages


def test_the_group_is_centred_and_divided_by_the_standard_deviation_of_a_sample():
    advantages = group_advantages([[1, 0, 0, 0], [2, 4, 4, 6]], "group")
    assert advantages.dtype == np.float32
    deviation = np.sqrt(8 / 3)
    by_hand = [
        [0.75 / 0.5001, *[-0.25 / 0.5001] * 3],
        np.array([-2, 0, 0, 2]) / (deviation + 1e-4),
    ]
    np.testing.assert_allclose(advantages, by_hand, rtol=1e-6)


def test_without_a_scale_the_group_is_centred_alone():
    np.testing.assert_array_equal(
        group_advantages([[1, 0], [8, 2]], "none"), [[0.5, -0.5], [3, -3]]
    )


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("reward", [0, 1, 0.1, 1 / 3, -1e30])
@pytest.mark.parametrize("answers", [1, 3, 7])
def test_a_flat_group_has_no_advantage_at_all_and_others_keep_theirs(
    scale, reward, answers
):
    flat = [np.float32(reward)] * answers
    steps = list(range(answers))
    advantages = group_advantages([flat, steps], scale)
    assert (advantages[0] == 0).all()
    np.testing.assert_array_equal(advantages[1], group_advantages([steps], scale)[0])
    assert flat_groups([flat, steps]).tolist() == [True, answers == 1]


def test_advantages_do_not_hang_on_how_large_all_rewards_are():
    rewards = np.array([[1.0, 2.0, 4.0]])
    np.testing.assert_allclose(
        group_advantages(rewards + 2**20, "group"),
        group_advantages(rewards, "group"),
        rtol=1e-6,
    )
