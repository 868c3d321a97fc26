"""PowerSGD against its algorithm in NumPy, step after step, on 4 ranks; and what its matrices are."""

import dataclasses

import jax
import numpy as np
import pytest
from closing import Closing

from meshtrain.config import ConfigError, load
from meshtrain.parallel.placement import all_placed
from meshtrain.parallel.reduce import sizes

RANK = 2


@pytest.fixture(scope="module")
def flat():
    return Closing({"data": 4}, {"compression": "powersgd", "rank": RANK})


def by_name(made, tree):
    flat = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    return {
        name: None if x is None else np.asarray(x, np.float64)
        for name, x in zip(made.weights, flat, strict=True)
    }


def as_matrices(name, x):
    """[layers or 1, n, c] of a weight, the rows those dimensions that an input of the layer has."""
    stacked = name.startswith("blocks.")
    x = x if stacked else x[None]
    rows = {"blocks.attention.out": 2}.get(name, 1)
    return x.reshape(len(x), int(np.prod(x.shape[1 : 1 + rows])), -1)


@pytest.mark.thorough
def test_five_steps_are_those_of_the_algorithm(flat):
    random = np.random.default_rng(3)
    q = {name: x for name, x in by_name(flat, flat.kept.q).items() if x is not None}
    assert set(q) == {weight.name for weight in flat.weights.values() if weight.decayed}
    q = {
        name: x.reshape(
            -1, as_matrices(name, np.zeros(flat.weights[name].whole)).shape[2], RANK
        )
        for name, x in q.items()
    }
    owed = {name: np.zeros((4, *flat.weights[name].whole)) for name in q}
    for _ in range(5):
        gradients = flat.draw(random)
        sums, _ = flat.close(gradients)
        for name, begun in q.items():
            m = [
                as_matrices(name, g[0, 0] + e)
                for g, e in zip(
                    gradients[name].astype(np.float64), owed[name], strict=True
                )
            ]
            total = []
            for layer, start in enumerate(begun):
                p = np.linalg.qr(sum(x[layer] @ start for x in m))[0]
                q[name][layer] = sum(x[layer].T @ p for x in m)
                total.append(p @ q[name][layer].T)
                for rank in range(4):
                    left = m[rank][layer] - p @ p.T @ m[rank][layer]
                    as_matrices(name, owed[name][rank])[layer] = left
            want = np.stack(total).reshape(sums[name].shape)
            np.testing.assert_allclose(
                sums[name], want, rtol=0, atol=2e-4 * np.abs(want).max(), err_msg=name
            )
    found = by_name(flat, flat.kept.residual)
    for name, wanted in owed.items():
        np.testing.assert_allclose(
            found[name], wanted, rtol=0, atol=2e-4 * np.abs(wanted).max(), err_msg=name
        )


@pytest.mark.thorough
def test_gradients_that_share_so_few_columns_arrive_whole():
    """Even through a Q that was drawn at random: nothing is left out but rounding."""
    made, random = (
        Closing(
            {"data": 4}, {"compression": "powersgd", "rank": RANK, "feedback": False}
        ),
        np.random.default_rng(4),
    )
    gradients = made.draw(random)
    for name, weight in made.weights.items():
        if weight.decayed:
            m = as_matrices(name, gradients[name][0, 0, 0])
            thin = np.einsum(
                "lnr,lcr->lnc",
                m[:, :, :RANK],
                random.standard_normal((len(m), m.shape[2], RANK)),
            )
            gradients[name][...] = thin.reshape(weight.whole)
    sums, statistics = made.close(gradients)
    for name, wanted in made.total(gradients).items():
        np.testing.assert_allclose(
            sums[name], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=name
        )
    assert statistics["reduce_error"] < 1e-4
    assert "residual_norm" not in statistics


@pytest.mark.thorough
def test_layers_that_only_pad_a_stage_stay_zero():
    made = Closing(
        {"data": 2, "pipeline": 2},
        {"compression": "powersgd", "rank": RANK},
        microbatches=2,
    )
    assert not (made.layout.layer_at >= 0).all()
    gradients, padding = (
        made.draw(np.random.default_rng(5)),
        made.layout.layer_at.reshape(-1) < 0,
    )
    for name, weight in made.weights.items():
        if weight.stacked:
            each = len(padding) // 2
            for stage in range(2):
                gradients[name][
                    :, :, stage, padding[stage * each : (stage + 1) * each]
                ] = 0
    for _ in range(2):
        sums, _ = made.close(gradients)
    residuals = made.residuals()
    for name, weight in made.weights.items():
        if weight.stacked:
            assert (
                np.abs(sums[name][padding]).max()
                == np.abs(residuals[name][padding]).max()
                == 0
            )
            assert np.abs(sums[name][~padding]).max() > 0


