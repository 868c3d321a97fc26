"""One stage's computation for one microbatch: its layers forward, backward whole or in two halves, embedding and loss.

The layers are looped over by hand, each with a vjp of its own, so that what one keeps for its backward goes straight to
its place:

    forward     x ─► layer 0 ─► layer 1 ─► y              stash[place, layer] ◄─ the layer's input, its vjp's residuals
    backward    gx ◄─ layer 0 ◄─ layer 1 ◄─ cotangent     gradients[layer] += its weights', where the stage is not idle

Buffers are trees of arrays whose first axes count places, and of the stash layers too. The layers' loop writes and
reads place and layer where they lie: a whole place is never in a second piece of memory.

    stash              [places, layers, ...]    a place is what F leaves of one microbatch and chunk for B
    receive buffers    [places, ...]
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import residuals, vary, varying, with_residuals
from meshtrain.inputs import inputs
from meshtrain.mesh import DATA, PIPELINE
from meshtrain.parallel.forward import Batch, Forward, LabelLosses, Totals, added
from meshtrain.parallel.layout import Segment
from meshtrain.parallel.placement import buckets
from meshtrain.parallel.zero import Weights

if TYPE_CHECKING:
    from meshtrain.parallel.pipeline.split_backward import Halves

Tree = Any


class Slot(NamedTuple):
    """The task of one slot of a clock: traced numbers, so that one program serves all."""

    active: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    place: jax.Array  # of the stash


class BufferSlot(NamedTuple):
    """One place of a buffer that has a tree [places, layers, ...] for each segment."""

    buffers: Sequence[Tree]
    place: jax.Array


class LayerTrace(NamedTuple):
    """A layer's forward pass, and its vjp to the gradients of its weights and of x."""

    output: jax.Array
    vjp: Callable
    # Which of the vjp's residuals depend on the microbatch: no weights that are only read, which are there in the
    # backward as they were.
    stashed: list[bool]

    def residuals(self) -> list[jax.Array]:
        """The residuals that the stash keeps for the backward."""
        return [
            r for r, is_stashed in zip(residuals(self.vjp), self.stashed, strict=True) if is_stashed
        ]

    def vjp_over(self, stash: list[jax.Array]) -> Callable:
        """The vjp over residuals from the stash; the forward pass traced here is dead code."""
        place = iter(stash)
        pairs = zip(residuals(self.vjp), self.stashed, strict=True)
        return with_residuals(
            self.vjp, [next(place) if is_stashed else r for r, is_stashed in pairs]
        )


