"""The chunked delta rule is the recurrence token by token, forward and in all gradients, for every kind of gate."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from meshtrain.model.collectives import Collectives
from meshtrain.model.delta_rule import (
    Documents,
    RuleInputs,
    delta_rule,
    read_state,
    step,
)

ROWS, KEY_HEADS, HEADS, KEY, VALUE = 2, 2, 4, 8, 6


def recurrence(inputs: RuleInputs, segments: np.ndarray) -> np.ndarray:
    """Returns the outputs [R, T, H, V] from the definition, a token at a time, in NumPy."""
    state = np.zeros((ROWS, HEADS, KEY, VALUE))
    outs = []
    for t in range(inputs.q.shape[1]):
        continues = segments[:, t] == segments[:, t - 1] if t else np.zeros(ROWS, bool)
        at_t = jax.tree.map(lambda x, t=t: x[:, t], inputs)
        out, state = one_token(np, at_t, state * continues[:, None, None, None])
        outs.append(out)
    return np.stack(outs, axis=1)


def one_token(np, inputs: RuleInputs, state):
    q, k = (np.repeat(x, HEADS // x.shape[1], axis=1) for x in inputs[:2])
    decay = np.exp(inputs.log_decay)
    state = state * decay.reshape(*decay.shape[:2], -1, 1)
    delta = inputs.v
    if inputs.beta is not None:
        delta = inputs.beta[..., None] * (delta - np.einsum("rhk,rhkv->rhv", k, state))
    state = state + k[..., None] * delta[:, :, None]
    out = np.einsum("rhk,rhkv->rhv", q, state)
    return out if inputs.more is None else out + inputs.more, state


@jax.jit
def scanned(inputs: RuleInputs, segments, weights):
    """Returns the same, and its gradients."""
    new = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))

    def outputs(inputs):
        def token(state, here):
            inputs, new = here
            out, state = one_token(
                jnp, inputs, jnp.where(new[:, None, None, None], 0, state)
            )
            return state, out

        by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, new))
        state = jnp.zeros((ROWS, HEADS, KEY, VALUE))
        return jnp.moveaxis(jax.lax.scan(token, state, by_token)[1], 0, 1)

    out, vjp = jax.vjp(outputs, inputs)
    return out, vjp(weights)[0]


def drawn(kind: str, length: int, seed: int = 0) -> RuleInputs:
    draw = np.random.default_rng(seed)
    q, k = draw.standard_normal((2, ROWS, length, KEY_HEADS, KEY)).astype(np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = draw.standard_normal((ROWS, length, HEADS, VALUE), np.float32)
    gates = (ROWS, length, HEADS, KEY) if kind == "kda" else (ROWS, length, HEADS)
    # a few forget all at once: no difference of their sums may overflow
    log_decay = -np.exp(2 * draw.standard_normal(gates) - 2).astype(np.float32)
    log_decay = np.where(draw.random(gates) < 0.03, np.float32(-60), log_decay)
    if kind == "mamba2":
        return RuleInputs(
            q, k, v, log_decay, more=draw.standard_normal(v.shape, np.float32)
        )
    return RuleInputs(
        q, k, v, log_decay, draw.random((ROWS, length, HEADS)).astype(np.float32)
    )


def documents(length: int, ends: tuple[int, ...]) -> np.ndarray:
    """Returns segments [R, T]: one document more behind each end; the second row is one document."""
    first = 1 + sum((np.arange(length) >= end).astype(np.int32) for end in ends)
    return np.stack([np.broadcast_to(first, length), np.ones(length, np.int32)]).astype(
        np.int32
    )


@partial(jax.jit, static_argnums=(3, 4))
def chunked(inputs, segments, weights, chunk, packed):
    of = Documents(segments, segments[:, :1]) if packed else None
    out, vjp = jax.vjp(
        lambda x: delta_rule(lambda x, documents: x, chunk, Collectives(), x, of),
        inputs,
    )
    return out, vjp(weights)[0]


def relative(got, want) -> float:
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


@pytest.mark.parametrize("kind", ["gated_delta", "kda", "mamba2"])
@pytest.mark.parametrize(
    ("length", "chunk", "ends"),
    [
        (32, 8, ()),
        (37, 16, (5,)),
        (40, 16, (16, 17, 31, 32)),
        (13, 16, (1, 12)),
        (24, 8, tuple(range(1, 24))),
    ],
)
def test_outputs_and_gradients_are_those_of_the_recurrence(kind, length, chunk, ends):
    inputs = drawn(kind, length)
    segments = documents(length, ends)
    weights = (
        np.random.default_rng(1).standard_normal(inputs.v.shape).astype(np.float32)
    )
    want = recurrence(jax.tree.map(np.float64, inputs), segments)
    got, gradients = chunked(inputs, segments, weights, chunk, bool(ends))
    assert got.dtype == jnp.float32
    assert relative(got, want) < 1e-6
    with jax.enable_x64(True):
        out, right = scanned(
            jax.tree.map(np.float64, inputs), segments, np.float64(weights)
        )
        assert relative(out, want) < 1e-12
    for name, seen, gradient in zip(RuleInputs._fields, gradients, right, strict=True):
        if gradient is not None:
            assert relative(seen, np.asarray(gradient)) < 1e-6, name


@pytest.mark.parametrize("kind", ["gated_delta", "kda", "mamba2"])
def test_a_state_that_was_read_goes_on_token_by_token(kind):
    inputs = drawn(kind, 23)
    want = recurrence(jax.tree.map(np.float64, inputs), np.ones((ROWS, 23)))
    cut = lambda first, last: jax.tree.map(lambda x: x[:, first:last], inputs)
    zeros = jnp.zeros((ROWS, HEADS, KEY, VALUE))
    read = jax.jit(read_state, static_argnums=1)
    out, state = read(cut(0, 11), 4, zeros)
    assert relative(out, want[:, :11]) < 1e-6
    more, state = read(cut(11, 18), 4, state)
    assert relative(more, want[:, 11:18]) < 1e-6
    for t in range(18, 23):
        out, state = step(jax.tree.map(lambda x, t=t: x[:, t], inputs), state)
        assert relative(out, want[:, t]) < 1e-6
    assert state.dtype == jnp.float32


@pytest.fixture
def interpreted(monkeypatch):
    """Pallas kernels as plain JAX, on any device."""
    call = pallas.pallas_call
    monkeypatch.setattr(
        pallas,
        "pallas_call",
        lambda *given, **keys: call(*given, **{**keys, "interpret": True}),
    )


class OnGpu(Collectives):
    platform = "gpu"


@pytest.mark.parametrize(
    ("kind", "length", "chunk", "ends"),
    [
        ("gated_delta", 37, 16, (5, 16, 31)),
        pytest.param("gated_delta", 128, 64, (), marks=pytest.mark.thorough),
        pytest.param("gated_delta", 100, 64, (63, 64), marks=pytest.mark.thorough),
        pytest.param("mamba2", 70, 32, (33,), marks=pytest.mark.thorough),
    ],
)
def test_the_kernel_of_chunks_gives_what_halves_give(
    interpreted, monkeypatch, kind, length, chunk, ends
):
    monkeypatch.setitem(globals(), "KEY", 32)
    monkeypatch.setitem(globals(), "VALUE", 16)
    inputs = drawn(kind, length)
    segments = documents(length, ends)
    of = Documents(segments, segments[:, :1]) if ends else None
    run = lambda collectives: (
        lambda inputs: delta_rule(
            lambda x, documents: x, chunk, collectives, inputs, of
        )
    )
    assert str(jax.make_jaxpr(run(OnGpu()))(inputs)).count(" pallas_call[") == 1
    got, want = (jax.jit(run(of))(inputs) for of in (OnGpu(), Collectives()))
    assert relative(got, np.asarray(want)) < 1e-6
    exact = recurrence(jax.tree.map(np.float64, inputs), segments)
    assert relative(got, exact) < 1e-6
