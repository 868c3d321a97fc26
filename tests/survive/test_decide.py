"""What follows from what nodes say of themselves: every case with clocks of its own, no process, no file."""

import dataclasses
import random
import re

import pytest

from meshtrain.survive.decide import DAY, LOCKED, QUARANTINE, STEADY, decide
from meshtrain.survive.detectors import ORDER
from meshtrain.survive.records import (
    Node,
    ProcessEnd,
    Rank,
    RestartPlan,
    SupervisorOptions,
)

NAMES = ["n0", "n1", "n2", "n3"]
OPTIONS = SupervisorOptions(
    used=lambda n: n if n else None,
    wanted=4,
    least=2,
    step_timeout=8.0,
    node_timeout=6.0,
)
NOW = 1e9


def rank(number: int, **what) -> Rank:
    given = {
        "proc": "S",
        "step": 10,
        "phase": "wait",
        "phase_age": 1.0,
        "pace": 0.5,
        "start": 0,
        "saved": 10,
    }
    return Rank(number, 100 + number, **given | what)


def node(number: int, **what) -> Node:
    of_rank = {
        name: what.pop(name)
        for name in list(what)
        if name in {f.name for f in dataclasses.fields(Rank)}
    }
    given = {
        "state": "running",
        "generation": 1,
        "acked": 1,
        "age": 0.5,
        "known": 100.0,
        "host": f"h{number}",
    }
    return Node(
        f"n{number}",
        incarnation=f"i{number}",
        rank=rank(number, **of_rank),
        **given | what,
    )


def ended(number: int, exit: int, kind: str, **what) -> Node:
    words = {
        "sentence": f"ended with {exit}",
        "step": what.pop("step", 10),
        "ranks": what.pop("ranks", []),
    }
    return node(
        number,
        state="ended",
        end=ProcessEnd(exit, kind, **words),
        **{"ended_for": 100.0} | what,
    )


def plan(state: str = "running", **what) -> RestartPlan:
    given = {
        "number": 2,
        "generation": 1,
        "leader": "n0",
        "kind": "start",
        "reason": "the run begins",
        "age": 100.0,
    }
    given |= {
        "wall": NOW - what.get("age", 100.0),
        "members": NAMES,
        "incarnations": [f"i{k}" for k in range(4)],
    }
    return RestartPlan(state=state, **given | what)


def fault(
    kind: str, *blamed: str, step: int = 10, wall: float = NOW - 60
) -> RestartPlan:
    """A plan of the past: a generation that formed because of a fault."""
    return plan("forming", kind=kind, blamed=list(blamed), step=step, wall=wall)


def decided(
    *changed: Node,
    of: RestartPlan | None = None,
    history: tuple[RestartPlan, ...] | list[RestartPlan] = (),
    **options,
):
    nodes = {n.name: n for n in [node(k) for k in range(4)]} | {
        n.name: n for n in changed
    }
    ordered = sorted(nodes.values(), key=lambda n: n.name)
    return decide(
        NOW, ordered, of or plan(), history, dataclasses.replace(OPTIONS, **options)
    )


def test_nodes_that_differ_are_refused_when_a_run_begins_and_left_out_when_it_goes_on():
    differs = "node n3 is unlike n0: jax is 2 on n3"
    stranger = node(3, state="idle", acked=1, differs=differs)
    others = [node(k, state="idle", acked=1) for k in range(3)]
    start = plan("forming", kind="start", age=1.0)
    found = decided(stranger, *others, of=start)
    assert (found.verdict, found.code, found.kind) == ("over", 2, "refused")
    assert "jax is 2 on n3" in found.reason
    assert decided(
        stranger, *others, of=plan("forming", kind="lost", age=1.0)
    ).members == (
        "n0",
        "n1",
        "n2",
    )
    for age in (1.0, OPTIONS.join_timeout):
        found = decided(
            stranger, *others, of=plan("forming", kind="lost", age=age), least=4
        )
        assert found.verdict in ("wait", "over")
        assert f"4 are needed; {differs}" in found.reason
    three = plan(members=NAMES[:3], incarnations=["i0", "i1", "i2"])
    assert decided(node(3, state="idle"), of=three).verdict == "stop"
    assert decided(stranger, of=three).verdict == "go on"


