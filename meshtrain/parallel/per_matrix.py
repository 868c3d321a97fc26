"""An optimizer whose update of one number depends on others of its matrix, such as Adafactor, on matrices of one layer
each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain.config.stacks import BLOCKS
from meshtrain.parallel.layout import Layout, is_placed
from meshtrain.parallel.placement import Placed

Tree = Any


def divide(tree: Tree) -> tuple[Tree, Tree]:
    """Returns the layers' part of a tree, and the rest."""
    layers = {name: tree[name] for name in tree if name.endswith(BLOCKS)}
    return layers, {name: tree[name] for name in tree if name not in layers}


def join(
    on_layers: optax.GradientTransformation, on_edge: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns the optimizer that takes the layers by one, and the rest by the other."""

    def init(params: Tree) -> Tree:
        layers, edge = divide(params)
        return {"layers": on_layers.init(layers), "edge": on_edge.init(edge)}

    def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        (g_layers, g_edge), (p_layers, p_edge) = divide(gradients), divide(params)
        u_layers, layers = on_layers.update(g_layers, state["layers"], p_layers)
        u_edge, edge = on_edge.update(g_edge, state["edge"], p_edge)
        return {**u_edge, **u_layers}, {"layers": layers, "edge": edge}

    return optax.GradientTransformation(init, update)


def per_matrix(
    make: Callable[[Tree], optax.GradientTransformation], layout: Layout
) -> optax.GradientTransformation:
    """Returns the optimizer that `make` gives, on whole unpadded matrices of one layer each.

    So its updates are the same on every mesh, whatever is padded there. `make` gets the tree of Placed that its part
    consists of.
    """

    def cut(weight: Placed, x: jax.Array) -> jax.Array:
        return x[tuple(slice(n) for n in weight.unpadded)]

    def pad(weight: Placed, x: jax.Array) -> jax.Array:
        return jnp.pad(
            x, [(0, to - n) for n, to in zip(x.shape, weight.padded, strict=True)]
        )

    def mapped(function: Callable[[Placed, jax.Array], jax.Array], tree: Tree) -> Tree:
        return layout.map(
            lambda weight, x: function(weight, x) if weight.updated else None, tree
        )

    layers, edge = divide(layout.updated)
    of_stacks = {
        stack: _over_layers(make, {stack: tree}) for stack, tree in layers.items()
    }
    both = join(_by_stack(of_stacks), make(edge))

    def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = both.update(mapped(cut, gradients), state, mapped(cut, params))
        return mapped(pad, updates), state

    return optax.GradientTransformation(
        lambda params: both.init(mapped(cut, params)), update
    )


def _over_layers(
    make: Callable[[Tree], optax.GradientTransformation], weights: Tree
) -> optax.GradientTransformation:
    """Returns the optimizer that `make` gives, over the layers of one stack."""
    on_layer = make(weights)
    layers_train = bool(jax.tree.leaves(weights, is_leaf=is_placed))

    def map_layers(function: Callable, in_axes: Tree, out_axes: Tree) -> Callable:
        """Maps a function over layers; returns it as it is where no layer is trained."""
        if layers_train:
            return jax.vmap(function, in_axes=in_axes, out_axes=out_axes)
        return function

    def axes(blocks: Tree) -> Tree:
        """0 for what each layer has, None for what all share (counts)."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)
        return jax.tree.map(
            lambda x: 0 if x.ndim else None, jax.eval_shape(on_layer.init, one)
        )

    def init(blocks: Tree) -> Tree:
        return map_layers(on_layer.init, 0, axes(blocks))(blocks)

    def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        by_layer = axes(params)
        return map_layers(on_layer.update, (0, by_layer, 0), (0, by_layer))(
            gradients, state, params
        )

    return optax.GradientTransformation(init, update)


def _by_stack(
    of_stacks: dict[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Returns the optimizer that takes each stack by its own, whose state is by stack where there are several."""
    if len(of_stacks) == 1:
        return next(iter(of_stacks.values()))

    def init(params: Tree) -> Tree:
        return {
            stack: one.init({stack: params[stack]}) for stack, one in of_stacks.items()
        }

    def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates: Tree = {}
        states: Tree = {}
        for stack, one in of_stacks.items():
            parts = ({stack: gradients[stack]}, state[stack], {stack: params[stack]})
            found, states[stack] = one.update(*parts)
            updates |= found
        return updates, states

    return optax.GradientTransformation(init, update)
