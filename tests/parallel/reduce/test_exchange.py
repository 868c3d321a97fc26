"""Sums of encoded gradients: right to what the codecs leave out, the same in all islands, and nothing counted twice."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain.compat import vary, varying
from meshtrain.compression import codec_of
from meshtrain.config import load
from meshtrain.config.reduce import ReduceConfig
from meshtrain.mesh import DATA, ISLAND, make_mesh
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.exchange import all_reduce, scatter

NAMES = ("bfloat16", "float8", "int8", "int4")
# Of a sum of N, of the largest number that was added, for each rounding: half a step of each format.
HALF = {"bfloat16": 2.0**-8, "float8": 2.0**-4, "int8": 1 / 254, "int4": 1 / 14}


def codec(name, block=16):
    return codec_of(
        dataclasses.replace(ReduceConfig(feedback=False), compression=name, block=block)
    )


def mesh_of(data, islands=1):
    return make_mesh(
        load(
            {
                "mesh": {"data": data, "islands": islands},
                "train": {"global_batch_size": data},
            }
        )
    )


def weight(shape, zero_dim, data=8, stacked=True):
    """A weight of layers x rows x columns, or of rows x columns, whole but for ZeRO."""
    padded = tuple(
        -(-n // data) * data if d == zero_dim else n for d, n in enumerate(shape)
    )
    axes = ("layers",) * stacked + ("embed", "mlp")
    return Placed(
        "w",
        axes,
        shape,
        shape,
        padded,
        ((),) * len(shape),
        (1,) * len(shape),
        zero_dim,
        (DATA,),
        data,
    )


def gradients(ranks, shape, seed=0):
    draw = np.random.default_rng(seed)
    return (
        draw.standard_normal((ranks, *shape))
        * 10.0 ** draw.integers(-3, 2, (ranks, *shape))
    ).astype(np.float32)


WEIGHTS = {
    "stacked, rows": weight((3, 16, 5), 1),
    "stacked, columns": weight((2, 5, 24), 2),
    "padded": weight((2, 11, 7), 1),
    "outside the layers": weight((13, 9), 1, stacked=False),
}


@cache
def scattered():
    """(weight, codec) -> gradients of 8 ranks, the whole padded sum, what arrived of each rank's; by one program."""
    given = {name: gradients(8, w.whole) for name, w in WEIGHTS.items()}
    given["layer"] = gradients(8, (16, 5))
    specs = {name: P(DATA) for name in given}
    weights = WEIGHTS | {"layer": WEIGHTS["stacked, rows"]}

    def local(blocks):
        out = {}
        for name, g in blocks.items():
            for compression in NAMES:
                sent = scatter(weights[name], g[0], codec(compression))
                out[name, compression] = tuple(x[None] for x in sent)
        return out

    run = jax.jit(
        jax.shard_map(local, mesh=mesh_of(8), in_specs=(specs,), out_specs=P(DATA))
    )
    return given, weights, jax.device_get(run(given))


@pytest.mark.parametrize("compression", NAMES)
@pytest.mark.parametrize("name", [*WEIGHTS, "layer"])
def test_a_scatter_sums_each_shard_on_its_rank(name, compression):
    given, weights, out = scattered()
    g, w, (shards, arrived) = given[name], weights[name], out[name, compression]
    dim = w.zero_dim - (name == "layer")
    more = w.padded[w.zero_dim] - w.whole[w.zero_dim]
    whole = np.pad(
        g.sum(axis=0), [(0, more if d == dim else 0) for d in range(g.ndim - 1)]
    )
    got = np.concatenate(list(shards), axis=dim)
    assert got.shape == whole.shape
    assert np.abs(got - whole).max() <= HALF[compression] * np.abs(g).max() * 8
    # One number of the sum is off by no more than the eight that were rounded, each by half a step of its block.
    error = np.abs(g - arrived)
    assert 0 < error.max() <= HALF[compression] * np.abs(g).max() * (1 + 1e-4)
    np.testing.assert_allclose(
        np.take(got, range(g.shape[dim + 1]), axis=dim),
        arrived.sum(axis=0),
        rtol=1e-5,
        atol=1e-6 * np.abs(g).max(),
    )


@cache
def reduced(islands):
    """The same across islands, of 2 data ranks each."""
    shapes = {"odd": (3, 7, 5), "short": (1, 2), "even": (4, 48)}
    given = {
        name: gradients(islands * 2, shape, seed=1) for name, shape in shapes.items()
    }

    def local(blocks):
        out = {}
        for name, g in blocks.items():
            for compression in NAMES:
                sent = all_reduce(g[0], codec(compression))
                # Known to be the same in all islands: no axis of theirs in its type.
                assert ISLAND not in varying(sent.shard)
                out[name, compression] = (
                    sent.shard[None],
                    vary(sent.shard, (ISLAND,))[None],
                    sent.arrived[None],
                )
        return out

    rows = P((ISLAND, DATA))
    out_specs = {(n, c): (P(DATA), rows, rows) for n in shapes for c in NAMES}
    mesh = mesh_of(2 * islands, islands)
    run = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=({n: rows for n in shapes},), out_specs=out_specs
        )
    )
    return given, jax.device_get(run(given))


@pytest.mark.thorough
@pytest.mark.parametrize("islands", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("compression", NAMES)
def test_an_all_reduce_is_the_same_sum_in_all_islands(islands, compression):
    given, out = reduced(islands)
    for name, g in given.items():
        _, everywhere, arrived = out[name, compression]
        by_island = everywhere.reshape(islands, 2, *g.shape[1:])
        np.testing.assert_array_equal(
            by_island, np.broadcast_to(by_island[:1], by_island.shape)
        )
        by_rank = g.reshape(islands, 2, *g.shape[1:])
        whole, most = by_rank.sum(axis=0), np.abs(g).max()
        # With more than two islands the sum is rounded once more.
        assert np.abs(by_island[0] - whole).max() <= HALF[compression] * most * (
            islands if islands == 2 else 2 * islands
        )
        came = arrived.reshape(by_rank.shape).sum(axis=0)
        np.testing.assert_allclose(by_island[0], came, rtol=1e-5, atol=1e-6 * most)


def test_an_overflow_on_one_rank_is_seen_on_that_which_sums_it():
    w = WEIGHTS["stacked, rows"]

    def local(g):
        return {c: scatter(w, g[0], codec(c)).shard[None] for c in NAMES}

    g = gradients(8, w.whole)
    g[5, 1, 3, 2] = np.inf  # of rows 2 and 3, which rank 1 sums
    run = jax.jit(
        jax.shard_map(local, mesh=mesh_of(8), in_specs=(P(DATA),), out_specs=P(DATA))
    )
    for shards in jax.device_get(run(g)).values():
        finite = np.isfinite(shards).reshape(8, -1).all(axis=1)
        assert list(np.flatnonzero(~finite)) == [1]
