"""ZeRO over the `data` axis (Rajbhandari et al. 2020): what each data rank holds, and when it is gathered and
scattered.

Between steps every stage from 1 on holds one shard of the fp32 master weights and of the optimizer state. They differ
in the step:

    stage      start of the step     at each layer of a microbatch                      end of the step
    0          weights are replicated                                              all-reduce of gradients       2Ψ sent
    1          all-gather weights                                               reduce-scatter gradients      2Ψ
    2          all-gather weights    backward: reduce-scatter its gradient                                    2Ψ
    3                                all-gather its weights, twice; reduce-scatter                            3Ψ
    2, 3 held  as stage 1: with m microbatches the traffic at the layers is m times as much, (1 + m)Ψ of stage 2 and
               3mΨ of 3

(sent per data rank, in elements of the Ψ parameters, times (N-1)/N.) Gradients are summed over the microbatches in
`precision.gradient_sums`: in full in stages 0 and 1 and where held, else a shard of them. Three calls tell the story:
`gather_params` makes what a step works on, `gather_at_use` gives the model a weight where it needs it, `reduce_grads`
sums the accumulated gradients into shards.
"""

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary
from meshtrain.config.reduce import (
    gathers_at_use,
    overlaps_reduce_scatter,
    scatters_at_use,
)
from meshtrain.mesh import ISLAND
from meshtrain.parallel.layout import Layout, is_placed
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.reduction import (
    Reduced,
    ReducedGradient,
    Reduction,
    Statistics,
    gather,
    left_out,
    statistics,
)

if TYPE_CHECKING:
    from meshtrain.parallel.reduce.feedback import Feedback, FeedbackState

Tree = Any


class Weights(NamedTuple):
    """The weights that a step differentiates (full ones, or shards) and those that it only reads: frozen weights, and
    in stage 2 the gathered ones.

    Two trees of all weights, with None where one of them has nothing to say of a weight.
    """

    differentiated: Tree
    constant: Tree

    def part(self, name: str) -> "Weights":
        """Returns the weights of the embedding, a stack or the head."""
        return Weights(self.differentiated[name], self.constant[name])

    def parts(self, names: Iterable[str]) -> "Weights":
        """Returns those of several, by their names."""
        return Weights(*({name: tree[name] for name in names} for tree in self))


def _unzipped(tree: Tree) -> Weights:
    """Returns two trees of a tree of `Weights` of one weight each."""
    is_pair = lambda x: isinstance(x, Weights)
    take = lambda n: jax.tree.map(operator.itemgetter(n), tree, is_leaf=is_pair)
    return Weights(take(0), take(1))


class ReducedGradients(NamedTuple):
    """A step's gradients as float32 shards, what compression keeps for the next step, and numbers for the row of
    metrics.
    """

    shards: Tree
    feedback: Any  # a FeedbackState, or None
    statistics: Statistics


class EarlyReduced(NamedTuple):
    """A gradient that was reduced before the others: its shard, and what was left out of each of its messages, float32
    [messages, 2].
    """

    shard: jax.Array
    squares: list[jax.Array]


