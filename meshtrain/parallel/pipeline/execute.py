"""Runs any legal schedule table inside the fully manual shard_map: one scan over clocks, three slots a clock and the
loss head.

    clock t  F: stage input → output, residuals to the stash      (this stage's row of the table says which microbatch)
             H: loss head on what left the last virtual stage      (all stages, where they share the vocabulary)
             B: cotangent + stash → input gradient, weight gradient (only the former where the table splits them)
             W: weight gradient

Messages travel while the device computes: see `pipeline.clock`. So does the vocabulary: see `schedule.buffers`.

Every device runs the same program. On CPU idle slots are skipped (lax.cond). Elsewhere a predicate would be waited for,
so a slot that any stage uses is computed by all, and an idle one's results go where nobody reads; `phases` groups the
clocks so that little is.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.compat import varying
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.forward import Batch, Forward, LabelLosses, LossAndGradients, sum_at_once
from meshtrain.parallel.pipeline.clock import Execution, row_of
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.buffers import executed
from meshtrain.schedule.phases import Ops, Phase, forward_only_phases, ops_per_clock, phases
from meshtrain.schedule.table import Table


class Executor:
    """One table over one model: call `train` or `label_losses` inside shard_map."""

    def __init__(self, forward: Forward, table: Table) -> None:
        self.forward = forward
        self.table = table
        self.skips = forward.skips
        self.sends = forward.overlaps and table.has_sends
        if not self.sends:
            table = self.table = table.drop_sends()
        if self.skips:
            # Idle slots are skipped anyway.
            self.phases = [
                Phase(0, 1, ((table.clocks, Ops(True, True, True, table.split, True, True)),))
            ]
        else:
            self.phases = phases(table)
        self.buffers = executed(table, None if self.skips else ops_per_clock(self.phases))

    # --- the two programs

    def train(
        self, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array
    ) -> LossAndGradients:
        """Loss summed over the microbatches [M, b, T] (on each data rank), and `seed` times its gradient, in
        `precision.gradient_sums`.
        """
        stage = Stage(self.forward, self.table.chunks, weights, batches, key)
        execution = Execution(self.table, self.buffers, stage, seed)
        if self.sends:
            from meshtrain.parallel.pipeline.sending import Sending

            carry = Sending(execution, self.phases).run()
        else:
            carry = execution.end(execution.run(self.phases, execution.start()))
        totals = sum_at_once(_sum_over_stages, (carry.loss, carry.measured))
        return LossAndGradients(totals, {**carry.edge, "blocks": carry.blocks})

    def label_losses(self, weights: Weights, batches: Batch) -> LabelLosses:
        """The labels one by one, [M, b, T] each, on every stage: the table's forward slots alone."""
        stage = Stage(self.forward, self.table.chunks, weights, batches, None)
        execution = Execution(self.table, self.buffers, stage, jnp.zeros(()))
        carry = execution.start(forward_only=True)
        if self.skips:
            rows = row_of(self.buffers, np.flatnonzero(self.buffers.f_active.any(axis=1)))
            forward_only = Ops(True, True, False, False, True, False)
            carry = lax.scan(partial(execution.run_clock, forward_only), carry, rows)[0]
        else:
            carry = execution.run(forward_only_phases(self.phases), carry)
        return jax.tree.map(_sum_over_stages, carry.loss)


def _sum_over_stages(loss: jax.Array) -> jax.Array:
    return lax.psum(loss, PIPELINE) if PIPELINE in varying(loss) else loss
