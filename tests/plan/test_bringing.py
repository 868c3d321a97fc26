"""What the planner says of islands that step by themselves, against the arrays and the compiled programs."""

import jax
import pytest
from island_runs import program, settings

from meshtrain.hlo import collectives
from meshtrain.mesh import part_bytes
from meshtrain.plan import bringing, memory, named, traffic
from meshtrain.plan.seconds import data_seconds
from meshtrain.plan.ticks import trips

FLAT = {"data": 4, "islands": 2}


@pytest.mark.parametrize("sync", [{"every": 5}, {"every": 5, "outer_momentum": 0.0}, {"every": 5, "delay": 2}])
def test_the_copies_that_islands_keep_are_those_of_the_state(sync):
    built = program(FLAT, sync=sync)
    held = sum(map(part_bytes, jax.tree.leaves(built.state_shapes.islands)))
    said = [item for item in memory.between_steps(built.config) if item.name in bringing.copies(built.config)]
    assert sum(item.nbytes for item in said) == held
    assert len(said) == 1 + (sync.get("outer_momentum") != 0.0) + ("delay" in sync)
    assert memory.total(memory.between_steps(built.config)) == pytest.approx(built.state_bytes, rel=0.01)


@pytest.mark.parametrize("mesh", [FLAT, {"data": 8, "islands": 4}])
def test_bytes_across_islands_are_those_of_an_exchange_over_the_steps_between(mesh):
    built = program(mesh, sync={"every": 5}, parallel={"microbatches": 1, "sync": {"every": 5}})
    compiled = built.islands.bring_together[0].lower(built.state_shapes).compile()
    sent = collectives(compiled, built.mesh).traffic["island"]
    found = traffic.by_axis(traffic.flows(built.config, trips(built.config, skips=True)))
    assert found["island"] == pytest.approx(sent / 5, rel=0.01)
    (flow,) = bringing.flows(built.config)
    assert flow.times == "1/5" and "islands brought together" in flow.what


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_rest_of_a_step_is_sent_within_islands_as_the_compiled_step_sends_it(zero):
    built = program(FLAT, parallel={"microbatches": 1, "zero_stage": zero, "sync": {"every": 5}})
    sent = collectives(built.lower().compile(), built.mesh).traffic
    found = traffic.by_axis(traffic.flows(built.config, trips(built.config, skips=True)))
    assert "island" not in sent and not any("island" in axis for axis in found if axis != "island")
    # norms of gradients, and losses, are not in the plan
    assert sent["data"] == pytest.approx(found["data"], rel=0.02)


def test_islands_by_themselves_take_less_of_a_step_the_more_seldom_they_meet():
    cluster = named("h100", 4)
    seconds = [data_seconds(settings(FLAT, {"every": every} if every else {}), cluster) for every in (0, 1, 10, 100)]
    assert seconds[0] > seconds[2] > seconds[3]
    rare = seconds[2] - seconds[3]
    assert seconds[1] - seconds[3] == pytest.approx(11 * rare, rel=0.01)  # (1 - 1/100) / (1/10 - 1/100)
