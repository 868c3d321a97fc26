"""What a plan says of experts is what the program sends and what models are known to hold."""

import itertools
import math
import re
from dataclasses import fields, replace

import pytest
from covering import slow_but

from meshtrain.config import load, replaced
from meshtrain.config.model import MoeConfig
from meshtrain.config.schema import SELECTIVE
from meshtrain.model.weights import parameters
from meshtrain.parallel.placement import expert_axes
from meshtrain.plan import DEFAULT_PROFILE, named, plan, shapes, traffic
from meshtrain.plan.choices import meshes
from meshtrain.plan.compiled import compile_step
from meshtrain.plan.compute import Layer, Seconds
from meshtrain.plan.estimate import estimate
from meshtrain.plan.experts import NOTIFY, add_experts, expert_seconds, reached
from meshtrain.plan.layer_costs import layer_cost
from meshtrain.plan.search import candidates, expert_reason, search

PUBLISHED = {
    "configs/qwen3_30b_a3b.yaml": (30.5e9, 3.3e9),
    "configs/mixtral_8x7b.yaml": (46.7e9, 12.9e9),
}


@pytest.mark.parametrize("config", PUBLISHED)
def test_parameters_and_active_ones_are_as_published(config):
    every, active = PUBLISHED[config]
    model = load(config).model
    assert parameters(model) == pytest.approx(every, rel=0.01)
    assert shapes.active_parameters(model) == pytest.approx(active, rel=0.02)


SENT = {"nodes": {"dispatch": "all_to_all", "ranks_per_node": 2}}
KEPT = {"dispatched": {"remat": "names", "remat_keep": ["dispatched"]}}


def configuration(dispatch, capacity, remat="none", family="llama", **mesh):
    return load(
        {
            "model": {
                "family": family,
                "layers": 2,
                "d_model": 64,
                "heads": 4,
                "kv_heads": 2,
                "vocab_size": 128,
                "moe": {"experts": 8, "d_ff": 48},
            },
            "mesh": {"data": 4, "expert": 4} | mesh,
            "parallel": {
                "experts": SENT.get(dispatch, {"dispatch": dispatch})
                | {"capacity": capacity},
                "zero_stage": 2,
                **KEPT.get(remat, {"remat": remat}),
                "microbatches": 2,
                "sequence_parallel": mesh.get("tensor", 1) > 1,
            },
            "train": {"global_batch_size": 16, "sequence_length": 32},
        }
    )


