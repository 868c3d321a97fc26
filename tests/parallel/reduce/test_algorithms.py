"""Every program equals psum on 2 to 8 devices, to the last bit the same on all of them, and sends what theory says, in
messages alone.

all-reduce          messages one after the other    bytes of S that a device sends on average
ring                2 (n-1)                         2 (n-1)/n
two-way ring        2 floor(n/2)                    2 (n-1)/n
halving-doubling    2 floor(log2 n) + 2 if folded   2 (n-1)/n
double tree         at most 4 (p + log2 n)          2 (n-1)/n
"""

import functools
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import thorough_but
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshtrain.allreduce import ALGORITHMS
from meshtrain.compat import varying
from meshtrain.hlo import Module, collectives
from meshtrain.parallel.reduce import double_tree
from meshtrain.parallel.reduce.algorithms import all_gather, all_reduce, reduce_scatter

FLAT = [
    name for name, entry in ALGORITHMS.items() if name != "psum" and not entry.by_levels
]
# A prime, so that nothing divides it; padding is far below 1%.
ODD = (53, 191)
PIECES = 3


def mesh_of(shape, axes):
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def numbers(n, dtype, shape=ODD):
    return jnp.asarray(np.random.default_rng(n).standard_normal((n, *shape)), dtype)


class Compiled:
    """Programs by name on one mesh, compiled into one; each returns an array a device, [n, ...]."""

    def __init__(self, mesh, programs, x):
        self.mesh, self.shape = mesh, x.shape[1:]
        everywhere = PartitionSpec(mesh.axis_names)

        def local(x):
            found = {}
            for i, (name, program) in enumerate(programs.items()):
                with jax.named_scope(f"<{name}>"):
                    # Else XLA sends once what two programs send alike. Powers of two change no bit but the exponent's.
                    found[name] = program(x[0] * 2**i)[None] / 2**i
            return found

        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=everywhere, out_specs=everywhere
        )
        compiled = jax.jit(mapped).lower(x).compile()
        self.results = {
            name: np.asarray(y, np.float64) for name, y in compiled(x).items()
        }
        self.module = Module(compiled.as_text())
        self.collectives = defaultdict(list)
        for c in collectives(self.module, mesh):
            self.collectives[c.source.split("<")[1].split(">")[0]].append(c)

    def bytes(self, name):
        """That a device sends on average."""
        return sum(c.sent * c.senders for c in self.collectives[name])


@functools.cache
def flat(n, dtype):
    """All programs over one axis of n devices."""
    programs = {name: functools.partial(all_reduce, name, axes="x") for name in FLAT}
    programs["pipelined"] = lambda x: double_tree.all_reduce(x, "x", PIECES)
    return Compiled(mesh_of((n,), ("x",)), programs, numbers(n, dtype))


every_n = pytest.mark.parametrize(
    "n",
    # Odd and a power of two; two of them
    thorough_but((2, 3, 4, 6, 8), (3, 4).__contains__, [8]),
)
every_program = pytest.mark.parametrize("name", [*FLAT, "pipelined"])


@every_n
@every_program
def test_the_sum_is_that_of_psum_and_bit_for_bit_the_same_on_all_devices(n, name):
    found, exact = (
        flat(n, "float32").results[name],
        np.asarray(numbers(n, "float32"), np.float64).sum(0),
    )
    assert (found == found[0]).all()
    assert np.linalg.norm(found[0] - exact) < 1e-6 * np.linalg.norm(exact)


@pytest.mark.thorough
@every_n
@every_program
def test_in_bfloat16_it_errs_no_more_than_additions_round(n, name):
    found = flat(n, "bfloat16").results[name]
    exact = np.asarray(numbers(n, "bfloat16"), np.float64).sum(0)
    assert (found == found[0]).all()
    # each of n - 1 additions by at most half of 2^-7 of the partial sum
    assert np.linalg.norm(found[0] - exact) < math.sqrt(n - 1) * 2**-8 * np.linalg.norm(
        exact
    )


@every_n
@every_program
def test_only_messages_are_sent_and_as_many_bytes_as_theory_says(n, name):
    compiled = flat(n, "float32")
    assert {c.kind for c in compiled.collectives[name]} == {"collective-permute"}
    assert compiled.bytes(name) == pytest.approx(
        2 * (n - 1) / n * 4 * math.prod(ODD), rel=0.01
    )


