"""What is advised is what a run then does: another schedule, or what makes a plan fit."""

import re

import pytest

from meshtrain.config import load, replaced, to_yaml
from meshtrain.plan import advice, memory, named, pipeline, plan
from meshtrain.units import size


@pytest.mark.slow
def test_to_keep_less_of_what_is_named_is_advised_in_settings_that_a_run_takes(
    llama_8b, tmp_path
):
    kept = ("attention_out", "mlp_hidden")
    config = llama_8b(
        {"data": 4, "tensor": 4}, microbatches=1, remat="names", remat_keep=kept
    )
    over = plan(config, named("a100-40", 16))
    path = tmp_path / "run.yaml"
    # As a person writes it: what follows from other keys is left out, and so follows from them as they are advised.
    path.write_text(to_yaml(config).replace("  zero_hold: false\n", ""))
    found = [
        change
        for change in advice.cheapest(over, count=100)
        if "remat_keep" in str(change.settings)
    ]
    values = {s for change in found for s in change.settings if "remat_keep" in s}
    assert {"parallel.remat_keep=[]", "parallel.remat_keep=[mlp_hidden]"} <= values
    for change in found:
        assert (
            plan(load(path, list(change.settings)), over.cluster).bytes == change.nbytes
        )


@pytest.mark.thorough
def test_where_logits_do_not_fit_a_loss_by_chunks_is_advised(llama_8b):
    config = llama_8b(
        {"tensor": 8},
        {"global_batch_size": 1, "sequence_length": 65536},
        microbatches=1,
        remat="full",
        sequence_parallel=True,
    )
    whole = plan(replaced(config, train={"loss_chunk": 65536}), named("h100", 8))
    found = dict(advice._neighbours(whole.config, whole.cluster))
    chunked = plan(found[("train.loss_chunk=2048",)], whole.cluster)
    logits = [
        sum(
            i.nbytes
            for i in memory.passing(c, pipeline.facts(c))["loss"]
            if "logits" in i.name
        )
        for c in (whole.config, chunked.config)
    ]
    # float32, and their cotangent
    assert (
        logits == [6 * 65536 * 16032, 6 * 2048 * 16032]
        and chunked.bytes < 0.9 * whole.bytes
    )
    assert whole.seconds < chunked.seconds < 1.03 * whole.seconds
    assert ("train.loss_chunk=2048",) not in dict(
        advice._neighbours(chunked.config, whole.cluster)
    )


def test_to_compute_attention_s_surroundings_again_is_advised_before_all_of_a_layer(
    llama_8b,
):
    over = plan(
        llama_8b(
            {"data": 1, "tensor": 8},
            {"global_batch_size": 8, "sequence_length": 8192},
            microbatches=2,
            sequence_parallel=True,
        ),
        named("a100-40", 8),
    )
    steps = dict(advice._neighbours(over.config, over.cluster))
    selective, full = (
        plan(steps[(f"parallel.remat={remat}",)], over.cluster)
        for remat in ("selective", "full")
    )
    assert not over.fits and over.bytes > selective.bytes > full.bytes
    assert selective.seconds < 1.05 * over.seconds < full.seconds


def test_chunks_that_do_not_divide_the_layers_are_offered_with_a_split_that_leaves_the_ends_empty(
    llama_8b,
):
    """30 layers over 4 stages: interleaved as it stands has one chunk; with embedding and head as layers of their own
    it has eight.
    """
    uneven = replaced(
        llama_8b(schedule="interleaved", sequence_parallel=True), model={"layers": 30}
    )
    planned = plan(replaced(uneven, parallel={"virtual_stages": 1}), named("h200", 16))
    best = advice.best_schedule(planned)
    split = next(
        setting
        for setting in best.settings
        if setting.startswith("parallel.layer_split=")
    )
    assert (
        split == "parallel.layer_split=[0" + ",1" * 30 + ",0]"
        and best.seconds < 0.9 * planned.seconds
    )
    found = plan(load(planned.config, list(best.settings)), planned.cluster)
    assert (found.bytes, found.seconds) == (best.nbytes, best.seconds)


