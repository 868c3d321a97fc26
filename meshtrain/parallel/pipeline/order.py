"""The order of a function's operations in which its messages travel while matrix products run that need nothing of
them.

    as traced    AG ─ P ─ RS ─ AG ─ P ─ RS      forward        one half after the other: XLA cannot tell which
                 AG ─ P ─ RS ─ AG ─ P ─ RS      backward       message to hide under which product; what it joins waits

    ordered      links   AG AG ╶╴ RS AG ╶╴ RS AG ...           one message at a time, tied to the one before it
                 device        P  P ╶╴ P  P ╶╴ P  ...           each product tied to the one before it; the result of a
                                                               message is used after the product that hides it

It is the greedy list scheduling of Graham (1966, "Bounds for Certain Multiprocessing Anomalies") for two machines, the
device and its links: of what is ready that comes first behind which most is left to do. So a gradient of weights, which
nothing waits for, fills what is left. The order is told to XLA by barriers; the operations are the same, and so are
their results.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var, jaxprs_in_params

from meshtrain.compat import bind
from meshtrain.compat_kernels import tied
from meshtrain.hlo.module import FURTHER_ROUNDS
from meshtrain.parallel.pipeline.split_backward import inlined, made_by

MESSAGES = {
    "all_gather",
    "all_gather_invariant",
    "reduce_scatter",
    "psum",
    "psum_invariant",
    "all_to_all",
    "ppermute",
}
# Operations of a device while a byte travels: an H100's products at 600 TFLOP/s beside NVLink's 300 GB/s.
OPERATIONS_PER_BYTE = 2000
# A message that is shorter than this share of the longest is left to XLA.
SHORT = 0.02


def ordered(function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args), computed in this order."""
    leaves, tree = jax.tree.flatten(args)
    shape: Any = None

    def run(*leaves: Any) -> list[Any]:
        nonlocal shape
        outs, shape = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        return outs

    traced = inlined(run, *leaves)
    jaxpr = traced.jaxpr
    equations = made_by(jaxpr, {v for v in jaxpr.outvars if isinstance(v, Var)})
    values: dict[Var, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *leaves], strict=True)
    )
    _Order(equations).evaluate(values)
    outs = [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]
    return jax.tree.unflatten(shape, outs)


