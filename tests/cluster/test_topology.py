"""Shapes of networks against messages that are routed link by link here, and against figures worked out by hand."""

import collections
import itertools
import math
from dataclasses import replace

import pytest

from meshtrain.cluster.algorithms import (
    ALGORITHMS,
    ALL_GATHER,
    ALL_REDUCE,
    KINDS,
    PERMUTE,
    best,
)
from meshtrain.cluster.topology import Torus
from meshtrain.config import MeshConfig
from meshtrain.plan import load_cluster

SHAPES = [(8,), (3, 5), (4, 2, 6), (2, 2, 2)]
LATENCY, W = 1e-6, 600e9


def neighbours(dimensions, place):
    """Places one link away, with the link's (dimension, direction)."""
    coordinates = list(itertools.product(*map(range, dimensions)))[place]
    for d, length in enumerate(dimensions):
        for step in {1, -1} if length > 2 else {1} if length == 2 else set():
            there = list(coordinates)
            there[d] = (there[d] + step) % length
            yield (
                sum(x * math.prod(dimensions[i + 1 :]) for i, x in enumerate(there)),
                (d, step),
            )


def distances(dimensions, start):
    found, todo = {start: 0}, collections.deque([start])
    while todo:
        at = todo.popleft()
        for there, _ in neighbours(dimensions, at):
            if there not in found:
                found[there] = found[at] + 1
                todo.append(there)
    return found


