"""The canonical tree and the live one hold the same numbers; what cannot be divided is padded with zeros, and said."""

import math
import re

import jax
import numpy as np
import pytest
from short_runs import canonical_numbers, place, train

from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.model.weights import weights
from meshtrain.parallel import placement
from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.placement import Placed, notes


def configuration(
    mesh: tuple[int, int, int], family: str = "gpt2", zero: int = 1, **sections: dict
) -> Config:
    model = {
        "layers": 5,
        "d_model": 42,
        "heads": 6,
        "kv_heads": 2,
        "d_ff": 50,
        "vocab_size": 257,
    }
    return load(
        {
            "model": {**model, "family": family, **sections.get("model", {})},
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {
                "zero_stage": zero,
                "microbatches": 4,
                **sections.get("parallel", {}),
            },
            "train": {"global_batch_size": 16, "sequence_length": 8},
        }
    )


def layout(*arguments, **sections) -> Layout:
    config = configuration(*arguments, **sections)
    return Layout(config, make_mesh(config))


def leaves(layout: Layout) -> dict[str, Placed]:
    flat = layout.flat
    return {leaf.name: leaf for leaf in flat}


MESHES = [(1, 1, 1), (4, 1, 1), (2, 2, 2), (1, 2, 4), (2, 1, 4), (4, 2, 1)]
SCHEDULES = [
    {"schedule": "interleaved", "virtual_stages": 2},
    {"schedule": "v_1f1b"},
    {"layer_split": [0, 2, 3, 0]},
]
PLACES = (
    [(mesh, {}) for mesh in MESHES]
    + [((1, 1, 2), s) for s in SCHEDULES[:2]]
    + [((2, 1, 4), SCHEDULES[2])]
)


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "parallel"), PLACES)
def test_canonical_numbers_come_back_from_every_mesh_and_schedule(mesh, parallel):
    there = layout(mesh, parallel=parallel)
    numbers = canonical_numbers(there)
    live = there.live(numbers)
    jax.tree.map(np.testing.assert_array_equal, there.canonical(live), numbers)
    assert jax.tree.map(lambda x: x.shape, live) == there.map(lambda leaf: leaf.padded)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b), live, place(there, numbers)
    )  # laid out by hand


@pytest.mark.parametrize(
    ("mesh", "parallel", "places"),
    [
        ((1, 1, 1), {}, [[[0, 1, 2, 3, 4]]]),
        ((1, 1, 2), {}, [[[0, 1, 2]], [[3, 4, -1]]]),
        ((1, 1, 4), {}, [[[0, 1]], [[2, -1]], [[3, -1]], [[4, -1]]]),
        ((1, 1, 2), SCHEDULES[0], [[[0, 1], [3, -1]], [[2, -1], [4, -1]]]),
        ((1, 1, 2), SCHEDULES[1], [[[0, 1], [4, -1]], [[2, -1], [3, -1]]]),
        (
            (1, 1, 4),
            SCHEDULES[2],
            [[[-1, -1, -1]], [[0, 1, -1]], [[2, 3, 4]], [[-1, -1, -1]]],
        ),
    ],
)
def test_layers_lie_where_the_schedule_puts_their_stage(mesh, parallel, places):
    assert layout(mesh, parallel=parallel).layer_at.tolist() == places


def test_more_layers_than_stages_divide_go_to_the_first_stages():
    assert layout((1, 1, 4), model={"layers": 7}).stages.counts == (2, 2, 2, 1)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_leaf_divides_over_its_axes(mesh):
    there = layout(mesh)
    for leaf in leaves(there).values():
        shard = jax.NamedSharding(there.mesh, shard_spec(leaf)).shard_shape(
            leaf.padded
        )  # raises where it does not
        used = mesh[0] if leaf.zero_dim is not None else 1
        used *= math.prod(there.mesh.shape[axis] for over in leaf.over for axis in over)
        assert math.prod(shard) * used == math.prod(leaf.padded)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_is_silently_replicated_over_data(mesh, zero):
    there = layout(mesh, zero=zero)
    told = " ".join(notes(there.config))
    for leaf in leaves(there).values():
        assert (
            mesh[0] == 1
            or leaf.zero_dim is not None
            or f"{leaf.name} {leaf.shape} cannot be sharded" in told
        )
        assert (
            leaf.padded == leaf.whole
            or f"{leaf.name} {leaf.shape} is padded to {leaf.padded}" in told
        )


