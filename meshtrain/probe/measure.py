"""All measurements of a mesh, one after the other."""

import math
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from meshtrain.cli import DONE, command
from meshtrain.cluster.accelerators import canonical
from meshtrain.cluster.algorithms import ALL_REDUCE, KINDS, PERMUTE
from meshtrain.compat import joined_processes
from meshtrain.config import Config, MeshConfig
from meshtrain.config.mesh import ORDER
from meshtrain.errors import say
from meshtrain.mesh import (
    device_names,
    fake_cpu_devices,
    join_cluster,
    kind_of,
    make_mesh,
    platform,
)
from meshtrain.probe import describe, links, report
from meshtrain.probe.devices import devices as measure_devices
from meshtrain.probe.figures import PARTS, MeasuredCollective, Pairs, Probe
from meshtrain.run.processes import first_decides, gathered, is_first

FAKED = 8  # devices where there is no accelerator and no mesh is given


def mesh_of(config: Config | None) -> Mesh:
    """Returns the mesh of a config; without one all devices, those of a machine as tensor ranks and machines as data
    ranks.

    ConfigError where there are fewer devices than the config needs.
    """
    if config is not None:
        return make_mesh(config)
    fake_cpu_devices(max(1, FAKED // joined_processes()))
    devices = jax.devices()
    machines = Counter(machines_of(devices))
    alike = len(set(machines.values())) == 1
    tensor = machines[0] if alike else len(devices)
    return make_mesh(
        replace(Config(), mesh=MeshConfig(data=len(devices) // tensor, tensor=tensor)),
        devices,
    )


def machines_of(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Returns of each device the number of its machine. Processes of fake devices each stand for one."""
    if kind_of(devices[0]) == "cpu":
        names: list = [device.process_index for device in devices]
    else:
        hosts = gathered(socket.gethostname())
        names = [hosts[device.process_index] for device in devices]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


class Wanted(NamedTuple):
    """The measurements that are asked for; sizes in bytes replace those of the platform."""

    parts: Sequence[str] = PARTS
    kinds: Sequence[str] = KINDS
    pair_sizes: Sequence[int] = ()
    # Programs of messages, which are measured beside XLA's own
    algorithms: Sequence[str] = ()
    every_pair: bool = False


ALL = Wanted()


def measure_here(
    config: Config | None, wanted: Wanted, check: Callable[[int], object]
) -> Probe | None:
    """Measures the mesh of a config on the devices of all processes; returns the figures on the first one.

    `check` is called there with the number of devices before anything is measured.
    """
    join_cluster()
    mesh = mesh_of(config)
    first_decides(partial(check, mesh.size))
    first = is_first()
    probe = measure(mesh, wanted, _say_progress if first else lambda _: None)
    return probe if first else None


def _say_progress(what: str) -> None:
    say(f"measuring {what}")


def measure(
    mesh: Mesh, wanted: Wanted = ALL, progress: Callable[[str], object] = lambda _: None
) -> Probe:
    """Measures all of it: some seconds on accelerators, up to a minute on fake devices; the machine should be idle.

    All processes must call it.

    `progress` is told what comes next.
    """
    parts = wanted.parts
    # As the planner numbers devices: islands outermost, then pipeline, data, tensor innermost.
    in_place = [
        mesh.axis_names.index(axis) for axis in ORDER if axis in mesh.axis_names
    ]
    places = (
        np.arange(mesh.size)
        .reshape(mesh.devices.shape)
        .transpose(in_place)
        .ravel()
        .tolist()
    )
    numbered = [mesh.devices.flat[place] for place in places]
    axes = links.axes_of(mesh)
    barriers: dict[str, float] = {}
    pairs: Pairs | None = None
    if "barrier" in parts and axes:
        progress("barrier")
        barriers = links.barriers(mesh)
    collectives = _collectives(mesh, wanted, progress) if "collectives" in parts else []
    if "pairs" in parts and axes:
        progress(
            f"{len(links.partners(mesh.size, wanted.every_pair))} pairs of devices"
        )
        pairs = links.pairs(mesh, places, wanted.pair_sizes, wanted.every_pair)
    if "products" in parts:
        progress("matrix products and passes over memory")
    return Probe(
        platform=platform(mesh),
        kind=canonical(numbered[0].device_kind),
        mesh=MeshConfig.make(mesh.shape),
        machines=machines_of(numbered),
        processes=jax.process_count(),
        barriers=barriers,
        collectives=tuple(collectives),
        pairs=pairs,
        devices=measure_devices(mesh, places) if "products" in parts else None,
        names=device_names(numbered),
    )


def _collectives(
    mesh: Mesh, wanted: Wanted, progress: Callable[[str], object]
) -> list[MeasuredCollective]:
    """Measures the wanted kinds of collectives along each axis of the mesh."""
    measured: list[MeasuredCollective] = []
    for axis in links.groups_of(mesh):
        # What runs over all of data are its sums.
        over = [ALL_REDUCE] if axis == links.JOINED else wanted.kinds
        ranks = math.prod(mesh.shape[one] for one in axis.split("+"))
        progress(f"{', '.join(over)} over {axis} {ranks}")
        measured += links.collectives(mesh, axis, over, algorithms=wanted.algorithms)
    return measured


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """`meshtrain.plan --measure`: the cluster file of all devices, without the collectives that it says nothing of; a
    report on stderr.
    """
    probe = measure(mesh_of(None), Wanted(kinds=(ALL_REDUCE, PERMUTE)), _say_progress)
    print(report.to_text(probe), file=sys.stderr)
    print(describe.to_yaml(probe), end="")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