@pytest.mark.parametrize(
    ("changed", "kind", "blamed"),
    [
        ([ended(3, -9, "signal")], "signal", ("n3",)),
        (
            [ended(3, -9, "signal"), ended(0, 73, "peer"), ended(1, -6, "peer")],
            "signal",
            ("n3",),
        ),
        ([ended(3, -9, "signal"), ended(1, -11, "signal")], "signal", ("n1", "n3")),
        (
            [node(2, age=7.0), ended(0, 73, "peer"), ended(1, 73, "peer")],
            "lost",
            ("n2",),
        ),
        ([node(0, age=7.0)], "lost", ("n0",)),
        ([dataclasses.replace(node(1), incarnation="another")], "lost", ("n1",)),
        ([node(2, phase="data", phase_age=9.0, proc="T")], "frozen", ("n2",)),
        ([node(2, phase="data", phase_age=9.0, proc="D")], "uninterruptible", ("n2",)),
        (
            [node(2, phase="log", step=9, phase_age=9.0, alive_age=8.0, proc="R")],
            "gil",
            ("n2",),
        ),
        ([node(2, phase="data", phase_age=9.0)], "stuck", ("n2",)),
        ([node(2, phase="log", step=9, phase_age=9.0)], "stuck", ("n2",)),
        ([node(k, phase_age=9.0) for k in range(4)], "collective", ()),
        (
            [node(k, phase_age=9.0, proc="T" if k == 1 else "S") for k in range(4)],
            "frozen",
            ("n1",),
        ),
        ([ended(1, 1, "error")], "error", ("n1",)),
        ([ended(1, 71, "sick", ranks=[2])], "sick", ("n2",)),
        ([ended(k, 70, "numbers") for k in range(4)], "numbers", ()),
        ([ended(0, 72, "lock")], "lock", ()),
        ([ended(0, 1, "port"), ended(1, 73, "peer")], "port", ()),
    ],
)
def test_the_cause_is_found_among_its_effects_and_the_right_nodes_are_blamed(
    changed, kind, blamed
):
    found = decided(*changed)
    assert (found.verdict, found.kind, found.blamed) == ("form", kind, blamed)
    assert found.kind in ORDER and found.reason
    assert decided().verdict == "go on"


def test_effects_alone_wait_for_their_cause_to_show():
    effects = [ended(k, 73, "peer", ended_for=0.2) for k in (0, 1)]
    assert decided(*effects).verdict == "go on"
    # Their nodes go on to give signs of life: what counts is how long ago the processes ended. A silent node is told by
    # its timeout.
    effects = [ended(k, 73, "peer", ended_for=5.0) for k in (0, 1)]
    assert decided(*effects, node(2, age=5.5)).verdict == "go on"
    found = decided(*effects)
    assert (found.verdict, found.kind, found.blamed) == ("form", "peer", ())
    # Nobody is left to be the cause.
    assert (
        decided(*[ended(k, 73, "peer", ended_for=0.2) for k in range(4)]).kind == "peer"
    )


def test_who_was_killed_at_the_same_moment_is_named_too():
    first, second = (ended(k, -9, "signal", ended_for=0.1) for k in (1, 2))
    assert decided(first).verdict == "go on"
    assert decided(first, second).verdict == "go on"
    assert decided(
        first, second, *[ended(k, 73, "peer", ended_for=0.1) for k in (0, 3)]
    ).blamed == ("n1", "n2")
    assert decided(ended(1, -9, "signal", ended_for=0.4)).blamed == ("n1",)


def test_a_phase_has_its_own_time():
    # The others wait for it, rightly.
    assert decided(node(0, phase="save", step=10, phase_age=100.0)).verdict == "go on"
    assert (
        decided(*[node(k, phase="save", phase_age=601.0) for k in range(4)]).kind
        == "collective"
    )
    assert (
        decided(
            *[node(k, phase="compile", step=0, phase_age=3000.0) for k in range(4)]
        ).verdict
        == "go on"
    )
    assert (
        decided(
            *[node(k, phase="wait", step=0, phase_age=500.0) for k in range(4)]
        ).verdict
        == "go on"
    )
    for age, pace, verdict in (
        (70.0, 10.0, "go on"),
        (101.0, 10.0, "form"),
        (59.0, 0.1, "go on"),
    ):
        assert (
            decided(
                *[node(k, phase_age=age, pace=pace) for k in range(4)], step_timeout=0.0
            ).verdict
            == verdict
        )


