import math
import re
from collections import defaultdict
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from drawn import axes
from refusals import tells

from meshtrain import units
from meshtrain.config import load
from meshtrain.draw.svg import SECOND, WIDTH, ticks
from meshtrain.report.charts import (
    BOTTOM,
    HEIGHT,
    OF_PROCESSES,
    OF_STEPS,
    RIGHT,
    TOP,
    Curve,
    _curves,
    _figure,
    binned,
    chart,
    smoothed,
)
from meshtrain.telemetry.catalogue import BY_NAME


def drawn(y, x=None, **options):
    y = np.asarray(y, float)
    x = np.arange(y.size, dtype=float) if x is None else np.asarray(x, float)
    return chart(
        "a curve", [Curve("y", x, y, "#123456")], lambda v: f"{v:.4g}", **options
    )


def test_no_spike_is_lost_in_a_bin():
    y = np.ones(100_000)
    y[54_321], y[12] = 7.0, -3.0
    centre, least, mean, greatest = binned(np.arange(1e5), y, 0, 1e5 - 1)
    assert greatest.max() == 7.0 and least.min() == -3.0
    assert np.all(np.diff(centre) > 0) and np.all((least <= mean) & (mean <= greatest))


def test_a_chart_of_many_points_is_small_and_within_its_bounds():
    dice = np.random.default_rng(0)
    picture = drawn(dice.standard_normal(1_000_000))
    assert len(picture) < 6000
    ElementTree.fromstring(picture)
    for start in re.findall(r'd="M([\d.]+) ([\d.]+)', picture):
        assert 0 <= float(start[0]) <= 400 and 0 <= float(start[1]) <= HEIGHT


def test_a_path_comes_out_where_it_should():
    """The relative moves sum to the last point: of a rising line, the upper right corner."""
    picture = drawn(np.linspace(0, 1, 50), zero=True)
    start, moves = re.search(r'd="M([\d. ]+)l([-\d. ]+)" fill="none"', picture).groups()
    x, y = map(float, start.split())
    steps = np.array(moves.split(), float).reshape(-1, 2)
    assert x + steps[:, 0].sum() == pytest.approx(WIDTH - RIGHT, abs=0.2)
    assert y + steps[:, 1].sum() == pytest.approx(TOP, abs=0.2)


@pytest.mark.parametrize("y", [[], [np.nan], [np.inf, np.nan]])
def test_nothing_is_drawn_of_nothing(y):
    assert drawn(y) == ""


@pytest.mark.parametrize(
    "y",
    [
        [5.0],
        [0.0, 0.0],
        [5, 5, 5],
        [-2, -2],
        [1e-12, 1e-12],
        [1e300, -1e300],
        [1, np.nan, 3],
    ],
)
def test_any_values_make_a_picture(y):
    for zero in (False, True):
        picture = drawn(y, zero=zero)
        ElementTree.fromstring(picture)
        assert "nan" not in picture and "inf" not in picture


@pytest.mark.parametrize(
    "low, high", [(0, 1), (1.7, 5.8), (-3, 12), (0.001, 0.0013), (990, 1010), (0, 1e-9)]
)
def test_ticks_are_few_round_and_hold_the_range(low, high):
    marks = list(ticks(low, high, 10))
    assert (
        marks[0] <= low + 1e-9 * abs(low)
        and marks[-1] >= high * (1 - 1e-9)
        and 3 <= len(marks) <= 7
    )


@pytest.mark.parametrize(
    "low, high", [(-6.3, -5.9), (-7.2, 0.1), (-30.0, 2.0), (3.0, 3.5)]
)
def test_ticks_of_powers_of_ten_are_whole(low, high):
    marks = list(ticks(low, high, 1))
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 7
    assert all(mark == int(mark) for mark in marks)


GAP = next(spec for spec in OF_STEPS if spec.metric == "rl/gap_max")
REWARD = next(spec for spec in OF_STEPS if spec.metric == "rl/reward")


def of_run(spec, **metrics):
    """Returns the figure of a chart of metrics, of each the values of the first steps."""
    rows = len(next(iter(metrics.values())))
    columns = defaultdict(lambda: np.full(rows, np.nan))
    columns |= {
        name.replace("_", "/", 1): np.array(values) for name, values in metrics.items()
    }
    columns["step"] = np.arange(1.0, rows + 1)
    run = SimpleNamespace(steps=columns, config=load(None, ["rl.gap_limit=0.01"]))
    return _figure(spec, list(_curves(spec, run, "#111111", "#222222")))


def heights(picture):
    """Returns y where each line of a picture begins, by its colour."""
    found = re.findall(
        r'd="M[\d.]+ ([\d.]+)[^"]*" fill="none" stroke="([^"]+)"', picture
    )
    return {colour: float(y) for y, colour in found}


def test_gaps_have_an_axis_of_powers_of_ten_with_the_limit():
    _, about, picture = of_run(GAP, rl_gap_max=[1e-6, 0.0, 1e-5, np.nan])
    assert about == "1e-06 to 1e-05" and ">limit<" in picture
    numbers = re.findall(r">(1e-\d+|0\.\d*1)</text>", picture)
    assert {"1e-06", "0.01"} <= set(numbers)
    first, limit = (heights(picture)[colour] for colour in ("#111111", SECOND))
    low, high = (math.log10(float(numbers[place])) for place in (0, -1))
    of_decade = (HEIGHT - TOP - BOTTOM) / (high - low)
    assert first - limit == pytest.approx(4 * of_decade, abs=0.2)


