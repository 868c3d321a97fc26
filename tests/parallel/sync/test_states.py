"""Metrics of islands as one number in a row."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain.parallel.sync.states import visible


def of_islands(numbers):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("island", "data"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(np.array(numbers, np.float32), NamedSharding(mesh, PartitionSpec("island")))


def test_a_row_has_the_mean_over_islands_each_counted_once_and_broken_ones_left_out():
    metrics = {"loss": of_islands([1.0, 2.0]), "grad_norm": of_islands([3.0, math.nan]), "sync_islands": jax.numpy.int32(2), "sync_bytes": 8.0}  # fmt: skip
    assert visible(metrics) == {"loss": 1.5, "grad_norm": 3.0, "sync_islands": 2.0, "sync_bytes": 8.0}
    assert math.isnan(visible({"loss": of_islands([math.inf, math.nan])})["loss"])