FEW: list[dict] = [
    {},
    {"pipeline": 2},
    {"tensor": 2, "expert": 2, "remat": "full"},
    {"context": 2, "remat": "full"},
    {"remat": "dispatched"},
    {"data": 1, "context": 4},
    {"data": 2, "context": 2, "pipeline": 2, "remat": "full"},
]
MORE = [*FEW, {"remat": "full"}, {"expert": 2}, {"tensor": 2}, {"context": 2}]


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [None, 1.25])
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all", "nodes"])
@pytest.mark.parametrize("more", slow_but(MORE, FEW))
def test_the_program_sends_over_expert_what_is_planned(dispatch, capacity, more):
    config = configuration(dispatch, capacity, **more)
    compiled = compile_step(config, "cpu")
    sent = compiled.sent()
    planned = traffic.by_axis(plan(config, named("cpu", config.mesh.devices)).transfers)
    parts = dispatch != "all_gather" and config.mesh.tensor > 1
    over = ("expert", "tensor") if parts else ("expert",)
    if config.mesh.data < config.mesh.expert:
        assert {*expert_axes(config)} - {"expert"} == {"context"}
        assert planned["context"] == pytest.approx(sent["context"], rel=0.01)
    else:
        assert expert_axes(config) == over
    assert "+".join(over) in sent
    assert planned["expert"] == pytest.approx(
        sent.get("expert", 0) + sent.get("expert+tensor", 0), rel=0.01
    )
    assert planned["tensor"] == pytest.approx(sent.get("tensor", 0), rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full"])
def test_norms_over_all_heads_send_what_is_planned(remat):
    config = configuration(
        "all_gather", None, remat, "olmoe", data=2, expert=1, tensor=2
    )
    sent = compile_step(config, "cpu").sent()
    planned = traffic.by_axis(plan(config, named("cpu", config.mesh.devices)).transfers)
    assert planned["tensor"] == pytest.approx(sent["tensor"], rel=1e-3)


@pytest.mark.parametrize("groups", [(), (4, 2)], ids=("all", "groups"))
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_as_many_tokens_reach_neighbouring_experts_as_choices_say(groups, count):
    experts, top_k = 8, 3
    pools = [tuple(range(experts))]
    if groups:
        size = experts // groups[0]
        chosen = itertools.combinations(range(groups[0]), groups[1])
        pools = [
            [group * size + n for group in some for n in range(size)] for some in chosen
        ]
    every = [choice for pool in pools for choice in itertools.combinations(pool, top_k)]
    share = sum(min(choice) < count for choice in every) / len(every)
    assert reached(
        MoeConfig(experts=experts, top_k=top_k, groups=groups), count
    ) == pytest.approx(share)


def test_a_row_that_is_sent_to_a_node_once_crosses_it_once_and_goes_on_inside_meanwhile():
    config = load(
        "configs/qwen3_30b_a3b.yaml",
        [
            "mesh.expert=16",
            "parallel.microbatches=64",
            "parallel.experts.capacity=1.25",
        ],
    )
    cluster = named("h100", 16)
    row, tokens = 2048 * 2, 4096
    once = replace(DEFAULT_PROFILE, token_per_node=True)

    # seconds there, by a network and NVLink of so many GB/s
    def sent(across, within):
        links = cluster.links
        rail, node = (
            replace(links.rail, bandwidth=across),
            replace(links.node, bandwidth=within),
        )
        given = replace(cluster, links=replace(links, rail=rail, node=node))
        forward, _ = expert_seconds(config, given, once)
        # there and back; the choices are told beside
        return (forward - 3 * NOTIFY) / 2

    # of 8 experts among 128: one or more on the other node, and on each of the 7 other devices of a node, whose tokens
    # are both nodes'
    across, within = (
        1 - math.comb(64, 8) / math.comb(128, 8),
        7 * (1 - math.comb(120, 8) / math.comb(128, 8)),
    )
    reach = cluster.accelerator.efficiency.link * 1e9
    assert sent(50, 450) == pytest.approx(
        tokens * row * across / (50 * reach), rel=0.06
    )
    assert sent(200, 50) == pytest.approx(
        tokens * row * 2 * within / (50 * reach), rel=0.06
    )
    forward, _ = expert_seconds(config, cluster, once)
    direct, _ = expert_seconds(config, cluster, DEFAULT_PROFILE)
    assert direct > 2 * forward
    hidden, _ = expert_seconds(config, cluster, replace(once, overlap_expert=True))
    assert hidden == pytest.approx(
        cluster.accelerator.efficiency.exposed_tensor * forward
    )


def test_a_pass_of_a_layer_with_experts_takes_no_less_than_the_host_takes_to_launch_it():
    """Dense layers wait for no launches, and nothing is added where a pass takes longer by itself."""
    config = configuration("all_to_all", 1.25)
    cluster = named("h100", config.mesh.devices)

    def passes(config, **fields):
        cost = layer_cost(config, cluster, replace(DEFAULT_PROFILE, **fields))
        assert cost.forward_copies >= 0 and cost.backward_copies >= 0
        return (
            cost.forward.total + cost.forward_sends + cost.forward_copies,
            cost.backward.total + cost.backward_sends + cost.backward_copies,
        )

    alone = passes(config)
    assert passes(config, expert_launch=5e-3) == pytest.approx((5e-3, 5e-3))
    assert passes(config, expert_launch=min(alone) / 2) == alone
    # the wait for the counts of rows is in the forward, and is over before the last launch
    assert passes(config, expert_wait=1e-3) == (alone[0] + 1e-3, alone[1])
    assert passes(config, expert_wait=1e-3, expert_launch=5e-3) == pytest.approx(
        (5e-3, 5e-3)
    )
    dense = replaced(config, model={"moe": {"experts": 0}}, mesh={"expert": 1})
    assert passes(dense, expert_launch=5e-3, expert_wait=1e-3) == passes(dense)


@pytest.mark.parametrize("tensor, expert", [(1, 8), (2, 4), (4, 2), (4, 8)])
def test_rows_travel_over_all_devices_that_share_the_experts(tensor, expert):
    """With sequence parallelism experts lie over tensor too: 4 x 8 of them are on four nodes of 8."""
    words = [
        f"mesh.tensor={tensor}",
        f"mesh.expert={expert}",
        "parallel.microbatches=1",
    ]
    words += [
        f"parallel.sequence_parallel={tensor > 1}",
        "parallel.experts.dispatch=all_to_all",
    ]
    config = load(
        "configs/qwen3_30b_a3b.yaml", ["mesh.data=16", "mesh.pipeline=1", *words]
    )
    cluster = named("h100", config.mesh.devices)
    rows = [t for t in plan(config, cluster).transfers if t.axis == "expert"]
    assert rows and {t.group(cluster, config.mesh).size for t in rows} == {
        tensor * expert
    }
    within = {hop.level for hop in rows[0].group(cluster, config.mesh).hops} == {"node"}
    assert within == (tensor * expert <= 8)


def test_rows_that_cross_nodes_once_cross_as_often_as_nodes_are_and_go_on_within():
    """Two nodes of 8: what is gathered keeps to the devices of one number, the rest to a node."""
    words = ["mesh.expert=16", "parallel.microbatches=64", "parallel.remat=none"]
    direct = load("configs/qwen3_30b_a3b.yaml", words)
    once = load(
        "configs/qwen3_30b_a3b.yaml", [*words, "parallel.experts.ranks_per_node=8"]
    )
    cluster = named("h100", 16)
    row, tokens, layers, microbatches = 2048 * 2, 4096, 48, 64
    sent: dict[tuple[str, ...], float] = {}
    for t in plan(once, cluster).transfers:
        if t.legs:
            levels = tuple(hop.level for hop in t.group(cluster, once.mesh).hops)
            sent[levels] = sent.get(levels, 0) + t.sent
    assert len(sent) == 2 and sent.keys() == {("node",), ("rail",)}
    # both ways, forward and backward; choices and weights beside
    ways = 4 * layers * microbatches
    assert sent["rail",] == pytest.approx(ways * tokens * row, rel=0.02)
    assert sent["node",] == pytest.approx(
        ways * 1.25 * 8 * tokens * row * 7 / 8, rel=0.02
    )
    assert expert_seconds(once, cluster, DEFAULT_PROFILE) < tuple(
        seconds / 2 for seconds in expert_seconds(direct, cluster, DEFAULT_PROFILE)
    )
    assert plan(once, cluster).bytes < 1.01 * plan(direct, cluster).bytes


def test_a_search_sends_rows_once_to_a_node_where_experts_lie_on_several():
    config = load("configs/qwen3_30b_a3b.yaml", ["mesh.expert=1"])
    per_node = {
        c.base.mesh.expert: c.base.parallel.experts.ranks_per_node
        for c in candidates(config, named("h100", 16), 16, near=True)
        if c.base.mesh.data == 16
    }
    assert per_node[8] is None and per_node[16] == 8


def memory_seconds(config, profile=DEFAULT_PROFILE):
    return layer_cost(
        config, named("h100", config.mesh.devices), profile
    ).forward.memory


def test_rows_that_are_sent_to_their_experts_are_copied_once_more_and_those_that_a_kernel_places_never():
    gathered, sent = (
        configuration(dispatch, 1.0) for dispatch in ("all_gather", "all_to_all")
    )
    placed = replace(DEFAULT_PROFILE, token_per_node=True)
    assert (
        memory_seconds(sent, placed) < memory_seconds(gathered) < memory_seconds(sent)
    )


def test_biases_of_experts_cost_what_the_framework_moves_for_them():
    slow = replace(DEFAULT_PROFILE, bias_bytes=(4.0, 30.0))
    assert memory_seconds(configuration("all_gather", 1.0), slow) == memory_seconds(
        configuration("all_gather", 1.0)
    )
    biased = configuration("all_gather", 1.0, family="gpt_oss")
    assert memory_seconds(biased, slow) > memory_seconds(biased)


def test_a_search_looks_at_all_ranks_that_experts_divide_over():
    config = configuration("auto", None)
    found = {(mesh["data"], mesh["expert"]) for mesh in meshes(config, 8)}
    assert {(8, 8), (8, 2), (4, 4), (2, 1)} <= found
    assert all(data % expert == 0 and 8 % expert == 0 for data, expert in found)
    long = replaced(config, train={"sequence_length": 2**14})
    folded = {
        (m["data"], m["context"], m["expert"])
        for m in meshes(long, 8)
        if m["context"] > 1
    }
    assert {(1, 2, 2), (2, 2, 4), (2, 4, 8), (2, 2, 2)} <= folded
    assert (1, 4, 2) not in folded and (2, 4, 4) in folded
    for data, context, expert in folded:
        replaced(long, mesh={"data": data, "context": context, "expert": expert})


@pytest.mark.parametrize("given", ["auto", "all_gather"])
def test_a_search_has_rows_sent_as_each_number_of_ranks_asks_unless_the_config_says_how(
    given,
):
    config = configuration(given, 1.25, data=8, expert=1)
    found = {
        (c.base.mesh.expert, c.base.parallel.experts.dispatch)
        for c in candidates(config, named("h100", 8), 8, near=True)
    }
    chosen = {
        "auto": {(1, "auto"), (2, "all_gather"), (4, "all_to_all"), (8, "all_to_all")}
    }
    assert found == chosen.get(given, {(ranks, given) for ranks in (1, 2, 4, 8)})


def test_passes_over_memory_are_over_the_room_on_gpus_and_over_rows_in_use_in_loops_and_elsewhere():
    """4 ranks with 2 of 8 experts, of which a token takes 2: without a capacity a round has 1.25 times an even load."""

    def activation(capacity, name, profile=DEFAULT_PROFILE):
        config = replaced(
            configuration("all_gather", capacity), train={"sequence_length": 4096}
        )
        idle = Layer(*[Seconds()] * len(fields(Layer)))
        return add_experts(config, idle, named(name, 4), profile).mlp_hidden.memory

    assert activation(None, "h100") == activation(1.25, "h100")
    assert activation(4.0, "h100") == pytest.approx(
        4 / 1.25 * activation(None, "h100"), rel=0.02
    )  # blocks are filled up
    other = replace(DEFAULT_PROFILE, compiled=False)
    assert activation(4.0, "h100") == pytest.approx(
        4 / 1.1 * activation(4.0, "h100", other), rel=0.02
    )
    assert activation(None, "tpu-v5p") == pytest.approx(
        activation(None, "tpu-v5p", other)
    )


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all", "nodes"])
def test_rows_that_are_kept_are_neither_sent_nor_put_into_slots_again(dispatch):
    again = configuration(dispatch, 1.0, "selective")
    keys = {"remat": "names", "remat_keep": (*SELECTIVE, "dispatched")}
    kept = replaced(again, parallel=keys)
    of_rows = [
        t.what for t in plan(kept, named("h100", 4)).transfers if "rows" in t.what
    ]
    assert of_rows and not [what for what in of_rows if "again" in what]
    before, after = (layer_cost(config, named("h100", 4)) for config in (again, kept))
    assert after.expert_sends < before.expert_sends
    assert after.recompute.memory < before.recompute.memory


def test_a_pair_hides_three_tenths_of_the_experts_messages_where_there_is_work_for_as_long():
    wide = {"d_model": 4096, "moe": {"experts": 8, "d_ff": 14336}}
    config = replaced(
        configuration("all_to_all", 1.25), model=wide, train={"sequence_length": 4096}
    )
    cost = layer_cost(config, named("h100", 4))
    assert cost.forward.total > cost.expert_sends
    assert cost.forward_hidden + cost.backward_hidden == pytest.approx(
        0.3 * cost.expert_sends
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "devices, batch, ranks, says",
    [
        (16, 1024, 1, r"does not pay: .* expert 2\).*: expert collectives \+"),
        (64, 64, 4, r"over 4 ranks pays: .* \+\d.*: "),
    ],
)
def test_a_search_takes_expert_parallelism_where_it_is_faster_and_says_why(
    devices, batch, ranks, says
):
    """Weights that are gathered once a layer take the longer the fewer tokens there are to hide them."""
    config = replaced(
        load("configs/qwen3_30b_a3b.yaml"), train={"global_batch_size": batch}
    )
    cluster = named("h100", devices)
    result = search(config, cluster, devices)
    fastest, other = result.plans[0], result.other_experts
    assert fastest.config.mesh.expert == ranks and (other.config.mesh.expert > 1) == (
        ranks == 1
    )
    assert fastest.seconds < other.seconds
    assert re.search(says, expert_reason(result))
    # the same layout but for its experts is no faster than the one that is said
    expert = 2 if ranks == 1 else 1
    same = estimate(replaced(fastest.config, mesh={"expert": expert}), cluster)
    assert other.seconds <= 1.001 * same.seconds


def test_a_search_of_a_dense_model_says_nothing_of_experts():
    config = load({"model": {"layers": 2, "d_model": 64, "heads": 4}})
    result = search(config, named("h100", 4), 4)
    assert result.other_experts is None and expert_reason(result) == ""