@pytest.mark.parametrize("gaps", [[np.nan, np.nan], [0.0, 0.0]])
def test_without_a_gap_there_is_neither_a_chart_nor_a_limit(gaps):
    assert of_run(GAP, rl_gap_max=gaps) is None


def test_a_gap_of_1_is_drawn_though_its_logarithm_is_0():
    assert tells(of_run(GAP, rl_gap_max=[1.0, 1.0])[1], "always 1")


def test_rewards_have_pale_lines_a_deviation_to_either_side():
    _, about, picture = of_run(REWARD, rl_reward=[0.5, 1.0], rl_reward_std=[0.5, 0.25])
    assert about == "0.5 to 1"
    reward, below, above = map(
        float, re.findall(r'd="M[\d.]+ ([\d.]+)[^"]*" fill="none"', picture)
    )
    assert below == HEIGHT - BOTTOM and below - reward == pytest.approx(
        reward - above, abs=0.2
    )
    assert picture.count("stroke-opacity") == 2
    assert "stroke-opacity" not in of_run(REWARD, rl_reward=[0.5, 1.0])[2]


def test_ticks_of_bytes_are_round_in_their_unit():
    for high in (700, 5e6, 975e6, 1.05e9, 1.4e9, 60e9, 3e12):
        for tick in ticks(0, high, 2):
            assert re.fullmatch(r"-?\d+(\.5|\.25|\.75)? \w+", units.size(tick)), (
                units.size(tick)
            )


@pytest.mark.parametrize(
    "spec", [*OF_STEPS, *OF_PROCESSES], ids=lambda spec: spec.metric
)
def test_the_axes_of_every_chart_have_a_name_and_their_numbers_a_unit(spec):
    steps = np.arange(1.0, 9.0)
    *_, picture = _figure(spec, [Curve("training", steps, steps, "#123456")])
    assert axes(picture) == [spec.title, "step"]
    # A unit stands at each number, or in the name.
    unit = BY_NAME[spec.metric].unit or {"loss": "nats"}.get(spec.metric, "")
    assert (
        not unit
        or ", " in spec.title
        or re.search(r"\d ?[a-zA-Z%]+$", spec.number(2.0))
    )


def test_names_are_escaped():
    picture = chart(
        "a<b",
        [Curve(n, np.arange(3.0), np.arange(3.0), "#000") for n in ("x<y", "z&")],
        str,
    )
    ElementTree.fromstring(picture)


def test_one_step_that_took_a_minute_does_not_flatten_all_others():
    y = 0.4 + 0.1 * np.random.default_rng(0).random(120)
    y[70] = 148.0

    def height(picture):
        """Returns the line's height in pixels."""
        moves = re.search(r'd="M([\d. ]+)l([-\d. ]+)" fill="none"', picture).groups()[1]
        down = np.cumsum(np.array(moves.split(), float).reshape(-1, 2)[:60, 1])
        return down.max() - down.min()

    assert (
        height(drawn(y, zero=True)) < 1 < 6 < height(drawn(y, zero=True, spikes=True))
    )


def test_every_chart_is_of_a_metric_of_the_catalogue():
    for source, wanted in (("step", OF_STEPS), ("process", OF_PROCESSES)):
        for one in wanted:
            for name in filter(None, (one.metric, one.dots, one.deviation)):
                assert BY_NAME[name].source == source


def test_a_smoothed_value_is_the_mean_of_those_about_it_and_at_the_ends_of_fewer():
    assert smoothed(np.array([1.0, 4.0, 1.0, 4.0, 7.0]), 3).tolist() == [
        1.0,
        2.0,
        3.0,
        4.0,
        7.0,
    ]
    values = np.random.default_rng(0).standard_normal(1000)
    assert smoothed(values, 50)[500] == pytest.approx(values[475:526].mean())


def test_the_lowest_of_the_dots_has_a_ring_though_not_every_dot_is_drawn():
    y = 2 + np.random.default_rng(0).random(1000)
    y[777] = 1.0
    picture = chart(
        "a curve", [Curve("held-out", np.arange(1000.0), y, "#123456", dots=True)], str
    )
    (x,) = re.findall(r'cx="([\d.]+)" cy="[\d.]+" r="5" fill="none"', picture)
    assert (
        float(x) == pytest.approx(52 + 340 * 777 / 999, abs=0.1)
        and picture.count("<circle") < 130
    )


@pytest.mark.parametrize(
    ("steps", "names"), [(1000, ["training", "smoothed"]), (3, ["training"])]
)
def test_many_values_have_a_smoothed_curve_too(steps, names):
    run = SimpleNamespace(steps={"step": np.arange(steps), "loss": np.ones(steps)})
    spec = OF_STEPS[0]._replace(dots="")
    assert [curve.name for curve in _curves(spec, run, "red", "blue")] == names


@pytest.mark.parametrize("steps", [1000, 3])
def test_a_figure_with_a_smoothed_curve_says_so_and_over_how_much(steps):
    values = np.linspace(3.0, 1.0, steps)
    run = SimpleNamespace(steps={"step": np.arange(steps), "loss": values})
    spec = OF_STEPS[0]._replace(dots="")
    _, about, _ = _figure(spec, list(_curves(spec, run, "#111111", "#222222")))
    assert tells(about, "smoothed: ", "mean", "1/50 of the run") == (steps == 1000)