def configuration(rank, mesh=None, **reduce):
    return load(
        {
            "model": {
                "layers": 4,
                "d_model": 64,
                "heads": 8,
                "kv_heads": 4,
                "d_ff": 160,
                "vocab_size": 257,
            },
            "mesh": mesh or {"data": 2, "tensor": 2},
            "parallel": {"reduce": {"compression": "powersgd", "rank": rank, **reduce}},
            "train": {"global_batch_size": 8, "sequence_length": 16},
        }
    )


@pytest.mark.parametrize(
    ("name", "n", "c"),
    [
        ("embedding.tokens", 129, 64),  # the vocabulary over tensor, padded
        ("blocks.attention.q", 64, 32),  # inputs | 4 of 8 heads with their numbers
        ("blocks.attention.k", 64, 16),
        ("blocks.attention.out", 32, 64),
        ("blocks.mlp.up", 64, 80),
        ("blocks.mlp.down", 80, 64),
    ],
)
def test_each_devices_part_of_a_weight_is_a_matrix_of_inputs_and_outputs(name, n, c):
    config = configuration(4)
    weight = next(w for w in all_placed(config) if w.name == name)
    seen = sizes.as_matrix(config, weight)
    local = sizes.compressed_part(config, weight).local(config)[weight.stacked :]
    assert (np.prod(local[: seen.rows]), np.prod(local[seen.rows :])) == (n, c)
    layers = (4,) if weight.stacked else ()
    shape = sizes.q_spread(config, weight).local(config)
    assert np.prod(shape) == np.prod(layers) * c * 4
    assert shape[: len(layers)] == layers


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "tensor": 2}])
def test_each_expert_has_a_matrix_of_its_own(mesh):
    moe = {"experts": 8, "top_k": 2, "d_ff": 48}
    model = {
        "family": "mixtral",
        "layers": 4,
        "d_model": 32,
        "heads": 4,
        "kv_heads": 2,
        "vocab_size": 61,
        "moe": moe,
    }
    config = load(
        {
            "model": model,
            "mesh": mesh,
            "parallel": {"reduce": {"compression": "powersgd", "rank": 3}},
            "train": {"global_batch_size": 8},
        }
    )
    weights = {w.name: w for w in all_placed(config)}
    width = 48 // mesh.get("tensor", 1)
    for name, n, c in (("gate", 32, width), ("up", 32, width), ("down", width, 32)):
        weight = weights[f"blocks.experts.{name}"]
        seen = sizes.as_matrix(config, weight)
        local = sizes.compressed_part(config, weight).local(config)[seen.first :]
        assert (seen.first, local) == (2, (n, c))
        assert sizes.q_spread(config, weight).local(config) == (4, 8, 1, c, 3)


def test_a_matrix_that_would_not_get_smaller_goes_as_it_is():
    small, large = configuration(12), configuration(13)
    k = next(
        w for w in all_placed(small) if w.name == "blocks.attention.k"
    )  # 64 x 16: 12 * 80 < 1024 < 13 * 80
    assert sizes.compresses(small, k)
    assert not sizes.compresses(large, k)
    norm = next(w for w in all_placed(small) if w.name == "blocks.mlp_norm.scale")
    assert not sizes.compresses(small, norm)


def test_a_rank_that_compresses_nothing_is_refused_with_the_largest_that_does():
    """mlp.down is 80 x 64 on a device: 35 * 144 < 5120; the embedding is 129 x 64: 42 * 193 < 8256."""
    sizes.check_rank(configuration(42))
    with pytest.raises(
        ConfigError, match=r"^parallel\.reduce\.rank is 43, .*; legal .* at most 42\.$"
    ):
        sizes.check_rank(configuration(43))
    sizes.check_rank(configuration(43, {"data": 1, "tensor": 2}))


@pytest.mark.thorough
def test_q_begins_the_same_with_a_seed_and_otherwise_with_another(flat):
    draw = lambda seed: by_name(flat, flat.zero.feedback.init_q(jax.random.key(seed)))
    one, same, other = draw(1), draw(1), draw(2)
    for name, x in one.items():
        if x is not None:
            assert np.array_equal(x, same[name])
            assert not np.array_equal(x, other[name])
    shapes = [
        dataclasses.astuple(sizes.q_spread(flat.config, weight))[0]
        for weight in flat.weights.values()
        if weight.decayed
    ]
    assert sorted(shapes) == sorted(x.shape for x in one.values() if x is not None)
