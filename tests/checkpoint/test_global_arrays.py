"""Names and shapes that no layout, Optax chain or optimizer of a layout changes; bits that a round trip keeps."""

import jax
import numpy as np
import pytest
from checkpoint_runs import LAYOUTS, build_for, config, numbered, program, same

from meshtrain.checkpoint import arrays
from meshtrain.checkpoint.global_arrays import GlobalArrays


def on_the_devices(canonical, state):
    """As several processes do it."""
    return canonical.arrays(state)


def on_the_host(canonical, state):
    found = canonical.prepare(state)
    return found() if callable(found) else found


def where(names):
    """What a manifest would say, as far as it tells where they lie."""
    return {name: {} for name in names}


def records(built):
    return {e.name: (e.shape, e.live.dtype) for e in GlobalArrays(built).entries}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_shapes_and_dtypes_are_those_of_one_device(layout):
    assert records(program(layout)) == records(program())


def test_names_do_not_depend_on_the_place_in_an_optax_chain():
    assert records(build_for(config(optimizer={"grad_clip": 0.0}))) == records(
        program()
    )


def test_names_are_the_models_own():
    names = records(program())
    assert names["params.blocks.attention.q"][0] == (5, 24, 6, 4)
    assert names["optimizer.mu.blocks.attention.q"][0] == (5, 24, 6, 4)
    assert {"step", "optimizer.count", "optimizer.nu.head.weight"} <= names.keys()
    assert "scale.value" in records(build_for(config(precision={"compute": "float16"})))


# Arrays of Muon's part of an optimizer state, of layers and of the rest, as Optax's own state has had them.
COEFFICIENTS = {
    "optimizer.layers.inner_states.muon.inner_state.ns_coeffs": (5, 3),
    "optimizer.edge.inner_states.muon.inner_state.ns_coeffs": (3,),
}


@pytest.mark.thorough
def test_a_muon_state_that_has_optaxs_coefficients_is_read(tmp_path):
    """Checkpoints of earlier versions hold them; momentum, moments and counts have kept their names and shapes."""
    built = build_for(config(optimizer={"name": "muon"}))
    canonical = GlobalArrays(built)
    names = {e.name for e in canonical.entries}
    for part in ("layers", "edge"):
        inner = f"optimizer.{part}.inner_states"
        assert {
            f"{inner}.{kind}.inner_state.{count}"
            for kind in ("muon", "adam")
            for count in ("count", "count-2")
        } < names
    assert {
        "optimizer.layers.inner_states.muon.inner_state.mu.blocks.attention.q",
        "optimizer.layers.inner_states.adam.inner_state.nu.blocks.mlp_norm.scale",
        "optimizer.edge.inner_states.adam.inner_state.mu.head.weight",
    } < names
    assert not names & COEFFICIENTS.keys()
    state = numbered(built)
    saved = canonical.arrays(state)
    saved |= {name: jax.numpy.ones(shape) for name, shape in COEFFICIENTS.items()}
    arrays.write(tmp_path / "arrays", saved).result()
    assert same(GlobalArrays(built).state(tmp_path, where(saved)), state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        *(pytest.param(o, marks=pytest.mark.thorough) for o in ("adafactor", "muon")),
        *(pytest.param(o, marks=pytest.mark.slow) for o in ("sgd", "lion")),
    ],
)
def test_a_state_of_every_optimizer_survives_a_change_of_layout(optimizer, tmp_path):
    """One device -> interleaved stages with ZeRO and padding -> canonical again, bit for bit."""
    there = {"optimizer": {"name": optimizer}, "precision": {"compute": "float16"}}
    layouts = "one device", "data 2, pipeline 2, interleaved, ZeRO-1"
    one, other = (build_for(config(layout=layout, **there)) for layout in layouts)
    canonical = GlobalArrays(one)
    before = {
        e.name: np.asarray(x)
        for e, x in zip(canonical.entries, jax.tree.leaves(numbered(one)), strict=True)
    }
    arrays.write(
        tmp_path / "arrays", {name: jax.device_put(x) for name, x in before.items()}
    ).result()
    moved = GlobalArrays(other).state(tmp_path, where(before))
    for x, wanted in zip(
        jax.tree.leaves(moved), jax.tree.leaves(other.state_shapes), strict=True
    ):
        assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    after = GlobalArrays(other).arrays(moved)
    assert after.keys() == before.keys()
    for name, x in before.items():
        assert np.array_equal(np.asarray(after[name]), x), name


def test_a_loss_scale_that_the_checkpoint_lacks_starts_anew(tmp_path):
    state = numbered(program())
    arrays.write(tmp_path / "arrays", GlobalArrays(program()).arrays(state)).result()
    half = build_for(config(precision={"compute": "float16", "loss_scale": 1024.0}))
    moved = GlobalArrays(half).state(tmp_path, where(records(program())))
    assert float(moved.scale.value) == 1024.0
    assert int(moved.step) == 3
    # a step is given all of them to use up
    buffers = [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(moved)
        for shard in x.addressable_shards
    ]
    assert len(set(buffers)) == len(buffers)


@pytest.mark.thorough
@pytest.mark.parametrize("way", [on_the_devices, on_the_host])
def test_on_an_accelerator_rearranged_copies_wait_for_the_disk_in_host_memory(
    way, tmp_path, monkeypatch
):
    built = program("data 2, pipeline 2, interleaved, ZeRO-1")
    monkeypatch.setattr(
        "meshtrain.checkpoint.global_arrays.platform", lambda mesh: "gpu"
    )
    state = built.init()
    copies = way(GlobalArrays(built), state)
    assert copies["params.blocks.mlp.gate"].sharding.memory_kind == "pinned_host"
    arrays.write(tmp_path / "arrays", copies).result()
    assert same(GlobalArrays(built).state(tmp_path, where(copies)), state)


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        pytest.param("data 8, ZeRO-3", on_the_devices, marks=pytest.mark.thorough),
        pytest.param(
            "data 2, pipeline 2, interleaved, ZeRO-1",
            on_the_host,
            marks=pytest.mark.thorough,
        ),
        pytest.param("data 8, ZeRO-3", on_the_host, marks=pytest.mark.slow),
        pytest.param(
            "data 2, pipeline 2, interleaved, ZeRO-1",
            on_the_devices,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_optimizer_state_in_host_memory_goes_and_comes_back_there(
    layout, way, tmp_path
):
    built = build_for(config(layout=layout, parallel={"offload_optimizer": True}))
    state = built.init()
    copies = way(GlobalArrays(built), state)
    arrays.write(tmp_path / "arrays", copies).result()
    back = GlobalArrays(built).state(tmp_path, where(copies))
    assert same(back, state)
    assert (
        back.optimizer[1][0].mu["blocks"]["mlp"]["gate"].sharding.memory_kind
        == "pinned_host"
    )
    assert [x.sharding for x in jax.tree.leaves(back)] == [
        x.sharding for x in jax.tree.leaves(built.state_shapes)
    ]
