"""Optimizers by name: the Optax transformation of each, and what it keeps of a weight, which the planner counts.

    adamw      two moments           Loshchilov & Hutter 2019
    lion       one                   Chen et al. 2023
    sgd        one, none at beta1 0
    adafactor  rows and columns      Shazeer & Stern 2018
    muon       one of a layer's matrices, Adam's two of the rest        Jordan et al. 2024

One from outside: `OPTIMIZERS.register(Optimizer(name="mine", ...))` before the config is loaded. Optax is imported
where one is made, so that a plan needs no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from meshtrain.registry import Registry

if TYPE_CHECKING:
    import optax

# Adafactor factors a moment whose two largest dimensions have at least as many elements.
FACTORED_FROM = 32
# Of Muon's iterations: x becomes a x + (b A + c A A) x, where A is x times its transpose.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class OptimizerKeys(Protocol):
    """The section `optimizer` of a config, as far as it is asked here."""

    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


class OptimizedWeight(Protocol):
    """A weight as an optimizer sees it: `model.weights.Weight`, or `parallel.placement.Placed`."""

    @property
    def name(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stacked(self) -> bool: ...
    @property
    def decayed(self) -> bool: ...


@dataclass(frozen=True)
class Optimizer:
    """`make(keys, rate, mask, weights)`: the transformation, for a tree of weights of which `mask` says where decay
    applies.

    `moments(keys, weight)`: the dimensions of each array that it keeps of a weight, () for a number; layers are not
    counted.
    """

    name: str
    make: Callable[..., optax.GradientTransformation]
    moments: Callable[[OptimizerKeys, OptimizedWeight], Sequence[Sequence[int]]]
    # It does the decoupled decay itself; else that comes after it.
    decays: bool = False
    # An update of one number depends on others of its matrix, which must therefore be whole, unpadded, and of one
    # layer.
    by_matrix: bool = False
    # `make` takes one more: a function that orthogonalizes matrices, which are spread over the mesh.
    orthogonalizes: bool = False


def _all(weight: OptimizedWeight) -> list[int]:
    """All dimensions but that of the layers."""
    return list(range(weight.stacked, len(weight.axes)))


def _adamw(
    o: OptimizerKeys, rate: Any, mask: Any, weights: Any
) -> optax.GradientTransformation:
    import optax

    return optax.adamw(
        rate, o.beta1, o.beta2, o.eps, weight_decay=o.weight_decay, mask=mask
    )


def _lion(
    o: OptimizerKeys, rate: Any, mask: Any, weights: Any
) -> optax.GradientTransformation:
    import optax

    return optax.lion(rate, o.beta1, o.beta2, weight_decay=o.weight_decay, mask=mask)


def _sgd(
    o: OptimizerKeys, rate: Any, mask: Any, weights: Any
) -> optax.GradientTransformation:
    import optax

    return optax.sgd(rate, o.beta1 or None)


def _adafactor(
    o: OptimizerKeys, rate: Any, mask: Any, weights: Any
) -> optax.GradientTransformation:
    import optax

    return optax.adafactor(
        rate, weight_decay_rate=None, min_dim_size_to_factor=FACTORED_FROM
    )


def _factors(o: OptimizerKeys, weight: OptimizedWeight) -> list[list[int]]:
    """The second moment less each of its two largest dimensions in turn, with a number in place of the whole; or the
    other way round.
    """
    every = _all(weight)
    by_size = sorted(every, key=lambda d: weight.shape[d])
    if len(every) < 2 or weight.shape[by_size[-2]] < FACTORED_FROM:
        return [every, [], []]
    return [[], *([d for d in every if d != dropped] for dropped in by_size[-2:])]


def _muon(
    o: OptimizerKeys,
    rate: Any,
    mask: Any,
    weights: Any,
    orthogonalizer: Any,
) -> optax.GradientTransformation:
    import jax
    import optax

    is_weight = lambda x: hasattr(x, "axes")
    matrices = [
        w for w in jax.tree.leaves(weights, is_leaf=is_weight) if orthogonalized(w)
    ]
    momentum = _orthogonal_momentum(o, matrices, orthogonalizer(matrices, o.eps))
    adam = optax.adamw(rate, o.beta1, o.beta2, o.eps, weight_decay=0.0, nesterov=True)
    names = jax.tree.map(
        lambda weight: "muon" if orthogonalized(weight) else "adam",
        weights,
        is_leaf=is_weight,
    )
    of_matrices = optax.chain(momentum, optax.scale_by_learning_rate(rate))
    return optax.partition({"muon": of_matrices, "adam": adam}, names)


def _orthogonal_momentum(
    o: OptimizerKeys, matrices: Sequence[OptimizedWeight], orthogonalize: Any
) -> optax.GradientTransformation:
    import jax
    import optax
    from optax.contrib import MuonState

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jax.numpy.zeros_like, params)
        return MuonState(jax.numpy.zeros((), jax.numpy.int32), zeros, None)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu = optax.tree.update_moment(gradients, state.mu, o.beta1, 1)
        count = optax.safe_increment(state.count)
        # Nesterov's, each part divided by what its weights add up to
        ahead = jax.tree.map(
            lambda m, g: o.beta1 * m + (1 - o.beta1) * g,
            optax.tree.bias_correction(mu, o.beta1, optax.safe_increment(count)),
            optax.tree.bias_correction(gradients, o.beta1, count),
        )
        flat, tree = jax.tree.flatten(ahead)
        moved = orthogonalize(dict(zip((w.name for w in matrices), flat, strict=True)))
        scaled = [
            jax.numpy.sqrt(max(1.0, width_ratio(w))) * moved[w.name] for w in matrices
        ]
        return jax.tree.unflatten(tree, scaled), MuonState(count, mu, None)

    return optax.GradientTransformation(init, update)


def matrix_sides(weight: OptimizedWeight) -> tuple[list[int], list[int]]:
    """Returns the dimensions of a layer's weight as a matrix, those of its inputs and of its outputs; of experts each
    is a matrix of its own, and so is each factor of an adapter, which leads into its rank or out of it.
    """
    dims = [
        d for d, axis in enumerate(weight.axes) if axis not in ("layers", "experts")
    ]
    inputs = 1
    if weight.axes[-1] in ("embed", "rank"):
        inputs = len(dims) - 1
    return dims[:inputs], dims[inputs:]


def width_ratio(weight: OptimizedWeight) -> float:
    """Returns the outputs of a layer's weight over its inputs."""
    inputs, outputs = (
        math.prod(weight.shape[d] for d in side) for side in matrix_sides(weight)
    )
    return outputs / inputs


def orthogonalized(weight: OptimizedWeight) -> bool:
    """Muon's own update: not for embedding and head, norms and biases."""
    return weight.stacked and weight.decayed


OPTIMIZERS = Registry(
    Optimizer("adamw", _adamw, lambda o, weight: [_all(weight)] * 2, decays=True),
    Optimizer("lion", _lion, lambda o, weight: [_all(weight)], decays=True),
    Optimizer("sgd", _sgd, lambda o, weight: [_all(weight)] * (o.beta1 > 0)),
    Optimizer("adafactor", _adafactor, _factors, by_matrix=True),
    Optimizer(
        "muon",
        _muon,
        lambda o, weight: [_all(weight)] * (1 if orthogonalized(weight) else 2),
        orthogonalizes=True,
    ),
)
