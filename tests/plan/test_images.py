"""What the planner says of a model of images is what its program has, does and sends."""

import dataclasses
import itertools
import math

import jax
import pytest

from meshtrain.config import ConfigError, load
from meshtrain.mesh import make_mesh
from meshtrain.model.weights import parameters
from meshtrain.parallel.layout import Layout
from meshtrain.plan import (
    ACCELERATORS,
    activations,
    compute,
    memory,
    named,
    plan,
    shapes,
    traffic,
)
from meshtrain.plan.compiled import compile_step
from meshtrain.plan.compute import DEFAULT_PROFILE
from meshtrain.step import Program


def vit(
    mesh=(1, 1, 1), pool="class", model=None, compute="float32", batch=16, **parallel
):
    sizes = {
        "layers": 2,
        "d_model": 64,
        "heads": 4,
        "d_ff": 96,
        "vocab_size": 101,
        "image_size": 32,
        "patch_size": 8,
    }
    data, tensor, stages = mesh
    return load(
        {
            "model": {"family": "vit", "pool": pool, **sizes, **(model or {})},
            "mesh": {"data": data, "tensor": tensor, "pipeline": stages},
            "parallel": parallel,
            "precision": {"compute": compute},
            "data": {"source": "synthetic"},
            "train": {"global_batch_size": batch, "label_smoothing": 0.1},
        }
    )


def test_vit_l_on_imagenet_21k_is_planned_for_256_gpus():
    config = load("configs/vit_l_in21k.yaml")
    found = plan(config, named("h100", 256))
    assert config.mesh.devices == 256 and found.bytes < 16e9 and 0.1 < found.mfu < 0.5
    # ViT-L/16 has 304.3 M parameters with 1,000 classes (transformers counts 304,326,632)
    thousand = dataclasses.replace(config.model, vocab_size=1000)
    assert parameters(thousand) == 304_326_632
    assert found.as_json()["parameters"] == parameters(thousand) + 20_843 * 1025


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_parameters_and_elements_on_a_device_are_those_of_the_layout(pool):
    for mesh, stage, vocab in itertools.product(
        ((1, 1, 1), (2, 2, 2), (4, 1, 2)), (1, 3), ("spread", "edge")
    ):
        config = vit(
            mesh, pool, {"layers": 3, "d_ff": 50}, zero_stage=stage, vocab=vocab
        )
        layout = Layout(config, make_mesh(config))
        shards = [
            x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(layout.masters)
        ]
        held = memory.between_steps(config)[0]
        assert held.nbytes == sum(4 * math.prod(shape) for shape in shards)
    whole = jax.eval_shape(lambda: layout.canonical(layout.init(jax.random.key(0))))
    assert parameters(config.model) == sum(x.size for x in jax.tree.leaves(whole))


def test_model_flops_are_counted_by_hand():
    """ViT (equations 1 to 4), 3 x forward: patches without a gradient of their own, layers at 17 positions, one row of
    logits.
    """
    config = vit(batch=1)
    forward = (
        17 * 2 * (4 * 64 * 64 + 2 * 64 * 96) * 2 + 2 * 4 * 17 * 17 * 64 + 2 * 64 * 101
    )
    assert shapes.model_flops(config) == 3 * forward + 2 * (2 * 16 * 192 * 64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "pool", ["class", pytest.param("mean", marks=pytest.mark.slow)]
)
def test_model_flops_are_those_that_xla_counts(pool):
    """One layer: the body of a loop XLA counts once. What is no product is little where matrices are wide."""
    config = vit(
        pool=pool,
        model={
            "layers": 1,
            "d_model": 512,
            "d_ff": 1024,
            "heads": 8,
            "vocab_size": 1000,
        },
        batch=8,
    )
    flops = (
        Program(config, make_mesh(config)).lower().compile().cost_analysis()["flops"]
    )
    assert shapes.model_flops(config) == pytest.approx(flops, rel=0.05)


def test_attention_both_ways_computes_twice_what_causal_attention_does():
    """The half that a causal kernel leaves out; on short sequences less than twice, since its loops are longer."""
    long, short = (
        [
            compute.attention(
                ACCELERATORS["h100"],
                "bfloat16",
                64,
                length,
                length**2,
                DEFAULT_PROFILE,
                causal,
            ).attention
            for causal in (True, False)
        ]
        for length in (1 << 20, 197)
    )
    assert (
        long[1] / long[0] == pytest.approx(2, rel=1e-3)
        and 1 < short[1] / short[0] < 1.6
    )
    model = vit().model
    assert shapes.seen(model, 17) == 17 and compute.looped(17, False) == 34


def test_a_head_works_on_one_row_an_image():
    of_class, of_mean = vit(), vit(pool="mean")
    assert [shapes.labels(c.model, shapes.tokens(c)) for c in (of_class, of_mean)] == [
        16,
        16,
    ]
    assert [shapes.read(c.model, shapes.tokens(c)) for c in (of_class, of_mean)] == [
        16,
        16 * 16,
    ]


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_layer_keeps_what_the_same_layer_of_text_keeps(remat):
    config = vit((1, 2, 1), remat=remat)
    text = load(
        {
            "model": {
                "family": "gpt2",
                "layers": 2,
                "d_model": 64,
                "heads": 4,
                "d_ff": 96,
            },
            "mesh": {"tensor": 2},
            "parallel": {"remat": remat},
            "train": {"global_batch_size": 16, "sequence_length": 17},
        }
    )
    assert activations.kept(config, remat) == activations.kept(text, remat) > 0


CASES = {
    "zero 1": vit((4, 1, 1), zero_stage=1, microbatches=2),
    "tensor": vit((1, 4, 1)),
    "sequence parallel, recomputed": vit(
        (2, 2, 1), "mean", sequence_parallel=True, remat="full"
    ),
    "1f1b, all axes": vit((2, 2, 2), microbatches=4),
    "1f1b, all axes, mean": vit((2, 2, 2), "mean", microbatches=4),
    "1f1b, all axes, sequence parallel": vit(
        (2, 2, 2), "mean", microbatches=4, sequence_parallel=True
    ),
    "1f1b, vocabulary on the edge": vit((1, 2, 2), microbatches=4, vocab="edge"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_traffic_is_that_of_the_compiled_step(case):
    config = CASES[case]
    planned = plan(config, named("cpu", config.mesh.devices))
    compiled = compile_step(config, "cpu")
    sent = compiled.sent()
    for axis, nbytes in traffic.by_axis(planned.transfers).items():
        if nbytes > 4096:
            assert nbytes == pytest.approx(sent[axis], rel=0.01), axis


def test_a_sequence_that_ranks_cannot_share_names_the_way_out():
    with pytest.raises(
        ConfigError,
        match=r"mesh\.tensor 4 .*\.sequence_length 17, .*pool: mean, .* 16 patches, 4 ",
    ):
        vit((1, 4, 1), sequence_parallel=True)
    vit((1, 4, 1), "mean", sequence_parallel=True)
