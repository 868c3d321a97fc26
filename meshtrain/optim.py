"""The optimizer: an Optax chain from the config, unmodified on sharded state."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.learning_rates import LEARNING_RATES
from meshtrain.optimizers import OPTIMIZERS
from meshtrain.parallel.layout import Layout, is_placed, shard_spec
from meshtrain.parallel.placement import Placed, part
from meshtrain.run.hooks import RunHook

Tree = Any


def learning_rate(config: Config) -> optax.Schedule:
    """The rate of an update by the number of those before it: a linear climb to the peak, then as `optimizer.schedule`
    has it.

        step           1          2         ...  warmup_steps   ...      steps
        before it      0          1                                    steps - 1
        rate      peak / warmup  2 peak / warmup      peak     cosine, linear, wsd   final_ratio x peak
                                                               constant              peak

    A step that float16 skips moves nothing on. Without warm-up the first step has the peak; a run that ends in it never
    decays.
    """
    o = config.optimizer
    peak_at = max(1, o.warmup_steps)
    climb = peak_at - 1
    rest = max(1, config.train.steps - peak_at)
    after = LEARNING_RATES[o.schedule].make(o, rest, config.train.steps)
    if not climb:
        return after
    return optax.join_schedules(
        [
            optax.linear_schedule(o.learning_rate / peak_at, o.learning_rate, climb),
            after,
        ],
        [climb],
    )


def updates_made(state: Tree) -> jax.Array:
    """The updates that an optimizer state has seen, by which its learning rate goes."""
    return optax.tree.get_all_with_path(state, "count")[0][1]


def make_optimizer(config: Config, layout: Layout) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer with decoupled weight decay on matrices (on all with
    `decay_norms`).

    It sees trees of what is trained, with None in the place of what is frozen.
    """
    o, rate = config.optimizer, learning_rate(config)
    kind = OPTIMIZERS[o.name]
    mask = jax.tree.map(
        lambda weight: o.decay_norms or weight.decayed,
        layout.updated,
        is_leaf=is_placed,
    )

    def make(weights: Tree, *more: Any) -> optax.GradientTransformation:
        return kind.make(o, rate, mask, weights, *more)

    if o.transfer:
        make = partial(_transferred, config)

    if not (kind.by_matrix or kind.orthogonalizes):
        optimizer = make(layout.updated)
    else:
        from meshtrain.parallel import orthogonal, per_matrix

        if kind.by_matrix:
            optimizer = per_matrix.per_matrix(make, layout)
        else:
            spread = partial(orthogonal.orthogonalizer, layout)
            parts = (
                make(weights, spread) for weights in per_matrix.divide(layout.updated)
            )
            optimizer = per_matrix.join(*parts)
    if not kind.decays or o.transfer:
        # Theirs differ in what the rate multiplies: here it is w -= rate * weight_decay * w for all, as in AdamW.
        optimizer = optax.chain(optimizer, _decay(rate, o.weight_decay, mask))
    if o.grad_clip:
        optimizer = optax.chain(optax.clip_by_global_norm(o.grad_clip), optimizer)
    if not config.model.moe.experts:
        return optimizer
    return _loads().optimize_loads(optimizer, config, layout)


def _transferred(config: Config, weights: Tree) -> optax.GradientTransformation:
    """Returns an optimizer whose gradients and steps have the factors of `model.transfer`, and which decays nothing."""
    factors = _transfer().factors
    o = replace(config.optimizer, weight_decay=0.0)
    made = OPTIMIZERS[o.name].make(o, learning_rate(config), None, weights)

    def times(which: str) -> optax.GradientTransformation:
        by = jax.tree.map(
            lambda weight: getattr(factors(config, weight), which),
            weights,
            is_leaf=is_placed,
        )
        return optax.stateless(
            lambda updates, _: jax.tree.map(jnp.multiply, updates, by)
        )

    return optax.chain(times("gradient"), made, times("step"))


def first_values(config: Config) -> Callable[[Placed, Any], Any] | None:
    """Returns the function (a weight, the drawn values) -> the values that it begins with; None: as drawn."""
    if not config.optimizer.transfer:
        return None
    return partial(_transfer().begun, config)


def _transfer() -> ModuleType:
    """Returns the module of rates that hold at every size, which few runs import."""
    from meshtrain.model import transfer

    return transfer


def load_metrics(
    config: Config, layout: Layout, gradients: Tree
) -> dict[str, jax.Array]:
    """Returns the routers' counts for the row of metrics; nothing without experts."""
    if not config.model.moe.experts:
        return {}
    return _loads().metrics(config, layout, gradients)


def load_hooks(config: Config) -> list[RunHook]:
    """Returns the hook that takes the routers' counts out of the metrics, where rows have some."""
    if not (config.telemetry.experts_every and config.model.moe.experts):
        return []
    return [_loads().LayerLoads(config)]


def _loads() -> ModuleType:
    """Returns the module of experts' loads, which no run without experts imports."""
    from meshtrain.parallel import loads

    return loads


def _decay(
    rate: optax.Schedule, weight_decay: float, mask: Tree
) -> optax.GradientTransformation:
    """Decoupled weight decay after an optimizer (Loshchilov & Hutter 2019)."""

    def update(updates: Tree, count: jax.Array, params: Tree) -> tuple[Tree, jax.Array]:
        step = rate(count) * weight_decay
        return jax.tree.map(
            lambda u, p, m: u - step * p if m else u, updates, params, mask
        ), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def state_shardings(layout: Layout, mesh: Mesh, state: Tree) -> Tree:
    """Shardings of an optimizer state: leaves that mirror a parameter lie as it does, the rest is on every device."""
    mirrored = mirrored_leaves(layout, state)
    specs = [PartitionSpec() if leaf is None else shard_spec(leaf) for leaf in mirrored]
    return jax.tree.unflatten(
        jax.tree.structure(state), [NamedSharding(mesh, spec) for spec in specs]
    )


def mirrored_leaves(layout: Layout, state: Tree) -> list[Placed | None]:
    """For each leaf of an optimizer state, in `jax.tree` order: the parameter whose shape and place it shares, if any.

    A factored moment (Adafactor) shares all dimensions but one; it gets a Placed of those. Optax's own
    `tree.map_params` would tell parameters apart too, but asks the transformation anew with placeholders, which have no
    matrices for `per_matrix` to cut.
    """
    weights = {tuple(weight.name.split(".")): weight for weight in layout.flat}

    def mirrored(path: tuple, value: jax.ShapeDtypeStruct) -> Placed | None:
        keys = tuple(
            str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p))))
            for p in path
        )
        endings = (keys[i:] for i in range(len(keys)))
        weight = next(
            (weights[ending] for ending in endings if ending in weights), None
        )
        if weight is None:
            return None
        if value.shape == weight.padded:
            return weight
        rank = len(weight.axes)
        choices = [
            [d for d in range(rank) if d != dropped]
            for dropped in (rank, *range(weight.stacked, rank))
        ]
        dims = next(
            (k for k in choices if tuple(weight.unpadded[d] for d in k) == value.shape),
            None,
        )
        if dims is not None:
            return part(weight, dims)
        # Not factored: one number a layer.
        if weight.stacked:
            return part(weight, [0], more=value.ndim - 1)
        return None

    return [
        mirrored(path, value)
        for path, value in jax.tree_util.tree_flatten_with_path(state)[0]
    ]
