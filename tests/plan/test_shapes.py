"""Sizes that follow from a model alone; the share of the peak, of known devices only."""

import pytest

from meshtrain.cluster.accelerators import ACCELERATORS, KINDS, canonical
from meshtrain.config import load, replaced
from meshtrain.config.stacks import model_of_stack
from meshtrain.plan import named, plan, shapes
from meshtrain.plan.shapes import tokens_at_peak


def test_keys_that_a_query_sees_are_a_mean_over_layers_that_see_the_window_and_all():
    """A window of 10 in sequences of 40: twice the mean of 1, 2 ... 10, 10 ..., against 40 where all before is seen."""
    sizes = {"layers": 7, "d_model": 32, "heads": 4, "window": 10}
    near = 2 * (sum(range(1, 10)) + 31 * 10) / 40
    for every, whole in ((0, 0), (1, 7), (2, 3), (6, 1)):
        model = load({"model": sizes | {"global_every": every}}).model
        assert shapes.seen(model, 40) == pytest.approx(
            (whole * 40 + (7 - whole) * near) / 7, rel=0.02
        )


def test_layers_between_do_not_count_among_those_that_see_the_window():
    """Attention in layers 2, 4 ... 12, the layers 4, 8 and 12 see all: half of them, by themselves and in the model."""
    sizes = {"layers": 12, "d_model": 32, "heads": 4, "window": 10, "global_every": 4}
    linear = {"key_heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8}
    model = load(
        {"model": sizes | {"pattern": ["linear", "full"], "linear": linear}}
    ).model
    alone = load({"model": sizes | {"global_every": 2}}).model
    for one in (model, model_of_stack(model, "blocks")):
        assert shapes.seen(one, 40) == pytest.approx(shapes.seen(alone, 40))
    never = load(
        {
            "model": sizes
            | {
                "global_every": 5,
                "layers": 8,
                "pattern": ["linear", "full"],
                "linear": linear,
            }
        }
    ).model
    nowhere = load({"model": sizes | {"global_every": 0}}).model
    for one in (never, model_of_stack(never, "blocks")):
        assert shapes.seen(one, 40) == pytest.approx(shapes.seen(nowhere, 40))


def test_the_mfu_of_a_planned_step_is_the_planners():
    config = replaced(load("configs/llama3_8b.yaml"), precision={"compute": "bfloat16"})
    planned = plan(config, named("h100", devices=config.mesh.devices))
    tokens = config.train.global_batch_size * config.train.sequence_length
    peak = tokens_at_peak(config, "NVIDIA H100 80GB HBM3", planned.devices)
    assert peak is not None
    assert tokens / planned.seconds / peak == pytest.approx(planned.mfu)


def test_a_device_that_nobody_knows_has_no_peak():
    assert tokens_at_peak(load("configs/quickstart.yaml"), "cpu", 8) is None
    assert (
        tokens_at_peak(load("configs/quickstart.yaml"), "NVIDIA H100 PCIe", 8) is None
    )


def test_every_kind_is_an_accelerator():
    assert set(KINDS.values()) <= ACCELERATORS.keys()


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100-SXM4-40GB", "a100-40"),  # of older drivers
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("TPU v5", "tpu-v5p"),
        ("cpu", "cpu"),
        # slower boards, and chips that have no data sheet here
        ("NVIDIA H100 PCIe", "nvidia-h100-pcie"),
        ("NVIDIA H100 NVL", "nvidia-h100-nvl"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia-h100-80gb-hbm3-mig-1g-10gb"),
        ("NVIDIA GH200 480GB", "nvidia-gh200-480gb"),
        ("NVIDIA L4", "nvidia-l4"),
        ("NVIDIA L40S", "nvidia-l40s"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("TPU v5 lite", "tpu-v5-lite"),
    ],
)
def test_a_device_has_one_name_whoever_asks(kind, name):
    assert canonical(kind) == canonical(name) == name
    known = tokens_at_peak(load("configs/quickstart.yaml"), kind, 8) is not None
    assert known == (name in ACCELERATORS and name != "cpu")
