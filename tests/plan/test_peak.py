"""The share of the peak: of known devices only."""

import pytest

from meshtrain.config import load, replaced
from meshtrain.plan import named, plan
from meshtrain.plan.cluster.accelerators import ACCELERATORS
from meshtrain.plan.peak import KINDS, tokens_at_peak


def test_the_mfu_of_a_planned_step_is_the_planners():
    config = replaced(load("configs/llama3_8b.yaml"), precision={"compute": "bfloat16"})
    planned = plan(config, named("h100", devices=config.mesh.devices))
    tokens = config.train.global_batch_size * config.train.sequence_length
    peak = tokens_at_peak(config, "NVIDIA H100 80GB HBM3", planned.devices)
    assert peak is not None
    assert tokens / planned.seconds / peak == pytest.approx(planned.mfu)


def test_a_device_that_nobody_knows_has_no_peak():
    assert tokens_at_peak(load("configs/quickstart.yaml"), "cpu", 8) is None
    assert tokens_at_peak(load("configs/quickstart.yaml"), "NVIDIA H100 PCIe", 8) is None


def test_every_kind_is_an_accelerator():
    assert set(KINDS.values()) <= ACCELERATORS.keys()
