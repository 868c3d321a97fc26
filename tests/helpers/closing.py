"""The close of a step alone: made-up gradients of every device, summed as a config says, beside what they must add up
to.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.parallelize import make_zero
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.feedback import FeedbackState

# nothing divides; the norms go uncompressed
MODEL = {
    "layers": 3,
    "d_model": 22,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 6,
    "d_ff": 50,
    "vocab_size": 131,
}
Arrays = dict[str, np.ndarray]


class Closing:
    """`Zero.reduce_grads` of a config, compiled once; gradients are float32 [*mesh, *on a device], by the weight's
    name.
    """

    def __init__(
        self, mesh: Mapping[str, int], reduce: Mapping[str, Any], **parallel: Any
    ) -> None:
        self.config = load(
            {
                "model": MODEL,
                "mesh": dict(mesh),
                "parallel": {"reduce": dict(reduce), **parallel},
                "train": {"global_batch_size": 24, "sequence_length": 16},
            }
        )
        self.mesh = make_mesh(self.config)
        self.layout = Layout(self.config, self.mesh)
        self.zero = make_zero(self.layout)
        self.weights: dict[str, Placed] = {
            weight.name: weight for weight in self.layout.flat
        }
        of_device, of_kept = (
            PartitionSpec(*self.mesh.axis_names),
            self.zero.feedback.specs,
        )
        lead = (0,) * len(self.mesh.axis_names)

        def close(
            gradients: Any, kept: FeedbackState, scale: jax.Array
        ) -> tuple[Any, ...]:
            return tuple(
                self.zero.reduce_grads(
                    jax.tree.map(lambda g: g[lead], gradients), kept, scale
                )
            )

        specs = (self.layout.shards, of_kept, PartitionSpec())
        self.step = jax.jit(
            jax.shard_map(
                close,
                mesh=self.mesh,
                in_specs=(of_device, of_kept, PartitionSpec()),
                out_specs=specs,
            )
        )
        begin = jax.jit(
            self.zero.feedback.init,
            out_shardings=jax.tree.map(lambda x: x.sharding, self.zero.feedback.shapes),
        )
        self.kept: FeedbackState = begin(jax.random.key(0))
        self.sent: Arrays = {
            name: np.zeros(weight.whole, np.float64)
            for name, weight in self.weights.items()
        }

    def draw(self, random: np.random.Generator) -> Arrays:
        """Gradients of every device, of other sizes in other weights."""
        sizes = tuple(self.mesh.shape.values())
        found = {}
        for n, (name, weight) in enumerate(self.weights.items()):
            local = tuple(
                whole // ways
                for whole, ways in zip(weight.whole, weight.ways, strict=True)
            )
            found[name] = random.standard_normal(
                sizes + local, np.float32
            ) * np.float32(10.0 ** -(n % 4))
        return found

    def close(
        self, gradients: Arrays, scale: float = 1.0
    ) -> tuple[Arrays, dict[str, float]]:
        """The sums [*whole] of gradients times the loss scale, without it; what is kept goes on to the next call."""
        tree = self.layout.map(
            lambda weight: gradients[weight.name] * np.float32(scale)
        )
        shards, self.kept, statistics = self.step(tree, self.kept, jnp.float32(scale))
        named = zip(self.weights.values(), jax.tree.leaves(shards), strict=True)
        found = {
            w.name: np.asarray(x)[tuple(slice(n) for n in w.whole)] / scale
            for w, x in named
        }
        for name, x in found.items():
            self.sent[name] += x
        return found, {name: float(x) for name, x in statistics.items()}

    def total(self, gradients: Arrays) -> Arrays:
        """What the sums would be without compression [*whole]."""
        axes, sizes = self.mesh.axis_names, tuple(self.mesh.shape.values())
        found = {}
        for name, weight in self.weights.items():
            whole = np.zeros(weight.whole, np.float64)
            for at in itertools.product(*map(range, sizes)):
                block, place = gradients[name][at], []
                for n, over in zip(block.shape, weight.over, strict=True):
                    index = 0
                    for axis in over:
                        index = index * self.mesh.shape[axis] + at[axes.index(axis)]
                    place.append(slice(index * n, (index + 1) * n))
                whole[tuple(place)] += block
            found[name] = whole
        return found

    def residuals(self) -> Arrays:
        """What is owed of each weight, of all ranks together [*whole]; zero of what has none."""
        found = {}
        flat = jax.tree.leaves(self.kept.residual, is_leaf=lambda x: x is None)
        for weight, x in zip(self.weights.values(), flat, strict=True):
            summed = (
                np.zeros(weight.whole)
                if x is None
                else np.asarray(x, np.float64).sum(0)
            )
            found[weight.name] = summed[tuple(slice(n) for n in weight.whole)]
        return found
