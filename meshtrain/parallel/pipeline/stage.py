"""One stage's computation for one microbatch: its layers forward, backward whole or in two halves, embedding and loss.

The layers are looped over by hand, each with a vjp of its own, so that a layer's residuals go straight to their place
in the stash:

    forward     x ─► layer 0 ─► layer 1 ─► y              stash[place, layer] ◄─ the layer's input and residuals
    backward    gx ◄─ layer 0 ◄─ layer 1 ◄─ cotangent     gradients[layer] += its weight gradient, in an active slot

Buffers are trees of arrays:

    stash              [places, layers, ...]    a place has what F of one microbatch and chunk keeps for B
    receive buffers    [places, ...]            a place has one message

The loop reads and writes single layers of a place, so that no place is copied whole.

A layer has three numbers. The second layer of chunk 1 on stage 1, with 2 stages of 2 chunks of 3 layers:

    i        in its segment (its turn)    1
    at       in the slots of its stack    chunk 1 * 3 + 1 = 4
    index    in the model                 virtual stage 3 * 3 + 1 = 10

Weights and their gradients are by stack, in the places of `layout.StackLayers`. A segment has one loop, whose body is a
turn: a layer of each place of its period (`layout.Segment`). The layers of a place keep an array of their own.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshtrain.compat import residuals, vary, varying, with_residuals
from meshtrain.inputs import inputs
from meshtrain.mesh import DATA, PIPELINE
from meshtrain.parallel.forward import (
    Batch,
    Forward,
    LabelLosses,
    Totals,
    added,
    group_stacks,
    joined_stacks,
    widen_gradients,
)
from meshtrain.parallel.layout import Segment
from meshtrain.parallel.pipeline.buffers import (
    BufferSlot,
    add,
    after,
    empty,
    put,
    read,
    write,
    zeros_like,
)
from meshtrain.parallel.placement import buckets
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.table import Slot

if TYPE_CHECKING:
    from meshtrain.parallel.pipeline.split_backward import Halves

Tree = Any
Op = Slot[Array]  # of one clock, on this stage
Buffers = list[Tree]  # a tree for each segment


class StackedLayer(NamedTuple):
    """The function of one layer at a place of a segment's period, and where its weights are."""

    run: Callable
    stack: str
    before: int  # layers of its stack that a chunk has before it
    step: int  # layers of its stack in a turn
    skipped: bool  # where it is padding, see `layout.SlotKind`

    def at(self, offset: Array | int, i: Array) -> Array:
        """Returns the layer's slot in its stack in turn i; in the segment's first turn it is `offset`."""
        if self.step == 1:
            return offset + i
        return offset + self.step * i


class LayerTrace(NamedTuple):
    """A layer's forward pass, and its vjp: cotangent of the output -> (weight gradient, input gradient).

    Residuals are stashed if they depend on the microbatch. The others, such as frozen weights, are the same in the
    backward.
    """

    output: Array
    vjp: Callable
    is_stashed: list[bool]  # for each residual of the vjp

    def stashed_residuals(self) -> list[Array]:
        pairs = zip(residuals(self.vjp), self.is_stashed, strict=True)
        return [r for r, is_stashed in pairs if is_stashed]

    def gradients(self, stashed: list[Array], cotangent: Array) -> tuple[Array, Tree]:
        """Returns the input gradient and the weight gradient, with residuals from the stash; the forward pass that was
        traced for them is dead code.
        """
        saved = iter(stashed)
        pairs = zip(residuals(self.vjp), self.is_stashed, strict=True)
        values = [next(saved) if is_stashed else r for r, is_stashed in pairs]
        gradient, gx = with_residuals(self.vjp, values)(cotangent)
        return gx, gradient


def _stage_row(numbers: np.ndarray) -> Array:
    """Returns this stage's part [chunks * slots] of numbers [pipeline, chunks, slots]."""
    return read(jnp.asarray(numbers), lax.axis_index(PIPELINE)).reshape(-1)


