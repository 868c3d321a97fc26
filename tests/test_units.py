"""Sizes, durations and counts read as one says them."""

import math

import pytest

from meshtrain import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-4, "250 µs"),
        (3.4, "3.4 s"),
        (59.6, "59.6 s"),
        (119.6, "2 min 0 s"),
        (245, "4 min 5 s"),
        (3599.9, "1 h 0 min"),
        (3600 * 6 + 7 * 60, "6 h 7 min"),
        (3600 * 120, "5.0 days"),
        (math.inf, "inf days"),
    ],
)
def test_durations(seconds, text):
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (3.2 * 2**30, "3.2 GiB"),
        (5e15, "4,547 TiB"),
    ],
)
def test_sizes(nbytes, text):
    assert units.size(nbytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (1234, "1.23 k"), (8.03e9, "8.03 B"), (2e12, "2 T")]
)
def test_counts(number, text):
    assert units.count(number) == text
