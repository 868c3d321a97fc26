"""What the planner says of products in float8."""

from dataclasses import replace

import pytest

from experiments.plan import dgxc
from experiments.plan.published import FITTED, FLOAT8
from meshtrain.cluster.cluster import named
from meshtrain.config import load, replaced
from meshtrain.parallel.float8 import float8_share, notes
from meshtrain.plan import advice
from meshtrain.plan.compute import DEFAULT_PROFILE
from meshtrain.plan.estimate import estimate
from meshtrain.plan.report import layout
from meshtrain.plan.search import search

LLAMA_8B = {
    "layers": 32,
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14336,
    "vocab_size": 128256,
}
# widths of Qwen3-30B's experts
NARROW = {
    "layers": 48,
    "d_model": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "d_ff": 768,
    "vocab_size": 151936,
}
QWEN3_30B = NARROW | {
    "family": "qwen3_moe",
    "moe": {"experts": 128, "top_k": 8, "d_ff": 768},
}
del QWEN3_30B["d_ff"]
GPT_26 = {
    "family": "gpt2",
    "layers": 26,
    "d_model": 1664,
    "heads": 13,
    "d_ff": 6656,
    "vocab_size": 65536,
}
GPT_12 = GPT_26 | {"layers": 12, "d_model": 768, "heads": 6, "d_ff": 3072}
ALL = {"matmul": "float8", "float8_wgrad": "float8", "float8_skip": [0, 0]}


def planned(model, precision, batch=16, length=4096, mesh=None, **parallel):
    given = {
        "model": model,
        "mesh": mesh or {"data": 8},
        "parallel": {"zero_stage": 1, **parallel},
        "precision": {"compute": "bfloat16", **precision},
        "train": {"global_batch_size": batch, "sequence_length": length},
    }
    return estimate(load(given), named("h100", 8))


def takes(model, precision, **others):
    """The time of a step in that of bfloat16."""
    return (
        planned(model, precision, **others).seconds
        / planned(model, {}, **others).seconds
    )


def test_published_runs_in_bfloat16_and_float8_are_predicted_within_15_percent():
    compiled = next(run for run in FITTED if run.name == "8B compiled")
    for run in (compiled, *FLOAT8):
        assert abs(run.predicted() / run.seconds - 1) < 0.15, run.name
    assert compiled.predicted() / FLOAT8[0].predicted() == pytest.approx(
        8532 / 6667, rel=0.1
    )


def test_the_gain_of_nemo_is_that_of_weights_rounded_once_by_norms_that_write_float8():
    run = next(run for run in dgxc.runs() if run.name.startswith("405B on 1024"))
    bfloat16, measured = dgxc.FLOAT8_PAIR
    tensorwise = replaced(run.config, precision=ALL | {"float8_recipe": "tensorwise"})

    def gain(**profile):
        given = replace(dgxc.NEMO_FLOAT8, **profile)
        return (
            replace(run, config=tensorwise, profile=given).predicted() / run.predicted()
        )

    assert gain() == pytest.approx(measured / bfloat16, rel=0.03)
    assert gain(rounds_weights_once=False) > 1.15 * gain()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_rounding_weights_costs_a_step_the_same_whatever_the_number_of_microbatches(
    recipe,
):
    """By what it takes more where each microbatch rounds them."""
    found = []
    for microbatches in (1, 2, 4):
        precision = ALL | {"float8_recipe": recipe}
        config = planned(
            LLAMA_8B, precision, batch=32, microbatches=microbatches
        ).config
        once, each = (
            estimate(
                config,
                named("h100", 8),
                replace(DEFAULT_PROFILE, rounds_weights_once=once),
            )
            for once in (True, False)
        )
        found.append(each.seconds - once.seconds)
    assert found[2] - found[1] == pytest.approx(2 * (found[1] - found[0]), rel=1e-6)
    assert found[2] > found[1] > found[0] > 0


