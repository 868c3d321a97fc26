"""Faults to be injected: the table of their kinds, and KIND@STEP:RANK as a person writes it.

    kill@40:1       rank 1 is killed as soon as 40 steps are taken
    kill@40:1.b     the same once more: what was done stays done, in RUN/survive/injected/, and a name of its own asks
                    again

A training process does its own (`survive.injector`), the supervisor those of nodes; some are made before the run
begins. Imports no JAX.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshtrain.errors import ConfigError, nearest, short

Moment = Literal["join", "restore", "init", "compile", "data", "dispatch", "save"]


@dataclass(frozen=True)
class FaultKind:
    """A way in which a run may be hurt."""

    name: str
    number: int  # in the catalogue of faults
    does: str
    # Who does it: start is before the run
    where: Literal["trainer", "supervisor", "start"]
    moment: Moment | None = None  # of a training process at which it does it
    always: bool = False  # in every process that comes so far, not once a request


_TABLE = (
    FaultKind("node-lost", 1, "the node is gone: its supervisor and its rank are killed", "supervisor"),
    FaultKind("leader-lost", 2, "the node that leads is gone", "supervisor"),
    FaultKind("coordinator-lost", 3, "the node of rank 0, which holds JAX's coordinator, is gone", "supervisor"),
    FaultKind("supervisor-frozen", 4, "the supervisor is stopped by SIGSTOP, its rank is not", "supervisor"),
    FaultKind("store-lost", 5, "the node no longer reaches the run directory", "supervisor"),
    FaultKind("kill", 6, "SIGKILL", "trainer", "dispatch"),
    FaultKind("segv", 7, "SIGSEGV", "trainer", "dispatch"),
    FaultKind("abort", 8, "SIGABRT", "trainer", "dispatch"),
    FaultKind("out-of-memory", 9, "asks XLA for more memory than there is", "trainer", "dispatch"),
    FaultKind("error", 10, "an exception in Python", "trainer", "dispatch"),
    FaultKind("kill-compile", 11, "SIGKILL before the step is compiled", "trainer", "compile"),
    FaultKind("kill-restore", 12, "SIGKILL before a checkpoint is restored", "trainer", "restore"),
    FaultKind("kill-save", 13, "SIGKILL while a checkpoint is written", "trainer", "save"),
    FaultKind("kill-two", 14, "SIGKILL of the rank and of the next one", "trainer", "dispatch"),
    FaultKind("kill-forming", 15, "SIGKILL before the rank joins the others", "trainer", "join"),
    FaultKind("frozen", 16, "SIGSTOP", "trainer", "dispatch"),
    FaultKind("asleep", 17, "sleeps for ever in host code", "trainer", "dispatch"),
    FaultKind("loader", 18, "the thread that reads data is stuck", "trainer", "data"),
    FaultKind("gil", 19, "never lets go of Python's lock", "trainer", "dispatch"),
    FaultKind("d-state", 20, "sleeps in the kernel, in state D", "trainer", "dispatch"),
    FaultKind("collective", 21, "gives a step what is never ready: all ranks wait in it", "trainer", "dispatch"),
    FaultKind("nan", 22, "NaN in a weight", "trainer", "dispatch"),
    FaultKind("nan-always", 23, "NaN in a weight whenever the step is reached", "trainer", "dispatch", always=True),
    FaultKind("bit-flip", 24, "one bit of a parameter flips, on one device that holds it", "trainer", "dispatch"),
    FaultKind("slow", 25, "half a step's time of sleep in each step from there on", "trainer", "dispatch", always=True),
    FaultKind("damage", 26, "a byte of the newest checkpoint flips, then SIGKILL", "trainer", "data"),
    FaultKind("disk-full", 27, "nothing more can be written", "start"),
    FaultKind("port-taken", 28, "the coordinator's port is in use", "supervisor"),
    FaultKind("bad-config", 29, "a config that no run can have", "start"),
    FaultKind("crash-loop", 30, "SIGKILL whenever the step is reached", "trainer", "dispatch", always=True),
    FaultKind("preempt", 31, "SIGTERM, as from a scheduler", "trainer", "dispatch"),
    FaultKind("node-returns", 32, "a node that was lost is there again", "supervisor"),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _TABLE}


@dataclass(frozen=True)
class FaultRequest:
    """One fault to be injected, under a name that no other request has."""

    name: str
    kind: FaultKind
    step: int  # done as soon as so many steps are taken
    rank: int


def parse(text: str, where: str = "survive.inject") -> list[FaultRequest]:
    """Returns the faults that KIND@STEP:RANK asks for, one or (kill-two) two; ConfigError, which names `where`, for
    what asks for none.
    """
    match = re.fullmatch(r"([^@]*)@(\d{1,9}):(\d{1,5})(\.\w{1,16})?", text, re.ASCII)
    if match is None:
        raise ConfigError(
            f"{where} has {short(repr(text))}; it must be KIND@STEP:RANK, as in kill@40:1."
        )
    name = match[1]
    step = int(match[2])
    rank = int(match[3])
    if name not in KINDS:
        ending = nearest(name, KINDS) or f"; legal are {', '.join(KINDS)}."
        raise ConfigError(
            f"{where} has {short(repr(text))}, but there is no fault {short(name)}{ending}"
        )
    requests = [FaultRequest(text, KINDS[name], step, rank)]
    if name == "kill-two":
        # its name says whom it is for
        requests.append(FaultRequest(f"{text}+1", KINDS[name], step, rank + 1))
    return requests


def requests(texts: Iterable[str], where: str = "survive.inject") -> list[FaultRequest]:
    """Returns the faults that a list of KIND@STEP:RANK asks for."""
    return [request for text in texts for request in parse(text, where)]


def claimed(done: Path, request: FaultRequest) -> bool:
    """Returns whether this process injects the fault: the first that asks, ever; kinds that are done always are for
    all.
    """
    if request.kind.always:
        return True
    try:
        done.mkdir(exist_ok=True)
        os.close(
            os.open(done / request.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        )
    except FileExistsError:
        return False
    return True
