import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

from drawn import axes, check_page
from probed import SIZES, collective, devices, pairs, probe

import meshtrain as mt
from meshtrain.cluster.algorithms import ALL_REDUCE
from meshtrain.config import MeshConfig
from meshtrain.plan import named
from meshtrain.probe.page import drawing, page

MESH = MeshConfig(data=8, islands=2)


def measured(slow=1.0):
    """All of data by XLA, and by a ring of half the speed."""
    found = pairs(8)
    found.seconds[:, 2, 6] *= slow
    xla = collective("island+data", ALL_REDUCE, 8, 1e-5, 1e10)
    ring = replace(
        collective("island+data", ALL_REDUCE, 8, 4e-5, 5e9), algorithm="ring"
    )
    return replace(
        probe(MESH, {}, pairs=found, devices=devices(8)), collectives=(xla, ring)
    )


def test_it_is_one_page_that_fetches_nothing_and_closes_what_it_opens():
    written = page(measured(), named("h100", 8))
    check_page(written)
    assert axes(written) == ["from device (row) to device (column), GB/s"]


def test_algorithms_stand_side_by_side_with_their_bandwidth_as_bars():
    written = page(measured())
    assert "8 × some-gpu, data 8 × tensor 1 × pipeline 1, 2 islands" in written
    assert "Over island+data, 8 devices" in written
    widths = [int(width) for width in re.findall(r'style="width:(\d+)px', written)]
    assert widths[0] == 2 * widths[1]
    rows = re.findall(
        r"<tr><td>(.*?)</td>(.*?)</tr>", written.split("From device to device")[0]
    )
    assert [name for name, _ in rows] == ["<b>all-reduce</b>", "ring"]
    assert all(cells.count("<td") == 5 + len(SIZES) for _, cells in rows)


def test_what_is_slow_stands_at_the_top_and_pairs_are_drawn_with_figures():
    good, bad = page(measured()), page(measured(slow=3.0))
    assert "no link is slower" in good
    assert "The link from device 2" in bad.split("<h2>")[0]
    assert (
        good.count("<g><title>") == 8 * 7
        and "Latency in" not in good.split("From device to device")[0]
    )


def test_a_slow_link_has_a_colour_of_its_own_and_says_how_slow():
    found = pairs(8)
    found.seconds[:, 2, 6] *= 2
    drawn = drawing(probe(pairs=found))
    ElementTree.fromstring(drawn)
    colours = re.findall(r'</title><rect [^>]*fill="([^"]+)"', drawn)
    assert len(colours) == 8 * 7
    assert sorted(map(colours.count, set(colours))) == [1, 55]
    assert (
        "device 2 (tensor 2) to device 6 (tensor 6): 4.97 GB/s, 20.8 µs, 0.50 " in drawn
    )


def test_a_probe_shows_itself():
    shown = mt.show(probe(pairs=pairs(8)))
    assert "%3Csvg" in shown.html and "latency in µs, from row to column" in shown.text
    assert mt.show(probe()).text == repr(probe())


def test_each_device_s_number_stands_beside_its_row_and_above_its_column():
    drawn = drawing(probe(pairs=pairs(8)))
    across = [
        float(x)
        for x in re.findall(r'<text x="(\d+)" y="\d+" text-anchor="middle">\d', drawn)
    ]
    down = [
        float(y)
        for y in re.findall(r'<text x="\d+" y="(\d+)" text-anchor="end">\d', drawn)
    ]
    width = float(re.findall(r'</title><rect [^>]*width="([\d.]+)"', drawn)[0])
    for places in (across, down):
        steps = [b - a for a, b in itertools.pairwise(places)]
        assert len(steps) == 7 and all(abs(step - width) <= 2 for step in steps)
