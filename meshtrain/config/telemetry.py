"""The section `telemetry`: how a run is watched, and where its alerts go. No key here changes what a step computes.

    log                  a sentence on stderr
    file                 a line of RUN/alerts.jsonl
    webhook:$VARIABLE    JSON, by POST to the address that a variable of the environment holds
    webhook:URL          the same, of an address without a secret in it
    command:WORD WORD    a program, which finds the JSON on its standard input

Several may be listed; each alert goes to all of them.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast
from urllib.parse import urlsplit

from meshtrain.config.key import Resume, key
from meshtrain.errors import ConfigError, masked, nearest, short

FREE = Resume.FREE

Tracker = Literal["tensorboard", "wandb", "mlflow"]
AlertKind = Literal["log", "file", "webhook", "command"]
PLAIN: tuple[AlertKind, ...] = ("log", "file")
VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
# Hosts of services whose webhooks ask for no password besides.
_SERVICES = re.compile(
    r"(^|\.)((hooks?|webhooks?)\.|(slack|discord|discordapp|telegram|office|zapier|pagerduty|opsgenie)\.[a-z]+$|"
    r"logic\.azure\.com$|chat\.googleapis\.com$)"
)
# Followed by a colon, and by where to
ADDRESSED: tuple[AlertKind, ...] = ("webhook", "command")


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class TelemetryConfig:
    every: float = key(
        10.0, "seconds between two samples of what a process and its machine use; at least 1, of many processes more; "
              "0: none",
        least=0.0, most=86400.0, resume=FREE
    )
    endpoint: int = key(
        0, "port of the first process's page of metrics for Prometheus, the next ones of a machine have the next "
           "ports; 0: none",
        least=0, most=65535, resume=FREE
    )
    bind: str = key("127.0.0.1", "address that the endpoint listens on; 0.0.0.0 shows it to everyone, without a "
                                 "password", resume=FREE)
    trackers: tuple[Tracker, ...] = key(
        (), "where rows of metrics also go; wandb and mlflow are extras of these names (pip install -e "
            "'.[wandb]' in the checkout)",
        resume=FREE
    )
    trace_at: tuple[int, ...] = key(
        (), "steps before which the profiler starts; traces/STEP/ then has what it saw",
        least=1, resume=FREE
    )
    trace_steps: int = key(3, "steps that one trace takes in", least=1, most=100, resume=FREE)
    experts_every: int = key(
        0, "experts: steps between two rows of metrics that also have the tokens of each expert, and each layer's "
           "load, entropy and drops; 0: none",
        least=0, resume=FREE, counts=lambda c: c.model.moe.experts > 0
    )
    memory_limit: float = key(
        0.0, "GiB of host memory that a process is to stay below, for the alert; 0: what its cgroup allows, if "
             "anything",
        least=0.0, most=1e6, resume=FREE
    )
    alerts: tuple[str, ...] = key(("log", "file"), "where alerts go: log (stderr), file (alerts.jsonl), "
                                                   "webhook:$VARIABLE, webhook:URL, command:WORDS", resume=FREE)
# fmt: on


def problems(telemetry: TelemetryConfig, steps: float) -> Iterator[str]:
    """Yields a sentence on keys that contradict each other, ConfigError for no place of alerts.

    `steps`: of the whole run.
    """
    for text in telemetry.alerts:
        alert_target(text)
    for name in ("trackers", "alerts", "trace_at"):
        values = getattr(telemetry, name)
        if twice := [value for k, value in enumerate(values) if value in values[:k]]:
            yield f"telemetry.{name} has {short(twice[0])} twice; name it once."
    if late := [step for step in telemetry.trace_at if step > steps]:
        yield f"telemetry.trace_at has {late[0]}, but train.steps is {steps}: that step is never reached."


class AlertTarget(NamedTuple):
    """One place for alerts.

    `address`: the URL or the $VARIABLE that has it, or the command's words in one line; empty for the plain ones.
    """

    kind: AlertKind
    address: str = ""


def alert_target(text: str) -> AlertTarget:
    """Returns the target that one text of `telemetry.alerts` names. Raises ConfigError if no alert could go there."""
    name, colon, address = text.partition(":")
    if name in PLAIN and not colon:
        return AlertTarget(cast(AlertKind, name))
    where = f"telemetry.alerts has {short(repr(f'{name}:…' if holds_secret(address) else text))}"
    if name in PLAIN:
        raise ConfigError(
            f"{where}; {name} takes nothing after it, so write {name} alone."
        )
    if name not in ADDRESSED:
        legal = "legal are log, file, webhook:URL and command:WORDS"
        raise ConfigError(
            f"{where}; {legal}{nearest(name, (*PLAIN, *ADDRESSED)) or '.'}"
        )
    if (
        name == "webhook"
        and not VARIABLE.fullmatch(address)
        and ("$" in address or not is_url(address))
    ):
        raise ConfigError(
            f"{where}; a webhook is an address such as webhook:https://host/path, or webhook:$VARIABLE."
        )
    if name == "command":
        try:
            words = shlex.split(address)
        except ValueError:
            raise ConfigError(
                f"{where}; a quotation mark of the command is not closed."
            ) from None
        if not words or not words[0]:
            raise ConfigError(
                f"{where}; a command is missing after the colon, as in command:mail -s alert me."
            )
    return AlertTarget(cast(AlertKind, name), address)


def holds_secret(webhook: str) -> bool:
    """Returns whether who knows a webhook's URL may post to it: by the service, or by a part that looks like a
    token.
    """
    host = webhook.partition("://")[2].partition("/")[0]
    words = re.split(r"[^\w-]", webhook.replace(host, "", 1))
    return (
        masked(webhook) != webhook
        or _SERVICES.search(host) is not None
        or any(map(_is_random, words))
    )


def _is_random(word: str) -> bool:
    return (
        len(word) >= 20
        and re.search("[0-9]", word) is not None
        and re.search("[A-Za-z]", word) is not None
    )


def is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(host)
        and port != 0
        and url.isascii()
        and url.isprintable()
        and " " not in url
    )
