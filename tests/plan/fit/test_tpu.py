import pytest

from experiments.plan.tpu import FITTED, HELD_OUT
from meshtrain.model.weights import parameters


@pytest.mark.parametrize("run", FITTED, ids=lambda r: r.name)
def test_fitted_runs_on_tpus_are_predicted_within_eight_percent(run):
    assert run.predicted() == pytest.approx(run.seconds, rel=0.08)


@pytest.mark.parametrize("run", HELD_OUT, ids=lambda r: r.name)
def test_runs_on_tpus_that_the_fit_never_saw_are_predicted_within_eleven_percent(run):
    assert run.predicted() == pytest.approx(run.seconds, rel=0.11)


@pytest.mark.parametrize("run", FITTED + HELD_OUT, ids=lambda r: r.name)
def test_the_sizes_that_follow_from_a_scale_are_as_large_as_the_run_is_called(run):
    assert parameters(run.config.model) / 1e9 == pytest.approx(
        float(run.name.split("B")[0]), rel=0.03
    )
