"""What compression keeps of each weight from step to step, in plain numbers (no JAX), so that the planner adds up what a step has.

                  over: data                                     over: islands
    compressed    the gradient of each data rank                 its shard, once it is summed within the island
    residual      [ranks, *whole], float32                       [islands, *shard of each data rank]
    Q             PowerSGD: of each matrix, the same on all ranks that are summed

A weight that is whole on several tensor or pipeline ranks has a partial gradient on each of them: those count among the ranks.
"""

import math
from dataclasses import dataclass

from meshtrain.config import Config
from meshtrain.config.mesh import DATA, ISLAND
from meshtrain.errors import ConfigError
from meshtrain.parallel.placement import Placed, all_placed

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Spread:
    """An array of the state: its shape over all devices, and for each dimension the mesh axes that split it."""

    shape: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]

    def local(self, config: Config) -> tuple[int, ...]:
        """The shape on one device."""
        return tuple(n // _ways(config, axes) for n, axes in zip(self.shape, self.over, strict=True))


@dataclass(frozen=True)
class Matrix:
    """A weight's gradient as PowerSGD sees it: its dimensions but that of the layers, the first `rows` of them as rows.

        mlp.up    [embed | mlp]             attention.q     [embed | heads, head]
        mlp.down  [mlp | embed]             attention.out   [heads, head | embed]

    Each layer has a matrix of its own, and so has each device along the axes that split the weight.
    """

    rows: int
    rank: int  # columns of P and Q


def across_islands(config: Config) -> bool:
    """Sums across islands alone are compressed: it is asked for, or there are no others."""
    return config.mesh.islands > 1 and (config.parallel.reduce.over == "islands" or config.mesh.shards == 1)


def compresses(config: Config, weight: Placed) -> bool:
    """Whether a weight's gradient is compressed at all: norms and biases never are, and what ZeRO does not shard only across islands."""
    reduce = config.parallel.reduce
    if reduce.compression == "none" or not (weight.trained and weight.decayed):
        return False
    if not across_islands(config) and (reduce.over == "islands" or weight.zero_dim is None):
        return False
    return reduce.compression != "powersgd" or matrix(config, weight) is not None


def compressed(config: Config, weight: Placed) -> Spread:
    """What is compressed of a gradient, without the axes over which it is summed."""
    if not across_islands(config):
        return Spread(weight.whole, weight.over)
    split = tuple((*axes, DATA) if d == weight.zero_dim else axes for d, axes in enumerate(weight.over))
    return Spread(weight.padded, split)


def ranks(config: Config, weight: Placed) -> tuple[str, ...]:
    """The mesh axes whose devices have a gradient each of what is compressed, to be summed over them."""
    return (ISLAND,) if across_islands(config) else (*config.mesh.data_axes, *weight.replicated)


def residual(config: Config, weight: Placed) -> Spread | None:
    """What error feedback keeps of a weight; None where it keeps nothing."""
    if not (config.parallel.reduce.feedback and compresses(config, weight)):
        return None
    what, axes = compressed(config, weight), ranks(config, weight)
    return Spread((_ways(config, axes), *what.shape), (axes, *what.over))


def matrix(config: Config, weight: Placed) -> Matrix | None:
    """How PowerSGD sees a gradient; None for what is no matrix, and where P and Q of this rank were no less than the matrix."""
    rows, rank = _rows(weight), config.parallel.reduce.rank
    return Matrix(rows, rank) if rows is not None and rank <= _largest_rank(config, weight, rows) else None


def check(config: Config) -> None:
    """ConfigError where PowerSGD would compress nothing."""
    reduce, mesh = config.parallel.reduce, config.mesh
    if reduce.compression != "powersgd" or mesh.data == 1 or (reduce.over == "islands" and mesh.islands == 1):
        return
    matrices = [(w, rows) for w in all_placed(config) if w.trained and w.decayed and (rows := _rows(w)) is not None]
    most = max((_largest_rank(config, *seen) for seen in matrices), default=0)
    if reduce.rank > most:
        legal = f"legal are at most {most}" if most else "leave parallel.reduce.compression out"
        raise ConfigError(
            f"parallel.reduce.rank is {reduce.rank}, but no matrix of a device gets smaller by two of so many columns; {legal}."
        )


def _rows(weight: Placed) -> int | None:
    """The dimensions that are rows; None for what is no matrix."""
    axes = weight.axes[weight.stacked :]
    rows = 2 if axes[0] in ("heads", "kv_heads") else 1  # a head's dimensions stay together
    return rows if len(axes) > rows else None


def _largest_rank(config: Config, weight: Placed, rows: int) -> int:
    """Of P and Q that are together smaller than the matrix on a device."""
    local = compressed(config, weight).local(config)[weight.stacked :]
    n, c = math.prod(local[:rows]), math.prod(local[rows:])
    return (n * c - 1) // (n + c)


def q(config: Config, weight: Placed) -> Spread | None:
    """PowerSGD's Q of a weight: [layers, devices that split the rows, *columns, rank], the layers only where they are stacked."""
    if config.parallel.reduce.compression != "powersgd" or not compresses(config, weight):
        return None
    seen = matrix(config, weight)
    assert seen is not None
    what, first = compressed(config, weight), weight.stacked
    columns = first + seen.rows
    splitting = tuple(axis for axes in what.over[first:columns] for axis in axes)
    shape = (*what.shape[:first], _ways(config, splitting), *what.shape[columns:], seen.rank)
    return Spread(shape, (*what.over[:first], splitting, *what.over[columns:], ()))


def nbytes(config: Config) -> dict[str, int]:
    """Bytes on one device of the residuals and of PowerSGD's Q."""
    if config.parallel.reduce.compression == "none":
        return {}
    found = {"residual": residual, "q": q}
    return {
        name: sum(_nbytes(config, of(config, weight)) for weight in all_placed(config)) for name, of in found.items()
    }


def _nbytes(config: Config, kept: Spread | None) -> int:
    return 0 if kept is None else FLOAT32 * math.prod(kept.local(config))


def _ways(config: Config, axes: tuple[str, ...]) -> int:
    return math.prod(config.mesh.ways(axis) for axis in axes)
