"""Each instruction of a program by name: what it is for, and if it is a collective, over which axes of the mesh.

XLA gives some instructions no `op_name`: a fusion is for what most of what it holds is for, others for what the loop or call around them
is for; and in the entry, for what takes their result, or gave it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from meshtrain.hlo import Module
from meshtrain.hlo.module import Operation
from meshtrain.hlo.traffic import axes_of
from meshtrain.report.trace.attribution import Kind
from meshtrain.report.trace.scopes import kind_of

# What they call has events of its own.
CONTAINERS = frozenset({"while", "conditional", "call", "async-start", "async-update", "async-done"})


@dataclass(frozen=True)
class Instruction:
    kind: Kind
    opcode: str
    collective: str  # which one it is, as `hlo.KINDS` names it, or ""
    axes: tuple[str, ...]
    held: bool  # stands in a command buffer, or is the call of one

    @property
    def container(self) -> bool:
        return self.opcode in CONTAINERS

    @property
    def axis(self) -> str:
        return "+".join(self.axes) or "none"


def instructions(module: Module, mesh: Mapping[str, int]) -> dict[str, Instruction]:
    """Of all computations, by name, for a mesh of these axes and sizes."""
    return _Joined(module, AbstractMesh(tuple(mesh.values()), tuple(mesh))).all()


class _Joined:
    def __init__(self, module: Module, mesh: AbstractMesh) -> None:
        self.module, self.mesh = module, mesh
        self.callers: dict[str, tuple[str, Operation]] = {}
        self.users: dict[str, dict[str, Operation]] = defaultdict(dict)  # the first one of each instruction's
        for computation, ops in module.computations.items():
            for op in ops:
                for operand in op.operands:
                    self.users[computation].setdefault(operand, op)
                for called in [*module.called(op), *(module.loop(op)[:2] if op.opcode == "while" else ())]:
                    self.callers.setdefault(called, (computation, op))

    def all(self) -> dict[str, Instruction]:
        found = {}
        for computation, ops in self.module.computations.items():
            held = computation.startswith("command_buffer")
            for op in ops:
                axes = axes_of(op, self.mesh)[0] if op.kind else ()
                calls = op.opcode == "call" and any(c.startswith("command_buffer") for c in self.module.called(op))
                found[op.name] = Instruction(self.kind(computation, op), op.opcode, op.kind, axes, held or calls)
        return found

    def kind(self, computation: str, op: Operation) -> Kind:
        if (own := kind_of(op.source)) != "unknown":
            return own
        if op.opcode == "fusion":
            inside = Counter(
                kind
                for called in self.module.called(op)
                for inner in self.module.computations[called]
                if (kind := kind_of(inner.source)) != "unknown"
            )
            if inside:
                return inside.most_common(1)[0][0]
        if computation in self.callers:
            return self.kind(*self.callers[computation])
        # In the entry: a copy of what goes into a loop, or of a part of the state.
        if user := self.users[computation].get(op.name):
            return self.kind(computation, user)
        operands = [self.module.named(computation).get(name) for name in op.operands]
        return next((kind for o in operands if o and (kind := kind_of(o.source)) != "unknown"), "unknown")
