"""The sizes of each weight's compressed gradient, in plain numbers (no JAX), so that the planner adds up what a step
sends and keeps.

                  over: data                                     over: islands
    compressed    the gradient of each data rank                 its shard, once it is summed within the island
    residual      [ranks, *gradient], float32                    [islands, *shard of each data rank]
    Q             PowerSGD: of each matrix, the same on all ranks that are summed

A weight that is replicated on several tensor or pipeline ranks has a partial gradient on each of them: those count
among the ranks.

k numbers of a row that goes to one device are sent as

    bfloat16      2 k
    float8, int8  k + 4 ceil(k / block)           a float32 scale a block; the last block is as short as it is
    int4          ceil(k / 2) + 4 ceil(k / block)
    topk          8 ratio k                       float32 and int32 place of the largest alone
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from meshtrain.compression import COMPRESSIONS, codec_of
from meshtrain.config import Config
from meshtrain.config.mesh import ISLAND
from meshtrain.config.reduce import ReduceConfig
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
        return tuple(
            n // _ways(config, axes)
            for n, axes in zip(self.shape, self.over, strict=True)
        )


@dataclass(frozen=True)
class GradientMatrix:
    """A weight's gradient as PowerSGD sees it: its dimensions but those of layers and experts, the first `rows` of them
    as rows.

        mlp.up    [embed | mlp]             attention.q     [embed | heads, head]
        mlp.down  [mlp | embed]             attention.out   [heads, head | embed]

    Each layer, and of it each expert, has a matrix of its own, and so has each device along the axes that split the
    weight.
    """

    first: int  # dimensions before: of layers and experts
    rows: int
    rank: int  # columns of P and Q


def over_islands(config: Config) -> bool:
    """Sums across islands alone are compressed: it is asked for, or there are no others."""
    return config.mesh.islands > 1 and (
        config.parallel.reduce.over == "islands" or config.mesh.shards == 1
    )


def compresses(config: Config, weight: Placed) -> bool:
    """Returns whether a weight's gradient is compressed at all: norms and biases never are, and what ZeRO does not
    shard only across islands.
    """
    reduce = config.parallel.reduce
    if reduce.compression == "none" or not (weight.trained and weight.decayed):
        return False
    if not over_islands(config) and (
        reduce.over == "islands" or weight.zero_dim is None
    ):
        return False
    return not _is_low_rank(config) or as_matrix(config, weight) is not None


def compressed_part(config: Config, weight: Placed) -> Spread:
    """The array of a gradient that is compressed, without the axes over which it is summed."""
    if not over_islands(config):
        return Spread(weight.whole, weight.over)
    return Spread(weight.padded, weight.shard_over)


def summed_over(config: Config, weight: Placed) -> tuple[str, ...]:
    """The mesh axes whose devices have a gradient each of what is compressed, to be summed over them."""
    across = (ISLAND,) if config.mesh.islands > 1 else ()
    if over_islands(config):
        return across
    return (*across, *weight.zero_axes, *weight.replicated)


def residual_spread(config: Config, weight: Placed) -> Spread | None:
    """The error-feedback residual of a weight; None where there is none."""
    if not (config.parallel.reduce.feedback and compresses(config, weight)):
        return None
    what = compressed_part(config, weight)
    axes = summed_over(config, weight)
    return Spread((_ways(config, axes), *what.shape), (axes, *what.over))


def as_matrix(config: Config, weight: Placed) -> GradientMatrix | None:
    """Returns the matrix that PowerSGD sees in a gradient; None if it has none, or if P and Q of this rank would not be
    smaller.
    """
    rows = _rows(weight)
    rank = config.parallel.reduce.rank
    if rows is None or rank > _largest_rank(config, weight, rows):
        return None
    return GradientMatrix(_first(weight), rows, rank)


def check_rank(config: Config) -> None:
    """ConfigError where PowerSGD would compress nothing."""
    reduce = config.parallel.reduce
    mesh = config.mesh
    if (
        not _is_low_rank(config)
        or mesh.data == 1
        or (reduce.over == "islands" and mesh.islands == 1)
    ):
        return
    matrices = [
        (w, rows)
        for w in all_placed(config)
        if w.trained and w.decayed and (rows := _rows(w)) is not None
    ]
    most = max(
        (_largest_rank(config, weight, rows) for weight, rows in matrices), default=0
    )
    if reduce.rank > most:
        legal = (
            f"legal are at most {most}"
            if most
            else "leave parallel.reduce.compression out"
        )
        raise ConfigError(
            f"parallel.reduce.rank is {reduce.rank}, but no matrix of a device gets smaller by two of so many "
            f"columns; {legal}."
        )


def _first(weight: Placed) -> int:
    """The dimensions that count matrices: of layers, and of experts."""
    return weight.stacked + (weight.axes[weight.stacked] == "experts")


def _rows(weight: Placed) -> int | None:
    """Returns the dimensions that are rows; None unless the array is a matrix."""
    axes = weight.axes[_first(weight) :]
    if not axes:
        return None
    # A head's dimensions stay together
    rows = 2 if axes[0] in ("heads", "kv_heads") else 1
    return rows if len(axes) > rows else None


def _largest_rank(config: Config, weight: Placed, rows: int) -> int:
    """The largest rank of P and Q that are together smaller than the matrix on a device."""
    local = compressed_part(config, weight).local(config)[_first(weight) :]
    n = math.prod(local[:rows])
    c = math.prod(local[rows:])
    return (n * c - 1) // (n + c)


def q_spread(config: Config, weight: Placed) -> Spread | None:
    """PowerSGD's Q of a weight: [layers, experts, devices that split the rows, *columns, rank], without what it does
    not have of the first two.
    """
    if not _is_low_rank(config) or not compresses(config, weight):
        return None
    matrix = as_matrix(config, weight)
    assert matrix is not None
    what = compressed_part(config, weight)
    first = matrix.first
    columns = first + matrix.rows
    splitting = tuple(axis for axes in what.over[first:columns] for axis in axes)
    shape = (
        *what.shape[:first],
        _ways(config, splitting),
        *what.shape[columns:],
        matrix.rank,
    )
    return Spread(shape, (*what.over[:first], splitting, *what.over[columns:], ()))


def feedback_bytes(config: Config) -> dict[str, int]:
    """Bytes on one device of the residuals and of PowerSGD's Q."""
    if config.parallel.reduce.compression == "none":
        return {}
    spreads = {"residual": residual_spread, "q": q_spread}
    return {
        name: sum(_nbytes(config, of(config, weight)) for weight in all_placed(config))
        for name, of in spreads.items()
    }


