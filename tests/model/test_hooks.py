"""A block, attention and a loss given from outside are what every layout computes, forward, backward and in
evaluation.
"""

import re
import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from covering import slow_but
from short_runs import canonical_numbers, place, start, token_batches

import meshtrain as mt
from meshtrain.config import Config, ConfigError, load
from meshtrain.model import hooks
from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives
from meshtrain.model.decoder import Block
from meshtrain.model.hooks import Hooks, ModelParts
from meshtrain.model.loss import Mixed
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.step import Program

WINDOW, CAP, SMOOTHING, Z_LOSS = 5, 5.0, 0.1, 0.01
MODEL = {
    "layers": 5,
    "d_model": 24,
    "heads": 6,
    "kv_heads": 2,
    "d_ff": 50,
    "vocab_size": 257,
}

# --- three hooks, as a user would write them


def parallel_block(block, x, sequence, collectives, dropout):
    """GPT-J and PaLM: attention and MLP side by side, from one norm; the other has no use."""
    h = collectives.enter(block.attention_norm(x))
    y = block.attention(h, sequence, collectives, dropout.at(0)) + block.mlp(
        h, collectives
    )
    return x + dropout.at(1).stream(y, collectives.first_position(x.shape[1]))


def windowed_attention(q, k, v, segments, collectives, dropout):
    """Each token sees the last WINDOW of its document."""
    batch, length, heads, width = q.shape
    k, v = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in (k, v))
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (back >= 0) & (back < WINDOW)
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.where(seen, jnp.einsum("bqhk,bshk->bhqs", q, k) * width**-0.5, -1e30)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v).reshape(
        batch * length, heads * width
    )


def capped_loss(logits, labels, vocabulary):
    """Logits within -CAP .. CAP, label smoothing and z-loss."""
    logits = CAP * jnp.tanh(logits / CAP)
    log_z = vocabulary.log_sum_exp(logits)
    real = vocabulary.ids(logits) < vocabulary.size
    mean = (
        vocabulary.sum(jnp.sum(jnp.where(real, logits, 0), axis=-1)) / vocabulary.size
    )
    target = (1 - SMOOTHING) * vocabulary.of_label(logits, labels) + SMOOTHING * mean
    return log_z - target + Z_LOSS * log_z**2


HOOKS: dict[str, Any] = {
    "block": parallel_block,
    "attention": windowed_attention,
    "loss": capped_loss,
}

# --- and what they come to on one device, from the definitions


def reference_attention(
    p: Any, x: jax.Array, positions: jax.Array, segments: jax.Array
) -> jax.Array:
    model = reference.Model("llama")
    q, k, v = (jnp.einsum("td,dhk->thk", x, p[n]) for n in ("q", "k", "v"))
    q, k = reference.rotate(model, q, positions), reference.rotate(model, k, positions)
    k, v = (jnp.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    length = len(x)
    allowed = np.tril(np.ones((length, length), bool)) & ~np.tril(
        np.ones((length, length), bool), -WINDOW
    )
    allowed = allowed & (segments[:, None] == segments[None, :])
    scores = jnp.where(
        allowed, jnp.einsum("qhk,shk->hqs", q, k) / np.sqrt(q.shape[-1]), -jnp.inf
    )
    return jnp.einsum("hqs,shk,hkd->qd", jax.nn.softmax(scores), v, p["out"])


def reference_logits(
    parameters: Any, tokens: jax.Array, positions: jax.Array, segments: jax.Array
) -> jax.Array:
    model = reference.Model("llama")

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = reference.norm(model, p["attention_norm"], x)
        return x + reference_attention(
            p["attention"], h, positions, segments
        ) + reference.mlp(model, p["mlp"], h), None

    x = jax.lax.scan(
        block, parameters["embedding"]["tokens"][tokens], parameters["blocks"]
    )[0]
    return (
        reference.norm(model, parameters["head"]["norm"], x)
        @ parameters["head"]["weight"]
    )


def reference_loss(parameters: Any, batch: dict[str, jax.Array]) -> jax.Array:
    z = jax.vmap(partial(reference_logits, parameters))(
        batch["tokens"], batch["positions"], batch["segments"]
    )
    z = CAP * jnp.tanh(z / CAP)
    target = (1 - SMOOTHING) * jax.nn.one_hot(
        batch["labels"], z.shape[-1]
    ) + SMOOTHING / z.shape[-1]
    losses = (
        -(target * jax.nn.log_softmax(z)).sum(-1)
        + Z_LOSS * jax.nn.logsumexp(z, axis=-1) ** 2
    )
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "one device, accumulating": ((1, 1, 1), {"microbatches": 2}),
    "1f1b, ZeRO-1": ((2, 2, 2), {"microbatches": 2}),
    "zero bubble, ZeRO-3, sequence parallel": (
        (2, 2, 2),
        {
            "microbatches": 4,
            "schedule": "zb_h1",
            "zero_stage": 3,
            "sequence_parallel": True,
        },
    ),
    "interleaved, remat, ZeRO-2": (
        (2, 1, 2),
        {
            "microbatches": 2,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "remat": "full",
            "zero_stage": 2,
            "zero_hold": False,
        },
    ),
    "tensor, remat of names, vocabulary on the edges": (
        (1, 2, 2),
        {"microbatches": 2, "remat": "names", "remat_keep": ["qkv"], "vocab": "edge"},
    ),
}


