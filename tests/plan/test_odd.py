import pytest
from covering import slow_but

from experiments.plan import odd

FEW = ["adapters, one microbatch", "offloaded", "uneven stages, zero bubble"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_but(odd.SETTINGS, FEW))
def test_an_odd_setting_holds_what_xlas_cpu_program_holds(name):
    planned, compiled = odd.held(odd.config_of(name))
    assert planned == pytest.approx(compiled, rel=odd.GOAL)
