"""What a compiled step sends and what a live state holds: the collectives of its HLO by mesh axis, and bytes per device.

The HLO text is read as XLA prints it. A collective inside loops runs as often as the loops together turn; one inside a conditional
runs at most so often, and how often is known only to whoever wrote the predicate (for the pipeline: the schedule's table).

    ENTRY ──► while (8 turns) ──► conditional ──► while (4 turns) ──► all-reduce        trips 32, at most
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshtrain import hlo


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program, at one place of its call tree."""

    kind: str  # one of hlo.KINDS
    axes: tuple[str, ...]  # the mesh axes along which it talks, in the mesh's order; () if every group is one device
    ranks: int  # devices that talk to each other
    bytes: int  # of the full buffer on one device: what is reduced, what is gathered, what is scattered, the message
    dtype: str  # as HLO writes it: f32, bf16, ...
    loops: tuple[int | None, ...]  # turns of the enclosing loops, outermost first; None: not known before it runs
    conditionals: tuple[int, ...]  # for each enclosing conditional, how many of `loops` are around it
    source: str  # the JAX operation it came from

    @property
    def axis(self) -> str:
        """The axes as one word, for tables: 'data', 'data+tensor', or 'none'."""
        return "+".join(self.axes) or "none"

    @property
    def trips(self) -> int:
        """Executions in one run of the program, conditionals always taken. ValueError if a loop's turns are not known."""
        if None in self.loops:
            raise ValueError(
                f"the {self.kind} of {self.source} stands in a loop whose number of turns HLO does not tell"
            )
        return math.prod(n for n in self.loops if n is not None)

    @property
    def sent(self) -> float:
        """Bytes that one device sends in one execution, by a ring: n-1 of n parts, twice for an all-reduce; a message once."""
        if self.kind == "collective-permute":
            return float(self.bytes)
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (self.ranks - 1) / self.ranks


def collectives(compiled: str | jax.stages.Compiled, mesh: Mesh) -> list[Collective]:
    """Every collective of a compiled program (or of its HLO text) that ran on `mesh`."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None, "this backend keeps no HLO"
    program = hlo.Program(text)
    return [
        Collective(
            kind=op.kind,
            axes=axes,
            ranks=ranks,
            bytes=hlo.byte_count(op.result) * (ranks if op.kind == "reduce-scatter" else 1),
            dtype=hlo.dtypes(op.result),
            loops=loops,
            conditionals=conditionals,
            source=op.source,
        )
        for op, loops, conditionals in program.walk()
        for axes, ranks in [_axes(op.attributes, mesh)]
    ]


def traffic(found: Iterable[Collective], taken: Callable[[Collective], float] = lambda c: 1.0) -> dict[str, float]:
    """Bytes that one device sends in one run of the program, by axis; `taken` is the share of a collective's trips that execute."""
    total: dict[str, float] = defaultdict(float)
    for c in found:
        total[c.axis] += c.sent * c.trips * taken(c)
    return dict(total)


def live_bytes(tree: Any, device: jax.Device | None = None) -> int:
    """Bytes of the arrays of `tree` on `device`; on the device that holds the most of them, if none is given."""
    held: dict[jax.Device, int] = defaultdict(int)
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held[device] if device is not None else max(held.values(), default=0)


def _axes(attributes: str, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which a collective's groups extend, and the devices in a group.

    HLO counts devices by their place in the mesh (`mesh.devices.flat`), whatever their own ids are.
    """
    groups = hlo.groups(attributes, mesh.size)
    places = np.stack(np.unravel_index(np.arange(mesh.size), mesh.devices.shape), axis=-1)
    along = {a for group in groups for a in np.flatnonzero((places[group] != places[group[0]]).any(axis=0))}
    return tuple(name for i, name in enumerate(mesh.axis_names) if i in along), max(len(g) for g in groups)
