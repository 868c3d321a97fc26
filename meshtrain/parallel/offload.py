"""State and activations in host memory (`pinned_host`), where the backend has it; and the check that it changes no
gradient.

Activations travel under remat: names (`parallel.remat_offload`), the optimizer state with `parallel.offload_optimizer`:
it comes to the device for the update and goes back, so that between updates only parameters are there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshtrain.config import Config, ConfigError

Tree = Any
HOST = "pinned_host"
# Relative, of the gradient's norm: the same program with other memory may round differently, no more
TOLERANCE = 1e-5


def check_memory(config: Config, mesh: Mesh) -> None:
    """ConfigError where something is to be kept on the host and the mesh's devices cannot."""
    asked = [
        key
        for key in ("offload_optimizer", "remat_offload")
        if getattr(config.parallel, key)
    ]
    if asked:
        kinds = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
    else:
        kinds = []
    if kinds and HOST not in kinds:  # described devices tell of none
        raise ConfigError(
            f"parallel.{asked[0]} needs {HOST} memory, but these devices have only {', '.join(kinds)}."
        )


def host_shardings(shapes: Tree, shardings: Tree) -> Tree:
    """The shardings of arrays of such shapes, in host memory; scalars stay (they cost nothing)."""
    return jax.tree.map(
        lambda x, s: s.with_memory_kind(HOST) if x.ndim else s, shapes, shardings
    )


def move(tree: Tree, shardings: Tree) -> Tree:
    """Inside jit: the arrays into the memory of their shardings."""
    return jax.tree.map(jax.device_put, tree, shardings)


def judged(difference: float, compute: str) -> str:
    """Returns a run's message on the gradients with offloaded activations, compared with those without;
    FloatingPointError if they are wrong.
    """
    if not difference < TOLERANCE * (1 if compute == "float32" else 1000):
        raise FloatingPointError(
            f"with parallel.remat_offload the gradients differ by {difference:.1e} from those without; "
            "this backend offloads wrongly, so leave it out."
        )
    return f"offloaded activations checked: gradients differ by {difference:.1e}"


def relative_difference(a: Tree, b: Tree) -> jax.Array:
    """|a - b| / |b| over a whole tree of gradients."""
    square = lambda x: jnp.sum(jnp.square(x))
    squares = lambda tree: sum(map(square, jax.tree.leaves(tree)))
    difference = jax.tree.map(jnp.subtract, a, b)
    return jnp.sqrt(squares(difference) / squares(b))
