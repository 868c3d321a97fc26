import random

import pytest
from synthetic_history import Synthetic, spoilt, told

from meshtrain.survive import history
from meshtrain.survive.ledger import KINDS, ledger


def line(wall, event, **fields):
    return {"wall": wall, "event": event, **fields}


def of(*lines, plans=(), records=None):
    return ledger(told({"n0": list(lines)}, plans, records or {}))


def test_the_ledger_is_the_true_one_through_random_faults_and_clocks_an_hour_apart():
    for seed in range(200):
        dice = random.Random(seed)
        run = Synthetic(
            dice, nodes=dice.randint(2, 6), faults=dice.randint(0, 12)
        ).play()
        found, truth = ledger(told(run.lines, run.plans)), run.truth()
        assert found.wall == pytest.approx(run.now - run.began)
        assert sum(found.seconds.values()) == pytest.approx(found.wall)
        assert found.seconds == pytest.approx(
            {kind: truth[kind] for kind in KINDS}, abs=1e-4
        ), seed


def test_the_files_of_a_run_have_the_ledger_of_what_was_written(tmp_path):
    made = Synthetic(random.Random(8), nodes=3, faults=5).play()
    read = history.read(made.write(tmp_path))
    assert ledger(read).seconds == ledger(told(made.lines, made.plans)).seconds
    assert read.torn == 0


def test_kinds_sum_to_the_wall_time_whatever_is_missing_or_wrong():
    for seed in range(200):
        dice = random.Random(seed)
        made = Synthetic(
            dice, nodes=dice.randint(2, 5), faults=dice.randint(0, 8)
        ).play()
        for node in list(made.lines):
            if dice.random() < 0.2:
                del made.lines[node]
            else:
                made.lines[node] = [
                    spoilt(event, dice)
                    for event in made.lines[node]
                    if dice.random() > 0.15
                ]
        plans = [spoilt(plan, dice) for plan in made.plans if dice.random() > 0.15]
        found = ledger(told(made.lines, plans))
        assert sum(found.seconds.values()) == pytest.approx(found.wall, abs=1e-3), seed
        assert min(found.seconds.values()) >= 0
        assert 0 <= found.goodput <= found.effective <= 1
        for before, after in zip(
            found.generations, found.generations[1:], strict=False
        ):
            assert before.ended <= after.began


SPENT = {"init": 4.0, "compile": 6.0, "step": 10.0}
GONE_ON = (
    line(30, "save", generation=1, rank=0, step=10, seconds=SPENT),
    line(
        40,
        "save",
        generation=1,
        rank=0,
        step=20,
        seconds=SPENT | {"step": 19.0, "checkpoint": 1.0},
    ),
)
BEGUN = (line(0, "join"), line(10, "started", generation=1, rank=0))


def ended(wall, exit, taken, **spent):
    return line(
        wall,
        "ended",
        generation=1,
        rank=0,
        exit=exit,
        step=taken,
        start=0,
        seconds=SPENT | spent,
    )


def second(start):
    at = {"generation": 2, "rank": 0}
    return (
        line(60, "started", **at),
        line(70, "going", **at, start=start),
        line(71, "left"),
    )


def test_what_came_after_the_save_that_was_gone_on_from_is_lost():
    found = of(
        *BEGUN, *GONE_ON, ended(50, -9, 28, step=27.0, checkpoint=2.0), *second(20)
    )
    assert found.seconds["step"] == 19 and found.seconds["checkpoint"] == 1
    # 8 s of steps and 1 s of a save; the last second nobody counted
    assert found.seconds["lost"] == pytest.approx(10)
    # Nobody has gone on yet.
    assert of(*BEGUN, *GONE_ON, ended(50, -9, 28, step=27.0, checkpoint=2.0)).seconds[
        "lost"
    ] == pytest.approx(10)
    # The newest save was damaged; and nothing was built on this generation.
    found = of(
        *BEGUN, *GONE_ON, ended(50, -9, 28, step=27.0, checkpoint=2.0), *second(10)
    )
    assert found.seconds["step"] == 10 and found.seconds["lost"] == pytest.approx(20)
    found = of(
        *BEGUN, *GONE_ON, ended(50, -9, 28, step=27.0, checkpoint=2.0), *second(0)
    )
    assert (
        found.generations[0].seconds["lost"] == 40
        and found.generations[0].seconds["init"] == 0
    )


def test_a_node_that_went_without_a_word_is_there_until_the_verdict():
    said = line(55, "verdict", generation=1, kind="lost", verdict="form")
    plan = {
        "number": 3,
        "generation": 2,
        "state": "forming",
        "wall": 56.0,
        "kind": "lost",
    }
    found = of(*BEGUN, *GONE_ON, said, *second(20), plans=[plan])
    assert found.generations[0].ended == 55
    # from the save at 40 on
    assert found.seconds["lost"] == pytest.approx(15)
    assert found.seconds["down"] == 10 + 5


def test_where_all_went_at_once_nobody_was_there_until_they_came_back():
    at = {"generation": 2, "rank": 0}
    back = (
        line(1000, "join"),
        line(1001, "started", **at),
        line(1010, "going", **at, start=20),
    )
    found = of(*BEGUN, *GONE_ON, *back)
    assert found.generations[0].ended == 40
    assert found.seconds["down"] == 10 + 961


def test_a_run_that_goes_on_is_known_to_the_newest_record():
    rank = {
        "number": 0,
        "pid": 5,
        "step": 25,
        "seconds": SPENT | {"step": 25.0, "checkpoint": 2.0},
    }
    record = {"wall": 48.0, "generation": 1, "state": "running", "rank": rank}
    found = of(*BEGUN, *GONE_ON, records={"n0": record})
    assert (
        found.wall == 48 and found.seconds["step"] == 25 and found.seconds["lost"] == 0
    )
    assert found.generations[0].step == 25 and found.seconds["other"] == pytest.approx(
        1
    )
    # of a record that does not say where the seconds went, they are not known
    del rank["seconds"]
    assert of(*BEGUN, *GONE_ON, records={"n0": record}).seconds[
        "other"
    ] == pytest.approx(8)


def test_clocks_are_put_right_from_node_to_node():
    lines = {
        "n0": [line(0, "clock", node="n1", ahead=a) for a in (100.0, 100.2, 900.0)]
        + [line(0, "clock", node="n2", ahead=-50.0)],
        "n1": [
            line(0, "clock", node="n3", ahead=7.0),
            line(0, "clock", node="../x", ahead="much"),
        ],
        "n4": [],
    }
    assert history.clocks(lines) == {
        "n0": 0.0,
        "n1": 100.2,
        "n2": -50.0,
        "n3": pytest.approx(107.2),
    }