@pytest.mark.thorough
def test_the_best_schedule_is_the_first_advice(llama_8b):
    """1F1B does not fit here; of the schedules that do, none is faster than what is advised first."""
    mesh = {"data": 8, "tensor": 2, "pipeline": 4}
    over = plan(
        llama_8b(
            mesh, {"global_batch_size": 128}, schedule="1f1b", sequence_parallel=True
        ),
        named("a100-40", 64),
    )
    first, *others = advice.cheapest(over)
    assert {setting.partition("=")[0] for setting in first.settings} == {
        "parallel.schedule",
        "parallel.virtual_stages",
    }
    found = plan(load(over.config, list(first.settings)), over.cluster)
    assert (found.bytes, found.seconds, found.fits) == (
        first.nbytes,
        first.seconds,
        True,
    )
    assert others and not over.fits
    for schedule, chunks in (
        ("interleaved", 4),
        ("interleaved", 8),
        ("zb_interleaved", 4),
        ("v_1f1b", 2),
        ("zb_h1", 1),
    ):
        other = plan(
            replaced(
                over.config, parallel={"schedule": schedule, "virtual_stages": chunks}
            ),
            over.cluster,
        )
        assert not other.fits or other.seconds >= first.seconds


def test_where_all_fits_a_better_schedule_is_noted_with_its_time_and_bytes(llama_8b):
    fits = plan(llama_8b(schedule="1f1b"), named("h200", 16))
    (best,) = advice.changes(fits)
    (note,) = advice.notes(fits)
    assert note.startswith(
        f"{best.settings[0]}, {best.settings[1]} would take {best.seconds / fits.seconds:.2f} of"
    )
    assert f"{size(best.nbytes)} a device in place of {size(fits.bytes)}." in note
    chosen = plan(llama_8b(), named("h200", 16))
    assert (
        chosen.config.parallel.schedule,
        advice.changes(chosen),
        advice.notes(chosen),
    ) == (
        "interleaved",
        [],
        [],
    )


@pytest.mark.parametrize(
    ("schedule", "chunks", "plain"),
    [("zb_h1", 1, "1f1b"), ("zb_interleaved", 4, "interleaved")],
)
def test_what_a_schedule_holds_beside_a_plain_one_is_said_before_a_device_is_paid_for(
    llama_8b, schedule, chunks, plain
):
    config = llama_8b(schedule=schedule, virtual_stages=chunks, remat="full")
    cluster = named("h100", 16)
    heavy = plan(config, cluster)
    light = plan(
        replaced(
            config,
            parallel={
                "schedule": plain,
                "virtual_stages": chunks if plain == "interleaved" else 1,
            },
        ),
        cluster,
    )
    note = advice.notes(heavy)[-1]
    assert heavy.bytes > advice.HEAVY * light.bytes
    assert note.startswith(f"{schedule} holds {heavy.bytes / 2**30:.3g} GiB a device")
    waits = "remat: full .* waits for .*weight gradients"
    assert re.search(waits, note)
    assert (
        f"where {plain} would hold {light.bytes / 2**30:.3g} and take {light.seconds / heavy.seconds:.2f} of"
        in note
    )
    # One that holds less than 1F1B: then nothing is said.
    frugal = plan(llama_8b(schedule="v_1f1b", remat="full"), cluster)
    assert not [found for found in advice.notes(frugal) if "v_1f1b holds" in found]


def test_on_one_stage_it_is_said_what_pairs_save_and_that_they_hold_hardly_more(
    llama_8b,
):
    mesh, cluster = {"data": 2, "tensor": 8}, named("h100", 16)
    apart, pairs = (
        plan(
            llama_8b(mesh, {"global_batch_size": 16}, schedule=name, microbatches=8),
            cluster,
        )
        for name in ("1f1b", "paired")
    )
    assert pairs.seconds < apart.seconds and pairs.bytes < 1.05 * apart.bytes
    (note,) = advice.notes(apart)
    assert (
        note.startswith("parallel.schedule=paired, ")
        and f"hold {size(pairs.bytes)}" in note
    )
    assert not advice.notes(pairs)
    alone = plan(llama_8b({"data": 16}, microbatches=4), cluster)
    assert not [note for note in advice.notes(alone) if "paired" in note]


@pytest.mark.parametrize(
    ("compute", "offered"), [("float32", True), ("bfloat16", False)]
)
def test_half_as_many_bytes_are_advised_where_it_computes_in_float32(
    llama_8b, compute, offered
):
    config = replaced(
        llama_8b({"data": 8}, microbatches=1), precision={"compute": compute}
    )
    assert (
        ("precision.compute=bfloat16",)
        in dict(advice._neighbours(config, named("h100", 8)))
    ) == offered
