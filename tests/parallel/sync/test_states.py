"""Metrics of islands as one number in a row."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain.parallel.sync.states import visible


def of_islands(numbers, dtype=np.float32):
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2),
        ("island", "data"),
        axis_types=(AxisType.Auto,) * 2,
    )
    return jax.device_put(
        np.array(numbers, dtype), NamedSharding(mesh, PartitionSpec("island"))
    )


def test_a_row_has_the_mean_over_islands_each_counted_once_and_broken_ones_left_out():
    metrics = {
        "loss": of_islands([1.0, 2.0]),
        "grad_norm": of_islands([3.0, math.nan]),
        "sync_islands": jax.numpy.int32(2),
        "sync_bytes": 8.0,
    }
    assert visible(metrics) == {
        "loss": 1.5,
        "grad_norm": 3.0,
        "sync_islands": 2.0,
        "sync_bytes": 8.0,
    }
    assert math.isnan(visible({"loss": of_islands([math.inf, math.nan])})["loss"])


def test_islands_weigh_by_what_they_learned_from():
    loss, norm = of_islands([4.0, 0.0]), of_islands([3.0, math.nan])
    assert visible({"loss": loss, "counted": of_islands([5.0, 0.0])}) == {"loss": 4.0}
    assert visible({"loss": loss, "counted": of_islands([6.0, 2.0])}) == {"loss": 3.0}
    assert visible({"loss": loss, "counted": of_islands([0.0, 0.0])}) == {"loss": 2.0}
    # one that learned from nothing does not stand in for a broken one
    assert math.isnan(
        visible({"norm": norm, "counted": of_islands([0.0, 9.0])})["norm"]
    )
    assert visible(
        {"loss": jax.numpy.float32(1.5), "counted": jax.numpy.float32(3.0)}
    ) == {"loss": 1.5}


def test_of_steps_that_islands_skipped_a_row_has_the_most():
    assert visible(
        {"skipped": of_islands([12, 1], np.int32), "counted": of_islands([8.0, 8.0])}
    ) == {"skipped": 12.0}


def test_of_what_every_process_knows_of_all_islands_a_row_has_its_own():
    """As a constant learning rate, which XLA leaves whole on each."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("island",), axis_types=(AxisType.Auto,))
    counted, rates = (
        jax.device_put(np.float32(x), NamedSharding(mesh, PartitionSpec()))
        for x in ([5.0], [0.5, 0.25])
    )
    assert visible({"learning_rate": rates, "counted": counted}) == {
        "learning_rate": 0.5
    }
