"""The exchange across islands and the outer step, as one device sees them inside shard_map (DiLoCo, algorithm 1, lines
12 to 14).

    island 0   shared - own ──┐                                  ┌─► own = shared
    island 1   shared - own ──┼─ one all-reduce ─► mean ─► outer step on shared
    island 2   not finite     ┘  (2 islands took part)           └─► own = shared

The message is one vector of a fragment's float32 shards, so that there is one collective; its last numbers count who
took part, and of what they have learned, by which islands weigh. With parallel.reduce.compression over islands,
matrices go in a second vector, encoded (`parallel.reduce.codecs`), of which each has blocks of its own
(`parallel.reduce.sizes.message_length`).

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

from meshtrain.compression import codec_of
from meshtrain.mesh import AXES, ISLAND, PIPELINE
from meshtrain.parallel.layout import Layout, StackLayers
from meshtrain.parallel.placement import Placed, unused
from meshtrain.parallel.reduce.exchange import all_reduce
from meshtrain.parallel.reduce.sizes import chunk_length, message_length
from meshtrain.parallel.sync.when import BESIDE, has_layer, has_weight, sent_compressed

Tree = Any
# Of its own weights an island keeps so much where the outer step comes with a delay (Streaming DiLoCo, section 2.3:
# alpha).
OWN_SHARE = 0.5


class Exchanged(NamedTuple):
    """The results of an exchange, on one device; or their PartitionSpecs."""

    # pseudo-gradient of the fragment, in the places of the weights; zeros elsewhere
    mean: Tree
    # The island's own weights: as they were, or where they are not finite the shared ones
    own: Tree
    # What the island has learned of and not sent, by fragment: nothing where it starts again
    counted: Any
    drift: Any  # norm of `mean`
    islands: Any  # int32, how many took part


class Outer:
    """The exchange for one layout. Trees hold this device's shards of what is trained, and None where a weight is
    frozen.
    """

    def __init__(self, layout: Layout) -> None:
        self.config = layout.config
        self.layout = layout
        self.sync = layout.config.parallel.sync
        self.reduce = layout.config.parallel.reduce
        self.codec = codec_of(self.reduce)

    def exchange(
        self,
        fragment: int,
        shared: Tree,
        own: Tree,
        counted: jax.Array,
    ) -> Exchanged:
        """One all-reduce across islands, of `shared - own` in a fragment; `counted` [fragments]: what this island has
        learned of since it last sent each.
        """
        is_finite = self._is_finite(own)
        own = jax.tree.map(
            lambda mine, all_have: jnp.where(is_finite, mine, all_have), own, shared
        )
        moved = self._map(
            lambda weight, a, b: self._take(weight, a - b, fragment), shared, own
        )
        leaves, tree = jax.tree.flatten(moved)
        packed = [self._packed(weight) for weight in self._trained]
        # an island that starts again has moved nowhere
        counted = jnp.where(is_finite, counted, 0.0)
        weight = counted[fragment]
        plain, encoded = (
            [
                weight * x
                for x, is_packed in zip(leaves, packed, strict=True)
                if is_packed == kind
            ]
            for kind in (False, True)
        )
        beside = jnp.stack([is_finite.astype(jnp.float32), weight])
        total = lax.psum(jnp.concatenate([*(x.ravel() for x in plain), beside]), ISLAND)
        count = total[-2]
        divisor = jnp.where(total[-1] > 0, total[-1], 1.0)
        sums = {
            False: iter(_parts(total, plain)),
            True: iter(self._encoded_sums(encoded)),
        }
        mean = [next(sums[is_packed]) / divisor for is_packed in packed]
        mean = jax.tree.unflatten(tree, mean)
        placed = self._map(
            lambda weight, x, whole: self._put(
                weight, jnp.zeros_like(whole), x, fragment
            ),
            mean,
            shared,
        )
        return Exchanged(
            placed,
            own,
            counted.at[fragment].set(0.0),
            self._norm(placed),
            count.astype(jnp.int32),
        )

    def _encoded_sums(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Their sums over islands, sent as one message."""
        if self.codec is None or not leaves:
            return []
        whole = self.codec.in_blocks
        flat = jnp.concatenate(
            [jnp.pad(x.ravel(), (0, whole(x.size) - x.size)) for x in leaves]
        )
        length = message_length(
            self.reduce, [x.size for x in leaves], self.config.mesh.islands
        )
        return _parts(
            all_reduce(jnp.pad(flat, (0, length - flat.size)), self.codec).shard,
            leaves,
            whole,
        )

    def step(
        self,
        fragment: int,
        shared: Tree,
        momentum: Tree,
        mean: Tree,
    ) -> tuple[Tree, Tree]:
        """The shared model and its momentum after SGD with Nesterov momentum on a fragment (as in PyTorch's SGD)."""
        rate = self.sync.outer_learning_rate
        beta = self.sync.outer_momentum

        def stepped(
            weight: Placed, w: jax.Array, g: jax.Array, m: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            w_part, g_part, m_part = (
                self._take(weight, x, fragment) for x in (w, g, m)
            )
            m_part = beta * m_part + g_part
            w_part = w_part - rate * (g_part + beta * m_part)
            return self._put(weight, w, w_part, fragment), self._put(
                weight, m, m_part, fragment
            )

        both = self._map(stepped, shared, mean, momentum)
        pick = lambda i: self._map(lambda weight, pair: pair[i], both)
        return pick(0), pick(1)

    def follow(self, fragment: int, shared: Tree, own: Tree, own_share: float) -> Tree:
        """The island's own weights after an outer step: the shared ones, mixed with a share `own_share` of its own."""

        def mixed(weight: Placed, all_have: jax.Array, mine: jax.Array) -> jax.Array:
            theirs = self._take(weight, all_have, fragment)
            part = (
                own_share * self._take(weight, mine, fragment)
                + (1 - own_share) * theirs
                if own_share
                else theirs
            )
            return self._put(weight, mine, part, fragment)

        return self._map(mixed, shared, own)

    def replaced(self, fragment: int, before: Tree, after: Tree) -> Tree:
        """`before`, with the fragment of `after`."""
        return self._map(
            lambda w, x, y: self._put(w, x, self._take(w, y, fragment), fragment),
            before,
            after,
        )

    def sent_bytes(self, fragment: int) -> float:
        """Bytes that a device sends across islands for a fragment: of an all-reduce by a ring."""
        islands = self.config.mesh.islands
        numbers = {False: [BESIDE], True: []}
        for weight in self._trained:
            numbers[self._packed(weight)].append(self._elements(weight, fragment))
        sent = 2 * (islands - 1) / islands * 4 * sum(numbers[False])
        k = message_length(self.reduce, numbers[True], islands) if numbers[True] else 0
        if self.codec is None or not k:
            return sent
        if islands == 2:
            return sent + self.codec.nbytes(k)
        return sent + 2 * (islands - 1) * self.codec.nbytes(chunk_length(k, islands))

    def _packed(self, weight: Placed) -> bool:
        return self.codec is not None and sent_compressed(self.config, weight)

    @cached_property
    def _trained(self) -> list[Placed]:
        return [weight for weight in self.layout.flat if weight.trained]

    # --- fragments of a weight

    @cached_property
    def _rows(self) -> dict[str, list[np.ndarray | None]]:
        """Returns for each stack and fragment the live places of its layers on each stage, int [pipeline, most]; those
        that a stage lacks are one past the end.
        """
        return {
            name: self._rows_of(stack) for name, stack in self.layout.stacks.items()
        }

    def _rows_of(self, stack: StackLayers) -> list[np.ndarray | None]:
        if self.sync.fragments == 1:
            return [None]
        layer_at = stack.index_at
        places: list[np.ndarray | None] = []
        for fragment in range(self.sync.fragments):
            here = [
                [
                    at
                    for at, layer in enumerate(stage)
                    if layer >= 0 and has_layer(self.config, fragment, layer)
                ]
                for stage in layer_at
            ]
            most = max(map(len, here))
            places.append(
                np.array(
                    [h + [layer_at.shape[1]] * (most - len(h)) for h in here], np.int32
                )
            )
        return places

    def _places(self, weight: Placed, fragment: int) -> jax.Array | None:
        rows = self._rows[weight.stack][fragment]
        return None if rows is None else jnp.asarray(rows)[lax.axis_index(PIPELINE)]

    def _take(self, weight: Placed, x: jax.Array, fragment: int) -> jax.Array:
        """The fragment's part of a weight, flat where it has none of it; zeros for layers that this stage lacks."""
        if not has_weight(self.config, fragment, weight):
            return jnp.zeros(0, x.dtype)
        places = self._places(weight, fragment) if weight.stacked else None
        return x if places is None else x.at[places].get(mode="fill", fill_value=0)

    def _put(
        self,
        weight: Placed,
        x: jax.Array,
        part: jax.Array,
        fragment: int,
    ) -> jax.Array:
        if not has_weight(self.config, fragment, weight):
            return x
        places = self._places(weight, fragment) if weight.stacked else None
        return part if places is None else x.at[places].set(part, mode="drop")

    def _elements(self, weight: Placed, fragment: int) -> int:
        elements = weight.on_rank()
        if not has_weight(self.config, fragment, weight):
            return 0
        rows = self._rows[weight.stack][fragment] if weight.stacked else None
        if rows is None:
            return elements
        return elements // (weight.padded[0] // weight.ways[0]) * rows.shape[1]

    # --- what a whole island says

    def _is_finite(self, own: Tree) -> jax.Array:
        """Returns whether all of this island's weights are finite: bool, the same on its devices."""
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(own)])
        return lax.psum(jnp.where(jnp.all(finite), 0, 1), AXES) == 0

    def _norm(self, tree: Tree) -> jax.Array:
        """The norm over all devices of an island, of which several may hold the same."""

        def squares(weight: Placed, x: jax.Array) -> jax.Array:
            copies = math.prod(
                map(self.config.mesh.ways, unused(AXES, weight.shard_over))
            )
            return jnp.sum(jnp.square(x)) / copies

        return jnp.sqrt(lax.psum(sum(jax.tree.leaves(self._map(squares, tree))), AXES))

    def _map(self, function: Callable[..., Any], *trees: Tree) -> Tree:
        return self.layout.map(
            lambda weight, *xs: function(weight, *xs) if weight.trained else None,
            *trees,
        )


def _parts(
    flat: jax.Array, leaves: list[jax.Array], length: Callable[[int], int] = int
) -> list[jax.Array]:
    """Returns the parts of a vector that belong to the leaves, each of which takes `length` of its numbers."""
    begins = np.cumsum([0, *(length(x.size) for x in leaves)])
    return [
        flat[at : at + x.size].reshape(x.shape)
        for at, x in zip(begins, leaves, strict=False)
    ]
