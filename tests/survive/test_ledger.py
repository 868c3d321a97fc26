import random

import pytest
from synthetic_history import Synthetic

from meshtrain.survive import history
from meshtrain.survive.ledger import KINDS, ledger


def line(wall, event, **fields):
    return {"wall": wall, "event": event, **fields}


def of(*lines, plans=(), records=None):
    return ledger(history.together({"n0": list(lines)}, plans, records or {}))


def test_the_ledger_is_the_true_one_through_random_faults_and_clocks_an_hour_apart():
    for seed in range(200):
        dice = random.Random(seed)
        run = Synthetic(dice, nodes=dice.randint(2, 6), faults=dice.randint(0, 12)).play()
        found, truth = ledger(history.together(run.lines, run.plans, {})), run.truth()
        assert found.wall == pytest.approx(run.now - run.began)
        assert sum(found.seconds.values()) == pytest.approx(found.wall)
        told = {kind: truth[kind] for kind in KINDS}
        assert found.seconds == pytest.approx(told, abs=1e-4), seed
