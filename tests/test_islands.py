"""Islands (HSDP, Zhao et al. 2023, section 3.2.2): ZeRO within each, and across them one sum of what a device has of
the gradients.

Of S bytes of gradients on a device, N data ranks and R islands, read from the compiled step:

    data      gathers and scatters as ZeRO's on N/R ranks, in groups of devices of one island
    island    one all-reduce of S / (N/R), of which a device sends 2 (R - 1) / R by a ring, in groups of one device an island
"""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from covering import thorough_but

import meshtrain as mt
from meshtrain.checkpoint import Checkpointer
from meshtrain.config import Config, load, replaced
from meshtrain.hlo import CompiledCollectives, Module, collectives, replica_groups
from meshtrain.mesh import make_mesh, own_part, part_bytes, place_own_part
from meshtrain.plan import named, plan, traffic
from meshtrain.run.processes import SickDevice
from meshtrain.step import Program, State
from meshtrain.survive.health import Health
from meshtrain.survive.heartbeat import Heartbeat
from meshtrain.survive.injector import _changed_at

WITHIN = 0.01


def given(
    mesh: tuple[int, int, int],
    islands: int,
    sizes: dict[str, Any] | None = None,
    **parallel: Any,
) -> dict[str, Any]:
    model = {
        "layers": 4,
        "d_model": 64,
        "heads": 4,
        "kv_heads": 4,
        "d_ff": 96,
        "vocab_size": 128,
    }
    axes = dict(zip(("data", "tensor", "pipeline"), mesh, strict=True))
    return {
        "model": {**model, **(sizes or {})},
        "mesh": axes | {"islands": islands},
        "parallel": {"microbatches": 2, **parallel},
        "train": {"global_batch_size": 16, "sequence_length": 32},
    }


def configuration(*layout: Any, **parallel: Any) -> Config:
    return load(given(*layout, **parallel))


ODD = {
    "layers": 3,
    "d_model": 60,
    "heads": 6,
    "kv_heads": 2,
    "d_ff": 50,
    "vocab_size": 257,
}
CASES = {
    "zero 1 in 2 islands of 4": configuration((8, 1, 1), 2, zero_stage=1),
    "zero 3 in 2 islands of 2, all axes": configuration(
        (4, 1, 2), 2, zero_stage=3, zero_hold=False
    ),
}
MORE = {
    "zero 2 in 4 islands of 2": configuration((8, 1, 1), 4, zero_stage=2),
    "zero 2 scattering at use": configuration(
        (4, 2, 1), 2, zero_stage=2, zero_hold=False
    ),
    "zero 3 held": configuration((4, 2, 1), 2, zero_stage=3, zero_hold=True),
    "odd sizes": configuration((8, 1, 1), 2, ODD, zero_stage=1),
    "islands of one": configuration((4, 2, 1), 4, zero_stage=1),
}
RUN = thorough_but([*CASES, *MORE], CASES.__contains__, ["zero 3 held", "odd sizes"])


