"""The one compiled step: gradients inside a fully manual shard_map, the optimizer on sharded arrays under plain jit.

    state (float32 shards) ──open──► weights ──forward, backward──► gradients ──close──► shards ──Optax──► state
                          all-gather      explicit collectives              reduce-scatter

Every collective up to the shards stands in the source; behind them XLA adds only those of norms.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from meshtrain import gpu_memory
from meshtrain.compat import lines_as_they_are, varying
from meshtrain.config import Config, ConfigError
from meshtrain.config.rows import filled_rows
from meshtrain.given import a_batch, a_config
from meshtrain.hlo import Collectives, collectives
from meshtrain.mesh import DATA, PIPELINE, make_mesh, of_own_rows, own_rows, part_bytes, platform
from meshtrain.model.hooks import AttentionHook, BlockHook, Hooks, LossHook
from meshtrain.optim import learning_rate, make_optimizer, state_shardings, updates_made
from meshtrain.parallel import accumulate, offload
from meshtrain.parallel.forward import Batch, Forward
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.logits import logits
from meshtrain.parallel.pipeline.execute import Executor
from meshtrain.parallel.zero import Zero
from meshtrain.precision import LossScale, factor, initial_scale, next_scale, sound, taken_if, unscaled
from meshtrain.shown import Shown

Tree = Any


class State(NamedTuple):
    """What a run is between two steps; params and optimizer in the live layout of `parallel.layout`."""

    step: Any  # int32: steps taken, which is also the position in the data
    params: Tree  # float32 masters
    optimizer: Tree
    scale: LossScale | None  # float16 only

    def __repr__(self) -> str:
        return f"State(step={self.step}, {len(jax.tree.leaves(self))} arrays, which mt.show draws)"


class Program(Shown):
    """`init`, `train_step`, `eval_step` and `logits` of one config on one mesh, by default that of `make_mesh`.

    `block`, `attention` and `loss` replace the built-in ones, see `model.hooks`. Nothing runs or is allocated yet, but that
    a loss hook is tried on made-up logits where the vocabulary is split. ConfigError for a mesh with fewer devices than the config needs,
    and for a hook whose result is not what it must be.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh | None = None,
        *,
        block: BlockHook | None = None,
        attention: AttentionHook | None = None,
        loss: LossHook | None = None,
    ) -> None:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise ConfigError("JAX_DISABLE_JIT is set, but a step is one compiled program; unset it.")
        config = a_config(config, "mt.Program")
        mesh = make_mesh(config) if mesh is None else mesh
        if dict(mesh.shape) != vars(config.mesh):
            given, asked = (
                " x ".join(f"{axis} {size}" for axis, size in m.items()) for m in (mesh.shape, vars(config.mesh))
            )
            raise ConfigError(
                f"the given mesh is {given}, but the config's is {asked}; make it with mt.make_mesh(config)."
            )
        self.config, self.mesh = config, mesh
        self.hooks = Hooks(block, attention, loss)
        self.hooks.check(config)
        offload.check_memory(config, mesh)
        self.layout = Layout(config, mesh)
        self.zero = Zero(self.layout)
        self.forward = Forward(self.layout, self.zero, platform(mesh), self.hooks)
        self.optimizer = make_optimizer(config, self.layout)
        self.learning_rate = learning_rate(config)
        self.executor = Executor(self.forward, self.layout.table) if self.layout.table else None
        if self.hooks.names:
            # traced, so that what a hook does wrong is told here and now
            jax.eval_shape(self._evaluate, self.layout.masters, self.batch_shapes())

    # --- state

    @cached_property
    def state_shapes(self) -> State:
        """ShapeDtypeStructs of the state, with shardings."""
        params = self.layout.masters
        replicated = NamedSharding(self.mesh, PartitionSpec())
        optimizer = jax.eval_shape(self.optimizer.init, params)
        shardings = self._optimizer_shardings
        if self.config.parallel.offload_optimizer:
            shardings = offload.on_host(optimizer, shardings)
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
        scale = jax.eval_shape(lambda: initial_scale(self.config.precision))
        return State(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
            params=params,
            optimizer=jax.tree.map(place, optimizer, shardings),
            scale=jax.tree.map(lambda x: place(x, replicated), scale),
        )

    @property
    def state_shardings(self) -> State:
        return jax.tree.map(lambda x: x.sharding, self.state_shapes)

    @cached_property
    def _optimizer_shardings(self) -> Tree:
        optimizer = jax.eval_shape(self.optimizer.init, self.layout.masters)
        return state_shardings(self.layout, self.mesh, optimizer)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on one device."""
        return sum(map(part_bytes, jax.tree.leaves(self.state_shapes)))

    def init(self) -> State:
        """The state before the first step: the same numbers on every mesh."""

        def make() -> State:
            params = self.layout.init(jax.random.key(self.config.run.seed))
            return State(
                jnp.zeros((), jnp.int32), params, self.optimizer.init(params), initial_scale(self.config.precision)
            )

        return jax.jit(make, out_shardings=self.state_shardings)()

    # --- batches

    def batch_shapes(self, example: dict[str, Any] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """ShapeDtypeStructs of a global batch [B, T] with the arrays of an example, rows sharded over data."""
        train, rows = self.config.train, filled_rows(self.config)
        shape = (rows, train.sequence_length)
        example = example or {"tokens": None, "labels": None}
        if rows > train.global_batch_size:
            example = {**example, "weights": None}
        dtypes = {name: jnp.float32 if name == "weights" else jnp.int32 for name in example}
        return {n: jax.ShapeDtypeStruct(shape, d, sharding=self.batch_sharding) for n, d in dtypes.items()}

    def place(self, batch: Mapping[str, ArrayLike]) -> dict[str, jax.Array]:
        """A batch as `mt.open_data` gives them onto the devices; with several processes each gives its own rows (`mesh.own_rows`).

        ConfigError for arrays that make no batch, and for rows that the data ranks cannot share.
        """
        arrays, data = a_batch(batch, self.config.model.vocab_size), self.config.mesh.data
        ranks, given = own_rows(self.batch_sharding, data), len(arrays["tokens"])
        each, left = divmod(given, ranks.stop - ranks.start)
        if left:
            raise ConfigError(
                f"a batch of {given} rows cannot be shared by data {ranks.stop - ranks.start}; give a multiple."
            )
        return {name: of_own_rows(self.batch_sharding, x, each * data) for name, x in arrays.items()}

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    # --- the programs

    def gradients(self, params: Tree, batch: Batch, step: jax.Array, scale: jax.Array) -> tuple[jax.Array, Tree]:
        """Mean loss per token, and `scale` times its gradient as float32 shards."""
        specs = self.layout.shards

        def local(masters: Tree, batch: Batch, step: jax.Array, scale: jax.Array) -> tuple[jax.Array, Tree]:
            weights = self.zero.open(masters)
            batches, tokens = self.microbatches(batch)
            key = None
            if self.config.model.dropout:
                key = jax.random.fold_in(jax.random.key(self.config.run.seed + 1), step)
            run = self.executor.train if self.executor else partial(accumulate.accumulate, self.forward)
            loss, gradients = run(weights, batches, key, scale / tokens)
            return _sum_everywhere(loss) / tokens, self.zero.close(gradients)

        in_specs = (specs, PartitionSpec(DATA), PartitionSpec(), PartitionSpec())
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=(PartitionSpec(), specs))
        return mapped(params, batch, step, scale)

    def microbatches(self, batch: Batch) -> tuple[Batch, jax.Array]:
        """This data rank's rows as [microbatches, rows, T] with their global indices, and the tokens that count in the batch."""
        rows, length = batch["tokens"].shape
        m, tensor = self.config.parallel.microbatches, self.config.mesh.tensor
        if rows % m:
            raise ConfigError(f"the {rows} rows of a data rank cannot be cut into {m} microbatches; give a multiple.")
        if self.config.parallel.sequence_parallel and length % tensor:
            raise ConfigError(f"with sequence parallelism tensor {tensor} must divide the {length} tokens of a row.")
        batch = {**batch, "rows": lax.axis_index(DATA) * rows + jnp.arange(rows)}
        cut = jax.tree.map(lambda a: a.reshape((m, -1, *a.shape[1:])), batch)
        if "weights" in batch:
            return cut, jnp.maximum(lax.psum(jnp.sum(batch["weights"]), DATA), 1.0)
        return cut, jnp.float32(self.config.mesh.data * batch["tokens"].size)

    def _train(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        loss, gradients = self.gradients(state.params, batch, state.step, factor(state.scale))
        return self.update(state, loss, gradients)

    def update(self, state: State, loss: jax.Array, gradients: Tree) -> tuple[State, dict[str, jax.Array]]:
        """The state after a step, and its metrics, from the mean loss and what `gradients` made of it, times the loss scale."""
        gradients = unscaled(gradients, state.scale)
        norm = optax.tree.norm(gradients)
        before = state.params, self._on_device(state.optimizer)
        updates, optimizer = self.optimizer.update(gradients, before[1], state.params)
        after = optax.apply_updates(state.params, updates), optimizer
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": self.learning_rate(updates_made(state.optimizer))}
        scale = state.scale
        if scale is not None:
            finite = jnp.isfinite(norm) & jnp.isfinite(loss)
            after, scale = taken_if(finite, after, before), next_scale(scale, finite, self.config.precision)
            metrics |= {"loss_scale": scale.value, "skipped": scale.skipped}
        return State(state.step + 1, *after, scale), metrics

    def _on_device(self, optimizer: Tree) -> Tree:
        """The optimizer state where it is computed with: inside jit, from the host if it lies there."""
        offloaded = self.config.parallel.offload_optimizer
        return offload.move(optimizer, self._optimizer_shardings) if offloaded else optimizer

    def _evaluate(self, params: Tree, batch: Batch) -> jax.Array:
        _refuse_state(params)

        def local(masters: Tree, batch: Batch) -> jax.Array:
            weights = self.zero.open(masters)
            batches, tokens = self.microbatches(batch)
            run = self.executor.evaluate if self.executor else partial(accumulate.evaluate, self.forward)
            return _sum_everywhere(run(weights, batches)) / tokens

        specs = (self.layout.shards, PartitionSpec(DATA))
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec())(params, batch)

    @cached_property
    def train_step(self) -> "TrainStep":
        """(state, batch) -> (state, metrics); the old state's memory is reused, so go on with the new one."""
        options, shardings = compiler_options(self.mesh), (self.state_shardings, None)
        return TrainStep(jax.jit(self._train, donate_argnums=0, out_shardings=shardings, compiler_options=options))

    @cached_property
    def eval_step(self) -> Callable[[Tree, Batch], jax.Array]:
        """(params, batch) -> mean loss per token."""
        return jax.jit(self._evaluate)

    @cached_property
    def logits(self) -> Callable[[Tree, jax.Array], jax.Array]:
        """(params, tokens int32 [B, T]) -> logits float32 [B, T, vocab_size], rows over data, which must divide B."""

        def local(masters: Tree, tokens: jax.Array) -> jax.Array:
            return logits(self.forward, self.zero.open(masters), {"tokens": tokens, "rows": jnp.arange(len(tokens))})

        def run(params: Tree, tokens: jax.Array) -> jax.Array:
            _refuse_state(params)
            shares = PartitionSpec(DATA, None, self.forward.collectives.vocabulary)
            specs = (self.layout.shards, PartitionSpec(DATA))
            mapped = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=shares)
            return mapped(params, tokens)[..., : self.config.model.vocab_size]

        return jax.jit(run, out_shardings=self.batch_sharding)

    @cached_property
    def sound(self) -> Callable[[State], jax.Array]:
        """Whether a state is one to train on from: finite, all of it."""
        precision = self.config.precision
        return jax.jit(lambda state: sound(state.params, self._on_device(state.optimizer), precision))

    def check_offload(self, state: State, batch: Batch) -> float:
        """Relative difference between the gradients with and without offloaded activations, on a real batch.

        An open XLA report has offloaded scan residuals give wrong gradients on GPUs, silently; hence this.
        """
        parallel = dataclasses.replace(self.config.parallel, remat="full", remat_keep=(), remat_offload=())
        plain = Program(dataclasses.replace(self.config, parallel=parallel), self.mesh, **vars(self.hooks))

        def difference(params: Tree, batch: Batch, step: jax.Array) -> jax.Array:
            one = jnp.float32(1.0)
            mine, theirs = (p.gradients(params, batch, step, one)[1] for p in (self, plain))
            return offload.relative_difference(mine, theirs)

        return float(jax.jit(difference)(state.params, batch, state.step))

    # --- the compiled step, read

    def lower(self, batch: Mapping[str, Any] | None = None) -> jax.stages.Lowered:
        """The train step lowered on abstract arrays, for devices that may only be described, and a batch like this one."""
        return self.train_step.lower(self.state_shapes, batch or self.batch_shapes())

    def collectives(self, batch: Mapping[str, Any] | None = None) -> Collectives:
        """What a step sends, read from the program compiled for a batch like this one (default: `batch_shapes`). Compiles it."""
        with lines_as_they_are():
            compiled = self.lower(batch).compile()
        return collectives(compiled, self.mesh, self.busy)

    @property
    def busy(self) -> float:
        """How often what stands in conditionals of the compiled step is done: on CPU idle stages skip a tick's work, elsewhere none does."""
        table = self.layout.table
        return table.busy if table and platform(self.mesh) == "cpu" else 1.0


