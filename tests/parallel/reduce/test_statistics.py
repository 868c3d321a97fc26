"""The error in the row of metrics is the norm that NumPy finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.parallel.reduce.reduction import Reduced, left_out, statistics


def error(given, arrived, exactly=(), fed_back=False):
    """Of two weights on four ranks, and of those that are sent as they are."""

    def local(given, arrived):
        squares = []
        for i, (g, a) in enumerate(zip(given, arrived, strict=True)):
            squares += left_out(g, Reduced(g, g if i in exactly else a))
        return statistics(squares, ("data",), jnp.float32(4.0), fed_back)

    mesh = make_mesh(load(None, ["mesh.data=4", "train.global_batch_size=4"]))
    shaped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P()
    )
    return jax.device_get(jax.jit(shaped)(given, arrived))


def test_the_error_is_the_norm_of_what_was_left_out_over_that_of_what_was_given():
    draw = np.random.default_rng(0)
    given = [
        draw.standard_normal(shape).astype(np.float32) for shape in ((8, 3), (4, 5))
    ]
    arrived = [np.round(g, 1) for g in given]
    lost = np.sqrt(
        sum(
            np.square(g.astype(float) - a).sum()
            for g, a in zip(given, arrived, strict=True)
        )
    )
    whole = np.sqrt(sum(np.square(g.astype(float)).sum() for g in given))
    assert error(given, arrived)["reduce_error"] == pytest.approx(
        lost / whole, rel=1e-5
    )
    kept = error(given, arrived, fed_back=True)
    assert kept["residual_norm"] == pytest.approx(lost / 4, rel=1e-5), (
        "without the loss scale"
    )
    one = np.linalg.norm(given[1] - arrived[1]) / np.linalg.norm(given[1])
    assert error(given, arrived, exactly=(0,))["reduce_error"] == pytest.approx(
        one, rel=1e-5
    )


def test_of_gradients_that_are_zero_nothing_is_left_out_and_of_an_overflow_the_error_is_none():
    zeros = [np.zeros((4, 2), np.float32)]
    assert error(zeros, zeros)["reduce_error"] == 0
    assert not np.isfinite(
        error([np.full((4, 2), np.inf, np.float32)], zeros)["reduce_error"]
    )
    assert error(zeros, zeros, exactly=(0,)) == {}
