"""The program that XLA's CUDA compiler makes of linear attention's chunks for a described GPU: one kernel that moves a
fraction of the bytes.
"""

import json
from functools import cache

import pytest
from described_gpus import needs_compiler, printed

pytestmark = [pytest.mark.thorough, needs_compiler]


@cache
def programs() -> dict[str, dict[str, float]]:
    code = "import json; from experiments.linear_attention import compiled; print(json.dumps(compiled()))"
    return json.loads(printed("-c", code))


@pytest.mark.parametrize(("kind", "share"), [("gated_delta", 0.25), ("mamba2", 0.75)])
def test_chunks_are_one_kernel_without_temporaries_and_spilled_registers(kind, share):
    kernel = programs()[f"{kind}, kernel"]
    halves = programs()[f"{kind}, halves"]
    assert (kernel["kernels"], halves["kernels"]) == (1, 0)
    assert kernel["temporaries"] < 1024 < halves["temporaries"]
    assert kernel["moved"] <= share * halves["moved"]


@pytest.mark.parametrize("kind", ["gated_delta", "kda", "mamba2"])
def test_what_a_rule_moves_and_has_at_hand_is_planned_for_its_own_kind(kind):
    code = f"from experiments.linear_attention import rule_numbers as r; print(r({kind!r}, 64, 64, 64))"
    (moved, planned), (at_hand, held) = json.loads(
        printed("-c", code).replace("(", "[").replace(")", "]")
    )
    assert planned == pytest.approx(moved, rel=0.12)
    assert held == pytest.approx(at_hand, rel=0.12)