@pytest.mark.parametrize("dimensions", SHAPES)
def test_hops_are_those_of_the_shortest_way(dimensions):
    torus = Torus(dimensions)
    for start in (0, torus.size // 2, torus.size - 1):
        found = distances(dimensions, start)
        assert [torus.hops(start, b) for b in range(torus.size)] == [
            found[b] for b in range(torus.size)
        ]
    assert torus.links == len(list(neighbours(dimensions, 0)))


@pytest.mark.parametrize(
    ("dimensions", "links"),
    [((8,), 2), ((4, 2, 6), 16), ((2, 2, 2), 4), ((4, 4, 8), 32)],
)
def test_bisection_is_the_links_that_the_halves_have(dimensions, links):
    """A ring is cut twice. 4 x 4 x 8: 16 rings of 8, each cut twice; a cube of 8: 4 edges."""
    torus, d = Torus(dimensions), dimensions.index(max(dimensions))
    coordinates = list(itertools.product(*map(range, dimensions)))
    half = {i for i, at in enumerate(coordinates) if at[d] < dimensions[d] // 2}
    assert (
        torus.bisection
        == links
        == sum(
            there not in half for i in half for there, _ in neighbours(dimensions, i)
        )
    )


def loads(length, messages):
    """The busiest wire of a ring of `length` (both directions of it count by themselves) and the longest way, when each
    message goes the shorter way around, half of it each way where both are as long.
    """
    busy, longest = collections.Counter(), 0
    for a, b in messages:
        right = (b - a) % length
        longest = max(longest, min(right, length - right))
        for share, step, far in ((0.5, 1, right), (0.5, -1, length - right)):
            if 2 * right != length or length == 2:
                share = float(2 * far < length or (length == 2 and step == 1))
            for i in range(far):
                busy[(a + step * i) % length, step] += share
    return max(busy.values()), longest


@pytest.mark.parametrize(
    ("length", "members", "apart"),
    [(8, 8, 1), (8, 4, 2), (16, 4, 2), (16, 4, 1), (12, 4, 1), (8, 2, 1), (2, 2, 1)],
)
def test_messages_of_rings_and_butterflies_share_as_many_wires_as_counted(
    length, members, apart
):
    (run,) = Torus((length,)).runs(members, apart)
    assert run == (members, apart, length)
    block = members * apart
    firsts = [
        begin + i for begin in range(0, length - block + 1, block) for i in range(apart)
    ]
    groups = [[first + apart * m for m in range(members)] for first in firsts]
    # Out over every other member, and back over those between.
    rings = groups if run.closed else [g[::2] + g[1::2][::-1] for g in groups]
    there = [
        (a, b)
        for ring in rings
        for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]
    back = [(b, a) for a, b in there] if run.closed else []
    busiest, longest = loads(length, there + back)
    assert (2 if run.closed else 1) / busiest == run.links
    assert longest == run.ring_hops
    for step, partners in zip(
        range(int(math.log2(members))), run.partners, strict=True
    ):
        assert (
            loads(
                length,
                [(g[m], g[m ^ (1 << step)]) for g in groups for m in range(members)],
            )[::-1]
            == partners
        )


def test_eight_places_of_a_cube_are_eight_hops_around_by_gray_code_and_fourteen_by_number():
    cube = Torus((2, 2, 2))
    for order, hops in (([i ^ (i >> 1) for i in range(8)], 8), (list(range(8)), 14)):
        assert (
            sum(
                cube.hops(a, b)
                for a, b in zip(order, [*order[1:], order[0]], strict=True)
            )
            == hops
        )


FILE = """
nodes: {nodes}
devices_per_node: {per_node}
accelerator: {{name: {accelerator}, efficiency: {{link: 1.0}}}}
{more}
links: {{{links}}}
"""


def cluster(path, links, more="", nodes=32, per_node=4, accelerator="tpu-v5p"):
    text = FILE.format(
        nodes=nodes, per_node=per_node, accelerator=accelerator, more=more, links=links
    )
    (path / "c.yaml").write_text(text)
    return load_cluster(path / "c.yaml")


@pytest.fixture
def torus(tmp_path):
    """4 x 4 x 8: six links a device, of 100 GB/s each."""
    node = f"node: {{devices: 128, latency: {LATENCY}, bandwidth: 600}}"
    return cluster(tmp_path, node, "topology: torus\ndimensions: [4, 4, 8]")


@pytest.mark.parametrize(
    ("size", "stride", "links", "steps"),
    [
        # (links of 100 GB/s that rings of the group fill, steps times hops)
        (8, 1, 2, 7),  # a whole dimension, both ways
        (4, 1, 1, 6),  # half of it: folded, two hops a step
        (2, 1, 1, 1),
        (4, 8, 2, 3),
        (4, 2, 1, 6),  # every second one all around, and two groups share the ring
        (16, 8, 4, 6),
        (128, 1, 6, 13),  # all links
    ],
)
def test_rings_on_a_torus_fill_the_links_of_their_dimensions(
    torus, size, stride, links, steps
):
    group, nbytes = torus.group(size, stride), 1e9
    expected = steps * LATENCY + nbytes * (size - 1) / size / (links * 100e9)
    assert ALGORITHMS["ring"](ALL_GATHER, group, nbytes) == pytest.approx(expected)
    assert ALGORITHMS["ring"](ALL_REDUCE, group, nbytes) == pytest.approx(2 * expected)


def test_a_message_on_a_torus_has_one_link_and_shares_it_with_those_that_start_between(
    torus,
):
    """8 stages, 16 apart: each is one of 16 along the last two dimensions, so that a message takes one hop."""
    assert best(PERMUTE, torus.group(4, 32), 1e9).seconds == pytest.approx(
        LATENCY + 1e9 / 100e9
    )
    assert best(PERMUTE, torus.group(4, 2), 1e9).seconds == pytest.approx(
        2 * LATENCY + 2 * 1e9 / 100e9
    )


def test_far_partners_make_the_butterfly_slow_on_a_ring_of_a_torus(torus):
    """Of 8 around: partners 1, 2, 4 away send S/2, S/4, S/8 with 1, 2 and 4/2 on the busiest wire: 1.25 S over one wire
    of 100 GB/s.
    """
    many = ALGORITHMS["butterfly"](ALL_GATHER, torus.group(8, 1), 1e12)
    assert many == pytest.approx(7 * LATENCY + 1.25e12 / 100e9)
    assert best(ALL_GATHER, torus.group(8, 1), 1e12).algorithm == "ring"


@pytest.fixture
def cube(tmp_path):
    node = f"node: {{devices: 8, latency: {LATENCY}, bandwidth: 600}}"
    return cluster(tmp_path, node, "topology: hypercube", nodes=2)


def test_on_a_hypercube_a_butterfly_takes_log_n_hops_and_all_links(cube):
    nbytes, k = 1e9, 3
    for size, stride, dimensions in ((8, 1, 3), (4, 2, 2), (2, 4, 1)):
        rate = W * dimensions / k
        expected = dimensions * LATENCY + nbytes * (size - 1) / size / rate
        assert ALGORITHMS["butterfly"](
            ALL_GATHER, cube.group(size, stride), nbytes
        ) == pytest.approx(expected)
    assert cube.bisection == pytest.approx(4 * 200)


def test_a_torus_that_names_no_dimensions_gives_a_group_all_of_its_links(tmp_path):
    known = cluster(
        tmp_path,
        f"node: {{devices: 128, latency: {LATENCY}, bandwidth: 600}}",
        "topology: torus",
    )
    assert known.group(8, 1).bytes_per_second == W


def test_a_torus_of_machines_joins_the_blocks_below_it(tmp_path):
    """4 x 4 x 8 machines of 4 devices, whose wires are shared by the four."""
    node, rail = (
        f"{{devices: {n}, latency: {LATENCY}, bandwidth: {rate}}}"
        for n, rate in ((4, 300), (512, 60))
    )
    found = cluster(
        tmp_path,
        f"node: {node}, rail: {rail}",
        "topology: torus\ndimensions: [4, 4, 8]",
        nodes=128,
    )
    assert found.group(4, 1).bytes_per_second == 300e9
    assert found.group(8, 4).bytes_per_second == 60e9 / 3
    assert found.group(16, 32).bytes_per_second == 60e9 * 4 / 6


GPU = (
    "node: {devices: 8, latency: 3.0e-6, bandwidth: 450}, rail: {devices: 64, latency: 8.0e-6, bandwidth: 50}, "
    "spine: {devices: 512, latency: 1.2e-5, bandwidth: 50%s}"
)


def gpus(path, more="", spine=""):
    return cluster(path, GPU % spine, more, nodes=64, per_node=8, accelerator="h100")


def test_oversubscription_narrows_the_way_into_its_level_and_no_other(tmp_path):
    full, narrow = gpus(tmp_path), gpus(tmp_path, spine=", oversubscription: 7")
    assert (
        narrow.group(8, 8).bytes_per_second == full.group(8, 8).bytes_per_second == 50e9
    )
    # 8 of a rail's block share the way out
    assert narrow.group(64, 8).bytes_per_second == full.group(64, 8).bytes_per_second
    assert narrow.group(8, 64).bytes_per_second == pytest.approx(50e9 / 7)
    assert (full.bisection, narrow.bisection) == pytest.approx((256 * 50, 256 * 50 / 7))
    seconds = [best(ALL_REDUCE, c.group(8, 64), 1e9).seconds for c in (full, narrow)]
    assert 6 < seconds[1] / seconds[0] <= 7


def test_on_rails_a_message_to_another_number_goes_over_nvlink_first(tmp_path):
    tree, rails = gpus(tmp_path), gpus(tmp_path, "topology: rail_optimised")
    aligned, across = (lambda c: c.group(4, 16)), (lambda c: c.group(4, 4))
    assert best(PERMUTE, aligned(rails), 1e6) == best(PERMUTE, aligned(tree), 1e6)
    extra = (
        best(PERMUTE, across(rails), 1e6).seconds
        - best(PERMUTE, across(tree), 1e6).seconds
    )
    assert extra == pytest.approx(3e-6)
    # rings enter a node on their rail
    assert best(ALL_REDUCE, across(rails), 1e6) == best(ALL_REDUCE, across(tree), 1e6)


def test_on_rails_without_a_way_through_the_node_it_goes_over_the_spine(tmp_path):
    rails = gpus(
        tmp_path,
        "topology: rail_optimised\nbetween_rails: spine",
        ", oversubscription: 2",
    )
    assert best(PERMUTE, rails.group(4, 4), 1e9).seconds == pytest.approx(
        1.2e-5 + 1e9 / 25e9
    )
    assert best(PERMUTE, rails.group(4, 16), 1e9).seconds == pytest.approx(
        8e-6 + 1e9 / 50e9
    )


def test_a_group_of_a_dragonfly_that_talks_to_one_other_has_half_of_its_links(tmp_path):
    tree, dragonfly = gpus(tmp_path), gpus(tmp_path, "topology: dragonfly")
    assert dragonfly.group(8, 8).bytes_per_second == tree.group(8, 8).bytes_per_second
    assert (
        dragonfly.group(8, 64).bytes_per_second
        == tree.group(8, 64).bytes_per_second / 2
    )
    # 8 groups of 64: of a group's links 4 in 7 lead to the other half.
    assert dragonfly.bisection == pytest.approx(256 * 50 * 4 / 7)
    two = replace(
        dragonfly,
        links=replace(
            dragonfly.links, spine=replace(dragonfly.links.spine, devices=128)
        ),
    )
    # All links of two groups lead to each other
    assert two.group(2, 64).bytes_per_second == 50e9


@pytest.mark.parametrize(
    "name", ["fat_tree", "rail_optimised", "dragonfly", "torus", "hypercube", "flat"]
)
def test_more_bytes_and_narrower_links_are_never_faster_and_groups_never_slow_each_other_less(
    tmp_path, name
):
    more = f"topology: {name}" + ("\ndimensions: [2, 4]" if name == "torus" else "")
    for accelerator in ("h100", "tpu-v5p"):
        described = cluster(tmp_path, GPU % "", more, 64, 8, accelerator)
        narrow = cluster(
            tmp_path, GPU % ", oversubscription: 3", more, 64, 8, accelerator
        )
        groups = [(2, 1), (8, 1), (8, 8), (4, 128), (64, 8), (512, 1), (6, 64)]
        for kind, (size, stride) in itertools.product(KINDS, groups):
            seconds = [
                best(kind, described.group(size, stride), 4.0**e).seconds
                for e in range(0, 16)
            ]
            assert (
                seconds == sorted(seconds)
                and seconds[0] > 0
                and all(map(math.isfinite, seconds))
            )
            assert (
                best(kind, narrow.group(size, stride), 4.0**15).seconds >= seconds[-1]
            )


def test_axes_whose_neighbours_are_far_apart_pass_the_wires_between(torus):
    mesh = MeshConfig(data=4, tensor=8, pipeline=4)
    assert (
        torus.axis("tensor", mesh).paths.permute.hops
        == torus.axis("pipeline", mesh).paths.permute.hops
        == 1
    )
    outermost = replace(mesh, order=("tensor", "data", "pipeline", "island"))
    # 16 apart: two along a dimension of 4, and one along the next where that is full.
    assert torus.axis("tensor", outermost).paths.permute.hops == 3
