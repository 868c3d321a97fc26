"""The run that every layout must reproduce: llama, gpt2 and vit on one device, written from the definitions.

Plain jax.numpy and Optax, nothing of meshtrain's model or parallel code: whole matrices, scores masked after the fact,
log_softmax over the full logits, one batch at once. It takes the canonical parameter tree, so that both runs start from
the same numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
# In each layer: [L, heads, T, T], [L, T, D], [L, T, D]
DROPPED = ("scores", "attention", "mlp")


@dataclasses.dataclass(frozen=True)
class Model:
    """What the shapes of the parameters do not say."""

    family: str
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    window: int = 0
    activation: str = ""  # "": the family's
    plus_one: bool = False  # norms multiply by 1 + scale
    scaled_embedding: bool = False
    query_scalar: int = 0  # 0: the heads' width
    score_cap: float = 0.0
    logit_cap: float = 0.0
    global_every: int = 0  # the last layer of so many sees all
    rope_theta_local: float = 0.0


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
            falling = (
                self.final_ratio
                + (1 - self.final_ratio) * (1 + jnp.cos(jnp.pi * way)) / 2
            )
            return self.peak * jnp.where(
                step < self.warmup, step / self.warmup, falling
            )

        matrices = jax.tree_util.tree_map_with_path(
            lambda path, _: (
                not any(
                    word in path[-1].key for word in ("scale", "bias", "class_token")
                )
            ),
            parameters,
        )
        adamw = optax.adamw(
            rate,
            self.beta1,
            self.beta2,
            self.eps,
            weight_decay=self.weight_decay,
            mask=matrices,
        )
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


# --- the model, one sequence at a time: x is [T, D]


def norm(model: Model, p: Tree, x: jax.Array) -> jax.Array:
    if "bias" in p:  # LayerNorm
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps)
    return x * (p["scale"] + model.plus_one) + p.get("bias", 0.0)


def cap(limit: float, x: jax.Array) -> jax.Array:
    return jnp.tanh(x / limit) * limit if limit else x


def rotate(
    model: Model, x: jax.Array, positions: jax.Array, sees_all: jax.Array | bool = True
) -> jax.Array:
    """RoPE on [T, heads, K]: the pair (i, i + K/2) is a complex number, turned by position · theta^(-2i/K)."""
    width = x.shape[-1]
    far, near = (
        (theta ** (-2 * np.arange(width // 2) / width)).astype(np.float32)
        for theta in (model.rope_theta, model.rope_theta_local or model.rope_theta)
    )
    turns = positions[:, None] * jnp.where(sees_all, far, near)
    z = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * jnp.exp(1j * turns)[
        :, None
    ]
    return jnp.concatenate([z.real, z.imag], -1)


def attention(
    model: Model,
    p: Tree,
    x: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None,
    drop: Tree,
    index: jax.Array,
) -> jax.Array:
    sees_all = (
        (index + 1) % model.global_every == 0
        if model.global_every
        else not model.window
    )
    q, k, v = (
        jnp.einsum("td,dhk->thk", x, p[n]) + p.get(f"{n}_bias", 0.0)
        for n in ("q", "k", "v")
    )
    if "q_norm" in p:
        q, k = (norm(model, p[f"{n}_norm"], a) for n, a in (("q", q), ("k", k)))
    if model.family not in ("gpt2", "vit"):
        q, k = (rotate(model, a, positions, sees_all) for a in (q, k))
    length, heads, width = q.shape
    k, v = (
        jnp.repeat(a, heads // a.shape[1], axis=1) for a in (k, v)
    )  # grouped queries: heads in a row share one
    allowed = (
        np.ones((length, length), bool)
        if model.family == "vit"
        else np.tril(np.ones((length, length), bool))
    )
    if model.window:
        allowed = allowed & (
            sees_all | np.triu(np.ones((length, length), bool), 1 - model.window)
        )
    if segments is not None:
        allowed = allowed & (segments[:, None] == segments[None, :])
    scores = cap(
        model.score_cap,
        jnp.einsum("qhk,shk->hqs", q, k) / np.sqrt(model.query_scalar or width),
    )
    weights = (
        jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1) * drop["scores"]
    )
    return jnp.einsum("hqs,shk,hkd->qd", weights, v, p["out"]) + p.get("out_bias", 0.0)


def mlp(model: Model, p: Tree, x: jax.Array) -> jax.Array:
    up = x @ p["up"] + p.get("up_bias", 0.0)
    first = x @ p["gate"] if "gate" in p else up
    kind = model.activation or {"gpt2": "gelu", "vit": "gelu_exact"}.get(
        model.family, "silu"
    )
    if kind == "silu":
        first = first / (1 + jnp.exp(-first))
    elif kind == "gelu":  # GPT-2's
        first = (
            0.5
            * first
            * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (first + 0.044715 * first**3)))
        )
    else:
        assert kind == "gelu_exact"
        first = 0.5 * first * (1 + jax.lax.erf(first / np.sqrt(2)))
    hidden = first * up if "gate" in p else first  # SwiGLU and its kin
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

    `drops` holds what dropout multiplies with, 0 or 1 / (1 - rate): of the embedding, and of each layer's scores,
    attention and MLP.
    """
    positions = jnp.arange(len(tokens)) if positions is None else positions
    if drops is None:
        drops = {"embedding": 1.0} | dict.fromkeys(
            DROPPED, jnp.ones(len(parameters["blocks"]["attention"]["q"]))
        )
    x = parameters["embedding"]["tokens"][tokens]
    x = x * np.sqrt(x.shape[-1]) if model.scaled_embedding else x
    if model.family == "gpt2":
        x = x + parameters["embedding"]["positions"][positions]
    x = blocks(model, parameters, x, positions, segments, drops)
    x = norm(model, parameters["head"]["norm"], x)
    return cap(
        model.logit_cap,
        x @ parameters["head"].get("weight", parameters["embedding"]["tokens"].T),
    )


