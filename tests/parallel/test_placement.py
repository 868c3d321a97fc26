"""Where weights lie, in numbers: what splits which axis, and what each device holds of it."""

import pytest

from meshtrain.config import load
from meshtrain.parallel.placement import splits


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"kv_heads": ("tensor",), "vocab": ("pipeline", "tensor")}),
        ({"parallel": {"vocab": "edge"}}, {"kv_heads": ("tensor",), "vocab": ("tensor",)}),
        ({"model": {"heads": 8, "kv_heads": 2}, "mesh": {"tensor": 4}}, {"kv_heads": ()}),
    ],
)
def test_named_dimensions_lie_on_the_axes_that_divide_them(sections, expected):
    config = load(sections)
    table = splits(config.model, config.mesh, config.parallel.vocab)
    assert {name: table[name] for name in expected} == expected
    assert (table["layers"], table["heads"], table["mlp"]) == (("pipeline",), ("tensor",), ("tensor",))
