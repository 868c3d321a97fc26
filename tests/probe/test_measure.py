"""On four fake devices, with small arrays."""

import jax
import numpy as np
import pytest

from meshtrain.cluster.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    KINDS,
    PERMUTE,
    REDUCE_SCATTER,
)
from meshtrain.config import MeshConfig, load
from meshtrain.hlo import collectives as collectives_of
from meshtrain.mesh import make_mesh
from meshtrain.probe import clock, devices, judge, links, measure
from meshtrain.probe.figures import XLA, bus_factor

PAIR_SIZES = (2**10, 2**18)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(load({"mesh": {"data": 2, "pipeline": 2}}), jax.devices()[:4])


def sent(mesh, step, elements, rounds=8):
    """The collectives of a program that repeats a step on arrays of so many elements."""
    loop = links.repeated(step, rounds)
    manual = jax.shard_map(
        loop,
        mesh=mesh,
        in_specs=jax.P(mesh.axis_names),
        out_specs=jax.P(mesh.axis_names),
    )
    x = jax.ShapeDtypeStruct(
        (4 * elements,), "float32", sharding=links.Arrays(mesh).sharding
    )
    found = collectives_of(jax.jit(manual).lower(x).compile().as_text(), mesh)
    assert {c.times for c in found} == {rounds}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_program_sends_what_its_name_says_as_often_and_as_much(kind, mesh):
    nbytes = 2**12
    (one,) = sent(
        mesh,
        links._STEPS[kind]("pipeline", 2),
        nbytes // 8 if kind == ALL_GATHER else nbytes // 4,
    )
    assert one.axis == "pipeline" and one.kind == (
        "collective-permute" if kind == PERMUTE else kind
    )
    assert one.bytes == nbytes and one.sent == bus_factor(kind, 2) * nbytes


def test_in_a_permute_every_device_of_the_axis_sends_to_the_next(mesh):
    step = links._STEPS[PERMUTE]("pipeline", 2)
    manual = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=jax.P(mesh.axis_names),
        out_specs=jax.P(mesh.axis_names),
    )
    # Places in the mesh: data, then pipeline.
    assert jax.jit(manual)(jax.numpy.arange(4.0)).tolist() == [1, 0, 3, 2]


def test_all_of_data_is_measured_too_where_its_islands_have_several_devices():
    def groups(**sizes):
        return links.groups_of(make_mesh(load({"mesh": sizes}), jax.devices()[:4]))

    assert groups(data=4, islands=2) == ["island", "data", "island+data"]
    assert groups(data=4, islands=4) == ["island"] and groups(data=4) == ["data"]


def test_pairs_are_all_of_a_few_and_of_many_those_at_powers_of_two():
    assert len(links.partners(8)) == 8 * 7
    assert len(links.partners(64, every=True)) == 64 * 63
    many = links.partners(64)
    assert {(b - a) % 64 for a, b in many} == {1, 2, 4, 8, 16, 32, 63, 62, 60, 56, 48}
    assert {a for a, _ in many} == set(range(64))


@pytest.fixture(scope="module")
def bad_link(mesh):
    """What is measured while the link from device 1 to device 3 carries every message thirty times."""
    patch, honest = pytest.MonkeyPatch(), links.message
    # Devices as the planner numbers them are the first four, in their order.
    places = [list(mesh.devices.flat).index(device) for device in jax.devices()[:4]]

    def message(mesh, source, target):
        step = honest(mesh, source, target)
        if (source, target) != (places[1], places[3]):
            return step
        return lambda x: jax.lax.fori_loop(
            0, 30, lambda _, y: jax.lax.optimization_barrier(step(y)), x
        )

    patch.setattr(links, "message", message)
    # Others use the machine too.
    patch.setattr(judge, "STEADY", 1e9)
    told = []
    yield (
        measure.measure(
            mesh,
            measure.Wanted(("barrier", "pairs"), pair_sizes=PAIR_SIZES),
            told.append,
        ),
        told,
    )
    patch.undo()


@pytest.mark.thorough
def test_a_link_that_is_slow_in_the_machine_is_named(bad_link):
    found, _ = bad_link
    worst = judge.findings(found)[0]
    assert (worst.what, worst.devices) == ("pair", (1, 3))
    first, _, second = worst.sentence.partition(" to ")
    assert first.endswith("device 1 (data 1, pipeline 0)")
    assert second.startswith("device 3 (data 1, pipeline 1)")


@pytest.mark.thorough
def test_what_was_not_asked_for_is_left_out_and_what_comes_next_is_told(bad_link):
    found, told = bad_link
    assert found.barriers.keys() == {
        "data",
        "pipeline",
        "data+tensor+pipeline",
    } and all(found.barriers.values())
    assert (
        not found.collectives
        and found.devices is None
        and found.mesh == MeshConfig(data=2, pipeline=2)
    )
    assert told == ["barrier", "12 pairs of devices"]
    assert found.as_json().keys() & {"each_device", "pairs"} == {"pairs"}


