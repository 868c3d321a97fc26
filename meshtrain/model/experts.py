"""Mixture of experts (Shazeer et al. 2017): a router chooses `top_k` experts for each token, which are gated MLPs.

    tokens ─► router ─► chosen, weights ─┐
       │                                 ▼
       └──────────────► dispatch ─► slots by expert ─► gate, up ─► hidden x weight ─► down ─► sum over top_k

    slots     0 0 0 · │ 1 1 · · │ 1 1 1 1 │ 3 · · ·        blocks of equal length, each of one expert; ·: a row of zeros

Routers compute in float32 everywhere, or tokens would choose other experts on other meshes. Tokens that are padding,
and those of an idle slot of a pipeline, choose none. A router's counts leave the step as the gradient of a weight,
`load`, so that microbatches, stages and data ranks are summed as they are for gradients; with `balance: bias` the same
weight is what is added to the scores (Wang et al. 2024).

Suffixes besides those of `layers`: N tokens, K chosen experts of each, E experts, S slots.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import vary, varying
from meshtrain.config import ModelConfig
from meshtrain.config.model import MoeConfig
from meshtrain.families import FAMILIES
from meshtrain.model.collectives import Collectives
from meshtrain.model.expert_loops import LoopedWeights, looped, weighted_hidden
from meshtrain.model.grouped import grouped
from meshtrain.model.products import hidden, keeping_arguments, make_parameters
from meshtrain.model.rope import Routing, Sequence
from meshtrain.model.slots import ExpertSlots, collected, slots_of, spread
from meshtrain.model.weights import COUNTED, lie_side_by_side


class RouterChoice(NamedTuple):
    """A router's choices for tokens."""

    chosen: jax.Array  # int32 [N, K]; the number of experts: none
    weights: jax.Array  # float32 [N, K]
    probabilities: jax.Array  # float32 [N, E], of all experts


def route(
    moe: MoeConfig,
    logits_NE: jax.Array,
    bias_E: jax.Array,
    routed_N: jax.Array | None,
    chosen_NK: jax.Array | None = None,
) -> RouterChoice:
    """Chooses the experts of each token from the router's float32 logits, or weighs those that are `chosen_NK`."""
    probabilities = jax.nn.softmax(logits_NE)
    scores = probabilities if moe.router == "softmax" else logits_NE
    if moe.router == "sigmoid":
        scores = jax.nn.sigmoid(logits_NE)
        probabilities = scores / scores.sum(-1, keepdims=True)
    chosen = _choose(moe, scores, bias_E) if chosen_NK is None else chosen_NK
    one_hot = jax.nn.one_hot(chosen, moe.experts)
    weights = jnp.einsum("nke,ne->nk", one_hot, scores, precision="highest")
    if moe.router == "softmax_top_k":
        weights = jax.nn.softmax(weights)
    elif moe.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    if routed_N is not None:
        chosen = jnp.where(routed_N[:, None], chosen, moe.experts)
    return RouterChoice(chosen, moe.route_scale * weights, probabilities)


def _choose(moe: MoeConfig, scores_NE: jax.Array, bias_E: jax.Array) -> jax.Array:
    biased = lax.stop_gradient(scores_NE) + (bias_E if moe.balance == "bias" else 0)
    return lax.top_k(
        _keep_best_groups(moe, biased) if moe.groups else biased, moe.top_k
    )[1]


def _keep_best_groups(moe: MoeConfig, scores_NE: jax.Array) -> jax.Array:
    """Scores that are -inf but in each token's best groups, those with the highest sums of their two best scores
    (DeepSeek-V3, 2.1.2).
    """
    groups, taken = moe.groups
    by_group = scores_NE.reshape(len(scores_NE), groups, -1)
    best = lax.top_k(lax.top_k(by_group, 2)[0].sum(-1), taken)[1]
    is_best = jax.nn.one_hot(best, groups).sum(1) > 0
    return jnp.where(is_best[..., None], by_group, -jnp.inf).reshape(scores_NE.shape)


# --- what leaves a layer besides its output


@jax.custom_vjp
def recorded(y: jax.Array, load: jax.Array, counts: jax.Array) -> jax.Array:
    """y; the gradient of `load` is `counts`, whatever y's is."""
    return y


recorded.defvjp(
    lambda y, load, counts: (y, (load, counts)),
    lambda kept, g: (g, vary(kept[1].astype(kept[0].dtype), varying(kept[0])), None),
)


@jax.custom_vjp
def add_losses(x: jax.Array, losses_B: jax.Array, seeds_B: jax.Array) -> jax.Array:
    """x; the gradient of each of the losses is its seed, as if they had been added to the loss."""
    return x


