"""Advice on layouts: what it names is legal, and by the planner it is faster; where nothing is, there is none."""

import pytest
from refusals import tells

from meshtrain.config import load
from meshtrain.plan.estimate import plan
from meshtrain.report.diagnosis import layouts
from meshtrain.report.diagnosis.diagnose import diagnose
from meshtrain.report.diagnosis.evidence import Evidence
from meshtrain.report.rows import Columns
from meshtrain.report.trace.attribution import Attribution

MODEL = (
    "model.layers=8",
    "model.d_model=256",
    "model.heads=8",
    "train.global_batch_size=64",
    "train.sequence_length=256",
)
CASES = {
    "tensor": ("mesh.tensor=8",),
    "pipeline": (
        "mesh.pipeline=8",
        "parallel.microbatches=32",
        "parallel.virtual_stages=1",
    ),
    "bubble": (
        "mesh.pipeline=4",
        "mesh.data=2",
        "parallel.microbatches=4",
        "parallel.schedule=1f1b",
        "parallel.virtual_stages=1",
    ),
    "recomputation": (
        "mesh.data=8",
        "parallel.remat=full",
        "model.d_model=2048",
        "train.sequence_length=1024",
    ),
}


def evidence(settings, cluster, shares, wall=1.0):
    config = load({}, [*MODEL, *settings])
    found = plan(config, cluster)
    seconds = {"forward": 1 - sum(shares.values())} | shares
    attribution = Attribution(
        "gpu", 8, 3, wall, {kind: share * wall for kind, share in seconds.items()}
    )
    return Evidence(config, Columns(), attribution=attribution, plan=found)


@pytest.mark.thorough
@pytest.mark.parametrize("part", CASES)
def test_advice_is_a_config_that_the_planner_shows_to_be_faster(part):
    shares = {} if part == "bubble" else {part: 0.4}
    given = evidence(CASES[part], "h100", shares)
    finding = next(f for f in layouts.layouts(given) if f.name == part)
    advised = plan(load({}, [*MODEL, *CASES[part], *finding.settings]), "h100")
    assert finding.settings
    assert advised.seconds <= (1 - layouts.WORTH) * given.plan.seconds
    assert finding.severity == pytest.approx(
        min(finding.value, 1 - advised.seconds / given.plan.seconds)
    )
    assert advised.devices == given.plan.devices and advised.fits
    assert all(setting in finding.advice for setting in finding.settings)


def test_a_step_that_gathers_over_slow_links_in_each_microbatch_is_advised_islands():
    settings = (
        "mesh.data=256", "model.layers=16", "model.d_model=4096", "model.heads=32", "train.sequence_length=512",
        "train.global_batch_size=2048", "precision.compute=bfloat16", "parallel.zero_stage=3", "parallel.microbatches=8",
    )  # fmt: skip
    flat, islands = (
        load({}, [*MODEL, *settings, *more]) for more in ((), ("mesh.islands=4",))
    )
    assert {"mesh": {"islands": 32}} in list(layouts.changes(flat, "data"))
    assert {"mesh": {"islands": 32}} in list(layouts.changes(islands, "data"))
    planned = plan(load({}, [*MODEL, *settings, "mesh.islands=32"]), "h100")
    assert planned.fits and planned.seconds < 0.9 * plan(flat, "h100").seconds


def test_what_goes_across_islands_is_told_of_what_goes_over_data():
    given = evidence(
        ("mesh.data=8", "mesh.islands=2"), "h100", {"data": 0.3, "island": 0.2}
    )
    said = " ".join(
        [*(f.sentence for f in layouts.layouts(given)), *layouts.remarks(given)]
    )
    assert tells(said, "Collectives over data take 50%", "20%", "across islands")


def test_advice_that_the_planner_does_not_show_to_be_faster_is_left_out_with_a_word(
    monkeypatch,
):
    given = evidence(CASES["tensor"], "h100", {"tensor": 0.4})
    monkeypatch.setattr(
        layouts, "changes", lambda config, part: iter([{"mesh": {"tensor": 8}}])
    )
    found = diagnose(given)
    assert not [f for f in found.findings if f.settings]
    assert any(
        "tensor" in remark and "no other layout is faster" in remark
        for remark in found.remarks
    )


def test_a_layout_that_does_not_fit_is_no_advice():
    big = (
        *(
            "model.layers=32",
            "model.d_model=4096",
            "model.heads=32",
            "model.d_ff=14336",
            "model.vocab_size=128256",
        ),
        *(
            "train.global_batch_size=16",
            "train.sequence_length=4096",
            "precision.compute=bfloat16",
            "mesh.data=8",
        ),
        *("parallel.zero_stage=3", "parallel.remat=full"),
    )
    given = evidence(big, "a100-40", {"recomputation": 0.3, "data": 0.3})
    for part in ("recomputation", "data"):
        for change in layouts.changes(given.config, part):
            settings = [
                f"{section}.{key}={value}"
                for section, keys in change.items()
                for key, value in keys.items()
            ]
            if plan(
                load({}, [*MODEL, *big, *map(str.lower, settings)]), "a100-40"
            ).fits:
                continue
            cure = layouts.fastest(given.plan, part)
            assert cure is None or set(cure.settings) != set(map(str.lower, settings))
            return
    raise AssertionError("all of these layouts fit")


@pytest.mark.thorough
def test_collectives_much_slower_than_the_links_allow_are_told_apart_from_a_costly_layout():
    slow = evidence(("mesh.data=8",), "h100", {"data": 0.5}, wall=1.0)
    assert [f.name for f in diagnose(slow).findings] == ["links"]
    # Most of a step, and little slower than planned.
    planned = dict(slow.plan.time.parts())["data"]
    near = evidence(("mesh.data=8",), "h100", {"data": 0.9}, wall=1.4 * planned)
    assert "links" not in [f.name for f in diagnose(near).findings]
