import pytest

from meshtrain.plan.measure import SIZES, _line


def test_a_line_is_found_again_and_chance_makes_no_endless_bandwidth():
    assert _line([(n, 5e-6 + n / 2e10) for n in SIZES]) == pytest.approx((5e-6, 2e10))
    # a load on the machine that held up the small messages only
    assert _line([(n, 1e-3 - n * 1e-11) for n in SIZES])[1] == pytest.approx(SIZES[-1] / (1e-3 - SIZES[-1] * 1e-11))