add_losses.defvjp(
    lambda x, losses, seeds: (x, (losses, seeds)),
    lambda kept, g: (g, vary(kept[1], varying(kept[0])), None),
)


def auxiliary_losses(
    moe: MoeConfig,
    logits: jax.Array,
    routes: RouterChoice,
    routed_BT: jax.Array,
    collectives: Collectives,
) -> jax.Array:
    """The router's own losses of each row, float32 [B]: means over its tokens, so that a batch's is a mean over rows on
    every mesh.
    """
    rows = len(routed_BT)
    mask = routed_BT.astype(jnp.float32)
    tokens_B = jnp.maximum(collectives.row_sum(mask.sum(1)), 1)

    def mean(values: jax.Array) -> jax.Array:
        """Averages over the routed tokens of each row: [N, ...] to [B, ...]."""
        of_rows = values.reshape(*mask.shape, *values.shape[1:])
        total = jnp.einsum("bt,bt...->b...", mask, of_rows, precision="highest")
        return collectives.row_sum(total) / tokens_B.reshape(
            rows, *(1,) * (total.ndim - 1)
        )

    losses = jnp.zeros(rows)
    if moe.z_loss:
        losses = losses + moe.z_loss * mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    if moe.balance == "sequence":
        shares = mean(jax.nn.one_hot(routes.chosen, moe.experts).sum(1)) * (
            moe.experts / moe.top_k
        )
        losses = losses + moe.balance_weight * (
            lax.stop_gradient(shares) * mean(routes.probabilities)
        ).sum(-1)
    return losses


# --- the module


