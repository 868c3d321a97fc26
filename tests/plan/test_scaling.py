import pytest

from meshtrain.config import replaced
from meshtrain.plan import named, scaling


def test_weak_scaling_keeps_the_share_of_a_rank_and_reaches_16384_devices(llama_8b):
    config = llama_8b({"data": 2, "tensor": 8})
    points = scaling.weak(config, named("h100", 16))
    assert [p.devices for p in points] == [16 * 2**i for i in range(11)]
    shares = {
        p.plan.config.train.global_batch_size // p.plan.config.mesh.data for p in points
    }
    assert shares == {32}
    assert points[0].efficiency == 1.0 and all(
        0.5 < p.efficiency <= 1.001 for p in points
    )


def test_strong_scaling_keeps_the_batch_and_loses_efficiency(llama_8b):
    points = scaling.strong(llama_8b({"data": 2, "tensor": 8}), named("h100", 16))
    assert {p.plan.config.train.global_batch_size for p in points} == {64}
    assert points[-1].devices == 16 * 32  # a sequence for each data rank
    efficiencies = [p.efficiency for p in points]
    assert efficiencies[0] == 1.0 and efficiencies == sorted(efficiencies, reverse=True)
    assert points[-1].plan.seconds < points[0].plan.seconds


def test_on_more_devices_a_microbatch_keeps_its_rows_as_long_as_there_are_so_many(
    llama_8b,
):
    config = replaced(
        llama_8b({"data": 2, "tensor": 8}),
        parallel={"microbatches": 8},
        train={"global_batch_size": 60, "uneven_batch": "pad"},
    )
    points = scaling.strong(config, named("h100", 16))
    assert [p.plan.config.parallel.microbatches for p in points] == [8, 4, 2, 1, 1]


def test_the_serial_share_bounds_the_speed_up(llama_8b):
    points = scaling.strong(llama_8b({"data": 2, "tensor": 8}), named("h100", 16))
    speed_up = points[0].plan.seconds / points[-1].plan.seconds
    assert 0 < points[0].serial < 1
    assert speed_up <= 1 / points[0].serial


def test_a_cluster_grows_only_when_it_must(llama_8b):
    cluster = named("h100", 64)
    assert scaling.grown(cluster, 16) is cluster
    assert scaling.grown(cluster, 128).devices == 128
    assert scaling.grown(cluster, 128).group(128, 1).bytes_per_second == pytest.approx(
        cluster.group(64, 1).bytes_per_second
    )
