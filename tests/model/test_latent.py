"""Latent attention is its formulas, written apart in NumPy; values may be narrower or wider than keys in every kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshtrain.config import ConfigError, load
from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives
from meshtrain.model.decoder import Decoder
from meshtrain.model.weights import weights

MLA = {"q_rank": 10, "kv_rank": 12, "nope": 6, "rope": 4, "value": 7}
MODEL = {
    "layers": 1,
    "d_model": 24,
    "heads": 3,
    "d_ff": 32,
    "vocab_size": 40,
    "mla": MLA,
}


def model(**changes):
    return load({"model": {**MODEL, **changes}, "train": {"sequence_length": 12}}).model


def norm(x, scale, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def turned(x, frequency, amplitude=1.0):
    """Pairs (i, i + K/2) of [T, .., K] turned by position times frequency."""
    angle = np.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 2), 1) * frequency
    low, high = np.split(x, 2, axis=-1)
    cos, sin = amplitude * np.cos(angle), amplitude * np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def published(w, x, mla, scale, frequency):
    """DeepSeek-V2, equations 9 to 13 and 37 to 47, of one sequence [T, D]."""
    q_rows = x
    q_up = w.get("q")
    if mla["q_rank"]:
        q_rows, q_up = norm(x @ w["q_down"], w["q_norm"]["scale"]), w["q_up"]
    q = np.einsum("td,dhk->thk", q_rows, q_up)
    q = np.concatenate(
        [q[..., : mla["nope"]], turned(q[..., mla["nope"] :], frequency)], -1
    )
    down = x @ w["kv_down"]
    content = norm(down[:, : mla["kv_rank"]], w["kv_norm"]["scale"])
    shared = turned(down[:, mla["kv_rank"] :], frequency)
    k = np.einsum("tr,rhk->thk", content, w["k_up"])
    k = np.concatenate([k, np.repeat(shared[:, None], k.shape[1], axis=1)], -1)
    v = np.einsum("tr,rhv->thv", content, w["v_up"])
    scores = np.einsum("thk,shk->hts", q, k) * scale
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hts,shv,hvd->td", p, v, w["out"])


@pytest.mark.parametrize("case", ["queries of latents", "plain queries", "stretched"])
def test_attention_is_that_of_the_papers_formulas(case):
    mla = MLA if case != "plain queries" else {**MLA, "q_rank": 0}
    yarn = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original": 16}
    config = model(mla=mla, **(yarn if case == "stretched" else {}))
    decoder = Decoder(config, nnx.Rngs(0))
    block = nnx.to_pure_dict(nnx.state(decoder.blocks))
    w = jax.tree.map(lambda x: np.float64(x[0]), block["attention"])
    w["kv_norm"]["scale"] = w["kv_norm"]["scale"] + 0.3
    mscale = (0.1 * np.log(40.0) + 1) if case == "stretched" else 1.0
    frequency = np.array([1.0, 10000.0 ** (-2 / 4)])
    if case == "stretched":
        # with 16 positions before, both pairs go round fewer than 32 times: pair 1 less than once
        turns = 16 * frequency / (2 * np.pi)
        assert turns[0] > 1 > turns[1]
        low, high = (
            4 * np.log(16 / (n * 2 * np.pi)) / (2 * np.log(10000.0))
            for n in (32.0, 1.0)
        )
        low, high = max(np.floor(low), 0), min(np.ceil(high), 3)
        ramp = np.clip((np.arange(2) - low) / max(high - low, 0.001), 0, 1)
        frequency = frequency * (1 - ramp) + frequency / 40.0 * ramp
    scale = 10**-0.5 * mscale**2
    x = np.random.default_rng(0).standard_normal((12, 24))
    want = published(w, x, mla, scale, frequency)

    from meshtrain.model.decoder import mixer_of
    from meshtrain.model.dropout import NO_DROPOUT
    from meshtrain.model.rope import sequences

    attention = mixer_of(config)("blocks.attention", config, nnx.Rngs(0))
    nnx.update(attention, nnx.State(jax.tree.map(jnp.float32, w)))
    got = attention(
        jnp.float32(x)[None],
        sequences(config, jnp.arange(12))(0),
        Collectives(),
        NO_DROPOUT,
    )[0]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6 * np.abs(want).max())


def test_weights_are_those_of_the_published_shapes():
    deepseek = {"q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128}
    config = model(d_model=7168, heads=128, mla=deepseek)
    sizes = {
        w.name.rpartition(".")[2]: w.shape[1:]
        for w in weights(config)
        if ".attention." in w.name
    }
    assert sizes["q_up"] == (1536, 128, 192)
    assert sizes["kv_down"] == (7168, 576)
    assert sizes["out"] == (128, 128, 7168)
    assert config.head_dim == 192


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mla": {"kv_rank": 12, "nope": 6, "rope": 4}}, "model.mla.value is 0"),
        ({"mla": {"nope": 6}}, "no kv_rank"),
        ({"mla": {**MLA, "rope": 3}}, "must be even"),
        ({"kv_heads": 1}, "model.kv_heads is 1"),
        ({"family": "gpt2"}, "no form of"),
        ({"qk_norm": True}, "model.qk_norm is true"),
    ],
)
def test_what_it_cannot_be_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        model(**changes)


@pytest.mark.parametrize("value", [5, 24])
def test_values_of_another_width_are_attended_to_likewise(value):
    draw = np.random.default_rng(1)
    q, k = (jnp.float32(draw.standard_normal((2, 20, 4, 16))) for _ in range(2))
    v = jnp.float32(draw.standard_normal((2, 20, 2, value)))
    k = k[:, :, :2]
    g = jnp.float32(draw.standard_normal((2 * 20, 4 * value)))

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") / 4
        p = jax.nn.softmax(jnp.where(np.tri(20, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bhts,bshv->bthv", p, v, precision="highest").reshape(40, -1)

    want, want_vjp = jax.vjp(plain, q, k, v)
    got, vjp = jax.vjp(lambda *qkv: attend(*qkv, None, Collectives()), q, k, v)
    for mine, right in zip((got, *vjp(g)), (want, *want_vjp(g)), strict=True):
        np.testing.assert_allclose(mine, right, atol=5e-6)
