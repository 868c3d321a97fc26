"""Which device is which, and the order in which the mesh takes them.

    JAX's devices     0  1  2  3  4  5  6  7        joined by fast links: 0 2 4 6, 1 3 5 7
    names             a/0 a/1 a/2 a/3 b/0 ...
    device_order      a/0, a/2, b/0, b/2, a/1, ...  as `meshtrain.plan.cluster.levels` found them
    the mesh          0  2  4  6  1  3  5  7        neighbours of the innermost axis have fast links

A name is HOST/NUMBER: the machine and which of its devices it is. A restart numbers processes anew, and so JAX's devices; these stay.
"""

import socket
from collections import Counter
from collections.abc import Sequence

import jax

from meshtrain.errors import ConfigError, short
from meshtrain.plan.cluster.cluster import load_cluster
from meshtrain.run.processes import gathered


def names(devices: Sequence[jax.Device]) -> tuple[str, ...]:
    """Of each device of this run; all processes must call it."""
    hosts, counted = gathered(socket.gethostname()), Counter[str]()
    found: dict[jax.Device, str] = {}
    for device in sorted(jax.devices(devices[0].platform), key=lambda d: (d.process_index, d.id)):
        host = hosts[device.process_index]
        found[device] = f"{host}/{counted[host]}"
        counted[host] += 1
    return tuple(found[device] for device in devices)


def in_order(devices: Sequence[jax.Device], path: str) -> list[jax.Device]:
    """The devices as the cluster file at `path` orders them; ConfigError where it does not say of one of them where it stands."""
    order = {name: place for place, name in enumerate(load_cluster(path).device_order)}
    if not order:
        raise ConfigError(f"mesh.cluster {short(path)} has no device_order; let python -m meshtrain.probe write the file, or leave the key out.")  # fmt: skip
    named = names(devices)
    if strange := [name for name in named if name not in order]:
        raise ConfigError(
            f"mesh.cluster {short(path)} says nothing of {len(strange)} of the {len(named)} devices that are there, {short(strange[0])} for one; "
            "probe them again, or leave the key out."
        )
    places = [order[name] for name in named]
    return [device for _, device in sorted(zip(places, devices, strict=True), key=lambda pair: pair[0])]