def configuration(
    mesh: tuple[int, int, int] = (1, 1, 1), **sections: dict[str, Any]
) -> Config:
    return load(
        {
            "model": sections.pop("model", MODEL),
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "train": {
                "global_batch_size": 8,
                "sequence_length": 16,
                **sections.pop("train", {}),
            },
            **sections,
        }
    )


@cache
def expected() -> tuple[Any, dict[str, np.ndarray], Any, Any]:
    """Canonical parameters, a batch of packed documents, and the reference's loss and gradient."""
    config = configuration()
    parameters = canonical_numbers(Program(config).layout)
    tokens, labels = token_batches(config, 1)[0]
    at, cuts = np.arange(16)[None], np.array([3, 7, 11, 14, 5, 9, 12, 2])[:, None]
    batch = {
        "tokens": tokens,
        "labels": labels,
        "segments": 1 + (at >= cuts).astype(np.int32),
        "positions": np.where(at >= cuts, at - cuts, at).astype(np.int32),
        "weights": np.where((at == cuts - 1) | (at % 5 == 4), 0, 1).astype(np.float32),
    }
    return (
        parameters,
        batch,
        *jax.jit(jax.value_and_grad(reference_loss))(parameters, batch),
    )


FEW = ("interleaved, remat, ZeRO-2", "zero bubble, ZeRO-3, sequence parallel")


@pytest.mark.thorough
@pytest.mark.parametrize("layout", slow_but(LAYOUTS, FEW))
def test_every_layout_computes_the_replaced_block_attention_and_loss(layout):
    mesh, parallel = LAYOUTS[layout]
    parameters, batch, loss, gradient = expected()
    program = mt.Program(configuration(mesh, parallel=parallel), **HOOKS)
    params, placed = (
        place(program.layout, parameters),
        jax.device_put(batch, program.batch_sharding),
    )
    seen, found = jax.jit(program.gradients)(
        params, placed, jnp.zeros((), jnp.int32), jnp.ones(())
    )
    np.testing.assert_allclose(seen, loss, rtol=1e-5)
    close = lambda g, r: np.testing.assert_allclose(
        g, r, atol=1e-5 * np.abs(r).max() + 1e-7
    )
    jax.tree.map(
        close, program.layout.canonical(jax.tree.map(np.asarray, found)), gradient
    )
    assert not np.any(found["blocks"]["mlp_norm"]["scale"]), (
        "this block has no use for it"
    )
    np.testing.assert_allclose(program.eval_step(params, placed), loss, rtol=1e-5)


@pytest.mark.thorough
def test_the_train_step_and_the_logits_use_them_too():
    parameters, batch, *_ = expected()
    program = mt.Program(
        configuration((2, 2, 2), parallel={"microbatches": 2}), **HOOKS
    )
    whole = {
        **batch,
        "segments": np.ones_like(batch["segments"]),
        "weights": np.ones_like(batch["weights"]),
    }
    whole["positions"] = np.broadcast_to(
        np.arange(16, dtype=np.int32), whole["tokens"].shape
    )
    right = jax.jit(jax.vmap(reference_logits, (None, 0, 0, 0)))(
        parameters, *(whole[n] for n in ("tokens", "positions", "segments"))
    )
    np.testing.assert_allclose(
        program.logits(place(program.layout, parameters), batch["tokens"]),
        right,
        atol=2e-5,
    )
    plain = {name: whole[name] for name in ("tokens", "labels")}
    _, metrics = program.train_step(
        start(program, parameters), jax.device_put(plain, program.batch_sharding)
    )
    np.testing.assert_allclose(
        metrics["loss"], jax.jit(reference_loss)(parameters, whole), rtol=1e-5
    )


