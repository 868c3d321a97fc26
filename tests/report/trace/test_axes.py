"""Each collective of a trace is told over the axis along which those devices lie that met in it, however the mesh lies
on the devices.
"""

import itertools
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.profiler import ProfileData
from jax.sharding import Mesh, PartitionSpec
from traced_steps import STEPS, traced

from meshtrain.mesh import AXES
from meshtrain.report.trace import attribute, read_trace
from meshtrain.report.trace.instructions import instructions
from meshtrain.telemetry.trace import EVENTS


def mesh_of(order: tuple[int, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2).transpose(order), AXES)


def met(path: Path, mesh: Mesh) -> Counter[tuple[str, str]]:
    """(Instruction, axis) of every meeting, from the ids of the devices that the runtime says were in it."""
    place = {device.id: np.array(at) for at, device in np.ndenumerate(mesh.devices)}
    found: Counter[tuple[str, str]] = Counter()
    profile = ProfileData.from_file(str(path))
    for plane in profile.planes:
        for line in plane.lines:
            events = [
                (e.start_ns, e.end_ns, e.name, dict(e.stats)) for e in line.events
            ]
            ops = [e for e in events if "hlo_op" in e[3]]
            for begin, end, name, stats in events:
                devices = re.search(
                    r"global_devices=\[([\d, ]+)\]", str(stats.get("name", ""))
                )
                if name != "Rendezvous" or not devices:
                    continue
                places = np.array([place[int(n)] for n in devices.group(1).split(",")])
                axis = "+".join(
                    name
                    for name, along in zip(
                        AXES, (places != places[0]).any(axis=0), strict=True
                    )
                    if along
                )
                (op,) = {
                    stats["hlo_op"] for a, b, _, stats in ops if a <= begin and end <= b
                }
                found[op, axis] += 1
    return found


def sent(mesh: Mesh, directory: Path) -> Path:
    """A trace of a program that sends over each axis in another way."""

    def local(x: jax.Array) -> jax.Array:
        x = lax.all_gather(lax.psum(x, "data"), "tensor", tiled=True)
        x = lax.psum(lax.ppermute(x, "pipeline", [(0, 1), (1, 0)]), ("data", "tensor"))
        return lax.psum_scatter(x, "tensor", tiled=True)

    specs = PartitionSpec(("data", "tensor", "pipeline"))
    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
        )
    )
    x = jnp.arange(64.0)
    compiled = step.lower(x).compile()
    return traced(
        directory,
        mesh,
        compiled,
        lambda: compiled(jax.device_put(x, compiled.input_shardings[0][0])),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_the_axis_of_a_collective_is_that_of_the_devices_that_met_in_it(
    order, tmp_path
):
    mesh = mesh_of(order)
    path = sent(mesh, tmp_path)
    trace = read_trace(path)
    told = attribute(trace)
    table = instructions(trace.module, trace.facts.mesh)
    meetings = met(path / EVENTS, mesh)
    # On CPUs all devices of the program meet for a permutation, whoever sends to whom.
    reducing = {
        op: one.axis
        for op, one in table.items()
        if one.collective and one.opcode != "collective-permute"
    }
    assert {op: axis for op, axis in meetings if op in reducing} == reducing
    assert told.collectives == {
        ("all-reduce", "data"): 1,
        ("all-gather", "tensor"): 1,
        ("collective-permute", "pipeline"): 1,
        ("all-reduce", "data+tensor"): 1,
        ("reduce-scatter", "tensor"): 1,
    }
    assert told.steps == STEPS and told.devices == 8 and told.unjoined == 0
