import pytest
from covering import slow_but
from described_gpus import needs_compiler, printed

from experiments.plan import odd

FEW = ["adapters, one microbatch", "offloaded", "uneven stages, zero bubble"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_but(odd.SETTINGS, FEW))
def test_an_odd_setting_holds_what_xlas_cpu_program_holds(name):
    planned, compiled = odd.held(odd.config_of(name))
    assert planned == pytest.approx(compiled, rel=odd.GOAL)


HELD_ON_GPU = """
import sys
from experiments.plan import odd
print(*odd.held(odd.config_of(sys.argv[1], "h100"), "h100"))
"""


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("name", odd.ON_GPUS)
def test_what_cpus_hold_otherwise_is_planned_for_gpus_as_xlas_cuda_compiler_has_it(
    name,
):
    planned, compiled = map(float, printed("-c", HELD_ON_GPU, name).split())
    assert planned == pytest.approx(compiled, rel=odd.GOAL)
