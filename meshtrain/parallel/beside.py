"""Collectives that travel while the device computes.

    values ──► start ─────────── done ──► what arrived         on the links
    carry  ─────────►   work   ──────────► its result          on the device

XLA's scheduler lets a collective travel under whatever stands between its start and its done, a whole loop with collectives of its own
included (on GPUs as many at a time as `step.compiler_options` allows). Left alone it starts one as soon as it can and waits for it at
once. So what is sent waits for what the work begins with, and what is sent next for what arrives. It goes through the program from its
end, and of a loop and a done takes the loop first, unless something stands behind the loop that needs its result.
"""

from typing import Any

from jax import lax

Tree = Any


def after(values: Tree, *others: Tree) -> Tree:
    """`values`, not before the others are there. They vary over all mesh axes over which the others do: a barrier makes it so."""
    return lax.optimization_barrier((values, others))[0]
