"""The planner's bytes of gradients, compressed and not, and of islands that step by themselves are those of the
compiled programs.
"""

import jax
import pytest
from covering import thorough_but
from island_runs import program, settings

from meshtrain.config import load
from meshtrain.config.follow import put
from meshtrain.hlo import collectives
from meshtrain.mesh import part_bytes
from meshtrain.plan import gradient_traffic, memory, named, pipeline, plan, traffic
from meshtrain.plan.compiled import compile_step
from meshtrain.plan.pipeline import iterations
from meshtrain.plan.seconds import data_seconds


def small(mesh, compression, over="data", family="llama", reduce=None, **parallel):
    data, tensor, stages, islands = mesh
    reduce = {"compression": compression, "over": over, "feedback": False} | (
        reduce or {}
    )
    return load(
        {
            "model": {
                "family": family,
                "layers": 2,
                "d_model": 64,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 96,
                "vocab_size": 130,
            },
            "mesh": {
                "data": data,
                "tensor": tensor,
                "pipeline": stages,
                "islands": islands,
            },
            "parallel": {"reduce": reduce, **parallel},
            "train": {"global_batch_size": 16, "sequence_length": 32},
        }
    )


FEW = 200  # bytes: the gradient's norm and the loss, a number a weight at most


QUICK = {
    "int8, islands x tensor": small((4, 2, 1, 2), "int8", zero_stage=1, microbatches=2)
}
MORE = {
    "int8, ZeRO-1": small((8, 1, 1, 1), "int8", zero_stage=1),
    "int4, odd blocks": small((8, 1, 1, 1), "int4", zero_stage=1, reduce={"block": 48}),
    "float8 at use, ZeRO-3": small(
        (4, 1, 1, 1), "float8", zero_stage=3, microbatches=2
    ),
    "bfloat16 at use, ZeRO-2": small(
        (4, 1, 1, 1), "bfloat16", zero_stage=2, microbatches=2, zero_hold=False
    ),
    "int8 held, ZeRO-3": small(
        (4, 1, 1, 1), "int8", zero_stage=3, microbatches=2, zero_hold=True
    ),
    "powersgd": small((4, 1, 1, 1), "powersgd", zero_stage=1, reduce={"rank": 3}),
    "powersgd over islands x tensor": small(
        (4, 2, 1, 2), "powersgd", "islands", zero_stage=1
    ),
    "powersgd, islands": small((4, 1, 1, 2), "powersgd", zero_stage=1),
    "topk": small((4, 1, 1, 1), "topk", zero_stage=1),
    "topk over islands": small(
        (8, 1, 1, 4), "topk", "islands", zero_stage=1, reduce={"ratio": 0.05}
    ),
    "int8, islands x tensor x pipeline": small(
        (4, 1, 2, 2), "int8", zero_stage=1, microbatches=4
    ),
    "int8 at use, all axes": small(
        (2, 2, 2, 1), "int8", zero_stage=3, microbatches=4, zero_hold=False
    ),
    "int4 at use, tied head": small(
        (4, 1, 1, 2), "int4", family="gpt2", zero_stage=2, microbatches=2
    ),
    "int8 over islands, four": small((8, 1, 1, 4), "int8", "islands", zero_stage=1),
    "int8 over islands of one": small((4, 1, 1, 4), "int8", "islands", zero_stage=1),
    "int4 over islands, ZeRO-0": small((4, 1, 1, 2), "int4", "islands", zero_stage=0),
    "bfloat16 over islands, ZeRO-3": small(
        (4, 1, 1, 2), "bfloat16", "islands", zero_stage=3, microbatches=2
    ),
}
OFTEN = (
    "float8 at use, ZeRO-3",
    "powersgd over islands x tensor",
    "topk over islands",
    "int8 at use, all axes",
    "int4 over islands, ZeRO-0",
)
thorough = [
    pytest.param(
        config,
        id=name,
        marks=pytest.mark.thorough if name in OFTEN else pytest.mark.slow,
    )
    for name, config in MORE.items()
]
quick = [pytest.param(config, id=name) for name, config in QUICK.items()]


@pytest.mark.thorough
@pytest.mark.parametrize("config", quick + thorough)
def test_gradients_send_what_the_compiled_step_sends_for_them(config):
    planned = gradient_traffic.gradient_transfers(
        config, pipeline.iterations(config, skips=True)
    )
    collectives = compile_step(config, "cpu").collectives
    # Over data only weights are gathered, which XLA may do once for two microbatches.
    found = [c for c in collectives if (c["axis"], c["kind"]) != ("data", "all-gather")]
    for axis in {transfer.axis for transfer in planned}:
        sent = sum(c["sent_bytes"] for c in found if c["axis"] == axis)
        assert sum(
            transfer.sent for transfer in planned if transfer.axis == axis
        ) == pytest.approx(sent, rel=0.01, abs=FEW), axis
    # Byte for byte, and one for one.
    exchanges = [transfer for transfer in planned if transfer.kind == "all-to-all"]
    in_program = [c for c in found if c["kind"] == "all-to-all" and c["ranks"] > 1]
    assert sum(transfer.count for transfer in exchanges) == sum(
        c["trip_count"] for c in in_program
    )
    assert sum(transfer.sent for transfer in exchanges) == pytest.approx(
        sum(c["sent_bytes"] for c in in_program), rel=1e-9
    )


