"""Splits a backward pass into the input gradient (I) and the weight gradient (W) of zero-bubble schedules (Qi et al.
2023).

    B:  cotangent, residuals ──► input gradient, weight gradients

    I:  cotangent, residuals ──► input gradient, stash        what W needs of I: each linear layer's output cotangent
    W:  residuals, stash     ──► weight gradients             nothing is computed twice

It works on the traced program of a layer, so it knows nothing of the model: I is what the input gradient depends on, W
is the rest. A loop or a kernel in it is taken whole.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from meshtrain.compat import bind, scopes_of

_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
Values = list[Any]


class Halves(NamedTuple):
    """Two halves of a function: the stash of the first is what the second needs of it."""

    first: Callable[..., tuple[Values, Values]]  # (*args) -> (leaves of wanted, stash)
    # (stash, *args) -> leaves of other; lost args may be None
    second: Callable[..., Values]


def split_backward(
    function: Callable[..., tuple[Any, Any]], lost: Sequence[bool], *args: Any
) -> Halves:
    """Splits `function(*args) -> (wanted, other)`; args that are `lost` are not there any more when `second` runs.

    `first` returns the flat leaves of `wanted` and the stash, `second` those of `other`.
    """
    flat, tree = jax.tree.flatten(args)
    gone = [lost[i] for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    count = 0

    def run(*leaves: Any) -> Values:
        nonlocal count
        wanted, other = function(*jax.tree.unflatten(tree, leaves))
        count = len(jax.tree.leaves(wanted))
        return [*jax.tree.leaves(wanted), *jax.tree.leaves(other)]

    closed = inlined(run, *flat)
    parts = _Parts(
        closed.jaxpr, [i < count for i in range(len(closed.jaxpr.outvars))], gone
    )

    def first(*args: Any) -> tuple[Values, Values]:
        return parts.first(closed.consts, jax.tree.leaves(args))

    def second(stash: Values, *kept: Any) -> Values:
        leaves = [
            leaf
            for arg, example, is_lost in zip(kept, args, lost, strict=True)
            for leaf in (
                [None] * len(jax.tree.leaves(example))
                if is_lost
                else jax.tree.leaves(arg)
            )
        ]
        return parts.second(closed.consts, leaves, stash)

    return Halves(first, second)


def inlined(function: Callable[..., Values], *leaves: Any) -> ClosedJaxpr:
    """Returns the program of a function of arrays, without calls."""
    traced = jax.make_jaxpr(function)(*leaves)
    return jax.make_jaxpr(
        lambda *leaves: _evaluate(traced.jaxpr, traced.consts, leaves)
    )(*leaves)


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Values:
    """Runs a jaxpr with calls inlined, so that what they hold can be told apart."""
    env: dict[Var, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    )
    for eqn in jaxpr.eqns:
        values = [_read(env, v) for v in eqn.invars]
        if eqn.primitive.name in _INLINED:
            inner = eqn.params[_INLINED[eqn.primitive.name]]
            jaxpr_of, consts = (
                (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
            )
            with scopes_of(eqn):
                outs = _evaluate(jaxpr_of, consts, values)
        elif eqn.primitive.name == "name":
            # what `checkpoint_name` named is the value itself, not another that W would have to be left
            outs = values
        else:
            outs = bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, v) for v in jaxpr.outvars]


class _Parts:
    """A jaxpr whose equations are assigned to `first` (all that the wanted outputs depend on) and `second` (the
    rest).
    """

    def __init__(
        self, jaxpr: Jaxpr, wanted: Sequence[bool], lost: Sequence[bool]
    ) -> None:
        self.jaxpr = jaxpr
        self.wanted = list(wanted)
        needed = {
            v
            for v, w in zip(jaxpr.outvars, wanted, strict=True)
            if w and isinstance(v, Var)
        }
        others = {
            v
            for v, w in zip(jaxpr.outvars, wanted, strict=True)
            if not w and isinstance(v, Var)
        }
        # A gradient that takes no product more (of a norm's scale, of a bias) is made at once: it is far smaller than
        # what it is made of.
        known = _outs(made_by(jaxpr, needed))
        needed |= {
            v for v in others if not any(map(_multiplies, made_by(jaxpr, {v}, known)))
        }
        self.in_first = made_by(jaxpr, needed)
        self.in_second = made_by(jaxpr, others, _outs(self.in_first))
        others |= {v for eqn in self.in_second for v in _variables(eqn.invars)}
        # What is lost is there for `second` only if it is stashed.
        stashable = [v for v, gone in zip(jaxpr.invars, lost, strict=True) if gone]
        stashable += [v for eqn in self.in_first for v in eqn.outvars]
        self.stash = [v for v in stashable if v in others]

    def first(
        self, consts: Sequence[Any], args: Sequence[Any]
    ) -> tuple[Values, Values]:
        env = self._bind([*consts, *args])
        for eqn in self.in_first:
            _run(eqn, env)
        outs = [
            _read(env, v)
            for v, w in zip(self.jaxpr.outvars, self.wanted, strict=True)
            if w
        ]
        return outs, [env[v] for v in self.stash]

    def second(
        self, consts: Sequence[Any], args: Sequence[Any], stash: Values
    ) -> Values:
        env = self._bind([*consts, *args])
        env.update(zip(self.stash, stash, strict=True))
        for eqn in self.in_second:
            _run(eqn, env)
        return [
            _read(env, v)
            for v, w in zip(self.jaxpr.outvars, self.wanted, strict=True)
            if not w
        ]

    def _bind(self, values: Values) -> dict[Var, Any]:
        """Returns the values of the program's constants and arguments, by variable."""
        return dict(
            zip([*self.jaxpr.constvars, *self.jaxpr.invars], values, strict=True)
        )


def made_by(
    jaxpr: Jaxpr, wanted: set[Var], known: Set[Var] = frozenset()
) -> list[JaxprEqn]:
    """Returns the equations that `wanted` take, but for those that lead to what is `known`."""
    wanted = wanted - known
    equations = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in wanted for v in eqn.outvars):
            equations.append(eqn)
            wanted |= _variables(eqn.invars) - known
    return equations[::-1]


def _multiplies(eqn: JaxprEqn) -> bool:
    """Returns whether it is a matrix product, or a loop or kernel that holds one."""
    inner = jaxprs_in_params(eqn.params)
    return eqn.primitive.name == "dot_general" or any(
        _multiplies(e) for jaxpr in inner for e in jaxpr.eqns
    )


def _outs(eqns: Sequence[JaxprEqn]) -> set[Var]:
    return {v for eqn in eqns for v in eqn.outvars}


def _variables(atoms: Sequence[Any]) -> set[Var]:
    return {v for v in atoms if isinstance(v, Var)}


def _read(env: dict[Var, Any], v: Any) -> Any:
    return v.val if isinstance(v, Literal) else env[v]


def _run(eqn: JaxprEqn, env: dict[Var, Any]) -> None:
    env.update(
        zip(eqn.outvars, bind(eqn, [_read(env, v) for v in eqn.invars]), strict=True)
    )
