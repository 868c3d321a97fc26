"""The device mesh: its axes, and the devices they are built from.

           tensor →
         ┌────┬────┐
    data │ 0  │ 1  │   stage 0 of the pipeline
      ↓  │ 2  │ 3  │
         └────┴────┘
         ┌────┬────┐
         │ 4  │ 5  │   stage 1
         │ 6  │ 7  │
         └────┴────┘

Tensor is innermost, so that ranks that talk in every layer are neighbours; pipeline is outermost, since stages talk
least. With several islands the mesh has an axis of them besides, outermost of all. `mesh.order` asks for another order
of axes, and `mesh.cluster` for another one of devices, as a cluster's file gives it:

    JAX's devices     0  1  2  3  4  5  6  7        joined by fast links: 0 2 4 6, 1 3 5 7
    names             a/0 a/1 a/2 a/3 b/0 ...       HOST/NUMBER, which a restart does not change
    device_order      a/0, a/2, b/0, b/2, a/1, ...  as `meshtrain.cluster.levels` found them
    the mesh          0  2  4  6  1  3  5  7        neighbours of the innermost axis have fast links
"""

import errno
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from meshtrain.compat import compile_collectives_anew, joined_processes
from meshtrain.config import Config, ConfigError, MeshConfig, short
from meshtrain.config.mesh import ALL_AXES
from meshtrain.config.mesh import AXES as AXES
from meshtrain.config.mesh import CONTEXT as CONTEXT
from meshtrain.config.mesh import DATA as DATA
from meshtrain.config.mesh import EXPERT as EXPERT
from meshtrain.config.mesh import ISLAND as ISLAND
from meshtrain.config.mesh import PIPELINE as PIPELINE
from meshtrain.config.mesh import TENSOR as TENSOR
from meshtrain.config.schema import MOST_FAKE_DEVICES
from meshtrain.errors import PortTaken, refusal
from meshtrain.xla import ask_for_pool, step_options

# Seconds in which processes that have ended wait for the others to end: they do so together, unless one is stuck.
SHUTDOWN_TIMEOUT = 30
THREADS_PER_DEVICE = (
    # Fake CPU devices deadlock in collectives unless the client has at least 2 threads each
    4
)


