"""QK-clip: each head's largest logit is that of a dense computation, and weights shrink by it, on every mesh."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import thorough_but
from flax import nnx
from short_runs import canonical_numbers, packed_batch, token_batches, train_on

from meshtrain.config import ConfigError, load
from meshtrain.config.stacks import stack_of_layers
from meshtrain.mesh import make_mesh
from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives
from meshtrain.model.decoder import Decoder
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.rope import sequences
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.plan import advice, named, plan
from meshtrain.step import Program

MODEL = {
    "layers": 3,
    "d_model": 24,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 40,
    "vocab_size": 61,
}
TRAIN = {"global_batch_size": 8, "sequence_length": 16}
# plain descent, whose updates differ between meshes by no more than gradients do
SGD = {"name": "sgd", "learning_rate": 0.01, "warmup_steps": 0, "beta1": 0.0}
EXPERTS = {
    "d_ff": 0,
    "family": "mixtral",
    "moe": {"experts": 4, "top_k": 2, "d_ff": 24},
}
LATENT = {
    "kv_heads": 4,
    "mla": {"q_rank": 10, "kv_rank": 12, "nope": 6, "rope": 4, "value": 5},
}
PLAIN_LATENT = {**LATENT, "mla": LATENT["mla"] | {"q_rank": 0}}
SPARSE = {"d_ff": 0, "moe": EXPERTS["moe"] | {"balance": "bias"}}
DENSE_FIRST = {**LATENT, **SPARSE, "dense_layers": 1, "dense_d_ff": 40, "layers": 4}
LEARNED = {"family": "gpt2", "kv_heads": 4, "qkv_bias": True}


def on(mesh=None, model=None, batch="plain", precision=None, **parallel):
    return {
        "model": MODEL | (model or {}),
        "mesh": mesh or {},
        "train": TRAIN,
        "optimizer": SGD,
        "parallel": {"microbatches": 2} | parallel,
        "precision": precision or {},
    }, batch


CUBE = {"data": 2, "tensor": 2, "pipeline": 2}
STAGES = {"data": 2, "pipeline": 2}
RING = {"data": 2, "context": 2}
CELLS = {
    "one device": on(),
    "data 8": on({"data": 8}, microbatches=1),
    "data, tensor, pipeline": on(CUBE, sequence_parallel=True, schedule="1f1b"),
    "zero bubble": on(STAGES, schedule="zb_h1", microbatches=4),
    "pairs": on(STAGES, {"layers": 4}, schedule="paired", microbatches=4),
    "pairs, split": on(STAGES, {"layers": 4}, schedule="zb_paired", microbatches=4),
    "ZeRO-3": on({"data": 4}, zero_stage=3, remat="full"),
    "ring": on(RING, context_strategy="ring"),
    "gathered over context": on(
        {"context": 4, "tensor": 2}, context_strategy="all_gather"
    ),
    "heads over context": on(RING, context_strategy="ulysses", remat="selective"),
    "heads over context and tensor": on(
        {"context": 2, "tensor": 2}, batch="packed", context_strategy="ulysses"
    ),
    "packed": on(CUBE, batch="packed", microbatches=4),
    "packed ring": on(RING, batch="packed", context_strategy="ring"),
    "keys on every tensor rank": on({"tensor": 4}),
    "biases": on({"data": 2, "tensor": 2}, LEARNED, batch="padded"),
    "islands": on({"data": 4, "islands": 2}, zero_stage=2),
    "window": on({"data": 2}, {"window": 5}, batch="padded"),
    "interleaved": on(STAGES, {"layers": 5}, schedule="interleaved", virtual_stages=2),
    "experts": on({"data": 4, "expert": 2}, EXPERTS, batch="padded"),
    "latent": on(CUBE, LATENT, batch="padded"),
    "latent, gathered": on(
        {"context": 2, "tensor": 2}, PLAIN_LATENT, context_strategy="all_gather"
    ),
    "latent, dense first": on(CUBE, DENSE_FIRST, schedule="zb_h1", microbatches=4),
    "latent, pairs": on(STAGES, DENSE_FIRST, schedule="paired", microbatches=4),
    "sums in bfloat16": on(
        {"data": 2}, precision={"gradient_sums": "bfloat16"}, microbatches=4
    ),
}

QUICK = (
    "one device",
    "latent",
    "data, tensor, pipeline",
    "heads over context",
    "packed ring",
)


def batch_of(config, kind):
    tokens, labels = token_batches(config, 1)[0]
    if kind == "packed":
        packed = packed_batch(tokens, labels)
        # the last document of each row is padding
        last = packed["segments"] == packed["segments"].max(1, keepdims=True)
        packed["segments"] = np.where(last, 0, packed["segments"] + 1).astype(np.int32)
        packed["weights"] = np.where(last, 0, packed["weights"]).astype(np.float32)
        return packed
    batch = {"tokens": tokens, "labels": labels}
    if kind == "padded":
        weights = np.ones(tokens.shape, np.float32)
        weights[:, 11:] = 0
        weights[3:] = 0
        batch["weights"] = weights
    return batch


def dense_maxima(config, canonical, batch):
    """Each layer's and head's largest visible logit, by all scores of each layer at once."""
    model = config.model
    tokens = batch["tokens"]
    places = np.arange(tokens.shape[1])
    segments = batch.get("segments", np.ones(tokens.shape, np.int32))
    visible = (segments[:, :, None] == segments[:, None]) & (places[:, None] >= places)
    if model.window:
        visible &= places[:, None] - places < model.window
    weights = batch.get("weights", np.ones(tokens.shape))
    counted = segments > 0
    if "segments" not in batch:
        counted = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1] > 0
    largest = []

    def watched(q, k, v, *more, **how):
        repeated = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, repeated, precision="highest")
        seen = (visible & counted[:, :, None])[:, None]
        scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
        largest.append(np.asarray(scores.max((0, 2, 3))))
        return attend(q, k, v, *more, window=model.window, **how)

    decoder = Decoder(model, nnx.Rngs(0))
    nnx.update(decoder, jax.tree.map(jnp.asarray, canonical))
    stacks = stack_of_layers(model)
    positions = jnp.asarray(batch.get("positions", places))
    own = jnp.asarray(segments) if "segments" in batch else None
    collectives = Collectives()
    x = decoder.embedding(jnp.asarray(tokens), positions, collectives)
    for layer in range(model.layers):
        graph, stacked = nnx.split(getattr(decoder, stacks[layer]))
        place = stacks[:layer].count(stacks[layer])
        block = nnx.merge(graph, jax.tree.map(lambda a, place=place: a[place], stacked))
        block.attention.attend = watched
        sequence = sequences(model, positions, own)(layer)
        x = block(x, sequence, collectives, NO_DROPOUT)
    return np.stack(largest)


@cache
def clipped_by_hand(model, kind):
    """tau, the largest logits, and the weights of one step with those of queries and keys clipped in NumPy."""
    config = load({"model": dict(model), "train": TRAIN, "optimizer": SGD})
    layout = Layout(config, make_mesh(config))
    canonical = canonical_numbers(layout)
    batch = batch_of(config, kind)
    maxima = dense_maxima(config, canonical, batch)
    tau = float(np.median(maxima))
    _, program, states = train_on([batch], config, canonical)
    weights = program.layout.canonical(states[0].params)
    gamma = np.minimum(1, tau / maxima)
    if config.model.mla.kv_rank:
        clip_latent(config.model, weights, gamma)
        return tau, maxima, weights
    attention = weights["blocks"]["attention"]
    heads = config.model.heads // config.model.kv_heads
    for layer in range(config.model.layers):
        for group in range(config.model.kv_heads):
            members = range(group * heads, (group + 1) * heads)
            of_keys = min(gamma[layer, h] for h in members) ** 0.5
            for name, head, factor in [
                ("k", group, of_keys),
                *(("q", h, gamma[layer, h] / of_keys) for h in members),
            ]:
                for part in (name, f"{name}_bias"):
                    if part in attention:
                        attention[part] = attention[part].copy()
                        attention[part][layer, ..., head, :] *= np.float32(factor)
    return tau, maxima, weights


def clip_latent(model, weights, gamma):
    """Kimi K2, section 2.1: what each head has for itself by the root, its rotary queries by all of gamma."""
    stacks = stack_of_layers(model)
    nope = model.mla.nope
    for layer, stack in enumerate(stacks):
        place = stacks[:layer].count(stack)
        attention = weights[stack]["attention"]
        queries = "q_up" if model.mla.q_rank else "q"
        for name in (queries, "k_up"):
            attention[name] = np.array(attention[name])
        for head in range(model.heads):
            factor = np.float32(gamma[layer, head])
            attention[queries][place, :, head, :nope] *= factor**0.5
            attention[queries][place, :, head, nope:] *= factor
            attention["k_up"][place, :, head] *= factor**0.5


def frozen(value):
    """The same as what can be a key of a cache."""
    return tuple((k, frozen(v) if isinstance(v, dict) else v) for k, v in value.items())


def model_key(cell):
    return Frozen(CELLS[cell][0]["model"])


class Frozen(dict):
    def __hash__(self):
        return hash(frozen(self))


@pytest.mark.parametrize(
    "cell",
    thorough_but(CELLS, QUICK.__contains__),
)
def test_a_mesh_clips_as_a_dense_computation_on_one_device_does(cell):
    given, kind = CELLS[cell]
    tau, maxima, weights = clipped_by_hand(model_key(cell), kind)
    config = load(given | {"optimizer": SGD | {"qk_clip": tau}})
    metrics, program, states = train_on([batch_of(config, kind)], config)
    assert metrics[0]["qk_clip/max_logit"] == pytest.approx(maxima.max(), rel=2e-6)
    assert (
        metrics[0]["qk_clip/clipped_heads"] == np.sum(maxima > tau) >= maxima.size // 3
    )
    exact = config.precision.gradient_sums == "float32"
    for (path, mine), theirs in zip(
        jax.tree.leaves_with_path(program.layout.canonical(states[0].params)),
        jax.tree.leaves(weights),
        strict=True,
    ):
        distance = np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1e-30)
        assert distance < (2e-6 if exact else 1e-3), (
            jax.tree_util.keystr(path),
            distance,
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh, parallel",
    [
        ({"data": 2}, {"zero_stage": 1}),
        ({"data": 2}, {"zero_stage": 3, "zero_hold": True}),
        ({}, {"precision": {"gradient_sums": "bfloat16"}}),
        (STAGES, {"schedule": "1f1b", "virtual_stages": 1}),
        (STAGES, {"schedule": "interleaved", "virtual_stages": 2}),
        (STAGES, {"schedule": "zb_h1"}),
    ],
)
def test_where_accelerators_send_beside_the_backward_the_logits_are_the_same(
    mesh, parallel
):
    """On them idle stages and padded layers compute, too."""
    given, kind = on(mesh, {"layers": 5}, microbatches=4, **parallel)
    config = load(given | {"optimizer": SGD | {"qk_clip": 1.0}})
    program = Program(config, make_mesh(config))
    batch = program.place(batch_of(config, kind))
    params = jax.jit(program.layout.live)(canonical_numbers(program.layout))
    found = []
    for platform in ("cpu", "accelerator"):
        program.local = LocalStep(program.layout, platform, program.hooks)
        program.__dict__.pop("_gradients", None)
        step = jax.jit(lambda *of: program._gradients(*of).maxima)
        maxima = step(params, batch, jnp.int32(0), jnp.float32(1), None)
        found.append(
            np.asarray(maxima["blocks"])[program.layout.stacks["blocks"].places]
        )
    dense = dense_maxima(
        config, canonical_numbers(program.layout), batch_of(config, kind)
    )
    for maxima in found:
        np.testing.assert_allclose(maxima, dense, rtol=2e-6)


@pytest.mark.thorough
def test_a_step_that_float16_skips_clips_nothing():
    given, _ = on({"data": 2}, precision={"compute": "float16", "loss_scale": 2.0**32})
    config = load(given | {"optimizer": SGD | {"qk_clip": 1e-3}})
    batches = [batch_of(config, "plain")] * 2
    metrics, program, (first, last) = train_on(batches, config)
    assert [row["skipped"] for row in metrics] == [1, 2]
    assert metrics[0]["qk_clip/clipped_heads"] == 12
    for state in (first, last):
        same = jax.tree.map(
            np.array_equal,
            program.layout.canonical(state.params),
            canonical_numbers(program.layout),
        )
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    "model, sections, why",
    [
        ({"qk_norm": True}, {}, "model.qk_norm"),
        ({"score_cap": 30.0}, {}, "model.score_cap 30"),
        ({"pattern": ["linear", "full"]}, {}, "model.pattern"),
        ({"mtp": 1}, {}, "model.mtp 1"),
        ({}, {"lora": {"rank": 2}}, "lora.rank 2"),
        ({}, {"train": TRAIN | {"trainable": ["head.*"]}}, "train.trainable"),
        (
            {},
            {"mesh": {"data": 2, "islands": 2}, "parallel": {"sync": {"every": 2}}},
            "parallel.sync.every 2",
        ),
    ],
)
def test_what_no_weights_of_queries_and_keys_bound_is_refused(model, sections, why):
    given, _ = on(model=model)
    with pytest.raises(
        ConfigError, match=rf"optimizer\.qk_clip is 100, .*{re.escape(why)}"
    ):
        load(given | sections | {"optimizer": {"qk_clip": 100.0}})


@pytest.mark.parametrize("hook", ["attention", "block"])
def test_a_hook_that_makes_no_logits_known_is_refused(hook):
    config = load(on()[0] | {"optimizer": {"qk_clip": 100.0}})
    own = {
        "attention": lambda q, k, v, segments, collectives, dropout: q,
        "block": lambda block, x, sequence, collectives, dropout: x,
    }
    with pytest.raises(
        ConfigError, match=rf"optimizer\.qk_clip is 100\.0, but the {hook} is"
    ):
        Program(config, make_mesh(config), **{hook: own[hook]})


def test_the_plan_takes_another_kernel_and_counts_what_is_sent():
    given, _ = on({"data": 2, "tensor": 2}, {"head_dim": 64}, microbatches=1)
    given |= {"precision": {"compute": "bfloat16"}}
    plain, clipped = (
        plan(load(given | {"optimizer": {"qk_clip": clip}}), named("h100", 4))
        for clip in (0, 100)
    )
    sent = lambda planned: sum(t.sent for t in planned.transfers)
    # 3 layers, 4 heads: 2 heads summed up over data 2, then gathered over tensor 2
    assert sent(clipped) - sent(plain) == 3 * 2 * 4 + 3 * 4 * 4 / 2
    assert any("qk_clip" in note and "fused" in note for note in advice.notes(clipped))
    assert not any("qk_clip" in note for note in advice.notes(plain))


OSS = {"family": "gpt_oss", "d_ff": 0, "window": 5}
OSS["moe"] = {"experts": 4, "top_k": 2, "d_ff": 32}
WIDE = {"layers": 4, "d_model": 32, "d_ff": 64}
EIGHT = {"matmul": "float8", "float8_skip": [0, 0]}
FOLDED = {"data": 2, "context": 2, "expert": 4, "tensor": 2}
KEPT = {"remat": "names", "remat_keep": ["attention"], "context_strategy": "all_gather"}
CROSSES = {
    "float8, ZeRO-3 in stages": (WIDE, STAGES, {"zero_stage": 3}, EIGHT),
    "sinks, experts over context": (WIDE | OSS, FOLDED, {"zero_stage": 3, **KEPT}, {}),
    "offloaded state": (WIDE, CUBE, {"offload_optimizer": True}, {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CROSSES)
def test_two_steps_beside_other_options_are_those_of_one_device(name):
    model, mesh, parallel, precision = CROSSES[name]
    rows = []
    for mesh_of, keys in (({}, {}), (mesh, parallel)):
        given, kind = on(mesh_of, model, "packed", precision, **keys)
        config = load(given | {"optimizer": SGD | {"qk_clip": 0.5}})
        rows.append(train_on([batch_of(config, kind)] * 2, config)[0])
    for one, ours in zip(*rows, strict=True):
        assert one["qk_clip/clipped_heads"] == ours["qk_clip/clipped_heads"] > 0
        for key in ("loss", "qk_clip/max_logit"):
            assert ours[key] == pytest.approx(one[key], rel=1e-5)
