"""A llama with experts in float64, one sequence at a time: each token's experts one after the other, nothing sorted and
nothing sent.

Written from the definitions, beside `reference`, whose attention and norms it takes. Its losses have the routers' own
added.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reference

Tree = Any


def scores_of(moe: Tree, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is compared between experts, and the probabilities of all of them, of logits [T, E]."""
    softmax = jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True)
    sigmoid = 1 / (1 + jnp.exp(-z))
    if moe["router"] == "sigmoid":
        return sigmoid, sigmoid / sigmoid.sum(-1, keepdims=True)
    return (z if moe["router"] == "softmax_top_k" else softmax), softmax


def chosen_by(moe: Tree, scores: np.ndarray) -> np.ndarray:
    """The experts of each token, int [T, K], the best first; of equal ones the first."""
    scores = np.array(scores)
    if moe["groups"]:
        groups, taken = moe["groups"]
        for row in scores:
            parts = np.split(np.arange(row.size), groups)
            best = sorted(
                range(groups), key=lambda g: -np.sort(row[parts[g]])[-2:].sum()
            )[:taken]
            row[[e for g in range(groups) if g not in best for e in parts[g]]] = -np.inf
    return np.argsort(-scores, axis=-1, kind="stable")[:, : moe["top_k"]]


def experts(
    moe: Tree, p: Tree, x: jax.Array, routed: np.ndarray, chosen: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """The output [T, D] of a row's experts, and the row's loss of its router."""
    z = x @ p["router"]
    scores, probabilities = scores_of(moe, z)
    rows = np.arange(len(x))
    weights = jnp.stack(
        [scores[rows, chosen[:, k]] for k in range(moe["top_k"])], axis=1
    )
    if moe["router"] == "softmax_top_k":
        weights = jnp.exp(weights) / jnp.exp(weights).sum(-1, keepdims=True)
    elif moe["normalize"]:
        weights = weights / weights.sum(-1, keepdims=True)
    y = jnp.zeros_like(x)
    for k in range(moe["top_k"]):
        gate, up, down = (p[name][chosen[:, k]] for name in ("gate", "up", "down"))
        first, second = (jnp.einsum("td,tdf->tf", x, w) for w in (gate, up))
        out = jnp.einsum("tf,tfd->td", first / (1 + jnp.exp(-first)) * second, down)
        y = y + moe["route_scale"] * weights[:, k : k + 1] * out * routed[:, None]
    tokens = max(routed.sum(), 1)
    loss = moe["z_loss"] * (jnp.log(jnp.exp(z).sum(-1)) ** 2 * routed).sum() / tokens
    if moe["balance"] == "sequence":
        share = (
            np.array(
                [((chosen == e).any(-1) * routed).sum() for e in range(moe["experts"])]
            )
            / tokens
        )
        mean = (probabilities * routed[:, None]).sum(0) / tokens
        loss = (
            loss
            + moe["balance_weight"]
            * moe["experts"]
            / moe["top_k"]
            * (share * mean).sum()
        )
    return y, loss


def in_order(parameters: Tree) -> list[tuple[str, int]]:
    """The stack of each layer, and its place in it: those with a dense MLP come first."""
    stacks = [name for name in ("dense_blocks", "blocks") if name in parameters]
    return [(n, i) for n in stacks for i in range(len(parameters[n]["attention"]["q"]))]


def run(
    model: reference.Model, moe: Tree, parameters: Tree, batch: Tree
) -> tuple[float, Tree, np.ndarray]:
    """The mean loss of the tokens, the gradient of it and of the routers' losses, and the tokens of each layer's
    experts [L, E].

    Of a batch of tokens, labels [B, T], and perhaps positions, segments (0: padding) and weights.
    """
    counts = np.zeros((len(parameters["blocks"]["attention"]["q"]), moe["experts"]))
    weights = batch.get("weights", np.ones(batch["labels"].shape))
    total, drop = weights.sum(), {name: 1.0 for name in ("scores", "attention", "mlp")}

    def of_row(parameters: Tree, row: Tree) -> tuple[jax.Array, jax.Array]:
        tokens = row["tokens"]
        routed = (
            row["segments"] > 0 if "segments" in row else np.ones(len(tokens), bool)
        )
        routed = (
            routed & (row["weights"].sum() > 0) if "segments" not in row else routed
        )
        positions = jnp.asarray(row.get("positions", np.arange(len(tokens))))
        x, own = parameters["embedding"]["tokens"][tokens], 0.0
        for layer, (stack, place) in enumerate(in_order(parameters)):
            p = jax.tree.map(lambda a, i=place: a[i], parameters[stack])
            a = reference.norm(model, p["attention_norm"], x)
            x = x + reference.attention(
                model,
                p["attention"],
                a,
                positions,
                row.get("segments"),
                drop,
                jnp.int32(layer),
            )
            h = reference.norm(model, p["mlp_norm"], x)
            if "experts" not in p:
                x = x + reference.mlp(model, p["mlp"], h)
                continue
            bias = (
                p["experts"]["load"][: moe["experts"]]
                if moe["balance"] == "bias"
                else 0.0
            )
            chosen = chosen_by(
                moe,
                jax.lax.stop_gradient(
                    scores_of(moe, h @ p["experts"]["router"])[0] + bias
                ),
            )
            y, loss = experts(moe, p["experts"], h, routed, chosen)
            if "mlp" in p:  # shared experts
                y = y + reference.mlp(model, p["mlp"], h)
            x, own = x + y, own + loss
            np.add.at(counts[place], chosen[routed].reshape(-1), 1)
        x = reference.norm(model, parameters["head"]["norm"], x)
        z = x @ parameters["head"]["weight"]
        each = jnp.log(jnp.exp(z).sum(-1)) - z[np.arange(len(tokens)), row["labels"]]
        return (each * row["weights"]).sum(), own * row["weights"].sum()

    def one(parameters: Tree, row: Tree) -> tuple[jax.Array, jax.Array]:
        cross, own = of_row(parameters, row)
        return (cross + own) / total, cross / total

    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), parameters)
        losses, gradients = 0.0, None
        for i in range(len(batch["labels"])):
            row = {
                name: np.asarray(a[i])
                for name, a in {**batch, "weights": weights}.items()
            }
            # Traced with jax.vjp and not jit: which experts are chosen is looked at in NumPy.
            cross, gradient = _with_gradient(one, exact, row)
            losses += float(cross)
            gradients = (
                gradient
                if gradients is None
                else jax.tree.map(np.add, gradients, gradient)
            )
    return losses, gradients, counts


def _with_gradient(one: Any, parameters: Tree, row: Tree) -> tuple[jax.Array, Tree]:
    _, vjp, cross = jax.vjp(lambda p: one(p, row), parameters, has_aux=True)
    return cross, jax.tree.map(np.asarray, vjp(jnp.float64(1))[0])
