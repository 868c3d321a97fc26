"""The compiled programs of a run whose islands take steps by themselves (`parallel.sync`), and which of them is due after which step.

    steps taken       program                                           sent across islands
    < start           gradients summed over all islands                 a shard, every step
    then              each island for itself                            nothing
    fragment due      + delay 0: bring together, a program of its own   one all-reduce of the fragment's shard
                      + delay d: the next step sends beside its work    the same
                        after d steps: take in                          nothing
    island broken     mend: moments from the other islands              its optimizer state, once

JAX runs the programs of a device one after the other, so that with a delay the all-reduce stands in the program of a step, where XLA may
run it behind that step's compute: nothing in forward and backward waits for it.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshtrain.mesh import ISLAND, platform
from meshtrain.parallel.forward import Batch
from meshtrain.parallel.local import Local
from meshtrain.parallel.sync import states, when
from meshtrain.parallel.sync.outer import KEPT, Outer
from meshtrain.precision import factor, sound

if TYPE_CHECKING:
    from meshtrain.step import Program, State, TrainStep

Tree = Any
Metrics = dict[str, jax.Array]


class IslandSteps:
    """The programs of `program`, whose config has parallel.sync.every."""

    def __init__(self, program: "Program") -> None:
        self.program, self.config, self.layout = program, program.config, program.layout
        self.sync, self.islands = program.config.parallel.sync, program.config.mesh.islands
        self.outer = Outer(program.layout)
        self._compiled: dict[str, jax.stages.Compiled] = {}

    # --- which program when

    def step_after(self, taken: int) -> "TrainStep":
        """The program of the step after `taken` steps."""
        if when.synchronous(self.sync, taken):
            return self.synchronous
        fragment = when.due(self.sync, taken) if self.sync.delay else None
        return self.alone if fragment is None else self.sending[fragment]

    def finish(self, state: "State", metrics: Mapping[str, Any], taken: int) -> tuple["State", dict[str, Any]]:
        """What is due after `taken` steps, the last of which gave `metrics`. Waits for an exchange, to see whether an island is broken."""
        found = dict(metrics)
        if not self.sync.delay and (fragment := when.due(self.sync, taken)) is not None:
            state, more = self._run(f"bring together {fragment}", self.bring_together[fragment], state)
            found |= more
        if "sync_islands" in found:
            sent = when.due(self.sync, taken - bool(self.sync.delay))
            assert sent is not None
            found["sync_bytes"] = self.outer.sent_bytes(sent)
            if 0 < int(found["sync_islands"]) < self.islands:
                state = self._run("mend", self.mend, state)
        if self.sync.delay and (fragment := when.arrives(self.sync, taken)) is not None:
            state = self._run(f"take in {fragment}", self.take_in[fragment], state)
        return state, found

    def prepare(self) -> None:
        """Compiles what is done between steps, but for what a broken island needs, so that no exchange waits for it."""
        fragments = range(self.sync.fragments)
        name, jitted = ("take in", self.take_in) if self.sync.delay else ("bring together", self.bring_together)
        for fragment in fragments:
            self._lookup(f"{name} {fragment}", jitted[fragment])

    def _run(self, name: str, jitted: Any, state: "State") -> Any:
        return self._lookup(name, jitted)(state)

    def _lookup(self, name: str, jitted: Any) -> jax.stages.Compiled:
        if name not in self._compiled:
            self._compiled[name] = jitted.lower(self.program.state_shapes).compile()
        return self._compiled[name]

    # --- steps

    @cached_property
    def synchronous(self) -> "TrainStep":
        return self._step(self._synchronous)

    @cached_property
    def alone(self) -> "TrainStep":
        return self._step(self._alone)

    @cached_property
    def sending(self) -> list["TrainStep"]:
        """By fragment: the step that also sends what islands had before it."""
        return [self._step(partial(self._sending, fragment)) for fragment in range(self.sync.fragments)]

    def _step(self, function: Any) -> "TrainStep":
        return self.program.jitted_step(function)

    @cached_property
    def _inside(self) -> Local:
        """Losses and gradients of one island, summed over the axis `data` alone."""
        return Local(self.layout, platform(self.program.mesh), self.program.hooks, across=False)

    def _alone(self, state: "State", batch: Batch) -> tuple["State", Metrics]:
        return self._stepped(self._inside, state, batch)

    def _synchronous(self, state: "State", batch: Batch) -> tuple["State", Metrics]:
        """All islands do the same, so that each has the shared model."""
        after, metrics = self._stepped(self.program.local, state, batch)
        shared = self._on_devices(lambda own: own, ("own",), ("shared",), after.islands.params)[0]
        # one number for all
        metrics = jax.tree.map(lambda x: jnp.max(x, 0), metrics)
        return after._replace(params=self.layout.with_frozen(shared, state.params)), metrics

    def _sending(self, fragment: int, state: "State", batch: Batch) -> tuple["State", Metrics]:
        state, more = self._exchanged(fragment, state)
        state, metrics = self._alone(state, batch)
        return state, metrics | more

    def _stepped(self, summed: Local, state: "State", batch: Batch) -> tuple["State", Metrics]:
        """Every island's step, with metrics [islands]; `summed` says over what."""
        (loss, measured), gradients = self._gradients(summed, state, batch)
        one = state._replace(
            params=state.islands.params, optimizer=self.program.on_device(state.optimizer), islands=None
        )
        each = None if one.scale is None else 0
        of_island: Any = one._replace(step=None, params=0, optimizer=0, scale=each, reduce=None)  # type: ignore[arg-type]
        update = jax.vmap(
            self.program.updated, in_axes=(of_island, 0, 0), out_axes=(of_island, 0), spmd_axis_name=ISLAND
        )
        after, metrics = update(one, loss, gradients)
        islands = state.islands._replace(params=after.params)
        return after._replace(params=state.params, islands=islands), metrics | measured

    def _gradients(self, summed: Local, state: "State", batch: Batch) -> tuple[Any, Tree]:
        """Means of the losses [islands] and gradients [islands, ...], each island's at its own weights."""

        def local(own: Tree, shared: Tree, batch: Batch, step: jax.Array, scale: jax.Array) -> Any:
            masters = self.layout.with_frozen(_first(own), shared)
            means, closed = summed.gradients(masters, batch, step, scale[0])
            return _as_island(means), _as_island(jax.tree.leaves(closed.shards))

        scale = jnp.broadcast_to(factor(state.scale), self.islands)
        specs = [shape.sharding.spec for shape in jax.tree.leaves(self._shapes.params)]
        own = jax.tree.unflatten(jax.tree.structure(self._shapes.params), specs)
        in_specs = (own, self.layout.shards, self.program.rows, PartitionSpec(), PartitionSpec(ISLAND))
        mapped = jax.shard_map(
            local, mesh=self.program.mesh, in_specs=in_specs, out_specs=(PartitionSpec(ISLAND), specs)
        )
        means, gradients = mapped(state.islands.params, state.params, batch, state.step, scale)
        return means, jax.tree.unflatten(jax.tree.structure(self._shapes.params), gradients)

    # --- between steps

    @cached_property
    def bring_together(self) -> list[Any]:
        """By fragment, delay 0: state -> (state, metrics), the exchange, the outer step and what islands go on with."""

        def run(fragment: int, state: "State") -> tuple["State", Metrics]:
            state, mean, metrics = self._exchange(fragment, state)
            return self._outer_step(fragment, state, mean, 0.0), metrics

        return self._between(run, metrics=True)

    @cached_property
    def take_in(self) -> list[Any]:
        """By fragment, with a delay: state -> state, the outer step with what was sent."""
        return self._between(lambda f, state: self._outer_step(f, state, state.islands.under_way, KEPT), metrics=False)

    @cached_property
    def mend(self) -> Any:
        """state -> state: islands with numbers that are not finite take the shared weights, and the mean of the others' moments."""

        def run(state: "State") -> "State":
            def finite(tree: Tree) -> jax.Array:
                leaves = [x.reshape(self.islands, -1) for x in jax.tree.leaves(tree)]
                return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x), axis=1) for x in leaves]), axis=0)

            optimizer = self.program.on_device(state.optimizer)
            weights, moments = finite(state.islands.params), finite(optimizer)
            shared = states.every_island(self.layout.only_trained(state.params), self.islands)
            params = jax.tree.map(partial(_where, weights), state.islands.params, shared)
            optimizer = jax.tree.map(lambda x: _where(moments, x, _mean_of(moments, x)), optimizer)
            return state._replace(optimizer=optimizer, islands=state.islands._replace(params=params))

        return jax.jit(run, donate_argnums=0, out_shardings=self.program.state_shardings)

    def _between(self, run: Any, metrics: bool) -> list[Any]:
        shardings = self.program.state_shardings
        out = (shardings, None) if metrics else shardings
        return [
            jax.jit(partial(run, fragment), donate_argnums=0, out_shardings=out)
            for fragment in range(self.sync.fragments)
        ]

    def _exchange(self, fragment: int, state: "State") -> tuple["State", Tree, Metrics]:
        def local(shared: Tree, own: Tree) -> tuple[Tree, ...]:
            sent = self.outer.exchange(fragment, shared, own)
            return sent.mean, sent.own, sent.drift, sent.islands

        trained = self.layout.only_trained(state.params)
        out = ("shared", "own", "scalar", "scalar")
        mean, own, drift, islands = self._on_devices(local, ("shared", "own"), out, trained, state.islands.params)
        state = state._replace(islands=state.islands._replace(params=own))
        return state, mean, {"sync_drift": drift, "sync_islands": islands}

    def _exchanged(self, fragment: int, state: "State") -> tuple["State", Metrics]:
        """What is sent goes to what is under way from before, each fragment in its own places."""
        state, mean, metrics = self._exchange(fragment, state)

        def local(under_way: Tree, mean: Tree) -> tuple[Tree]:
            return (self.outer.replaced(fragment, under_way, mean),)

        (under_way,) = self._on_devices(local, ("shared", "shared"), ("shared",), state.islands.under_way, mean)
        return state._replace(islands=state.islands._replace(under_way=under_way)), metrics

    def _outer_step(self, fragment: int, state: "State", mean: Tree, kept: float) -> "State":
        trained, before = self.layout.only_trained(state.params), state.islands.momentum

        def local(shared: Tree, momentum: Tree, mean: Tree, own: Tree) -> tuple[Tree, Tree, Tree]:
            shared, momentum = self.outer.step(fragment, shared, momentum, mean)
            return shared, momentum, self.outer.follow(fragment, shared, own, kept)

        momentum = jax.tree.map(jnp.zeros_like, trained) if before is None else before
        shared, momentum, own = self._on_devices(
            local, ("shared", "shared", "shared", "own"), ("shared", "shared", "own"),
            trained, momentum, mean, state.islands.params,
        )  # fmt: skip
        islands = state.islands._replace(params=own, momentum=None if before is None else momentum)
        return state._replace(params=self.layout.with_frozen(shared, state.params), islands=islands)

    # --- helpers

    def sound(self, state: "State") -> jax.Array:
        """Whether a state is one to train on from: the shared model is sound, and an island is. A broken one is mended when it is sent."""
        precision, optimizer = self.config.precision, self.program.on_device(state.optimizer)
        own = jax.vmap(lambda params, moments: sound(params, moments, precision))(state.islands.params, optimizer)
        return sound(state.params, (state.islands.momentum, state.islands.under_way), precision) & jnp.any(own)

    @cached_property
    def _shapes(self) -> states.Islands:
        return states.shapes(self.config, self.layout.only_trained(self.layout.masters))

    def _on_devices(self, function: Any, given: tuple[str, ...], made: tuple[str, ...], *trees: Tree) -> tuple:
        """`function` on every device's shards. `own` ones have the axis of islands in front, which it does not see.

        What it makes of `own` weights may be `shared` only if it is the same on all islands: JAX cannot know, so nothing checks that.
        """
        trained = self.layout.only_trained(self.layout.masters)
        specs = {
            "shared": jax.tree.map(lambda x: x.sharding.spec, trained),
            "own": jax.tree.map(lambda x: x.sharding.spec, self._shapes.params),
            "scalar": PartitionSpec(),
        }

        def local(*trees: Tree) -> tuple:
            found = function(*(_first(x) if kind == "own" else x for kind, x in zip(given, trees, strict=True)))
            found = found if len(made) > 1 or isinstance(found, tuple) else (found,)
            return tuple(_as_island(x) if kind == "own" else x for kind, x in zip(made, found, strict=True))

        of = lambda kinds: tuple(specs[kind] for kind in kinds)  # noqa: E731
        return jax.shard_map(
            local, mesh=self.program.mesh, in_specs=of(given), out_specs=of(made), check_vma=False
        )(*trees)  # fmt: skip


def _first(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], tree)


def _as_island(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[None], tree)


def _where(sound: jax.Array, x: jax.Array, other: jax.Array) -> jax.Array:
    """By island."""
    return jnp.where(sound.reshape(-1, *[1] * (x.ndim - 1)), x, other)


def _mean_of(sound: jax.Array, x: jax.Array) -> jax.Array:
    """The mean over the sound islands, for each island; of counts the largest."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.broadcast_to(jnp.max(_where(sound, x, jnp.zeros_like(x)), 0), x.shape)
    total = jnp.sum(_where(sound, x, jnp.zeros_like(x)), 0)
    return jnp.broadcast_to(total / jnp.maximum(jnp.sum(sound), 1), x.shape).astype(x.dtype)
