import json
import math
import random
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from drawn import axes, check_drawing
from synthetic_history import Synthetic, spoilt, told

from meshtrain.plan.failures import daly, goodput
from meshtrain.survive import picture, stats
from meshtrain.survive.history import read
from meshtrain.survive.ledger import dominant, ledger, lives
from meshtrain.survive.reliability import by_kind, by_node, mean_bounds, reliability
from meshtrain.survive.stats import timeline


def run(tmp_path, seed=1, nodes=4, faults=8):
    return (
        Synthetic(random.Random(seed), nodes=nodes, faults=faults)
        .play()
        .write(tmp_path / "run")
    )


def of_two_generations(first_exit, plans=()):
    """A run of 1,000 s: of ten seconds a step takes 9 at 1 s each and a save one; 100 s go by before either
    generation's first step.
    """
    lines = [{"wall": 0.0, "event": "join"}]
    for generation, began, ended, start, exit in (
        (1, 0.0, 500.0, 0, first_exit),
        (2, 600.0, 1000.0, 360, 0),
    ):
        at, going = {"generation": generation, "rank": 0, "start": start}, began + 100
        lines += [
            {"wall": began, "event": "started", **at},
            {"wall": going, "event": "going", **at},
        ]
        for k in range(1, round(ended - going) // 10 + 1):
            spent = {"init": 100.0, "step": 9.0 * k, "checkpoint": k - 1.0}
            lines.append(
                {
                    "wall": going + 10 * k - 1,
                    "event": "save",
                    **at,
                    "step": start + 9 * k,
                    "seconds": spent,
                }
            )
        spent = spent | {"checkpoint": float(k)}
        end = {
            "exit": exit,
            "step": start + 9 * k,
            "seconds": spent,
            "phase_seconds": 3.0,
        }
        lines.append({"wall": ended, "event": "ended", **at, **end})
    history = told({"n0": lines}, plans)
    return (times := ledger(history)), reliability(history, times)


def test_starts_and_stops_in_good_order_are_no_failures_and_are_left_out_of_what_the_formula_expects():
    times, said = of_two_generations(75)
    assert (said.failures, said.between, said.restart) == ((), None, None)
    assert times.goodput == said.expected == pytest.approx(0.7 * 0.9)
    assert times.effective == pytest.approx(0.7)


def test_the_formulas_are_given_what_a_history_says_of_a_failure():
    plan = {"state": "forming", "kind": "signal", "blamed": ["n0"]}
    faults = [
        plan | {"number": k, "generation": k + 1, "wall": wall}
        for k, wall in ((1, 505.0), (2, 1000.0))
    ]
    times, said = of_two_generations(-9, faults)
    assert (by_kind(said.failures), by_node(said.failures)) == (
        [("signal", 2)],
        [("n0", 2)],
    )
    assert (
        said.between_least < said.between == said.exposed / 2 == 500 < said.between_most
    )
    # From the last sign of progress, 3 s before a process ended, to the verdict, and from there to the first step after
    # it.
    assert (said.noticed, said.restart) == (
        pytest.approx((8 + 3) / 2),
        pytest.approx(195.0),
    )
    assert (said.interval, said.interval_steps, said.write, said.step) == pytest.approx(
        (9.0, 9.0, 1.0, 1.0)
    )
    assert said.expected == pytest.approx(
        goodput(9.0, times.seconds["checkpoint"] / 70, 200.5, 500.0) * 0.9
    )
    assert said.advised == round(daly(1.0, 500.0))


def test_bounds_of_the_mean_time_between_failures_are_garwoods():
    # Garwood 1936, table: of 10 events the mean is 4.80 to 18.39 at 95%; of none at most 3.00
    assert mean_bounds(100.0, 10) == (
        pytest.approx(100 / 18.39, rel=1e-3),
        pytest.approx(100 / 4.795, rel=1e-3),
    )
    assert mean_bounds(100.0, 0) == (pytest.approx(100 / 2.9957, rel=1e-4), math.inf)


def test_a_run_that_was_given_up_counts_its_last_fault_and_time_when_nobody_wanted_it_counts_for_nothing():
    day = 86400.0
    lines = [{"wall": w, "event": "join"} for w in (0.0, 10 * day)] + [
        {"wall": 10 * day + 100, "event": "left"}
    ]
    plans = [
        {
            "number": 1,
            "generation": 1,
            "state": "forming",
            "kind": "start",
            "wall": 1.0,
        },
        {
            "number": 2,
            "generation": 1,
            "state": "over",
            "kind": "error",
            "code": 3,
            "wall": 50.0,
        },
        {
            "number": 3,
            "generation": 2,
            "state": "forming",
            "kind": "start",
            "wall": 10 * day,
        },
    ]
    found = told({"n0": lines}, plans)
    said = reliability(found, ledger(found))
    assert [(f.kind, f.generation, f.restart) for f in said.failures] == [
        ("error", 1, None)
    ]
    assert said.exposed == said.between == pytest.approx(150.0)


def test_the_tables_say_what_the_json_says(tmp_path):
    at = run(tmp_path)
    text, found = stats.show(at), stats.to_json(at)
    json.dumps(found, allow_nan=False)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall"])
    assert f"goodput {found['goodput']:.1%}" in text
    assert f"{found['seconds']['lost']:,.1f}" in text
    assert f"{len(found['reliability']['failures'])} failures" in text
    assert "torn" not in text


def test_a_run_of_which_nothing_is_known_has_tables_and_a_picture(tmp_path):
    (tmp_path / "survive").mkdir()
    assert "together" in stats.show(tmp_path)
    assert stats.to_json(tmp_path)["wall"] == 0
    assert "</svg>" in picture.svg(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("nodes", "faults", "width"), [(1, 0, 960), (4, 6, 360), (64, 40, 960)]
)
def test_the_picture_is_a_drawing_with_every_node_and_fault(
    tmp_path, nodes, faults, width
):
    at = run(tmp_path, nodes=max(nodes, 2), faults=faults)
    drawing = picture.svg(at, width)
    root = ElementTree.fromstring(drawing)
    check_drawing(drawing)
    assert axes(drawing) == ["node", "steps", "time since the start"]
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert float(root.get("width")) == width
    assert all(
        any(t.startswith(f"generation {k + 1}, rank 0: ") for t in titles)
        for k in range(faults + 1)
    )
    count = len(stats.to_json(at)["reliability"]["failures"])
    assert (
        sum(
            ": " in line
            for t in titles
            if " of " in t and "generation" not in t
            for line in t.split("\n")
        )
        == count
    )
    assert "Infinity" not in drawing and "NaN" not in drawing and len(drawing) < 3e6
    plan = sorted((at / "survive" / "plans").iterdir())[-1]
    plan.write_text(
        plan.read_text().replace("done of nobody", "<script>alert(1)</script>")
    )
    assert "<script>" not in picture.svg(at) and "&lt;script&gt;" in picture.svg(at)


def test_a_legend_begins_a_line_where_it_would_be_too_wide(tmp_path):
    times = ledger(read(run(tmp_path)))
    (wide, low), (narrow, high) = (
        picture._legend(times, 10_000),
        picture._legend(times, 100),
    )
    assert low == 18 and high == 18 * len(narrow) and len(wide) == len(narrow) > 1


def test_the_line_for_a_terminal_is_as_wide_as_asked_and_marks_every_fault():
    made = Synthetic(random.Random(5), nodes=2, faults=5).play()
    found = told(made.lines, made.plans)
    times = ledger(found)
    letters, faults, legend = timeline(found, times, 300)
    assert len(letters) == 300
    assert len(faults.replace(" ", "")) == sum(made.kinds.values())
    assert letters.count("x") / 300 == pytest.approx(
        times.seconds["lost"] / times.wall, abs=0.05
    )
    assert all(letter in legend for letter in set(letters))


def test_a_node_that_has_said_it_leaves_has_its_process_until_that_ends():
    at = {"generation": 1, "rank": 0}
    lines = [
        {"wall": w, "event": e, **at}
        for w, e in ((0.0, "join"), (1.0, "started"), (5.0, "left"), (9.0, "ended"))
    ]
    found = told({"n0": lines})
    assert lives(found, ledger(found))[0].processes == [(1, 0, 1.0, 9.0)]
    assert dominant([], 0.0, 10.0, 5) == [""] * 5


@pytest.mark.thorough
def test_whatever_stands_in_the_files_there_are_tables_and_a_picture(tmp_path):
    for seed in range(60):
        dice = random.Random(seed)
        made = Synthetic(dice, nodes=3, faults=dice.randint(0, 6)).play()
        rank = {"number": 1, "pid": 5, "step": 3}
        record = {
            "wall": made.now,
            "sequence": 1,
            "generation": 1,
            "state": "running",
            "rank": rank,
            "end": None,
        }
        made.records = {"n1": spoilt(record, dice)}
        made.lines = {
            node: [spoilt(event, dice) for event in lines]
            for node, lines in made.lines.items()
        }
        made.plans = [spoilt(plan, dice) for plan in made.plans]
        at = made.write(tmp_path / str(seed))
        for text in (stats.show(at), stats.show_status(at, watch=0.0), picture.svg(at)):
            assert text and "\x1b" not in text
        ElementTree.fromstring(picture.svg(at))
        json.dumps(stats.to_json(at), allow_nan=False)


@pytest.mark.thorough
def test_who_supervises_and_who_looks_at_a_run_has_no_jax(tmp_path):
    at = run(tmp_path)
    code = (
        "import sys; from pathlib import Path; from meshtrain.survive import forming, heartbeat, picture, stats; "
        "import meshtrain.config.inject; "
        f"p = Path({str(at)!r}); stats.show(p); stats.show_status(p); picture.svg(p); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_fault_by_itself_has_its_kind_and_several_too_near_their_number(tmp_path):
    root = ElementTree.fromstring(picture.svg(run(tmp_path, nodes=2, faults=60), 960))
    labels = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {label[0] for label in labels if " × " in label} & set(
        "23456789"
    ) and not any("1 × " in s for s in labels)
