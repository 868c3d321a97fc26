import dataclasses
import math

import pytest
from covering import thorough_but

from experiments.communicate.overlap import layout_config
from meshtrain.cluster.accelerators import Efficiency
from meshtrain.cluster.algorithms import ALL_GATHER, best
from meshtrain.config import load, replaced
from meshtrain.mesh import make_mesh
from meshtrain.model.weights import parameters
from meshtrain.plan import (
    ACCELERATORS,
    FrameworkProfile,
    activations,
    compute,
    named,
    pipeline,
    plan,
    report,
    seconds,
    shapes,
)
from meshtrain.plan.failures import faults
from meshtrain.plan.layer_costs import layer_cost
from meshtrain.step import Program

NAMES = ("qkv", "attention", "attention_out", "mlp_in", "mlp_hidden", "mlp_out")


def test_the_parts_of_a_step_sum_to_it_and_the_bubble_is_the_simulators(llama_8b):
    found = plan(llama_8b(schedule="interleaved", virtual_stages=2), named("h100", 16))
    assert sum(seconds for _, seconds in found.time.parts()) == pytest.approx(
        found.seconds
    )
    assert all(seconds >= 0 for _, seconds in found.time.parts())
    assert found.time.bubble / found.timeline.makespan == pytest.approx(
        found.bubble_fraction, rel=0.05
    )


@pytest.mark.parametrize(
    "paired, plain", [("paired", "interleaved"), ("zb_paired", "zb_interleaved")]
)
def test_pairs_wait_for_fewer_messages_and_hold_what_a_forward_has_at_hand_too(
    llama_8b, paired, plain
):
    mesh = {"data": 1, "tensor": 4, "pipeline": 4}
    keys = {"virtual_stages": 2, "microbatches": 16, "sequence_parallel": True}
    after, before = (
        plan(llama_8b(mesh, schedule=name, **keys), named("h100", 16))
        for name in (paired, plain)
    )
    assert sum(seconds for _, seconds in after.time.parts()) == pytest.approx(
        after.seconds
    )
    sent = 16 * 8 * (after.costs.layer.forward_sends + after.costs.layer.backward_sends)
    hidden = before.time.tensor - after.time.tensor
    # the first forwards have no backward beside them; of zb_paired the last backwards have weight gradients
    assert (0.5 if paired == "paired" else 0.6) * sent < hidden < 0.9 * sent
    assert after.seconds < before.seconds < after.seconds + 1.5 * hidden
    held = {item.name: item.nbytes for item in after.memory}
    assert held[
        "work of one layer's forward beside it"
    ] == 2 * 2 * 4096 * shapes.tokens(after.config)
    places = after.depths.stash - before.depths.stash
    assert places == (1 if paired == "paired" else 2) and after.bytes > before.bytes


def test_on_one_stage_the_backward_of_a_microbatch_is_a_pair_with_the_forward_of_the_next(
    llama_8b,
):
    mesh, cluster = {"data": 2, "tensor": 8}, named("h100", 16)
    after, before = (
        plan(llama_8b(mesh, schedule=name, microbatches=8), cluster)
        for name in ("paired", "1f1b")
    )
    assert (
        after.time.tensor < 0.4 * before.time.tensor
        and after.clocks == 9
        and before.clocks == 8
    )
    assert plan(llama_8b(mesh, schedule="paired", microbatches=1), cluster).clocks == 1


def test_the_shares_of_a_steps_parts_that_are_printed_sum_to_all_of_it(llama_8b):
    *shares, total = report._time(plan(llama_8b(), named("h100", 16))).columns[2].cells
    assert (
        sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=1)
        and total == "100%"
    )


def test_model_flops_are_those_of_palm_and_megatron(llama_8b):
    config = llama_8b()
    model, train = config.model, config.train
    per_token = (
        6 * (parameters(model) - model.vocab_size * model.d_model)
        + 12 * 32 * 4096 * train.sequence_length
    )
    tokens = train.global_batch_size * train.sequence_length
    assert shapes.model_flops(config) == pytest.approx(per_token * tokens, rel=1e-3)


