import pytest

from meshtrain.config import load
from meshtrain.plan import named, pipeline, plan, traffic
from meshtrain.plan.compiled import compile_step

CHUNKS = {"train": {"loss_chunk": 32}}
PREFERENCES = {
    "train": {"objective": "dpo"},
    "data": {"format": "pairs"},
    "lora": {"rank": 4},
}


MLA = {"q_rank": 24, "kv_rank": 32, "nope": 12, "rope": 8, "value": 10}
LATENT = {"model": {"kv_heads": None, "mla": MLA}}
AHEAD = {"model": {"mtp": 2}}


def small(mesh, family="llama", sections=None, **parallel):
    data, tensor, stages = mesh
    return load(
        {
            "mesh": {"data": data, "tensor": tensor, "pipeline": stages},
            "parallel": parallel,
            **(sections or {}),
            "model": {
                "family": family,
                "layers": 2,
                "d_model": 64,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 96,
                "vocab_size": 128,
                **(sections or {}).get("model", {}),
            },
            "train": {
                "global_batch_size": 16,
                "sequence_length": 32,
                **(sections or {}).get("train", {}),
            },
        }
    )


QUICK = {
    "zero 1": small((4, 1, 1), zero_stage=1, microbatches=2),
    "zero 3": small((4, 1, 1), zero_stage=3),
    "sequence parallel, recomputed": small(
        (2, 2, 1), sections=CHUNKS, sequence_parallel=True, remat="full"
    ),
    "1f1b, all axes": small((2, 2, 2), sections=CHUNKS, microbatches=4),
}
MORE = {
    "interleaved, all axes": small(
        (1, 2, 2),
        sections={"model": {"layers": 4}},
        microbatches=8,
        schedule="interleaved",
        virtual_stages=2,
    ),
    "zero 0": small((4, 1, 1), zero_stage=0, microbatches=2),
    "zero 2 not held": small((4, 1, 1), zero_stage=2, microbatches=2, zero_hold=False),
    "zero 3 held": small((4, 1, 1), zero_stage=3, microbatches=2, zero_hold=True),
    "tensor": small((1, 4, 1), microbatches=2),
    "tensor, recomputed": small((1, 2, 1), remat="full"),
    "sequence parallel": small((2, 2, 1), sequence_parallel=True, microbatches=2),
    "1f1b": small((2, 1, 2), microbatches=4),
    "1f1b, all axes, sequence parallel": small(
        (2, 2, 2), microbatches=4, sequence_parallel=True, remat="full"
    ),
    "norms behind": small((1, 2, 1), "gemma3", microbatches=2),
    "norms behind, recomputed": small(
        (2, 2, 2), "gemma3", microbatches=4, remat="selective"
    ),
    "1f1b, vocabulary on the edge": small((1, 2, 2), microbatches=4, vocab="edge"),
    "latent attention": small((2, 2, 2), sections=LATENT, microbatches=4),
    "latent attention, ZeRO-3": small(
        (2, 2, 1), sections=LATENT, sequence_parallel=True, zero_stage=3, remat="full"
    ),
    # without stages: of conditionals in a forward alone nobody knows how often they are taken
    "preferences, sequence parallel": small(
        (1, 4, 1), sections=PREFERENCES, microbatches=2, sequence_parallel=True
    ),
}
CASES = QUICK | MORE
slow = [
    pytest.param(config, id=name, marks=pytest.mark.slow)
    for name, config in MORE.items()
]
quick = [pytest.param(config, id=name) for name, config in QUICK.items()]


@pytest.mark.thorough
@pytest.mark.parametrize("config", quick + slow)
def test_traffic_is_that_of_the_compiled_step(config):
    mesh = config.mesh
    planned = plan(config, named("cpu", mesh.data * mesh.tensor * mesh.pipeline))
    compiled = compile_step(config, "cpu")
    sent = compiled.sent()
    for axis, nbytes in traffic.by_axis(planned.transfers).items():
        if nbytes > 4096:
            assert nbytes == pytest.approx(sent[axis], rel=0.01), axis
    assert sum(sent.values()) == pytest.approx(
        sum(traffic.by_axis(planned.transfers).values()), rel=0.01
    )


