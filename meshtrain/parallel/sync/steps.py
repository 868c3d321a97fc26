"""The compiled programs of a run whose islands take steps by themselves (`parallel.sync`), and which of them is due
after which step.

    steps taken       program                                           sent across islands
    < start           gradients summed over all islands                 a shard, every step
    then              each island for itself                            nothing
    fragment due      + delay 0: synchronize, a program of its own     one all-reduce of the fragment's shard
                      + delay d: the next step sends beside its work    the same
                        after d steps: apply outer update               nothing
    island broken     mend: moments from the other islands              its optimizer state, once

JAX runs the programs of a device one after the other. So with a delay the all-reduce stands in the program of a step,
where XLA may overlap it with that step's compute: nothing in forward and backward waits for it.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.mesh import ISLAND, platform
from meshtrain.parallel.forward import Batch
from meshtrain.parallel.parallelize import Gradients, LocalStep
from meshtrain.parallel.state import State, Steps, TrainStep
from meshtrain.parallel.sync import states, when
from meshtrain.parallel.sync.outer import OWN_SHARE, Exchanged, Outer
from meshtrain.precision import factor, is_finite

Tree = Any
Metrics = dict[str, jax.Array]


class IslandSteps(Steps):
    """The programs of `program`, whose config has parallel.sync.every."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.config = program.config
        self.layout = program.layout
        self.sync = program.config.parallel.sync
        self.islands = program.config.mesh.islands
        self.outer = Outer(program.layout)
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    # --- the state

    def shapes(self, state: State) -> State:
        """ShapeDtypeStructs of the state, from those of one without islands of their own."""
        optimizer, scale = states.stacked((state.optimizer, state.scale), self.islands)
        trained = self.layout.only_trained(state.params)
        sharding = NamedSharding(self.program.mesh, PartitionSpec(ISLAND))
        counted = jax.ShapeDtypeStruct(
            (self.islands, self.sync.fragments), jnp.float32, sharding=sharding
        )
        own = self._kept(
            trained, trained, states.stacked(trained, self.islands), counted
        )
        return state._replace(optimizer=optimizer, scale=scale, islands=own)

    def begin(self, state: State) -> State:
        """A state before the first step, inside jit, with what every island has; its scale is of every island
        already.
        """
        return state._replace(
            optimizer=self.every_island(state.optimizer),
            islands=self._unmoved(self.layout.only_trained(state.params)),
        )

    def begin_from(self, state: State) -> State:
        shardings = self.program.state_shardings.islands
        unmoved = jax.jit(self._unmoved, out_shardings=shardings)
        return state._replace(islands=unmoved(self.layout.only_trained(state.params)))

    def _unmoved(self, trained: Tree) -> states.Islands:
        """Returns what islands have before the first step, inside jit: each the shared model, from which none has
        moved.
        """
        zeros = jax.tree.map(jnp.zeros_like, trained)
        own = self.every_island(trained)
        return self._kept(
            zeros, zeros, own, jnp.zeros((self.islands, self.sync.fragments))
        )

    def _kept(
        self,
        momentum: Tree,
        under_way: Tree,
        params: Tree,
        counted: Any,
    ) -> states.Islands:
        return states.Islands(
            params=params,
            momentum=momentum if self.sync.outer_momentum else None,
            under_way=under_way if self.sync.delay else None,
            counted=counted,
        )

    def every_island(self, tree: Tree) -> Tree:
        """Returns the same for each island, inside jit."""
        return states.every_island(tree, self.islands)

    def fetch(self, metrics: dict[str, Any]) -> dict[str, float]:
        return states.visible(metrics)

    # --- which program when

    def any_step(self, step: TrainStep) -> TrainStep:
        return StepOfIslands(self)

    def step_after(self, taken: int) -> TrainStep:
        """The program of the step after `taken` steps."""
        if when.synchronous(self.sync, taken):
            return self.synchronous
        fragment = when.due(self.sync, taken) if self.sync.delay else None
        return self.local_step if fragment is None else self.sending[fragment]

    def finish(
        self, state: State, metrics: dict[str, Any], taken: int
    ) -> tuple[State, dict[str, Any]]:
        """Runs the programs that are due after `taken` steps, the last of which gave `metrics`.

        Waits for an exchange, to see whether an island is broken.
        """
        metrics = dict(metrics)
        if not self.sync.delay and (fragment := when.due(self.sync, taken)) is not None:
            state, more = self._compile(self.synchronize[fragment])(state)
            metrics |= more
        if "sync_islands" in metrics:
            sent = when.due(self.sync, taken - bool(self.sync.delay))
            assert sent is not None
            metrics["sync_bytes"] = self.outer.sent_bytes(sent)
            if 0 < int(metrics["sync_islands"]) < self.islands:
                state = self._compile(self.mend)(state)
        if self.sync.delay and (fragment := when.arrives(self.sync, taken)) is not None:
            state = self._compile(self.apply_outer_update[fragment])(state)
        return state, metrics

    def prepare(self) -> None:
        """Compiles what is done between steps, but for what a broken island needs, so that no exchange waits for it."""
        for jitted in self.apply_outer_update if self.sync.delay else self.synchronize:
            self._compile(jitted)

    def _compile(self, jitted: Any) -> jax.stages.Compiled:
        if jitted not in self._compiled:
            self._compiled[jitted] = jitted.lower(self.program.state_shapes).compile()
        return self._compiled[jitted]

    # --- steps

    @cached_property
    def synchronous(self) -> TrainStep:
        return self.program.jitted_step(self._synchronous)

    @cached_property
    def local_step(self) -> TrainStep:
        return self.program.jitted_step(self._local_step)

    @cached_property
    def sending(self) -> list[TrainStep]:
        """Returns for each fragment the step that also sends what islands had before it."""
        return [
            self.program.jitted_step(partial(self._sending, fragment))
            for fragment in range(self.sync.fragments)
        ]

    @cached_property
    def _within_island(self) -> LocalStep:
        """Losses and gradients of one island, summed over the axis `data` alone."""
        return LocalStep(
            self.layout, platform(self.program.mesh), self.program.hooks, across=False
        )

    def _local_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        after, metrics = self._step_of_each(self._within_island, state, batch)
        learned = metrics[states.COUNTED]
        if state.scale is not None and after.scale is not None:
            # of a step that float16 skips nothing is learned
            learned = jnp.where(
                after.scale.skipped == state.scale.skipped, learned, 0.0
            )
        counted = state.islands.counted + learned[:, None]
        return after._replace(islands=after.islands._replace(counted=counted)), metrics

    def _synchronous(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """All islands do the same, so that each has the shared model."""
        after, metrics = self._step_of_each(self.program.local, state, batch)
        take_first = self._shard_map(
            _first, in_specs=(self._own,), out_specs=self._shared
        )
        shared = take_first(after.islands.params)
        # one number for all
        metrics = jax.tree.map(lambda x: jnp.max(x, 0), metrics)
        return after._replace(
            params=self.layout.add_frozen(shared, state.params)
        ), metrics

    def _sending(
        self, fragment: int, state: State, batch: Batch
    ) -> tuple[State, Metrics]:
        state, mean, exchanged = self._exchange(fragment, state)

        # The fragment joins the others that are under way, each in its own places.
        replaced = self._shard_map(
            partial(self.outer.replaced, fragment),
            in_specs=(self._shared, self._shared),
            out_specs=self._shared,
        )
        islands = state.islands._replace(
            under_way=replaced(state.islands.under_way, mean)
        )
        state, metrics = self._local_step(state._replace(islands=islands), batch)
        return state, metrics | exchanged

    def _step_of_each(
        self, local: LocalStep, state: State, batch: Batch
    ) -> tuple[State, Metrics]:
        """Every island's step, with metrics [islands]; `local` says over what gradients are summed."""
        gradients = self._gradients(local, state, batch)
        each = state._replace(
            params=state.islands.params,
            optimizer=self.program.on_device(state.optimizer),
            islands=None,
        )
        # The step's number is one for all, the rest has a first axis of islands.
        axes = State._make([None, 0, 0, 0, None, None])
        update = jax.vmap(
            self.program.update,
            in_axes=(axes, 0),
            out_axes=(axes, 0),
            spmd_axis_name=ISLAND,
        )
        after, metrics = update(each, gradients._replace(counted=None))
        islands = state.islands._replace(params=after.params)
        return after._replace(params=state.params, islands=islands), metrics | {
            states.COUNTED: gradients.counted
        }

    def _gradients(self, local: LocalStep, state: State, batch: Batch) -> Gradients:
        """Gradients [islands, ...], each island's at its own weights, with means of losses and what they are over,
        [islands].
        """

        def of_island(
            own: Tree,
            shared: Tree,
            batch: Batch,
            step: jax.Array,
            scale: jax.Array,
        ) -> Gradients:
            masters = self.layout.add_frozen(_first(own), shared)
            gradients = local.gradients(masters, batch, step, scale[0], counts=True)
            return _add_axis(gradients._replace(feedback=None, statistics={}))

        scale = jnp.broadcast_to(factor(state.scale), self.islands)
        per_island = PartitionSpec(ISLAND)
        in_specs = (
            self._own,
            self.layout.shards,
            self.program.rows,
            PartitionSpec(),
            per_island,
        )
        out_specs = Gradients(
            per_island, self._own, measured=per_island, counted=per_island
        )
        mapped = jax.shard_map(
            of_island, mesh=self.program.mesh, in_specs=in_specs, out_specs=out_specs
        )
        return mapped(state.islands.params, state.params, batch, state.step, scale)

    # --- between steps

    @cached_property
    def synchronize(self) -> list[Any]:
        """Returns for each fragment, with delay 0, state -> (state, metrics), the exchange, the outer step and what
        islands go on with.
        """

        def run(fragment: int, state: State) -> tuple[State, Metrics]:
            state, mean, metrics = self._exchange(fragment, state)
            return self._outer_step(fragment, state, mean, 0.0), metrics

        return self._between(run, metrics=True)

    @cached_property
    def apply_outer_update(self) -> list[Any]:
        """Returns for each fragment, with a delay, state -> state, the outer step with what was sent."""
        return self._between(
            lambda f, state: self._outer_step(
                f, state, state.islands.under_way, OWN_SHARE
            ),
            metrics=False,
        )

    @cached_property
    def mend(self) -> Any:
        """state -> state: islands with numbers that are not finite take the shared weights, and the mean of the others'
        moments.
        """

        def run(state: State) -> State:
            def finite(tree: Tree) -> jax.Array:
                return jnp.all(
                    jnp.stack([states.finite(x) for x in jax.tree.leaves(tree)]), axis=0
                )

            optimizer = self.program.on_device(state.optimizer)
            weights = finite(state.islands.params)
            moments = finite(optimizer)
            shared = states.every_island(
                self.layout.only_trained(state.params), self.islands
            )
            params = jax.tree.map(
                partial(states.where_island, weights), state.islands.params, shared
            )
            counted = states.where_island(
                weights, state.islands.counted, jnp.zeros_like(state.islands.counted)
            )
            means = states.every_island(
                jax.tree.map(partial(states.mean_of, moments), optimizer), self.islands
            )
            optimizer = jax.tree.map(
                partial(states.where_island, moments), optimizer, means
            )
            return state._replace(
                optimizer=optimizer,
                islands=state.islands._replace(params=params, counted=counted),
            )

        return jax.jit(
            run, donate_argnums=0, out_shardings=self.program.state_shardings
        )

    def _between(self, run: Any, metrics: bool) -> list[Any]:
        shardings = self.program.state_shardings
        out = (shardings, None) if metrics else shardings
        return [
            jax.jit(partial(run, fragment), donate_argnums=0, out_shardings=out)
            for fragment in range(self.sync.fragments)
        ]

    def _exchange(self, fragment: int, state: State) -> tuple[State, Tree, Metrics]:
        def of_island(shared: Tree, own: Tree, counted: jax.Array) -> Exchanged:
            exchanged = self.outer.exchange(
                fragment, shared, _first(own), _first(counted)
            )
            return exchanged._replace(
                own=_add_axis(exchanged.own), counted=_add_axis(exchanged.counted)
            )

        per_island = PartitionSpec(ISLAND)
        everywhere = PartitionSpec()
        out_specs = Exchanged(
            self._shared, self._own, per_island, everywhere, everywhere
        )
        exchange = self._shard_map(
            of_island,
            in_specs=(self._shared, self._own, per_island),
            out_specs=out_specs,
        )
        before = state.islands
        trained = self.layout.only_trained(state.params)
        exchanged = exchange(trained, before.params, before.counted)
        state = state._replace(
            islands=before._replace(params=exchanged.own, counted=exchanged.counted)
        )
        return (
            state,
            exchanged.mean,
            {"sync_drift": exchanged.drift, "sync_islands": exchanged.islands},
        )

    def _outer_step(
        self,
        fragment: int,
        state: State,
        mean: Tree,
        own_share: float,
    ) -> State:
        """`own_share`: of its own weights that an island keeps, see `outer.OWN_SHARE`."""

        def of_island(
            shared: Tree, momentum: Tree, mean: Tree, own: Tree
        ) -> tuple[Tree, Tree, Tree]:
            shared, momentum = self.outer.step(fragment, shared, momentum, mean)
            return (
                shared,
                momentum,
                _add_axis(self.outer.follow(fragment, shared, _first(own), own_share)),
            )

        outer_step = self._shard_map(
            of_island,
            in_specs=(self._shared, self._shared, self._shared, self._own),
            out_specs=(self._shared, self._shared, self._own),
        )
        trained = self.layout.only_trained(state.params)
        before = state.islands.momentum
        momentum = jax.tree.map(jnp.zeros_like, trained) if before is None else before
        shared, momentum, own = outer_step(
            trained, momentum, mean, state.islands.params
        )
        islands = state.islands._replace(
            params=own, momentum=None if before is None else momentum
        )
        return state._replace(
            params=self.layout.add_frozen(shared, state.params), islands=islands
        )

    # --- helpers

    def is_finite(self, state: State) -> jax.Array:
        """Returns whether training can go on from a state: the shared model is finite, and an island is.

        A broken one is mended when it is sent.
        """
        precision = self.config.precision
        optimizer = self.program.on_device(state.optimizer)
        own = jax.vmap(lambda params, moments: is_finite(params, moments, precision))(
            state.islands.params, optimizer
        )
        return is_finite(
            state.params, (state.islands.momentum, state.islands.under_way), precision
        ) & jnp.any(own)

    @cached_property
    def _shared(self) -> Tree:
        """PartitionSpecs of the shared weights, and of what lies as they do."""
        trained = self.layout.only_trained(self.layout.masters)
        return jax.tree.map(lambda x: x.sharding.spec, trained)

    @cached_property
    def _own(self) -> Tree:
        """PartitionSpecs of the islands' own weights, [islands, ...]."""
        return jax.tree.map(lambda spec: PartitionSpec(ISLAND, *spec), self._shared)

    def _shard_map(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`function` on every device's shards.

        A result computed from islands' own weights may be shared only if it is the same on all of them: JAX cannot
        know, so it does not check. Copies are compared before each save (`survive.health`).
        """
        return jax.shard_map(
            function,
            mesh=self.program.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


class StepOfIslands(TrainStep):
    """Any step of a run whose islands step by themselves, with what is due after it: it waits for the step's number to
    know which.
    """

    def __init__(self, islands: IslandSteps) -> None:
        self._islands = islands
        self._step = self._any
        self.lower = islands.local_step.lower

    def _any(self, state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        taken = int(state.step)
        state, metrics = self._islands.step_after(taken)(state, batch)
        return self._islands.finish(state, metrics, taken + 1)


def _first(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], tree)


def _add_axis(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[None], tree)