def test_zero_splits_the_longest_dimension_that_data_divides():
    found = leaves(
        layout((4, 1, 1), family="llama", model={"d_model": 48, "d_ff": 100})
    )
    assert (
        found["blocks.mlp.up"].zero_dim == 2 and found["blocks.mlp.down"].zero_dim == 1
    )
    assert (
        found["blocks.attention.q"].zero_dim == 1
        and found["head.norm.scale"].zero_dim == 0
    )


def test_a_weight_that_is_split_along_the_axis_of_tokens_is_neither_summed_nor_sharded_over_it():
    up = next(
        weight
        for weight in weights(configuration((4, 2, 1)).model)
        if weight.name == "blocks.mlp.up"
    )
    mesh = configuration((4, 2, 1)).mesh
    along, over = (
        placement.place(up, {"mlp": (axis,)}, mesh, 5, zero=True)
        for axis in ("tensor", "data")
    )
    assert (along.zero_axes, along.zero_dim, along.shard_over[2]) == (
        ("data",),
        1,
        ("tensor",),
    )
    assert (over.zero_axes, over.zero_dim, over.shard_over[2]) == ((), None, ("data",))
    assert over.on_rank() == over.on_device()


def test_leaf_that_data_does_not_divide_is_padded_where_it_costs_least():
    there = layout((4, 1, 1))  # 42 wide, 257 tokens
    embedding = leaves(there)["embedding.tokens"]
    assert (embedding.zero_dim, embedding.padded) == (0, (260, 42))
    (note,) = [
        note for note in notes(there.config) if note.startswith("embedding.tokens")
    ]
    assert re.fullmatch(
        r"embedding\.tokens \(257, 42\) .* padded to \(260, 42\) .* data 4 .*: 1\.2% more\.",
        note,
    )


def test_leaf_that_cannot_be_sharded_is_told_with_its_bytes():
    # up_bias: 25 numbers a tensor rank, which data 4 does not divide
    there = layout((4, 2, 1))
    assert leaves(there)["blocks.mlp.up_bias"].zero_dim is None
    (note,) = [
        note for note in notes(there.config) if note.startswith("blocks.mlp.up_bias")
    ]
    assert "cannot be sharded over data 4: 1,000 bytes" in note


def test_without_zero_or_data_ranks_nothing_is_sharded_over_data():
    for there in (layout((4, 2, 1), zero=0), layout((1, 2, 4), zero=3)):
        assert all(leaf.zero_dim is None for leaf in leaves(there).values())
        assert not any(" data " in note for note in notes(there.config))


def test_key_value_heads_that_tensor_does_not_divide_are_whole_on_every_rank():
    found = leaves(layout((1, 2, 1), model={"kv_heads": 3}))
    assert found["blocks.attention.k"].over == (("pipeline",), (), (), ())
    assert found["blocks.attention.q"].over == (("pipeline",), (), ("tensor",), ())
    assert found["blocks.attention.k"].replicated == ("tensor",)


def test_vocabulary_is_padded_over_all_that_share_it():
    assert leaves(layout((1, 2, 4)))["embedding.tokens"].whole == (264, 42)
    edge = leaves(layout((1, 2, 4), parallel={"vocab": "edge"}))["embedding.tokens"]
    assert (edge.whole, edge.replicated) == ((258, 42), ("pipeline",))


def test_decay_is_for_matrices_alone():
    assert {
        name for name, leaf in leaves(layout((1, 1, 1))).items() if not leaf.decayed
    } == {
        *(
            f"blocks.{part}_norm.{n}"
            for part in ("attention", "mlp")
            for n in ("scale", "bias")
        ),
        *(f"blocks.attention.{n}_bias" for n in ("q", "k", "v", "out")),
        "blocks.mlp.up_bias",
        "blocks.mlp.down_bias",
        "head.norm.scale",
        "head.norm.bias",
    }


def test_parameters_are_counted_without_padding():
    assert (
        layout((2, 1, 4)).parameters
        == layout((1, 1, 1)).parameters
        == sum(x.size for x in jax.tree.leaves(canonical_numbers(layout((1, 1, 1)))))
    )


@pytest.mark.thorough
def test_padding_is_still_zero_after_training():
    config = configuration((2, 2, 2), zero=3)
    _, program, (_, last) = train(config, 3)
    full = place(
        program.layout, program.layout.map(lambda leaf: np.ones(leaf.shape, np.float32))
    )
    padding = jax.tree.map(
        lambda used, x: np.abs(x[np.asarray(used) == 0]).sum(), full, last.params
    )
    assert sum(jax.tree.leaves(padding)) == 0
    assert (
        sum(int((np.asarray(used) == 0).sum()) for used in jax.tree.leaves(full)) > 9000
    )