@cache
def compiled(case: str) -> tuple[Program, Module, CompiledCollectives]:
    config = (CASES | MORE)[case]
    program = Program(config, make_mesh(config))
    text = program.lower().compile().as_text()
    assert text
    return program, Module(text), collectives(text, program.mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("case", RUN)
def test_zero_shards_over_the_data_ranks_of_an_island(case):
    program = compiled(case)[0]
    mesh = program.config.mesh
    state = program.state_shapes
    masters = jax.tree.leaves(state.params)
    weights = sum(x.size * x.dtype.itemsize for x in masters)
    ways = mesh.shards * mesh.tensor * mesh.pipeline
    assert sum(map(part_bytes, masters)) == pytest.approx(weights / ways, rel=0.02)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert sum(map(part_bytes, moments)) == 2 * sum(map(part_bytes, masters))


@pytest.mark.thorough
@pytest.mark.parametrize("case", RUN)
def test_across_islands_goes_one_sum_of_a_shard(case):
    program, _, found = compiled(case)
    config = program.config
    islands = config.mesh.islands
    # What a device has of the gradients, float32 as the masters are, is what its island scatters: S / (N/R).
    shard = sum(map(part_bytes, jax.tree.leaves(program.state_shapes.params)))
    across = [c for c in found if "island" in c.axes and c.bytes > 256]
    assert {c.kind for c in across} == {"all-reduce"} and all(
        c.times == 1 for c in across
    )
    assert sum(c.sent for c in across if c.axes == ("island",)) == pytest.approx(
        2 * (islands - 1) / islands * shard, rel=WITHIN
    )
    # Of joined axes there is the count of tokens and the loss alone.
    assert (
        sum(c.sent * c.times for c in found if "island" in c.axes and len(c.axes) > 1)
        < WITHIN * shard
    )


@pytest.mark.thorough
@pytest.mark.parametrize("case", RUN)
def test_the_planner_knows_what_islands_send(case):
    program, _, found = compiled(case)
    config, mesh = program.config, program.config.mesh
    planned = traffic.by_axis(plan(config, named("cpu", mesh.devices)).transfers)
    assert planned["island"] == pytest.approx(found.traffic["island"], rel=WITHIN)
    # An island by itself is a mesh without islands, with its share of the batch.
    inside = {"data": mesh.shards, "islands": 1}
    alone = replaced(
        config, mesh=inside, train={"global_batch_size": 16 // mesh.islands}
    )
    assert (
        planned["data"]
        == traffic.by_axis(plan(alone, named("cpu", alone.mesh.devices)).transfers)[
            "data"
        ]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("case", RUN)
def test_gathers_and_scatters_stay_in_an_island(case):
    program, module, _ = compiled(case)
    mesh = program.config.mesh
    # HLO counts devices by their place in the mesh, whose first axis is that of islands.
    island = np.arange(mesh.devices) // (mesh.devices // mesh.islands)
    kinds: dict[str, set[bool]] = {}
    for op, _, _ in module.walk():
        for group in replica_groups(op.attributes, mesh.devices):
            kinds.setdefault(op.kind, set()).add(len(set(island[list(group)])) > 1)
    assert all(kinds[kind] == {False} for kind in kinds if kind != "all-reduce")
    assert kinds["all-reduce"] >= {True}
    if mesh.shards > 1:
        assert kinds["all-gather"] == kinds["reduce-scatter"] == {False}


@pytest.mark.thorough
def test_without_zero_there_is_one_sum_over_all_of_data():
    config = configuration((4, 1, 1), 2, zero_stage=0)
    program = Program(config, make_mesh(config))
    sent = program.collectives().traffic
    assert set(sent) == {"island+data"}
    assert sent["island+data"] == pytest.approx(
        2 * 3 / 4 * 4 * program.layout.parameters, rel=WITHIN
    )
    planned = traffic.by_axis(plan(config, named("cpu", 4)).transfers)
    assert planned["island+data"] == pytest.approx(sent["island+data"], rel=WITHIN)


def test_an_island_is_devices_that_follow_one_another():
    mesh = make_mesh(configuration((4, 1, 2), 2))
    assert mesh.axis_names == ("island", "data", "tensor", "pipeline")
    assert [sorted(device.id for device in island.flat) for island in mesh.devices] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [device.id for device in mesh.devices[0, :, 0, 0]] == [0, 1], (
        "stages are apart, data ranks neighbours"
    )


def test_each_island_holds_its_own_rows_of_a_batch():
    program = Program(configuration((4, 2, 1), 2))
    rows = {
        d.id: part[0]
        for d, part in program.batch_sharding.devices_indices_map((8,)).items()
    }
    assert [rows[device].indices(8)[:2] for device in range(8)] == [
        (2 * (d // 2), 2 * (d // 2) + 2) for d in range(8)
    ]
    assert own_part(program.batch_sharding, (8, 4)) == (slice(0, 8),)
    batch = np.arange(32).reshape(8, 4)
    placed = place_own_part(program.batch_sharding, batch, batch.shape)
    assert np.array_equal(placed, batch) and placed.sharding == program.batch_sharding


@pytest.mark.thorough
def test_weights_of_a_run_on_islands_are_read_on_islands_and_without(tmp_path):
    settings = replaced(
        configuration((4, 1, 1), 2, zero_stage=3), run={"directory": str(tmp_path)}
    )
    program = Program(settings)
    checkpointer = Checkpointer(settings, program)
    checkpointer.save(1, program.init(), loss=5.0)
    checkpointer.close()
    tokens = np.arange(24, dtype=np.int32).reshape(3, 8)
    one, *others = (
        np.asarray(
            mt.read_model(tmp_path, mesh=make_mesh(load({"mesh": mesh})))(tokens)
        )
        for mesh in (
            {},
            {"data": 4, "islands": 2},
            {"data": 2, "tensor": 2, "islands": 2},
        )
    )
    for other in others:
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)


@pytest.mark.thorough
def test_a_bit_that_flips_on_one_island_is_found():
    program = Program(configuration((2, 1, 1), 2))
    params = program.init().params
    health = Health(program.mesh, params, Heartbeat())
    health.check_copies(params)

    def flip(part: np.ndarray) -> None:
        part.reshape(-1).view(np.uint32)[-1] ^= np.uint32(1)

    with pytest.raises(SickDevice, match=r"^rank 0 holds other bits of "):
        health.check_copies(
            _changed_at(State(None, params, None, None), lambda leaf: True, flip).params
        )
