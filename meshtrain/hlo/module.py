"""Parses the text of a compiled program: its computations, their calls and iteration counts, and the lines of Python
they came from.

A collective inside loops runs as often as the loops together turn; one inside a conditional runs at most so often, and
how often is known only to whoever wrote the predicate (for the pipeline: the schedule's table).

    ENTRY ──► while (8 turns) ──► conditional ──► while (4 turns) ──► all-reduce        trips 32, at most

With it XLA prints from which lines of Python each instruction came, as tables of files, functions, places and frames.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

Loops = tuple[int | None, ...]
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)
# the scope of loops that turn only where experts' loads are uneven (`parallel.rounds`)
FURTHER_ROUNDS = "further_rounds"
# Of rows on their way to experts, which may lie over the axis of others' messages.
EXPERT_MESSAGES = "expert_messages"

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


class HloLine(NamedTuple):
    """A line of Python that an instruction came from."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.number} {self.function.rpartition('<locals>.')[2]}"


def short_path(file: str) -> str:
    """Returns a source file without the machine's folders: from its package on, or `cell` for a notebook's."""
    path = Path(file)
    if "ipykernel" in file or file.startswith("<"):
        return "cell"
    for root in (
        Path(__file__).parents[2],
        *(parent for parent in path.parents if parent.name == "site-packages"),
    ):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction."""

    name: str
    opcode: str
    kind: str  # the collective it is, or ""
    # Type of what it yields, the bookkeeping of asynchronous forms taken off
    result: str
    # All behind the opening parenthesis: operands, and what XLA says besides
    attributes: str
    root: bool  # whether it is what its computation yields

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands; of a parameter its number."""
        listed = self.attributes[: _closing("(" + self.attributes) - 2]
        return tuple(
            operand.split()[-1].lstrip("%")
            for operand in _parts(listed)
            if operand.strip()
        )

    @property
    def source(self) -> str:
        """The JAX operation that it came from, with the transformations around it."""
        named = re.search(r'op_name="([^"]*)"', self.attributes)
        return named.group(1) if named else self.opcode


class Module:
    """The computations of an HLO module, and who calls whom how often."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Operation]] = {}
        self._named: dict[str, dict[str, Operation]] = {}
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
                root, name, text_of_it = instruction.groups()
                self.computations[current].append(
                    operation(name, _COMMENT.sub("", text_of_it), root is not None)
                )
        if not self.entry:
            raise ValueError("this text is no HLO module: it has no ENTRY computation")

    def lines(self, op: Operation) -> tuple[HloLine, ...]:
        """Returns the lines of Python that an instruction came from, the innermost first; none where XLA does not
        tell.
        """
        lines = []
        number_of_frame = _FRAME.search(op.attributes)
        frame = int(number_of_frame.group(1)) if number_of_frame else 0
        files, functions, places, frames = (self._tables[name] for name in _TABLES)
        while frame in frames:
            place, parent = map(int, re.findall(r"=(\d+)", frames[frame])[:2])
            file, function, number = map(int, re.findall(r"=(\d+)", places[place])[:3])
            lines.append(
                HloLine(files[file].strip('"'), number, functions[function].strip('"'))
            )
            # counted from 1, where 1 is none
            frame = parent - 1
        return tuple(lines)

    def walk(
        self,
        name: str | None = None,
        loops: Loops = (),
        conditionals: tuple[int, ...] = (),
    ) -> Iterator[tuple[Operation, Loops, tuple[int, ...]]]:
        """Yields every collective in the call tree, with the loops and the conditionals around it."""
        for op in self.computations[self.entry if name is None else name]:
            if op.kind:
                yield op, loops, conditionals
            elif op.opcode == "while":
                body, condition, turns = self.loop(op)
                yield from self.walk(body, (*loops, turns), conditionals)
                yield from self.walk(condition, (*loops, turns), conditionals)
            elif not op.opcode.endswith(
                ("-done", "-update")
            ):  # those name once more what was started
                inside = (
                    (*conditionals, len(loops))
                    if op.opcode == "conditional"
                    else conditionals
                )
                for computation in self.called(op):
                    yield from self.walk(computation, loops, inside)

    def bodies(
        self, name: str | None = None, loops: Loops = ()
    ) -> Iterator[tuple[str, Loops]]:
        """Yields the computations that are sequences of their own, the entry and each loop's body, with the turns of
        the loops around them.
        """
        name = self.entry if name is None else name
        yield name, loops
        yield from self._loops_in(name, loops)

    def _loops_in(self, name: str, loops: Loops) -> Iterator[tuple[str, Loops]]:
        for op in self.computations[name]:
            if op.opcode == "while":
                body, _, turns = self.loop(op)
                yield from self.bodies(body, (*loops, turns))
            elif op.opcode == "call":
                # which XLA's CPU backend puts around small loops, from JAX 0.12 on
                for called in self.called(op):
                    yield from self._loops_in(called, loops)

    def loop(self, op: Operation) -> tuple[str, str, int | None]:
        """Returns body, condition and turns of a while loop."""
        body, condition = (
            re.search(rf"\b{k}=%?([\w.\-]+)", op.attributes)
            for k in ("body", "condition")
        )
        assert body and condition, "a while loop has both"
        return body.group(1), condition.group(1), self._turns(op, condition.group(1))

    def called(self, op: Operation) -> list[str]:
        """Returns the computations that an instruction names, a loop's apart."""
        return [
            name
            for names in _CALLED.findall(op.attributes)
            for name in re.findall(r"[\w.\-]+", names)
        ]

    def named(self, computation: str) -> dict[str, Operation]:
        """Returns the instructions of a computation by name."""
        if computation not in self._named:
            self._named[computation] = {
                op.name: op for op in self.computations[computation]
            }
        return self._named[computation]

    def _turns(self, op: Operation, condition: str) -> int | None:
        """Returns the turns as XLA knows them, else the one integer that the condition compares with (JAX counts from 0
        by 1); of `FURTHER_ROUNDS` none.
        """
        if FURTHER_ROUNDS in op.attributes:
            return 0
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', op.attributes):
            return int(known.group(1))
        compared = list(self.computations[condition])
        for called in {c for o in compared for c in self.called(o)}:
            compared += self.computations[called]
        limits = [
            int(number.group(1))
            for constant in compared
            if constant.opcode == "constant"
            and re.match(r"[su]\d+\[\]", constant.result)
            for number in [re.match(r"(-?\d+)\)", constant.attributes)]
            if number
        ]
        return limits[0] if len(limits) == 1 else None


