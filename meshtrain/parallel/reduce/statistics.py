"""What compression leaves out of a step's gradients, as numbers for the row of metrics."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.parallel.reduce.exchange import Sent

Statistics = dict[str, jax.Array]


def left_out(given: jax.Array, sent: Sent) -> list[jax.Array]:
    """The squares of what was left out. None of what was sent as it is."""
    return [] if sent.arrived is given else [squares(given, given - sent.arrived)]


def squares(given: jax.Array, lost: jax.Array) -> jax.Array:
    """This rank's sums of squares, float32 [2]: of what was left out, and of what was given."""
    return jnp.stack([jnp.sum(jnp.square(x.astype(jnp.float32))) for x in (lost, given)])


def statistics(found: Sequence[jax.Array], axes: tuple[str, ...], scale: jax.Array, fed_back: bool) -> Statistics:
    """`reduce_error`, the norm of all that was left out over that of all that was given, on the devices of `axes`; by one sum.

    With feedback also `residual_norm`, that of all residuals, which are what was left out, without the loss `scale`. Nothing where
    nothing was compressed, or only where its gradient was made, inside the backward pass.
    """
    if not found:
        return {}
    # What several devices have alike counts once.
    once = [x / math.prod(lax.axis_size(axis) for axis in axes if axis not in varying(x)) for x in found]
    lost, given = lax.psum(sum(vary(once, axes)), axes)
    error = {"reduce_error": jnp.sqrt(lost / jnp.where(given == 0.0, 1.0, given))}
    return error | ({"residual_norm": jnp.sqrt(lost) / scale} if fed_back else {})
