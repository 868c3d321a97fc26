"""Which mesh a model generates on: the one that is asked for, else one device, or as many as its weights and cache need.

    on one device      weights / tensor  +  cache of slots / data  +  what is there for a moment

Tensor ranks share weights and cache; data ranks have the weights once more, and share the slots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from meshtrain.config import Config, MeshConfig, check, replaced
from meshtrain.config.mesh import AXES, DATA, TENSOR
from meshtrain.errors import ConfigError, divisors, nearest, short
from meshtrain.generate.cache import OwnGroups
from meshtrain.mesh import kind_of
from meshtrain.parallel.placement import all_placed
from meshtrain.plan.shapes import itemsize


@dataclass(frozen=True)
class Needs:
    """Bytes on one device."""

    weights: int
    cache: int
    moment: (
        int  # the largest weight of all layers, twice while it is taken over, or the activations of the longest prompt
    )

    @property
    def all(self) -> int:
        return self.weights + self.cache + self.moment


def needs(config: Config, slots: int, length: int) -> Needs:
    """What generating takes on the config's mesh, which has no stages."""
    model, mesh, size = config.model, config.mesh, itemsize(config.precision.compute)
    placed = [weight.on_device() * size for weight in all_placed(config)]
    groups = OwnGroups(model.heads, model.kv_heads, mesh.tensor).each
    cache = 2 * model.layers * math.ceil(slots / mesh.data) * groups * length * model.head_dim * size
    # the stream and what its branches make of it; logits are of one position
    of_token = 8 * model.d_model + 3 * math.ceil(model.d_ff / mesh.tensor)
    return Needs(sum(placed), cache, max(*placed, length * of_token * size + 8 * slots * model.vocab_size))


def choose(
    config: Config, asked: str | None, slots: int, length: int, devices: Sequence[jax.Device] | None = None
) -> MeshConfig:
    """The mesh for so many slots of `length` positions, of the axes data and tensor.

    `asked` is as "data=2,tensor=2". Else it is one device, and on accelerators whose memory is too small for that the smallest tensor that
    divides the heads and fits; `devices` are JAX's, which are not asked for where a mesh is. ConfigError for a mesh that cannot be, and where
    none is large enough.
    """
    if asked is not None:
        mesh = parsed(asked)
        check(_on(config, mesh))
        if slots % mesh.data:
            raise ConfigError(f"mesh data={mesh.data} does not divide {slots} slots; legal are {divisors(slots)}.")
        return mesh
    devices = jax.devices() if devices is None else devices
    memory = _memory(devices)
    legal = [t for t in range(1, len(devices) + 1) if config.model.heads % t == 0]
    if not memory:
        return MeshConfig()
    for tensor in legal:
        found = needs(_on(config, MeshConfig(tensor=tensor)), slots, length)
        if found.all <= memory:
            return MeshConfig(tensor=tensor)
    gib = [f"{n / 2**30:.1f}" for n in (found.weights, found.cache, found.moment, memory)]
    raise ConfigError(
        f"on tensor {legal[-1]} each device needs {gib[0]} GiB for weights, {gib[1]} for the cache of {slots} x {length} positions and "
        f"{gib[2]} besides, and has {gib[3]}; give fewer slots, shorter ones, or more devices."
    )


def _memory(devices: Sequence[jax.Device]) -> int:
    """Bytes of the smallest device that JAX may take, 0 where it tells none: fake devices share the host's."""
    if kind_of(devices[0]) == "cpu":
        return 0
    return min(int((device.memory_stats() or {}).get("bytes_limit", 0)) for device in devices)


def _on(config: Config, mesh: MeshConfig) -> Config:
    whole = {"zero_stage": 0, "sequence_parallel": False, "vocab": "spread"}
    return replaced(config, mesh=vars(mesh), parallel=whole, train={"uneven_batch": "pad"})


def parsed(asked: str) -> MeshConfig:
    """The mesh of a text as "data=2,tensor=2"."""
    sizes: dict[str, int] = {}
    for part in asked.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in (DATA, TENSOR):
            ending = (
                "; a model generates on data x tensor, without stages."
                if axis in AXES
                else nearest(axis, (DATA, TENSOR)) or "; legal are data and tensor, as data=2,tensor=2."
            )
            raise ConfigError(f"the mesh has an axis {short(repr(axis))}{ending}")
        if axis in sizes:
            raise ConfigError(f"the mesh has {axis} twice; give it once.")
        if not size.isascii() or not size.isdecimal() or not 1 <= int(size[:7]) <= 10**5:
            raise ConfigError(f"mesh {axis} is {short(repr(size))}; it must be a whole number from 1 on, as {axis}=2.")
        sizes[axis] = int(size)
    return MeshConfig(sizes.get(DATA, 1), sizes.get(TENSOR, 1))
