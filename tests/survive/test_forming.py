"""A run's config on the nodes that are left: the batch kept, tensor x pipeline kept where they fit, memory not
exceeded.
"""

import cProfile
import dataclasses
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from meshtrain.config import (
    Config,
    ConfigError,
    SurviveConfig,
    check,
    load,
    resolve,
    to_yaml,
)
from meshtrain.config.follow import microbatch_rows, padded_batch_size, put
from meshtrain.config.mesh import MeshConfig
from meshtrain.plan import named, plan
from meshtrain.schedule.generators import SCHEDULES, Schedule, make_table
from meshtrain.survive import forming
from meshtrain.survive.forming import Formed, formed, microbatches

MODEL = {"layers": 64, "d_model": 64, "heads": 16, "vocab_size": 512}


def run_of(mesh: dict[str, int], batch: int, wanted: int, **others: Any) -> Config:
    values = {
        "model": MODEL,
        "mesh": mesh,
        "train": {"global_batch_size": batch},
        "survive": {"wanted": wanted},
    }
    return load(
        {
            name: {**values.get(name, {}), **others.get(name, {})}
            for name in {**values, **others}
        }
    )


def on(config: Config, nodes: int, **keys: Any) -> Formed:
    found = formed(config, nodes, **keys)
    assert found is not None
    check(found.config)
    return found


def apart_from_survive(config: Config) -> Config:
    inject = config.survive.inject
    return dataclasses.replace(config, survive=SurviveConfig(most=1, inject=inject))


# 128 nodes of 8, as in the issue of meshes that lose a node: half of them idle where data must divide the batch.
@pytest.mark.parametrize(
    ("cut", "rows", "more", "microbatches"),
    [(16, 1035, "1.1%", 23), (64, 1035, "1.1%", 69), (32, 1050, "2.5%", 35)],
)
def test_one_node_of_128_costs_8_nodes_and_hardly_any_rows(
    cut, rows, more, microbatches
):
    config = run_of(
        {"data": 16, "tensor": 8, "pipeline": 8},
        1024,
        128,
        parallel={"microbatches": cut},
    )
    found = on(config, 127)
    idle, padding, cuts = found.sentence.split(", ")
    assert (found.nodes, idle) == (120, "data 15 of 16: 7 of 127 nodes idle")
    assert (padding, cuts) == (
        f"{more} more rows",
        f"microbatches {microbatches} in place of {cut}",
    )
    assert (found.config.mesh.devices, padded_batch_size(found.config)) == (960, rows)
    assert (
        found.config.train.uneven_batch == "pad"
        and found.config.train.global_batch_size == 1024
    )