def test_a_hang_is_named_with_rank_host_step_phase_stack_and_collectives():
    where = {"stack": "mine.py:7 in sleep", "collectives": "8 all-reduce over data"}
    found = decided(node(2, phase="dispatch", phase_age=9.0, **where))
    for word in (
        "rank 2",
        "n2",
        "h2",
        "step 11",
        "dispatch",
        "9.5 s",
        "mine.py:7 in sleep",
        "8 all-reduce over data",
    ):
        assert word in found.reason


@pytest.mark.parametrize(
    ("ends", "decision"),
    [
        ([ended(k, 0, "ok") for k in range(4)], ("over", "done", 0)),
        ([ended(k, 0, "ok") for k in range(3)], ("go on", "", 0)),
        (
            [ended(k, 75, "stopped", leaving=True) for k in range(4)],
            ("over", "stopped", 75),
        ),
        (
            [ended(k, 75, "stopped", leaving=k == 1) for k in range(4)],
            ("form", "preempted", 0),
        ),
        ([ended(0, 2, "config"), ended(1, 73, "peer")], ("over", "refused", 2)),
    ],
)
def test_what_follows_from_how_all_have_ended(ends, decision):
    found = decided(*ends)
    assert (found.verdict, found.kind, found.code) == decision and not found.blamed
    assert found.step == 10 or found.verdict == "go on"


def test_the_same_number_at_the_same_step_elsewhere_is_the_data_and_another_one_is_not():
    nans = [ended(k, 70, "numbers", step=12) for k in range(4)]
    once = decided(*nans)
    assert (once.verdict, once.kind) == ("form", "numbers")
    again = decided(*nans, history=[fault("numbers", step=12)])
    assert (again.verdict, again.code) == ("over", 3)
    assert decided(*nans, history=[fault("numbers", step=3)]).verdict == "form"


def test_a_loop_is_given_up_at_the_third_time_and_progress_forgives():
    twice = [fault("signal", "n1", step=10), fault("error", "n2", step=10)]
    assert decided(ended(3, -9, "signal"), history=twice).code == 3
    assert (
        decided(
            ended(3, -9, "signal", step=11), node(0, step=11), history=twice
        ).verdict
        == "form"
    )
    assert decided(ended(3, -9, "signal"), history=twice[:1]).verdict == "form"
    # However far the others have come.
    assert (
        decided(ended(3, -9, "signal", step=10), node(0, step=11), history=twice).code
        == 3
    )


def test_restarts_are_counted_for_a_day():
    past = [fault("signal", "n1", step=k, wall=NOW - 10 * k) for k in range(3)]
    assert decided(ended(3, -9, "signal"), history=past, restarts=3).code == 3
    for change in ({"wall": NOW - DAY - 1}, {"kind": "preempted"}):
        other = [dataclasses.replace(p, **change) for p in past]
        assert (
            decided(ended(3, -9, "signal"), history=other, restarts=3).verdict == "form"
        )


def test_a_first_generation_that_cannot_begin_is_not_tried_again_unless_it_was_killed():
    def first(exit: int, kind: str, history: list[RestartPlan]) -> tuple[str, int]:
        others = [node(k, step=0, phase="init") for k in (0, 2, 3)]
        found = decided(
            ended(1, exit, kind, step=0, start=None), *others, history=history
        )
        return found.verdict, found.code

    assert first(1, "error", []) == ("over", 3)
    assert first(-9, "signal", []) == ("form", 0)
    assert first(1, "error", [fault("lost", "n1", step=7)]) == ("form", 0)