class Zero:
    """The ZeRO stage of a layout, in `compute` dtype; gradients are summed by `reduction`, and `feedback` is that of
    compression, where there is any.
    """

    def __init__(
        self,
        layout: Layout,
        reduction: Reduction,
        feedback: "Feedback | None" = None,
    ) -> None:
        config = layout.config
        self.layout = layout
        self.axes = config.mesh.axes
        self.reduction = reduction
        self.feedback = feedback
        self.compute = jnp.dtype(config.precision.compute)
        self.sums = jnp.dtype(config.precision.gradient_sums)
        self.gathers_at_use = gathers_at_use(config)
        self.scatters_at_use = scatters_at_use(config)
        self.overlaps_reduce_scatter = overlaps_reduce_scatter(config)

    def gather_params(self, masters: Tree, blocks: bool = True) -> Weights:
        """Inside shard_map: this device's master weights (float32 shards) and frozen weights to what the step computes
        with; without the `blocks` of any stack, whose shards `gather_layers` takes.
        """
        stays = lambda weight: weight.float32 or self.layout.is_rounded(weight)
        computed = self.layout.map(
            lambda weight, x: x if stays(weight) else x.astype(self.compute), masters
        )
        shards = vary(computed, self.axes)
        split = self.layout.map(self._shard, shards)
        if not self.gathers_at_use:
            held = split
            split = self.layout.map(self._resident, shards)
            if not blocks:
                split = {
                    **split,
                    **{stack: held[stack] for stack in self.layout.stacks},
                }
        return _unzipped(split)

    def gather_layers(self, shards: Weights) -> Weights:
        """Full weights of some layers, by their stacks, from their shards."""

        def full(weight: Placed, shard: Any, frozen: Any) -> Weights:
            return self._resident(weight, frozen if shard is None else shard)

        placed = {stack: self.layout.weights[stack] for stack in self.layout.stacks}
        return _unzipped(jax.tree.map(full, placed, *shards, is_leaf=is_placed))

    def _shard(self, weight: Placed, shard: Any) -> Weights:
        """Returns a weight of which a step has this rank's shard."""
        rounded = None
        if self.gathers_at_use:
            rounded = self.layout.storage.round_once(self.layout, weight, shard, False)
        if weight.trained:
            return Weights(shard, rounded)
        return Weights(None, shard if rounded is None else rounded._replace(wide=shard))

    def _resident(self, weight: Placed, shard: Any) -> Weights:
        """Returns a weight that is gathered for a whole step, from this rank's shard."""
        rounded = self.layout.storage.round_once(self.layout, weight, shard, True)
        full = self.gathered(weight, shard) if rounded is None else rounded
        if not weight.trained:
            return Weights(None, full)
        if self.scatters_at_use and weight.zero_dim is not None:
            return Weights(shard, full)
        return Weights(
            full if rounded is None else rounded.unread(shard.dtype), rounded
        )

    def gather_at_use(self, part: str, weights: Weights) -> Tree:
        """Full weights for the model from a part of `Weights` (of a stack: a layer's, unstacked).

        Their gradient flows to `differentiated`: as it is, or summed and scattered over data.
        """
        return jax.tree.map(
            self._gather_weight, self.layout.weights[part], *weights, is_leaf=is_placed
        )

    def no_gradients(self, weights: Tree) -> Tree:
        """Zeros to sum gradients of a tree of weights in."""

        def zeros(weight: Placed, w: jax.Array | None) -> jax.Array | None:
            if w is None:
                return None
            return jnp.zeros(w.shape, jnp.float32 if weight.float32 else self.sums)

        return vary(self.layout.map(zeros, weights), self.axes)

    def reduce_grads(
        self,
        gradients: Tree,
        feedback: "FeedbackState | None",
        scale: jax.Array,
    ) -> ReducedGradients:
        """Inside shard_map: accumulated partial gradients, times `scale`, to float32 shards, summed over every axis
        that the weight lacks.

        `feedback` is what compression kept of the last step.
        """
        nothing = self.layout.map(lambda weight: None)
        residuals, qs = (nothing, nothing) if feedback is None else feedback

        def reduce(
            weight: Placed,
            g: jax.Array | EarlyReduced,
            residual: jax.Array | None,
            q: jax.Array | None,
        ) -> ReducedGradient | None:
            if not weight.trained:
                return None
            if isinstance(g, EarlyReduced):
                return ReducedGradient(g.shard, [x.sum(0) for x in g.squares])
            if self.feedback is None or (residual is None and q is None):
                return self._reduce(weight, g)
            return self.feedback.reduce(weight, g, residual, q, scale)

        reduced = self.layout.map(reduce, gradients, residuals, qs)
        leaves = jax.tree.leaves(
            reduced, is_leaf=lambda x: isinstance(x, ReducedGradient)
        )
        squares = [x for gradient in leaves for x in gradient.squares]
        # Islands that step by themselves have statistics of their own.
        axes = tuple(
            axis for axis in self.axes if axis != ISLAND or self.reduction.islands
        )
        measured = statistics(
            squares, axes, scale, self.layout.config.parallel.reduce.feedback
        )
        shards = self.layout.map(lambda weight, x: x and x.shard, reduced)
        state = (
            None if self.feedback is None else self.feedback.next_state(reduced, scale)
        )
        return ReducedGradients(shards, state, measured)

    def reduce_early(self, gradients: Tree) -> Tree:
        """Reduce-scatters gradients of parts, by their names (of a stack: of some layers, stacked), that are already
        complete, to overlap with the rest of the backward pass; `reduce_grads` passes them through. Norms and
        biases, which are
        small, stay as they are: at the end one message takes all of them.
        """

        def reduce(weight: Placed, g: jax.Array | None) -> Tree:
            if g is None or len(weight.axes) - weight.stacked < 2:
                return g
            reduced = self._reduce(weight, g)
            return EarlyReduced(reduced.shard, [x[None] for x in reduced.squares])

        placed = {part: self.layout.weights[part] for part in gradients}
        return jax.tree.map(reduce, placed, gradients, is_leaf=is_placed)

    def add_gradient(
        self,
        weight: Placed,
        total: jax.Array,
        add: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """`total` of a weight's gradient with what `add` puts, number by number, into a full one in float32: straight
        into it where it is that, else into zeros, which are scattered in stages 2 and 3.
        """
        scatters = self.scatters_at_use and weight.zero_dim is not None
        if total.dtype == jnp.float32 and not scatters:
            return add(total)
        shape = [n // ways for n, ways in zip(weight.whole, weight.ways, strict=True)]
        g = add(vary(jnp.zeros(shape, jnp.float32), self.axes))
        return total + (self._scatter(weight, g) if scatters else g).astype(total.dtype)

    def _reduce(self, weight: Placed, g: jax.Array) -> ReducedGradient:
        # Scattered at use it is summed over data already, where it was made.
        scattered = self.scatters_at_use and weight.zero_dim is not None
        if scattered:
            inside = Reduced(g, g)
        else:
            inside = self.reduction.reduce_scatter(weight, g)
        across = self.reduction.all_reduce_islands(weight, inside.shard)
        shard = across.shard.astype(jnp.float32)
        squares = left_out(g, inside) + left_out(inside.shard, across)
        return ReducedGradient(
            lax.psum(shard, weight.replicated) if weight.replicated else shard, squares
        )

    def gathered(self, weight: Placed, shard: Any) -> Any:
        """Gathers the part of a weight that a state has on this rank."""
        return self.layout.storage.gather(weight, shard)

    def _gather_weight(
        self,
        weight: Placed,
        differentiated: jax.Array | None,
        constant: Any,
    ) -> jax.Array:
        if differentiated is None:
            assert constant is not None
            full = constant
            if self.gathers_at_use:
                full = self.gathered(weight, self.layout.storage.wide(constant))
            # products take what is in float8 as it is (`parallel.float8`)
            return self.layout.unstored(weight, full)
        scatters = self.scatters_at_use and weight.zero_dim is not None
        resident = self.layout.storage.wide(constant)
        if not scatters and resident is None:
            return differentiated

        def full_weight(shard: jax.Array, resident: jax.Array | None) -> jax.Array:
            if resident is None:
                return gather(weight, shard)
            return resident

        def backward(_: None, g: jax.Array) -> tuple[jax.Array, None]:
            # nothing of `resident`, which is a constant
            return self._scatter(weight, g) if scatters else g, None

        use = jax.custom_vjp(full_weight)
        use.defvjp(lambda *given: (full_weight(*given), None), backward)
        return use(differentiated, resident)

    def _scatter(self, weight: Placed, g: jax.Array) -> jax.Array:
        return self.reduction.reduce_scatter(weight, g).shard.astype(g.dtype)
