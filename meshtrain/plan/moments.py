"""Elements of optimizer state on one device, as `meshtrain.optim` builds and places it."""

import functools

from meshtrain.config import Config, ModelConfig
from meshtrain.plan import shapes
from meshtrain.plan.shapes import Leaf

FACTORED_FROM = 32  # Adafactor factors a moment whose two largest dimensions have at least as many elements


def elements(config: Config) -> float:
    """Elements of all moments on one device; counts and other scalars are left out."""
    optimizer, stage, data = config.optimizer, shapes.stage(config), shapes.zero_ways(config)
    if optimizer.name in ("adafactor", "muon"):
        block, outer = _by_matrix(optimizer.name, config.model, config.mesh.tensor, stage.vocab_ways, data)
        return block * stage.layers + outer
    slots = {"adamw": 2, "lion": 1, "sgd": 1 if optimizer.beta1 else 0}[optimizer.name]
    held, edge, _ = shapes.held(config.model, config.mesh.tensor, stage.vocab_ways, data)
    return slots * (held.shard * stage.layers + edge.shard)


@functools.lru_cache(maxsize=65536)
def _by_matrix(name: str, model: ModelConfig, tensor: int, vocab_ways: int, data: int) -> tuple[float, float]:
    """(of one layer, outside the layers) for optimizers that work on whole unpadded matrices (`optim.per_matrix`)."""

    def one(leaf: Leaf, layer: bool) -> float:
        everything = range(len(leaf.dims))
        axis_ways = shapes.ways(model, tensor, vocab_ways)
        by_dim = [axis_ways.get(axis, 1) for axis, _ in leaf.dims]

        def moment(dims: list[int]) -> float:
            return _held(leaf, dims, by_dim, data)

        if name == "muon":  # Adam outside the layers and for their norms and biases
            matrix = layer and len(leaf.dims) > 1 and not leaf.name.endswith("bias")
            return (1 if matrix else 2) * moment(list(everything))
        sizes = sorted(everything, key=lambda d: leaf.dims[d][1])
        if len(sizes) < 2 or leaf.dims[sizes[-2]][1] < FACTORED_FROM:
            return moment(list(everything)) + 2  # and a number in the place of each factor
        return sum(moment([d for d in everything if d != dropped]) for dropped in sizes[-2:]) + 1

    block, outer = shapes.leaves(model)
    return sum(one(leaf, True) for leaf in block), sum(one(leaf, False) for leaf in outer)


def _held(leaf: Leaf, kept: list[int], by_dim: list[int], data: int) -> float:
    """Elements on one device of an array with the dimensions `kept` of a weight: split as that is, where it divides unpadded."""
    zero = shapes.zero_dimension(leaf, by_dim, data)
    held = 1
    for d in kept:
        n = leaf.dims[d][1]
        n = n // by_dim[d] if n % by_dim[d] == 0 else n
        held *= n // data if d == zero and leaf.dims[d][1] % (by_dim[d] * data) == 0 else n
    return float(held)
