"""Who keeps the others waiting: told from steps, phases and signs of life; and whose time is not up yet."""

import dataclasses
import random

import pytest

from meshtrain.survive.detectors import PHASES, TIMEOUTS, hung, timeout
from meshtrain.survive.records import (
    Node,
    ProcessEnd,
    Rank,
    RestartPlan,
    SupervisorOptions,
)

OPTIONS = SupervisorOptions(
    used=lambda n: n, wanted=4, step_timeout=8.0, node_timeout=6.0
)
PLAN = RestartPlan(
    2,
    1,
    "running",
    "n0",
    0.0,
    "start",
    "",
    members=[f"n{k}" for k in range(4)],
    incarnations=["i"] * 4,
)


def node(number: int, **what) -> Node:
    given = {
        "proc": "S",
        "step": 10,
        "phase": "wait",
        "phase_age": 1.0,
        "pace": 0.5,
        "start": 0,
    }
    return Node(
        f"n{number}",
        "i",
        f"h{number}",
        generation=1,
        state="running",
        rank=Rank(number, 9, **given | what),
    )


def four(**what) -> list[Node]:
    return [node(k, **what) for k in range(4)]


def ended(number: int, exit: int) -> Node:
    return dataclasses.replace(
        node(number, phase="end"),
        state="ended",
        end=ProcessEnd(exit, "ok", "ended", 10),
    )


@pytest.mark.parametrize("exit", [0, 75])
def test_who_does_not_end_while_the_others_have_is_found(exit):
    late = node(2, phase="end", phase_age=TIMEOUTS["end"] + 1)
    (found,) = hung(
        [ended(0, exit), ended(1, exit), late, ended(3, exit)], PLAN, OPTIONS
    )
    assert (found.kind, found.blamed) == (
        "stuck",
        ("n2",),
    ) and "rank 2" in found.sentence
    assert not hung([ended(0, exit), node(1), node(2), node(3)], PLAN, OPTIONS)


def test_nobody_is_judged_while_a_member_has_not_begun():
    late = four(phase_age=100.0)
    assert hung(late, PLAN, OPTIONS)
    assert not hung([*late[:3], None], PLAN, OPTIONS)
    assert not hung([*late[:3], dataclasses.replace(late[3], rank=None)], PLAN, OPTIONS)
    assert not hung(
        [*late[:3], dataclasses.replace(late[3], generation=0)], PLAN, OPTIONS
    )


def test_the_phases_of_a_step_follow_the_option_and_the_others_have_their_own():
    for phase in PHASES:
        expected = TIMEOUTS.get(phase, 8.0)
        assert timeout(node(0, phase=phase).rank, OPTIONS) == expected
        for age, late in ((expected - 0.5, False), (expected + 0.5, True)):
            assert bool(hung(four(phase=phase, phase_age=age), PLAN, OPTIONS)) == late
    assert timeout(node(0, phase="a new one").rank, OPTIONS) == 8.0
    # Large checkpoints have more time.
    large = dataclasses.replace(OPTIONS, moving=1000.0)
    for phase in ("restore", "save"):
        assert timeout(node(0, phase=phase).rank, large) == TIMEOUTS[phase] + 1000
    assert timeout(node(0, phase="eval").rank, large) == TIMEOUTS["eval"]


def test_the_age_of_a_record_counts_up_to_a_beat_since_silence_is_the_supervisors():
    def found(phase_age: float, age: float):
        return hung(
            [dataclasses.replace(n, age=age) for n in four(phase_age=phase_age)],
            PLAN,
            OPTIONS,
        )

    beat = OPTIONS.heartbeat
    assert found(8.1 - beat, beat)[0].kind == "collective"
    assert "8.1 s" in found(8.1 - beat, beat)[0].sentence
    assert found(7.9 - beat, 5.0) == []


def test_of_many_late_ranks_the_one_that_is_behind_is_named():
    dice = random.Random(0)
    for _ in range(300):
        places = sorted(
            (dice.randrange(8, 11), dice.choice(PHASES[5:-1])) for _ in range(3)
        )
        places.append((7, dice.choice(("log", "data", "dispatch", "wait"))))
        ranks = [{"step": step, "phase": phase} for step, phase in places]
        dice.shuffle(ranks)
        behind = next(k for k, r in enumerate(ranks) if r["step"] == 7)
        faults = hung(
            [node(k, phase_age=700.0, **r) for k, r in enumerate(ranks)], PLAN, OPTIONS
        )
        assert [f.blamed for f in faults] == [(f"n{behind}",)]


@pytest.mark.parametrize("phase", PHASES)
def test_a_frozen_rank_is_named_within_the_time_of_a_silent_node_in_every_phase(phase):
    def found(silent: float, proc: str = "T", **what):
        nodes = [
            node(0),
            node(1, phase=phase, phase_age=7.0, alive_age=silent, proc=proc, **what),
            node(2),
            node(3),
        ]
        return hung(
            [*nodes[:3], dataclasses.replace(nodes[3], generation=0)], PLAN, OPTIONS
        )

    (fault,) = found(6.5)
    assert (fault.kind, fault.blamed) == ("frozen", ("n1",))
    assert (
        f"is frozen (SIGSTOP) (phase {phase})" in fault.sentence
        and "for 6.5 s" in fault.sentence
    )
    assert found(0.0), "stopped before its first heartbeat"
    # Stopped and let go in turns it lives, as one does that is at work.
    assert not found(0.4) and not found(6.5, "S")
    # Whoever looks at it in a debugger has the time of its phase.
    assert not found(6.5, "t")
