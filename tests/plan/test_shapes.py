"""Sizes that follow from a model alone."""

import pytest

from meshtrain.config import load
from meshtrain.plan import shapes


def test_keys_that_a_query_sees_are_a_mean_over_layers_that_see_the_window_and_all():
    """A window of 10 in sequences of 40: twice the mean of 1, 2 ... 10, 10 ..., against 40 where all before is seen."""
    sizes = {"layers": 7, "d_model": 32, "heads": 4, "window": 10}
    near = 2 * (sum(range(1, 10)) + 31 * 10) / 40
    for every, whole in ((0, 0), (1, 7), (2, 3), (6, 1)):
        model = load({"model": sizes | {"global_every": every}}).model
        assert shapes.seen(model, 40) == pytest.approx((whole * 40 + (7 - whole) * near) / 7, rel=0.02)
