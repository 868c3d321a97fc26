"""Text can be read, light and dark, and hues that stand side by side are told apart, by the colour-blind too."""

import colorsys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn import apart, check_drawing, contrast, least_apart

from meshtrain.draw import page as pages
from meshtrain.draw.svg import (
    AXES,
    BAD,
    DARK,
    FAINT,
    FIRST,
    GOOD,
    GREY,
    GROUND,
    INK,
    NOTE,
    PALE,
    SECOND,
    TEXT,
    TRACK,
    file,
    keys,
    mixed,
    svg,
    ticks,
)
from meshtrain.plan import page as plan
from meshtrain.plan.jobs import page as jobs
from meshtrain.probe import page as probe
from meshtrain.report import experts
from meshtrain.schedule import draw
from meshtrain.survive import picture

READABLE = 4.5
FAR = 12.0  # in CIELAB; what was drawn before 0.2.0 was 3 apart at its nearest
CELLS = draw._FILL.values()


@pytest.mark.parametrize("text", [TEXT, FAINT, NOTE, BAD, GOOD])
def test_text_on_a_page_is_readable_light_and_dark(text):
    assert (
        contrast(text, GROUND) >= READABLE
        and contrast(DARK[text], DARK[GROUND]) >= READABLE
    )


def test_a_pages_style_has_those_colours():
    light, dark = pages.STYLE.split("@media screen")
    for name, colour in pages.NAMES.items():
        assert f"--{name}: {colour};" in light
        assert colour not in DARK or f"--{name}: {DARK[colour]};" in dark


def test_text_on_a_coloured_cell_is_readable():
    scale = [
        probe._colour(score)
        for score in (0, 0.25, 0.5, 0.6, 0.75, 0.9, 1.0, float("nan"))
    ]
    for colour in [*CELLS, *(mixed(cell, "#ffffff", 0.5) for cell in CELLS), *scale]:
        assert contrast(INK, colour) >= READABLE, colour
    assert all(contrast("#ffffff", colour) >= READABLE for colour in AXES.values())
    for number in range(62):
        hue, strength, light = (
            float(n) for n in jobs._colour(number)[4:-1].replace("%", "").split(",")
        )
        channels = colorsys.hls_to_rgb(hue / 360, light / 100, strength / 100)
        assert (
            contrast(INK, "#" + "".join(f"{round(255 * c):02x}" for c in channels))
            >= READABLE
        ), number


@pytest.mark.parametrize(
    "hues",
    [
        CELLS,
        picture.FILL.values(),
        plan.KIND_COLOURS.values(),
        plan.PART_COLOURS.values(),
        (FIRST, SECOND, PALE),
    ],
    ids=["schedule", "life", "memory", "step", "series"],
)
def test_hues_side_by_side_are_told_apart_by_all_eyes(hues):
    distance, *pair = least_apart(hues)
    assert distance >= FAR, pair


@pytest.mark.parametrize("dark", [False, True])
def test_loads_of_experts_are_told_apart_on_either_ground(dark):
    turned = DARK if dark else {}
    ground = turned.get(GROUND, GROUND)
    shown = [
        mixed(ground, turned.get(hue, hue), strength)
        for _, hue, strength, _ in experts.CLASSES
    ]
    distance, *pair = least_apart(shown)
    assert distance >= FAR, pair


def test_what_is_slow_differs_from_what_is_fast_for_all_eyes():
    for eyes in ("all", "protanopes", "deuteranopes", "tritanopes"):
        assert apart(probe._colour(0.4), probe._colour(1.0), eyes) > 30


def test_the_measure_finds_what_the_colour_blind_confuse():
    # Forward and loss head, as they were
    assert least_apart(["#79aef2", "#c79cf0"])[0] < FAR
    assert contrast("#7d8590", "#ffffff") < READABLE  # the grey of text, as it was
    with pytest.raises(AssertionError):
        check_drawing(svg(9, 9, ['<text fill="#333333">x</text>'], "what"))


def test_a_file_stands_alone_light_and_dark():
    drawn = file(
        svg(1000, 90, [f'<rect fill="{TRACK}"/><text>x</text>'], 'a <b> & "c"')
    )
    check_drawing(drawn)
    root = ElementTree.fromstring(drawn)
    title, style = list(root)[:2]
    assert title.text == root.get("aria-label") == 'a <b> & "c"'
    light, dark = style.text.split("@media screen and (prefers-color-scheme:dark)")
    assert f"background:{GROUND}" in light and "max-width:100%;min-width:600px" in light
    assert f"background:{DARK[GROUND]}" in dark and all(
        f'[fill="{c}"]{{fill:{DARK[c]}}}' in dark for c in (TEXT, TRACK)
    )


def test_a_legend_breaks_its_lines_where_there_is_no_room():
    entries = [(GREY, "as long as this"), (FIRST, "as that")]
    assert keys(entries, y=10)[1] == 28 and keys(entries, y=10, room=100)[1] == 46


@pytest.mark.parametrize("high", [0.9, 1.25, 7.0, 3000.0])
def test_marks_of_an_axis_are_round_and_hold_it(high):
    marks = list(ticks(0.0, high))
    assert marks[0] == 0 and marks[-1] >= high and 3 <= len(marks) <= 6
    assert len(list(ticks(0.0, high, parts=12))) > len(marks)


def test_columns_of_numbers_are_flush_right_and_those_of_words_are_not():
    rows = [
        ("weights", "8", "64 MiB", "4.75 GiB", "now to 2 h"),
        ("loss: sums", "264", "1.5 KiB", "-", "now"),
    ]
    table = pages.table(("what", "times", "size", "sent", "when"), rows)
    assert table.count('<td class="n">') == 6 and table.count('<th class="n">') == 3
    assert (
        "<td>weights</td>" in table
        and "<td>now</td>" in table
        and "tabular-nums" in pages.STYLE
    )


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "experiments").rglob("*.svg")),
    ids=lambda p: p.name,
)
def test_every_picture_of_the_repository_turns_dark_and_has_a_text_for_who_cannot_see_it(
    path,
):
    drawn = path.read_text()
    root = ElementTree.fromstring(drawn)
    assert (
        "prefers-color-scheme:dark" in drawn
        and root.get("aria-label")
        and root.get("role") == "img"
    )
    white = "#fff"  # on the strongest cells of a table
    assert {e.get("fill") for e in root.iter() if e.tag.endswith("text")} <= {
        None,
        INK,
        white,
        *DARK,
    }
    assert {e.get("stroke") for e in root.iter() if e.tag.endswith("path")}.isdisjoint(
        {"#e3e7ee", "#000", "black"}
    )
