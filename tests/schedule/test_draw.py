import re
import xml.etree.ElementTree as ElementTree

import pytest
from drawn import check_drawing

from meshtrain.schedule.draw import figures, gantt_svg, gantt_text, legend_svg
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.simulation import EXECUTIONS, Durations, simulate
from meshtrain.schedule.table import Table
from meshtrain.units import duration

SVG = "{http://www.w3.org/2000/svg}"


def timeline(schedule="1f1b", p=3, m=5, execution="lockstep", **durations):
    return simulate(
        make_table(schedule, p, m, legal_chunks(schedule) or 2),
        Durations(**durations),
        execution,
    )


def cells(svg: str) -> dict[tuple[int, float, float], ElementTree.Element]:
    """{(stage, start, end): rectangle} of the cells of a picture, as their titles say."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, rectangle = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and rectangle is not None:
            ((stage, start, end),) = re.findall(
                r"stage (\d+), clock \d+: (\S+) to (\S+)", title.text or ""
            )
            found[int(stage), float(start), float(end)] = rectangle
    return found


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_picture_has_a_cell_for_all_that_takes_time_where_and_as_long_as_it_does(
    schedule, execution
):
    line = timeline(
        schedule, execution=execution, head=0.5, optimizer=2.0, message=0.25
    )
    found = cells(gantt_svg(line))
    assert len(found) == len(line.kind)
    scale = _number(found[0, 0.0, line.end[0]], "width") / line.end[0]
    for (stage, start, end), rectangle in found.items():
        assert (_number(rectangle, "y") - 76) / 30 == stage
        assert _number(rectangle, "x") == pytest.approx(64 + start * scale, rel=0.02)
        assert _number(rectangle, "width") == pytest.approx(
            (end - start) * scale, rel=0.02
        )


def _number(rectangle: ElementTree.Element, name: str) -> float:
    gap = {"width": 0.5, "x": -0.25}.get(name, 0.0)  # between cells
    return float(rectangle.get(name, "nan")) + gap


def test_what_takes_no_time_is_not_drawn():
    svg = gantt_svg(timeline(head=0.0, optimizer=0.0))
    assert len(cells(svg)) == 3 * 5 * 2
    assert "optimizer" not in svg and "loss head" not in svg


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_at_64_microbatches_each_cell_says_which(schedule):
    line = timeline(schedule, p=4, m=64)
    with_number = [
        text for text in texts(gantt_svg(line)) if re.fullmatch(r"\d+(\.\d+)?", text)
    ]
    assert len(with_number) >= len(line.kind) - 4


def test_the_picture_tells_the_figures_and_names_the_stages():
    line = timeline("zb_h1", optimizer=1.0)
    svg = gantt_svg(line)
    words = " ".join(texts(svg))
    for word in (
        "makespan",
        "idle",
        "peak in flight 5",
        "stage 0",
        "stage 2",
        "input gradient",
        "weight gradient",
        "optimizer",
    ):
        assert word in words
    assert "critical path" not in words
    assert "critical path" in gantt_svg(timeline("zb_h1", execution="asynchronous"))


def test_the_axis_of_time_has_a_name_and_its_unit():
    line = timeline("interleaved", p=4, m=8, execution="asynchronous", optimizer=1.0)
    bare, seconds = gantt_svg(line), gantt_svg(line, duration, headed=False)
    assert any(re.match("time, .*unit.* durations", word) for word in texts(bare))
    assert f"{line.makespan:.6g}" in " ".join(texts(bare))
    words = texts(seconds)
    assert "time" in words and "10 s" in words
    assert not any("makespan" in word for word in words), "the page has it in words"
    legend = texts(legend_svg(line))
    assert "paler: an earlier chunk" in legend and set(legend) < set(texts(bare))
    assert not set(legend) & set(words), "it would scroll away"
    for svg in (bare, seconds, legend_svg(line)):
        check_drawing(svg)


def test_the_curve_reaches_the_peak_and_ends_at_zero():
    line = timeline("1f1b", p=3, m=8)
    root = ElementTree.fromstring(gantt_svg(line))
    curves = [
        path.get("d", "")
        for path in root.iter(f"{SVG}path")
        if path.find(f"{SVG}title") is not None
    ]
    assert len(curves) == 3
    tops = [min(float(v) for v in re.findall(r"V([\d.]+)", curve)) for curve in curves]
    floor = float(re.findall(r"M\S+ ([\d.]+)", curves[0])[0])
    assert [round((floor - top) / (floor - tops[0]) * 5) for top in tops] == [5, 3, 1]
    assert all(
        float(re.findall(r"V([\d.]+)", curve)[-1]) == pytest.approx(floor)
        for curve in curves
    )


def test_a_name_cannot_break_the_picture():
    table = make_table("1f1b", 2, 2)
    table = Table("<a>&b", 2, 2, 1, False, "loop", table.cells)
    assert texts(gantt_svg(simulate(table, Durations())))[0].startswith(
        "<a>&b: 2 stages"
    )


def test_the_text_is_the_schedule_as_one_would_draw_it():
    assert gantt_text(timeline("1f1b", p=2, m=3, weight_grad=0.0), 34).splitlines() == [
        "stage 0   F0-F1-...F2-B0-...B1-B2-",
        "stage 1   ...F0-B0-F1-B1-F2-B2-...",
        "in flight ▃▃▃▆▆▆▆▆▆██████▆▆▆▆▆▆▃▃▃",
        "",
        *figures(timeline("1f1b", p=2, m=3, weight_grad=0.0)),
        "forward (F); backward (B); . idle",
    ]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m, width", [(1, 60), (6, 80), (64, 100), (64, 200)])
def test_the_text_is_as_wide_as_asked(schedule, execution, m, width):
    line = timeline(
        schedule,
        p=12,
        m=m,
        execution=execution,
        head=0.3,
        head_spread=True,
        optimizer=1.0,
        message=0.1,
    )
    drawn = gantt_text(line, width).splitlines()
    assert [len(row) for row in drawn[:13]] == [width] * 13
    assert [row.split()[1] for row in drawn[:12]] == [str(stage) for stage in range(12)]


def test_where_the_text_is_too_narrow_the_middle_is_left_out():
    rows = gantt_text(timeline("1f1b", p=2, m=100), 80).splitlines()[:3]
    assert all(" … " in row for row in rows)
    assert rows[0].startswith("stage 0   F0-F1-") and "B99" in rows[0].split(" … ")[1]


def test_figures_are_in_the_singular_for_one():
    first, _, last = figures(simulate(make_table("1f1b", 1, 1), Durations()))
    assert first == "1f1b: 1 stage, 1 microbatch, 1 chunk a stage, lockstep execution"
    assert re.fullmatch("peak in flight 1 entry .*, on stage 0", last)


def test_messages_that_a_pair_hides_have_a_lane_of_their_own_under_the_other_half():
    line = timeline("paired", forward_hidden=0.2, backward_hidden=0.3)
    svg = gantt_svg(line)
    assert any("messages under" in word for word in texts(svg))
    lanes = [
        r
        for r in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if r.get("height") == "3"
    ]
    scale = _number(cells(svg)[0, 0.0, line.end[0]], "width") / line.end[0]
    width = sum(float(lane.get("width", "nan")) for lane in lanes)
    assert line.hidden.sum() > 0 and width == pytest.approx(
        line.hidden.sum() * scale, rel=0.02
    )
    assert not timeline("interleaved", forward_hidden=0.2).hidden.any()
