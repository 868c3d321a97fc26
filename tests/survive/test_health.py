"""Devices that keep or compute wrong bits are found, and the rank is named where it can be known."""

import re
import time

import jax
import numpy as np
import pytest
from island_runs import program
from short_runs import canonical_numbers, place
from supervised import supervised

from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.offload import HOST
from meshtrain.run.processes import SickDevice
from meshtrain.survive.health import Health, checksum, differing
from meshtrain.survive.heartbeat import Heartbeat
from meshtrain.survive.injector import _changed_at

NAMES = ["embedding", "norm"]


class Holder:
    """As far as `_changed_at` looks at a state."""

    def __init__(self, params):
        self.params = params

    def _replace(self, params):
        return Holder(params)


def healthy(tmp_path, **mesh):
    """(the health of a mesh, parameters on it)."""
    model = {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 64}
    config = load({"model": model, "mesh": mesh, "parallel": {"zero_stage": 0}})
    layout = Layout(config, make_mesh(config))
    beat = Heartbeat()
    beat.supervised = supervised(tmp_path)
    params = place(layout, canonical_numbers(layout))
    return Health(layout.mesh, params, beat), params, beat


def flipped(params, bit: int, chosen=lambda leaf: True):
    """One bit of one number, on one device."""

    def flip(part: np.ndarray) -> None:
        part.reshape(-1).view(np.uint32)[-1] ^= np.uint32(1 << bit)

    return _changed_at(Holder(params), chosen, flip).params


@pytest.mark.parametrize(
    "mesh", [{"data": 4}, {"data": 2, "tensor": 2, "pipeline": 2}, {"tensor": 2}]
)
@pytest.mark.parametrize("bit", [0, 20, 31])
def test_a_bit_that_flips_in_what_several_devices_hold_is_found(tmp_path, mesh, bit):
    health, params, _ = healthy(tmp_path, **mesh)
    health.check_copies(params)
    copies = lambda leaf: leaf.sharding.is_fully_replicated
    with pytest.raises(SickDevice, match=r"^rank 0 holds other bits of \w+\.") as found:
        health.check_copies(flipped(params, bit, copies))
    assert found.value.ranks == [0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        ({"data": 2, "islands": 2, "tensor": 2}, {"sync": {"every": 2}}),
        ({"data": 2}, {"lora": {"rank": 2}, "precision": {"compute": "bfloat16"}}),
        (
            {"data": 2},
            {
                "parallel": {"offload_optimizer": True},
                "precision": {"compute": "float16"},
            },
        ),
    ],
)
def test_all_of_a_state_is_compared_but_what_is_in_host_memory(mesh, sections):
    built = program(mesh, **sections)
    state = built.init()
    health = Health(built.mesh, built.state_shapes, Heartbeat())
    health.check_copies(state)
    groups = [groups for groups, _ in health._copied.values()]
    for number, leaf in enumerate(leaves := jax.tree.leaves(state)):
        if number not in health._copied:
            alone = (
                len({str(shard.index) for shard in leaf.addressable_shards})
                == built.mesh.size
            )
            assert alone or leaf.sharding.memory_kind == HOST
            continue
        shards = [shard.data for shard in leaf.addressable_shards]
        shards[-1] = shards[-1] + 1
        other = jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, shards
        )
        with pytest.raises(SickDevice, match="bits of "):
            health.check_copies(
                jax.tree.unflatten(
                    jax.tree.structure(state),
                    [*leaves[:number], other, *leaves[number + 1 :]],
                )
            )
    assert groups


@pytest.mark.parametrize(
    ("group", "sums", "ranks", "says", "blamed"),
    [
        ([0, 1, 2], [7, 7, 7], [0, 1, 2], None, None),
        ([0, 1, 2], [7, 8, 7], [0, 1, 2], r"rank 1 holds .*embedding than", [1]),
        # two of four are no majority
        (
            [0, 1, 2, 3],
            [7, 8, 7, 9],
            [0, 1, 2, 3],
            "ranks 0 and 1 and 2 and 3 hold different",
            None,
        ),
        (
            [0, 1, 2, 3, 4],
            [7, 8, 7, 9, 7],
            [0, 1, 2, 3, 4],
            "ranks 1, 3 hold other bits",
            [1, 3],
        ),
        ([0, 1], [7, 8], [0, 1], r"ranks 0 and 1 .*embedding", None),
        # Whichever device of it
        ([0, 1], [7, 8], [3, 3], "rank 3 holds other bits", [3]),
        (
            [0, 1, 2, 3],
            [7, 7, 8, 8],
            [0, 0, 1, 1],
            "ranks 0 and 1 hold different",
            None,
        ),
    ],
)
def test_the_majority_names_who_is_wrong(group, sums, ranks, says, blamed):
    found = differing(
        [[group], []],
        {place: [value, place] for place, value in enumerate(sums)},
        NAMES,
        ranks,
    )
    if says is None:
        assert found is None
    else:
        assert re.match(says, found[0]) and found[1] == blamed


def test_who_is_known_to_be_wrong_is_named_though_of_others_it_is_not_known():
    sums = {0: [1, 1], 1: [2, 1], 2: [1, 5], 3: [1, 1]}
    sentence, ranks = differing([[[0, 1]], [[0, 1, 2, 3]]], sums, NAMES, [0, 1, 2, 3])
    assert ranks == [2] and "norm" in sentence


def test_a_product_is_checked_bit_for_bit_and_its_time_told(tmp_path, monkeypatch):
    health, params, beat = healthy(tmp_path, data=2)
    health.check_product(params)
    assert beat.matmul["bits"] == 0 and 0 < beat.matmul["seconds"] < 5
    told, beat.matmul = beat.matmul, None
    health.check_product(params)
    assert beat.matmul is None  # not due
    beat.supervised, health._due = None, 0.0
    health.check_product(params)
    assert beat.matmul is None  # no supervisor
    beat.supervised = supervised(tmp_path)
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    multiply = health._multiply
    health._multiply = lambda a, b: wrong_at(multiply(a, b), 1)
    with pytest.raises(
        SickDevice, match=r"^a device of rank 0 multiplies wrongly: 1 bits"
    ) as found:
        health.check_product(params)
    assert found.value.ranks == [0] and beat.matmul["bits"] == 1 and told["bits"] == 0


def wrong_at(product: jax.Array, device: int) -> jax.Array:
    """One bit of what the device has."""
    found = np.array(product)
    found[device].view(np.uint32)[5, 5] ^= 1 << 13
    return jax.device_put(found, product.sharding)


SIZES = [(n, "float32") for n in (1, 65535, 65536, 200_001, 65536 * 300 + 7)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "dtype"), [*SIZES, (300, "bfloat16"), (300, "float16"), (300, "int32")]
)
def test_a_checksum_is_the_sum_of_all_bits(size, dtype):
    x = jax.numpy.asarray(
        100 * np.random.default_rng(size).standard_normal(size, np.float32)
    ).astype(dtype)
    bits = np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")
    assert int(jax.jit(checksum)(x)) == int(bits.sum(dtype=np.uint32))
