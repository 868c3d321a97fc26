"""The optimizer: an Optax chain from the config, unmodified on sharded state."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.layout import Layout, Leaf

Tree = Any


def learning_rate(config: Config) -> optax.Schedule:
    """The rate of an update by the number of those before it: a linear climb to the peak, then down to `final_ratio` of it.

    step           1          2         ...  warmup_steps   ...      steps
    before it      0          1                                    steps - 1
    rate      peak / warmup  2 peak / warmup      peak     cosine, linear   final_ratio x peak     (constant: peak)

    A step that float16 skips moves nothing on. Without warm-up the first step has the peak; a run that ends in it never decays.
    """
    o = config.optimizer
    peak_at = max(1, o.warmup_steps)
    climb, rest = peak_at - 1, max(1, config.train.steps - peak_at)
    after = {
        "cosine": optax.cosine_decay_schedule(o.learning_rate, rest, o.final_ratio),
        "linear": optax.linear_schedule(o.learning_rate, o.learning_rate * o.final_ratio, rest),
        "constant": optax.constant_schedule(o.learning_rate),
    }[o.schedule]
    if not climb:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(o.learning_rate / peak_at, o.learning_rate, climb), after], [climb]
    )


def updates_made(state: Tree) -> jax.Array:
    """The updates that an optimizer state has seen, by which its learning rate goes."""
    return optax.tree.get_all_with_path(state, "count")[0][1]


def make_optimizer(config: Config, layout: Layout) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer with decoupled weight decay on matrices (on all with `decay_norms`)."""
    o, rate = config.optimizer, learning_rate(config)
    mask = layout.map(lambda leaf: o.decay_norms or leaf.decayed)

    def adafactor(part: Tree) -> optax.GradientTransformation:
        return optax.adafactor(rate, weight_decay_rate=None, min_dim_size_to_factor=32)

    def muon(part: Tree) -> optax.GradientTransformation:
        return optax.contrib.muon(
            rate,
            beta=o.beta1,
            eps=o.eps,
            adam_b1=o.beta1,
            adam_b2=o.beta2,
            muon_weight_dimension_numbers=jax.tree.map(_matrix, part, is_leaf=_is_leaf),
        )

    if o.name == "adamw":
        optimizer = optax.adamw(rate, o.beta1, o.beta2, o.eps, weight_decay=o.weight_decay, mask=mask)
    elif o.name == "lion":
        optimizer = optax.lion(rate, o.beta1, o.beta2, weight_decay=o.weight_decay, mask=mask)
    else:
        inner = optax.sgd(rate, o.beta1 or None)
        if o.name in ("adafactor", "muon"):
            inner = per_matrix(adafactor if o.name == "adafactor" else muon, layout)
        # theirs differ in what the rate multiplies: here decay is w -= rate * weight_decay * w for all three, as in AdamW
        optimizer = optax.chain(inner, _decay(rate, o.weight_decay, mask))
    return optax.chain(optax.clip_by_global_norm(o.grad_clip), optimizer) if o.grad_clip else optimizer


def _decay(rate: optax.Schedule, weight_decay: float, mask: Tree) -> optax.GradientTransformation:
    """Decoupled weight decay after an optimizer (Loshchilov & Hutter 2019)."""

    def update(updates: Tree, count: jax.Array, params: Tree) -> tuple[Tree, jax.Array]:
        step = rate(count) * weight_decay
        return jax.tree.map(lambda u, p, m: u - step * p if m else u, updates, params, mask), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def per_matrix(make: Callable[[Tree], optax.GradientTransformation], layout: Layout) -> optax.GradientTransformation:
    """An optimizer whose update of one number depends on others of its matrix, on whole unpadded matrices of one layer each.

    So its updates are the same on every mesh, whatever is padded there. `make` gets the tree of Leaf that its part consists of.
    """
    edge = {name: part for name, part in layout.leaves.items() if name != "blocks"}
    on_edge, on_layer = make(edge), make({"blocks": layout.leaves["blocks"]})

    def cut(leaf: Leaf, x: jax.Array) -> jax.Array:
        return x[tuple(slice(n) for n in _cut_shape(leaf))]

    def pad(leaf: Leaf, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, to - n) for n, to in zip(x.shape, leaf.padded, strict=True)])

    def parts(tree: Tree) -> tuple[Tree, Tree]:
        tree = layout.map(cut, tree)
        return {"blocks": tree["blocks"]}, {name: part for name, part in tree.items() if name != "blocks"}

    def axes(blocks: Tree) -> Tree:
        """0 for what each layer has, None for what all share (counts)."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)
        return jax.tree.map(lambda x: 0 if x.ndim else None, jax.eval_shape(on_layer.init, one))

    def init(params: Tree) -> Tree:
        blocks, edge = parts(params)
        return {"layers": jax.vmap(on_layer.init, out_axes=axes(blocks))(blocks), "edge": on_edge.init(edge)}

    def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        (g_blocks, g_edge), (p_blocks, p_edge) = parts(gradients), parts(params)
        by_layer = axes(p_blocks)
        on_all = jax.vmap(on_layer.update, in_axes=(0, by_layer, 0), out_axes=(0, by_layer))
        u_blocks, layers = on_all(g_blocks, state["layers"], p_blocks)
        u_edge, edge_state = on_edge.update(g_edge, state["edge"], p_edge)
        return layout.map(pad, {**u_edge, **u_blocks}), {"layers": layers, "edge": edge_state}

    return optax.GradientTransformation(init, update)


def _matrix(leaf: Leaf) -> optax.contrib.MuonDimensionNumbers | None:
    """How Muon sees one layer's leaf as a matrix (input dimensions, output dimensions); None: Adam is used."""
    if not leaf.stacked or not leaf.decayed:
        return None  # embedding and head, norms and biases
    inputs = tuple(range(len(leaf.axes) - 2)) if leaf.axes[-1] == "embed" else (0,)
    return optax.contrib.MuonDimensionNumbers(inputs, tuple(range(len(inputs), len(leaf.axes) - 1)))