def image_logits(
    model: Model, parameters: Tree, patches: jax.Array, drops: Tree | None = None
) -> jax.Array:
    """[1, V] for one image [N, P], as Dosovitskiy et al. 2021, equations 1 to 4, or by the mean of its patches where no
    class token is.
    """
    e, head = parameters["embedding"], parameters["head"]
    if drops is None:
        drops = {"embedding": 1.0} | dict.fromkeys(
            DROPPED, jnp.ones(len(parameters["blocks"]["attention"]["q"]))
        )
    x = patches @ e["patches"] + e["bias"]
    x = jnp.concatenate([e["class_token"][None], x]) if "class_token" in e else x
    x = norm(
        model,
        head["norm"],
        blocks(model, parameters, x + e["positions"], jnp.arange(len(x)), None, drops),
    )
    read = x[:1] if "class_token" in e else x.mean(0, keepdims=True)
    return read @ head["weight"] + head["bias"]


def blocks(
    model: Model,
    parameters: Tree,
    x: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None,
    drops: Tree,
) -> jax.Array:
    """What the last layer gives of embedded positions."""
    x = x * drops["embedding"]
    of_layers = {name: drops[name] for name in DROPPED}

    def block(
        x: jax.Array, of_layer: tuple[Tree, Tree, jax.Array]
    ) -> tuple[jax.Array, None]:
        p, drop, index = of_layer
        a = attention(
            model,
            p["attention"],
            norm(model, p["attention_norm"], x),
            positions,
            segments,
            drop,
            index,
        )
        a = (
            norm(model, p["attention_post_norm"], a)
            if "attention_post_norm" in p
            else a
        )
        x = x + a * drop["attention"]
        m = mlp(model, p["mlp"], norm(model, p["mlp_norm"], x))
        m = norm(model, p["mlp_post_norm"], m) if "mlp_post_norm" in p else m
        return x + m * drop["mlp"], None

    indices = jnp.arange(len(parameters["blocks"]["attention"]["q"]))
    return jax.lax.scan(block, x, (parameters["blocks"], of_layers, indices))[0]


def loss(model: Model, parameters: Tree, labels: jax.Array, **more: Tree) -> jax.Array:
    """Mean loss per token of a batch of tokens [B, T]; `more` may hold positions, segments, drops, and the tokens'
    weights.

    Or per image of patches [B, N, P] with labels [B, 1]; `more` may hold drops, weights, and of mixed images labels_b
    and mix.
    """
    weights, others, mix = (
        more.pop(name, None) for name in ("weights", "labels_b", "mix")
    )
    of_row = image_logits if "patches" in more else logits
    z = jax.vmap(lambda row: of_row(model, parameters, **row))(more)
    log_p = jax.nn.log_softmax(z)
    target = jax.nn.one_hot(labels, z.shape[-1])
    if mix is not None:
        target = mix[..., None] * target + (1 - mix[..., None]) * jax.nn.one_hot(
            others, z.shape[-1]
        )
    weights = jnp.ones(labels.shape) if weights is None else weights
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
    def step(
        parameters: Tree, state: Tree, batch: dict[str, Tree]
    ) -> tuple[Tree, Tree, jax.Array, Tree]:
        value, gradient = jax.value_and_grad(lambda p: loss(model, p, **batch))(
            parameters
        )
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value, gradient

    state, losses, first = optimizer.init(parameters), [], None
    for batch in batches:
        parameters, state, value, gradient = step(parameters, state, batch)
        losses.append(float(value))
        first = jax.tree.map(np.asarray, gradient) if first is None else first
    return losses, first
