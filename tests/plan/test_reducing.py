"""The planner's bytes of compressed gradients are those of the compiled step, and its seconds follow them."""

import pytest
from counted import before_or_after_the_ticks

from meshtrain.config import load
from meshtrain.config.follow import put
from meshtrain.plan import named, plan, reducing, ticks, traffic
from meshtrain.plan.compiled import compile_step
from meshtrain.plan.seconds import data_seconds


def small(mesh, compression, over="data", family="llama", reduce=None, **parallel):
    data, tensor, stages, islands = mesh
    reduce = {"compression": compression, "over": over, "feedback": False} | (reduce or {})
    return load(
        {
            "model": {"family": family, "layers": 2, "d_model": 64, "heads": 4, "kv_heads": 2, "d_ff": 96, "vocab_size": 130},
            "mesh": {"data": data, "tensor": tensor, "pipeline": stages, "islands": islands},
            "parallel": {"reduce": reduce, **parallel},
            "train": {"global_batch_size": 16, "sequence_length": 32},
        }
    )  # fmt: skip


FEW = 200  # bytes: the gradient's norm and the loss, a number a weight at most


QUICK = {"int8, islands x tensor": small((4, 2, 1, 2), "int8", zero_stage=1, microbatches=2)}
MORE = {
    "int8, ZeRO-1": small((8, 1, 1, 1), "int8", zero_stage=1),
    "int4, odd blocks": small((8, 1, 1, 1), "int4", zero_stage=1, reduce={"block": 48}),
    "float8 at use, ZeRO-3": small((4, 1, 1, 1), "float8", zero_stage=3, microbatches=2),
    "bfloat16 at use, ZeRO-2": small((4, 1, 1, 1), "bfloat16", zero_stage=2, microbatches=2, zero_hold=False),
    "int8 held, ZeRO-3": small((4, 1, 1, 1), "int8", zero_stage=3, microbatches=2, zero_hold=True),
    "powersgd": small((4, 1, 1, 1), "powersgd", zero_stage=1, reduce={"rank": 3}),
    "powersgd over islands x tensor": small((4, 2, 1, 2), "powersgd", "islands", zero_stage=1),
    "powersgd, islands": small((4, 1, 1, 2), "powersgd", zero_stage=1),
    "topk": small((4, 1, 1, 1), "topk", zero_stage=1),
    "topk over islands": small((8, 1, 1, 4), "topk", "islands", zero_stage=1, reduce={"ratio": 0.05}),
    "int8, islands x tensor x pipeline": small((4, 1, 2, 2), "int8", zero_stage=1, microbatches=4),
    "int8 at use, all axes": small((2, 2, 2, 1), "int8", zero_stage=3, microbatches=4, zero_hold=False),
    "int4 at use, tied head": small((4, 1, 1, 2), "int4", family="gpt2", zero_stage=2, microbatches=2),
    "int8 over islands, four": small((8, 1, 1, 4), "int8", "islands", zero_stage=1),
    "int8 over islands of one": small((4, 1, 1, 4), "int8", "islands", zero_stage=1),
    "int4 over islands, ZeRO-0": small((4, 1, 1, 2), "int4", "islands", zero_stage=0),
    "bfloat16 over islands, ZeRO-3": small((4, 1, 1, 2), "bfloat16", "islands", zero_stage=3, microbatches=2),
}
thorough = [pytest.param(config, id=name, marks=pytest.mark.thorough) for name, config in MORE.items()]
quick = [pytest.param(config, id=name) for name, config in QUICK.items()]


@pytest.mark.parametrize("config", quick + thorough)
def test_gradients_send_what_the_compiled_step_sends_for_them(config):
    planned = reducing.gradient_flows(config, ticks.trips(config, skips=True))
    in_ticks = [c for c in compile_step(config, "cpu").collectives if not before_or_after_the_ticks(c["source"])]
    # Over data only weights are gathered, which XLA may do once for two microbatches.
    found = [c for c in in_ticks if (c["axis"], c["kind"]) != ("data", "all-gather")]
    for axis in {flow.axis for flow in planned}:
        sent = sum(c["sent_bytes"] for c in found if c["axis"] == axis)
        assert sum(flow.sent for flow in planned if flow.axis == axis) == pytest.approx(sent, rel=0.01, abs=FEW), axis
    # Byte for byte, and one for one.
    exchanges = [flow for flow in planned if flow.kind == "all-to-all"]
    in_program = [c for c in found if c["kind"] == "all-to-all" and c["ranks"] > 1]
    assert sum(flow.count for flow in exchanges) == sum(c["trip_count"] for c in in_program)
    assert sum(flow.sent for flow in exchanges) == pytest.approx(sum(c["sent_bytes"] for c in in_program), rel=1e-9)


def test_a_float32_gradient_over_what_is_sent_is_the_ratio():
    """By hand, of one matrix that is alone large: 4 bytes over 1 + 4/256, and norms as they are."""
    config = small((8, 1, 1, 1), "int8", zero_stage=1)
    sent, ratio = reducing.bytes_and_ratio(config, ticks.trips(config))
    plain = put(config, parallel={"reduce": {"compression": "none"}})
    whole = traffic.by_axis(plan(plain, named("cpu", 8)).flows)["data"] / 2
    assert sent * ratio == pytest.approx(whole, rel=1e-6), "half of the traffic of ZeRO-1: the other half are weights"
    assert 3.8 < ratio < 4 / (1 + 4 / 256)


def test_seconds_fall_with_the_bytes_on_slow_links_and_count_the_passes_over_memory():
    model = {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab_size": 128256}
    given = {"model": model, "mesh": {"data": 64, "islands": 8}, "train": {"global_batch_size": 64, "sequence_length": 4096}}  # fmt: skip
    config = load(given | {"precision": {"compute": "bfloat16", "reduce": "float32"}, "parallel": {"zero_stage": 1}})
    cluster, seconds, sent = named("h100", 64), {}, {}
    for name in ("none", "bfloat16", "int8", "int4"):
        chosen = put(config, parallel={"reduce": {"compression": name, "feedback": False}})
        seconds[name] = data_seconds(chosen, cluster)
        sent[name] = reducing.bytes_and_ratio(chosen, ticks.trips(chosen))[0]
    assert seconds["none"] > seconds["bfloat16"] > seconds["int8"] > seconds["int4"]
    tally = reducing._tally(put(config, parallel={"reduce": {"compression": "int8"}}), ticks.trips(config))
    numbers = 8.03e9
    # A gradient is read three times, the bytes go by three times, and a shard of an eighth is written; across islands as much of that.
    expected = numbers * (12 + 3 + 4 / 8) * (1 + 1 / 8)
    assert tally.moved == pytest.approx(expected, rel=0.1)