def test_delays_grow_without_progress():
    def delay(*steps: int) -> float:
        past = [fault("lost", "n1", step=s) for s in steps]
        return decided(node(3, age=7.0), history=past).delay

    assert delay() == 0.0
    assert delay(3, 5) == 0.0
    assert [delay(*[10] * k) for k in (1, 2, 3)] == [2.0, 4.0, 8.0]
    assert delay(*[10] * 12) == 300.0
    assert decided(*four(), of=forming(delay=4.0, age=3.0)).verdict == "wait"
    assert decided(*four(), of=forming(delay=4.0, age=5.0)).verdict == "run"


def test_a_fault_before_the_restore_is_one_without_progress_whatever_came_before():
    early = [ended(k, 1, "port", step=0, start=None) for k in range(4)]
    past = [fault("signal", step=s) for s in (10, 20, 30, 40)]
    assert decided(*early, history=past).delay == 2.0
    assert decided(*early, history=past).step == 40


def test_a_node_is_quarantined_at_its_second_strike_and_a_sick_one_at_the_first():
    assert decided(ended(3, -9, "signal", step=12)).quarantined == {}
    again = decided(ended(3, -9, "signal", step=12), history=[fault("stuck", "n3")])
    assert again.quarantined == {"n3": NOW + QUARANTINE}
    twice = [fault("stuck", "n3", step=1), fault("error", "n3", step=2)]
    third = decided(ended(3, -9, "signal", step=12), history=twice)
    assert third.quarantined == {"n3": NOW + 2 * QUARANTINE}
    assert decided(ended(1, 71, "sick", ranks=[2])).quarantined == {
        "n2": NOW + QUARANTINE
    }
    assert not decided(ended(0, 73, "lock"), history=[fault("lock")]).quarantined


def test_the_lock_of_a_run_is_tried_again_soon_and_for_nothing_but_not_without_end():
    locked, others = ended(0, 72, "lock", step=10), [fault("signal", "n1", step=9)]
    found = decided(locked, history=[*others, *[fault("lock", step=10)] * 30])
    assert (found.verdict, found.delay, found.quarantined) == ("form", LOCKED, None)
    # Neither a restart nor a step towards a loop.
    assert (
        decided(
            ended(3, -9, "signal", step=12), history=[fault("lock", step=10)] * 30
        ).delay
        == 0.0
    )
    found = decided(locked, history=[*others, *[fault("lock", step=10)] * 61])
    assert (found.verdict, found.code) == (
        "over",
        75,
    ) and "run again to go on" in found.reason
    assert decided(locked, history=[fault("lock", step=3)] * 61).verdict == "form"


# --- forming


def forming(*, kind: str = "signal", age: float = 1.0, **what) -> RestartPlan:
    return plan("forming", generation=2, kind=kind, age=age, **what)


def idle(number: int, acked: int = 2, **what) -> Node:
    return dataclasses.replace(
        node(number, state="idle", acked=acked, **what), rank=None
    )


def four(**what) -> list[Node]:
    return [idle(k, **what) for k in range(4)]


def test_a_generation_begins_when_nobody_has_the_lock_of_the_run():
    held = {"holder": "process 7 on h9", "join_timeout": 300.0}
    found = decided(*four(), of=forming(age=299.0), **held)
    assert found.verdict == "wait"
    assert re.match(f"for {held['holder']}, .*lock", found.reason)
    found = decided(*four(), of=forming(age=300.0), **held)
    assert (found.verdict, found.kind, found.code) == (
        "over",
        "lock",
        75,
    ) and "run again to go on" in found.reason
    assert decided(*four(), of=forming(age=300.0)).verdict == "run"


def test_a_generation_forms_only_once_no_live_node_has_a_process_of_the_one_before():
    found = decided(*four()[:3], idle(3, acked=1), of=forming())
    assert found.verdict == "wait" and "n3" in found.reason
    assert decided(*four(), of=forming()).members == tuple(NAMES)
    # Who is silent is not waited for: its process has ended by itself.
    assert decided(*four()[:3], idle(3, acked=1, age=6.0), of=forming()).members == (
        "n0",
        "n1",
        "n2",
    )