class TrainStep:
    """A jitted train step. A state that an earlier call has used up is refused, since JAX's CPU devices end the process on it."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.lower: Callable[..., jax.stages.Lowered] = step.lower

    def __call__(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        count = state.step
        if isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer) and count.is_deleted():
            raise ConfigError("this state was used up by an earlier train_step; go on with the state that it returned.")
        return self._step(state, batch)


def _refuse_state(params: Tree) -> None:
    if isinstance(params, State):
        raise ConfigError("the weights alone are wanted here: give state.params in place of the state.")


def compiler_options(mesh: Mesh) -> dict[str, int]:
    """What XLA should be told besides: on GPUs, how much memory there is, and that a message between stages may be under way during a
    layer's own collectives.

    By default one collective is under way at a time, so that no message could travel during a layer with tensor parallelism, whose
    backward alone may have three: a cotangent's and two gathers that only the weights' gradients need.
    """
    if platform(mesh) != "gpu":
        return {}
    options = {"xla_gpu_memory_limit_slop_factor": gpu_memory.slop_factor()}
    if mesh.shape[PIPELINE] > 1:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 4
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given}


def _sum_everywhere(loss: jax.Array) -> jax.Array:
    axes = tuple(varying(loss))
    return lax.psum(loss, axes) if axes else loss
