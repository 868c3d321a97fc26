"""Muon's matrices in stacks: which weights join one, and how many of its matrices a rank takes.

    gate, up, down transposed    layers x [embed, mlp]      one stack where shapes and shards are the same
    q, out transposed            layers x [embed, heads]    another one

A pipeline stage has the stacks of its own layers, a rank of experts those of its own experts; the matrices of each are
dealt out to all other ranks. No JAX: `orthogonal` makes arrays of it, and the planner adds it up.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshtrain.config import MeshConfig
from meshtrain.config.mesh import TENSOR
from meshtrain.optimizers import matrix_sides
from meshtrain.parallel.placement import Placed, unused


@dataclass(frozen=True)
class MatrixForm:
    """The dimensions of a matrix, and how they are sharded."""

    sizes: tuple[int, ...]
    padded: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]  # per dimension, the mesh axes that shard it
    rows: int  # how many of the dimensions are those of its rows, the first ones
    # The mesh axes over which each rank has a copy of the shards.
    copies: tuple[str, ...]
    alone: str = ""  # the weight's name, where no rank shares the work with another one

    @property
    def holders(self) -> tuple[str, ...]:
        """The mesh axes over which the shards of a matrix lie."""
        return tuple(axis for axes in self.over for axis in axes)

    @property
    def sides(self) -> tuple[int, int]:
        """The rows and the columns of a matrix."""
        return math.prod(self.sizes[: self.rows]), math.prod(self.sizes[self.rows :])


@dataclass(frozen=True)
class Stack:
    """The matrices of some weights, all of one form, dealt out to ranks."""

    form: MatrixForm
    # Weights, with their dimensions in its order
    members: list[tuple[Placed, tuple[int, ...]]]
    ranks: int
    on_rank: int  # matrices of a rank, those that fill up the last ones among them


def make_stacks(mesh: MeshConfig, weights: Iterable[Placed]) -> list[Stack]:
    """Returns the stacks of some weights of layers."""
    joined: dict[MatrixForm, list[tuple[Placed, tuple[int, ...]]]] = {}
    axes = tuple(
        a for a in (*mesh.token_axes(across=False), TENSOR) if mesh.ways(a) > 1
    )
    for weight in weights:
        form, dims = _form(mesh, weight, axes)
        joined.setdefault(form, []).append((weight, dims))
    stacks = []
    for form, members in joined.items():
        matrices = sum(
            math.prod(
                weight.padded[d] // weight.ways[d] for d in batch_dims(weight, dims)
            )
            for weight, dims in members
        )
        ranks = math.prod(mesh.ways(axis) for axis in (*form.copies, *form.holders))
        stacks.append(Stack(form, members, ranks, math.ceil(matrices / ranks)))
    return stacks


def batch_dims(weight: Placed, dims: Sequence[int]) -> list[int]:
    """Returns the dimensions along which matrices are counted: layers, and experts."""
    return [d for d in range(len(weight.axes)) if d not in dims]


def _form(
    mesh: MeshConfig, weight: Placed, axes: tuple[str, ...]
) -> tuple[MatrixForm, tuple[int, ...]]:
    """Returns the form of a weight's matrices, and the weight's dimensions in its order; `axes`: those of the ranks."""
    rows, columns = matrix_sides(weight)
    rank_axes = unused(
        axes, [weight.over[d] for d in batch_dims(weight, (*rows, *columns))]
    )
    # What leads into the stream is transposed, so that its shards lie as those of what leads out of it.
    if rank_axes and weight.axes[-1] == "embed":
        rows, columns = columns, rows
    dims = (*rows, *columns)
    over = tuple(
        tuple(axis for axis in weight.shard_over[d] if mesh.ways(axis) > 1)
        for d in dims
    )
    form = MatrixForm(
        tuple(weight.shape[d] for d in dims),
        tuple(weight.padded[d] for d in dims),
        over,
        len(rows),
        unused(rank_axes, over),
        "" if rank_axes else weight.name,
    )
    return form, dims