def test_a_float32_gradient_over_what_is_sent_is_the_ratio():
    """By hand, of one matrix that is alone large: 4 bytes over 1 + 4/256, and norms as they are."""
    config = small((8, 1, 1, 1), "int8", zero_stage=1)
    sent, ratio = gradient_traffic.bytes_and_ratio(config, pipeline.iterations(config))
    plain = put(config, parallel={"reduce": {"compression": "none"}})
    whole = traffic.by_axis(plan(plain, named("cpu", 8)).transfers)["data"] / 2
    assert sent * ratio == pytest.approx(whole, rel=1e-6), (
        "half of ZeRO-1's traffic are weights"
    )
    assert 3.8 < ratio < 4 / (1 + 4 / 256)


def test_seconds_fall_with_the_bytes_on_slow_links_and_count_the_passes_over_memory():
    model = {
        "layers": 32,
        "d_model": 4096,
        "heads": 32,
        "kv_heads": 8,
        "d_ff": 14336,
        "vocab_size": 128256,
    }
    given = {
        "model": model,
        "mesh": {"data": 64, "islands": 8},
        "train": {"global_batch_size": 64, "sequence_length": 4096},
    }
    config = load(
        given
        | {
            "precision": {"compute": "bfloat16", "reduce": "float32"},
            "parallel": {"zero_stage": 1},
        }
    )
    cluster, seconds, sent = named("h100", 64), {}, {}
    for name in ("none", "bfloat16", "int8", "int4"):
        chosen = put(
            config, parallel={"reduce": {"compression": name, "feedback": False}}
        )
        seconds[name] = data_seconds(chosen, cluster)
        sent[name] = gradient_traffic.bytes_and_ratio(
            chosen, pipeline.iterations(chosen)
        )[0]
    assert seconds["none"] > seconds["bfloat16"] > seconds["int8"] > seconds["int4"]
    tally = gradient_traffic._tally(
        put(config, parallel={"reduce": {"compression": "int8"}}),
        pipeline.iterations(config),
    )
    numbers = 8.03e9
    # A gradient is read three times, the bytes go by three times, and a shard of an eighth is written; across islands
    # as much of that.
    expected = numbers * (12 + 3 + 4 / 8) * (1 + 1 / 8)
    assert tally.moved == pytest.approx(expected, rel=0.1)


FLAT = {"data": 4, "islands": 2}


@pytest.mark.parametrize(
    "sync",
    [{"every": 5}, {"every": 5, "outer_momentum": 0.0}, {"every": 5, "delay": 2}],
)
def test_the_copies_that_islands_keep_are_those_of_the_state(sync):
    built = program(FLAT, sync=sync)
    # but for a number of each island, of how much it learned from
    held = sum(
        map(
            part_bytes,
            jax.tree.leaves(built.state_shapes.islands._replace(counted=None)),
        )
    )
    said = [
        item
        for item in memory.between_steps(built.config)
        if item.name in gradient_traffic.sync_copies(built.config)
    ]
    assert sum(item.nbytes for item in said) == held
    assert len(said) == 1 + (sync.get("outer_momentum") != 0.0) + ("delay" in sync)
    assert memory.total(memory.between_steps(built.config)) == pytest.approx(
        built.state_bytes, rel=0.01
    )


@pytest.mark.parametrize("mesh", [FLAT, {"data": 8, "islands": 4}])
def test_bytes_across_islands_are_those_of_an_exchange_over_the_steps_between(mesh):
    built = program(
        mesh, sync={"every": 5}, parallel={"microbatches": 1, "sync": {"every": 5}}
    )
    compiled = built.steps.synchronize[0].lower(built.state_shapes).compile()
    sent = collectives(compiled, built.mesh).traffic["island"]
    found = traffic.by_axis(
        traffic.transfers(built.config, iterations(built.config, skips=True))
    )
    assert found["island"] == pytest.approx(sent / 5, rel=0.01)
    (transfer,) = gradient_traffic.sync_transfers(built.config)
    assert transfer.times == "1/5" and "islands brought together" in transfer.what


@pytest.mark.parametrize("zero", thorough_but([0, 1, 3], lambda _: False, [3]))
def test_the_rest_of_a_step_is_sent_within_islands_as_the_compiled_step_sends_it(zero):
    built = program(
        FLAT, parallel={"microbatches": 1, "zero_stage": zero, "sync": {"every": 5}}
    )
    sent = collectives(built.lower().compile(), built.mesh).traffic
    found = traffic.by_axis(
        traffic.transfers(built.config, iterations(built.config, skips=True))
    )
    assert "island" not in sent and not any(
        "island" in axis for axis in found if axis != "island"
    )
    # norms of gradients, and losses, are not in the plan
    assert sent["data"] == pytest.approx(found["data"], rel=0.02)


def test_islands_by_themselves_take_less_of_a_step_the_more_seldom_they_meet():
    cluster = named("h100", 4)
    seconds = [
        data_seconds(settings(FLAT, {"every": every} if every else {}), cluster)
        for every in (0, 1, 10, 100)
    ]
    assert seconds[0] > seconds[2] > seconds[3]
    rare = seconds[2] - seconds[3]
    assert seconds[1] - seconds[3] == pytest.approx(
        11 * rare, rel=0.01
    )  # (1 - 1/100) / (1/10 - 1/100)