class Stage:
    """The weights and batches of one step on this device."""

    def __init__(
        self, forward: Forward, chunks: int, weights: Weights, batches: Batch, key: jax.Array | None
    ) -> None:
        self.model = forward
        self.batches = batches
        self.key = key
        self.edge = {part: weights.differentiated[part] for part in ("embedding", "head")}
        self.constant = weights.constant
        self.blocks = weights.part("blocks")
        # Of a chunk; its layers lie one after the other in the weights' first axis.
        self.layers = forward.layout.layer_at.shape[-1]
        self.segments = forward.layout.segments
        assert len(jax.tree.leaves(self.blocks)[0]) == chunks * self.layers
        layer_at = jnp.asarray(forward.layout.layer_at)
        self.layer_at = lax.dynamic_index_in_dim(
            layer_at, lax.axis_index(PIPELINE), 0, keepdims=False
        ).reshape(-1)

    def zeros(self) -> jax.Array:
        """A residual stream of one microbatch, all zeros."""
        config = self.model.config
        rows = inputs(self.batches).shape[1]
        shards = config.mesh.tensor if self.model.collectives.sequence_parallel else 1
        shape = (rows, self.model.length(self.batches) // shards, config.model.d_model)
        return vary(jnp.zeros(shape, self.model.zero.compute), self.model.stream_axes)

    def embed(self, edge: Tree, microbatch: jax.Array) -> jax.Array:
        return self.model.embed(Weights(edge, self.constant), self._batch(microbatch), self.key)

    def add_embedding_gradient(self, edge: Tree, microbatch: jax.Array, gx: jax.Array) -> Tree:
        """The gradients of the edge's weights with the embedding's added, from the cotangent of what `embed` gave."""
        weights = Weights(self.edge, self.constant)
        batch = self._batch(microbatch)
        return edge | {
            "embedding": self.model.add_embedding_gradient(
                edge["embedding"], weights, batch, self.key, gx
            )
        }

    def loss(
        self, y: jax.Array, microbatch: jax.Array, here: jax.Array, seed: jax.Array
    ) -> tuple[Totals, Tree, jax.Array]:
        """Loss of what left the last stage, zero but where `here`, and the gradients of `seed` times it: of the edge's
        weights, and of y.
        """
        of = lambda w, y: self.model.loss(
            Weights(w, self.constant), y, self._batch(microbatch), here, seed
        )
        seeded, vjp, totals = jax.vjp(of, self.edge, y, has_aux=True)
        return totals, *vjp(vary(jnp.ones(()), varying(seeded)))

    def label_losses(self, y: jax.Array, microbatch: jax.Array, here: jax.Array) -> LabelLosses:
        """Returns the same label by label, [b, T] each."""
        return self.model.label_losses(
            Weights(self.edge, self.constant), y, self._batch(microbatch), here
        )

    # --- a chunk: one loop over its layers, five ops

    def run(self, x: jax.Array, slot: Slot) -> jax.Array:
        """Returns the chunk's output; no residuals are saved."""
        return self._loop_over_layers(self._run_layer, x, slot)[0]

    def forward_only(
        self, x: jax.Array, stash: list[Tree], slot: Slot
    ) -> tuple[jax.Array, list[Tree]]:
        """Returns the chunk's output, and the stash as it was."""
        return self.run(x, slot), stash

    def forward(self, x: jax.Array, stash: list[Tree], slot: Slot) -> tuple[jax.Array, list[Tree]]:
        """F: returns the chunk's output, and the stash with each layer's input and residuals."""
        return self._loop_over_layers(
            self.forward_layer, x, slot, write_to=BufferSlot(stash, slot.place)
        )

    def backward(
        self, stash: list[Tree], cotangent: jax.Array, gradients: Tree, slot: Slot
    ) -> tuple[jax.Array, Tree]:
        """B: returns the input gradient, and `gradients` with each layer's weight gradient added if the slot is
        active.
        """
        step = partial(self.backward_layer, slot.active)
        sources = [BufferSlot(stash, slot.place)]
        return self._loop_over_layers(
            step, (cotangent, gradients), slot, read_from=sources, reverse=True
        )[0]

    def input_gradient(
        self,
        stash: list[Tree],
        cotangent: jax.Array,
        w_residuals: list[Tree],
        place: jax.Array,
        slot: Slot,
    ) -> tuple[jax.Array, list[Tree]]:
        """I: returns the input gradient, and `w_residuals` with the residuals of the weight gradient at `place`."""
        sources = [BufferSlot(stash, slot.place)]
        target = BufferSlot(w_residuals, place)
        return self._loop_over_layers(
            self.input_layer, cotangent, slot, read_from=sources, write_to=target, reverse=True
        )

    def weight_gradient(
        self,
        stash: list[Tree],
        w_residuals: list[Tree],
        gradients: Tree,
        place: jax.Array,
        slot: Slot,
    ) -> Tree:
        """W: returns `gradients` with the weight gradient added, from the residuals that I wrote at `place`."""
        step = partial(self.weight_layer, slot.active)
        sources = [BufferSlot(stash, slot.place), BufferSlot(w_residuals, place)]
        return self._loop_over_layers(step, gradients, slot, read_from=sources, reverse=True)[0]

    def _loop_over_layers(
        self,
        step: Callable[..., tuple[Tree, Tree]],
        carry: Tree,
        slot: Slot,
        *,
        read_from: Sequence["BufferSlot"] = (),
        write_to: "BufferSlot | None" = None,
        reverse: bool = False,
    ) -> tuple[Tree, list[Tree]]:
        """Runs `step(layer, at, carry, *values read) -> (carry, values to write)` over the layers of the slot's chunk.

        Segments (layers whose products are of one kind) follow one another. Each reads and writes its part of the
        buffers in place, layer by layer. `at` is the layer's index in the stacked weights.
        """
        written = list(write_to.buffers) if write_to else [None] * len(self.segments)
        order = range(len(self.segments))
        for n in reversed(order) if reverse else order:
            segment = self.segments[n]
            layer = self.layer(slot, segment)
            first = self.first(slot.chunk, segment)

            def body(
                state: tuple[Tree, Tree],
                i: jax.Array,
                n: int = n,
                layer: Callable = layer,
                first: jax.Array = first,
            ) -> tuple[tuple[Tree, Tree], None]:
                carry, buffer = state
                inputs = [read(source.buffers[n], source.place, i) for source in read_from]
                carry, output = step(layer, first + i, carry, *inputs)
                if write_to:
                    buffer = write(buffer, output, write_to.place, i)
                return (carry, buffer), None

            (carry, written[n]), _ = lax.scan(
                body, (carry, written[n]), self._indices(segment), reverse=reverse
            )
        return carry, written

    # --- one layer of each op: (layer, at, carry, *values read) -> (carry, values to write)

    def _run_layer(self, layer: Callable, at: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        weights, index = self._weights(at)
        return layer(weights.differentiated, x, weights.constant, index), None

    def forward_layer(self, layer: Callable, at: jax.Array, x: jax.Array) -> tuple[jax.Array, Tree]:
        """Returns a layer's output, and its input and residuals for the stash."""
        trace = self._trace(layer, at, x)
        return trace.output, (x, trace.residuals())

    def backward_layer(
        self,
        active: jax.Array,
        layer: Callable,
        at: jax.Array,
        carry: tuple[jax.Array, Tree],
        stashed: Tree,
    ) -> tuple[tuple[jax.Array, Tree], None]:
        """Returns a layer's input gradient, and the gradient sums with its weight gradient added if `active`."""
        cotangent, gradients = carry
        x, saved = stashed
        gradient, gx = self._trace(layer, at, x).vjp_over(saved)(cotangent)
        return (gx, add(gradients, gradient, at, active=active)), None

    def input_layer(
        self, layer: Callable, at: jax.Array, cotangent: jax.Array, stashed: Tree
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns a layer's input gradient, and the residuals of its weight gradient."""
        x, saved = stashed
        (gx,), residuals = self._halves(layer, at, x, saved).first(x, saved, cotangent)
        return gx, residuals

    def weight_layer(
        self,
        active: jax.Array,
        layer: Callable,
        at: jax.Array,
        gradients: Tree,
        stashed: Tree,
        residuals: Tree,
    ) -> tuple[Tree, None]:
        """Returns the gradient sums with a layer's weight gradient added if `active`."""
        x, saved = stashed
        leaves = self._halves(layer, at, x, saved).second(residuals, x, saved, None)
        gradient = jax.tree.unflatten(jax.tree.structure(self.blocks.differentiated), leaves)
        return add(gradients, gradient, at, active=active), None

    # --- a backward that sends its weight gradients while it goes on

    def backward_sending(
        self,
        stash: list[Tree],
        cotangent: jax.Array,
        gradients: Tree,
        slot: Slot,
        send: Callable[[Tree], Tree],
    ) -> tuple[jax.Array, Tree]:
        """The input gradient, and of all layers, stacked, what `send` makes of their weights' gradients added to those
        in `gradients` (None: to nothing). A bucket of layers is sent while the one before it is gone through.
        """

        def backward_of(
            segment: Segment, stash: Tree
        ) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, Tree]]:
            layer = self.layer(slot, segment)

            def backward_layer(cotangent: jax.Array, at: jax.Array) -> tuple[jax.Array, Tree]:
                x, saved = read(stash, slot.place, at - segment.first if segment.first else at)
                gradient, gx = self._trace(layer, at, x).vjp_over(saved)(cotangent)
                return gx, gradient

            return backward_layer

        # One function for all buckets of a segment, whose loops the program then shares.
        last_first = [
            (s, backward_of(s, part)) for s, part in zip(self.segments, stash, strict=True)
        ][::-1]

        def backward_bucket(gx: jax.Array, first: int, behind: int) -> tuple[jax.Array, Tree]:
            parts = []
            for segment, backward_layer in last_first:
                indices = jnp.arange(
                    max(first, segment.first), min(behind, segment.behind), dtype=jnp.int32
                )
                if len(indices):
                    gx, gradient = lax.scan(backward_layer, gx, indices, reverse=True)
                    parts.append(gradient)
            bucket = joined(parts[::-1])
            if gradients is None:
                return gx, jax.tree.map(lambda g: g.astype(jnp.float32), bucket)
            return gx, added(jax.tree.map(lambda total: total[first:behind], gradients), bucket)

        (first, behind), *others = buckets(self.layers)[::-1]
        cotangent, complete = backward_bucket(cotangent, first, behind)
        sent = []
        for first, behind in others:
            sent.append(send(after(complete, cotangent)))
            cotangent, complete = backward_bucket(cotangent, first, behind)
            complete = after(complete, sent[-1])
        return cotangent, joined([*sent, send(complete)][::-1])

    # --- buffers of the layers

    def stash_shapes(self, split: bool) -> tuple[list[Tree], list[Tree]]:
        """Shapes of what a layer of each segment has in the stash, and of what I leaves of it for W where the backward
        is `split`.
        """
        zero, x = jnp.zeros((), jnp.int32), self.zeros()

        def a_layer(segment: Segment, x: jax.Array) -> tuple[Tree, Tree]:
            layer = self.layer(Slot(jnp.array(True), zero, zero, zero), segment)
            saved = self._trace(layer, zero, x).residuals()
            return (x, saved), self._halves(layer, zero, x, saved).first(x, saved, x)[
                1
            ] if split else []

        kept, left = zip(
            *(jax.eval_shape(partial(a_layer, segment), x) for segment in self.segments),
            strict=True,
        )
        return list(kept), list(left)

    def buffers(
        self, places: int, of_layers: list[Tree], zero: jax.Array | float = 0
    ) -> list[Tree]:
        """`empty` places for what the layers of each segment have."""
        sizes = [segment.behind - segment.first for segment in self.segments]
        return [
            empty((places, n), like, zero)
            for n, like in zip(sizes, of_layers, strict=bool(of_layers))
        ]

    # --- one layer

    def first(self, chunk: jax.Array, segment: Segment) -> jax.Array:
        """A segment's first layer in the stacked weights."""
        first = chunk * self.layers
        return first + segment.first if segment.first else first

    def _indices(self, segment: Segment) -> jax.Array:
        """Its layers' numbers from 0."""
        return jnp.arange(segment.behind - segment.first, dtype=jnp.int32)

    def _batch(self, microbatch: jax.Array) -> Batch:
        index = jnp.maximum(microbatch, 0)
        return jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.batches
        )

    def layer(self, slot: Slot, segment: Segment) -> Callable:
        """Returns the function of one layer of a segment, for the microbatch of a slot."""
        return self.model.layer(
            self._batch(slot.microbatch), self.key, slot.active, segment.products
        )

    def _weights(self, at: jax.Array) -> tuple[Weights, jax.Array]:
        """The weights of a layer, and its index in the model."""
        weights = jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, at, 0, keepdims=False), self.blocks
        )
        return weights, self.layer_at[at]

    def _trace(self, layer: Callable, at: jax.Array, x: jax.Array) -> LayerTrace:
        weights, index = self._weights(at)
        y, vjp = jax.vjp(
            partial(layer, constant=weights.constant, index=index), weights.differentiated, x
        )
        constant = {id(w) for w in jax.tree.leaves(weights.constant)}
        return LayerTrace(
            y, vjp, [DATA in varying(r) and id(r) not in constant for r in residuals(vjp)]
        )

    def _halves(
        self, layer: Callable, at: jax.Array, x: jax.Array, saved: list[jax.Array]
    ) -> "Halves":
        """The layer's vjp as I (x, saved, cotangent) -> input gradient and W (what I left, x, saved) -> leaves of the
        weight gradient.
        """

        def both(x: jax.Array, saved: Tree, cotangent: jax.Array) -> tuple[jax.Array, Tree]:
            gradient, gx = self._trace(layer, at, x).vjp_over(saved)(cotangent)
            return gx, gradient

        from meshtrain.parallel.pipeline.split_backward import split_backward

        return split_backward(both, (False, False, True), x, saved, x)