class Stage:
    """The weights and batches of one step on this device."""

    def __init__(
        self,
        forward: Forward,
        chunks: int,
        weights: Weights,
        batches: Batch,
        key: Array | None,
        alternates: bool = False,
    ) -> None:
        self.model = forward
        self.alternates = alternates
        self.chunks = chunks
        self.batches = batches
        self.key = key
        # embedding and head
        edge = {part: weights.differentiated[part] for part in forward.edge_parts}
        self.edge = weights._replace(differentiated=edge)
        layout = forward.layout
        # Stacked layers by stack, chunk after chunk
        self.blocks = weights.parts(layout.stacks)
        # slots of a chunk, in all and of each stack
        self.slots = layout.layer_at.shape[-1]
        stacks = layout.stacks.items()
        self.slots_of = {stack: layers.in_slots.shape[-1] for stack, layers in stacks}
        self.segments = layout.segments
        assert chunks == layout.chunks
        # index in the model of the layer in each slot, and its place in its stack where that is another
        self.index_at = {}
        self.place_of = {}
        for stack, layers in stacks:
            self.index_at[stack] = _stage_row(layers.in_slots)
            if layers.place_of is not None:
                self.place_of[stack] = _stage_row(layers.place_of)

    def zeros(self) -> Array:
        """Returns a residual stream of one microbatch, all zeros."""
        config = self.model.config
        rows = inputs(self.batches).shape[1]
        shards = config.mesh.tensor if self.model.collectives.sequence_parallel else 1
        tokens = self.model.length(self.batches) // shards
        x = jnp.zeros((rows, tokens, config.model.d_model), self.model.zero.compute)
        return vary(x, self.model.stream_axes)

    def embed(self, microbatch: Array) -> Array:
        return self.model.embed(self.edge, self._batch(microbatch), self.key)

    def add_embedding_gradient(self, sums: Tree, microbatch: Array, gx: Array) -> Tree:
        """Adds the embedding's gradient to the sums of embedding and head, from the cotangent of `embed`'s output."""
        embedding = self.model.add_embedding_gradient(
            sums["embedding"], self.edge, self._batch(microbatch), self.key, gx
        )
        return {**sums, "embedding": embedding}

    def loss(
        self,
        y: Array,
        microbatch: Array,
        here: Array,
        seed: Array,
    ) -> tuple[Totals, Tree, Array]:
        """Returns the loss from the last stage's output y, zeros unless `here`, and two gradients of `seed` times it:
        that of the embedding's and the head's weights, and that of y.
        """

        def seeded_loss(differentiated: Tree, y: Array) -> tuple[Array, Totals]:
            weights = self.edge._replace(differentiated=differentiated)
            return self.model.loss(weights, y, self._batch(microbatch), here, seed)

        seeded, vjp, totals = jax.vjp(
            seeded_loss, self.edge.differentiated, y, has_aux=True
        )
        edge, gy = vjp(vary(jnp.ones(()), varying(seeded)))
        return totals, edge, gy

    def label_losses(self, y: Array, microbatch: Array, here: Array) -> LabelLosses:
        """Returns the loss of each label, [b, T], from the last stage's output y."""
        return self.model.label_losses(self.edge, y, self._batch(microbatch), here)

    # --- a chunk's ops, each a loop over its layers

    def run(self, x: Array, slot: Op) -> Array:
        """Returns the chunk's output; no residuals are saved."""
        y, _ = self._loop_over_layers(self._run_layer, x, slot)
        return y

    def forward_only(self, x: Array, stash: Buffers, slot: Op) -> tuple[Array, Buffers]:
        """Returns the chunk's output, and the stash as it was: for an F with no B to come."""
        return self.run(x, slot), stash

    def forward(self, x: Array, stash: Buffers, slot: Op) -> tuple[Array, Buffers]:
        """F: returns the chunk's output, and the stash with each layer's input and residuals."""
        return self._loop_over_layers(
            self.forward_layer, x, slot, write_to=self._stashed(stash, slot)
        )

    def backward(
        self,
        stash: Buffers,
        cotangent: Array,
        gradients: Tree,
        slot: Op,
    ) -> tuple[Array, Tree]:
        """B: returns the input gradient, and `gradients` with each layer's weight gradient added if the slot is
        active.
        """
        step = partial(self.backward_layer, slot.active)
        sources = [self._stashed(stash, slot)]
        carry = (cotangent, gradients)
        carry, _ = self._loop_over_layers(
            step, carry, slot, read_from=sources, reverse=True
        )
        return carry

    def input_gradient(
        self,
        stash: Buffers,
        cotangent: Array,
        w_residuals: Buffers,
        slot: Op,
    ) -> tuple[Array, Buffers]:
        """I: returns the input gradient, and `w_residuals` with the residuals of the weight gradient."""
        sources = [self._stashed(stash, slot)]
        target = BufferSlot(w_residuals, lambda i: (slot.cot, i))
        return self._loop_over_layers(
            self.input_layer,
            cotangent,
            slot,
            read_from=sources,
            write_to=target,
            reverse=True,
        )

    def weight_gradient(
        self,
        stash: Buffers,
        w_residuals: Buffers,
        gradients: Tree,
        slot: Op,
    ) -> Tree:
        """W: returns `gradients` with the weight gradient added, from the residuals that I wrote."""
        step = partial(self.weight_layer, slot.active)
        left = BufferSlot(w_residuals, lambda i: (slot.cot, i))
        sources = [self._stashed(stash, slot), left]
        total, _ = self._loop_over_layers(
            step, gradients, slot, read_from=sources, reverse=True
        )
        return total

    def _loop_over_layers(
        self,
        step: Callable[..., tuple[Tree, Tree]],
        carry: Tree,
        slot: Op,
        *,
        read_from: Sequence["BufferSlot"] = (),
        write_to: "BufferSlot | None" = None,
        reverse: bool = False,
    ) -> tuple[Tree, Buffers]:
        """Runs `step(layer, at, carry, *values read) -> (carry, values to write)` over the layers of the slot's chunk.

        Segments run one after another, each in a loop of its own. `at` is the layer's place in the stacked weights.
        Returns the last carry, and the buffers of `write_to`.
        """
        written = list(write_to.buffers) if write_to else [None] * len(self.segments)
        direction = -1 if reverse else 1
        for n, segment in list(enumerate(self.segments))[::direction]:
            layers = self._offset_layers(slot, segment)[::direction]
            indices = jnp.arange(segment.turns, dtype=jnp.int32)

            def body(
                state: tuple[Tree, Tree],
                i: Array,
                n: int = n,
                layers: list[tuple[int, StackedLayer, Array]] = layers,
            ) -> tuple[tuple[Tree, Tree], None]:
                carry, buffers = state
                for p, layer, offset in layers:
                    inputs = [read(s.buffers[n][p], *s.at(i)) for s in read_from]
                    at = layer.at(offset, i)
                    carry, output = step(layer, at, carry, *inputs)
                    if write_to:
                        buffer = write(buffers[p], output, *write_to.at(i))
                        buffers = put(buffers, p, buffer)
                return (carry, buffers), None

            (carry, written[n]), _ = lax.scan(
                body, (carry, written[n]), indices, reverse=reverse
            )
        return carry, written

    def _offset_layers(
        self, slot: Op, segment: Segment
    ) -> list[tuple[int, StackedLayer, Array]]:
        """Returns each place of a segment's period, its layer, and where its stacked weights are in the first turn."""
        layers = self.period(slot, segment)
        return [(p, layer, self.offset(slot.chunk, layer)) for p, layer in layers]

    # --- one layer of each op: (layer, at, carry, *values read) -> (carry, values to write)

    def _run_layer(
        self, layer: StackedLayer, at: Array, x: Array
    ) -> tuple[Array, None]:
        def run(x: Array) -> Array:
            weights, index = self._weights(layer, at)
            return layer.run(weights.differentiated, x, weights.constant, index)

        return self._unless_padding(layer, at, run, lambda x: x)(x), None

    def _unless_padding(
        self,
        layer: StackedLayer,
        at: Array,
        run: Callable,
        same: Callable,
    ) -> Callable:
        """Returns `run`, or a function that is `same` where the layer is padding that is skipped.

        All devices of a stage go the same way, so that collectives within it may stand in `run`.
        """
        if not layer.skipped:
            return run
        is_layer = self.index_at[layer.stack][at] >= 0
        return partial(lax.cond, is_layer, run, same)

    def forward_layer(
        self, layer: StackedLayer, at: Array, x: Array
    ) -> tuple[Array, Tree]:
        """Returns a layer's output, and its input and residuals for the stash."""

        def run(x: Array) -> tuple[Array, Tree]:
            trace = self._trace(layer, at, x)
            return trace.output, (x, trace.stashed_residuals())

        def same(x: Array) -> tuple[Array, Tree]:
            _, (_, saved) = jax.eval_shape(run, x)
            return x, (x, zeros_like(saved))

        return self._unless_padding(layer, at, run, same)(x)

    def backward_layer(
        self,
        active: Array,
        layer: StackedLayer,
        at: Array,
        carry: tuple[Array, Tree],
        stashed: Tree,
    ) -> tuple[tuple[Array, Tree], None]:
        """Returns a layer's input gradient, and the gradient sums with its weight gradient added if `active`."""
        x, saved = stashed

        def run(cotangent: Array, gradients: Tree) -> tuple[Array, Tree]:
            gx, gradient = self._trace(layer, at, x).gradients(saved, cotangent)
            return gx, self._added(gradients, layer, gradient, at, active)

        return self._unless_padding(layer, at, run, lambda *same: same)(*carry), None

    def input_layer(
        self,
        layer: StackedLayer,
        at: Array,
        cotangent: Array,
        stashed: Tree,
    ) -> tuple[Array, list[Array]]:
        """Returns a layer's input gradient, and the residuals of its weight gradient."""
        x, saved = stashed

        def run(cotangent: Array) -> tuple[Array, list[Array]]:
            halves = self._halves(layer, at, x, saved)
            (gx,), for_w = halves.first(x, saved, cotangent)
            return gx, for_w

        def same(gx: Array) -> tuple[Array, list[Array]]:
            _, for_w = jax.eval_shape(run, gx)
            return gx, zeros_like(for_w)

        return self._unless_padding(layer, at, run, same)(cotangent)

    def weight_layer(
        self,
        active: Array,
        layer: StackedLayer,
        at: Array,
        gradients: Tree,
        stashed: Tree,
        for_w: Tree,
    ) -> tuple[Tree, None]:
        """Returns the gradient sums with a layer's weight gradient added if `active`."""
        x, saved = stashed

        def run(gradients: Tree) -> Tree:
            halves = self._halves(layer, at, x, saved)
            leaves = halves.second(for_w, x, saved, None)
            tree = jax.tree.structure(self.blocks.differentiated[layer.stack])
            gradient = jax.tree.unflatten(tree, leaves)
            return self._added(gradients, layer, gradient, at, active)

        return self._unless_padding(layer, at, run, lambda same: same)(gradients), None

    def _added(
        self,
        gradients: Tree,
        layer: StackedLayer,
        gradient: Tree,
        at: Array,
        active: Array,
    ) -> Tree:
        """Returns the gradient sums with that of a layer added if `active`."""
        if layer.stack in self.place_of:  # where padding has no place
            active = active & (self.index_at[layer.stack][at] >= 0)
        place = self.place(layer.stack, at)
        total = add(gradients[layer.stack], gradient, place, active=active)
        return {**gradients, layer.stack: total}

    # --- a backward that sends its weight gradients while it goes on

    def backward_sending(
        self,
        stash: Buffers,
        cotangent: Array,
        gradients: Tree,
        slot: Op,
        send: Callable[[Tree], Tree],
    ) -> tuple[Array, Tree]:
        """Returns the input gradient, and the stacked results of `send`, which takes the weight gradients of a bucket
        of layers. The stage has one chunk.

            device    backward of bucket 2 ─► backward of bucket 1 ─► backward of bucket 0
            links                             send 2                  send 1                  send 0

        Before it is sent, a bucket is added to its layers' sums in `gradients`, if that is not None.
        """
        # One function for all buckets of a segment, whose loops the program then shares.
        pairs = zip(self.segments, stash, strict=True)
        turns_back = [(s, self._turn_back(slot, s, part)) for s, part in pairs]

        def backward_bucket(gx: Array, first: int, behind: int) -> tuple[Array, Tree]:
            parts = []
            for segment, turn_back in turns_back[::-1]:
                start = max(first, segment.first)
                stop = min(behind, segment.behind)
                if start < stop:
                    begin = segment.turn(start)
                    indices = jnp.arange(begin, segment.turn(stop), dtype=jnp.int32)
                    gx, gradient = lax.scan(turn_back, gx, indices, reverse=True)
                    parts.append(group_stacks(segment, gradient))
            bucket = joined_stacks(parts[::-1])
            if gradients is None:
                return gx, widen_gradients(bucket)
            return gx, added(self._between(gradients, first, behind), bucket)

        last, *earlier = self._buckets()[::-1]
        gx, complete = backward_bucket(cotangent, *last)
        sent = []
        for bucket in earlier:
            # It travels while the bucket before it is computed.
            sent.append(send(after(complete, gx)))
            gx, complete = backward_bucket(gx, *bucket)
            complete = after(complete, sent[-1])
        sent.append(send(complete))
        return gx, joined_stacks(sent[::-1])

    def _turn_back(
        self, slot: Op, segment: Segment, stash: list[Tree]
    ) -> Callable[[Array, Array], tuple[Array, list[Tree]]]:
        """Returns the loop's body (cotangent, turn) -> (input gradient, the weight gradients of each place)."""
        layers = self.period(slot, segment)

        def turn_back(cotangent: Array, turn: Array) -> tuple[Array, list[Tree]]:
            # turns of a segment are counted from its first slot on
            i = turn - segment.first if segment.first else turn
            of_places = []
            for p, layer in layers[::-1]:
                # The same number, without arithmetic in the program.
                is_turn = layer.step == 1 and layer.before == segment.first
                at = turn if is_turn else layer.at(layer.before, i)
                x, saved = read(stash[p], *self.stashed_at(slot, i))
                trace = self._trace(layer, at, x)
                cotangent, gradient = trace.gradients(saved, cotangent)
                of_places.append(gradient)
            return cotangent, of_places[::-1]

        return turn_back

    def _between(
        self, stacks: dict[str, Tree], first: int, behind: int
    ) -> dict[str, Tree]:
        """Returns the layers of each stack that has some from slot `first` on, before slot `behind`."""
        between = {}
        for stack, stacked in stacks.items():
            start = self.slots_before(stack, first)
            stop = self.slots_before(stack, behind)
            if start < stop:
                cut = operator.itemgetter(slice(start, stop))
                between[stack] = jax.tree.map(cut, stacked)
        return between

    def _buckets(self) -> list[tuple[int, int]]:
        """Returns the slots (first, one behind the last) of each bucket, which ends where a turn does."""
        ends = {0}
        for _, behind in buckets(self.slots):
            segment = next(s for s in self.segments if behind <= s.behind)
            inside = (behind - segment.first) % len(segment.period)
            ends.add(behind - inside)
        return list(itertools.pairwise(sorted(ends)))

    # --- buffers of the layers

    def stashed_at(self, slot: Op, i: Array) -> tuple[Array, Array]:
        """Returns where turn i of a slot's microbatch lies in the stash: if they alternate, every second one lies from
        its last layer to its first.
        """
        if self.alternates:
            i = jnp.where(slot.microbatch % 2 > 0, self.slots - 1 - i, i)
        return slot.stash, i

    def _stashed(self, stash: Buffers, slot: Op) -> BufferSlot:
        return BufferSlot(stash, partial(self.stashed_at, slot))

    def stash_shapes(self, split: bool) -> tuple[Buffers, Buffers]:
        """Returns two lists of shapes, for a layer of each place of each segment: those that F stashes, and those that
        I leaves for W if the backward is `split`.
        """
        zero = jnp.zeros((), jnp.int32)

        def run_layer(segment: Segment, place: int, x: Array) -> tuple[Tree, Tree]:
            slot = Slot(jnp.array(True), zero, zero, zero)
            layer = self.stacked_layer(slot, segment, place)
            saved = self._trace(layer, zero, x).stashed_residuals()
            if not split:
                return (x, saved), []
            _, for_w = self._halves(layer, zero, x, saved).first(x, saved, x)
            return (x, saved), for_w

        x = self.zeros()
        stashed = []
        left = []
        for segment in self.segments:
            runs = [partial(run_layer, segment, p) for p in range(len(segment.period))]
            kept = [jax.eval_shape(run, x) for run in runs]
            stashed.append([for_b for for_b, _ in kept])
            left.append([for_w for _, for_w in kept])
        return stashed, left

    def buffers(
        self, places: int, of_layers: Buffers, zero: Array | float = 0
    ) -> Buffers:
        """Returns a buffer of `empty` places for what the layers of each segment have; no trees if there is nothing."""
        pairs = zip(self.segments, of_layers, strict=bool(of_layers))
        return [empty((places, segment.turns), like, zero) for segment, like in pairs]

    # --- one layer

    def offset(self, chunk: Array, layer: StackedLayer) -> Array:
        """Returns the place in the stacked weights of a layer in a segment's first turn."""
        offset = chunk * self.slots_of[layer.stack]
        return offset + layer.before if layer.before else offset

    def slots_before(self, stack: str, slot: int) -> int:
        """Returns how many slots of a stack a chunk has before a slot."""
        return self.model.layout.stages.slots[:slot].count(stack)

    def _batch(self, microbatch: Array) -> Batch:
        """Returns a microbatch; the first one where the slot is idle (-1)."""
        return read(self.batches, jnp.maximum(microbatch, 0))

    def period(self, slot: Op, segment: Segment) -> list[tuple[int, StackedLayer]]:
        """Returns each place of a segment's period, and the layer there, for the microbatch of a slot."""
        places = range(len(segment.period))
        return [(place, self.stacked_layer(slot, segment, place)) for place in places]

    def stacked_layer(self, slot: Op, segment: Segment, place: int) -> StackedLayer:
        kind = segment.period[place]
        batch = self._batch(slot.microbatch)
        run = self.model.layer(batch, self.key, kind, slot.active)
        before = self.slots_before(kind.stack, segment.first + place)
        step = segment.stacks.count(kind.stack)
        return StackedLayer(run, kind.stack, before, step, kind.skipped)

    def _weights(self, layer: StackedLayer, at: Array) -> tuple[Weights, Array]:
        """Returns the weights of a layer, and its index in the model."""
        place = self.place(layer.stack, at)
        index_at = self.index_at[layer.stack]
        count = self.model.layout.stacks[layer.stack].count
        wide = self.model.layout.wide_places(layer.stack, self.chunks)
        # A shorter array has the wide layers alone: each layer's place among those.
        wide_place = jnp.asarray(np.searchsorted(wide, np.arange(len(index_at))))

        def read_layer(stacked: Array) -> Array:
            if len(stacked) == count:
                return read(stacked, place)
            return read(stacked, wide_place[at])

        weights = jax.tree.map(read_layer, self.blocks.part(layer.stack))
        return weights, index_at[at]

    def place(self, stack: str, at: Array) -> Array:
        """Returns the place in its stack of the layer in a slot."""
        if stack in self.place_of:
            return self.place_of[stack][at]
        return at

    def _trace(self, layer: StackedLayer, at: Array, x: Array) -> LayerTrace:
        weights, index = self._weights(layer, at)
        run = partial(layer.run, constant=weights.constant, index=index)
        y, vjp = jax.vjp(run, weights.differentiated, x)
        constant = {id(w) for w in jax.tree.leaves(weights.constant)}
        # Whatever depends on the microbatch varies over data.
        depends = lambda r: DATA in varying(r) and id(r) not in constant
        return LayerTrace(y, vjp, [depends(r) for r in residuals(vjp)])

    def _halves(
        self,
        layer: StackedLayer,
        at: Array,
        x: Array,
        saved: list[Array],
    ) -> "Halves":
        """Returns the layer's vjp in two halves, of which the second has no cotangent any more.

        Arguments and results:

            I  (x, saved, cotangent) -> (input gradient,), residuals for W
            W  (residuals for W, x, saved, None) -> leaves of the weight gradient
        """
        from meshtrain.parallel.pipeline.split_backward import split_backward

        def gradients(
            x: Array, saved: list[Array], cotangent: Array
        ) -> tuple[Array, Tree]:
            return self._trace(layer, at, x).gradients(saved, cotangent)

        return split_backward(gradients, (False, False, True), x, saved, x)
