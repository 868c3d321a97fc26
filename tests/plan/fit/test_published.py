import numpy as np
import pytest

from meshtrain.plan.cluster.accelerators import AMPERE, HOPPER
from meshtrain.plan.fit import calibrate
from meshtrain.plan.fit.calibrate import family, fit, leave_one_out, rounded
from meshtrain.plan.fit.published import FITTED, HELD_OUT


@pytest.mark.parametrize("run", FITTED, ids=lambda r: f"{r.source} {r.name}")
def test_fitted_runs_are_predicted_within_ten_percent(run):
    assert run.predicted() == pytest.approx(run.seconds, rel=0.10)


@pytest.mark.parametrize("run", HELD_OUT, ids=lambda r: f"{r.source} {r.name}")
def test_runs_that_the_fit_never_saw_are_predicted_within_eight_percent(run):
    assert run.predicted() == pytest.approx(run.seconds, rel=0.08)


def test_at_most_six_numbers_are_fitted():
    assert len(calibrate.NAMES) <= 6


@pytest.mark.slow
def test_the_shipped_numbers_are_what_the_fit_gives():
    assert rounded(fit(family("Ampere"))) == AMPERE
    assert rounded(fit(family("Hopper"))) == HOPPER


@pytest.mark.slow
def test_runs_left_out_of_the_fit_are_predicted():
    errors = [abs(left.error) for name in ("Ampere", "Hopper") for left in leave_one_out(family(name))]
    assert np.median(errors) <= 0.08 and max(errors) <= 0.20
