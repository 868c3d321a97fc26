"""Reads compiled XLA programs: their computations, who calls whom how often, and what a step sends by mesh axis.

The HLO text is read as XLA prints it. A collective inside loops runs as often as the loops together turn; one inside a conditional
runs at most so often, and how often is known only to whoever wrote the predicate (for the pipeline: the schedule's table).

    ENTRY ──► while (8 turns) ──► conditional ──► while (4 turns) ──► all-reduce        trips 32, at most

XLA prints with it from which lines of Python each instruction came, as tables of files, functions, places and frames.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from meshtrain.shown import Shown

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


class Line(NamedTuple):
    """A line of Python that an instruction came from."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.number} {self.function.rpartition('<locals>.')[2]}"


def short_path(file: str) -> str:
    """A source file without the machine's folders: from its package on, or `cell` for a notebook's."""
    path = Path(file)
    if "ipykernel" in file or file.startswith("<"):
        return "cell"
    for root in (Path(__file__).parents[1], *(parent for parent in path.parents if parent.name == "site-packages")):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction, as far as it matters here."""

    opcode: str
    kind: str  # the collective it is, or ""
    result: str  # type of what it yields, the bookkeeping of asynchronous forms taken off
    attributes: str

    @property
    def source(self) -> str:
        """The JAX operation that it came from, with the transformations around it."""
        named = re.search(r'op_name="([^"]*)"', self.attributes)
        return named.group(1) if named else self.opcode


class Module:
    """The computations of an HLO module, and who calls whom how often."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Operation]] = {}
        self.entry = current = ""
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        listed: dict[int, str] | None = None
        for line in text.splitlines():
            if line in self._tables:
                listed = self._tables[line]
            elif listed is not None and (entry := re.match(r"(\d+) (.*)", line)):
                listed[int(entry.group(1))] = entry.group(2)
                continue
            if header := _HEADER.match(line):
                current = header.group(2)
                self.computations[current] = []
                self.entry = current if header.group(1) else self.entry
            elif current and (instruction := _INSTRUCTION.match(line)):
                self.computations[current].append(operation(_COMMENT.sub("", instruction.group(2))))
        if not self.entry:
            raise ValueError("this text is no HLO module: it has no ENTRY computation")

    def lines(self, op: Operation) -> tuple[Line, ...]:
        """The lines of Python that an instruction came from, the innermost first; none where XLA does not tell."""
        found, told = [], _FRAME.search(op.attributes)
        frame = int(told.group(1)) if told else 0
        files, functions, places, frames = (self._tables[name] for name in _TABLES)
        while frame in frames:
            place, parent = map(int, re.findall(r"=(\d+)", frames[frame])[:2])
            file, function, number = map(int, re.findall(r"=(\d+)", places[place])[:3])
            found.append(Line(files[file].strip('"'), number, functions[function].strip('"')))
            # counted from 1, where 1 is none
            frame = parent - 1
        return tuple(found)

    def walk(
        self, name: str | None = None, loops: tuple[int | None, ...] = (), conditionals: tuple[int, ...] = ()
    ) -> Iterator[tuple[Operation, tuple[int | None, ...], tuple[int, ...]]]:
        """Every collective in the call tree, with the loops and the conditionals around it."""
        for op in self.computations[self.entry if name is None else name]:
            if op.kind:
                yield op, loops, conditionals
            elif op.opcode == "while":
                body, condition = (re.search(rf"\b{k}=%?([\w.\-]+)", op.attributes) for k in ("body", "condition"))
                assert body and condition, "a while loop has both"
                turns = (*loops, self._turns(op, condition.group(1)))
                yield from self.walk(body.group(1), turns, conditionals)
                yield from self.walk(condition.group(1), turns, conditionals)
            elif not op.opcode.endswith(("-done", "-update")):  # those name once more what was started
                inside = (*conditionals, len(loops)) if op.opcode == "conditional" else conditionals
                for called in _CALLED.findall(op.attributes):
                    for computation in re.findall(r"[\w.\-]+", called):
                        yield from self.walk(computation, loops, inside)

    def _turns(self, op: Operation, condition: str) -> int | None:
        """As XLA found them, else the one integer that the condition compares with (JAX counts from 0 by 1)."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', op.attributes):
            return int(known.group(1))
        compared = list(self.computations[condition])
        for called in {c for o in compared for c in _CALLED.findall(o.attributes)}:
            compared += self.computations[called.lstrip("%")]
        limits = [
            int(number.group(1))
            for constant in compared
            if constant.opcode == "constant" and re.match(r"[su]\d+\[\]", constant.result)
            for number in [re.match(r"(-?\d+)\)", constant.attributes)]
            if number
        ]
        return limits[0] if len(limits) == 1 else None


def operation(text: str) -> Operation:
    """From `type opcode(operands), attributes`; a type is one array, or a tuple in parentheses."""
    end = _closing(text) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    opcode, _, attributes = rest.partition("(")
    base = opcode.removesuffix("-start")
    kind = base if base in KINDS else ""
    # These start with (operands, results, ...); an all-reduce does so from JAX 0.12 on, with the operands in parentheses.
    if kind and base != opcode and (kind != "all-reduce" or result.startswith("((")):
        result = _second(result)
    return Operation(opcode, kind, result, attributes)


def _closing(text: str) -> int:
    """Where the parenthesis that opens `text` is closed."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"no closing parenthesis in {text[:60]}")


