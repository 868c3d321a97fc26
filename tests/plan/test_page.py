import re

import pytest
from drawn import axes, check_page

from meshtrain.plan import named, plan, scaling
from meshtrain.plan import page as html
from meshtrain.plan.estimate import PART_NAMES


@pytest.fixture
def page(llama_8b):
    config = llama_8b()
    cluster = named("h100", 16)
    return html.page(
        plan(config, cluster),
        scaling.strong(config, cluster),
        scaling.weak(config, cluster),
        ["a < b"],
    )


def test_the_page_is_well_formed_and_fetches_nothing(page):
    assert "a &lt; b" in page
    check_page(page)


def test_every_axis_has_a_name_and_its_ends_their_unit(page):
    assert {
        "memory of a device",
        "bytes of an item",
        "time in the step",
        "throughput a device, % of the first",
        "devices",
    } <= set(axes(page))
    for name, end in (
        ("memory of a device", r"[\d.]+ GiB"),
        ("time in the step", r"[\d.]+ s"),
    ):
        assert re.search(rf">{name}</text><text [^>]*>{end}</text>", page)


def test_the_legend_of_the_schedule_stands_above_what_scrolls(page):
    legend, scrolled = (
        re.search("aria-label=.*colours of the schedule", page).start(),
        page.index('<div class="wide"'),
    )
    assert legend < scrolled < page.index('<pattern id="idle"')
    assert (
        ">idle</text>" in page[legend:scrolled]
        and ">idle</text>" not in page[scrolled:]
    )


@pytest.mark.thorough
def test_the_page_has_its_pictures_and_fits_a_phone(page):
    labels = re.findall(r'aria-label="([^"]+)"', page)
    assert {
        "memory of one device by item",
        "time of a step by part",
        "efficiency by number of devices",
    } <= set(labels)
    assert 'name="viewport"' in page and "stage 3" in page
    for box in re.findall(r'<svg viewBox="0 0 (\d+)', page):
        assert int(box) <= 400


def test_every_part_of_a_step_has_a_colour():
    assert html.PART_COLOURS.keys() == PART_NAMES.keys()


def test_a_layout_that_does_not_fit_says_so(llama_8b):
    config = llama_8b({"data": 1}, microbatches=1, remat="none")
    assert "does not fit" in html.page(plan(config, named("h100", 1)), [], [])
