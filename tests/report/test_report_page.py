import json
import random
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn import check_page
from synthetic_history import Synthetic

from experiments.watch import chromium
from experiments.watch.page import look, write_run
from meshtrain.report.compare import compare
from meshtrain.report.facts import gather
from meshtrain.report.page import page
from meshtrain.report.summary import summarise


def made(*runs):
    facts = [gather(run) for run in runs]
    return page(
        facts,
        [summarise(one) for one in facts],
        compare(*facts) if len(facts) == 2 else None,
    )


def checked(html):
    check_page(html)
    return html


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "one", 2000)


def test_the_page_is_well_formed_and_fetches_nothing(run):
    html = checked(made(run))
    assert (
        'name="viewport"' in html
        and "@media print" in html
        and "Healthy; done, all 2,000 steps." in html
    )
    for picture in re.findall(r"<svg.*?</svg>", html, re.S):
        ElementTree.fromstring(picture)


def test_every_picture_shrinks_to_a_phone(run):
    for head in re.findall(r"<svg[^>]*>", made(run)):
        assert re.search(r'viewBox="0 0 400 ', head) and "width=" not in head


def test_the_page_has_a_chart_of_all_that_was_measured(run):
    html = made(run)
    labels = set(re.findall(r'aria-label="([^"]+)"', html))
    wanted = (
        "loss",
        "seconds a step",
        "tokens a second",
        "mfu",
        "gradient norm",
        "cpu pressure",
        "memory of the devices",
    )
    assert {f"{name} over steps" for name in wanted} <= labels
    assert {
        "a step against what is possible",
        "the run&#x27;s time by kind",
        "memory as measured",
    } <= labels
    assert "throughput_drop" in html


def test_the_picture_of_losses_has_the_smoothed_curve_and_the_lowest_of_validation_text(
    tmp_path,
):
    where = write_run(tmp_path / "tuned", 2000)
    rows = [
        json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()
    ]
    lowest, step = min(
        (row["eval_loss"], row["step"]) for row in rows if "eval_loss" in row
    )
    html = checked(made(where))
    (loss,) = re.findall(r'<svg[^>]*"loss over steps".*?</svg>', html, re.S)
    assert all(
        name in loss for name in (">training<", ">smoothed<", ">validation text<")
    )
    assert loss.count('r="5"') == 1
    assert f"of validation text lowest {lowest:.4f}, step {step:,}" in html


def test_two_runs_are_on_one_page_with_what_differs(run, tmp_path):
    other = write_run(tmp_path / "other", 2000, seed=1, slower=1.2)
    html = checked(made(run, other))
    assert "Speed: other is slower, +" in html and html.count("<h1>") == 3
    assert len(html) < 150_000


def test_what_a_run_names_is_text_and_nothing_else(tmp_path):
    where = write_run(tmp_path / "<b>run", 100)
    evil = "<script>alert(1)</script>"
    alert = {
        "time": 1.0,
        "step": 1,
        "rule": evil,
        "state": "firing",
        "severity": evil,
        "sentence": evil,
    }
    (where / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    finding = {
        "name": evil,
        "sentence": evil,
        "advice": evil,
        "severity": 0.1,
        "sure": False,
    }
    (where / "findings.json").write_text(
        json.dumps({"findings": [finding], "parts": [{"name": evil, "seconds": 1.0}]})
    )
    (where / "config.yaml").write_text(
        "run: {directory: '<script>x</script>', fake_devices: 8}\ntrain: {steps: 100}\n"
    )
    html = checked(made(where))
    assert "<script" not in html and "&lt;script&gt;alert(1)" in html


def test_a_supervised_run_shows_its_life_and_faults(tmp_path):
    html = checked(
        made(
            Synthetic(random.Random(1), nodes=2, faults=3)
            .play()
            .write(tmp_path / "run")
        )
    )
    assert "Goodput and faults" in html and "to the next step" in html


def test_a_run_that_has_nothing_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert "Not begun" in checked(made(tmp_path))


@pytest.mark.thorough
@pytest.mark.skipif(chromium.found() is None, reason="there is no Chromium")
def test_a_real_browser_asks_for_nothing_and_scrolls_nothing_sideways(run, tmp_path):
    for name, runs in {
        "one": [run],
        "two": [run, write_run(tmp_path / "other", 500, seed=1)],
        "life": [
            Synthetic(random.Random(1), nodes=2, faults=3)
            .play()
            .write(tmp_path / "run")
        ],
    }.items():
        (tmp_path / f"{name}.html").write_text(made(*runs))
        assert look(tmp_path / f"{name}.html", tmp_path) == []
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.thorough
@pytest.mark.skipif(chromium.found() is None, reason="there is no Chromium")
def test_a_page_that_does_either_is_found_out(tmp_path):
    bad = (
        '<!doctype html><meta name="viewport" content="width=device-width"><img src="http://127.0.0.1:9/x.png"><div '
        'style="width:2000px">x</div>'
    )
    (tmp_path / "bad.html").write_text(bad)
    found = " ".join(look(tmp_path / "bad.html", tmp_path))
    assert (
        "asks for http://127.0.0.1:9/x.png" in found
        and "px wide in a window of" in found
    )


@pytest.mark.parametrize("cluster", ["cpu", "h100"])
def test_findings_of_a_described_cpu_say_that_only_shares_count(run, tmp_path, cluster):
    where = Path(shutil.copytree(run, tmp_path / "one"))
    (where / "findings.json").write_text(
        json.dumps({"cluster": cluster, "findings": []})
    )
    assert ("compare shares, not seconds" in made(where)) == (cluster == "cpu")
