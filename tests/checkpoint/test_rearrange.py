"""Live to canonical and back, leaf by leaf, against the placement written out in tests/helpers/short_runs.py."""

import re

import jax
import numpy as np
import pytest
from checkpoint_runs import LAYOUTS, program
from short_runs import canonical_numbers, place

from meshtrain.checkpoint.canonical import Canonical
from meshtrain.checkpoint.rearrange import rearrangement
from meshtrain.parallel.layout import shard_spec


def batches(built):
    canonical = Canonical(built)
    entries = [e for e in canonical.entries if e.name.startswith("params.")]
    return canonical, list(canonical.batches(entries))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_leaf_comes_and_goes_bit_for_bit(layout):
    built = program(layout)
    numbers = canonical_numbers(built.layout)
    expected = {f"params.{leaf.name}": x for leaf, x in zip(leaves(built), jax.tree.leaves(numbers), strict=True)}
    live = {
        f"params.{leaf.name}": x
        for leaf, x in zip(leaves(built), jax.tree.leaves(place(built.layout, numbers)), strict=True)
    }
    canonical, found = batches(built)
    for batch in found:
        there = canonical.rearranged("canonical", batch, [live[e.name] for e in batch])
        back = canonical.rearranged("live", batch, there)
        for entry, x, y in zip(batch, there, back, strict=True):
            assert np.array_equal(np.asarray(x), expected[entry.name]), entry.name
            assert np.array_equal(np.asarray(y), np.asarray(live[entry.name])), entry.name
            assert y.sharding.is_equivalent_to(entry.live.sharding, y.ndim)


def test_one_device_has_nothing_to_rearrange_and_padded_stages_have():
    assert batches(program())[1] == []
    rearranged = {e.name for batch in batches(program("pipeline 4, gpipe"))[1] for e in batch}
    assert "params.blocks.mlp.gate" in rearranged


@pytest.mark.parametrize("layout", ["data 2, tensor 2, pipeline 2, ZeRO-1", "tensor 2, pipeline 2, V"])
def test_a_matrix_of_the_layers_is_never_whole_on_a_device(layout):
    """XLA, given shardings alone, replicates here; ours must have no all-gather, and nothing larger than a device's share."""
    built = program(layout)
    # 24 wide: every axis finds a place
    leaf = next(leaf for leaf in leaves(built) if leaf.name == "blocks.attention.q")
    way = rearrangement(built.layout, leaf, built.mesh)
    assert all(move.after is not None for move in way.moves)
    mapped = jax.shard_map(way.to_canonical, mesh=built.mesh, in_specs=shard_spec(leaf), out_specs=way.spec)
    live = jax.ShapeDtypeStruct(leaf.padded, np.float32, sharding=jax.NamedSharding(built.mesh, shard_spec(leaf)))
    text = jax.jit(mapped).lower(live).compile().as_text()
    assert "all-gather" not in text and "all-to-all" in text
    share = np.prod(live.sharding.shard_shape(live.shape))
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) <= share


def leaves(built):
    return built.layout.flat
