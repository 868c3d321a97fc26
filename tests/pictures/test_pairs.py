import re
from xml.etree import ElementTree

from probed import pairs, probe

import meshtrain as mt
from meshtrain.pictures.pairs import drawing


def test_a_slow_link_has_a_colour_of_its_own_and_says_how_slow():
    found = pairs(8)
    found.seconds[:, 2, 6] *= 2
    drawn = drawing(probe(pairs=found))
    ElementTree.fromstring(drawn)
    colours = re.findall(r'<rect [^>]*fill="([^"]+)"', drawn)
    assert len(colours) == 8 * 7
    assert sorted(map(colours.count, set(colours))) == [1, 55]
    assert "device 2 (tensor 2) to device 6 (tensor 6): 4.97 GB/s, 20.8 µs, 0.50 of its like" in drawn


def test_a_probe_shows_itself():
    shown = mt.show(probe(pairs=pairs(8)))
    assert "%3Csvg" in shown.html and "latency in µs, from row to column" in shown.text
    assert mt.show(probe()).text == repr(probe())