def _nbytes(config: Config, spread: Spread | None) -> int:
    return 0 if spread is None else FLOAT32 * math.prod(spread.local(config))


def _is_low_rank(config: Config) -> bool:
    return COMPRESSIONS[config.parallel.reduce.compression].low_rank


def _ways(config: Config, axes: tuple[str, ...]) -> int:
    return math.prod(config.mesh.ways(axis) for axis in axes)


# --- what is sent


def message_length(reduce: ReduceConfig, numbers: Iterable[int], islands: int) -> int:
    """Numbers of one message of several weights' numbers, across islands.

    Each weight has blocks of its own, also in an island's chunk: what it is decoded to depends on nothing beside it, so
    that ranks which have the same of it, and other neighbours, stay alike.
    """
    codec = codec_of(reduce)
    return codec.in_blocks(sum(map(codec.in_blocks, numbers)), islands)


def scatters_compressed(config: Config, weight: Placed) -> bool:
    """Returns whether a weight's gradient is compressed on its way to the shards of an island."""
    return compresses(config, weight) and not over_islands(config)


def crosses_compressed(config: Config, weight: Placed) -> bool:
    """Returns whether a weight's gradient is compressed on its way across islands.

    PowerSGD over data sums over all of data at once.
    """
    at_once = _is_low_rank(config) and not over_islands(config)
    return config.mesh.islands > 1 and compresses(config, weight) and not at_once


def chunk_length(k: int, islands: int) -> int:
    """Numbers of a shard of k of which an island makes the sum (`exchange.all_reduce`); the last ones are filled up
    with zeros.
    """
    return math.ceil(k / islands)