def fake_cpu_devices(count: int) -> bool:
    """Asks for at least `count` CPU devices in this process; XLA_FLAGS wins.

    False if JAX has started already, with fewer.

    No effect where an accelerator is found.
    """
    forced = _forced_devices()
    os.environ.setdefault(
        "PJRT_NPROC", str(THREADS_PER_DEVICE * (count if forced is None else forced))
    )
    if forced is not None:
        return True
    try:
        most = max(count, jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", most)
    except RuntimeError:
        # it runs already, in a notebook for example
        return jax.local_device_count() >= count
    return True


def _forced_devices() -> int | None:
    """Returns the fake CPU devices that XLA_FLAGS asks for, if it does."""
    forced = re.search(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    return int(forced.group(1)) if forced else None


def fake_devices(count: int = 8) -> None:
    """Has this process run on `count` fake CPU devices from now on, whatever accelerators the machine has: a mesh in a
    notebook.

    ConfigError where JAX has started already with others, and where XLA_FLAGS asks for fewer.
    """
    if not isinstance(count, int) or not 1 <= count <= MOST_FAKE_DEVICES:
        raise ConfigError(
            f"mt.fake_devices({short(repr(count))}): it must be a number from 1 to {MOST_FAKE_DEVICES}."
        )
    jax.config.update("jax_platforms", "cpu")
    fake_cpu_devices(count)
    devices = jax.devices()
    if len(devices) < count or kind_of(devices[0]) != "cpu":
        raise ConfigError(
            f"JAX has started already, with {len(devices)} {kind_of(devices[0])} devices (XLA_FLAGS may have asked "
            "for them); "
            f"call mt.fake_devices({count}) before anything uses JAX, after a restart of the kernel."
        )


def join_cluster() -> None:
    """Makes this process one of many where the environment says that there are more.

    `joining.place_of` says how. ConfigError where variables are missing or do not agree, PortTaken where the first
    process finds its port in use. Under Slurm JAX finds the others by itself; its tasks may be more than the processes
    that are to join.
    """
    if jax.distributed.is_initialized():
        return
    from meshtrain.joining import place_of

    place = place_of(os.environ)
    if place is None:
        return
    if place.process == 0:
        _check_port(
            place.listen, place.listen == os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        )
    if place.by_slurm:
        jax.distributed.initialize(shutdown_timeout_seconds=SHUTDOWN_TIMEOUT)
    else:
        jax.distributed.initialize(
            place.address,
            place.processes,
            place.process,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        )


def _check_port(address: str, is_asked_for: bool) -> None:
    """Raises PortTaken if the coordinator could not listen at host:port, on which JAX would end the process by a
    segmentation fault.

    ConfigError for any other reason why it could not, of an address that was asked for.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the coordinator does: connections of one that has ended do not keep the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except OSError as error:
        sentence = f"the coordinator cannot listen at {address}: {refusal(error)}"
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"{sentence}; give another port.") from None
        # A machine without IPv6 listens at every address of the other kind.
        if is_asked_for or error.errno == errno.EACCES:
            raise ConfigError(f"{sentence}; give another address.") from None


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of a config over the given devices (real, fake or described), else over JAX's own.

    Raises ConfigError when there are fewer devices than the mesh has places.
    """
    shape = config.mesh
    needed = config.mesh.devices
    in_time = True
    own = devices is None
    if devices is None:
        devices, in_time = _find_devices(config)
    if len(devices) < needed:
        kind = devices[0].platform
        hint = _how_to_fake(needed, in_time)
        if kind != "cpu":
            hint = "JAX_PLATFORMS=cpu runs it on fake CPU devices"
        raise ConfigError(
            f"the mesh {shape} needs {needed} devices, but there are {len(devices)} ({kind}); {hint}."
        )
    if own and shape.cluster:
        devices = _order_by_cluster(devices, shape.cluster)
    if own:
        # A process without a device would have no rows to read.
        with_devices = {device.process_index for device in devices[:needed]}
        if idle := {device.process_index for device in devices} - with_devices:
            raise ConfigError(
                f"process {min(idle)} has no device of the mesh {shape}, whose {needed} devices {len(with_devices)} "
                "processes "
                "have; start fewer processes, or give a larger mesh."
            )
    compile_collectives_anew()
    return Mesh(
        arranged(devices[:needed], shape),
        shape.axes,
        axis_types=(AxisType.Auto,) * len(shape.axes),
    )


def _find_devices(config: Config) -> tuple[Sequence[jax.Device], bool]:
    """Returns JAX's devices, and whether as many could be faked as were asked for."""
    needed = config.mesh.devices
    processes = joined_processes()
    fakes = config.run.fake_devices or (
        needed if 1 < needed <= MOST_FAKE_DEVICES else 0
    )
    if processes > 1 and fakes:
        # whatever else was asked for: each process is to have a part of the mesh
        fakes = math.ceil(needed / processes)
    in_time = not fakes or fake_cpu_devices(fakes)
    ask_for_pool()
    try:
        return jax.devices(), in_time
    except (RuntimeError, AssertionError) as error:
        # an assertion, without a word, where JAX_PLATFORMS names what this machine has not
        asked = f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', 'any')}, which is not there"
        reason = short(str(error).partition("\n")[0] or asked)
        sentence = f"JAX finds no devices to run on: {reason}; JAX_PLATFORMS=cpu runs on fake CPU devices."
        raise ConfigError(sentence) from None


def _how_to_fake(needed: int, in_time: bool) -> str:
    """Returns what would give so many fake CPU devices; `in_time`: JAX could be asked for them."""
    if needed > MOST_FAKE_DEVICES:
        return f"run.fake_devices fakes at most {MOST_FAKE_DEVICES}"
    if (forced := _forced_devices()) is not None:
        return f"XLA_FLAGS asks for {forced}, which wins over run.fake_devices, so ask for {needed} there"
    if in_time:
        return f"to fake them, set run.fake_devices={needed}"
    return (
        "JAX had started before it could be asked to fake more, so start Python again (in a notebook: restart the "
        "kernel) and make this mesh before anything else uses JAX"
    )


def device_names(devices: Sequence[jax.Device]) -> tuple[str, ...]:
    """Returns the name of each device of this run, HOST/NUMBER: the machine and which of its devices it is.

    All processes must call it.
    """
    from meshtrain.run.processes import gathered

    hosts = gathered(socket.gethostname())
    counts = Counter[str]()
    names: dict[jax.Device, str] = {}
    for device in sorted(
        jax.devices(devices[0].platform), key=lambda d: (d.process_index, d.id)
    ):
        host = hosts[device.process_index]
        names[device] = f"{host}/{counts[host]}"
        counts[host] += 1
    return tuple(names[device] for device in devices)


def _order_by_cluster(devices: Sequence[jax.Device], path: str) -> list[jax.Device]:
    """Returns the devices as the cluster file at `path` orders them; ConfigError where it does not say of one where it
    stands.
    """
    from meshtrain.cluster.cluster import load_cluster

    order = {name: place for place, name in enumerate(load_cluster(path).device_order)}
    file = f"mesh.cluster {short(path)}"
    if not order:
        way_out = "let meshtrain probe write the file, or leave the key out"
        raise ConfigError(f"{file} has no device_order; {way_out}.")
    names = dict(zip(devices, device_names(devices), strict=True))
    if unknown := [name for name in names.values() if name not in order]:
        raise ConfigError(
            f"{file} says nothing of {len(unknown)} of the {len(names)} devices that are there, {short(unknown[0])} "
            "for one; "
            "probe them again, or leave the key out."
        )
    return sorted(devices, key=lambda device: order[names[device]])


def are_axes(names: tuple[str, ...]) -> bool:
    """Returns whether a mesh of ours has these axes: all it cannot do without, in their order."""
    return set(AXES) <= set(names) and names == tuple(
        axis for axis in ALL_AXES if axis in names
    )


def check_axes(mesh: Mesh) -> None:
    """Raises ConfigError for a mesh whose axes are not ours, see `are_axes`."""
    if not are_axes(mesh.axis_names):
        raise ConfigError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}; make one with mt.make_mesh."
        )