def _second(tuple_type: str) -> str:
    """The second element of a tuple type."""
    depth, parts, start = 0, [], 1
    for i, c in enumerate(tuple_type):
        depth += (c in "([{") - (c in ")]}")
        if (c == "," and depth == 1) or depth == 0:
            parts.append(tuple_type[start:i])
            start = i + 1
    return parts[1]


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Who talks to whom, in any of XLA's spellings:

        {{0,1},{2,3}}    [2,2]<=[4]    [2,2]<=[2,2]T(1,0)    mesh['a'=2,'b'=2] {'b'}    {} for all together

    Of a permutation, the pairs.
    """
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\},?\s*)*)\}", attributes):
        found = [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d, ]+)\}", listed.group(1))]
        return found or [list(range(devices))]
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}", attributes):
        return _named_groups(*named.groups())
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _numbers(iota.group(2)).reshape([int(n) for n in iota.group(1).split(",")]).tolist()
    raise ValueError(f"no replica groups in {attributes[:120]}")


def _numbers(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: counted up in that shape and transposed, flat; or the numbers themselves, in a row."""
    iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not iota:
        return np.array([int(n) for n in re.findall(r"\d+", text)])
    shape = [int(n) for n in iota.group(1).split(",")]
    order = [int(n) for n in iota.group(2).split(",")] if iota.group(2) else list(range(len(shape)))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1)


def _named_groups(mesh: str, devices: str | None, along: str) -> list[list[int]]:
    """Groups along named axes of a mesh, `['a'=2,'b'=4] {'b'}`, or along parts of them, `'b':(1)2`: 2 of the 4, after 1."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    shape: list[int] = []
    grouped: list[int] = []
    parts = {name: (int(before), int(size)) for name, before, size in re.findall(r"'([^']+)':\((\d+)\)(\d+)", along)}
    whole = re.findall(r"'([^']+)'(?!:)", along)
    for name, size in sizes.items():
        before, inside = parts.get(name, (1, size))
        if name in parts or name in whole:
            grouped.append(len(shape) + 1)
        shape += [before, inside, size // before // inside]
    numbers = _numbers(devices) if devices else np.arange(math.prod(shape))
    others = [d for d in range(len(shape)) if d not in grouped]
    members = math.prod(shape[d] for d in grouped)
    return numbers.reshape(shape).transpose([*others, *grouped]).reshape(-1, members).tolist()


def byte_count(kind: str) -> int:
    """Bytes of an array type, or of all arrays of a tuple type."""
    return sum(math.ceil(_width(d) * math.prod(int(i) for i in n.split(",") if i)) for d, n in _ARRAY.findall(kind))


def _width(dtype: str) -> float:
    """Bytes of one element: f32 has 4, bf16 2, f8e4m3fn 1, c64 8, and pred 1."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) / 8 if bits else 1


def dtypes(kind: str) -> str:
    """The element types in a type, as one word."""
    return "+".join(sorted({d for d, _ in _ARRAY.findall(kind)}))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program, at one place of its call tree."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # the mesh axes along which it talks, in the mesh's order; () if every group is one device
    ranks: int  # devices that talk to each other
    bytes: int  # of the full buffer on one device: what is reduced, what is gathered, what is scattered, the message
    dtype: str  # as HLO writes it: f32, bf16, ...
    loops: tuple[int | None, ...]  # turns of the enclosing loops, outermost first; None: not known before it runs
    conditionals: tuple[int, ...]  # for each enclosing conditional, how many of `loops` are around it
    source: str  # the JAX operation it came from
    lines: tuple[Line, ...] = ()  # of Python that it came from, the innermost first
    busy: float = 1.0  # share of the trips that are made: 1 unless in conditionals

    @property
    def where(self) -> str:
        """The line that it came from and the one that called that, in short; what only stands between JAX's versions is left out."""
        return " ← ".join([str(line) for line in self.lines if Path(line.file).name != "compat.py"][:2])

    @property
    def backward(self) -> bool:
        """Whether it is in the transpose of what its line says."""
        return "transpose(" in self.source

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
    def times(self) -> float:
        """Executions in one run of the program, on average over the devices."""
        return self.trips * self.busy

    @property
    def sent(self) -> float:
        """Bytes that one device sends in one execution, by a ring: n-1 of n parts, twice for an all-reduce; a message once."""
        if self.kind == "collective-permute":
            return float(self.bytes)
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (self.ranks - 1) / self.ranks


class Collectives(Shown, list[Collective]):
    """The collectives of a program."""

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes that one device sends in one run of the program, by axis."""
        total: dict[str, float] = defaultdict(float)
        for c in self:
            total[c.axis] += c.sent * c.times
        return dict(total)


def collectives(compiled: str | jax.stages.Compiled, mesh: Mesh, busy: float = 1.0) -> Collectives:
    """Every collective of a compiled program (or of its HLO text) that ran on `mesh`.

    `busy` is how often the branches of its conditionals are taken, of all times, that hold collectives.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None, "this backend keeps no HLO"
    program = Module(text)
    return Collectives(
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
            busy=busy if conditionals else 1.0,
        )
        for op, loops, conditionals in program.walk()
        for axes, ranks in [_axes(op.attributes, mesh)]
    )


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
    groups = replica_groups(attributes, mesh.size)
    places = np.stack(np.unravel_index(np.arange(mesh.size), mesh.devices.shape), axis=-1)
    along = {a for group in groups for a in np.flatnonzero((places[group] != places[group[0]]).any(axis=0))}
    return tuple(name for i, name in enumerate(mesh.axis_names) if i in along), max(len(g) for g in groups)
