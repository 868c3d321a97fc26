"""What the instructions of a compiled program read and write in memory, what they multiply, and what messages travel
under.

    instruction ──► bytes read and written          a slice reads what it yields; an update in place writes the update, not the buffer
                └─► FLOPs of matrix products
    collective  ──► FLOPs between its start and its done, in the order in which the program is issued

An instruction outside fusions reads its operands from memory and writes its results there; inside a fusion values stay
in registers. So the bytes of a program are those of its top-level instructions (the model of XLA's own
HloCostAnalysis).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.hlo.module import Module, Operation, byte_count, elements

# These only name what is in memory, begin the program's loops (whose bodies are counted by themselves), or are the ends
# of what was started.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "optimization-barrier",
    "opt-barrier", "partition-id", "replica-id", "while",
}  # fmt: skip
# These compute nothing: a fusion of them alone fills or copies (a select, under a mask).
_MOVES = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "broadcast", "copy", "copy-start", "transpose", "reshape",
    "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reverse", "iota", "select", "fusion",
}  # fmt: skip
_INDICES = 64  # elements: results as small as that are places and predicates
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_CALLS = ("call", "conditional", "async-start")


@dataclass(frozen=True)
class Moved:
    """Bytes that an instruction reads from memory and writes there."""

    read: float = 0.0
    written: float = 0.0

    @property
    def bytes(self) -> float:
        return self.read + self.written

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.read + other.read, self.written + other.written)


@dataclass(frozen=True)
class IssuedCollective:
    """A collective at one place of the program, and what is done between its start and its done."""

    op: Operation
    body: str  # the computation that it stands in
    bytes: int  # of what it yields on a device
    loops: tuple[int | None, ...]  # turns of the loops around it, outermost first
    # of the matrix products that it travels under, those of whole loops included; 0 where it is waited for at once
    flops: float


class Work:
    """The instructions of a module weighed. A loop whose turns HLO does not tell counts as one turn."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._fusions: dict[str, tuple[dict[int, float], float]] = {}
        self._flops: dict[str, float] = {}

    def moved(self, computation: str, op: Operation) -> Moved:
        """Bytes that an instruction of `computation` reads and writes; none of what is inside its loops."""
        if op.opcode in _FREE or op.opcode.endswith(("-done", "-update")):
            return Moved()
        if op.opcode in _CALLS:
            inner = [self.total(called) for called in self.module.called(op)]
            return max(inner, key=lambda moved: moved.bytes, default=Moved())
        known = self.module.named(computation)
        operands = [
            byte_count(known[name].result) for name in op.operands if name in known
        ]
        result = byte_count(op.result)
        if op.opcode == "fusion":
            shares, written = self._fusion(*self.module.called(op))
            return Moved(
                sum(shares.get(i, 0.0) * size for i, size in enumerate(operands)),
                written,
            )
        if op.opcode == "copy-start":
            return Moved(operands[0], operands[0])
        if op.opcode in _SLICES:
            return Moved(result, result)
        if op.opcode == "dynamic-update-slice":
            return Moved(operands[1], operands[1])
        if op.opcode == "scatter":
            # the rows that stand there are read, added to and written
            return Moved(operands[1] + 2 * operands[2], operands[2])
        if op.opcode == "custom-call":
            # what it yields besides arrays of numbers is scratch
            return Moved(
                sum(operands), byte_count(re.sub(r"\b[su]8\[[\d,]*\]", "", op.result))
            )
        return Moved(sum(operands), result)

    def total(self, computation: str) -> Moved:
        """Bytes that the instructions of a computation move, without what is inside its loops."""
        return sum(
            (
                self.moved(computation, op)
                for op in self.module.computations[computation]
            ),
            start=Moved(),
        )

    def only_moves(self, op: Operation) -> bool:
        """True if an instruction computes nothing: it fills, copies, cuts out or puts in."""
        if op.opcode == "fusion":
            inner = (
                other
                for name in self.module.called(op)
                for other in self.module.computations[name]
            )
            return all(
                self.only_moves(other)
                for other in inner
                if elements(other.result) > _INDICES
            )
        return op.opcode in _MOVES

    def flops(self, computation: str, op: Operation) -> float:
        """FLOPs of the matrix products that an instruction is or holds, of a loop all turns."""
        if op.opcode == "while":
            body, _, turns = self.module.loop(op)
            return (1 if turns is None else turns) * self.products(body)
        if op.opcode == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
            return self._product(
                computation, op, contracted.group(1).split(",") if contracted else []
            )
        if op.opcode == "custom-call":
            if "__cublas" in op.attributes:
                contracted = re.search(
                    r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.attributes
                )
                return self._product(
                    computation,
                    op,
                    re.findall(r"\d+", contracted.group(1)) if contracted else [],
                )
            return self._attention(computation, op)
        inner = [self.products(called) for called in self.module.called(op)]
        # of a conditional one branch is run: the dearest, as for `moved`
        return max(inner, default=0.0) if op.opcode == "conditional" else sum(inner)

    def products(self, computation: str) -> float:
        """FLOPs of the matrix products of a computation, loops and all."""
        if computation not in self._flops:
            ops = self.module.computations[computation]
            self._flops[computation] = sum(self.flops(computation, op) for op in ops)
        return self._flops[computation]

    def issued(self, kind: str) -> Iterator[IssuedCollective]:
        """Every collective of a kind (of `module.KINDS`), and what it travels under."""
        for body, loops in self.module.bodies():
            ops = self.module.computations[body]
            done = {
                op.operands[0]: i
                for i, op in enumerate(ops)
                if op.opcode == f"{kind}-done"
            }
            for i, op in enumerate(ops):
                if op.kind == kind:
                    between = ops[i + 1 : done.get(op.name, i)]
                    flops = sum(self.flops(body, other) for other in between)
                    yield IssuedCollective(
                        op, body, byte_count(op.result), loops, flops
                    )

    def _product(self, computation: str, op: Operation, contracted: list[str]) -> float:
        left = self.module.named(computation)[op.operands[0]].result
        sizes = re.findall(r"\d+", left[left.index("[") : left.index("]")])
        return (
            2.0
            * elements(op.result)
            * math.prod(int(sizes[int(i)]) for i in contracted if i)
        )

    def _attention(self, computation: str, op: Operation) -> float:
        """FLOPs of cuDNN's fused attention (backward: five products in place of two); half of them where it skips what
        a mask hides.
        """
        scores = re.search(
            r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]',
            op.attributes,
        )
        target = re.search(r'custom_call_target="(__cudnn\$fmha\w*)"', op.attributes)
        if not target or not scores:
            return 0.0
        *batch, queries, keys = map(int, re.findall(r"\d+", scores.group(1)))
        width = elements(self.module.named(computation)[op.operands[0]].result) / (
            math.prod(batch) * queries
        )
        products = 5 if "Backward" in target.group(1) else 2
        return (
            products
            * 2.0
            * math.prod(batch)
            * queries
            * keys
            * width
            / (2 if "CAUSAL" in op.attributes else 1)
        )

    def _fusion(self, computation: str) -> tuple[dict[int, float], float]:
        """The share of each parameter that a fusion reads, and the bytes that it writes."""
        if computation not in self._fusions:
            self._fusions[computation] = self._read_and_written(computation)
        return self._fusions[computation]

    def _read_and_written(self, computation: str) -> tuple[dict[int, float], float]:
        ops, known = (
            self.module.computations[computation],
            self.module.named(computation),
        )
        root = next(op for op in ops if op.root)
        outputs = (
            [known[name] for name in root.operands]
            if root.opcode == "tuple"
            else [root]
        )
        behind = [_behind(known, op) for op in outputs]
        kept = {op.name for op in behind if self._in_place(computation, op)}
        put = [
            known[op.operands[_update(op)]] if op.name in kept else op for op in behind
        ]
        written = sum(byte_count(op.result) for op in put)
        # How much of each value is needed, from what is yielded back to the parameters.
        share: dict[str, float] = defaultdict(float, {op.name: 1.0 for op in outputs})
        reads: dict[int, float] = {}
        for op in reversed(ops):
            needed = share[op.name]
            if op.opcode == "parameter":
                reads[int(op.operands[0])] = needed
                continue
            for i, name in enumerate(op.operands):
                if name in known and needed:
                    part = needed * self._of_operand(op, i, known, op.name in kept)
                    share[name] = min(1.0, share[name] + part)
        return reads, written

    def _of_operand(
        self, op: Operation, i: int, known: dict[str, Operation], kept: bool
    ) -> float:
        """The share of its operand `i` that an instruction inside a fusion reads to yield all of its result."""
        size = elements(known[op.operands[i]].result)
        if op.opcode == "fusion":
            return self._fusion(*self.module.called(op))[0].get(i, 0.0)
        if op.opcode in _SLICES and i == 0:
            return min(1.0, elements(op.result) / max(size, 1))
        if op.opcode in _UPDATES and i == 0:
            put_in = min(
                1.0, elements(known[op.operands[_update(op)]].result) / max(size, 1)
            )
            if op.opcode == "scatter":
                return put_in if kept else 1.0
            return 0.0 if kept else 1.0 - put_in
        return 1.0

    def _in_place(self, computation: str, op: Operation) -> bool:
        """True if an update that a fusion yields is written into the buffer that it came in, as XLA's GPU compiler
        does: where the buffer is a parameter, and read, if at all, at the very place that is written.
        """
        if op.opcode not in _UPDATES:
            return False
        known = self.module.named(computation)
        buffer = _behind(known, known[op.operands[0]])
        if buffer.opcode != "parameter":
            return False
        names = {
            name for name in known if _behind(known, known[name]).name == buffer.name
        }
        users = [
            u
            for u in known.values()
            if u.name not in names and u.name != op.name and names & set(u.operands)
        ]
        return all(
            u.opcode == "dynamic-slice" and u.operands[1:] == op.operands[2:]
            for u in users
        )


def _behind(known: dict[str, Operation], op: Operation) -> Operation:
    """The instruction whose value this one only gives another shape."""
    while op.opcode == "bitcast":
        op = known[op.operands[0]]
    return op


def _update(op: Operation) -> int:
    """The operand that holds what is put in."""
    return 1 if op.opcode == "dynamic-update-slice" else 2