@pytest.mark.parametrize(
    ("model", "recipe", "measured"),
    [(GPT_26, "tensorwise", 630 / 740), (GPT_26, "rowwise", 630 / 564)],
)
def test_nanochats_gain_and_loss_are_predicted_within_15_percent(
    model, recipe, measured
):
    assert takes(
        model, {**ALL, "float8_recipe": recipe}, batch=256, length=2048
    ) == pytest.approx(measured, rel=0.15)


def test_a_plan_says_whether_float8_pays():
    (wide,) = [
        note for note in advice.notes(planned(LLAMA_8B, ALL)) if "float8" in note
    ]
    (narrow,) = [
        note
        for note in advice.notes(planned(GPT_12, {"matmul": "float8"}))
        if "float8" in note
    ]
    (blocks,) = [
        note
        for note in advice.notes(
            planned(LLAMA_8B, {"matmul": "float8", "float8_recipe": "blockwise"})
        )
        if "float8" in note
    ]
    assert "precision.matmul float8 pays" in wide
    (sparse,) = [
        note
        for note in advice.notes(
            planned(QWEN3_30B, ALL, mesh={"data": 8, "expert": 8}, remat="full")
        )
        if "float8" in note
    ]
    assert "does not pay" in sparse and "experts gain nothing" in sparse
    assert (
        "does not pay" in narrow and "does not pay" in blocks and "no kernel" in blocks
    )
    assert (
        takes(GPT_12, {**ALL, "float8_recipe": "tensorwise"}, batch=256, length=2048)
        > 1
    )
    assert not [
        note for note in advice.notes(planned(LLAMA_8B, {})) if "float8" in note
    ]


def test_inputs_that_are_kept_and_weights_that_are_gathered_are_bytes():
    model, rows = LLAMA_8B, {"matmul": "float8", "float8_skip": [0, 0]}
    whole, bytes_ = (
        planned(model, precision, zero_stage=3) for precision in ({}, rows)
    )
    held, held_bytes = (planned(model, precision) for precision in ({}, rows))

    def sent(plan, what):
        return sum(t.nbytes * t.count for t in plan.transfers if t.what == what)

    assert sent(bytes_, "weights of a layer gathered") == pytest.approx(
        sent(whole, "weights of a layer gathered") / 2,
        rel=1e-4,  # norms are gathered as they are
    )
    kept = [
        next(
            m.nbytes
            for m in plan.memory
            if m.name == "activations kept for the backward"
        )
        for plan in (held, held_bytes)
    ]
    tokens = 2 * 4096
    assert kept[0] - kept[1] == 32 * tokens * (
        2 * 4096 + 14336
    )  # attention keeps what its output projection takes
    split = [
        planned(model, p, mesh={"data": 4, "tensor": 2}, sequence_parallel=True)
        for p in ({}, rows)
    ]
    assert sent(split[1], "layer inputs gathered") == pytest.approx(
        sent(split[0], "layer inputs gathered") / 2, rel=0.002
    )
    assert (
        float8_share(split[1].config) == 1
        and float8_share(planned(model, {"matmul": "float8"}).config) == 30 / 32
    )


def test_chunks_that_leave_no_product_in_float8_are_told():
    thin = planned(
        LLAMA_8B, {"matmul": "float8"}, mesh={"data": 2, "pipeline": 4}, microbatches=4
    ).config
    assert float8_share(thin) == 0
    assert [note for note in notes(thin) if "leaves no product in float8" in note]
    every = planned(
        LLAMA_8B, ALL, mesh={"data": 2, "pipeline": 4}, microbatches=4
    ).config
    assert float8_share(every) == 1 and not [
        note for note in notes(every) if "float8" in note
    ]


@pytest.mark.thorough
def test_a_search_takes_float8_only_where_it_is_allowed():
    config = planned(LLAMA_8B | {"layers": 8}, {}).config
    plain = search(config, named("h100", 8), 8, best=3).plans
    assert {plan.config.precision.matmul for plan in plain} == {"compute"}
    allowed = search(config, named("h100", 8), 8, best=3, float8=True).plans
    assert (
        allowed[0].config.precision.matmul == "float8"
        and allowed[0].seconds < plain[0].seconds
    )
    assert "float8" in layout(allowed[0].config) and "float8" not in layout(
        plain[0].config
    )