def joined(parts: list[Tree]) -> Tree:
    """Stacked layers that follow one another, in one."""
    return jax.tree.map(lambda *x: jnp.concatenate(x) if len(x) > 1 else x[0], *parts)


# --- buffers


def empty(shape: tuple[int, ...], like: Tree, zero: jax.Array | float = 0) -> Tree:
    """Zeros: `shape` places for values like `like`, which may differ between stages; made of `zero`, so not before it
    is there.
    """

    def zeros(a: jax.Array) -> jax.Array:
        return vary(jnp.full((*shape, *a.shape), zero, a.dtype), (*varying(a), PIPELINE))

    return jax.tree.map(zeros, like)


def read(buffers: Tree, *at: jax.Array) -> Tree:
    """The values at the place whose first indices are `at`."""
    return jax.tree.map(lambda buffer: _slice(buffer, at).reshape(buffer.shape[len(at) :]), buffers)


def write(buffers: Tree, values: Tree, *at: jax.Array, active: jax.Array | None = None) -> Tree:
    """`values` at the place whose first indices are `at`, where `active` (None: always)."""

    def updated(buffer: jax.Array, old: jax.Array, value: jax.Array) -> jax.Array:
        return value if active is None else jnp.where(active, value, old)

    return _updated(buffers, values, at, updated)