def without_limits(name):
    """An accelerator of which a matrix product takes its FLOPs at the peak rate, and nothing else anything."""
    most = Efficiency(1.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    return dataclasses.replace(ACCELERATORS[name], bandwidth=1e9, efficiency=most)


def test_an_ideal_device_without_links_to_wait_for_reaches_its_peak(llama_8b):
    cluster = dataclasses.replace(named("h100", 1), accelerator=without_limits("h100"))
    config = llama_8b({"data": 1}, {"global_batch_size": 4}, microbatches=4)
    # causal attention does half of what the model's FLOPs count, and flash attention's backward 2.5 times its forward
    assert 1.0 < plan(config, cluster).mfu < 1.15


@pytest.mark.parametrize(
    "family", thorough_but(["llama", "gpt2"], lambda _: False, ["llama"])
)
def test_what_is_computed_again_is_what_xla_compiles_again(family):
    """Of one layer: the body of a loop XLA counts once.

    Of a loop of one turn it would make none, and merge what is computed again with what it is computed from. Sequences
    are so short that hardly anything but products is there.
    """

    def made(**parallel):
        sizes = {
            "layers": 2,
            "d_model": 256,
            "heads": 8,
            "head_dim": 32,
            "d_ff": 512,
            "vocab_size": 64,
        }
        config = load(
            {
                "model": {"family": family} | sizes,
                "parallel": parallel,
                "train": {"global_batch_size": 32, "sequence_length": 8},
            }
        )
        return config, Program(
            config, make_mesh(config)
        ).lower().compile().cost_analysis()["flops"]

    cluster = dataclasses.replace(named("cpu", 1), accelerator=without_limits("cpu"))
    none = made()[1]
    for kept in [(), *((name,) for name in NAMES), NAMES]:
        config, flops = made(remat="names", remat_keep=kept)
        planned = layer_cost(
            config, cluster
        ).recompute.matmul * cluster.accelerator.flops("float32")
        # besides the products some thousandths of the step's: norms and the like
        assert planned == pytest.approx(flops - none, rel=0.05, abs=0.003 * none), kept


def test_short_sides_make_matrix_products_slow():
    device = ACCELERATORS["h100"]
    rates = [
        2 * m * 4096 * 4096 / compute.product(device, "bfloat16", m, 4096, 4096)
        for m in (8, 128, 1024, 16384)
    ]
    assert rates == sorted(rates) and rates[0] < 0.2 * rates[-1]


def test_every_recomputation_costs_and_less_recomputation_costs_less(llama_8b):
    cluster = named("h100", 16)
    none, dots, full = (
        plan(llama_8b(remat=remat), cluster).seconds
        for remat in ("none", "dots", "full")
    )
    assert none < dots < full < 1.5 * none


def test_what_is_kept_is_not_computed_again_and_what_is_offloaded_waits_for_the_host(
    llama_8b,
):
    cluster, mesh = named("h100", 16), {"data": 8, "tensor": 2}
    fast = dataclasses.replace(cluster, host_bandwidth=10 * cluster.host_bandwidth)
    nothing, kept, all_kept = (
        plan(llama_8b(mesh, microbatches=8, remat="names", remat_keep=k), cluster)
        for k in ((), ("qkv",), NAMES)
    )
    away, nearer = (
        plan(llama_8b(mesh, microbatches=8, remat="names", remat_offload=("qkv",)), on)
        for on in (cluster, fast)
    )
    assert (
        nothing.seconds > kept.seconds > all_kept.seconds
        and nothing.bytes < kept.bytes < all_kept.bytes
    )
    assert away.bytes == nothing.bytes and away.time.recompute == kept.time.recompute
    assert (
        away.time.host == pytest.approx(10 * nearer.time.host) and kept.time.host == 0
    )


def test_packing_and_dropout_keep_a_kernel_that_writes_no_scores(llama_8b):
    config, cluster = (
        llama_8b(schedule="interleaved", virtual_stages=8),
        named("h100", 16),
    )
    plain, packed = (
        plan(config, cluster),
        plan(replaced(config, data={"batching": "packed"}), cluster),
    )
    assert packed.time.memory == plain.time.memory
    assert packed.bytes == pytest.approx(plain.bytes, rel=1e-3)
    # a byte for each element of the residual stream that may go, twice a layer, and no more
    dropped = plan(replaced(config, model={"dropout": 0.1}), cluster)
    assert plain.bytes < dropped.bytes < 1.1 * plain.bytes


def test_a_policy_trained_on_pairs_keeps_no_mask_since_it_drops_nothing(llama_8b):
    config = replaced(llama_8b(), train={"objective": "dpo"}, lora={"rank": 8})
    cluster = named("h100", 16)
    dropping = replaced(config, model={"dropout": 0.1})
    assert activations.kept(dropping, "none") == activations.kept(config, "none") > 0
    assert plan(dropping, cluster).bytes == plan(config, cluster).bytes


def test_tensor_parallelism_across_nodes_waits_for_the_links_between_them(llama_8b):
    cluster = named("h100", 32)
    rail = dataclasses.replace(
        cluster.links.rail, bandwidth=cluster.links.rail.bandwidth / 20
    )
    slow = dataclasses.replace(
        cluster, links=dataclasses.replace(cluster.links, rail=rail)
    )

    def waits(tensor, on):
        config = llama_8b(
            {"data": 32 // tensor, "tensor": tensor},
            microbatches=2,
            sequence_parallel=True,
        )
        return plan(config, on).time.tensor

    assert waits(16, slow) > 10 * waits(16, cluster)
    assert waits(8, slow) == waits(8, cluster)  # stays inside a node


def test_holding_weights_saves_traffic_over_data(llama_8b):
    cluster = named("h100", 16)
    mesh = {"data": 16}
    held, not_held = (
        plan(llama_8b(mesh, microbatches=4, zero_stage=3, zero_hold=hold), cluster)
        for hold in (True, False)
    )
    assert held.time.data < not_held.time.data / 2 and held.bytes > not_held.bytes


def test_checkpoints_cost_their_copy_and_what_the_store_cannot_take_in_time(llama_8b):
    config = llama_8b()
    cluster = named("h100", 16)
    never, seldom, often = (
        plan(replaced(config, checkpoint={"every": n}), cluster) for n in (0, 100, 1)
    )
    assert never.time.checkpoint == 0 < seldom.time.checkpoint < often.time.checkpoint
    copy = sum(i.nbytes for i in seldom.memory if i.between_steps) / (
        cluster.host_bandwidth * 1e9
    )
    assert seldom.time.checkpoint * 100 == pytest.approx(
        cluster.save_seconds + 2 * cluster.save_seconds_per_host + copy
    )


@pytest.mark.parametrize("mesh", [{"data": 16}, {"data": 4, "pipeline": 4}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluations_cost_forwards_and_do_not_count_as_training(llama_8b, mesh, stage):
    keys = {"microbatches": 4, "zero_stage": stage, "remat": "none"}
    config = replaced(llama_8b(mesh, **keys), eval={"batches": 8})
    cluster = named("h100", 16)
    never, seldom, often = (
        plan(replaced(config, eval={"every": n}), cluster) for n in (0, 100, 2)
    )
    forward = often.time.evaluation * 2 / 8
    assert never.time.evaluation == 0
    assert seldom.time.evaluation == pytest.approx(8 * forward / 100)
    # a backward of all weights takes two forwards
    assert forward == pytest.approx(never.seconds / 3, rel=0.25)
    trained = faults(often).goodput / faults(never).goodput
    assert trained == pytest.approx(never.seconds / often.seconds, rel=0.01)


@pytest.mark.parametrize(
    ("practice", "split", "sums"),
    [
        ({"input_sums": 3}, False, 5 / 4),
        ({"recomputes": (1.0, 1.0, 1.0)}, False, 6 / 4),
        ({"regathers": False}, True, 8 / 10),
    ],
)
def test_a_frameworks_own_sums_over_tensor_are_counted(llama_8b, practice, split, sums):
    """Without sequence parallelism two sums forward and two backward, of equal size; with it ten gathers and
    scatters.
    """
    config, cluster = (
        llama_8b({"tensor": 8}, microbatches=64, remat="none", sequence_parallel=split),
        named("h100", 8),
    )
    plain = FrameworkProfile()
    usual, own = (
        layer_cost(config, cluster, p)
        for p in (plain, dataclasses.replace(plain, **practice))
    )
    ratio = (own.forward_sends + own.backward_sends) / (
        usual.forward_sends + usual.backward_sends
    )
    assert ratio == pytest.approx(sums)


def test_logits_that_are_gathered_whole_are_sent_and_passed_over_whole(llama_8b):
    config, cluster = llama_8b({"tensor": 8}, microbatches=64), named("h100", 8)
    shared, whole = (
        seconds.edge_cost(config, cluster, FrameworkProfile(whole_logits=w))
        for w in (False, True)
    )
    gathered = best(ALL_GATHER, cluster.group(8, 1), 2 * 8192 * 128256).seconds
    assert whole.head_sends - shared.head_sends == pytest.approx(gathered)
    passed = 3 * 4 * 8192 * 128256 * 7 / 8 / cluster.accelerator.memory_rate
    assert whole.head.memory - shared.head.memory == pytest.approx(passed)


def test_collectives_in_pieces_hide_as_far_as_measured_whatever_those_over_data_do(
    llama_8b,
):
    config, cluster = (
        llama_8b({"data": 2, "tensor": 8}, microbatches=32),
        named("h100", 16),
    )
    waited, pieces = (
        plan(config, cluster, FrameworkProfile(overlap_tensor=o)).time
        for o in (False, True)
    )
    assert (
        pieces.tensor / waited.tensor == pytest.approx(0.57, abs=0.02)
        and pieces.data == waited.data
    )
    beside = plan(config, cluster, FrameworkProfile(overlap_data=True)).time
    assert (
        beside.data
        == pytest.approx(cluster.accelerator.efficiency.exposed * waited.data)
        and beside.tensor == waited.tensor
    )


def test_more_hosts_wait_longer_for_the_slowest_and_one_for_none(llama_8b):
    config = llama_8b({"tensor": 8}, microbatches=64)
    assert plan(config, "h100").time.stragglers == 0
    times = [
        plan(
            replaced(config, mesh={"data": n}, train={"global_batch_size": 64 * n}),
            "h100",
        ).time
        for n in (2, 8, 64, 256)
    ]
    shares = [time.stragglers / time.work for time in times]
    assert shares == pytest.approx(
        [0.007 * (2 * math.log(n)) ** 0.5 for n in (2, 8, 64, 256)]
    )
    assert all(
        time.work == pytest.approx(times[0].work, rel=0.01) for time in times
    )  # whatever is waited for


def test_what_bounds_a_step_is_named(llama_8b):
    cluster = named("h100", 16)
    assert plan(llama_8b(), cluster).time.bound == "compute"
    slow = llama_8b({"pipeline": 16}, {"global_batch_size": 1}, microbatches=1)
    assert plan(slow, cluster).time.bound == "bubble"


@pytest.mark.thorough
def test_dpos_reference_costs_what_xla_compiles_for_it():
    """One layer: the body of a loop XLA counts once."""

    def made(objective, form):
        sizes = {
            "layers": 1,
            "d_model": 256,
            "heads": 8,
            "head_dim": 32,
            "d_ff": 512,
            "vocab_size": 512,
        }
        config = load(
            {
                "model": sizes,
                "data": {"format": form},
                "lora": {"rank": 4},
                "train": {
                    "global_batch_size": 32,
                    "sequence_length": 8,
                    "objective": objective,
                },
            }
        )
        return config, Program(
            config, make_mesh(config)
        ).lower().compile().cost_analysis()["flops"]

    (tuned, flops), (preferring, more) = (
        made("next_token", "text"),
        made("dpo", "pairs"),
    )
    planned = shapes.model_flops(preferring) - shapes.model_flops(tuned)
    assert planned == pytest.approx(more - flops, rel=0.05)
    ideal = dataclasses.replace(named("cpu", 1), accelerator=without_limits("cpu"))
    forward = plan(preferring, ideal).time.reference * ideal.accelerator.flops(
        "float32"
    )
    assert (
        forward == pytest.approx(planned, rel=0.05)
        and not plan(tuned, ideal).time.reference
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_pipeline_of_dpo_goes_forward_once_more_and_a_search_counts_it(
    schedule, llama_8b
):
    tuned = replaced(
        llama_8b(
            {"data": 1, "pipeline": 4},
            {"global_batch_size": 8},
            schedule=schedule,
            microbatches=8,
        ),
        lora={"rank": 8},
        # both by the kernel of packed rows
        data={"batching": "packed"},
    )
    pairs = {"format": "pairs", "batching": "window"}
    preferring = replaced(tuned, train={"objective": "dpo"}, data=pairs)
    cluster = named("h100", 4)
    before, found = (plan(config, cluster) for config in (tuned, preferring))
    assert 0.25 < found.time.reference / before.seconds < 0.5
    assert found.seconds == pytest.approx(
        before.seconds + found.time.reference, rel=0.01
    )
    assert 0 < found.bytes - before.bytes < 0.01 * before.bytes
    fast = [
        pipeline.quick(plan.config, pipeline.facts(plan.config), plan.costs)
        for plan in (before, found)
    ]
    assert fast[1] - fast[0] == pytest.approx(found.time.reference, rel=1e-6)


def test_gradients_travel_under_the_backward_but_for_the_first_bucket_and_the_vocabulary(
    llama_8b,
):
    cluster = named("h100", 64)
    config = llama_8b({"data": 8, "tensor": 8}, microbatches=2)
    found, whole = plan(config, cluster), seconds.data_seconds(config, cluster)
    hidden = seconds.hidden_seconds(config, cluster, found.costs)
    assert found.time.data == pytest.approx(whole - hidden)
    block, outer = shapes.trained(config).block.full, shapes.trained(config).outer.full
    reduced = whole * 2 / 3  # float32, where what is gathered is bfloat16
    assert hidden == pytest.approx(
        reduced * 28 * block / (32 * block + outer), rel=0.02
    )
    # a backward that takes no time hides nothing, and one that has to be sent whole neither
    idle = dataclasses.replace(
        found.costs,
        layer=dataclasses.replace(
            found.costs.layer, backward=compute.Seconds(), backward_sends=0.0
        ),
    )
    kept = replaced(config, parallel={"reduce": {"compression": "powersgd"}})
    assert (
        seconds.hidden_seconds(config, cluster, idle)
        == 0
        == seconds.hidden_seconds(kept, cluster, found.costs)
    )


def test_what_travels_at_the_layers_hides_under_them_but_for_what_their_first_products_read(
    llama_8b,
):
    cluster = named("h100", 64)
    config = llama_8b(
        {"data": 64}, {"global_batch_size": 128}, microbatches=2, zero_stage=3
    )
    found, sent = plan(config, cluster), shapes.resident(config)
    layers, outer = 2 * 32, 2 * sent.outer.full
    # bytes: bfloat16 gathered, twice at a layer and once outside; float32 scattered
    whole = layers * sent.block.full * (2 * 2 + 4) + outer * (2 + 4)
    waited = layers * (sent.first.full + sent.block.largest) * 2 + outer * (2 + 4)
    assert (
        sent.first.full == 4096 * (4096 + 2 * 1024)
        and sent.block.largest == 4096 * 14336
    )
    share = found.time.data / seconds.data_seconds(config, cluster)
    # Smaller messages take longer a byte
    assert waited / whole < share < 1.15 * waited / whole
    idle = dataclasses.replace(
        found.costs.layer, forward=compute.Seconds(), backward=compute.Seconds()
    )
    assert (
        seconds.hidden_seconds(
            config, cluster, dataclasses.replace(found.costs, layer=idle)
        )
        == 0
    )


def in_context(llama_8b, length, strategy, ranks=8, **parallel):
    config = llama_8b(
        {"context": ranks},
        {"global_batch_size": 1, "sequence_length": length},
        microbatches=1,
        context_strategy=strategy,
        **parallel,
    )
    return plan(config, named("h100", ranks))


def test_a_rings_messages_hide_behind_attention_on_long_rows_and_gathers_are_waited_for(
    llama_8b,
):
    by = {s: in_context(llama_8b, 2**17, s) for s in ("ring", "all_gather", "ulysses")}
    # the last message of a backward alone
    assert by["ring"].time.context < 0.01 * by["ring"].seconds
    for strategy in ("all_gather", "ulysses"):
        taken = sum(
            t.seconds(by[strategy].cluster, by[strategy].config.mesh)
            for t in by[strategy].transfers
            if "swapped" in t.what or "keys" in t.what
        )
        assert by[strategy].time.context == pytest.approx(taken)
    short = in_context(llama_8b, 2**11, "ring").time
    assert short.context > 0.5 * short.attention


def test_attention_is_shared_evenly_by_the_ranks_of_context(llama_8b):
    two, eight = (in_context(llama_8b, 2**17, "ring", ranks).time for ranks in (2, 8))
    assert eight.attention == pytest.approx(two.attention / 4, rel=0.05)
    assert eight.matmul == pytest.approx(two.matmul / 4, rel=0.05)


@pytest.mark.parametrize(
    ("length", "ranks", "tensor"),
    [(2**17, 8, 1), (2**11, 8, 1), (2**17, 8, 8), (2**11, 8, 8)],
)
def test_auto_takes_the_strategy_of_context_that_the_plan_finds_cheapest(
    llama_8b, length, ranks, tensor
):
    def step(strategy):
        train = {"global_batch_size": 1, "sequence_length": length}
        mesh, parallel = (
            {"context": ranks, "tensor": tensor},
            {"microbatches": 1, "context_strategy": strategy},
        )
        return plan(llama_8b(mesh, train, **parallel), named("h100", ranks * tensor))

    auto, by = (
        step("auto"),
        {s: step(s) for s in ("ring", "all_gather", *["ulysses"] * (tensor == 1))},
    )
    assert auto.config.parallel.context_strategy == min(by, key=lambda s: by[s].seconds)
    assert (
        auto.seconds
        == min(p.seconds for p in by.values())
        < max(p.seconds for p in by.values())
    )


def test_in_a_pipeline_all_hides_but_one_chunks_weights_and_gradient_and_the_embedding(
    llama_8b,
):
    cluster = named("h100", 64)
    config = llama_8b(
        {"data": 8, "tensor": 2, "pipeline": 4},
        {"global_batch_size": 64},
        schedule="interleaved",
        virtual_stages=4,
        microbatches=8,
    )
    found, whole = plan(config, cluster), seconds.data_seconds(config, cluster)
    gather, reduce, head = seconds.chunk_seconds(config, cluster)
    assert found.time.data == pytest.approx(whole - 3 * (gather + reduce) - head)
    # a search, which has no table, says the same
    assert seconds.hidden_seconds(config, cluster, found.costs) == pytest.approx(
        whole - found.time.data
    )
    assert {sent.chunk for sent in found.timeline.transfers} == {1, 2, 3}
    alone = replaced(config, parallel={"virtual_stages": 1, "schedule": "1f1b"})
    assert plan(alone, cluster).time.data == pytest.approx(
        seconds.data_seconds(alone, cluster), rel=1e-6
    )


def test_of_405b_on_16384_devices_a_hundredth_of_a_step_is_waited_for_data():
    config = layout_config("405b", [])
    found = plan(config, named("h100", config.mesh.devices))
    assert found.time.data < 0.01 * found.seconds
    before = found.time.data + sum(
        sent.end - sent.start for sent in found.timeline.transfers if sent.stage == 0
    )
    assert before > 0.06 * found.seconds