def test_the_quarantined_stand_back_as_long_as_the_others_are_enough():
    q = {"n1": NOW + 10}
    assert decided(*four(), of=forming(quarantined=q)).members == ("n0", "n2", "n3")
    assert decided(*four(), of=forming(quarantined={"n1": NOW - 1})).members == tuple(
        NAMES
    )
    assert decided(*four(), of=forming(quarantined=q), least=4).members == tuple(NAMES)


def test_a_run_begins_when_all_are_there_or_after_a_time_with_fewer_but_not_with_too_few():
    three = [*four()[:3], idle(3, age=float("inf"))]
    assert decided(*three, of=forming(kind="start")).verdict == "wait"
    assert decided(*three, of=forming(kind="start", age=301.0)).members == (
        "n0",
        "n1",
        "n2",
    )
    # After a fault nobody waits
    assert decided(*three, of=forming()).members == ("n0", "n1", "n2")
    one = [idle(0), *[idle(k, age=float("inf")) for k in (1, 2, 3)]]
    assert decided(*one, of=forming()).verdict == "wait"
    found = decided(*one, of=forming(age=301.0))
    assert (found.verdict, found.kind, found.code) == ("over", "few", 75)


def test_spares_take_the_place_of_the_lost_and_numbers_are_computed_elsewhere():
    def members(*nodes: Node, **what) -> tuple[str, ...]:
        return decided(
            *nodes,
            of=forming(members=NAMES[:3], **what),
            used=lambda n: min(n, 3) or None,
        ).members

    assert members(*four()) == ("n0", "n1", "n2")
    assert members(*four()[:1], idle(1, age=9.0), *four()[2:]) == ("n0", "n2", "n3")
    turned = members(*four(), kind="numbers")
    assert (
        len(turned) == 3
        and all(a != b for a, b in zip(turned, NAMES, strict=False))
        and "n3" in turned
    )
    same = decided(*four(), of=forming(kind="numbers")).members
    assert sorted(same) == NAMES and all(
        a != b for a, b in zip(same, NAMES, strict=True)
    )


def test_a_node_that_returns_is_taken_in_once_it_is_steady_and_of_use():
    smaller = plan(members=NAMES[:3], incarnations=["i0", "i1", "i2"])
    assert decided(idle(3, known=STEADY - 1), of=smaller).verdict == "go on"
    found = decided(idle(3, known=STEADY + 1), of=smaller)
    assert (found.verdict, found.kind) == ("stop", "grow")
    assert decided(idle(3), of=smaller, used=lambda n: min(n, 3)).verdict == "go on"
    assert (
        decided(
            idle(3), of=dataclasses.replace(smaller, quarantined={"n3": NOW + 5})
        ).verdict
        == "go on"
    )
    stopping = dataclasses.replace(smaller, state="stopping", kind="grow")
    grown = decided(*[ended(k, 75, "stopped") for k in range(3)], idle(3), of=stopping)
    assert (grown.verdict, grown.kind) == ("form", "grow")


@pytest.mark.parametrize(
    "end",
    [
        {"exit": -15, "kind": "signal"},  # before it listened
        {"exit": -15, "kind": "signal", "start": None, "step": 0},
        {
            "exit": 75,
            "kind": "stopped",
            "start": None,
            "step": 0,
        },  # before it had joined the others
        {"exit": -9, "kind": "ended_by_us"},
        {"exit": -9, "kind": "ended_by_us", "leaving": True},
    ],
)
def test_an_end_that_the_plan_asked_for_is_no_finding(end):
    stopping = plan("stopping", kind="grow", reason="n4 can take part")
    past = [fault("signal", "n1")] * OPTIONS.restarts
    for others in (
        [node(k, phase="join", start=None, step=0) for k in (0, 2, 3)],
        [ended(k, 75, "stopped") for k in (0, 2, 3)],
        [ended(k, 73, "peer") for k in (0, 2, 3)],
        [ended(k, **end) for k in (0, 2, 3)],
    ):
        found = decided(ended(1, **end), *others, of=stopping, history=past)
        assert (found.verdict, found.kind, found.reason) == (
            "form",
            "grow",
            "n4 can take part",
        )
        assert (found.blamed, found.delay, found.quarantined) == ((), 0.0, None)


