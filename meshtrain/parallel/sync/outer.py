"""The exchange across islands and the outer step, as one device sees them inside shard_map (DiLoCo, algorithm 1, lines 12 to 14).

    island 0   shared - own ──┐                                  ┌─► own = shared
    island 1   shared - own ──┼─ one all-reduce ─► mean ─► outer step on shared
    island 2   not finite     ┘  (2 islands took part)           └─► own = shared

What is sent is one vector of a fragment's float32 shards, so that there is one collective; the last number of it counts who took part.
With parallel.reduce.compression over islands, matrices go in a second vector, encoded (`parallel.reduce.exchange`).

An island that has numbers which are not finite sends zeros, and starts again from the shared model, all of it.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.mesh import AXES, DATA, ISLAND, PIPELINE
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.blocks import block_codec
from meshtrain.parallel.reduce.exchange import all_reduce
from meshtrain.parallel.reduce.sizes import BITS, chunk
from meshtrain.parallel.sync.when import has_layer, has_weight, sent_compressed

Tree = Any
# Of its own weights an island keeps so much where the outer step comes with a delay (Streaming DiLoCo, section 2.3: alpha).
KEPT = 0.5


class Sent(NamedTuple):
    """What came of an exchange, on one device."""

    mean: Tree  # pseudo-gradient of the fragment, in the places of the weights; zeros elsewhere
    own: Tree  # the island's own weights: as they were, or where they are not finite the shared ones
    drift: jax.Array  # norm of `mean`
    islands: jax.Array  # int32, how many took part


class Outer:
    """Of one layout. Trees hold this device's shards of what is trained, and None where a weight is frozen."""

    def __init__(self, layout: Layout) -> None:
        self.config, self.layout = layout.config, layout
        self.sync, reduce = layout.config.parallel.sync, layout.config.parallel.reduce
        self.codec = block_codec(reduce) if reduce.compression in BITS else None

    def exchange(self, fragment: int, shared: Tree, own: Tree) -> Sent:
        """One all-reduce across islands, of `shared - own` in a fragment."""
        sound = self._sound(own)
        own = jax.tree.map(lambda mine, all_have: jnp.where(sound, mine, all_have), own, shared)
        moved = self._map(lambda weight, a, b: self._take(weight, a - b, fragment), shared, own)
        leaves, tree = jax.tree.flatten(moved)
        packed = [self.codec is not None and sent_compressed(self.config, weight) for weight in self._trained]
        # zeros of an island that starts again: it has moved nowhere
        flat = [
            jnp.where(
                sound,
                jnp.concatenate([*(x.ravel() for x, p in zip(leaves, packed, strict=True) if p == kind), more]),
                0.0,
            )
            for kind, more in ((False, sound.astype(jnp.float32)[None]), (True, jnp.zeros(0)))
        ]
        total = lax.psum(flat[False], ISLAND)
        count = total[-1]
        sums = {False: total[:-1], True: flat[True]}
        if self.codec is not None and len(flat[True]):
            sums[True] = all_reduce(flat[True], self.codec).shard
        mean, at = [], {False: 0, True: 0}
        for x, kind in zip(leaves, packed, strict=True):
            part = sums[kind][at[kind] : at[kind] + x.size]
            mean.append(part.reshape(x.shape) / jnp.maximum(count, 1.0))
            at[kind] += x.size
        mean = jax.tree.unflatten(tree, mean)
        placed = self._map(lambda weight, x, whole: self._put(weight, jnp.zeros_like(whole), x, fragment), mean, shared)
        return Sent(placed, own, self._norm(placed), count.astype(jnp.int32))

    def step(self, fragment: int, shared: Tree, momentum: Tree, mean: Tree) -> tuple[Tree, Tree]:
        """The shared model and its momentum after SGD with Nesterov momentum on a fragment (as in PyTorch's SGD)."""
        rate, beta = self.sync.outer_learning_rate, self.sync.outer_momentum

        def stepped(weight: Placed, w: jax.Array, g: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
            w_part, g_part, m_part = (self._take(weight, x, fragment) for x in (w, g, m))
            m_part = beta * m_part + g_part
            w_part = w_part - rate * (g_part + beta * m_part)
            return self._put(weight, w, w_part, fragment), self._put(weight, m, m_part, fragment)

        both = self._map(stepped, shared, mean, momentum)
        pick = lambda i: self._map(lambda weight, pair: pair[i], both)  # noqa: E731
        return pick(0), pick(1)

    def follow(self, fragment: int, shared: Tree, own: Tree, kept: float) -> Tree:
        """The island's own weights after an outer step: the shared ones, less a share `kept` of its own."""

        def mixed(weight: Placed, all_have: jax.Array, mine: jax.Array) -> jax.Array:
            theirs = self._take(weight, all_have, fragment)
            part = kept * self._take(weight, mine, fragment) + (1 - kept) * theirs if kept else theirs
            return self._put(weight, mine, part, fragment)

        return self._map(mixed, shared, own)

    def replaced(self, fragment: int, before: Tree, after: Tree) -> Tree:
        """`before`, with the fragment of `after`."""
        return self._map(lambda w, x, y: self._put(w, x, self._take(w, y, fragment), fragment), before, after)

    def sent_bytes(self, fragment: int) -> float:
        """Bytes that a device sends across islands for a fragment: of an all-reduce by a ring."""
        islands, numbers = self.config.mesh.islands, {False: 1, True: 0}  # one says whether the island takes part
        for weight in self._trained:
            packed = self.codec is not None and sent_compressed(self.config, weight)
            numbers[packed] += self._elements(weight, fragment)
        sent = 2 * (islands - 1) / islands * 4 * numbers[False]
        if self.codec is None or not numbers[True]:
            return sent
        if islands == 2:
            return sent + self.codec.nbytes(numbers[True])
        return sent + 2 * (islands - 1) * self.codec.nbytes(chunk(numbers[True], islands))

    @cached_property
    def _trained(self) -> list[Placed]:
        return [weight for weight in self.layout.flat if weight.trained]

    # --- fragments of a weight

    @cached_property
    def _rows(self) -> list[np.ndarray | None]:
        """By fragment: the live places of its layers on each stage, int [pipeline, most]; those that a stage lacks are one past the end."""
        if self.sync.fragments == 1:
            return [None]
        layer_at = self.layout.layer_at.reshape(self.config.mesh.pipeline, -1)
        found: list[np.ndarray | None] = []
        for fragment in range(self.sync.fragments):
            here = [
                [place for place, layer in enumerate(stage) if layer >= 0 and has_layer(self.config, fragment, layer)]
                for stage in layer_at
            ]
            most = max(map(len, here))
            found.append(np.array([h + [layer_at.shape[1]] * (most - len(h)) for h in here], np.int32))
        return found

    def _places(self, fragment: int) -> jax.Array | None:
        rows = self._rows[fragment]
        return None if rows is None else jnp.asarray(rows)[lax.axis_index(PIPELINE)]

    def _take(self, weight: Placed, x: jax.Array, fragment: int) -> jax.Array:
        """The fragment's part of a weight, flat where it has none of it; zeros for layers that this stage lacks."""
        if not has_weight(self.config, fragment, weight):
            return jnp.zeros(0, x.dtype)
        places = self._places(fragment) if weight.stacked else None
        return x if places is None else x.at[places].get(mode="fill", fill_value=0)

    def _put(self, weight: Placed, x: jax.Array, part: jax.Array, fragment: int) -> jax.Array:
        if not has_weight(self.config, fragment, weight):
            return x
        places = self._places(fragment) if weight.stacked else None
        return part if places is None else x.at[places].set(part, mode="drop")

    def _elements(self, weight: Placed, fragment: int) -> int:
        held = weight.on_rank(self.config.mesh.shards)
        if not has_weight(self.config, fragment, weight):
            return 0
        rows = self._rows[fragment] if weight.stacked else None
        return held if rows is None else held // (weight.padded[0] // weight.ways[0]) * rows.shape[1]

    # --- what a whole island says

    def _sound(self, own: Tree) -> jax.Array:
        """Whether all of this island's weights are finite: bool, the same on its devices."""
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(own)])
        return lax.psum(jnp.where(jnp.all(finite), 0, 1), AXES) == 0

    def _norm(self, tree: Tree) -> jax.Array:
        """The norm over all devices of an island, of which several may hold the same."""

        def squares(weight: Placed, x: jax.Array) -> jax.Array:
            split = {axis for axes in weight.over for axis in axes} | ({DATA} if weight.zero_dim is not None else set())
            copies = math.prod(self.config.mesh.ways(axis) for axis in AXES if axis not in split)
            return jnp.sum(jnp.square(x)) / copies

        return jnp.sqrt(lax.psum(sum(jax.tree.leaves(self._map(squares, tree))), AXES))

    def _map(self, function: Callable[..., Any], *trees: Tree) -> Tree:
        return self.layout.map(lambda weight, *xs: function(weight, *xs) if weight.trained else None, *trees)
