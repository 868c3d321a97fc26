"""Steps of our own that were timed on a real GPU are planned as they were: `experiments/gpu/h100.jsonl`."""

import json
from pathlib import Path

import pytest

from experiments import gpu
from experiments.gpu.cases import SPEED
from meshtrain.cluster.accelerators import ACCELERATORS, ALONE
from meshtrain.cluster.cluster import named, resized
from meshtrain.config import load
from meshtrain.plan.estimate import plan

ROWS = {
    row["case"]: row
    for row in map(
        json.loads, (Path(gpu.__file__).parent / "h100.jsonl").read_text().splitlines()
    )
}
OURS = [name for name in ROWS if not SPEED[name].plain]


@pytest.mark.parametrize("name", OURS)
def test_a_step_on_an_h100_takes_what_is_planned_within_a_twentieth(name):
    found = plan(load(SPEED[name].config()), "h100")
    assert found.seconds == pytest.approx(ROWS[name]["seconds"], rel=0.05)


@pytest.mark.parametrize(
    "name", [name for name in OURS if SPEED[name].model.get("layers", 1) > 1]
)
def test_it_holds_what_is_planned_within_a_twentieth(name):
    """Of a single layer XLA unrolls the loop, and more of it dies early."""
    found = plan(load(SPEED[name].config()), "h100")
    assert found.bytes == pytest.approx(ROWS[name]["bytes"], rel=0.05)


def test_only_a_device_alone_is_planned_by_what_was_measured_of_one():
    alone, eight = (plan(load({"mesh": {"data": n}}), "h100").as_json() for n in (1, 8))
    assert alone["share_of_peak"] == {
        "products": 0.818,
        "evidence": "fitted on steps of our own on one H100",
    }
    assert (
        eight["share_of_peak"]["evidence"]
        == "fitted on published runs on H100s, four sources"
    )
    assert alone["efficiencies_borrowed_from"] is None
    # a curve over numbers of devices begins with one, whichever it is drawn from
    one, many = (
        resized(named("h100", n), m).accelerator.efficiency for n, m in ((8, 1), (1, 8))
    )
    assert (one, many) == (ALONE["h100"], ACCELERATORS["h100"].efficiency)
