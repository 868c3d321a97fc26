"""What a search chooses from: nothing that another choice beats, and all that may be the best."""

import dataclasses
import itertools

import pytest

from meshtrain.config import MeshConfig, check, load, replaced
from meshtrain.config.follow import put
from meshtrain.config.schema import SELECTIVE
from meshtrain.parallel.placement import stages as stages_of
from meshtrain.plan import activations, named, plan
from meshtrain.plan.choices import (
    contexts,
    ends_empty,
    every_schedule,
    nearby_cuts,
    remats,
    schedules,
)
from meshtrain.plan.layer_costs import layer_cost
from meshtrain.plan.memory import MARGIN
from meshtrain.plan.search import candidates, search


def model(family: str = "llama", layers: int = 14, **parallel):
    sizes = {
        "layers": layers,
        "d_model": 2048,
        "heads": 16,
        "d_ff": 5632,
        "vocab_size": 32000,
    }
    config = load(
        {
            "model": {"family": family} | sizes,
            "precision": {"compute": "bfloat16"},
            "train": {"global_batch_size": 16, "sequence_length": 2048},
        }
    )
    return replaced(config, **parallel) if parallel else config


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "mesh", [{"tensor": 4}, {"tensor": 2, "pipeline": 2}, {"data": 2}]
)
def test_no_way_to_recompute_is_beaten_in_both_bytes_and_seconds(family, mesh):
    config, cluster = (
        model(
            family, mesh=mesh, parallel={"sequence_parallel": mesh.get("tensor", 1) > 1}
        ),
        named("h100", 8),
    )
    found = remats(config, cluster)
    ways = [put(config, parallel=way) for way in found]
    for way in ways:
        check(way)
    costs = []
    for way in ways:
        layer = layer_cost(way, cluster)
        seconds = (
            layer.backward.total
            + layer.backward_sends
            + layer.forward_copies
            + layer.backward_copies
        )
        costs.append((activations.kept(way, way.parallel.remat), seconds))
    # from what keeps most, and takes least time, on
    assert costs == sorted(costs, key=lambda cost: -cost[0])
    assert found[-1] == {"remat": "full"} and {way["remat"] for way in found} > {"full"}
    held = [nbytes for nbytes, _ in costs]
    assert all(
        less < 0.9 * more or i < 2
        for i, (more, less) in enumerate(itertools.pairwise(held))
    ), held


def test_selective_is_by_far_the_cheapest_third():
    """Nearly a third less to keep for an eighth of what a whole forward takes: so it stands among the choices, where no
    name is kept that costs as little.
    """
    config, cluster = (
        model(mesh={"tensor": 4}, parallel={"sequence_parallel": True}),
        named("h100", 8),
    )
    none, selective, full = (
        put(config, parallel={"remat": remat})
        for remat in ("none", "selective", "full")
    )
    kept = [activations.kept(c, c.parallel.remat) for c in (none, selective, full)]
    again = [
        layer_cost(c, cluster).recompute.total / layer_cost(c, cluster).forward.total
        for c in (selective, full)
    ]
    assert kept[1] < 0.72 * kept[0] and again[0] < 0.15 * again[1]
    assert any(
        set(SELECTIVE) <= set(put(config, parallel=way).parallel.names_kept)
        for way in remats(config, cluster)
    )


@pytest.mark.parametrize(
    ("layers", "virtual", "split"),
    [
        (6, 6, None),
        (6, 4, None),
        (7, 8, (1, 1, 1, 1, 1, 1, 1, 0)),
        (6, 8, (0, 1, 1, 1, 1, 1, 1, 0)),
    ],
)
def test_one_virtual_stage_too_many_leaves_the_last_empty_two_the_first_too(
    layers, virtual, split
):
    assert ends_empty(layers, virtual) == split
    if split:
        keys = {
            "schedule": "interleaved",
            "virtual_stages": virtual // 2,
            "layer_split": split,
            "microbatches": 4,
        }
        config = model(layers=layers, mesh={"pipeline": 2}, parallel=keys)
        check(config)
        assert stages_of(config).longest == 1


