"""Predictions of several tokens ahead: their loss is that of formulas written apart, and a mesh changes nothing."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import thorough_but
from short_runs import packed_batch

from meshtrain.config import ConfigError, load
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

MODEL = {
    "layers": 4,
    "d_model": 32,
    "heads": 4,
    "d_ff": 48,
    "vocab_size": 61,
    "init_std": 0.1,
    "mtp": 2,
    "mtp_weight": 0.5,
}
MLA = {"q_rank": 12, "kv_rank": 16, "nope": 8, "rope": 4, "value": 6}
MOE = {"experts": 8, "top_k": 2, "d_ff": 16, "shared_experts": 1, "router": "sigmoid"}
DEEP = {"mla": MLA, "moe": MOE, "d_ff": None, "mtp": 1}
ROWS, LENGTH = 8, 32

# mesh, parallel, model, train, packed
LAYOUTS = {
    "2x2x2": (
        {"data": 2, "tensor": 2, "pipeline": 2},
        {"microbatches": 2},
        {},
        {},
        False,
    ),
    "sequence split, ZeRO-3, chunks": (
        {"data": 2, "tensor": 2},
        {"zero_stage": 3, "sequence_parallel": True, "remat": "full"},
        {},
        {"loss_chunk": 24},
        True,
    ),
    "zero bubble, edge": (
        {"tensor": 2, "pipeline": 2},
        {"schedule": "zb_h1", "microbatches": 2, "zero_stage": 2, "vocab": "edge"},
        DEEP,
        {},
        True,
    ),
    "paired, tied": (
        {"data": 2, "pipeline": 2},
        {"schedule": "paired", "microbatches": 2},
        {"tied_head": True, "mtp": 1},
        {"z_loss": 1e-3, "label_smoothing": 0.1},
        False,
    ),
    "zigzag": (
        {"context": 4, "data": 2},
        {"context_strategy": "all_gather"},
        DEEP,
        {},
        True,
    ),
    "ring in stages": (
        {"context": 2, "pipeline": 2},
        {"context_strategy": "ring", "microbatches": 2, "sequence_parallel": True},
        {"mtp": 1},
        {"loss_chunk": 40},
        False,
    ),
    "experts spread": (
        {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
        {"microbatches": 2, "sequence_parallel": True},
        DEEP,
        {},
        True,
    ),
}


def batch_of(packed):
    text = np.random.default_rng(0).integers(0, 61, (ROWS, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    return packed_batch(**batch) if packed else batch


def made(mesh, parallel, model, train):
    config = load(
        {
            "model": {**MODEL, **model},
            "mesh": mesh,
            "parallel": parallel,
            "train": {"global_batch_size": ROWS, "sequence_length": LENGTH, **train},
        }
    )
    return Program(config, make_mesh(config))


def gradients(mesh, parallel, model, train, packed):
    program = made(mesh, parallel, model, train)
    params = program.init().params
    batch = program.place(batch_of(packed))
    given = params, batch, jnp.zeros((), jnp.int32), jnp.ones(()), None
    found = jax.jit(lambda *given: program._gradients(*given))(*given)
    canonical = jax.tree.map(
        np.asarray, jax.jit(program.layout.canonical)(found.shards)
    )
    return float(found.loss), float(found.measured["mtp_loss"]), canonical


@cache
def on_one_device(case):
    _, _, model, train, packed = LAYOUTS[case]
    return gradients({}, {}, model, train, packed)


@pytest.mark.parametrize("case", thorough_but(LAYOUTS, "2x2x2".__eq__))
def test_a_mesh_gives_the_losses_and_gradients_of_one_device(case):
    *losses, found = gradients(*LAYOUTS[case])
    *right_losses, right = on_one_device(case)
    np.testing.assert_allclose(losses, right_losses, rtol=1e-6)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(right), strict=True
    )
    for (path, mine), wanted in pairs:
        if "load" in str(path[-1]):
            # what a router counts is equal, but for the rounds, which only spread experts take
            mine, wanted = (np.delete(x, -2, axis=-1) for x in (mine, wanted))
        error = np.linalg.norm(mine - wanted) / np.linalg.norm(wanted)
        assert error < 1e-6, (jax.tree_util.keystr(path), error)


# --- the formulas, apart


def rms(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale["scale"]


def llama(w, x, segments):
    """One block of a llama, of one sequence [T, D]."""
    a, m = w["attention"], w["mlp"]
    h = rms(x, w["attention_norm"])
    q, k, v = (jnp.einsum("td,dhk->thk", h, a[name]) for name in "qkv")
    half = q.shape[-1] // 2
    angle = jnp.arange(len(x))[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)

    def turn(x):
        low, high = x[..., :half], x[..., half:]
        return jnp.concatenate(
            [
                low * jnp.cos(angle) - high * jnp.sin(angle),
                high * jnp.cos(angle) + low * jnp.sin(angle),
            ],
            -1,
        )

    scores = jnp.einsum("thk,shk->hts", turn(q), turn(k)) / jnp.sqrt(q.shape[-1])
    seen = np.tri(len(x), dtype=bool) & (segments[:, None] == segments)
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    x = x + jnp.einsum("hts,shk,hkd->td", p, v, a["out"])
    h = rms(x, w["mlp_norm"])
    return x + (jax.nn.silu(h @ m["gate"]) * (h @ m["up"])) @ m["down"]


def published(w, tokens, labels, segments, weights, depths):
    """DeepSeek-V3, equations 21 to 25, of one sequence: the loss of the next token and those of the depths, summed."""
    log_p = lambda h, norm: jax.nn.log_softmax(rms(h, norm) @ w["head"]["weight"])
    text = np.append(tokens, labels[-1])
    h = w["embedding"]["tokens"][tokens]
    for layer in range(4):
        h = llama(jax.tree.map(lambda a, n=layer: a[n], w["blocks"]), h, segments)
    norm = w["head"]["norm"]
    places = np.arange(len(tokens))
    total = -(weights * log_p(h, norm)[places, labels]).sum()
    ahead = []
    for depth in range(depths):
        m = w["mtp"][f"depth_{depth}"]
        # the last places have no tokens so far ahead; whatever stands there is not learned from
        following = text[np.minimum(places + 1 + depth, len(text) - 1)]
        both = [rms(w["embedding"]["tokens"][following], m["embedding_norm"])]
        both += [rms(rms(h, norm), m["stream_norm"])]
        h = llama(m["block"], jnp.concatenate(both, -1) @ m["project"], segments)
        norm = m["norm"]
        known = places + 1 + depth < len(labels)
        at = np.minimum(places + 1 + depth, len(labels) - 1)
        counts = known * weights[at] * (segments == segments[at])
        ahead.append(-(counts * log_p(h, norm)[places, labels[at]]).sum())
    return total, jnp.stack(ahead)


@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_gradients_are_those_of_the_papers_formulas(packed):
    program = made({}, {}, {"layers": 4}, {})
    params = program.init().params
    batch = batch_of(packed)
    segments = batch.get("segments", np.zeros((ROWS, LENGTH), np.int32))
    weights = batch.get("weights", np.ones((ROWS, LENGTH), np.float32))
    positions = packed and "positions" in batch
    batch.pop("positions", None)
    assert positions == packed

    def loss(w):
        rows = (batch["tokens"], batch["labels"], segments, weights)
        sums = [published(w, *row, 2) for row in zip(*rows, strict=True)]
        total = sum(one for one, _ in sums) / weights.sum()
        ahead = sum(ahead.mean() for _, ahead in sums) / weights.sum()
        return total + 0.5 * ahead, (total, ahead)

    with jax.default_matmul_precision("highest"):
        right, (total, ahead) = jax.jit(jax.grad(loss, has_aux=True))(params)
    given = params, program.place(batch), jnp.zeros((), jnp.int32), jnp.ones(()), None
    found = jax.jit(lambda *given: program._gradients(*given))(*given)
    np.testing.assert_allclose(found.loss, total, rtol=1e-6)
    np.testing.assert_allclose(found.measured["mtp_loss"], ahead, rtol=1e-6)
    for mine, wanted in zip(
        jax.tree.leaves(found.shards), jax.tree.leaves(right), strict=True
    ):
        assert np.linalg.norm(mine - wanted) < 5e-6 * np.linalg.norm(wanted)


def test_a_row_of_metrics_has_the_loss_ahead_and_an_evaluation_has_not():
    program = made({"tensor": 2}, {}, {"layers": 1, "mtp": 1}, {})
    batch = program.place(batch_of(False))
    state = program.init()
    before = float(program.eval_step(state.params, batch))
    state, row = program.train_step(state, batch)
    assert float(row["loss"]) == pytest.approx(before, rel=1e-6)
    assert 0.5 < float(row["mtp_loss"]) / before < 2


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"lora": {"rank": 2}}, "lora.rank 2"),
        ({"model": {"dropout": 0.1}}, "model.dropout 0.1"),
    ],
)
def test_what_has_no_form_with_it_is_refused(keys, says):
    with pytest.raises(ConfigError, match=says):
        load({**keys, "model": {**MODEL, **keys.get("model", {})}})
