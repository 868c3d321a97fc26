"""`optimizer.transfer`: its factors, a base of the model's own size that changes nothing, the same losses on every
mesh, and the coordinate check.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from covering import thorough_but
from refusals import tells

from experiments import transfer
from meshtrain.config import ConfigError, load
from meshtrain.model.transfer import TransferFactors, factors
from meshtrain.model.weights import weights
from meshtrain.step import Program

BASE = {"width": 16, "depth": 1}


def config_of(model=None, base=BASE, **sections):
    optimizer = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.01}
    sizes = {
        "layers": 2,
        "d_model": 32,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 64,
        "vocab_size": 61,
    }
    return load(
        {
            "model": sizes | (model or {}),
            "train": {"global_batch_size": 8, "sequence_length": 16},
            "optimizer": optimizer | ({"transfer": base} if base else {}),
            **sections,
        }
    )


def losses(config, steps=3):
    program = Program(config)
    state = program.init()
    text = np.random.default_rng(0).integers(0, 61, (8, 17), np.int32)
    batch = program.place({"tokens": text[:, :-1], "labels": text[:, 1:]})
    found = []
    for _ in range(steps):
        state, metrics = program.train_step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def by_name(config):
    return {weight.name: factors(config, weight) for weight in weights(config.model)}


def test_factors_are_those_of_the_table():
    found = by_name(config_of())
    # m = 2, k = 2
    assert found["embedding.tokens"] == TransferFactors(1, 1, 2)
    assert found["head.norm.scale"] == TransferFactors(0.5, 0.5, 1)
    assert found["head.weight"] == TransferFactors(1, 1, 2)
    assert found["blocks.attention.q"] == TransferFactors(2**-0.5, 0.5, 4)
    assert found["blocks.mlp_norm.scale"] == TransferFactors(1, 1, 4)
    # the table begins it with 1 / sqrt(2 layers), the base has one layer
    out = found["blocks.attention.out"]
    assert out.begin == pytest.approx(2**0.5 / (2 * 2**0.5)) and (
        out.step,
        out.gradient,
    ) == (
        0.25,
        2,
    )
    assert found["blocks.mlp.down"] == out


def test_factors_are_those_of_the_papers():
    """Table 1 of CompleteP at alpha 1 (Dey et al. 2025), and the order of its code: with a multiplier in the forward
    folded into a weight, its gradient is as much larger.
    """
    m = 4.0
    k = 8.0
    sizes = {"layers": 8, "d_model": 64, "heads": 8, "kv_heads": 8, "d_ff": 128}
    config = config_of(sizes)
    table = {weight.name: weight for weight in weights(config.model)}
    base = {w.name: w for w in weights(config_of(sizes | {"layers": 1}, None).model)}
    # (init. std, LR, eps, and the multiplier of the forward that is folded in)
    hidden = (m**-0.5, 1 / m, 1 / (m * k), 1.0)
    rules = {
        "embedding.tokens": (1.0, 1.0, 1 / m, 1.0),
        "head.weight": (1.0, 1.0, 1 / m, 1.0),
        "head.norm.scale": (1.0, 1.0, 1 / m, 1 / m),
        "blocks.attention_norm.scale": (1.0, 1.0, 1 / (m * k), 1.0),
        "blocks.attention.k": hidden,
        "blocks.mlp.up": hidden,
        "blocks.attention.out": (*hidden[:3], 1 / k),
        "blocks.mlp.down": (*hidden[:3], 1 / k),
    }
    for name, (begin, rate, eps, forward) in rules.items():
        found = factors(config, table[name])
        times = table[name].std / base[name].std if table[name].std else 1.0
        assert found.begin * times == pytest.approx(begin * forward), name
        assert found.step == pytest.approx(rate * forward), name
        # g / (sqrt(g^2) + eps) is the same with g times a factor and eps times it
        assert found.gradient == pytest.approx(forward / eps), name


def test_norms_behind_branches_wide_heads_experts_and_scaled_embeddings_have_their_own():
    gemma = by_name(config_of({"family": "gemma2", "tied_head": True}))
    assert gemma["blocks.mlp_post_norm.scale"] == TransferFactors(0.5, 0.5, 2)
    assert gemma["blocks.mlp.down"].step == 0.5
    root = pytest.approx(2**-0.5)
    assert (
        gemma["embedding.tokens"].step == root and gemma["head.norm.scale"].step == root
    )
    wide = by_name(config_of(base={"head_dim": 2}))
    assert wide["blocks.attention.q"] == TransferFactors(0.5, 0.5, 0.5)
    assert wide["blocks.attention.k"] == TransferFactors()
    experts = by_name(
        config_of(
            {
                "family": "mixtral",
                "d_ff": 0,
                "moe": {"experts": 4, "top_k": 2, "d_ff": 16},
            }
        )
    )
    assert experts["blocks.experts.router"] == TransferFactors(0.5, 0.5, 2)
    assert experts["blocks.experts.down"].step == 0.25


@pytest.mark.thorough
def test_a_base_of_the_same_size_changes_nothing():
    same = config_of(base={"width": 32, "depth": 2, "head_dim": 8})
    np.testing.assert_allclose(losses(same), losses(config_of(base=None)), rtol=1e-6)


@pytest.mark.thorough
def test_norms_by_one_and_a_scale_begin_as_others_do():
    config = config_of({"family": "gemma2"})
    scale = jax.device_get(Program(config).init().params["head"]["norm"]["scale"])
    np.testing.assert_allclose(
        1 + scale, factors(config, _named(config, "head.norm.scale")).begin
    )


def _named(config, name):
    return next(weight for weight in weights(config.model) if weight.name == name)


MESHES = {
    "data 2, tensor 2, pipeline 2, ZeRO-3": {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"zero_stage": 3, "microbatches": 2},
    },
    "context 2, ZeRO-1": {"mesh": {"context": 2, "data": 2}},
    "lion, data 4": {"mesh": {"data": 4}},
}


@pytest.mark.parametrize("mesh", thorough_but(MESHES, lambda mesh: "pipeline" in mesh))
def test_a_mesh_changes_no_loss(mesh):
    config = config_of(**MESHES[mesh])
    alone = config_of()
    if "lion" in mesh:
        config, alone = (
            replace(c, optimizer=replace(c.optimizer, name="lion"))
            for c in (config, alone)
        )
    np.testing.assert_allclose(losses(config), losses(alone), rtol=1e-6)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"optimizer": {"name": "muon"}}, "optimizer.name is muon"),
        ({"lora": {"rank": 2}}, "lora.rank 2"),
        ({"train": {"trainable": ["head.*"]}}, "train.trainable"),
    ],
)
def test_what_it_has_no_rule_for_is_refused(sections, says):
    sections = {"optimizer": {}} | sections
    sections["optimizer"] = sections["optimizer"] | {"transfer": BASE}
    with pytest.raises(ConfigError) as error:
        load(sections)
    assert tells(str(error.value), "optimizer.transfer", says)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["width", "depth"])
def test_coordinates_move_as_far_at_every_size(by, monkeypatch):
    """Without transfer logits move further the wider the model; with it they move within a factor of two as far."""
    monkeypatch.setattr(transfer, "WIDTHS", (64, 256))
    monkeypatch.setattr(transfer, "DEPTHS", (2, 16))
    found = transfer.coordinates(by)
    growth = {
        kind: {name: last[name] / first[name] for name in first}
        for kind, (first, last) in found.items()
    }
    assert 0.5 < growth[True]["logits"] < 2 and 0.5 < growth[True]["stream"] < 2
    if by == "width":
        assert growth[False]["logits"] > 2.5
