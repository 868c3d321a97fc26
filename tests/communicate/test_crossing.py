"""The crossing points of experiments/communicate: what is left out of a step, and where two lines meet."""

import math

import pytest

from experiments.communicate import crossing
from experiments.communicate.crossing import METHODS, Curve
from meshtrain.plan.estimate import plan

MODEL = "8B, ZeRO-1, data 512"
BY_NAME = {method.name: method for method in METHODS}


def curve(name, model=MODEL):
    config = crossing.config_of(model, BY_NAME[name])
    assert config is not None
    return Curve(BY_NAME[name], config)


def test_where_something_ends_to_hold_is_found_from_either_end():
    assert math.isclose(
        crossing.edge(lambda g: g >= 7.5, 400, 0.125), 7.5, rel_tol=0.01
    )
    assert math.isclose(crossing.edge(lambda g: g < 7.5, 0.125, 400), 7.5, rel_tol=0.01)
    assert (
        crossing.edge(lambda g: False, 0.125, 400) is None
        and crossing.edge(lambda g: True, 0.125, 400) == 400
    )


def test_of_two_crossings_it_is_the_first():
    assert math.isclose(
        crossing.edge(lambda g: g < 5 or g > 50, 0.125, 400), 5, rel_tol=0.01
    )


def test_a_bandwidth_is_what_a_gpu_sends_out_of_its_island_alone():
    wide, narrow = crossing.at(400), crossing.at(1)
    assert (
        narrow.links.spine.bandwidth == 0.125
        and narrow.links.rail == wide.links.rail
        and narrow.devices == 512
    )


@pytest.mark.parametrize("model", crossing.MODELS)
def test_only_what_crosses_the_islands_takes_longer_on_slow_links(model):
    config = curve("islands", model).config
    fast, slow = (plan(config, crossing.at(gigabits)) for gigabits in (400, 1))
    assert math.isclose(
        slow.seconds - fast.seconds,
        crossing.across(slow) - crossing.across(fast),
        rel_tol=1e-6,
    )
    assert crossing.across(slow) > 30 * crossing.across(fast)


def test_what_crosses_once_in_ten_steps_takes_a_tenth():
    tenth, hundredth, whole = (
        curve("DiLoCo, every 10 steps"),
        curve("DiLoCo, every 100 steps"),
        curve("islands"),
    )
    # where the links are as slow as this all else is next to nothing
    crossing_alone = whole(0.125) - whole(400)
    assert math.isclose((tenth(0.125) - tenth(400)) / crossing_alone, 0.1, rel_tol=0.02)
    assert math.isclose(
        (hundredth(0.125) - hundredth(400)) / crossing_alone, 0.01, rel_tol=0.02
    )


def test_no_more_is_hidden_than_there_is_and_than_the_backward_has_room_for():
    for gigabits in (400, 0.125):
        planned = plan(curve("islands").config, crossing.at(gigabits))
        hidden = planned.seconds - crossing.overlapped(planned)
        backward = planned.costs.layers * planned.costs.layer.backward.total
        assert (
            0 < hidden <= crossing.across(planned) * (1 + 1e-9)
            and hidden <= 1.01 * backward
        )
    assert hidden < 0.1 * crossing.across(planned)


def test_on_slow_links_methods_stand_in_the_order_of_their_bytes():
    order = [
        "islands",
        "bfloat16 across",
        "int8 across",
        "int4 across",
        "PowerSGD of rank 4 across",
        "top 1% across",
    ]
    spent = [curve(name)(0.125) for name in order]
    assert spent == sorted(spent, reverse=True)
    assert 3.5 < spent[0] / spent[2] < 4.1
