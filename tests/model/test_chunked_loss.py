"""A loss by chunks is the whole one, and its gradients: against the formula in float64, on meshes, in the planner's
bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshtrain.config import ConfigError, load
from meshtrain.config.follow import CHUNK, loss_chunk
from meshtrain.model.chunked_loss import chunk_losses, sum_chunk_losses
from meshtrain.model.collectives import Collectives, VocabularyShards
from meshtrain.model.loss import LabelLosses, Vocabulary, cross_entropy
from meshtrain.step import Program

ROWS, LENGTH, WIDTH, SIZE = 3, 7, 6, 13  # 21 labels
WEIGHTS = np.random.default_rng(3).uniform(-1, 2, (ROWS, LENGTH)) * (
    np.arange(LENGTH) % 3 > 0
)


def example():
    random = np.random.default_rng(0)
    x, w = (
        random.standard_normal((ROWS, LENGTH, WIDTH)),
        random.standard_normal((WIDTH, SIZE)),
    )
    return (
        x.astype(np.float32),
        w.astype(np.float32),
        random.integers(0, SIZE, (ROWS, LENGTH)).astype(np.int32),
    )


def formula(smoothing: float, z_loss: float):
    """Losses, and gradients of x and of the head's weight where labels weigh WEIGHTS: written out in float64."""
    x, w, labels = example()
    x, w = x.astype(np.float64), w.astype(np.float64)
    logits = x @ w
    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    target = (1 - smoothing) * np.eye(SIZE)[labels] + smoothing / SIZE
    losses = -(target * (logits - log_z)).sum(-1) + z_loss * log_z[..., 0] ** 2
    g = WEIGHTS[..., None] * (
        np.exp(logits - log_z) * (1 + 2 * z_loss * log_z) - target
    )
    return losses, g @ w.T, np.einsum("btd,btv->dv", x, g)


def head(vocabulary: Vocabulary, smoothing: float = 0.0, z_loss: float = 0.0):
    return lambda w, x, labels: LabelLosses(
        cross_entropy(x @ w, labels, vocabulary, smoothing, z_loss)
    )


def near(mine, right):
    np.testing.assert_allclose(mine, right, rtol=0, atol=1e-6 * np.abs(right).max())


@pytest.mark.parametrize(
    ("chunk", "smoothing", "z_loss"),
    [(1, 0.0, 0.0), (5, 0.1, 0.0), (7, 0.2, 0.1), (20, 0.0, 0.1)],
)
def test_losses_and_gradients_are_the_formulas(chunk, smoothing, z_loss):
    x, w, labels = example()
    loss = head(Vocabulary(SIZE, Collectives()), smoothing, z_loss)

    @jax.jit
    def run(w, x):
        losses, vjp = jax.vjp(
            lambda w, x: chunk_losses(loss, w, x, labels, chunk).losses, w, x
        )
        return losses, *vjp(jnp.asarray(WEIGHTS, jnp.float32))

    @jax.jit
    def run_summed(w, x):
        of = lambda w, x: sum_chunk_losses(
            loss, w, x, labels, jnp.asarray(WEIGHTS, jnp.float32) / 3, chunk
        )
        _, vjp, losses = jax.vjp(of, w, x, has_aux=True)
        return losses.losses, *vjp(jnp.float32(3))

    right, right_x, right_w = formula(smoothing, z_loss)
    for losses, gw, gx in (run(w, x), run_summed(w, x)):
        near(losses, right)
        near(gx, right_x)
        near(gw, right_w)
    total, _ = jax.jit(
        lambda w, x: sum_chunk_losses(
            loss, w, x, labels, jnp.asarray(WEIGHTS, jnp.float32), chunk
        )
    )(w, x)
    near(total, (WEIGHTS * right).sum())


