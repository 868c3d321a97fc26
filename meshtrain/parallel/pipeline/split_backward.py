"""Splits a backward pass into the input gradient (I) and the weight gradient (W) of zero-bubble schedules (Qi et al. 2023).

    B:  cotangent, residuals ──► input gradient, weight gradients

    I:  cotangent, residuals ──► input gradient, stash        what W needs of I: each linear layer's output cotangent
    W:  residuals, stash     ──► weight gradients             nothing is computed twice

It works on the traced program, so it knows nothing of the model: I is what the input gradient depends on, W is the rest, and
a scan over layers becomes two scans, the first of which emits the stash layer by layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from meshtrain.compat import bind, scan_counts

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
    second: Callable[..., Values]  # (stash, *args) -> leaves of other; lost args may be None


def split_backward(function: Callable[..., tuple[Any, Any]], lost: Sequence[bool], *args: Any) -> Halves:
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

    traced = jax.make_jaxpr(run)(*flat)
    closed = jax.make_jaxpr(lambda *leaves: _evaluate(traced.jaxpr, traced.consts, leaves))(*flat)
    parts = _Parts(closed.jaxpr, [i < count for i in range(len(closed.jaxpr.outvars))], gone)

    def first(*args: Any) -> tuple[Values, Values]:
        return parts.first(closed.consts, jax.tree.leaves(args))

    def second(stash: Values, *kept: Any) -> Values:
        leaves = [
            leaf
            for arg, example, is_lost in zip(kept, args, lost, strict=True)
            for leaf in ([None] * len(jax.tree.leaves(example)) if is_lost else jax.tree.leaves(arg))
        ]
        return parts.second(closed.consts, leaves, stash)

    return Halves(first, second)


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Values:
    """Runs a jaxpr with calls inlined, down into scans, so that what they hold can be told apart."""
    env: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = [_read(env, v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in _INLINED:
            inner = eqn.params[_INLINED[name]]
            jaxpr_of, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
            outs = _evaluate(jaxpr_of, consts, values)
        elif name == "scan":
            body = eqn.params["jaxpr"]
            outs = _scan(eqn, values, partial(_evaluate, body.jaxpr, body.consts))
        else:
            outs = bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, v) for v in jaxpr.outvars]


def _scan(eqn: JaxprEqn, values: Values, body: Callable[[Values], Values]) -> Values:
    """A scan equation with another body of the same signature."""
    consts, carries = scan_counts(eqn)

    def step(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = body([*values[:consts], *carry, *xs])
        return outs[:carries], outs[carries:]

    carry, ys = lax.scan(
        step,
        values[consts : consts + carries],
        values[consts + carries :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return [*carry, *ys]


class _Parts:
    """A jaxpr whose equations are dealt to `first` (all that the wanted outputs depend on) and `second` (the rest)."""

    def __init__(self, jaxpr: Jaxpr, wanted: Sequence[bool], lost: Sequence[bool]) -> None:
        self.jaxpr, self.wanted = jaxpr, list(wanted)
        needed = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and isinstance(v, Var)}
        others = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if not w and isinstance(v, Var)}
        in_first: list[JaxprEqn | _ScanParts] = []
        in_second: list[JaxprEqn | _ScanParts] = []
        made: set[Var] = {v for v, gone in zip(jaxpr.invars, lost, strict=True) if gone}  # lost unless stashed
        for eqn in reversed(jaxpr.eqns):
            first = [v in needed for v in eqn.outvars]
            second = [v in others and not f for v, f in zip(eqn.outvars, first, strict=True)]
            if any(first) and any(second) and eqn.primitive.name == "scan":
                parts = _ScanParts(eqn, first, second)
                in_first.append(parts)
                in_second.append(parts)
                needed |= parts.first_reads
                others |= parts.second_reads
            elif any(first):
                in_first.append(eqn)
                needed |= _variables(eqn.invars)
            elif any(second):
                in_second.append(eqn)
                others |= _variables(eqn.invars)
        self.in_first, self.in_second = in_first[::-1], in_second[::-1]
        for entry in self.in_first:
            made |= set(entry.first_outs if isinstance(entry, _ScanParts) else entry.outvars)
        self.stash = [v for v in sorted(others & made, key=self._order) if not _dropped(v)]

    def _order(self, v: Var) -> int:
        if not hasattr(self, "_places"):
            everything = [*self.jaxpr.invars, *(v for eqn in self.jaxpr.eqns for v in eqn.outvars)]
            self._places = {v: i for i, v in enumerate(everything)}
        return self._places[v]

    def reads_first(self) -> set[Var]:
        """Variables that the first part reads."""
        reads = {v for v, w in zip(self.jaxpr.outvars, self.wanted, strict=True) if w and isinstance(v, Var)}
        for entry in self.in_first:
            reads |= entry.first_reads if isinstance(entry, _ScanParts) else _variables(entry.invars)
        return reads | set(self.stash)

    def reads_second(self) -> set[Var]:
        """Variables that the second part reads."""
        reads = {v for v, w in zip(self.jaxpr.outvars, self.wanted, strict=True) if not w and isinstance(v, Var)}
        for entry in self.in_second:
            reads |= entry.second_reads if isinstance(entry, _ScanParts) else _variables(entry.invars)
        return reads

    @property
    def stashed(self) -> int:
        """Values in the stash."""
        return len(self.stash) + sum(entry.stashed for entry in self.in_first if isinstance(entry, _ScanParts))

    def first(self, consts: Sequence[Any], args: Sequence[Any]) -> tuple[Values, Values]:
        env: dict[Var, Any] = dict(zip([*self.jaxpr.constvars, *self.jaxpr.invars], [*consts, *args], strict=True))
        scans: Values = []
        for entry in self.in_first:
            if isinstance(entry, _ScanParts):
                scans += entry.run_first(env)
            else:
                _run(entry, env)
        outs = [_read(env, v) for v, w in zip(self.jaxpr.outvars, self.wanted, strict=True) if w]
        return outs, [*scans, *(env[v] for v in self.stash)]

    def second(self, consts: Sequence[Any], args: Sequence[Any], stash: Values) -> Values:
        env: dict[Var, Any] = dict(zip([*self.jaxpr.constvars, *self.jaxpr.invars], [*consts, *args], strict=True))
        kept, at = {}, 0
        for scan in [entry for entry in self.in_first if isinstance(entry, _ScanParts)]:
            kept[id(scan)] = stash[at : at + scan.stashed]
            at += scan.stashed
        env.update(zip(self.stash, stash[at:], strict=True))
        for entry in self.in_second:
            if isinstance(entry, _ScanParts):
                entry.run_second(env, kept[id(entry)])
            else:
                _run(entry, env)
        return [_read(env, v) for v, w in zip(self.jaxpr.outvars, self.wanted, strict=True) if not w]


class _ScanParts:
    """One scan as two over the same iterations; what the second needs of the first passes as stacked values."""

    def __init__(self, eqn: JaxprEqn, first: Sequence[bool], second: Sequence[bool]) -> None:
        self.eqn = eqn
        self.consts, self.carries = scan_counts(eqn)
        self.body: ClosedJaxpr = eqn.params["jaxpr"]
        first, carry_ins = list(first), self.body.jaxpr.invars[self.consts : self.consts + self.carries]
        while True:  # a carry that the first part reads must be carried by it
            probe = _Parts(self.body.jaxpr, first, [False] * len(self.body.jaxpr.invars))
            reads = probe.reads_first()
            grown = [f or (i < self.carries and carry_ins[i] in reads) for i, f in enumerate(first)]
            if grown == first:
                break
            first = grown
        self.is_first = first
        # in the second scan the carries of the first are not there: they are lost, so emitted where read
        lost = [False] * len(self.body.jaxpr.invars)
        for i in range(self.carries):
            lost[self.consts + i] = first[i]
        self.parts = _Parts(self.body.jaxpr, first, lost)
        self.is_second = [not f for f in first]
        self.first_outs = [v for v, f in zip(eqn.outvars, first, strict=True) if f]
        self.stashed = self.parts.stashed
        reads_first, reads_second = self.parts.reads_first(), self.parts.reads_second()
        by_first, by_second = set(), set()
        for outer, inner in zip(eqn.invars, self.body.jaxpr.invars, strict=True):
            place = self.body.jaxpr.invars.index(inner) - self.consts
            carry = 0 <= place < self.carries
            if isinstance(outer, Var):
                if inner in reads_first or (carry and first[place]):
                    by_first.add(outer)
                if (inner in reads_second and not (carry and first[place])) or (carry and not first[place]):
                    by_second.add(outer)
        self.first_reads, self.second_reads = by_first, by_second

    def run_first(self, env: dict[Var, Any]) -> Values:
        first = self.is_first

        def body(consts: Values, carry: Values, xs: Values) -> tuple[Values, Values]:
            outs, stash = self.parts.first(self.body.consts, [*consts, *carry, *xs])
            carried = sum(first[: self.carries])
            return outs[:carried], [*outs[carried:], *stash]

        carry, ys = self._scan(env, body, first[: self.carries])
        outs = [*carry, *ys[: len(self.first_outs) - len(carry)]]
        env.update(zip(self.first_outs, outs, strict=True))
        return ys[len(self.first_outs) - len(carry) :]

    def run_second(self, env: dict[Var, Any], stash: Values) -> None:
        second = self.is_second

        def body(consts: Values, carry: Values, xs: Values) -> tuple[Values, Values]:
            xs, kept = xs[: len(xs) - len(stash)], xs[len(xs) - len(stash) :]
            outs = self.parts.second(self.body.consts, [*consts, *carry, *xs], kept)
            carried = sum(second[: self.carries])
            return outs[:carried], outs[carried:]

        carry, ys = self._scan(env, body, second[: self.carries], stash)
        outvars = [v for v, s in zip(self.eqn.outvars, second, strict=True) if s]
        env.update(zip(outvars, [*carry, *ys], strict=True))

    def _scan(
        self, env: dict[Var, Any], body: Callable, carried: Sequence[bool], more: Sequence[Any] = ()
    ) -> tuple[Values, Values]:
        values = [_read(env, v, None) for v in self.eqn.invars]
        consts, carries = values[: self.consts], values[self.consts : self.consts + self.carries]
        xs = [*values[self.consts + self.carries :], *more]

        def step(carry: Values, xs: Values) -> tuple[Values, Values]:
            values = iter(carry)
            whole = [next(values) if c else None for c in carried]
            return body(consts, whole, xs)

        start = [value for value, c in zip(carries, carried, strict=True) if c]
        return lax.scan(step, start, xs, length=self.eqn.params["length"], reverse=self.eqn.params["reverse"])


def _variables(atoms: Sequence[Any]) -> set[Var]:
    return {v for v in atoms if isinstance(v, Var)}


def _dropped(v: Var) -> bool:
    return type(v).__name__ == "DropVar"


def _read(env: dict[Var, Any], v: Any, *default: Any) -> Any:
    if isinstance(v, Literal):
        return v.val
    return env.get(v, *default) if default else env[v]


def _run(eqn: JaxprEqn, env: dict[Var, Any]) -> None:
    env.update(zip(eqn.outvars, bind(eqn, [_read(env, v) for v in eqn.invars]), strict=True))
