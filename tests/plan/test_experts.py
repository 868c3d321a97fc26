"""What a plan says of experts is what the program sends and what models are known to hold."""

import dataclasses

import pytest
from counted import before_or_after_the_clocks

from meshtrain.config import load
from meshtrain.model.weights import parameters
from meshtrain.plan import named, plan, shapes, traffic
from meshtrain.plan.choices import meshes
from meshtrain.plan.compiled import compile_step

PUBLISHED = {"configs/qwen3_30b_a3b.yaml": (30.5e9, 3.3e9), "configs/mixtral_8x7b.yaml": (46.7e9, 12.9e9)}


@pytest.mark.parametrize("config", PUBLISHED)
def test_parameters_and_active_ones_are_as_published(config):
    every, active = PUBLISHED[config]
    model = load(config).model
    assert parameters(model) == pytest.approx(every, rel=0.01)
    assert shapes.active_parameters(model) == pytest.approx(active, rel=0.02)


def configuration(dispatch, capacity, remat="none", **mesh):
    return load(
        {
            "model": {"layers": 2, "d_model": 64, "heads": 4, "kv_heads": 2, "vocab_size": 128, "moe": {"experts": 8, "d_ff": 48}},
            "mesh": {"data": 4, "expert": 4} | mesh,
            "parallel": {"experts": {"dispatch": dispatch, "capacity": capacity}, "zero_stage": 2, "remat": remat, "microbatches": 2},
            "train": {"global_batch_size": 16, "sequence_length": 32},
        }
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("more", [{}, {"remat": "full"}, {"expert": 2}, {"pipeline": 2}])
def test_the_program_sends_over_expert_what_is_planned(dispatch, more):
    config = configuration(dispatch, 1.25, **more)
    compiled = compile_step(config, "cpu")
    clocks = [c for c in compiled.collectives if not before_or_after_the_clocks(c["source"])]
    sent = dataclasses.replace(compiled, collectives=clocks).sent()
    planned = traffic.by_axis(plan(config, named("cpu", config.mesh.devices)).transfers)
    assert planned["expert"] == pytest.approx(sent["expert"], rel=0.01)


def test_a_search_looks_at_all_ranks_that_experts_divide_over():
    config = configuration("auto", None)
    found = {(mesh["data"], mesh["expert"]) for mesh in meshes(config, 8)}
    assert {(8, 8), (8, 2), (4, 4), (2, 1)} <= found
    assert all(data % expert == 0 and 8 % expert == 0 for data, expert in found)
