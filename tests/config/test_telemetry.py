"""The section `telemetry`: what contradicts itself is refused, and where alerts may go."""

import re

import pytest
from refusals import pattern_of

from meshtrain.config import ConfigError, load
from meshtrain.config.telemetry import AlertTarget, alert_target


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "alerts=[lgo]",
            "telemetry.alerts has 'lgo'; ... log, file, webhook:URL and command:WORDS; ... log?",
        ),
        ("alerts=[log, log]", "telemetry.alerts has log twice; ... once."),
        (
            "trace_at=[3, 200]",
            "telemetry.trace_at has 200, ... train.steps is 150: ... never reached.",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(ConfigError) as refused:
        load("configs/quickstart.yaml", [f"telemetry.{given}"])
    assert re.fullmatch(pattern_of(sentence), str(refused.value))


def test_of_a_run_by_epochs_no_step_is_known_to_be_too_late():
    given = ["train.epochs=2", "telemetry.trace_at=[1000000]"]
    assert load("configs/quickstart.yaml", given).telemetry.trace_at == (10**6,)


def test_trackers_are_those_that_there_are():
    with pytest.raises(
        ConfigError, match=r"tensorboard, wandb, mlflow; .* tensorboard"
    ):
        load("configs/quickstart.yaml", ["telemetry.trackers=[tensorbord]"])


@pytest.mark.parametrize(
    "entry, found",
    [
        ("log", AlertTarget("log")),
        ("file", AlertTarget("file")),
        (
            "webhook:https://hooks.example.org/T0/B1?x=1",
            AlertTarget("webhook", "https://hooks.example.org/T0/B1?x=1"),
        ),
        (
            "webhook:http://127.0.0.1:9093/alert",
            AlertTarget("webhook", "http://127.0.0.1:9093/alert"),
        ),
        (
            "command:mail -s 'a run' me@example.org",
            AlertTarget("command", "mail -s 'a run' me@example.org"),
        ),
    ],
)
def test_a_legal_target_is_taken_apart(entry, found):
    assert alert_target(entry) == found


@pytest.mark.parametrize(
    "entry, said",
    [
        ("logs", "did you mean log?"),
        ("webhok:https://x.org", "did you mean webhook?"),
        ("https://x.org/hook", "log, file, webhook:URL and command:WORDS"),
        ("", "legal are"),
        ("log:now", "write log alone"),
        ("webhook", "an address such as"),
        ("webhook:", "an address such as"),
        ("webhook:file:///etc/passwd", "an address such as"),
        ("webhook:https://", "an address such as"),
        ("webhook:https://x.org:99999/", "an address such as"),
        ("webhook:https://x.org:0/", "an address such as"),
        ("webhook:https://[::1/", "an address such as"),
        ("webhook:https://x.org/a b", "an address such as"),
        ("command:", "a command is missing"),
        ("command:   ", "a command is missing"),
        ("command:mail 'me", "is not closed"),
    ],
)
def test_an_illegal_target_is_refused_in_a_sentence_that_has_it(entry, said):
    with pytest.raises(ConfigError) as refused:
        alert_target(entry)
    sentence = str(refused.value)
    assert (
        said in sentence
        and sentence.startswith("telemetry.alerts has ")
        and sentence.endswith((".", "?"))
    )
    assert "\n" not in sentence and repr(entry) in sentence