@pytest.mark.thorough
def test_a_vocabulary_in_shares_and_a_row_in_parts_come_to_the_same():
    """Each of 2 ranks has half of a row's stream, which a chunk gathers, and 7 ids, one of them padding."""
    x, w, labels = example()
    x, labels, cotangents = (
        x[:, :6],
        labels[:, :6],
        jnp.asarray(WEIGHTS[:, :6], jnp.float32),
    )
    shares = jnp.stack(jnp.split(jnp.pad(w, ((0, 0), (0, 1))), 2, axis=1))
    inner = head(Vocabulary(SIZE, VocabularyShards(("ranks",), 2)), 0.1, 0.1)

    def rank(share, x):
        gathered = lambda x: lax.all_gather(x, "ranks", axis=1, tiled=True)
        loss = lambda w, x, labels: inner(w, gathered(x), labels)
        losses, vjp = jax.vjp(
            lambda w, x: chunk_losses(loss, w, x, labels, 4).losses, share, x
        )
        summed = lambda w, x: sum_chunk_losses(loss, w, x, labels, cotangents, 4)
        _, vjp_summed, losses_summed = jax.vjp(summed, share, x, has_aux=True)
        return (losses, *vjp(cotangents)), (
            losses_summed.losses,
            *vjp_summed(jnp.ones(())),
        )

    parts = jnp.stack(jnp.split(jnp.asarray(x), 2, axis=1))
    found = jax.jit(jax.vmap(rank, axis_name="ranks"))(shares, parts)
    whole = head(Vocabulary(SIZE, Collectives()), 0.1, 0.1)
    right, vjp = jax.vjp(lambda w, x: whole(w, x, labels).losses, w, x)
    right_w, right_x = vjp(cotangents)
    for losses, gw, gx in found:
        near(losses[0], right)
        near(jnp.concatenate(list(gw), axis=1)[:, :SIZE], right_w)
        near(jnp.concatenate(list(gx), axis=1), right_x)


def test_the_logits_are_never_whole_and_a_frozen_head_has_no_gradient():
    x, w, labels = example()
    loss = head(Vocabulary(SIZE, Collectives()))
    of_x = str(
        jax.make_jaxpr(
            jax.grad(lambda x: chunk_losses(loss, w, x, labels, 5).losses.sum())
        )(x)
    )
    both = str(
        jax.make_jaxpr(
            jax.grad(lambda w: chunk_losses(loss, w, x, labels, 5).losses.sum())
        )(w)
    )
    ones = jnp.ones(labels.shape)
    summed_x = str(
        jax.make_jaxpr(
            jax.grad(lambda x: sum_chunk_losses(loss, w, x, labels, ones, 5)[0])
        )(x)
    )
    summed = str(
        jax.make_jaxpr(
            jax.grad(lambda w: sum_chunk_losses(loss, w, x, labels, ones, 5)[0])
        )(w)
    )
    # forward, forward again, and a product for each gradient; where it is known what losses count, forward once
    assert (of_x.count("dot_general["), both.count("dot_general[")) == (3, 4)
    assert (summed_x.count("dot_general["), summed.count("dot_general[")) == (2, 3)
    for text in (both, summed):
        assert f"[1,5,{SIZE}]" in text
        assert all(
            f"{whole},{SIZE}]" not in text for whole in (LENGTH, ROWS * LENGTH, "5,1,5")
        )


def test_bfloat16_gradients_of_many_chunks_are_summed_in_float32():
    """Four hundred times 1: in bfloat16 the sum would stand still at 256."""
    x, labels = jnp.ones((1, 400, 1), jnp.bfloat16), jnp.zeros((1, 400), jnp.int32)
    loss = lambda w, x, labels: LabelLosses((x @ w)[..., 0].astype(jnp.float32))
    gradient = jax.grad(lambda w: chunk_losses(loss, w, x, labels, 1).losses.sum())(
        jnp.ones((1, 1), jnp.bfloat16)
    )
    assert gradient == 400


@pytest.mark.parametrize(
    ("chunk", "tokens", "rows", "taken"),
    [
        ("auto", 8192, 128256, None),
        ("auto", 131072, 16032, CHUNK),
        ("auto", 1024, 2**21, None),
        (64, 65, 8, 64),
        (64, 64, 8, None),
    ],
)
def test_auto_takes_chunks_where_the_logits_take_more_than_4_gib(
    chunk, tokens, rows, taken
):
    assert loss_chunk(load({"train": {"loss_chunk": chunk}}), tokens, rows) == taken


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "aut",
            r"train\.loss_chunk is 'aut'; .* auto .* number, at least 1 .* mean auto\?",
        ),
        ("0", r"train\.loss_chunk is 0; .* at least 1"),
        ("null", r"train\.loss_chunk has no value; .* auto .* number"),
    ],
)
def test_what_is_no_chunk_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        load({}, [f"train.loss_chunk={given}"])


@pytest.mark.thorough
def test_a_step_by_chunks_has_the_loss_and_the_gradient_of_the_whole_one():
    """The seed of the gradient, one over the tokens that count, is in what each loss counts."""
    model = {"layers": 1, "d_model": 16, "heads": 2, "vocab_size": 11}
    random, found = np.random.default_rng(1), []
    tokens, weights = (
        random.integers(0, 11, (2, 10), np.int32),
        random.uniform(0, 2, (2, 9)).astype(np.float32),
    )
    for chunk in (10**6, 7):
        train = {"global_batch_size": 2, "sequence_length": 9, "loss_chunk": chunk}
        program = Program(load({"model": model, "train": train}))
        batch = program.place(
            {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}
        )
        _, metrics = program.train_step(program.init(), batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