def _cut_shape(leaf: Leaf) -> tuple[int, ...]:
    """The leaf's shape without padding, in the live order of layers."""
    return (leaf.padded[0], *leaf.shape[1:]) if leaf.stacked else leaf.shape


def state_shardings(layout: Layout, mesh: Mesh, state: Tree) -> Tree:
    """Shardings of an optimizer state: leaves that mirror a parameter lie as it does, the rest is on every device."""
    mirrored = mirrored_leaves(layout, state)
    specs = [PartitionSpec() if leaf is None else leaf.shard_spec for leaf in mirrored]
    return jax.tree.unflatten(jax.tree.structure(state), [NamedSharding(mesh, spec) for spec in specs])


def mirrored_leaves(layout: Layout, state: Tree) -> list[Leaf | None]:
    """For each leaf of an optimizer state, in `jax.tree` order: the parameter whose shape and place it shares, if any.

    A factored moment (Adafactor) shares all dimensions but one; it gets a Leaf of those.
    """
    leaves = {_keys(path): leaf for path, leaf in _flat(layout.leaves)}

    def mirrored(path: tuple, value: jax.ShapeDtypeStruct) -> Leaf | None:
        keys = _keys(path)
        leaf = next((leaves[keys[i:]] for i in range(len(keys)) if keys[i:] in leaves), None)
        if leaf is None and "layers" in keys and value.ndim:  # not a moment, but each layer's own: Muon's coefficients
            shape, rest = (layout.config.model.layers, *value.shape[1:]), value.ndim - 1
            axes, split = ("layers", *("one",) * rest), ((PIPELINE,), *((),) * rest)
            return Leaf(".".join(keys), axes, shape, value.shape, value.shape, split, None)
        if leaf is None or value.shape == leaf.padded:
            return leaf
        cut, rank = _cut_shape(leaf), len(leaf.axes)
        choices = [[d for d in range(rank) if d != dropped] for dropped in (rank, *range(leaf.stacked, rank))]
        kept = next((k for k in choices if tuple(cut[d] for d in k) == value.shape), None)
        if kept is not None:
            return _part(layout, leaf, kept, value.shape)
        return _part(layout, leaf, [0], value.shape) if leaf.stacked else None  # not factored: one number a layer

    return [mirrored(path, value) for path, value in jax.tree_util.tree_flatten_with_path(state)[0]]


def _part(layout: Layout, leaf: Leaf, kept: list[int], live: tuple[int, ...]) -> Leaf:
    """The Leaf of an array that has only the dimensions `kept` of a parameter, unpadded, and is split like it where it divides."""
    more = len(live) - len(kept)  # dimensions of size 1
    split = [leaf.split[d] for d in kept] + [()] * more
    ways = [math.prod(layout.mesh.shape[a] for a in over) for over in split]
    split = [over if n % w == 0 else () for over, n, w in zip(split, live, ways, strict=True)]
    zero_dim = kept.index(leaf.zero_dim) if leaf.zero_dim in kept else None
    if zero_dim is not None and live[zero_dim] % (ways[zero_dim] * layout.data):
        zero_dim = None
    shape = (leaf.shape[0], *live[1:]) if leaf.stacked else live
    axes = tuple(leaf.axes[d] for d in kept) + ("one",) * more
    return Leaf(leaf.name, axes, shape, live, live, tuple(split), zero_dim)


def _flat(leaves: Tree) -> list[tuple[tuple, Leaf]]:
    return jax.tree_util.tree_flatten_with_path(leaves, is_leaf=_is_leaf)[0]


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def _keys(path: tuple) -> tuple[str, ...]:
    return tuple(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)