@pytest.mark.slow
def test_a_replaced_block_drops_the_same_values_on_every_mesh():
    parameters, batch, *_ = expected()
    losses = []
    for shape in ((1, 1, 1), (2, 2, 2)):
        program = mt.Program(
            configuration(shape, model={**MODEL, "dropout": 0.2}),
            block=parallel_block,
            loss=capped_loss,
        )
        given = (
            place(program.layout, parameters),
            jax.device_put(batch, program.batch_sharding),
            jnp.int32(3),
        )
        losses.append(
            float(
                jax.jit(lambda *given, p=program: p.gradients(*given, jnp.ones(()))[0])(
                    *given
                )
            )
        )
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)
    assert abs(losses[0] - program.eval_step(*given[:2])) > 1e-3, (
        "evaluation drops nothing"
    )


@pytest.mark.thorough
def test_the_built_in_ones_go_the_same_way():
    config = configuration((1, 2, 1))
    given = mt.Program(config, block=Block.__call__, attention=attend)
    assert given.lower().as_text() == mt.Program(config).lower().as_text()


def test_the_examples_of_the_docstring_run():
    assert hooks.__doc__ is not None
    code = textwrap.dedent(
        "\n".join(
            line for line in hooks.__doc__.splitlines() if line.startswith("    ")
        )
    )
    found: dict[str, Any] = {"jnp": jnp, "mt": mt, "config": configuration()}
    exec(code, found)
    assert found["program"].hooks.names == {
        "block": "parallel_block",
        "loss": "capped_loss",
    }


@pytest.mark.thorough
def test_a_branch_without_a_norm_has_the_right_gradient_over_tensor():
    def bare(block, x, sequence, collectives, dropout):
        return x + block.mlp(collectives.enter(0.1 * x), collectives)

    gradients = []
    for shape in ((1, 1, 1), (1, 2, 1)):
        program = mt.Program(configuration(shape), block=bare)
        parameters, batch, *_ = expected()
        params, placed = (
            place(program.layout, parameters),
            jax.device_put(batch, program.batch_sharding),
        )
        _, found = jax.jit(program.gradients)(
            params, placed, jnp.zeros((), jnp.int32), jnp.ones(())
        )
        gradients.append(program.layout.canonical(jax.tree.map(np.asarray, found)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, atol=1e-5 * np.abs(b).max() + 1e-7
        ),
        *gradients[::-1],
    )


@pytest.mark.thorough
def test_a_replaced_loss_is_asked_for_both_labels_of_what_is_mixed():
    random, config = np.random.default_rng(0), configuration()
    logits = jnp.asarray(
        random.standard_normal((3, 2, config.model.vocab_size)), jnp.float32
    )
    labels, other = (
        jnp.asarray(random.integers(0, config.model.vocab_size, (3, 2)))
        for _ in range(2)
    )
    mixed = Mixed(other, jnp.asarray(random.random((3, 2)), jnp.float32))
    own, built_in = (
        ModelParts(config, Collectives(), hooks).loss
        for hooks in (Hooks(loss=nll), Hooks())
    )
    found, right = (
        jax.value_and_grad(lambda z, loss=loss: loss(z, labels, mixed).losses.sum())(
            logits
        )
        for loss in (own, built_in)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found,
        right,
    )
    assert not np.allclose(
        own(logits, labels, mixed).losses, own(logits, labels).losses
    )


# --- what is refused, before anything runs


def without_leave(block, x, sequence, collectives, dropout):
    h = collectives.enter(block.attention_norm(x))
    return x + (h @ block.mlp.up[...]) @ block.mlp.down[...]


