"""The run that every layout must reproduce: both model families on one device, written from the definitions.

Plain jax.numpy and Optax, nothing of meshtrain's model or parallel code: whole matrices, scores masked after the fact, log_softmax
over the full logits, one batch at once. It takes the canonical parameter tree, so that both runs start from the same numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
DROPPED = ("scores", "attention", "mlp")  # in each layer: [L, heads, T, T], [L, T, D], [L, T, D]


@dataclasses.dataclass(frozen=True)
class Model:
    """What the shapes of the parameters do not say."""

    family: str
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """AdamW with warm-up and cosine decay after clipping by the global norm."""

    peak: float
    warmup: int
    steps: int
    final_ratio: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def optimizer(self, parameters: Tree) -> optax.GradientTransformation:
        def rate(before: jax.Array) -> jax.Array:
            """Of the step that has so many before it: step `warmup` has the peak, the last one `final_ratio` of it."""
            step = before + 1
            way = (step - self.warmup) / (self.steps - self.warmup)
            falling = self.final_ratio + (1 - self.final_ratio) * (1 + jnp.cos(jnp.pi * way)) / 2
            return self.peak * jnp.where(step < self.warmup, step / self.warmup, falling)

        matrices = jax.tree_util.tree_map_with_path(
            lambda path, _: not any(word in path[-1].key for word in ("scale", "bias")), parameters
        )
        adamw = optax.adamw(rate, self.beta1, self.beta2, self.eps, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


# --- the model, one sequence at a time: x is [T, D]


def norm(model: Model, p: Tree, x: jax.Array) -> jax.Array:
    if model.family == "gpt2":  # LayerNorm
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps)
    return x * p["scale"] + p.get("bias", 0.0)


def rotate(model: Model, x: jax.Array, positions: jax.Array) -> jax.Array:
    """RoPE on [T, heads, K]: the pair (i, i + K/2) is a complex number, turned by position · theta^(-2i/K)."""
    width = x.shape[-1]
    turns = positions[:, None] * (model.rope_theta ** (-2 * np.arange(width // 2) / width)).astype(np.float32)
    z = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * jnp.exp(1j * turns)[:, None]
    return jnp.concatenate([z.real, z.imag], -1)


def attention(
    model: Model, p: Tree, x: jax.Array, positions: jax.Array, segments: jax.Array | None, drop: Tree
) -> jax.Array:
    q, k, v = (jnp.einsum("td,dhk->thk", x, p[n]) + p.get(f"{n}_bias", 0.0) for n in ("q", "k", "v"))
    if model.family == "llama":
        q, k = rotate(model, q, positions), rotate(model, k, positions)
    length, heads, width = q.shape
    k, v = (jnp.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))  # grouped queries: heads in a row share one
    allowed = np.tril(np.ones((length, length), bool))
    if segments is not None:
        allowed = allowed & (segments[:, None] == segments[None, :])
    scores = jnp.einsum("qhk,shk->hqs", q, k) / np.sqrt(width)
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1) * drop["scores"]
    return jnp.einsum("hqs,shk,hkd->qd", weights, v, p["out"]) + p.get("out_bias", 0.0)


def mlp(model: Model, p: Tree, x: jax.Array) -> jax.Array:
    up = x @ p["up"] + p.get("up_bias", 0.0)
    if model.family == "llama":
        gate = x @ p["gate"]
        hidden = gate / (1 + jnp.exp(-gate)) * up  # SwiGLU
    else:
        hidden = 0.5 * up * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))  # GPT-2's GELU
    return hidden @ p["down"] + p.get("down_bias", 0.0)


def logits(
    model: Model,
    parameters: Tree,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    drops: Tree | None = None,
) -> jax.Array:
    """[T, V] for one sequence [T]; of packed documents with their positions and their segments' numbers.

    `drops` holds what dropout multiplies with, 0 or 1 / (1 - rate): of the embedding, and of each layer's scores, attention and MLP.
    """
    positions = jnp.arange(len(tokens)) if positions is None else positions
    if drops is None:
        drops = {"embedding": 1.0} | dict.fromkeys(DROPPED, jnp.ones(len(parameters["blocks"]["attention"]["q"])))
    x = parameters["embedding"]["tokens"][tokens]
    if model.family == "gpt2":
        x = x + parameters["embedding"]["positions"][positions]
    x = x * drops["embedding"]
    of_layers = {name: drops[name] for name in DROPPED}

    def block(x: jax.Array, of_layer: tuple[Tree, Tree]) -> tuple[jax.Array, None]:
        p, drop = of_layer
        a = attention(model, p["attention"], norm(model, p["attention_norm"], x), positions, segments, drop)
        x = x + a * drop["attention"]
        return x + mlp(model, p["mlp"], norm(model, p["mlp_norm"], x)) * drop["mlp"], None

    x = norm(model, parameters["head"]["norm"], jax.lax.scan(block, x, (parameters["blocks"], of_layers))[0])
    return x @ parameters["head"].get("weight", parameters["embedding"]["tokens"].T)


def loss(model: Model, parameters: Tree, tokens: jax.Array, labels: jax.Array, **more: Tree) -> jax.Array:
    """Mean loss per token of a batch [B, T]; `more` may hold positions, segments, drops, and the tokens' weights."""
    weights = more.pop("weights", jnp.ones(tokens.shape))
    z = jax.vmap(lambda t, more: logits(model, parameters, t, **more))(tokens, more)
    log_p = jax.nn.log_softmax(z)
    target = jax.nn.one_hot(labels, z.shape[-1])
    target = (1 - model.label_smoothing) * target + model.label_smoothing / z.shape[-1]
    log_z = jnp.log(jnp.exp(z).sum(-1))
    each = -(target * log_p).sum(-1) + model.z_loss * log_z**2
    return (each * weights).sum() / weights.sum()


# --- the run


def train(
    model: Model, recipe: Recipe, parameters: Tree, batches: Sequence[dict[str, Tree]]
) -> tuple[list[float], Tree]:
    """The loss of each step, and the gradient of the first (before clipping). Batches have what `loss` takes."""
    optimizer = recipe.optimizer(parameters)

    @jax.jit
    def step(parameters: Tree, state: Tree, batch: dict[str, Tree]) -> tuple[Tree, Tree, jax.Array, Tree]:
        value, gradient = jax.value_and_grad(lambda p: loss(model, p, **batch))(parameters)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value, gradient

    state, losses, first = optimizer.init(parameters), [], None
    for batch in batches:
        parameters, state, value, gradient = step(parameters, state, batch)
        losses.append(float(value))
        first = jax.tree.map(np.asarray, gradient) if first is None else first
    return losses, first
