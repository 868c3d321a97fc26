"""Reads the traffic of a compiled program: its collectives by mesh axis, kind, bytes, times and line.

It also reads the bytes that arrays hold.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshtrain.hlo.module import (
    EXPERT_MESSAGES,
    HloLine,
    Module,
    Operation,
    byte_count,
    dtypes,
    replica_groups,
)
from meshtrain.registry import Shown


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program, at one place of its call tree."""

    kind: str  # one of KINDS
    axes: tuple[
        str, ...
        # The mesh axes along which it talks, in the mesh's order; () if every group is one device
    ]
    ranks: int  # devices that talk to each other
    # Of the full buffer on one device: what is reduced, what is gathered, what is scattered, the message
    bytes: int
    dtype: str  # as HLO writes it: f32, bf16, ...
    # turns of the enclosing loops, outermost first; None: not known before it runs
    loops: tuple[int | None, ...]
    # for each enclosing conditional, how many of `loops` are around it
    conditionals: tuple[int, ...]
    source: str  # the JAX operation it came from
    lines: tuple[HloLine, ...] = ()  # of Python that it came from, the innermost first
    busy: float = 1.0  # share of the trips that are made: 1 unless in conditionals
    # share of the devices that send: in a permutation not all need to, and `sent` is what one that does sends
    senders: float = 1.0

    @property
    def where(self) -> str:
        """The line that it came from and its caller, in short, without those of `meshtrain.compat`."""
        return " ← ".join(
            [
                str(line)
                for line in self.lines
                if not Path(line.file).name.startswith("compat")
            ][:2]
        )

    @property
    def backward(self) -> bool:
        """Returns whether it is in the transpose of what its line says."""
        return "transpose(" in self.source

    @property
    def axis(self) -> str:
        """The axes as one word, for tables: 'data', 'data+tensor', or 'none'."""
        return "+".join(self.axes) or "none"

    @property
    def trips(self) -> int:
        """Executions in one run of the program, conditionals always taken.

        ValueError if a loop's turns are not known.
        """
        if None in self.loops:
            raise ValueError(
                f"the {self.kind} of {self.source} stands in a loop whose number of turns HLO does not tell"
            )
        return math.prod(n for n in self.loops if n is not None)

    @property
    def times(self) -> float:
        """Executions in one run of the program, on average over the devices."""
        return self.trips * self.busy

    @property
    def sent(self) -> float:
        """Bytes that one device sends in one execution, by a ring: n-1 of n parts, twice for an all-reduce; a message
        once.
        """
        if self.kind == "collective-permute":
            return float(self.bytes)
        return (
            (2 if self.kind == "all-reduce" else 1)
            * self.bytes
            * (self.ranks - 1)
            / self.ranks
        )


class CompiledCollectives(Shown, list[Collective]):
    """The collectives of a program."""

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes that one device sends in one run of the program, by axis."""
        total: dict[str, float] = defaultdict(float)
        for c in self:
            # groups of one device send nothing
            if c.axes:
                total[c.axis] += c.sent * c.times
        return dict(total)

    @property
    def summary(self) -> str:
        """Summarises the traffic, most frequent first: 12 all-reduce over data, 8 all-gather over tensor.

        It has at most 405 letters.
        """
        counts: dict[str, int] = defaultdict(int)
        for c in self:
            if c.axes:
                counts[f"{c.kind} over {c.axis}"] += math.prod(
                    n for n in c.loops if n is not None
                )
        most_first = sorted(counts.items(), key=lambda named: -named[1])
        line = ", ".join(f"{count} {name}" for name, count in most_first)
        return line if len(line) <= 400 else re.sub(r", [^,]*$", ", ...", line[:400])


def collectives(
    compiled: str | jax.stages.Compiled | Module,
    mesh: Mesh | AbstractMesh,
    taken: Callable[[str], float] = lambda source: 1.0,
    body: str | None = None,
) -> CompiledCollectives:
    """Returns every collective of a compiled program (its HLO text, its `Module`) for `mesh`, or those of one turn of
    one loop's body.

    `taken` says of a collective in a conditional, by its source, how often that is taken, of all times.
    """
    program = compiled if isinstance(compiled, Module) else _read(compiled)
    return CompiledCollectives(
        Collective(
            kind=op.kind,
            axes=axes,
            ranks=ranks,
            bytes=byte_count(op.result) * (ranks if op.kind == "reduce-scatter" else 1),
            dtype=dtypes(op.result),
            loops=loops,
            conditionals=conditionals,
            source=op.source,
            lines=program.lines(op),
            busy=taken(op.source) if conditionals else 1.0,
            senders=senders(op, mesh.size),
        )
        for op, loops, conditionals in program.walk(body)
        for axes, ranks in [axes_of(op, mesh)]
    )


def _read(compiled: str | jax.stages.Compiled) -> Module:
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None, "this backend keeps no HLO"
    return Module(text)


def live_bytes(tree: Any, device: jax.Device | None = None) -> int:
    """Returns the bytes of the arrays of `tree` on `device`; on the device with the most of them, if none is given."""
    per_device: dict[jax.Device, int] = defaultdict(int)
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            per_device[shard.device] += shard.data.nbytes
    if device is not None:
        return per_device[device]
    return max(per_device.values(), default=0)


def senders(op: Operation, devices: int) -> float:
    """Returns the share of the devices that send."""
    if op.kind == "collective-permute":
        return len(replica_groups(op.attributes, devices)) / devices
    return 1.0


def axes_of(op: Operation, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes along which a collective's groups extend, and the devices in a group; `expert` in the place
    of `context` where experts lie over that, and beside `tensor` where rows go to experts over a part of both.

    HLO counts devices by their place in the mesh (`mesh.devices.flat`), whatever their own ids are.
    """
    groups = replica_groups(op.attributes, mesh.size)
    places = np.stack(np.unravel_index(np.arange(mesh.size), mesh.axis_sizes), axis=-1)
    along = {
        a
        for group in groups
        for a in np.flatnonzero((places[group] != places[group[0]]).any(axis=0))
    }
    axes = tuple(name for i, name in enumerate(mesh.axis_names) if i in along)
    swapped = op.kind == "all-to-all" and "tensor" in axes
    if ("context" in axes or swapped) and EXPERT_MESSAGES in op.attributes:
        others = tuple(axis for axis in axes if axis not in ("expert", "context"))
        axes = ("expert", *others)
    return axes, max(len(g) for g in groups)
