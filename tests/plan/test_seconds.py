import dataclasses

import pytest

from meshtrain.model.weights import parameters
from meshtrain.plan import ACCELERATORS, compute, named, plan, shapes
from meshtrain.plan.cluster.accelerators import Efficiency
from meshtrain.plan.shapes import replaced


def test_the_parts_of_a_step_sum_to_it_and_the_bubble_is_the_simulators(llama_8b):
    found = plan(llama_8b(schedule="interleaved", virtual_stages=2), named("h100", 16))
    assert sum(seconds for _, seconds in found.time.parts()) == pytest.approx(found.seconds)
    assert all(seconds >= 0 for _, seconds in found.time.parts())
    assert found.time.bubble / found.timeline.makespan == pytest.approx(found.bubble_fraction, rel=0.05)


def test_model_flops_are_those_of_palm_and_megatron(llama_8b):
    config = llama_8b()
    model, train = config.model, config.train
    per_token = 6 * (parameters(model) - model.vocab_size * model.d_model) + 12 * 32 * 4096 * train.sequence_length
    tokens = train.global_batch_size * train.sequence_length
    assert shapes.model_flops(config) == pytest.approx(per_token * tokens, rel=1e-3)


def test_an_ideal_device_without_links_to_wait_for_reaches_its_peak(llama_8b):
    h100 = ACCELERATORS["h100"]
    ideal = dataclasses.replace(h100, bandwidth=1e9, efficiency=Efficiency(1.0, 0.0, 1.0, 1.0, 1.0, 1.0))
    cluster = dataclasses.replace(named("h100", 1), accelerator=ideal)
    config = llama_8b({"data": 1}, {"global_batch_size": 4}, microbatches=4)
    # causal attention does half of what the model's FLOPs count, and flash attention's backward 2.5 times its forward
    assert 1.0 < plan(config, cluster).mfu < 1.15


def test_short_sides_make_matrix_products_slow():
    device = ACCELERATORS["h100"]
    rates = [2 * m * 4096 * 4096 / compute.product(device, "bfloat16", m, 4096, 4096) for m in (8, 128, 1024, 16384)]
    assert rates == sorted(rates) and rates[0] < 0.2 * rates[-1]


def test_every_recomputation_costs_and_less_recomputation_costs_less(llama_8b):
    cluster = named("h100", 16)
    none, dots, full = (plan(llama_8b(remat=remat), cluster).seconds for remat in ("none", "dots", "full"))
    assert none < dots < full < 1.5 * none


def test_tensor_parallelism_across_nodes_waits_for_the_links_between_them(llama_8b):
    cluster = named("h100", 32)
    rail = dataclasses.replace(cluster.links.rail, bandwidth=cluster.links.rail.bandwidth / 20)
    slow = dataclasses.replace(cluster, links=dataclasses.replace(cluster.links, rail=rail))

    def waits(tensor, on):
        config = llama_8b({"data": 32 // tensor, "tensor": tensor}, microbatches=2, sequence_parallel=True)
        return plan(config, on).time.tensor

    assert waits(16, slow) > 10 * waits(16, cluster)
    assert waits(8, slow) == waits(8, cluster)  # stays inside a node


def test_holding_weights_saves_traffic_over_data(llama_8b):
    cluster = named("h100", 16)
    mesh = {"data": 16}
    held, not_held = (
        plan(llama_8b(mesh, microbatches=4, zero_stage=3, zero_hold=hold), cluster) for hold in (True, False)
    )
    assert held.time.data < not_held.time.data / 2 and held.bytes > not_held.bytes


def test_checkpoints_cost_their_copy_and_what_the_store_cannot_take_in_time(llama_8b):
    config = llama_8b()
    cluster = named("h100", 16)
    never, seldom, often = (plan(replaced(config, checkpoint={"every": n}), cluster) for n in (0, 100, 1))
    assert never.time.checkpoint == 0 < seldom.time.checkpoint < often.time.checkpoint
    copy = sum(i.nbytes for i in seldom.memory if i.between_steps) / (cluster.host_bandwidth * 1e9)
    assert seldom.time.checkpoint * 100 == pytest.approx(copy)


def test_what_bounds_a_step_is_named(llama_8b):
    cluster = named("h100", 16)
    assert plan(llama_8b(), cluster).time.bound == "compute"
    slow = llama_8b({"pipeline": 16}, {"global_batch_size": 1}, microbatches=1)
    assert plan(slow, cluster).time.bound == "bubble"