def operation(name: str, text: str, root: bool) -> Operation:
    """Parses `type opcode(operands), attributes`; a type is one array, or a tuple in parentheses."""
    end = _closing(text) if text.startswith("(") else text.index(" ")
    result = text[:end]
    rest = text[end:].lstrip()
    opcode, _, attributes = rest.partition("(")
    base = opcode.removesuffix("-start")
    kind = base if base in KINDS else ""
    # These start with (operands, results, ...); an all-reduce does so from JAX 0.12 on, with the operands in
    # parentheses.
    if kind and base != opcode and (kind != "all-reduce" or result.startswith("((")):
        result = _parts(result[1:-1])[1]
    return Operation(name, opcode, kind, result, attributes, root)


def _closing(text: str) -> int:
    """Returns the place behind the parenthesis that closes the first one of `text`."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"no closing parenthesis in {text[:60]}")


def _parts(listed: str) -> list[str]:
    """Splits at commas, but for those inside brackets."""
    depth = 0
    parts = []
    start = 0
    for i, c in enumerate(listed):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(listed[start:i])
            start = i + 1
    return [*parts, listed[start:]]


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Returns the groups of devices that communicate, from any of XLA's spellings:

        {{0,1},{2,3}}    [2,2]<=[4]    [2,2]<=[2,2]T(1,0)    mesh['a'=2,'b'=2] {'b'}    {} for all together

    The groups of a permutation are its pairs.
    """
    if listed := re.search(
        r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\},?\s*)*)\}",
        attributes,
    ):
        groups = [
            [int(n) for n in g.split(",")]
            for g in re.findall(r"\{([\d, ]+)\}", listed.group(1))
        ]
        return groups or [list(range(devices))]
    if named := re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}",
        attributes,
    ):
        return _named_groups(*named.groups())
    if iota := re.search(
        r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes
    ):
        return (
            _numbers(iota.group(2))
            .reshape([int(n) for n in iota.group(1).split(",")])
            .tolist()
        )
    raise ValueError(f"no replica groups in {attributes[:120]}")


def _numbers(text: str) -> np.ndarray:
    """Returns the numbers of `[2,4]T(1,0)`, counted up in that shape and transposed, flat; or those that are listed."""
    iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not iota:
        return np.array([int(n) for n in re.findall(r"\d+", text)])
    shape = [int(n) for n in iota.group(1).split(",")]
    order = (
        [int(n) for n in iota.group(2).split(",")]
        if iota.group(2)
        else list(range(len(shape)))
    )
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1)


def _named_groups(mesh: str, devices: str | None, along: str) -> list[list[int]]:
    """Returns groups along named axes of a mesh, `['a'=2,'b'=4] {'b'}`, or along parts of them, `'b':(1)2`: 2 of the 4,
    after 1.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    shape: list[int] = []
    grouped: list[int] = []
    parts = {
        name: (int(before), int(size))
        for name, before, size in re.findall(r"'([^']+)':\((\d+)\)(\d+)", along)
    }
    complete = re.findall(r"'([^']+)'(?!:)", along)
    for name, size in sizes.items():
        before, inside = parts.get(name, (1, size))
        if name in parts or name in complete:
            grouped.append(len(shape) + 1)
        shape += [before, inside, size // before // inside]
    numbers = _numbers(devices) if devices else np.arange(math.prod(shape))
    others = [d for d in range(len(shape)) if d not in grouped]
    members = math.prod(shape[d] for d in grouped)
    return (
        numbers.reshape(shape)
        .transpose([*others, *grouped])
        .reshape(-1, members)
        .tolist()
    )


def byte_count(kind: str) -> int:
    """Returns the bytes of an array type, or of all arrays of a tuple type."""
    return sum(
        math.ceil(_width(d) * math.prod(int(i) for i in n.split(",") if i))
        for d, n in _ARRAY.findall(kind)
    )


def _width(dtype: str) -> float:
    """Returns the bytes of one element: f32 has 4, bf16 2, f8e4m3fn 1, c64 8, and pred 1."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) / 8 if bits else 1


def elements(kind: str) -> int:
    """Returns the elements of the first array of a type."""
    first = _ARRAY.search(kind)
    return math.prod(int(i) for i in first.group(2).split(",") if i) if first else 0


def dtypes(kind: str) -> str:
    """Returns the element types in a type, as one word."""
    return "+".join(sorted({d for d, _ in _ARRAY.findall(kind)}))
