"""Defines the records that supervisors write for one another: JSON of fixed fields, checked when it is read.

Nothing of a record is ever executed.

    a node's record   what it does, rewritten in place           Node
    a plan            what the leader decided, one file each     RestartPlan

A file that holds no valid record is passed over, as if it were not there.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshtrain.run.rows import parse

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST = 1 << 62  # of a number
LARGEST = 1 << 24  # bytes of a plan that are read: of 65,536 nodes it has 9 MB


@dataclasses.dataclass(frozen=True)
class Supervised:
    """Holds the settings that a supervisor passes to the process that it starts."""

    local: Path  # the node's own directory, with `beat` and `lease`
    generation: Path  # of this generation, in the run directory
    number: int  # of the generation
    rank: int
    # Seconds without a change of the lease after which the process ends itself
    fence: float
    survive: Path  # RUN/survive

    def own(self, ending: str) -> Path:
        """Returns a file of this rank in the generation's directory."""
        return self.generation / f"rank-{self.rank}.{ending}"


@dataclasses.dataclass(frozen=True)
class Rank:
    """A node's training process, as its supervisor sees it; from `step` on as it reports itself
    (`survive.heartbeat`).
    """

    number: int
    pid: int
    proc: str = ""  # its state in /proc: R S D T Z
    phase_age: float = 0.0  # seconds in this phase, on the node's clock
    alive_age: float = 0.0  # seconds since its thread gave a sign of life
    stack: str = ""  # where its main thread is, if it was asked
    step: int = 0
    phase: str = "start"
    pace: float | None = None
    # seconds so far in those of steps, `survive.heartbeat.STEPPING`
    phases: dict[str, float] | None = None
    seconds: dict[str, float] | None = None  # so far, by kind
    saved: int | None = None
    start: int | None = None
    matmul: dict[str, float] | None = None
    collectives: str | None = None


@dataclasses.dataclass(frozen=True)
class ProcessEnd:
    """Describes how a training process ended; `exit` is negative for a signal."""

    exit: int
    kind: str
    sentence: str
    step: int = 0
    ranks: list[int] = dataclasses.field(default_factory=list)  # that it blames


@dataclasses.dataclass(frozen=True)
class Node:
    """A node. The reader of a record adds the fields after `digests`."""

    name: str
    incarnation: str = ""  # of its supervisor
    host: str = ""
    machine: str = ""  # in which its process number means something
    pid: int = 0
    address: str = ""
    port: int | None = None  # free for a coordinator when it acknowledged
    sequence: int = 0
    wall: float = 0.0  # on its own clock
    state: str = "idle"  # idle, running, ended
    generation: int = 0  # of its process
    acked: int = 0  # no process of a generation before this one is left
    leaving: bool = False
    rank: Rank | None = None
    end: ProcessEnd | None = None
    digests: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # of config and code, and versions: `survive.view`
    age: float = 0.0  # seconds since its record changed, on the reader's clock
    known: float = 0.0  # seconds since the reader saw it first
    ended_for: float = 0.0  # seconds since the reader saw that its process has ended
    differs: str = ""  # in what from the reader's node, as a sentence


@dataclasses.dataclass(frozen=True)
class RestartPlan:
    """A decision of the leader. `kind` says why there is a new generation, `reason` says it to people."""

    number: int
    generation: int
    state: str  # forming, running, stopping, over
    leader: str
    wall: float
    kind: str
    reason: str
    verdict: str = ""
    # In the order of their ranks
    members: list[str] = dataclasses.field(default_factory=list)
    incarnations: list[str] = dataclasses.field(default_factory=list)  # of the members
    coordinator: str | None = None
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    microbatches: int = 0
    blamed: list[str] = dataclasses.field(default_factory=list)
    step: int | None = None  # steps taken when it happened
    code: int = 0
    delay: float = 0.0  # seconds to wait before the next generation
    quarantined: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # until when, on the leader's clock
    age: float = 0.0  # seconds since the reader saw it first

    def is_complete(self) -> bool:
        """Returns whether it has what a supervisor needs in its state to follow it."""
        if self.state not in ("running", "stopping"):
            return self.state in ("forming", "over")
        same = len(self.members) == len(self.incarnations) == len(set(self.members)) > 0
        return same and (len(self.members) == 1 or self.coordinator is not None)


@dataclasses.dataclass(frozen=True)
class SupervisorOptions:
    """The config's section `survive`, and how many of a number of nodes a mesh would use (None: there is no mesh)."""

    used: Callable[[int], int | None]
    wanted: int = 1
    least: int = 1
    join_timeout: float = 300.0
    step_timeout: float = 0.0
    node_timeout: float = 20.0
    restarts: int = 20
    # Seconds that a slow disk takes for a node's share of a checkpoint
    moving: float = 0.0
    holder: str = ""  # who has the run's lock while a generation forms

    @property
    def heartbeat(self) -> float:
        """Returns the seconds between two signs of life of a node."""
        return min(2.0, max(0.25, self.node_timeout / 10))


def encode(record: Any, size: int = 0) -> bytes:
    """Returns one line of JSON, padded with spaces to `size` bytes; texts are cut off until it fits."""
    line = json.dumps(dataclasses.asdict(record))
    most = 256
    while size and len(line) >= size and most > 8:
        # A letter may take 12 bytes.
        most //= 2
        line = json.dumps(_shortened(dataclasses.asdict(record), most))
    return line.ljust(max(size - 1, 0)).encode() + b"\n"


def _shortened(value: Any, most: int) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(v, most) for name, v in value.items()}
    # Names are not shortened: 64 letters.
    if isinstance(value, str) and value.isascii():
        return value[: max(most, 64)]
    return value[:most] if isinstance(value, str | list) else value


def decode(kind: type[T], text: bytes) -> T | None:
    """Returns the record, or None for what is none: cut off, not JSON, of other types.

    Fields that this version does not know are left out.
    """
    fields = parse(text)
    return None if fields is None else record_of(kind, fields)


def record_of(kind: type[T], fields: Mapping[str, Any]) -> T | None:
    """Returns the record of fields that were read as JSON, or None, as `decode`."""
    try:
        return _checked(fields, kind)  # type: ignore[no-any-return]
    except TypeError:
        return None


def _checked(value: Any, kind: Any) -> Any:
    """Returns a value of JSON as its type has it; TypeError if it is of another one, or lacks a field."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = typing.get_args(kind)[0]  # of X | None
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        entries = [entry for entry in dataclasses.fields(kind) if entry.name in value]
        checked = {
            entry.name: _checked(value[entry.name], entry.type) for entry in entries
        }
        return kind(**checked)  # type: ignore[operator]
    if origin is list and isinstance(value, list):
        return [_checked(v, inner[0]) for v in value]
    if origin is dict and isinstance(value, dict):
        return {name: _checked(v, inner[1]) for name, v in value.items()}
    if kind in (int, float):
        # Neither infinite nor without a value, nor too large to be reckoned with.
        is_one = (
            isinstance(value, int | kind)
            and not isinstance(value, bool)
            and -MOST <= value <= MOST
        )
    else:
        is_one = origin is None and isinstance(value, kind)
    if not is_one:
        raise TypeError(f"{kind} is expected")
    return value
