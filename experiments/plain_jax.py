"""The reference of the benchmarks: a Llama-style step as one would write it for one device, one jit, no remat."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from meshtrain.config import Config

Tree = Any
BLOCK = (
    "q",
    "k",
    "v",
    "out",
    "gate",
    "up",
    "down",
    "norm1",
    "norm2",
)  # weights of a block, stacked


def init(config: Config, key: jax.Array) -> Tree:
    m = config.model
    d, h, g, k, f, layers = m.d_model, m.heads, m.kv_heads, m.head_dim, m.d_ff, m.layers
    shapes = {
        "embedding": (m.vocab_size, d),
        "head": (d, m.vocab_size),
        "q": (layers, d, h, k),
        "k": (layers, d, g, k),
        "v": (layers, d, g, k),
        "out": (layers, h, k, d),
        "gate": (layers, d, f),
        "up": (layers, d, f),
        "down": (layers, f, d),
    }
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: 0.02 * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return weights | {
        "norm1": jnp.ones((layers, d)),
        "norm2": jnp.ones((layers, d)),
        "norm": jnp.ones(d),
    }


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def rope(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [low * cos - high * sin, high * cos + low * sin], axis=-1
    ).astype(x.dtype)


def attention(
    x: jax.Array, w: Tree, kernel: Literal["xla", "cudnn"] | None = None
) -> jax.Array:
    a = rms(x, w["norm1"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", a, w[n]) for n in "qkv")
    a = jax.nn.dot_product_attention(
        rope(q), rope(k), v, is_causal=True, implementation=kernel
    )
    return x + jnp.einsum("bthk,hkd->btd", a, w["out"])


def block(
    x: jax.Array, w: Tree, kernel: Literal["xla", "cudnn"] | None = None
) -> jax.Array:
    x = attention(x, w, kernel)
    m = rms(x, w["norm2"])
    return x + (jax.nn.silu(m @ w["gate"]) * (m @ w["up"])) @ w["down"]


def head_loss(weights: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
    logits = rms(x, weights["norm"]) @ weights["head"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def loss(
    weights: Tree,
    tokens: jax.Array,
    labels: jax.Array,
    kernel: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    blocks = {n: weights[n] for n in BLOCK}
    x, _ = jax.lax.scan(
        lambda x, w: (block(x, w, kernel), None), weights["embedding"][tokens], blocks
    )
    return head_loss(weights, x, labels)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with clipping as in the config."""
    o = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(o.grad_clip),
        optax.adamw(o.learning_rate, o.beta1, o.beta2, o.eps),
    )


def make_step(
    config: Config, kernel: Literal["xla", "cudnn"] | None = None
) -> tuple[Callable, Tree]:
    """(step, state): step(state, tokens, labels) -> (state, loss).

    It computes in `precision.compute`, with attention by a `kernel`.
    """
    optimizer = make_optimizer(config)
    weights = init(config, jax.random.key(0))

    def computed(weights: Tree, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return loss(
            jax.tree.map(lambda w: w.astype(config.precision.compute), weights),
            tokens,
            labels,
            kernel,
        )

    def step(
        state: Tree, tokens: jax.Array, labels: jax.Array
    ) -> tuple[Tree, jax.Array]:
        weights, moments = state
        value, gradients = jax.value_and_grad(computed)(weights, tokens, labels)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return jax.jit(step, donate_argnums=0), (weights, optimizer.init(weights))
