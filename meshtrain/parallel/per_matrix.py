"""An optimizer whose update of one number depends on others of its matrix, such as Muon, on matrices of one layer
each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain.parallel.layout import Layout, is_placed
from meshtrain.parallel.placement import Placed

Tree = Any


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
        return jnp.pad(x, [(0, to - n) for n, to in zip(x.shape, weight.padded, strict=True)])

    def divided(tree: Tree) -> tuple[Tree, Tree]:
        """The layers' part of a tree, and the rest."""
        return {"blocks": tree["blocks"]}, {name: tree[name] for name in tree if name != "blocks"}

    def parts(tree: Tree) -> tuple[Tree, Tree]:
        return divided(mapped(cut, tree))

    def mapped(function: Callable[[Placed, jax.Array], jax.Array], tree: Tree) -> Tree:
        return layout.map(lambda weight, x: function(weight, x) if weight.updated else None, tree)

    def map_layers(function: Callable, in_axes: Tree, out_axes: Tree) -> Callable:
        """Maps a function over layers; returns it as it is where no layer is trained."""
        return jax.vmap(function, in_axes=in_axes, out_axes=out_axes) if layers_train else function

    on_layer, on_edge = map(make, divided(layout.updated))
    layers_train = bool(jax.tree.leaves(layout.updated["blocks"], is_leaf=is_placed))

    def axes(blocks: Tree) -> Tree:
        """0 for what each layer has, None for what all share (counts)."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)
        return jax.tree.map(lambda x: 0 if x.ndim else None, jax.eval_shape(on_layer.init, one))

    def init(params: Tree) -> Tree:
        blocks, edge = parts(params)
        return {
            "layers": map_layers(on_layer.init, 0, axes(blocks))(blocks),
            "edge": on_edge.init(edge),
        }

    def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        (g_blocks, g_edge), (p_blocks, p_edge) = parts(gradients), parts(params)
        by_layer = axes(p_blocks)
        on_all = map_layers(on_layer.update, (0, by_layer, 0), (0, by_layer))
        u_blocks, layers = on_all(g_blocks, state["layers"], p_blocks)
        u_edge, edge_state = on_edge.update(g_edge, state["edge"], p_edge)
        return mapped(pad, {**u_edge, **u_blocks}), {"layers": layers, "edge": edge_state}

    return optax.GradientTransformation(init, update)
