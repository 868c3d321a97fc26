"""Where alerts may go: what is legal is taken apart, what is not is refused in one sentence."""

import pytest

from meshtrain.errors import ConfigError
from meshtrain.telemetry.entries import Entry, check


@pytest.mark.parametrize(
    "entry, found",
    [
        ("log", Entry("log")),
        ("file", Entry("file")),
        ("webhook:https://hooks.example.org/T0/B1?x=1", Entry("webhook", "https://hooks.example.org/T0/B1?x=1")),
        ("webhook:http://127.0.0.1:9093/alert", Entry("webhook", "http://127.0.0.1:9093/alert")),
        ("command:mail -s 'a run' me@example.org", Entry("command", "mail -s 'a run' me@example.org")),
    ],
)
def test_what_is_legal_is_taken_apart(entry, found):
    assert check(entry) == found


@pytest.mark.parametrize(
    "entry, said",
    [
        ("logs", "did you mean log?"),
        ("webhok:https://x.org", "did you mean webhook?"),
        ("https://x.org/hook", "legal are log, file, webhook:URL and command:WORDS"),
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
def test_what_is_not_is_refused_in_a_sentence_that_has_it(entry, said):
    with pytest.raises(ConfigError) as refused:
        check(entry)
    sentence = str(refused.value)
    assert said in sentence and sentence.startswith("telemetry.alerts has ") and sentence.endswith((".", "?"))
    assert "\n" not in sentence and repr(entry) in sentence