PREDICTED = {
    "one device's loss": small((2, 2, 1), sections=AHEAD, microbatches=2),
    "in stages": small((2, 2, 2), sections=AHEAD, microbatches=8),
    "ZeRO-3": small(
        (2, 2, 1), sections=AHEAD, sequence_parallel=True, zero_stage=3, remat="full"
    ),
    "stages, ZeRO-3, edge": small(
        (2, 1, 2),
        sections=AHEAD,
        microbatches=4,
        zero_stage=3,
        zero_hold=False,
        vocab="edge",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", PREDICTED)
def test_further_predictions_send_what_the_compiled_step_does(case):
    config = PREDICTED[case]
    planned = traffic.by_axis(plan(config, named("cpu", config.mesh.devices)).transfers)
    # norms of gradients, which the others leave out, are few bytes, and may travel with gradients
    sent = compile_step(config, "cpu").sent()
    for axis, nbytes in planned.items():
        if nbytes > 4096:
            assert nbytes == pytest.approx(sent[axis], rel=0.01), axis


def in_context(data, context, tensor, strategy, model=None, sections=None, **parallel):
    """Rows of 84 tokens, of six query heads on two of keys and values unless the `model` says otherwise."""
    heads = {
        "layers": 2,
        "d_model": 48,
        "heads": 6,
        "kv_heads": 2,
        "d_ff": 72,
        "vocab_size": 96,
    } | (model or {})
    return load(
        {
            "model": heads,
            "mesh": {"data": data, "context": context, "tensor": tensor},
            "parallel": {"context_strategy": strategy} | parallel,
            "train": {
                "global_batch_size": 2 * data,
                "sequence_length": 80 if context == 4 else 84,
            },
            **(sections or {}),
        }
    )


EIGHT = {"d_model": 64, "heads": 8}
OF_LATENTS = {"kv_heads": None, "mla": MLA}
PACKED = {"data": {"batching": "packed"}}
LINEAR = {
    "pattern": ["linear"],
    "linear": {
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 8,
        "value_dim": 12,
        "chunk": 8,
    },
}
HYBRID = LINEAR | {"pattern": ["linear", "linear", "full"], "layers": 6}
ON_CONTEXT = {
    "latents": in_context(2, 4, 1, "all_gather", OF_LATENTS),
    "latents, recomputed": in_context(1, 2, 2, "all_gather", OF_LATENTS, remat="full"),
    "latents, packed": in_context(
        1,
        4,
        1,
        "all_gather",
        OF_LATENTS,
        sections=PACKED,
        zero_stage=3,
        remat="selective",
    ),
    "latents in a ring": in_context(1, 4, 1, "ring", OF_LATENTS),
    "latents by heads": in_context(1, 2, 1, "ulysses", OF_LATENTS, remat="full"),
    "ring": in_context(1, 4, 1, "ring"),
    "ring, recomputed": in_context(2, 4, 1, "ring", remat="full", microbatches=2),
    "ring, ZeRO-3 and tensor": in_context(
        1, 2, 2, "ring", zero_stage=3, sequence_parallel=True
    ),
    "ring, packed": in_context(1, 4, 1, "ring", sections=PACKED, remat="selective"),
    "gathered": in_context(2, 4, 1, "all_gather"),
    "gathered, recomputed": in_context(1, 4, 1, "all_gather", remat="full"),
    "gathered, packed": in_context(
        2, 2, 2, "all_gather", sections=PACKED, remat="dots", sequence_parallel=True
    ),
    "linear": in_context(2, 4, 1, "all_gather", LINEAR),
    "linear, recomputed": in_context(1, 4, 1, "ring", LINEAR, remat="full"),
    "linear, packed": in_context(
        1, 4, 1, "ulysses", EIGHT | LINEAR, sections=PACKED, remat="selective"
    ),
    "hybrid": in_context(1, 4, 1, "all_gather", HYBRID, zero_stage=3),
    "heads": in_context(2, 3, 1, "ulysses", {"kv_heads": 3}),
    "heads, fewer keys": in_context(1, 4, 1, "ulysses", EIGHT),
    "heads, recomputed": in_context(2, 4, 1, "ulysses", EIGHT, remat="full"),
    "heads, packed": in_context(
        1,
        2,
        2,
        "ulysses",
        EIGHT,
        sections=PACKED,
        remat="selective",
        sequence_parallel=True,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config", [pytest.param(config, id=name) for name, config in ON_CONTEXT.items()]
)
def test_what_goes_over_context_is_that_of_the_compiled_step(config):
    sent = compile_step(config, "cpu").sent()
    for axis, nbytes in traffic.by_axis(
        plan(config, named("cpu", config.mesh.devices)).transfers
    ).items():
        if nbytes > 4096:
            assert nbytes == pytest.approx(sent[axis], rel=0.01), axis


def on_context(strategy, ranks=4, **parallel):
    config = in_context(1, ranks, 1, strategy, **parallel)
    transfers = plan(config, named("h100", config.mesh.devices)).transfers
    return {
        t.what: t.sent
        for t in transfers
        if t.axis == "context" and ("keys" in t.what or "swapped" in t.what)
    }


def test_attention_sends_over_context_what_the_papers_say():
    """A layer of 2 rows of 80 tokens in float32, 2 heads of keys and values of 8 each, over 4 ranks."""
    numbers, layers = 2 * 80 * 2 * 8, 2
    forward = 2 * numbers * 4 * 3 / 4 * layers
    for strategy, what in (("ring", "sent round"), ("all_gather", "gathered")):
        sent = on_context(strategy)
        assert (
            sent[f"keys and values {what}"]
            == sent[f"keys and values {what} again"]
            == forward
        )
    assert on_context("ring")["cotangents of keys and values sent round"] == forward
    assert (
        on_context("all_gather")["cotangents of keys and values scattered"] == forward
    )
    # of the tokens of a rank all of 6 query heads twice, and keys and values, but 1/2 that stays
    swapped = 2 * 42 * (2 * 6 + 2 * 2) * 8 * 4 / 2 * layers
    assert set(on_context("ulysses", ranks=2).values()) == {swapped}


def test_a_ring_that_is_recomputed_sends_its_messages_again_but_for_the_first():
    again = "keys and values sent round again"
    once, twice = (
        on_context("ring", remat=remat)[again] for remat in ("selective", "full")
    )
    assert twice == pytest.approx(5 / 3 * once)


def test_zero_costs_what_the_paper_says():
    """Section 7: 2 Psi for stages 0 to 2, 3 Psi for 3, in elements of one dtype."""
    base = traffic.by_axis(plan(CASES["zero 0"], named("h100", 4)).transfers)["data"]
    for name, factor in (("zero 1", 1.0), ("zero 3 held", 1.0)):
        assert traffic.by_axis(plan(CASES[name], named("h100", 4)).transfers)[
            "data"
        ] == pytest.approx(factor * base, rel=0.01)
    once = small((4, 1, 1), zero_stage=3, microbatches=1)
    vocabulary = 2 * 128 * 64  # gathered once: its backward needs no second gather
    parameters = plan(once, named("h100", 4)).parameters
    expected = (3 * parameters - vocabulary) / (2 * parameters) * base
    assert traffic.by_axis(plan(once, named("h100", 4)).transfers)[
        "data"
    ] == pytest.approx(expected, rel=0.01)


def test_idle_ticks_send_too_on_accelerators_and_do_not_on_cpus():
    config = CASES["1f1b, all axes"]
    busy = pipeline.iterations(config, skips=True)
    lockstep = pipeline.iterations(config)
    assert (busy.forward, busy.backward, busy.head) == (4, 4, 4)
    assert (lockstep.forward, lockstep.backward, lockstep.head) == (5, 5, 4)


def test_what_is_frozen_is_gathered_in_stage_3_alone():
    def sent(stage: int) -> float:
        config = small((4, 1, 1), sections={"lora": {"rank": 4}}, zero_stage=stage)
        return traffic.by_axis(plan(config, named("h100", 4)).transfers)["data"]

    # a layer's 32,000 weights, forward and backward, beside 3,000 of adapters
    assert sent(3) > 3 * sent(1)
