import dataclasses

import pytest
from counted import before_or_after_the_clocks

from meshtrain.config import load
from meshtrain.plan import named, pipeline, plan, traffic
from meshtrain.plan.compiled import compile_step

CHUNKS = {"train": {"loss_chunk": 32}}
PREFERENCES = {"train": {"objective": "dpo"}, "data": {"format": "pairs"}, "lora": {"rank": 4}}


def small(mesh, family="llama", sections=None, **parallel):
    data, tensor, stages = mesh
    return load(
        {
            "model": {
                "family": family,
                "layers": 2,
                "d_model": 64,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 96,
                "vocab_size": 128,
            },
            "mesh": {"data": data, "tensor": tensor, "pipeline": stages},
            "parallel": parallel,
            **(sections or {}),
            "train": {"global_batch_size": 16, "sequence_length": 32, **(sections or {}).get("train", {})},
        }
    )


QUICK = {
    "zero 1": small((4, 1, 1), zero_stage=1, microbatches=2),
    "zero 3": small((4, 1, 1), zero_stage=3),
    "sequence parallel, recomputed": small((2, 2, 1), sections=CHUNKS, sequence_parallel=True, remat="full"),
    "1f1b, all axes": small((2, 2, 2), sections=CHUNKS, microbatches=4),
}
MORE = {
    "zero 0": small((4, 1, 1), zero_stage=0, microbatches=2),
    "zero 2 not held": small((4, 1, 1), zero_stage=2, microbatches=2, zero_hold=False),
    "zero 3 held": small((4, 1, 1), zero_stage=3, microbatches=2, zero_hold=True),
    "tensor": small((1, 4, 1), microbatches=2),
    "tensor, recomputed": small((1, 2, 1), remat="full"),
    "sequence parallel": small((2, 2, 1), sequence_parallel=True, microbatches=2),
    "1f1b": small((2, 1, 2), microbatches=4),
    "1f1b, all axes, sequence parallel": small((2, 2, 2), microbatches=4, sequence_parallel=True, remat="full"),
    "norms behind": small((1, 2, 1), "gemma3", microbatches=2),
    "norms behind, recomputed": small((2, 2, 2), "gemma3", microbatches=4, remat="selective"),
    "1f1b, vocabulary on the edge": small((1, 2, 2), microbatches=4, vocab="edge"),
    # without stages: of conditionals in a forward alone nobody knows how often they are taken
    "preferences, sequence parallel": small((1, 4, 1), sections=PREFERENCES, microbatches=2, sequence_parallel=True),
}
CASES = QUICK | MORE
slow = [pytest.param(config, id=name, marks=pytest.mark.slow) for name, config in MORE.items()]
quick = [pytest.param(config, id=name) for name, config in QUICK.items()]


@pytest.mark.parametrize("config", quick + slow)
def test_traffic_is_that_of_the_compiled_step(config):
    mesh = config.mesh
    planned = plan(config, named("cpu", mesh.data * mesh.tensor * mesh.pipeline))
    compiled = compile_step(config, "cpu")
    clocks = [c for c in compiled.collectives if not before_or_after_the_clocks(c["source"])]
    sent = dataclasses.replace(compiled, collectives=clocks).sent()
    for axis, nbytes in traffic.by_axis(planned.transfers).items():
        if nbytes > 4096:
            assert nbytes == pytest.approx(sent[axis], rel=0.01), axis
    assert sum(sent.values()) == pytest.approx(sum(traffic.by_axis(planned.transfers).values()), rel=0.01)


def test_zero_costs_what_the_paper_says():
    """Section 7: 2 Psi for stages 0 to 2, 3 Psi for 3, in elements of one dtype."""
    base = traffic.by_axis(plan(CASES["zero 0"], named("h100", 4)).transfers)["data"]
    for name, factor in (("zero 1", 1.0), ("zero 3 held", 1.0)):
        assert traffic.by_axis(plan(CASES[name], named("h100", 4)).transfers)["data"] == pytest.approx(
            factor * base, rel=0.01
        )
    once = small((4, 1, 1), zero_stage=3, microbatches=1)
    vocabulary = 2 * 128 * 64  # gathered once: its backward needs no second gather
    parameters = plan(once, named("h100", 4)).parameters
    expected = (3 * parameters - vocabulary) / (2 * parameters) * base
    assert traffic.by_axis(plan(once, named("h100", 4)).transfers)["data"] == pytest.approx(expected, rel=0.01)


def test_idle_ticks_send_too_on_accelerators_and_do_not_on_cpus():
    config = CASES["1f1b, all axes"]
    busy = pipeline.iterations(config, skips=True)
    lockstep = pipeline.iterations(config)
    assert (busy.forward, busy.backward, busy.head) == (4, 4, 4)
    assert (lockstep.forward, lockstep.backward, lockstep.head) == (5, 5, 4)
