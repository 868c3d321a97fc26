"""Sums over rounds, of which a device finds out at run time how many there are.

    forward    y  = one(1, x) + one(2, x) + ...     a loop that keeps its operands alone
    backward   dx = the same loop over each round's backward, with its forward once more

The memory of one round is taken, whatever comes. A round may hold collectives if all devices that take part in them
count as many rounds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from meshtrain.compat import vary, varying
from meshtrain.hlo.module import FURTHER_ROUNDS


def add_rounds(
    y: jax.Array,
    one: Callable[..., jax.Array],
    rounds: jax.Array,
    apart: bool,
    *operands: jax.Array,
) -> jax.Array:
    """Returns y, of the first round, and the sum of `one(round, *operands)` over the rounds from the second on.

    The weights that `one` closes over have gradients too, but for frozen ones; `apart`, by a loop of their own, since a
    zero-bubble schedule has these in another half. All sums are float32.
    """
    rounds = vary(rounds, varying(y))
    traced = jax.make_jaxpr(lambda *of: one(*_tied(*of)))(rounds, *operands)
    return _add(traced.jaxpr, apart, y, rounds, operands, tuple(traced.consts))


def _tied(number: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the same, of which XLA gathers nothing in front of a loop over the number, that mostly does not turn."""
    return lax.optimization_barrier((number, *arrays))


@jax.named_scope(FURTHER_ROUNDS)
def _total(
    rounds: jax.Array, terms: Callable[[jax.Array], Any], like: Any
) -> tuple[jax.Array, Any]:
    """Returns the sums of what `terms` gives of each round, in the shapes and dtypes of `like`; and a number above 0,
    by which what reads it comes after the loop.
    """
    empty = jax.tree.map(
        lambda x: vary(jnp.zeros(x.shape, jnp.float32), varying(x)), like
    )
    first = vary(jnp.int32(1), varying(rounds))
    end, sums = lax.while_loop(
        lambda carry: carry[0] < rounds,
        lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], terms(carry[0]))),
        (first, empty),
    )
    return end, jax.tree.map(lambda x, total: total.astype(x.dtype), like, sums)


# Loops and the first round come one after the other: on CPUs, where messages of one kind have one name, those that are
# ready at once are taken for each other.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add(
    jaxpr: Any,
    apart: bool,
    y: jax.Array,
    rounds: jax.Array,
    operands: Any,
    closed: Any,
) -> jax.Array:
    one = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed))
    after_y = rounds + (y.reshape(-1)[0] > jnp.inf)
    return y + _total(after_y, lambda r: one(r, *operands)[0], y)[1]


def _forward(jaxpr: Any, apart: bool, *given: Any) -> tuple[jax.Array, Any]:
    """Keeps what `one` closes over in two parts: weights that are trained, and all else."""
    y, rounds, operands, closed = jax.tree.map(
        lambda x: x.value, given, is_leaf=_is_primal
    )
    trained = [
        x.perturbed and jnp.issubdtype(x.value.dtype, jnp.inexact) for x in given[-1]
    ]
    weights, fixed = (
        tuple(x if t is wanted else None for x, t in zip(closed, trained, strict=True))
        for wanted in (True, False)
    )
    return _add(jaxpr, apart, y, rounds, operands, closed), (
        rounds,
        operands,
        weights,
        fixed,
    )


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _backward(
    jaxpr: Any, apart: bool, kept: Any, g: jax.Array
) -> tuple[jax.Array, None, Any, Any]:
    rounds, operands, weights, fixed = kept

    def one(r: jax.Array, operands: Any, weights: Any) -> jax.Array:
        closed = [f if w is None else w for w, f in zip(weights, fixed, strict=True)]
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed))(r, *operands)[0]

    def total(
        rounds: jax.Array, like: Any, of: Callable[..., Any]
    ) -> tuple[jax.Array, Any]:
        def differentiate_round(number: jax.Array) -> Any:
            r, cotangent = _tied(number, g)
            return of(jax.vjp(partial(one, r), operands, weights)[1](cotangent))

        return _total(rounds, differentiate_round, like)

    if apart:
        end, to_operands = total(rounds, operands, lambda both: both[0])
        _, to_weights = total(
            jnp.where(end > 0, rounds, 0), weights, lambda both: both[1]
        )
    else:
        end, (to_operands, to_weights) = total(
            rounds, (operands, weights), lambda both: both
        )
    return jnp.where(end > 0, g, 0), None, to_operands, to_weights


_add.defvjp(_forward, _backward, symbolic_zeros=True)
