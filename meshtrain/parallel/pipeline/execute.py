"""Runs any legal schedule table inside the fully manual shard_map: loops over clocks, with up to four ops in each.

    clock t  F: stage input → output, residuals to the stash      (this stage's row of the table says which microbatch)
             H: loss head on the last virtual stage's output       (all stages, where they share the vocabulary)
             B: cotangent + stash → input and weight gradient      (the input gradient alone, if the table has W)
             W: weight gradient

Messages travel while the device computes: see `pipeline.clock`. So does the vocabulary: see `schedule.buffers`.

Every device runs the same program, so a slot may be idle on some stages:

    forward.skips (on CPU)    one loop over all clocks; an idle slot is skipped (lax.cond)
    else                      a GPU's host would have to wait for the predicate. So all stages compute a slot that any
                              of them uses, and idle ones leave their results where nobody reads. `phases` groups
                              clocks so that few slots are idle.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.compat import varying
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.forward import (
    Batch,
    Forward,
    LabelLosses,
    LossAndGradients,
    sum_at_once,
)
from meshtrain.parallel.pipeline.clock import Execution, row_of
from meshtrain.parallel.pipeline.sending import Sending
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.buffers import compile_table
from meshtrain.schedule.phases import Ops, forward_only_phases
from meshtrain.schedule.table import Table


class Executor:
    """One table over one model: call `train` or `label_losses` inside shard_map."""

    def __init__(self, forward: Forward, table: Table) -> None:
        self.forward = forward
        # Weights are gathered (G) and gradients reduced (R) where the table has it; else before and after all clocks.
        self.sends = forward.overlaps and table.has_sends
        self.table = table if self.sends else table.drop_sends()
        alike = len(forward.layout.segments) == 1
        self.compiled = compile_table(self.table, forward.skips, alike)

    # --- the two programs

    def train(
        self,
        weights: Weights,
        batches: Batch,
        key: jax.Array | None,
        seed: jax.Array,
    ) -> LossAndGradients:
        """Returns each data rank's loss summed over the microbatches [M, b, T], and `seed` times its gradient, in
        `precision.gradient_sums`.
        """
        alternates = self.compiled.alternates
        stage = Stage(
            self.forward, self.table.chunks, weights, batches, key, alternates
        )
        execution = Execution(self.compiled, stage, seed)
        if self.sends:
            carry = Sending(execution).run()
        else:
            carry = execution.start()
            carry = execution.run(self.compiled.phases, carry)
            carry = execution.end(carry)
        totals = sum_at_once(_sum_over_stages, (carry.loss, carry.measured))
        return LossAndGradients(totals, {**carry.edge, **carry.blocks})

    def label_losses(self, weights: Weights, batches: Batch) -> LabelLosses:
        """Returns the loss of each label, [M, b, T], on every stage: runs the table's forwards and heads alone."""
        stage = Stage(self.forward, self.table.chunks, weights, batches, None)
        execution = Execution(self.compiled, stage, jnp.zeros(()))
        carry = execution.start(forward_only=True)
        if self.forward.skips:
            clocks = np.flatnonzero(self.compiled.f.active.any(axis=1))
            # A clock without a head or an embedding has none: their microbatch is -1.
            ops = Ops(
                forward=True,
                head=True,
                backward=False,
                weight=False,
                enter=True,
                leave=False,
            )
            run_clock = partial(execution.run_clock, ops)
            carry, _ = lax.scan(run_clock, carry, row_of(self.compiled, clocks))
        else:
            carry = execution.run(forward_only_phases(self.compiled.phases), carry)
        return jax.tree.map(_sum_over_stages, carry.loss)


def _sum_over_stages(loss: jax.Array) -> jax.Array:
    """Returns the sum where only the last stage has the loss, others zeros; if all have it, returns it."""
    if PIPELINE in varying(loss):
        return lax.psum(loss, PIPELINE)
    return loss
