"""The shapes to run a job, and what it loses where it lies."""

import dataclasses
import math
import re
from types import SimpleNamespace

import pytest

from meshtrain.cluster.cluster import resized
from meshtrain.config import load
from meshtrain.plan.estimate import estimate
from meshtrain.plan.jobs.listed import Jobs, JobSpec
from meshtrain.plan.jobs.requests import JobShape, Speeds, requests, settings
from meshtrain.plan.jobs.requests import hours as job_hours
from meshtrain.plan.search import search


@pytest.fixture
def asked(cluster):
    """A function (job, goal, cluster) -> its request on 4 nodes of 4 devices, two nodes to a block."""

    def request(job: JobSpec, goal: str = "utilisation", on=None):
        made = on or cluster(4, 4, 2)
        (found,) = requests(Jobs(goal=goal, jobs=(job,)), made, Speeds(made))
        return found

    return request


def shapes(request) -> list[tuple[int, int]]:
    return [(shape.nodes, shape.each) for shape in request.shapes]


@pytest.mark.parametrize(
    "devices, expected",
    [
        (1, (1, 1)),
        (3, (1, 3)),
        (8, (2, 4)),
        (6, (2, 3)),
        (10, None),
        (12, (3, 4)),
        (13, None),
    ],
)
def test_devices_alone_take_the_fewest_nodes_that_share_them(asked, devices, expected):
    request = asked(JobSpec(name="bare", devices=devices))
    assert shapes(request) == ([expected] if expected else [])
    assert bool(request.reason) == (expected is None)


def test_a_config_may_be_spread_over_twice_the_nodes_but_tensor_stays_inside_one(
    asked, config
):
    job = JobSpec(name="run", config=str(config))
    assert shapes(asked(job)) == [(2, 4), (4, 2)]
    wide = dataclasses.replace(job, set=("mesh.data=2", "mesh.tensor=4"))
    assert shapes(asked(wide)) == [(2, 4)]
    wider = dataclasses.replace(job, set=("mesh.data=2", "mesh.tensor=8"))
    assert shapes(asked(wider)) == [(4, 4)]
    narrow = dataclasses.replace(job, set=("mesh.data=4", "mesh.tensor=1"))
    assert shapes(asked(narrow)) == [(1, 4), (2, 2)]
    for_four = dataclasses.replace(job, set=("survive.wanted=4",))
    assert shapes(asked(for_four)) == [(4, 2)]


@pytest.mark.parametrize(
    "job, reason",
    [
        (JobSpec(name="large", devices=32), r".* 32 devices, .*small has 16"),
        (JobSpec(name="odd", devices=13), "13 devices .* at most 4 nodes of 4"),
        (
            JobSpec(name="near", devices=12, together=True),
            "together .* 3 nodes of one block .* has 2",
        ),
    ],
)
def test_why_a_job_fits_nowhere(asked, job, reason):
    assert re.fullmatch(reason, asked(job).reason)


@pytest.mark.thorough
def test_a_config_that_does_not_fit_the_memory_says_by_how_much(asked, config):
    huge = (
        "model.layers=64",
        "model.d_model=8192",
        "mesh.data=2",
        "mesh.tensor=1",
        "train.global_batch_size=2",
    )
    request = asked(JobSpec(name="huge", config=str(config), set=huge))
    assert not request.shapes and re.search(
        r"more than .*73\.2 GiB .*h100", request.reason
    )
    fixed = asked(JobSpec(name="huge", config=str(config), set=huge, devices=2))
    assert not fixed.shapes and re.fullmatch(
        r"no layout on 2 devices .* 73\.2 GiB .*h100.*", fixed.reason
    )
    few = asked(JobSpec(name="few", config=str(config), set=huge, devices=3))
    assert not few.shapes and "no layout" in few.reason


def test_side_by_side_a_job_is_as_fast_as_its_plan_and_slower_across_blocks(
    cluster, config
):
    made = cluster(4, 4, 2, between=1)
    speeds, shape = Speeds(made), JobShape(2, 4, load(config))
    beside = speeds.plan_on(shape, [0, 1, 2, 3, 4, 5, 6, 7]).seconds
    assert (
        beside
        == estimate(shape.config, resized(made, 8)).seconds
        == speeds.side_by_side(shape).seconds
    )
    assert speeds.plan_on(shape, [8, 9, 10, 11, 12, 13, 14, 15]).seconds == beside
    assert speeds.plan_on(shape, [4, 5, 6, 7, 8, 9, 10, 11]).seconds > 1.1 * beside
    # As many devices on more nodes have less of the fast links.
    assert speeds.side_by_side(JobShape(4, 2, load(config))).seconds > beside


def test_the_block_with_the_fewest_of_its_devices_sets_the_pace(cluster, config):
    speeds, shape = (
        Speeds(cluster(6, 4, 3, between=1)),
        JobShape(4, 4, load(config, ["mesh.data=8"])),
    )
    # Nodes 1 and 2 with 3 and 4: two and two. Nodes 0 to 2 with 3: the one that is alone has all its traffic go out.
    even, uneven = speeds.plan_on(shape, range(4, 20)), speeds.plan_on(shape, range(16))
    assert uneven.seconds > even.seconds == speeds.side_by_side(shape).seconds


@pytest.mark.thorough
def test_of_several_numbers_each_has_its_own_layout(asked, config, cluster):
    job = JobSpec(name="any", config=str(config), any_of=(4, 8))
    request = asked(job, goal="throughput")
    assert [plan.devices for plan in request.plans] == [4, 8]
    best = search(load(config), resized(cluster(4, 4, 2), 8), 8, best=1).plans[0]
    assert request.plans[1].config == best.config
    # The fastest first.
    rates = [
        Speeds(cluster(4, 4, 2)).side_by_side(shape).tokens_per_second
        for shape in request.shapes
    ]
    assert rates == sorted(rates, reverse=True) and request.shapes[0].devices == 8


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given", [(), ("parallel.layer_split=[3, 5]", "mesh.pipeline=2", "mesh.data=2")]
)
def test_settings_make_the_config_that_was_found(asked, config, given):
    request = asked(JobSpec(name="run", config=str(config), set=given, devices=4))
    before, after = load(config, given), request.shapes[0].config
    assert before != after
    assert load(config, [*given, *settings(before, after)]) == load(after)


def test_a_job_takes_its_steps_at_the_plans_pace_unless_it_says_for_how_long():
    fast = SimpleNamespace(
        seconds=0.5, config=SimpleNamespace(train=SimpleNamespace(steps=14_400))
    )
    jobs = [
        SimpleNamespace(hours=hours, steps=steps)
        for hours, steps in ((None, 7_200), (None, None), (3, 7_200))
    ]
    assert [job_hours(job, fast) for job in jobs] == [1, 2, 3] and job_hours(
        jobs[0], None
    ) == math.inf