def part_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one device's part of an array, or of one that is only described."""
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def arranged(devices: Sequence[jax.Device], shape: MeshConfig) -> np.ndarray:
    """Returns the devices as an array of `shape.axes`, numbered as `mesh.order` says: by default tensor ranks are
    nearest to each other and stages farthest apart, within an island.

    In their own order, which on machines with a switch is the order of the links; on a torus by their coordinates, as
    far as each process then still has neighbouring rows of the batch, unless a file says how they stand
    (`mesh.cluster`).
    """
    order = [axis for axis in shape.every_axis_in_order if axis in shape.axes]
    outermost_first = tuple(shape.ways(axis) for axis in order)
    in_place = [order.index(axis) for axis in shape.axes]
    grid = np.array(devices).reshape(outermost_first).transpose(in_place)
    if kind_of(devices[0]) == "tpu" and not shape.cluster:
        on_torus = mesh_utils.create_device_mesh(
            outermost_first, devices, allow_split_physical_axes=True
        )
        on_torus = on_torus.transpose(in_place)
        if _rows_are_neighbours(on_torus, len(shape.data_axes)):
            grid = on_torus
    return grid


def _rows_are_neighbours(grid: np.ndarray, data_axes: int) -> bool:
    """Returns whether the data ranks of every process, along the first axes of the grid, follow one another."""
    ranks: dict[int, set[int]] = {}
    for place, device in np.ndenumerate(grid):
        rank = int(np.ravel_multi_index(place[:data_axes], grid.shape[:data_axes]))
        ranks.setdefault(device.process_index, set()).add(rank)
    follow = lambda held: max(held) - min(held) + 1 == len(held)
    return all(map(follow, ranks.values()))


def platform(mesh: Mesh) -> str:
    """Returns cpu, gpu or tpu, from the mesh's own devices."""
    return kind_of(mesh.devices.flat[0])


def compiler_options(
    mesh: Mesh, overlaps_reduce_scatter: bool = False, sends_by_table: bool = False
) -> dict[str, int]:
    """Returns further options for XLA, on GPUs; XLA_FLAGS wins."""
    if platform(mesh) != "gpu":
        return {}
    flags = os.environ.get("XLA_FLAGS", "")
    options = step_options(
        mesh.size, mesh.shape[TENSOR], overlaps_reduce_scatter, sends_by_table
    )
    return {option.name: option.value for option in options if option.name not in flags}


def kind_of(device: jax.Device) -> str:
    if device.platform in ("cuda", "rocm"):
        return "gpu"
    return device.platform


def own_part(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns what of a global batch of `shape` this process's devices hold, from the first to the last along each
    split dimension: all that it must read.

    `sharding`: of the batch's arrays, whose first dimension are rows. They hold all of it but where a process ends one
    stage and begins the next, and the data ranks between are elsewhere.
    """
    split = shape[: len(sharding.spec)]
    parts = [
        part
        for part in sharding.addressable_devices_indices_map(split).values()
        if part is not None
    ]
    bounds = [
        [part[at].indices(size)[:2] for part in parts] for at, size in enumerate(split)
    ]
    lowest = [min(low for low, _ in each) for each in bounds]
    highest = [max(high for _, high in each) for each in bounds]
    return tuple(map(slice, lowest, highest))


def place_own_part(
    sharding: NamedSharding, own: np.ndarray, shape: tuple[int, ...]
) -> jax.Array:
    """Returns the global array of `shape` of which this process gives its own (see `own_part`).

    JAX's `make_array_from_process_local_data` does not take rows that lie between those that the devices hold.
    """
    first = [part.start for part in own_part(sharding, shape)]

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        begins = [*first, *[0] * len(shape)]
        pairs = zip(bounds, begins, strict=False)
        return own[tuple(slice(a - at, b - at) for (a, b), at in pairs)]

    return jax.make_array_from_callback(shape, sharding, part)
