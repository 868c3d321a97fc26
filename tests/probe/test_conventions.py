import pytest

from meshtrain.plan.cluster.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS, PERMUTE, REDUCE_SCATTER
from meshtrain.probe.conventions import bus_factor
from meshtrain.probe.figures import Timing

# NVIDIA/nccl-tests, doc/PERFORMANCE.md, section "Bus bandwidth"
FACTORS = {ALL_REDUCE: 2 * 7 / 8, ALL_GATHER: 7 / 8, REDUCE_SCATTER: 7 / 8, ALL_TO_ALL: 7 / 8, PERMUTE: 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_bus_bandwidth_is_that_of_nccl_tests(kind):
    assert bus_factor(kind, 8) == pytest.approx(FACTORS[kind])
    timing = Timing("data", kind, 8, 8_000_000, 1e-3, 0.0)
    assert timing.algbw == pytest.approx(8e9)
    assert timing.busbw == pytest.approx(8e9 * FACTORS[kind])