@every_n
def test_messages_follow_each_other_as_often_as_theory_says(n):
    k, folded = n.bit_length() - 1, 2 * (n & (n - 1) > 0)
    counts = {
        name: len(found) for name, found in flat(n, "float32").collectives.items()
    }
    assert counts["ring"] == counts["two_way_ring"] == 2 * (n - 1)
    assert steps(n, "ring") == 2 * (n - 1) and steps(n, "two_way_ring") == 2 * (n // 2)
    assert counts["halving_doubling"] == 2 * k + folded
    assert counts["double_tree"] <= 4 * (1 + math.log2(n)) and counts[
        "pipelined"
    ] <= 4 * (PIECES + math.log2(n))


def steps(n, name):
    """The longest chain of messages, each of which needs what came with one before."""
    module = flat(n, "float32").module
    depth: dict[str, int] = {}
    for op in module.computations[module.entry]:
        before = max((depth.get(operand, 0) for operand in op.operands), default=0)
        depth[op.name] = before + (op.kind != "" and f"<{name}>" in op.source)
    return max(depth.values())


@every_n
def test_two_trees_leave_no_device_idle_or_overtaxed(n):
    """Each is within one tree at most, and in a step sends one message and receives one."""
    within = [
        {p for tree, _, p in double_tree.edges(n) if tree == t}
        for t in range(double_tree.TREES)
    ]
    assert not within[0] & within[1]
    passed = defaultdict(int)
    for step in double_tree.messages_up(n, PIECES):
        assert (
            len({m.source for m in step}) == len({m.target for m in step}) == len(step)
        )
        for m in step:
            passed[m.source] += 1
    # Of a root the other tree is all that it sends up.
    assert sorted(passed.values()) == [PIECES] * 2 + [2 * PIECES] * (n - 2)


HALVES = [name for name in FLAT if ALGORITHMS[name].programs().reduce_scatter]


@functools.cache
def halves(n, dtype):
    names = [name for name in HALVES if name != "halving_doubling" or n & (n - 1) == 0]
    programs = {
        f"{name} scatter": functools.partial(reduce_scatter, name, axes="x", dim=1)
        for name in names
    }
    programs |= {
        f"{name} gather": functools.partial(all_gather, name, axis="x")
        for name in names
    }
    return Compiled(mesh_of((n,), ("x",)), programs, numbers(n, dtype, (3, 7 * n, 5)))


@every_n
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_halves_scatter_along_a_dimension_and_gather_along_the_first(n, dtype):
    compiled, x = (
        halves(n, dtype),
        np.asarray(numbers(n, dtype, (3, 7 * n, 5)), np.float64),
    )
    parts = np.stack(np.split(x.sum(0), n, axis=1))
    for name, found in compiled.results.items():
        if name.endswith("gather"):
            assert (found == x.reshape(-1, 7 * n, 5)).all(), name
            sent = (n - 1) * x[0].size
        else:
            off = np.linalg.norm(found - parts) / np.linalg.norm(parts)
            assert off < (1e-6 if dtype == "float32" else math.sqrt(n - 1) * 2**-8), (
                name
            )
            sent = (n - 1) / n * x[0].size
        assert {c.kind for c in compiled.collectives[name]} == {"collective-permute"}, (
            name
        )
        if dtype == "float32":
            assert compiled.bytes(name) == pytest.approx(4 * sent, rel=0.01), name


@pytest.mark.parametrize(
    "shape",
    [
        (2, 3),
        pytest.param((2, 4), marks=pytest.mark.slow),
        pytest.param((4, 2), marks=pytest.mark.thorough),
    ],
)
def test_over_two_axes_the_hierarchical_one_sends_a_share_across_and_the_others_take_them_for_one(
    shape,
):
    islands, inside = shape
    n = islands * inside
    names = ["ring", "double_tree", "hierarchical"]
    programs = {
        name: functools.partial(all_reduce, name, axes=("island", "data"))
        for name in names
    }
    compiled = Compiled(
        mesh_of(shape, ("island", "data")), programs, numbers(n, "float32")
    )
    exact, nbytes = (
        np.asarray(numbers(n, "float32"), np.float64).sum(0),
        4 * math.prod(ODD),
    )
    for name, found in compiled.results.items():
        assert (found == found[0]).all(), name
        assert np.linalg.norm(found[0] - exact) < 1e-6 * np.linalg.norm(exact), name
        assert compiled.bytes(name) == pytest.approx(
            2 * (n - 1) / n * nbytes, rel=0.01
        ), name
    by_axis = defaultdict(float)
    for c in compiled.collectives["hierarchical"]:
        by_axis[c.axis] += c.sent
    across = 2 * (islands - 1) / islands * nbytes / inside
    assert by_axis == pytest.approx(
        {"data": 2 * (inside - 1) / inside * nbytes, "island": across}, rel=0.01
    )


def test_what_all_devices_have_is_typed_so_and_the_axes_that_were_not_summed_over_are_kept():
    seen = {}

    def local(x):
        for name in ALGORITHMS:
            axes = ("island", "data") if name == "hierarchical" else "data"
            seen[name] = varying(all_reduce(name, x, axes))
        return x

    mesh = mesh_of((2, 2, 2), ("island", "data", "tensor"))
    everywhere = PartitionSpec(mesh.axis_names)
    jax.eval_shape(
        jax.shard_map(local, mesh=mesh, in_specs=everywhere, out_specs=everywhere),
        numbers(8, "float32"),
    )
    kept = {
        name: {"tensor"} if name == "hierarchical" else {"island", "tensor"}
        for name in ALGORITHMS
    }
    assert seen == kept


def test_one_device_has_the_sum_already():
    compiled = Compiled(
        mesh_of((1,), ("x",)),
        {name: functools.partial(all_reduce, name, axes=("x",)) for name in FLAT},
        numbers(1, "float32"),
    )
    assert not compiled.collectives
    assert all(
        (found == np.asarray(numbers(1, "float32"), np.float64)).all()
        for found in compiled.results.values()
    )


def test_an_algorithm_says_where_it_has_no_reduce_scatter():
    for name, entry in ALGORITHMS.items():
        assert (entry.programs is None) == (entry.seconds is None) == (name == "psum")
        if name != "psum":
            assert bool(entry.no_scatter(8)) == (
                entry.programs().reduce_scatter is None
            )
            assert not ALGORITHMS[entry.instead].no_scatter(6)
    assert ALGORITHMS["halving_doubling"].no_scatter(6)
