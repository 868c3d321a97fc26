"""The one compiled step: gradients inside a fully manual shard_map, the optimizer on sharded arrays under plain jit.

    state, float32 shards ──gather_params──► weights ──forward, backward──► gradients ──reduce_grads──► shards ──► state
                              all-gather         explicit collectives               reduce-scatter       Optax

Every collective up to the shards stands in the source; behind them XLA adds only those of norms.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from meshtrain import xla
from meshtrain.compat import lines_as_they_are
from meshtrain.config import Config, ConfigError
from meshtrain.config.check import check_length
from meshtrain.config.follow import as_run_on, padded_batch_size
from meshtrain.families import FAMILIES
from meshtrain.inputs import (
    FLOATS,
    LABELS,
    PATCHES,
    TOKENS,
    WEIGHTS,
    a_batch,
    a_config,
    inputs,
    needed,
    row_shape,
)
from meshtrain.mesh import (
    CONTEXT,
    compiler_options,
    make_mesh,
    own_part,
    part_bytes,
    place_own_part,
    platform,
)
from meshtrain.model.hooks import AttentionHook, BlockHook, Hooks, LossHook
from meshtrain.optim import (
    first_values,
    learning_rate,
    load_metrics,
    make_optimizer,
    state_shardings,
    updates_made,
)
from meshtrain.parallel import offload
from meshtrain.parallel.forward import Batch
from meshtrain.parallel.parallelize import Gradients, LocalStep, make_layout
from meshtrain.parallel.state import State as State
from meshtrain.parallel.state import Steps
from meshtrain.parallel.state import TrainStep as TrainStep
from meshtrain.precision import (
    LossScale,
    factor,
    initial_scale,
    next_scale,
    taken_if,
    unscaled,
)
from meshtrain.registry import Shown

if TYPE_CHECKING:
    from meshtrain.hlo import CompiledCollectives
    from meshtrain.parallel.reduce.feedback import FeedbackState

Metrics = dict[str, jax.Array]
Tree = Any


class Program(Shown):
    """`init`, `train_step`, `eval_step` and `logits` of one config on one mesh, by default that of `make_mesh`.

    `block`, `attention` and `loss` replace the built-in ones, see `model.hooks`. Nothing runs or is allocated yet, but
    that a loss hook is tried on made-up logits where the vocabulary is split. ConfigError for a mesh with fewer devices
    than the config needs, and for a hook whose result is not what it must be. `masters` False: a program that trains
    nothing, whose weights are held in the dtype that computes.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh | None = None,
        *,
        block: BlockHook | None = None,
        attention: AttentionHook | None = None,
        loss: LossHook | None = None,
        masters: bool = True,
    ) -> None:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise ConfigError(
                "JAX_DISABLE_JIT is set, but a step is one compiled program; unset it."
            )
        config = a_config(config, "mt.Program")
        mesh = make_mesh(config) if mesh is None else mesh
        if dict(mesh.shape) != config.mesh.shape:
            given, asked = (
                " x ".join(f"{axis} {size}" for axis, size in m.items())
                for m in (mesh.shape, config.mesh.shape)
            )
            raise ConfigError(
                f"the given mesh is {given}, but the config's is {asked}; make it with mt.make_mesh(config)."
            )
        config = as_run_on(platform(mesh), config)
        self.config = config
        self.mesh = mesh
        self.rows = PartitionSpec(
            config.mesh.data_axes, *([CONTEXT] if config.mesh.context > 1 else [])
        )
        self.of_images = FAMILIES[config.model.family].images
        self.hooks = Hooks.of(config, block=block, attention=attention, loss=loss)
        self.hooks.check(config)
        offload.check_memory(config, mesh)
        self.layout = make_layout(config, mesh, masters)
        self.local = LocalStep(self.layout, platform(mesh), self.hooks)
        self.optimizer = make_optimizer(config, self.layout)
        self.learning_rate = learning_rate(config)
        if self.hooks.names:
            # Traced, so that what a hook does wrong is told here and now, without a hundred frames of JAX
            try:
                jax.eval_shape(self._evaluate, self.layout.masters, self.batch_shapes())
            except ConfigError as error:
                raise error.with_traceback(None) from None

    @cached_property
    def steps(self) -> Steps:
        if not self.config.parallel.sync.every:
            return Steps(self)
        from meshtrain.parallel.sync.steps import IslandSteps

        return IslandSteps(self)

    # --- state

    @cached_property
    def state_shapes(self) -> State:
        """ShapeDtypeStructs of the state, with shardings."""
        params = self.layout.masters
        replicated = NamedSharding(self.mesh, PartitionSpec())
        optimizer = jax.eval_shape(
            self.optimizer.init, self.layout.only_trained(params)
        )
        shardings = state_shardings(self.layout, self.mesh, optimizer)
        if self.config.parallel.offload_optimizer:
            shardings = offload.host_shardings(optimizer, shardings)
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        scale = jax.eval_shape(lambda: initial_scale(self.config.precision))
        feedback = self.local.zero.feedback
        state = State(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
            params=params,
            optimizer=jax.tree.map(place, optimizer, shardings),
            scale=jax.tree.map(lambda x: place(x, replicated), scale),
            reduce=feedback and feedback.shapes,
        )
        return self.steps.shapes(state)

    @property
    def state_shardings(self) -> State:
        return jax.tree.map(lambda x: x.sharding, self.state_shapes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on one device."""
        return sum(map(part_bytes, jax.tree.leaves(self.state_shapes)))

    def init(self) -> State:
        """The state before the first step: the same numbers on every mesh."""

        def make() -> State:
            params = self.layout.init(
                jax.random.key(self.config.run.seed), first_values(self.config)
            )
            optimizer = self.optimizer.init(self.layout.only_trained(params))
            scale = self._initial_scale()
            feedback = self.local.zero.feedback
            compression = feedback and feedback.init(self.feedback_key)
            state = State(
                jnp.zeros((), jnp.int32), params, optimizer, scale, compression
            )
            return self.steps.begin(state)

        return jax.jit(make, out_shardings=self.state_shardings)()

    def init_scale(self) -> LossScale | None:
        """The loss scale before the first step.

        Compiled, so that no two of its numbers share a buffer, which a step would use up twice.
        """
        return jax.jit(self._initial_scale, out_shardings=self.state_shardings.scale)()

    def _initial_scale(self) -> LossScale | None:
        return self.steps.every_island(initial_scale(self.config.precision))

    @property
    def feedback_key(self) -> jax.Array:
        """Returns the key for compression's first state; run.seed is the weights' seed, the next one dropout's."""
        return jax.random.key(self.config.run.seed + 2)

    def from_weights(self, state: State, params: Tree) -> State:
        """A state before the first step with other weights, which all islands begin from."""
        return self.steps.begin_from(state._replace(params=params))

    # --- batches

    def batch_shapes(
        self, example: dict[str, Any] | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """ShapeDtypeStructs of a global batch with the arrays of an example, rows sharded over data, and tokens over
        context.
        """
        train = self.config.train
        rows = padded_batch_size(self.config)
        read = PATCHES if self.of_images else TOKENS
        example = example or dict.fromkeys((read, LABELS, *needed(self.config)))
        if rows > train.global_batch_size:
            example = {**example, WEIGHTS: None}

        def array(name: str) -> jax.ShapeDtypeStruct:
            dtype = jnp.float32 if name in FLOATS else jnp.int32
            return jax.ShapeDtypeStruct(
                (rows, *row_shape(name, self.config)),
                dtype,
                sharding=self.batch_sharding,
            )

        return {name: array(name) for name in example}

    def place(self, batch: Mapping[str, ArrayLike]) -> Batch:
        """A batch as `mt.open_data` gives them onto the devices; with several processes each gives its own part (see
        `part`).

        ConfigError for arrays that make no batch, and for rows that the data ranks cannot share.
        """
        arrays = a_batch(batch, self.config)
        mesh = self.config.mesh
        ranks, *parts = (
            own.stop - own.start
            for own in own_part(self.batch_sharding, (mesh.data, mesh.context))
        )
        rows, length = inputs(arrays).shape[:2]
        if rows % ranks:
            raise ConfigError(
                f"a batch of {rows} rows cannot be shared by data {ranks}; give a multiple."
            )
        shape = (
            rows // ranks * mesh.data,
            *(length * mesh.context // own for own in parts),
        )
        if (order := self.column_order(shape[-1])) is not None:
            own = order[own_part(self.batch_sharding, shape)[1]]
            rank_of = np.argsort(np.argsort(own))
            arrays = {name: x[:, rank_of] for name, x in arrays.items()}
        return {
            name: place_own_part(self.batch_sharding, x, shape + x.shape[len(shape) :])
            for name, x in arrays.items()
        }

    def part(self, shape: tuple[int, ...]) -> tuple[slice, np.ndarray | None]:
        """Returns the rows of a global batch [rows, T] that this process gives, and the places of a row, in their
        order; None: all.
        """
        rows, *columns = own_part(self.batch_sharding, shape)
        order = self.column_order(shape[1])
        if order is None:
            own = None
        else:
            own = np.sort(order[columns[0]])
        return rows, None if own is None or len(own) == shape[1] else own

    def column_order(self, length: int) -> np.ndarray | None:
        """The position of each place of a row on the devices, where context splits rows; ConfigError for a length that
        it cannot split.
        """
        if self.config.mesh.context == 1:
            return None
        check_length(self.config, length)
        return self.local.forward.collectives.column_order(length)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding of a batch's arrays; `place` also sees to `column_order`."""
        return NamedSharding(self.mesh, self.rows)

    # --- the programs

    def gradients(
        self,
        params: Tree,
        batch: Batch,
        step: jax.Array,
        scale: jax.Array,
        feedback: "FeedbackState | None" = None,
    ) -> tuple[jax.Array, Tree]:
        """Mean loss per token (dpo: per pair; images: per image), and `scale` times its gradient as float32 shards;
        None of what is frozen.

        feedback: `State.reduce`, what compression kept of the last step; by default what it has before the first one.
        """
        if self.local.zero.feedback is not None and feedback is None:
            feedback = self.local.zero.feedback.init(self.feedback_key)
        gradients = self._gradients(params, batch, step, scale, feedback)
        return gradients.loss, gradients.shards

    @cached_property
    def _gradients(self) -> Callable[..., Gradients]:
        """`LocalStep.gradients` on the mesh."""
        everywhere = PartitionSpec()
        feedback = self.local.zero.feedback
        specs = feedback and feedback.specs
        maxima = self.local.qk_clip and self.local.qk_clip.spec
        shards = jax.tree.map(
            lambda x: x.sharding.spec, self.layout.only_trained(self.layout.masters)
        )
        mapped = jax.shard_map(
            self.local.gradients,
            mesh=self.mesh,
            in_specs=(self.layout.shards, self.rows, everywhere, everywhere, specs),
            out_specs=Gradients(
                everywhere, shards, specs, everywhere, everywhere, maxima=maxima
            ),
        )
        if (add_ahead := self.local.add_ahead) is None:
            return mapped

        def gradients(params: Tree, batch: Batch, *more: Any) -> Gradients:
            order = self.column_order(inputs(batch).shape[1])
            return mapped(params, add_ahead(batch, order, self.config.model.mtp), *more)

        return gradients

    def _train(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        gradients = self._gradients(
            state.params, batch, state.step, factor(state.scale), state.reduce
        )
        optimizer = self.on_device(state.optimizer)
        return self.update(state._replace(optimizer=optimizer), gradients)

    @jax.named_scope(xla.UPDATE)
    def update(self, state: State, gradients: Gradients) -> tuple[State, Metrics]:
        """The state after a step, and its metrics; `state.optimizer` is on the devices."""
        divided = unscaled(gradients.shards, state.scale)
        # Counts are not scaled.
        grads = self.layout.map(
            lambda weight, g, count: count if weight.counts else g,
            divided,
            gradients.shards,
        )
        norm = optax.tree.norm(self.layout.only_updated(grads))
        trained = self.layout.only_trained(state.params)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, trained)
        params, clipped = self.local.clip(
            optax.apply_updates(trained, updates), gradients
        )
        after = params, optimizer, gradients.feedback
        metrics = {
            "loss": gradients.loss,
            "grad_norm": norm,
            "learning_rate": self.learning_rate(updates_made(state.optimizer)),
        }
        scale = state.scale
        if scale is not None:
            left_out = gradients.statistics.get("residual_norm", 0.0)
            finite = (
                jnp.isfinite(norm)
                & jnp.isfinite(gradients.loss)
                & jnp.isfinite(left_out)
            )
            before = trained, state.optimizer, state.reduce
            after = taken_if(finite, after, before)
            scale = next_scale(scale, finite, self.config.precision)
            metrics |= {"loss_scale": scale.value, "skipped": scale.skipped}
        params = self.layout.add_frozen(after[0], state.params)
        metrics |= (
            gradients.statistics
            | clipped
            | gradients.measured
            | load_metrics(self.config, self.layout, gradients.shards)
        )
        return State(state.step + 1, params, after[1], scale, after[2]), metrics

    def on_device(self, optimizer: Tree) -> Tree:
        """The optimizer state where it is computed with: inside jit, from the host if it lies there."""
        if not self.config.parallel.offload_optimizer:
            return optimizer
        shardings = jax.tree.map(
            lambda x: x.sharding.with_memory_kind("device"), self.state_shapes.optimizer
        )
        return offload.move(optimizer, shardings)

    def _evaluate(self, params: Tree, batch: Batch) -> jax.Array:
        return self._map_batch(self.local.loss, params, batch)

    def _map_batch(
        self,
        function: Callable[..., Any],
        params: Tree,
        batch: Batch,
    ) -> Any:
        """Returns the result of `function(masters, batch)`, the same everywhere."""
        _refuse_state(params)
        specs = (self.layout.shards, self.rows)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec()
        )
        return mapped(params, batch)

    @cached_property
    def train_step(self) -> TrainStep:
        """(state, batch) -> (state, metrics); the old state's memory is reused, so go on with the new one."""
        return self.steps.any_step(self.jitted_step(self._train))

    def step_after(self, taken: int) -> TrainStep:
        """Returns the step after `taken` steps, which `steps.finish` must follow."""
        return self.steps.step_after(taken)

    def jitted_step(self, function: Callable[..., Any]) -> TrainStep:
        options = compiler_options(
            self.mesh, self.local.zero.overlaps_reduce_scatter, self.local.sends
        )
        shardings = self.state_shardings, None
        return TrainStep(
            jax.jit(
                function,
                donate_argnums=0,
                out_shardings=shardings,
                compiler_options=options,
            )
        )

    @cached_property
    def eval_step(self) -> Callable[[Tree, Batch], jax.Array]:
        """(params, batch) -> mean loss per token (dpo: per pair; images: per image), without label smoothing and
        z-loss.
        """
        return jax.jit(self._evaluate)

    @cached_property
    def eval_metrics(self) -> Callable[[Tree, Batch], Metrics]:
        """(params, batch) -> the means that a row has of an evaluation, by their names."""
        return jax.jit(partial(self._map_batch, self.local.evaluated))

    @cached_property
    def row_gaps(self) -> Callable[[Tree, Batch], jax.Array]:
        """(params, batch of answers) -> `parallel.forward.ROW_GAPS`."""
        return jax.jit(partial(self._map_batch, self.local.row_gaps))

    @cached_property
    def logits(self) -> Callable[[Tree, jax.Array], jax.Array]:
        """(params, tokens int32 [B, T]) -> logits float32 [B, T, vocab_size], rows over data, which must divide B.

        For images (params, patches float32 [B, N, P]) -> [B, 1, vocab_size]."""
        from meshtrain.parallel.logits import logits

        name = PATCHES if self.of_images else TOKENS

        def local(masters: Tree, tokens: jax.Array) -> jax.Array:
            batch = {name: tokens, "rows": jnp.arange(len(tokens))}
            return logits(
                self.local.forward, self.local.zero.gather_params(masters), batch
            )

        def run(params: Tree, tokens: jax.Array) -> jax.Array:
            _refuse_state(params)
            rows, parts = (*self.rows, None)[:2]
            specs = (self.layout.shards, self.rows)
            shards = PartitionSpec(
                rows, parts, self.local.forward.collectives.vocabulary
            )
            mapped = jax.shard_map(
                local, mesh=self.mesh, in_specs=specs, out_specs=shards
            )
            order = self.column_order(tokens.shape[1])
            logits = mapped(params, tokens if order is None else tokens[:, order])
            if order is not None:
                logits = logits[:, np.argsort(order)]
            return logits[..., : self.config.model.vocab_size]

        return jax.jit(
            run,
            out_shardings=NamedSharding(
                self.mesh, PartitionSpec(self.config.mesh.data_axes)
            ),
        )

    @cached_property
    def is_finite(self) -> Callable[[State], jax.Array]:
        """(state) -> whether training can go on from it."""
        return jax.jit(self.steps.is_finite)

    def check_offload(self, state: State, batch: Batch) -> float:
        """Relative difference between the gradients with and without offloaded activations, on a real batch, since an
        open XLA report has offloaded scan residuals give wrong gradients on GPUs, silently.
        """
        parallel = dataclasses.replace(
            self.config.parallel, remat="full", remat_keep=(), remat_offload=()
        )
        plain = Program(
            dataclasses.replace(self.config, parallel=parallel),
            self.mesh,
            **vars(self.hooks),
        )

        def difference(params: Tree, batch: Batch, step: jax.Array) -> jax.Array:
            one = jnp.float32(1.0)
            mine, theirs = (
                p.gradients(params, batch, step, one)[1] for p in (self, plain)
            )
            return offload.relative_difference(mine, theirs)

        return float(jax.jit(difference)(state.params, batch, state.step))

    # --- the compiled step, read

    def lower(self, batch: Mapping[str, Any] | None = None) -> jax.stages.Lowered:
        """The train step lowered on abstract arrays, for devices that may only be described, and a batch like this
        one.
        """
        return self.train_step.lower(self.state_shapes, batch or self.batch_shapes())

    def collectives(
        self, batch: Mapping[str, Any] | None = None
    ) -> "CompiledCollectives":
        """Returns the collectives of a step, read from the program compiled for a batch like this one (default:
        `batch_shapes`).

        Compiles it.
        """
        with lines_as_they_are():
            compiled = self.lower(batch).compile()
        return self.read_collectives(compiled)

    def read_collectives(self, compiled: jax.stages.Compiled) -> "CompiledCollectives":
        """Returns the collectives of a compiled step."""
        from meshtrain.hlo import collectives

        return collectives(compiled, self.mesh, self.taken)

    def taken(self, source: str) -> float:
        """Returns in which share of the clocks a conditional is taken, by the source of an operation in it."""
        return self.local.forward.taken(source)


def _refuse_state(params: Tree) -> None:
    if isinstance(params, State):
        raise ConfigError(
            "the weights alone are wanted here: give state.params in place of the state."
        )