class _Order:
    """Equations in the order in which they are evaluated, found as they are."""

    def __init__(self, equations: list[JaxprEqn]) -> None:
        self.equations = equations
        self.maker = maker = {
            v: i for i, eqn in enumerate(equations) for v in eqn.outvars
        }
        needs = [
            {maker[v] for v in eqn.invars if isinstance(v, Var) and v in maker}
            for eqn in equations
        ]
        self.users: list[list[int]] = [[] for _ in equations]
        self.users_of: dict[Var, set[int]] = {}
        for i, eqn in enumerate(equations):
            for v in eqn.invars:
                if isinstance(v, Var):
                    self.users_of.setdefault(v, set()).add(i)
        self.ran: set[int] = set()
        self.missing = [len(of) for of in needs]
        self.before: list[int] = []  # of each, the equations that lead to it, as bits
        for i, of in enumerate(needs):
            bits = 0
            for j in of:
                self.users[j].append(i)
                bits |= self.before[j] | 1 << j
            self.before.append(bits)
        sent = [_sent(eqn) * OPERATIONS_PER_BYTE for eqn in equations]
        computed = [_operations(e) for e in equations]
        self.messages = {i for i, n in enumerate(sent) if n > SHORT * max(sent)}
        self.products = {i for i, n in enumerate(computed) if n > SHORT * max(computed)}
        self.cost = [
            sent[i] if i in self.messages else computed[i]
            for i in range(len(equations))
        ]
        self.left = self.cost[:]  # behind each, and of itself
        for i in range(len(equations) - 1, -1, -1):
            self.left[i] += max((self.left[j] for j in self.users[i]), default=0.0)
        self.heavy = sum(1 << i for i in self.messages | self.products)

    def evaluate(self, values: dict[Var, Any]) -> None:
        """Adds what the equations give to `values`."""
        self.values = values
        now = 0.0
        end = 0.0
        ready = {i for i, n in enumerate(self.missing) if not n}
        under_way: int | None = None
        arriving: list[Any] = []
        message: int | None = None  # the one before
        product: int | None = None  # likewise
        hides = False  # whether a product stands beside the message that is under way
        while ready or under_way is not None:
            last = under_way is None and not any(self.left[i] for i in ready)
            # What leads to neither comes last: else nothing would be left that is to be made of a weight's gradient.
            if light := sorted(
                i for i in ready - self.messages - self.products if self.left[i] or last
            ):
                for i in light:
                    ready |= self._done(i, self._run(i))
                ready -= set(light)
            elif under_way is None and (startable := ready & self.messages):
                under_way = max(startable, key=self._rank)
                ready.remove(under_way)
                beside = max(ready & self.products, key=self._rank, default=None)
                if beside is not None:
                    # neither begins before both can
                    a = self._operand(under_way)
                    b = self._operand(beside)
                    values[a], values[b] = (
                        tied(values[a], values[b]) if a != b else (values[a], values[b])
                    )
                arriving = self._run(under_way, message)
                end = now + self.cost[under_way]
                hides = False
            elif (computable := ready & self.products) and (
                under_way is None or now < end
            ):
                chosen = max(computable, key=self._rank)
                ready.remove(chosen)
                apart = product is not None and not self.before[chosen] >> product & 1
                ready |= self._done(
                    chosen, self._run(chosen, product if apart else None)
                )
                product = chosen
                hides = True
                now = now + self.cost[chosen]
            else:
                assert under_way is not None
                now = max(now, end)
                if hides and (v := self._find_live_value(product)) is not None:
                    *arriving, values[v] = tied(*arriving, values[v])
                ready |= self._done(under_way, arriving)
                message = under_way
                under_way = None

    def _rank(self, i: int) -> tuple[float, int]:
        return self.left[i], -i

    def _run(self, i: int, behind: int | None = None) -> list[Any]:
        """Returns the results of an equation, computed after the result of `behind`."""
        eqn = self.equations[i]
        self.ran.add(i)
        operands = [
            v.val if isinstance(v, Literal) else self.values[v] for v in eqn.invars
        ]
        if (v := self._find_live_value(behind)) is not None:
            n = eqn.invars.index(self._operand(i))
            operands[n], self.values[v] = tied(operands[n], self.values[v])
        return bind(eqn, operands)

    def _find_live_value(self, i: int | None) -> Var | None:
        """Returns a value derived from an equation's result that is yet to be used by others than `behind`: XLA ties
        nothing to unused values.
        """
        if i is None:
            return None
        for j in [
            i,
            *(j for j in range(i + 1, len(self.equations)) if self.before[j] >> i & 1),
        ]:
            for v in self.equations[j].outvars:
                if v in self.values and any(
                    k not in self.ran for k in self.users_of.get(v, ())
                ):
                    return v
        return None

    def _operand(self, i: int) -> Var:
        """The operand of an equation that is computed here, if there is one: a weight would be copied."""
        operands = [v for v in self.equations[i].invars if isinstance(v, Var)]
        late = (
            v
            for v in operands
            if v in self.maker
            and (self.before[self.maker[v]] | 1 << self.maker[v]) & self.heavy
        )
        return next(late, operands[0])

    def _done(self, i: int, outs: list[Any]) -> set[int]:
        """Keeps what an equation gave; returns those that are ready with it."""
        self.values.update(zip(self.equations[i].outvars, outs, strict=True))
        for j in set(self.users[i]):
            self.missing[j] -= 1
        return {j for j in self.users[i] if not self.missing[j]}


def _sent(eqn: JaxprEqn) -> float:
    """Bytes of the whole array that is sent."""
    if eqn.primitive.name not in MESSAGES:
        return 0.0
    arrays: list[list[Any]] = [[v.aval for v in of] for of in (eqn.invars, eqn.outvars)]
    sizes = [sum(a.size * a.dtype.itemsize for a in of) for of in arrays]
    return float(max(sizes))


def _operations(eqn: JaxprEqn) -> float:
    """Returns the FLOPs of the matrix products in an equation; none of rounds that even loads do not take."""
    name = eqn.primitive.name
    if FURTHER_ROUNDS in str(eqn.source_info.name_stack):
        return 0.0
    shapes = [_shape(v) for v in eqn.invars]
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return (
            2.0
            * math.prod(_shape(eqn.outvars[0]))
            * math.prod(shapes[0][d] for d in contracted)
        )
    if name.startswith("dot_product_attention"):
        # queries [B, T, H, K] and keys
        return (
            (10.0 if "bwd" in name else 4.0) * math.prod(shapes[0]) * shapes[1][1] / 2
        )
    turns = eqn.params.get("length", 1)
    if name == "pallas_call":
        turns = math.prod(
            n for n in eqn.params["grid_mapping"].grid if isinstance(n, int)
        )
    return turns * sum(
        _operations(e) for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns
    )


def _shape(v: Any) -> Any:
    return getattr(v.aval, "shape", ())