@pytest.fixture
def job(monkeypatch):
    """Makes jobs that take the seconds given, one run after another, and note their names in `job.order`."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def made(*seconds, name="", rounds=1):
        taken = iter(seconds)

        def run():
            made.order.append(name)
            now[0] += next(taken)
            return 0

        return clock.Job(run, rounds)

    made.order = []
    return made


def test_medians_are_of_a_round_and_jobs_take_turns(job):
    jobs = [job(2, 2, 4, 90, name="a", rounds=2), job(1, 1, 1, 1, name="b", rounds=2)]
    found = clock.times(jobs, repeats=3, attempts=1)
    assert found.median.tolist() == [2.0, 0.5] and found.least.tolist() == [1.0, 0.5]
    assert found.spread.tolist() == [pytest.approx((47 - 3) / 4), 0.0]
    assert job.order == ["a", "b"] * 4


def test_times_that_vary_are_taken_again_and_the_steadier_count(job):
    # The first run compiles; then three repeats an attempt.
    assert clock.times([job(0, 1, 9, 5, 2, 2, 2)], repeats=3).median.tolist() == [2.0]
    assert clock.times([job(0, 1, 2, 3, 1, 9, 5)], repeats=3).median.tolist() == [2.0]
    # Steady at once.
    assert clock.own_times([job(0, *[4] * 7)]).median.tolist() == [4.0]


def test_products_neither_vanish_nor_overflow_in_any_dtype():
    x = np.random.default_rng(1).standard_normal((256, 256), np.float32)
    for dtype in devices.DTYPES:
        y = np.asarray(devices.products(jax.numpy.asarray(x, dtype)), np.float32)
        assert 0.1 < y.std() < 10, dtype


@pytest.mark.parametrize(
    ("machines", "data"),
    # of different sizes they make no rectangle
    [((0,) * 8, 1), ((0, 0, 1, 1, 2, 2, 3, 3), 4), ((0, 0, 0, 1, 1, 1, 1, 1), 1)],
)
def test_without_a_mesh_a_machines_devices_are_tensor_ranks(
    machines, data, monkeypatch
):
    monkeypatch.setattr(measure, "machines_of", lambda devices: machines)
    assert dict(measure.mesh_of(None).shape) == {
        "data": data,
        "tensor": 8 // data,
        "pipeline": 1,
    }


def test_each_device_is_measured_by_itself_and_with_all_others(mesh, monkeypatch):
    monkeypatch.setitem(devices.SIDES, "cpu", 128)
    monkeypatch.setitem(devices.ELEMENTS, "cpu", 2**16)
    found = measure.measure(mesh, measure.Wanted(("products",))).devices
    assert found.flops.shape == found.memory_bandwidth.shape == (4,)
    assert found.flops.min() > 1e7 and min(found.matmul.values()) > 1e7
    assert 1e7 < found.memory_rate < 1e13


def test_a_kind_has_the_programs_that_it_can_be_written_as():
    every = ("ring", "halving_doubling", "double_tree", "hierarchical")
    assert links.algorithms_of(ALL_REDUCE, 6, True, every) == [XLA, *every]
    assert links.algorithms_of(ALL_REDUCE, 6, False, every) == [XLA, *every[:3]]
    assert links.algorithms_of(REDUCE_SCATTER, 6, False, every) == [XLA, "ring"]
    assert links.algorithms_of(ALL_GATHER, 8, False, every) == [
        XLA,
        "ring",
        "halving_doubling",
    ]
    assert links.algorithms_of(PERMUTE, 8, False, every) == [XLA]


@pytest.mark.thorough
def test_programs_of_messages_are_measured_beside_what_xla_does():
    mesh = make_mesh(load({"mesh": {"data": 4, "islands": 2}}), jax.devices()[:4])
    asked = ("halving_doubling", "double_tree", "hierarchical")
    kinds = (ALL_REDUCE, REDUCE_SCATTER)
    wanted = measure.Wanted(("collectives",), kinds, algorithms=asked)
    measured = measure.measure(mesh, wanted)
    found = [(c.axis, c.kind, c.algorithm) for c in measured.collectives]
    both = [(ALL_REDUCE, by) for by in (XLA, *asked[:2])] + [
        (REDUCE_SCATTER, by) for by in (XLA, asked[0])
    ]
    # Over all of data it is the sums alone.
    over = {
        "island": both,
        "data": both,
        links.JOINED: [(ALL_REDUCE, by) for by in (XLA, *asked)],
    }
    assert found == [(axis, *one) for axis, ones in over.items() for one in ones]
    assert measured.mesh == MeshConfig(data=4, islands=2)
    for one in measured.collectives:
        assert len(one.sizes) == len(one.seconds) > 1 and min(one.seconds) > 0
    assert [entry["algorithm"] for entry in measured.as_json()["collectives"]] == [
        by for _, _, by in found
    ]


@pytest.mark.parametrize(("by", "times"), [("ring", 6), ("hierarchical", 4)])
def test_what_is_measured_of_a_program_is_its_messages(by, times):
    mesh = make_mesh(load({"mesh": {"data": 4, "islands": 2}}), jax.devices()[:4])
    found = sent(mesh, links.step_of(ALL_REDUCE, by, ("island", "data"), 4), 2**10)
    assert len(found) == times and {c.kind for c in found} == {"collective-permute"}
    assert sum(c.sent for c in found) == bus_factor(ALL_REDUCE, 4) * 2**12
