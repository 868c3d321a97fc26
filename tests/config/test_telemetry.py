"""The section `telemetry`: what contradicts itself is refused."""

import pytest

from meshtrain.config import ConfigError, load


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("alerts=[lgo]", "telemetry.alerts has 'lgo'; legal are log, file, webhook:URL and command:WORDS; did you mean log?"),
        ("alerts=[log, log]", "telemetry.alerts has log twice; name it once."),
        ("trace_at=[3, 200]", "telemetry.trace_at has 200, but train.steps is 150: that step is never reached."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(ConfigError) as refused:
        load("configs/quickstart.yaml", [f"telemetry.{given}"])
    assert str(refused.value) == sentence


def test_trackers_are_those_that_there_are():
    with pytest.raises(ConfigError, match="one of tensorboard, wandb, mlflow; did you mean tensorboard"):
        load("configs/quickstart.yaml", ["telemetry.trackers=[tensorbord]"])