class Experts(nnx.Module):
    """`top_k` of a layer's experts for each token: this rank's experts, of each its columns of d_ff."""

    router: nnx.Param
    load: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    router_bias: nnx.Param | None = None
    gate_bias: nnx.Param | None = None
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None
    float8: Any = None  # `float8.Float8Products`, where products are

    def __init__(self, name: str, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.moe = config.moe
        self.hidden = hidden(
            config.activation, True, FAMILIES[config.family].gate_limit
        )
        make_parameters(self, name, config, rngs)

    def __call__(
        self, x_BTD: jax.Array, sequence: Sequence, collectives: Collectives
    ) -> jax.Array:
        """The experts' output, [B, T, D] (T / tensor of it with sequence parallelism)."""
        moe = self.moe
        routing = sequence.routing or Routing()
        rows = x_BTD.reshape(-1, x_BTD.shape[-1])
        routed = (
            jnp.ones(x_BTD.shape[:2], bool)
            if routing.routed_BT is None
            else collectives.own_part(routing.routed_BT)
        )
        logits = self.logits(rows)
        load = self.load[...]
        given = routing.chosen_BTK
        if given is not None:
            given = collectives.own_part(given).reshape(-1, moe.top_k)
        bias = lax.stop_gradient(load[: moe.experts])
        routes = route(moe, logits, bias, routed.reshape(-1), given)
        if routing.note is not None:
            routing.note(routes.chosen.reshape(*x_BTD.shape[:2], moe.top_k))
        if routing.seeds_B is not None and (moe.z_loss or moe.balance == "sequence"):
            losses = auxiliary_losses(moe, logits, routes, routed, collectives)
            rows = add_losses(rows, losses, collectives.once(routing.seeds_B))
        compute = partial(self.compute, collectives)
        y, noted = collectives.dispatch(
            compute, moe.experts, rows, routes.chosen, routes.weights
        )
        y = recorded(y, load, collectives.once(counted(routes, noted)))
        return checkpoint_name(collectives.leave(y.reshape(x_BTD.shape)), "mlp_out")

    def logits(self, rows_ND: jax.Array) -> jax.Array:
        """The router's scores of all experts, float32 [N, E]."""
        router = self.router[...].astype(jnp.float32)
        logits = jnp.matmul(rows_ND.astype(jnp.float32), router, precision="highest")
        bias = self.router_bias
        return logits if bias is None else logits + bias[...].astype(jnp.float32)

    def compute(
        self,
        collectives: Collectives,
        rows_ND: jax.Array,
        chosen_NK: jax.Array,
        weights_NK: jax.Array,
        room: int,
        skipped: jax.Array | int = 0,
    ) -> tuple[jax.Array, jax.Array]:
        """The experts that are here, of rows [N, D] that have chosen them by their number here, times the weights and
        summed over K: of `room` pairs behind the first `skipped`; and the number of those beyond.
        """
        slots = slots_of(chosen_NK, len(self.gate[...]), room, skipped)
        if collectives.platform == "gpu" or self.float8 is not None:
            return self.compute_slots(
                collectives, rows_ND, weights_NK, slots
            ), slots.dropped
        down_bias = (
            None if self.down_bias is None else collectives.share(self.down_bias[...])
        )
        gate_bias, up_bias = (
            None if bias is None else bias[...]
            for bias in (self.gate_bias, self.up_bias)
        )
        weights = LoopedWeights(
            self.gate[...], self.up[...], self.down[...], gate_bias, up_bias, down_bias
        )
        return looped(
            self.hidden,
            weights,
            checkpoint_name(rows_ND, "dispatched"),
            weights_NK,
            slots,
        ), slots.dropped

    def compute_slots(
        self,
        collectives: Collectives,
        rows_ND: jax.Array,
        weights_NK: jax.Array,
        slots: ExpertSlots,
    ) -> jax.Array:
        """Returns what `looped` does, where kernels or roundings take all slots at once."""
        block_of = slots.expert_of_block, slots.blocks, collectives.platform
        source = slots.pairs // weights_NK.shape[1]
        x = self.rows(
            checkpoint_name(spread(rows_ND, source, slots.places), "dispatched")
        )
        branches = self._products_in(x, len(source), block_of)
        if self.gate_bias is not None and self.up_bias is not None:
            both = jnp.concatenate([self.gate_bias[...], self.up_bias[...]], 1)
            biases = jnp.split(both, len(branches), axis=1)
            branches = [
                b + slot_biases(bias, slots)
                for b, bias in zip(branches, biases, strict=True)
            ]
        weights = spread(
            weights_NK.reshape(-1, 1), slots.pairs, slots.places.reshape(-1, 1)
        )
        # weights before the last product, so that its output is not kept for their gradient
        weighted = keeping_arguments(partial(weighted_hidden, self.hidden))
        branches = [checkpoint_name(b, "mlp_in") for b in branches]
        h = checkpoint_name(weighted(weights, *branches), "mlp_hidden")
        y = self.product("down", self.rows(h), *block_of)
        if self.down_bias is not None:
            y = y + (
                slot_biases(collectives.share(self.down_bias[...]), slots) * weights
            ).astype(y.dtype)
        return collected(y, source, slots.places)

    def _products_in(
        self, x: Any, slots: int, block_of: tuple[Any, ...]
    ) -> list[jax.Array]:
        """Returns the products of slots with gate and up: [S, 2 F] where they lie side by side, else two [S, F]."""
        experts, _, width = self.gate[...].shape
        if self.float8 is None and lie_side_by_side(slots, experts, width):
            return [grouped(x, (self.gate[...], self.up[...]), *block_of)]
        return [self.product(name, x, *block_of) for name in ("gate", "up")]

    def rows(self, x_SD: jax.Array) -> Any:
        """Slots as `product` takes them."""
        return x_SD if self.float8 is None else self.float8.round(x_SD)

    def product(
        self,
        name: str,
        rows: Any,
        experts: jax.Array,
        blocks: jax.Array,
        platform: str,
    ) -> jax.Array:
        """Slots times the weights `name` of their experts."""
        weight = getattr(self, name)[...]
        if self.float8 is None:
            return grouped(rows, weight, experts, blocks, platform)
        return self.float8.grouped(name, rows, weight, platform, (experts, blocks))


def slot_biases(bias_EF: jax.Array, slots: ExpertSlots) -> jax.Array:
    """The bias of each slot's expert, [S, F]: by a product, whose transpose scatters no sum."""
    one_hot = jax.nn.one_hot(slots.expert_of_block, len(bias_EF), dtype=bias_EF.dtype)
    by_block = jnp.matmul(one_hot, bias_EF, precision="highest")
    return jnp.repeat(by_block, len(slots.pairs) // len(by_block), axis=0)


def counted(routes: RouterChoice, noted: jax.Array) -> jax.Array:
    """Returns the gradient of `load`, float32 [E + 2]: tokens of each expert, what a dispatch noted, the sum of the
    tokens' entropies.
    """
    experts = routes.probabilities.shape[1]
    tokens = jnp.bincount(routes.chosen.reshape(-1), length=experts + 1)[:experts]
    p = routes.probabilities
    entropies = -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1)
    entropy = jnp.sum(jnp.where(routes.chosen[:, 0] < experts, entropies, 0))
    counts = jnp.concatenate(
        [tokens.astype(jnp.float32), jnp.stack([noted.astype(jnp.float32), entropy])]
    )
    assert len(counts) == experts + COUNTED
    return lax.stop_gradient(counts)


# `Experts.compute` but for the collectives
Compute = Callable[..., tuple[jax.Array, jax.Array]]