@pytest.mark.parametrize(
    ("exit", "kind"),
    [(-9, "signal"), (-11, "signal"), (1, "error"), (71, "sick"), (70, "numbers")],
)
def test_a_fault_while_the_plan_stops_all_is_one(exit, kind):
    stopping = plan("stopping", kind="grow", reason="n4 can take part")
    asked = [ended(k, -15, "signal") for k in (0, 2, 3)]
    assert decided(ended(1, exit, kind), *asked, of=stopping).kind == kind


def test_whoever_leads_and_whatever_its_clock_says_a_quarantine_is_as_long():
    for skew in (-3600.0, 0.0, 3600.0):
        ill = dataclasses.replace(forming(age=50.0), wall=NOW - 50 + skew)
        assert (
            "n1"
            not in decided(
                *four(), of=dataclasses.replace(ill, quarantined={"n1": NOW + skew + 5})
            ).members
        )
        assert (
            "n1"
            in decided(
                *four(), of=dataclasses.replace(ill, quarantined={"n1": NOW + skew - 5})
            ).members
        )
        running = dataclasses.replace(
            plan(), wall=NOW - 100 + skew, quarantined={"n1": NOW + skew + 5}
        )
        until = decided(ended(3, 71, "sick", ranks=[2]), of=running).quarantined
        assert until == {"n1": NOW + 5, "n2": NOW + QUARANTINE}


def test_who_leaves_is_not_waited_for_but_its_process_is():
    leaving = idle(3, acked=1, leaving=True)
    assert decided(*four()[:3], leaving, of=forming()).members == ("n0", "n1", "n2")
    found = decided(
        *four()[:3],
        dataclasses.replace(leaving, state="running", generation=1),
        of=forming(),
    )
    assert found.verdict == "wait" and "n3" in found.reason


def test_a_run_whose_nodes_are_all_asked_to_go_while_it_forms_is_over():
    found = decided(*four(leaving=True), of=forming(step=7))
    assert (found.verdict, found.code, found.kind, found.step) == (
        "over",
        75,
        "stopped",
        7,
    )
    assert (
        decided(*four(leaving=True)[:3], idle(3, age=9.0), of=forming()).verdict
        == "over"
    )
    assert decided(*four(leaving=True)[:3], idle(3), of=forming()).verdict == "wait"
    gone = [node(k, state="ended", leaving=True) for k in range(4)]
    assert decided(*gone, of=forming(age=0.0)).code == 75
    assert (
        decided(*gone[:3], node(3, leaving=True), of=forming(age=0.0)).verdict == "wait"
    )


@pytest.mark.parametrize(
    ("exit", "kind", "leaving"),
    [
        (75, "stopped", True),
        (75, "stopped", False),
        (-15, "signal", True),
        (-9, "ended_by_us", True),
    ],
)
def test_a_node_that_is_asked_to_go_before_it_has_joined_the_others_does_not_keep_them_waiting(
    exit, kind, leaving
):
    others = [node(k, phase="join", start=None, step=0) for k in range(3)]
    went = ended(3, exit, kind, start=None, leaving=leaving, step=0)
    for past in ([], [fault("signal", "n3")] * OPTIONS.restarts):
        found = decided(*others, went, history=past)
        assert (found.verdict, found.kind, found.blamed, found.delay) == (
            "form",
            "preempted",
            (),
            0.0,
        )
    # Once all take steps, all stop after the same one.
    assert decided(ended(3, 75, "stopped", leaving=True)).verdict == "go on"
    assert decided(ended(3, -15, "signal")).kind == "signal"


def test_a_job_that_came_back_whole_begins_again_free_of_blame():
    new = [dataclasses.replace(idle(k, acked=0), incarnation="new") for k in range(4)]
    found = decided(*new)
    assert (found.verdict, found.kind, found.blamed) == ("form", "start", ())


def test_it_is_a_pure_function_of_what_it_is_given():
    random.seed(1)
    nodes = [ended(3, -9, "signal"), node(0), node(2, phase_age=9.0), node(1)]
    assert (
        len(
            {
                repr(decide(NOW, random.sample(nodes, 4), plan(), [], OPTIONS))
                for _ in range(24)
            }
        )
        == 1
    )