def test_a_search_looks_at_empty_ends_and_finds_the_shorter_bubble():
    """14 layers on 2 stages: 8 chunks would be 16 virtual stages."""
    two = MeshConfig(pipeline=2)
    assert ("interleaved", 8) in every_schedule(14, two) and (
        "interleaved",
        8,
    ) not in schedules(14, two)
    config, cluster = model(), named("h100", 2)
    of_two = [
        c.config for c in candidates(config, cluster, 2) if c.config.mesh.pipeline == 2
    ]
    split = [c for c in of_two if c.parallel.layer_split is not None]
    assert split and all(
        c.parallel.layer_split[-1] == 0 and max(c.parallel.layer_split) == 1
        for c in split
    )
    for config in split[::97]:
        check(config)


def test_pairs_are_looked_at_where_layers_send_messages_that_they_could_hide():
    for mesh, looked_at in (
        (MeshConfig(data=2), []),
        (MeshConfig(tensor=2), [("paired", 1)]),
        (MeshConfig(data=4, expert=4), [("paired", 1)]),
        (MeshConfig(pipeline=2), []),
        (
            MeshConfig(tensor=2, pipeline=2),
            [(name, v) for name in ("paired", "zb_paired") for v in (1, 2)],
        ),
    ):
        assert [
            found for found in schedules(4, mesh) if "paired" in found[0]
        ] == looked_at, mesh


@pytest.mark.thorough
def test_the_optimizers_state_is_offloaded_only_where_nothing_else_would_fit():
    config, cluster = model(), named("h100", 2)
    assert not any(
        p.config.parallel.offload_optimizer for p in search(config, cluster, 2).plans
    )
    small = dataclasses.replace(
        cluster,
        accelerator=dataclasses.replace(cluster.accelerator, memory=6.0, reserved=0.5),
    )
    found = search(config, small, 2)
    assert found.plans and all(p.config.parallel.offload_optimizer for p in found.plans)
    assert all(p.time.host > 0 for p in found.plans), "transfers to the host take time"
    same = put(found.plans[0].config, parallel={"offload_optimizer": False})
    assert plan(same, small).seconds < found.plans[0].seconds


@pytest.mark.thorough
def test_a_search_leaves_a_margin_free():
    config, cluster = model(), named("h100", 2)
    most = max(
        c.nbytes
        for c in candidates(config, cluster, 2)
        if c.nbytes < cluster.accelerator.usable_bytes
    )
    tight = dataclasses.replace(
        cluster,
        accelerator=dataclasses.replace(
            cluster.accelerator, memory=most * 1.01 / 2**30, reserved=0.0
        ),
    )
    assert all(
        p.bytes <= (1 - MARGIN) * most * 1.01 for p in search(config, tight, 2).plans
    )


def test_rows_are_split_over_context_where_they_are_long_and_each_rank_keeps_thousands_of_tokens():
    def of(length, **mesh):
        return contexts(
            replaced(model(), mesh=mesh, train={"sequence_length": length}), 64
        )

    assert of(2048) == of(8192) == [1] and of(2048, context=4) == [1, 4]
    assert of(16384) == [1, 2, 4] and of(2**20) == [1, 2, 4, 8, 16, 32, 64]
    assert of(3 * 2**13) == [1, 2, 4] and of(3 * 2**13 + 1) == [1]


@pytest.mark.thorough
def test_a_search_on_long_rows_splits_them_over_context_as_the_config_may():
    config = replaced(
        model(layers=2), train={"global_batch_size": 2, "sequence_length": 2**16}
    )
    found = search(config, named("h100", 8), 8, best=3)
    best = found.plans[0]
    assert best.config.mesh.context > 1 and best.config.mesh.devices == 8
    for near in found.plans:
        check(near.config)
    without = max(
        c.mesh.context == 1
        for c in (
            candidate.config for candidate in candidates(config, named("h100", 8), 8)
        )
    )
    assert without


def test_near_what_a_rank_had_a_microbatch_has_as_many_rows_or_a_half_a_quarter_of_them():
    assert nearby_cuts(model(), 1, 4) == (4, 8, 16)
    assert nearby_cuts(model(), 4, 3) == (2, 4)