def add(buffers: Tree, values: Tree, *at: jax.Array, active: jax.Array) -> Tree:
    """`values` added, where `active`, to those at the place whose first indices are `at`, in the buffers' dtype."""

    def updated(buffer: jax.Array, old: jax.Array, value: jax.Array) -> jax.Array:
        return old + jnp.where(active, value, 0).astype(buffer.dtype)

    return _updated(buffers, values, at, updated)


def _updated(
    buffers: Tree, values: Tree, at: tuple[jax.Array, ...], update: Callable[..., jax.Array]
) -> Tree:
    """`update(buffer, what is at the place, value)` at the place.

    Both keep the axes of `at`: with a reshape between, XLA's GPU compiler no longer sees that it reads where it writes,
    and copies the place first.
    """

    def updated(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = value.reshape((*(1 for _ in at), *value.shape))
        return lax.dynamic_update_slice(
            buffer, update(buffer, _slice(buffer, at), value), _start(buffer, at)
        )

    return jax.tree.map(updated, buffers, values)


def _slice(buffer: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
    return lax.dynamic_slice(
        buffer, _start(buffer, at), (*(1 for _ in at), *buffer.shape[len(at) :])
    )


def _start(buffer: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return (*at, *(jnp.zeros((), jnp.int32) for _ in buffer.shape[len(at) :]))


# --- collectives that travel while the device computes


def after(values: Tree, *others: Tree) -> Tree:
    """`values`, not before the others are there.

    They vary over all mesh axes over which the others do: a barrier makes it so.

        values ──► start ─────────── done ──► what arrived         on the links
        carry  ─────────►   work   ──────────► its result          on the device

    XLA's scheduler lets a collective travel under whatever stands between its start and its done, even a whole loop
    with collectives of its own. On GPUs `mesh.compiler_options` limits how many travel at a time. Left alone it starts
    one as soon as it can and waits for it at once. So what is sent waits for what the work begins with, and what is
    sent next for what arrives. It goes through the program from its end, and of a loop and a done takes the loop first,
    unless something stands behind the loop that needs its result.
    """
    return lax.optimization_barrier((values, others))[0]