def shapes(count: int) -> Iterator[tuple[Config, int, int]]:
    """Random runs with a number of nodes on which tensor x pipeline fits, and the devices of a node."""
    draw = random.Random(13)
    base = put(Config(), model=MODEL)
    while count:
        tensor, stages, data = (
            draw.choice([1, 2, 4, 8]),
            draw.choice([1, 2, 3, 5, 8]),
            draw.randint(1, 24),
        )
        each, islands = draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 2, 3, 4])
        wanted, left = divmod(data * tensor * stages, each)
        name = draw.choice(
            [name for name in SCHEDULES if SCHEDULES[name].chunks in (None, 1, 2)]
        )
        cut, pads = draw.randint(1, 12), draw.random() < 0.3
        batch = (
            draw.randint(data, 40 * data) if pads else data * cut * draw.randint(1, 9)
        )
        batching = draw.choice(["window", "budget"])
        fewest = -(-tensor * stages // each)
        if left or wanted < fewest or data % islands:
            continue
        chosen = put(
            base,
            mesh={
                "data": data,
                "tensor": tensor,
                "pipeline": stages,
                "islands": islands,
            },
            parallel={
                "microbatches": cut,
                "schedule": name,
                "zero_stage": draw.randint(0, 3),
            },
            train={
                "global_batch_size": batch,
                "uneven_batch": "pad" if pads else "refuse",
            },
            data={"batching": batching},
            survive={"wanted": wanted, "most": wanted + draw.randint(0, 3)},
        )
        config = resolve(chosen)
        check(config)
        yield config, draw.randint(fewest, wanted + 4), each
        count -= 1


def most_ranks(before: MeshConfig, devices: int, rows: int) -> tuple[int, int]:
    """By trying all: as many ranks as can be in islands of one size, which have never been larger where one of them is
    gone.
    """
    places = min(devices // (before.tensor * before.pipeline), rows)
    found = [
        (islands * each, islands)
        for islands in range(1, before.islands + 1)
        for each in range(1, places // islands + 1)
        if islands == before.islands or each <= before.data // before.islands
    ]
    return min(found, key=lambda cut: (-cut[0], cut[1]))


@pytest.mark.thorough
def test_thousands_of_shapes_are_legal_fit_and_never_grow_a_microbatch():
    shrunk = grown = 0
    for config, nodes, each in shapes(1500):
        found = on(config, nodes)
        mesh, before, most = (
            found.config.mesh,
            config.mesh,
            min(nodes, config.survive.most),
        )
        assert (mesh.tensor, mesh.pipeline) == (before.tensor, before.pipeline)
        assert (
            mesh.devices <= found.nodes * each <= most * each
            and mesh.devices > (found.nodes - 1) * each
        )
        assert microbatch_rows(found.config) <= microbatch_rows(config)
        if mesh == before:
            assert found.config == apart_from_survive(config)
            continue
        assert (mesh.data, mesh.islands) == most_ranks(
            before, most * each, config.train.global_batch_size
        )
        # Nothing else than what it says has changed.
        parallel = dataclasses.replace(
            found.config.parallel, microbatches=config.parallel.microbatches
        )
        back = dataclasses.replace(
            found.config, mesh=before, parallel=parallel, train=config.train
        )
        assert back == apart_from_survive(config)
        shrunk, grown = (
            shrunk + (mesh.data < before.data),
            grown + (mesh.data > before.data),
        )
    assert shrunk > 500 and grown > 40


# Islands of nodes with fast links: equally large, so each loses what the smallest lost, or one of them goes.
@pytest.mark.parametrize(
    ("data", "islands", "left", "becomes", "ranks", "idle"),
    [
        (16, 2, 15, (14, 2), "14 of 16 in 2 islands of 7", "1 of 15"),
        (16, 2, 14, (14, 2), "14 of 16 in 2 islands of 7", "none of 14"),
        (32, 4, 31, (28, 4), "28 of 32 in 4 islands of 7", "3 of 31"),
        (16, 8, 15, (14, 7), "14 of 16 in 7 of 8 islands of 2", "1 of 15"),
        (16, 4, 15, (12, 3), "12 of 16 in 3 of 4 islands of 4", "3 of 15"),
        (16, 2, 9, (8, 1), "8 of 16 in 1 of 2 islands of 8", "1 of 9"),
        (6, 2, 1, (1, 1), "1 of 6 in 1 of 2 islands of 1", "none of 1"),
        (5, 5, 4, (4, 4), "4 of 5 in 4 of 5 islands of 1", "none of 4"),
    ],
)
def test_islands_stay_equally_large_and_keep_the_most_ranks(
    data, islands, left, becomes, ranks, idle
):
    config = run_of(
        {"data": data, "islands": islands}, 8 * data, data, parallel={"microbatches": 4}
    )
    found = on(config, left)
    assert (found.config.mesh.data, found.config.mesh.islands) == becomes
    assert found.sentence.startswith(f"data {ranks}: {idle} nodes idle")
    assert found.nodes == becomes[0]


@pytest.mark.parametrize(
    ("mesh", "batch", "wanted", "others", "left", "becomes"),
    [
        (
            {"data": 16, "islands": 2},
            128,
            16,
            {"parallel": {"microbatches": 4, "sync": {"every": 5}}},
            9,
            (8, 2),
        ),
        (
            {"data": 4, "islands": 2},
            64,
            4,
            {"survive": {"wanted": 4, "most": 7}},
            7,
            (6, 2),
        ),
    ],
    ids=["local steps need two islands", "more nodes than were wanted"],
)
def test_islands_become(mesh, batch, wanted, others, left, becomes):
    found = on(run_of(mesh, batch, wanted, **others), left).config.mesh
    assert (found.data, found.islands) == becomes


def test_with_all_its_nodes_a_run_is_as_it_was_written():
    config = run_of(
        {"data": 5, "tensor": 2},
        17,
        5,
        train={"uneven_batch": "pad"},
        parallel={"microbatches": 3},
    )
    found = on(config, 5)
    assert found.config == apart_from_survive(config) and found.nodes == 5
    assert re.match(r"data 5 of 5: none of 5 .*, 76\.5% more", found.sentence)
    islands = run_of({"data": 8, "islands": 4, "tensor": 2}, 16, 8)
    assert on(islands, 8).config == apart_from_survive(islands)
    assert re.match("data 8 of 8 in 4 islands of 2: none ", on(islands, 8).sentence)
    # 3 more nodes are spares: survive.most is 5.
    assert on(config, 8).config == found.config
    assert on(config, 8).sentence.startswith("data 5 of 5: 3 of 8 nodes idle")


def test_a_generation_keeps_what_is_to_be_injected_and_can_be_written_and_read(
    tmp_path,
):
    config = run_of(
        {"data": 4},
        8,
        4,
        survive={"inject": ["kill@3:1"], "node_timeout": 5.0, "least": 2},
    )
    found = on(config, 3)
    assert found.config.survive == SurviveConfig(most=1, inject=("kill@3:1",))
    (tmp_path / "config.yaml").write_text(to_yaml(found.config))
    assert load(tmp_path / "config.yaml") == found.config


def test_devices_beside_the_last_data_rank_are_told():
    config = run_of(
        {"data": 4, "tensor": 2, "pipeline": 3}, 12, 3, parallel={"microbatches": 3}
    )
    found = on(config, 2)
    assert (found.config.mesh.data, found.nodes) == (2, 2)
    assert re.match("data 2 of 4: none of 2 .*, 4 devices", found.sentence)


@pytest.mark.parametrize(
    ("rows", "most", "first"),
    [
        (69, 4, 23),
        (69, 1, 69),
        (67, 4, 17),
        (8, 8, 1),
        (9, 8, 3),
        (10, 8, 2),
        (7, 3, 4),
        (12, 4, 3),
    ],
)
def test_microbatches_are_the_fewest_that_waste_little(rows, most, first):
    counts = list(microbatches(rows, most))
    assert counts[0] == first
    assert all(-(-rows // count) <= most for count in counts) and len(
        set(counts)
    ) == len(counts)


def test_a_table_of_ones_own_keeps_its_microbatches_and_says_so(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(make_table("1f1b", 2, 4).to_csv())
    parallel = {"microbatches": 4, "schedule": str(path)}
    found = on(run_of({"data": 3, "pipeline": 2}, 12, 3, parallel=parallel), 2)
    assert (found.config.parallel.microbatches, found.config.mesh.data) == (4, 2)
    assert re.search(
        f"of 2 rows in place of 1 .*{re.escape(str(path))} is for 4", found.sentence
    )


def test_a_schedule_from_outside_gets_a_number_of_microbatches_that_it_takes(request):
    def in_fours(stages: int, count: int, chunks: int):
        if count % 4:
            raise ConfigError("it takes microbatches in fours.")
        return SCHEDULES["gpipe"].clocks(stages, count, chunks)

    SCHEDULES.register(Schedule("fours", in_fours))
    request.addfinalizer(lambda: SCHEDULES.forget("fours"))
    config = run_of(
        {"data": 4, "pipeline": 2},
        64,
        4,
        parallel={"microbatches": 16, "schedule": "fours"},
    )
    # 22 rows a rank, of one each
    assert on(config, 3).config.parallel.microbatches == 24


def test_where_the_cell_has_no_place_the_planner_proposes_what_fits():
    config = run_of(
        {"tensor": 4, "pipeline": 2},
        10,
        4,
        parallel={"microbatches": 2, "sequence_parallel": True},
    )
    found = on(config, 3, cluster="h100")
    mesh = found.config.mesh
    assert mesh.devices in (4, 6) and found.config.train.global_batch_size == 10
    assert plan(found.config, named("h100", mesh.devices)).fits
    proposed = f"data {mesh.data} x tensor {mesh.tensor} x pipeline {mesh.pipeline}"
    assert re.match(
        f"tensor 4 x pipeline 2 .*3 nodes of 2 devices, {proposed}", found.sentence
    )


def test_on_a_number_of_devices_that_no_layout_has_fewer_are_used():
    """7 devices would be 7 heads, layers or rows, of which there are 4, 2 and 2."""
    model = {**MODEL, "layers": 2, "heads": 4}
    found = on(
        run_of({"tensor": 4, "pipeline": 2}, 2, 8, model=model), 7, cluster="h100"
    )
    assert found.nodes == 4 and "3 of 7 nodes idle" in found.sentence


def test_where_nothing_fits_nothing_is_formed():
    config, h100 = run_of({"tensor": 4}, 8, 4), named("h100", 8)
    tiny = dataclasses.replace(
        h100,
        accelerator=dataclasses.replace(h100.accelerator, memory=2.001, reserved=2.0),
    )
    assert formed(config, 3, cluster=h100) is not None
    assert formed(config, 3, cluster=tiny) is None
    assert formed(config, 0, cluster=h100) is None


# Of the last none is known: what a run is usually planned for.
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA GH200 480GB", "h100"),
    ],
)
def test_the_gpu_that_is_here_names_the_cluster(model, name, tmp_path, monkeypatch):
    monkeypatch.setattr(forming, "GPUS", tmp_path)
    assert forming.cluster_here(load({})) == "cpu"
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(
        f"Model: \t\t {model}\nIRQ:   42\n"
    )
    assert forming.cluster_here(load({})) == name


def test_a_thousand_nodes_are_no_more_work_than_a_few():
    config = run_of(
        {"data": 1000, "tensor": 8}, 8000, 1000, parallel={"microbatches": 2}
    )
    assert max(_calls(config, nodes) for nodes in (999, 998, 701)) < 15_000


@pytest.mark.thorough
def test_a_search_for_another_mesh_keeps_no_supervisor_silent():
    """2.6 million calls take about a second and a half, and a node counts as lost after 20."""
    model = {
        "layers": 80,
        "d_model": 8192,
        "heads": 64,
        "kv_heads": 8,
        "vocab_size": 128256,
    }
    config = run_of(
        {"tensor": 8, "pipeline": 8},
        1024,
        8,
        model=model,
        parallel={"microbatches": 16},
    )
    assert _calls(config, 7) < 3_500_000


def _calls(config: Config, nodes: int) -> int:
    """The calls of functions that a search makes: seconds of a processor depend on what else it does."""
    profile = cProfile.Profile()
    profile.runcall(formed, config, nodes, cluster="h100")
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    ("batching", "becomes"), [("window", "refuse"), ("budget", "pad")]
)
def test_a_budget_s_rows_have_to_divide_too_or_the_batch_is_padded(batching, becomes):
    config = put(
        Config(),
        mesh={"data": 4},
        train={"global_batch_size": 8},
        data={"batching": batching, "rows_multiple": 6},
    )
    assert (
        forming._even(put(config, train={"uneven_batch": "refuse"})).train.uneven_batch
        == becomes
    )