WRONG: dict[str, tuple[str, Callable | int, str]] = {
    "another shape": (
        "block",
        lambda block, x, *_: x[:, :-1],
        "the block hook <lambda> gave float32[8, 15, 24] on a device, and float32[8, 16, 24] is wanted, [B, T, D].",
    ),
    "another dtype": (
        "block",
        lambda block, x, *_: x.astype("bfloat16"),
        "gave bfloat16[8, 16, 24] on a device, and float32[8, 16, 24] is wanted, [B, T, D].",
    ),
    "nothing": (
        "block",
        lambda block, x, *_: None,
        "the block hook <lambda> gave a NoneType on a device, and",
    ),
    "partial sums": (
        "block",
        without_leave,
        "the block hook without_leave gave a value that differs over tensor, where devices must agree; pass each "
        "branch through collectives.leave.",
    ),
    "attention in heads": (
        "attention",
        lambda q, *_: q,
        "the attention hook <lambda> gave float32[8, 16, 6, 4] on a device, and float32[128, 24] is wanted, [B*T, H*K].",
    ),
    "one loss for all tokens": (
        "loss",
        lambda z, labels, v: v.log_sum_exp(z).mean(),
        "the loss hook <lambda> gave float32[] on a device, and float32[8, 16] is wanted, [B, T].",
    ),
    "a loss of this share alone": (
        "loss",
        lambda z, labels, v: jax.nn.logsumexp(z, axis=-1),
        "the loss hook <lambda> gave a value that differs over pipeline and tensor, where devices must agree; sum it "
        "over the vocabulary with vocabulary.sum.",
    ),
    "too few arguments": (
        "loss",
        lambda logits, labels: labels,
        "the loss hook <lambda> takes (logits, labels), but it is called with (logits_BTV, labels_BT, vocabulary).",
    ),
    "no function": (
        "block",
        3,
        "the block hook is 3; it must be a function, and it is called with (block, x_BTD, sequence, collectives, "
        "dropout).",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", WRONG)
def test_a_hook_that_does_not_fit_is_told_in_one_sentence(wrong):
    kind, hook, says = WRONG[wrong]
    with pytest.raises(ConfigError, match=re.escape(says)) as told:
        mt.Program(configuration(), **{kind: hook})
    assert "\n" not in str(told.value)
    frames = [str(frame.path) for frame in told.traceback]
    assert len(frames) <= 4 and not [path for path in frames if "/jax/" in path], (
        "nothing of JAX stands above the sentence"
    )


def test_a_key_that_the_replaced_loss_would_not_obey_is_refused():
    with pytest.raises(
        ConfigError, match=r"train\.z_loss is 0\.1, .* loss is replaced by capped_loss"
    ):
        mt.Program(configuration(train={"z_loss": 0.1}), loss=capped_loss)


@pytest.mark.parametrize(
    "key, value", [("window", 5), ("score_cap", 30.0), ("query_scalar", 3.0)]
)
def test_what_the_replaced_attention_would_not_keep_is_refused(key, value):
    def own(q, k, v, segments, collectives, dropout, /):
        return q.reshape(-1, q.shape[2] * q.shape[3])

    with pytest.raises(
        ConfigError,
        match=rf"model\.{key} is {value}, but the attention is replaced by own",
    ):
        mt.Program(configuration(model={key: value}), attention=own)


# --- a loss that takes its share of the vocabulary for the whole


def nll(logits, labels, vocabulary):
    return vocabulary.log_sum_exp(logits) - vocabulary.of_label(logits, labels)


def with_z_loss(logits, labels, vocabulary):
    return nll(logits, labels, vocabulary) + 1e-4 * vocabulary.log_sum_exp(logits) ** 2


def focal(logits, labels, vocabulary):
    loss = nll(logits, labels, vocabulary)
    return (1 - jnp.exp(-loss)) ** 2 * loss


def in_bfloat16(logits, labels, vocabulary):
    real = vocabulary.ids(logits) < vocabulary.size
    total = jnp.sum(jnp.where(real, jnp.exp(logits.astype(jnp.bfloat16)), 0), axis=-1)
    return jnp.log(vocabulary.sum(total).astype(jnp.float32)) - vocabulary.of_label(
        logits, labels
    )


def with_lax(logits, labels, vocabulary):
    here, axes = vocabulary.ids(logits) == labels[..., None], ("pipeline", "tensor")
    total = jax.lax.psum(
        jnp.sum(jnp.where(vocabulary.ids(logits) < 259, jnp.exp(logits), 0), axis=-1),
        axes,
    )
    return jnp.log(total) - jax.lax.psum(
        jnp.sum(jnp.where(here, logits, 0), axis=-1), axes
    )


def made_for_its_share(logits, labels, vocabulary):
    table = jnp.arange(260.0).reshape(-1, logits.shape[-1])[
        jax.lax.axis_index(("pipeline", "tensor"))
    ]
    return nll(logits + 1e-3 * table, labels, vocabulary)


def made_for_its_batch(logits, labels, vocabulary):
    return nll(logits, labels, vocabulary) * jnp.ones((8, 16))


def random(logits, labels, vocabulary):
    return nll(logits, labels, vocabulary) * np.random.random()


RIGHT = (
    nll,
    with_z_loss,
    capped_loss,
    focal,
    in_bfloat16,
    with_lax,
    made_for_its_share,
    made_for_its_batch,
    random,
)


@pytest.mark.thorough
@pytest.mark.parametrize("vocab", ["spread", "edge"])
@pytest.mark.parametrize("loss", RIGHT, ids=lambda hook: hook.__name__)
def test_a_loss_that_is_right_on_shares_of_the_vocabulary_is_not_refused(loss, vocab):
    config = configuration(
        (2, 2, 2), model={**MODEL, "vocab_size": 259}, parallel={"vocab": vocab}
    )
    hooks.ModelParts(config, MeshCollectives(config, "cpu"), hooks.Hooks(loss=loss))


def softmax_of_the_share(logits, labels, vocabulary):
    return -vocabulary.of_label(jax.nn.log_softmax(logits), labels)


def one_hot_of_the_share(logits, labels, vocabulary):
    return vocabulary.log_sum_exp(logits) - vocabulary.sum(
        (jax.nn.one_hot(labels, logits.shape[-1]) * logits).sum(-1)
    )


def mean_of_the_share(logits, labels, vocabulary):
    mean = vocabulary.sum(logits.mean(-1))
    return (
        vocabulary.log_sum_exp(logits)
        - 0.9 * vocabulary.of_label(logits, labels)
        - 0.1 * mean
    )


def padding_counted_in(logits, labels, vocabulary):
    mean = vocabulary.sum(logits.sum(-1)) / vocabulary.size
    return (
        vocabulary.log_sum_exp(logits)
        - 0.9 * vocabulary.of_label(logits, labels)
        - 0.1 * mean
    )


ONE_SHARE = (softmax_of_the_share, one_hot_of_the_share, mean_of_the_share)


@pytest.mark.parametrize("size", [256, 259])
@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("loss", ONE_SHARE, ids=lambda hook: hook.__name__)
def test_a_loss_that_takes_its_share_of_the_vocabulary_for_the_whole_is_refused(
    loss, mesh, size
):
    shares = mesh[1] * mesh[2]
    says = (
        rf"^the loss hook {loss.__name__} gives \S+ where the vocabulary is cut into {shares} shares, and \S+ of the "
        r"same logits where "
        r"it is whole; softmax, mean and one_hot over the last axis see one share only: "
        r"use vocabulary\.sum, max, log_sum_exp and "
        rf"of_label{', and leave out the ids from 259 on, which are padding' * (size == 259)}\.$"
    )
    with pytest.raises(ConfigError, match=says):
        mt.Program(configuration(mesh, model={**MODEL, "vocab_size": size}), loss=loss)


def test_a_loss_that_counts_the_padding_of_the_vocabulary_in_is_refused_where_there_is_any():
    with pytest.raises(ConfigError, match=r"padding_counted_in .* ids from 259 on"):
        mt.Program(
            configuration((1, 2, 1), model={**MODEL, "vocab_size": 259}),
            loss=padding_counted_in,
        )
    config = configuration((1, 2, 1), model={**MODEL, "vocab_size": 256})
    hooks.ModelParts(
        config, MeshCollectives(config, "cpu"), hooks.Hooks(loss=padding_counted_in)
    )


def test_a_loss_is_not_tried_on_a_mesh_that_does_not_split_the_vocabulary():
    config = configuration((2, 1, 2), parallel={"vocab": "edge"})
    loss = lambda logits, labels, vocabulary: pytest.fail("it was called")
    hooks.ModelParts(config, MeshCollectives(config, "cpu"), hooks.Hooks(loss=loss))
