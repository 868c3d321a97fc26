"""What takes time beside products: passes over memory, counted."""

import dataclasses

import pytest

from meshtrain.config import load, replaced
from meshtrain.plan import ACCELERATORS, compute, named
from meshtrain.plan.compute import DEFAULT_PROFILE, FrameworkProfile
from meshtrain.plan.layer_costs import layer_cost

H100 = ACCELERATORS["h100"]
RATE = H100.bandwidth * 1e9 * H100.efficiency.memory


def config(microbatches=4, family="llama", **parallel):
    sizes = {
        "family": family,
        "layers": 4,
        "d_model": 512,
        "heads": 8,
        "d_ff": 2048,
        "vocab_size": 1024,
    }
    return load(
        {
            "model": sizes,
            "mesh": {"data": 4},
            "parallel": {"microbatches": microbatches, "zero_stage": 1} | parallel,
            "precision": {"compute": "bfloat16"},
            "train": {"global_batch_size": 16, "sequence_length": 256},
        }
    )


BLOCK = 4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512


def moved(given, profile=DEFAULT_PROFILE):
    return compute.weight_passes(given, H100, profile).memory * RATE


def test_gradients_of_several_microbatches_are_added_up():
    assert moved(config(1)) == 0
    assert moved(config(4)) == pytest.approx(10 * BLOCK)
    assert moved(config(4), FrameworkProfile(sum_bytes=0)) == 0


def test_what_is_gathered_is_copied_where_the_framework_does_so():
    sharded = config(4, zero_stage=3, zero_hold=False)
    assert moved(sharded) == moved(config(4))
    assert moved(sharded, FrameworkProfile(copy_bytes=14)) - moved(
        sharded
    ) == pytest.approx(14 * BLOCK)
    assert moved(config(4), FrameworkProfile(copy_bytes=14)) == moved(config(4))


def layer(family, profile):
    shape = compute.LayerShape(config(family=family).model, "bfloat16", 2, 256)
    return compute.layer(shape, H100, profile)


@pytest.mark.parametrize(
    ("practice", "part", "more"),
    [
        ({"norm_bytes": 36.0}, "norms", 9),
        ({"fused_gate": False}, "mlp_hidden", 5 / 3),
        ({"fused_rotation": False}, "qkv", 11 / 2),
    ],
)
def test_a_llama_s_norms_rotations_and_gates_are_each_many_kernels_without_a_compiler_and_gpt_2_s_one(
    practice, part, more
):
    eager = dataclasses.replace(DEFAULT_PROFILE, **practice)
    for family, ratio in (("llama", more), ("gpt2", 1)):
        fused, unfused = layer(family, DEFAULT_PROFILE), layer(family, eager)
        assert getattr(fused, part).memory > 0
        assert getattr(unfused, part).memory == pytest.approx(
            ratio * getattr(fused, part).memory
        )
        others = {
            name: value
            for name, value in vars(unfused).items()
            if name not in (part, "forward")
        }
        assert others == {name: getattr(fused, name) for name in others}


def test_attention_without_a_kernel_reads_and_writes_its_scores():
    """32 bytes a score over forward and backward, which counts as three forwards."""
    written = layer("llama", dataclasses.replace(DEFAULT_PROFILE, kernel=None))
    scores = 2 * 8 * 256**2
    assert written.attention.memory * RATE == pytest.approx(scores * 32 / 3)
    assert layer("llama", DEFAULT_PROFILE).attention.memory == 0


def test_recomputing_attention_alone_recomputes_its_passes_over_scores_too():
    profile = dataclasses.replace(DEFAULT_PROFILE, kernel=None, recomputes="attention")
    made = layer("llama", profile)
    assert compute.recomputed(config(), made, profile) == made.attention


def test_passes_over_the_logits_are_counted():
    def head(passes, **practice):
        profile = dataclasses.replace(DEFAULT_PROFILE, loss_passes=passes, **practice)
        return compute.head(config().model, H100, "bfloat16", 512, 4, profile).memory

    assert (head(13) - head(3)) * RATE == pytest.approx(10 * 4 * 512 * 1024 / 4)
    # A tensor rank that takes the loss of the whole vocabulary passes over all of it.
    assert (head(3, whole_logits=True) - head(3)) * RATE == pytest.approx(
        3 * 4 * 512 * 1024 * 3 / 4
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"batching": "packed"}},
        {"model": {"dropout": 0.1}},
        {"precision": {"compute": "float32"}},
    ],
)
def test_seconds_are_those_of_the_kernel_that_the_program_takes(changed):
    """Packed rows, dropout and float32 take the fused kernel, at 0.65 of cuDNN's rate."""
    plain = replaced(config(), **{k: v for k, v in changed.items() if k == "precision"})
    cluster = named("h100", 4)
    taken = layer_cost(replaced(config(), **changed), cluster).forward.attention
    as_others = dataclasses.replace(DEFAULT_PROFILE, compiled=False)
    assert taken == pytest.approx(
        layer_cost(plain, cluster, as_others).forward.attention / 0.65
    )
    assert layer_cost(config(), cluster).forward.attention < taken
