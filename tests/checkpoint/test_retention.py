import math

import pytest

from meshtrain.checkpoint.retention import kept
from meshtrain.config import CheckpointConfig


def steps(losses, **keys):
    return set(kept(losses, CheckpointConfig(**keys)))


def test_the_newest_stay_by_step():
    assert steps({1: None, 10: None, 9: None, 2: None}, keep=2) == {9, 10}


def test_fewer_than_keep_all_stay():
    assert steps({1: None, 2: None}, keep=3) == {1, 2}


def test_the_lowest_eval_losses_stay():
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 4.0}
    assert steps(losses, keep=1, keep_best=1) == {2, 5}
    assert steps(losses, keep=1, keep_best=2) == {2, 3, 5}
    assert steps(losses, keep=1, keep_best=0) == {5}


def test_an_eval_loss_that_is_no_number_is_never_best():
    assert steps({1: math.nan, 2: 5.0, 3: None}, keep=1, keep_best=1) == {2, 3}


def test_multiples_stay_for_ever():
    assert steps(dict.fromkeys(range(1, 11)), keep=1, keep_every=4) == {4, 8, 10}


@pytest.mark.parametrize("step", [7, 9, 10])
def test_each_that_stays_has_its_reason(step):
    reasons = kept({7: 1.0, 8: 2.0, 9: 3.0, 10: 4.0}, CheckpointConfig(keep=1, keep_best=1, keep_every=9))
    assert reasons[step] == {7: "best by eval loss", 9: "a multiple of 9", 10: "one of the newest 1"}[step]
