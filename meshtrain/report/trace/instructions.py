"""Each instruction of a program by name: what it is for, and if it is a collective, over which axes of the mesh.

Its `op_name`, made of JAX's transformations and `meshtrain.xla`, says what it is for:

    jit(_train)/update/add                                              optimizer
    …/shard_map/while/body/forward_slot/…/jvp(layer)/dot_general        forward
    …/backward_slot/…/transpose(jvp(layer))/dot_general                 backward
    …/checkpoint/rematted_computation/layer/dot_general                 recomputation
    …/forward_slot/…/dynamic_update_slice                               schedule: in a slot, and of no layer

On one device JAX leaves the shard_map out. Where the table splits the backward, both halves stand in a backward_slot.
XLA gives some
instructions no `op_name`: a fusion is for what most of what it holds is for, others for what the loop or call around
them is for; and in the entry, for what takes their result, or gave it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from meshtrain import xla
from meshtrain.hlo import Module
from meshtrain.hlo.module import Operation
from meshtrain.hlo.traffic import axes_of
from meshtrain.report.trace.attribution import Kind

# What they call has events of its own.
CONTAINERS = frozenset(
    {"while", "conditional", "call", "async-start", "async-update", "async-done"}
)
# jax.checkpoint's own name for what it computes once more
AGAIN = "rematted_computation"


@dataclass(frozen=True)
class Instruction:
    kind: Kind
    opcode: str
    collective: str  # which one it is, as `hlo.KINDS` names it, or ""
    axes: tuple[str, ...]
    buffered: bool  # stands in a command buffer, or is the call of one

    @property
    def container(self) -> bool:
        return self.opcode in CONTAINERS

    @property
    def axis(self) -> str:
        return "+".join(self.axes) or "none"


def instructions(module: Module, mesh: Mapping[str, int]) -> dict[str, Instruction]:
    """Returns the instructions of all computations by name, for a mesh of these axes and sizes."""
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    kinds = _Kinds(module)
    table = {}
    for computation, ops in module.computations.items():
        for op in ops:
            axes = axes_of(op, abstract)[0] if op.kind else ()
            names = [computation, *(module.called(op) if op.opcode == "call" else ())]
            buffered = any(name.startswith("command_buffer") for name in names)
            table[op.name] = Instruction(
                kinds.kind_of(computation, op), op.opcode, op.kind, axes, buffered
            )
    return table


class _Kinds:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.callers: dict[str, tuple[str, Operation]] = {}
        self.users: dict[str, dict[str, Operation]] = defaultdict(
            dict
        )  # the first one of each instruction's
        for computation, ops in module.computations.items():
            for op in ops:
                for operand in op.operands:
                    self.users[computation].setdefault(operand, op)
                for called in [
                    *module.called(op),
                    *(module.loop(op)[:2] if op.opcode == "while" else ()),
                ]:
                    self.callers.setdefault(called, (computation, op))

    def kind_of(self, computation: str, op: Operation) -> Kind:
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
            return self.kind_of(*self.callers[computation])
        # In the entry: a copy of what goes into a loop, or of a part of the state.
        if user := self.users[computation].get(op.name):
            return self.kind_of(computation, user)
        operands = [self.module.named(computation).get(name) for name in op.operands]
        return next(
            (kind for o in operands if o and (kind := kind_of(o.source)) != "unknown"),
            "unknown",
        )


def kind_of(source: str) -> Kind:
    """Returns the kind of an instruction whose `op_name` is `source`; unknown where that is none of a whole step's."""
    # Of instructions that XLA joined it lists all names; the first is the one that the others went into.
    source = source.partition(";")[0]
    if not source.startswith("jit("):
        return "unknown"
    words = re.findall(r"\w+", source)
    for word in words:
        if word == xla.HEAD:
            return "head"
        if word == xla.EMBEDDING:
            return "embedding"
        if word in (xla.UPDATE, xla.ZERO):
            return "optimizer"
        if word in (xla.LAYER, AGAIN):
            break
    else:
        if xla.BACKWARD in words and "transpose" in words:
            return "backward"
        return "schedule"
    if AGAIN in words:
        return "recomputation"
    return "backward" if "transpose(" in source or xla.BACKWARD in words else "forward"
