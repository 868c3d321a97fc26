"""Seconds of a step from its compiled program: every instruction in the order of issue, with what travels meanwhile.

    instructions  ─ product ─ norm ─ start ─ product ─ product ─ done ─ ...      one after the other, by the planner's rates
    collectives                        ╰──────── over its axis ────╯             waited for only so long as nothing hides them

The formulas of `plan.seconds` say what a step should take; this says what the program that XLA made of it takes by the
same rates: products of the shapes that it has, bytes that it moves, collectives that it sends, and what hides what.
Loops count by their turns.

`python -m experiments.plan.timed CONFIG TARGET` prints the plan of a config and its compiled step, with the program's
seconds, and what travels under products, as JSON.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from jax.sharding import Mesh

from experiments.plan.work import Work
from meshtrain.cluster import algorithms
from meshtrain.cluster.cluster import Cluster, Group, named
from meshtrain.config import Config, load
from meshtrain.families import FAMILIES
from meshtrain.hlo.module import Module, Operation, byte_count, elements, replica_groups
from meshtrain.hlo.traffic import axes_of
from meshtrain.plan import compute, float8, shapes
from meshtrain.plan.compiled import CLUSTERS, compile_step, parse_target
from meshtrain.plan.compute import DEFAULT_PROFILE
from meshtrain.plan.estimate import plan

_EXPERTS = re.compile(r'name = "(product|weight)_kernel"')
DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f8e4m3fn": "float8",
    "f8e5m2": "float8",
}
# The planner's word where HLO has another
KINDS = {"collective-permute": algorithms.PERMUTE}


@dataclass
class CollectiveTime:
    """Collectives of one sort over an axis: bytes of the whole arrays, those of them that travel under compute,
    seconds, and those of them that are waited for.
    """

    bytes: float = 0.0
    under: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, other: "CollectiveTime", times: float = 1) -> None:
        self.bytes += times * other.bytes
        self.under += times * other.under
        self.seconds += times * other.seconds
        self.waited += times * other.waited


@dataclass
class Timed:
    """Seconds of a device: in all, in matrix products and attention, and in memory; and its collectives by axis and
    kind.
    """

    seconds: float = 0.0
    products: float = 0.0
    memory: float = 0.0
    sent: dict[tuple[str, str], CollectiveTime] = field(
        default_factory=lambda: defaultdict(CollectiveTime)
    )

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of waiting for the collectives of each axis."""
        seconds: dict[str, float] = defaultdict(float)
        for (axis, _), sent in self.sent.items():
            seconds[axis] += sent.waited
        return seconds

    def add(self, other: "Timed", times: float = 1) -> None:
        self.seconds += times * other.seconds
        self.products += times * other.products
        self.memory += times * other.memory
        for key, sent in other.sent.items():
            self.sent[key].add(sent, times)


def timed(module: Module, mesh: Mesh, config: Config, cluster: Cluster) -> Timed:
    """Times one run, on a device of the cluster, of a module that was compiled for a config on `mesh`."""
    return _Clock(module, mesh, config, cluster).run(module.entry)


class _UnderWay(NamedTuple):
    """One that was started: where it is counted, its bytes, when it ends, and the seconds in products when it began."""

    sent: CollectiveTime
    bytes: float
    end: float
    products: float


class _Clock:
    def __init__(
        self, module: Module, mesh: Mesh, config: Config, cluster: Cluster
    ) -> None:
        self.module, self.work, self.mesh, self.config, self.cluster = (
            module,
            Work(module),
            mesh,
            config,
            cluster,
        )
        self.device = cluster.accelerator
        self.dtype = config.precision.compute
        self._known: dict[str, Timed] = {}

    def run(self, computation: str) -> Timed:
        """One turn of a computation."""
        if computation in self._known:
            return self._known[computation]
        total = Timed()
        under_way: dict[str, _UnderWay] = {}
        free: dict[str, float] = defaultdict(float)
        ops = self.module.computations[computation]
        waited = {
            op.operands[0] for op in ops if op.opcode.endswith("-done") and op.operands
        }
        for op in ops:
            if op.kind:
                axis, size, seconds = self._collective(op)
                free[axis] = max(total.seconds, free[axis]) + seconds
                sent = total.sent[axis, op.kind]
                sent.add(CollectiveTime(size, 0.0, seconds))
                under_way[op.name] = _UnderWay(sent, size, free[axis], total.products)
                if op.name not in waited:
                    self._wait(total, under_way[op.name])
            elif op.opcode.endswith("-done") and op.operands[0] in under_way:
                self._wait(total, under_way[op.operands[0]])
            elif op.opcode == "while":
                body, _, turns = self.module.loop(op)
                total.add(self.run(body), 1 if turns is None else turns)
            elif op.opcode == "conditional":
                total.add(
                    max(
                        map(self.run, self.module.called(op)),
                        key=lambda branch: branch.seconds,
                    )
                )
            else:
                total.add(self._instruction(computation, op))
        self._known[computation] = total
        return total

    def _wait(self, found: Timed, transfer: "_UnderWay") -> None:
        if found.products > transfer.products:
            transfer.sent.under += transfer.bytes
        if transfer.end > found.seconds:
            transfer.sent.waited += transfer.end - found.seconds
            found.seconds = transfer.end

    def _collective(self, op: Operation) -> tuple[str, float, float]:
        """Its axis, its bytes, and its seconds where nothing else is under way there."""
        axes, ranks = axes_of(op, self.mesh)
        group = self._group(op, axes, ranks)
        nbytes = byte_count(op.result) * (ranks if op.kind == "reduce-scatter" else 1)
        seconds = (
            algorithms.best(KINDS.get(op.kind, op.kind), group, nbytes).seconds
            if group
            else 0.0
        )
        return "+".join(axes), float(nbytes), seconds

    def _group(self, op: Operation, axes: tuple[str, ...], ranks: int) -> Group | None:
        if not axes:
            return None
        group = self.cluster.axis("+".join(axes), self.config.mesh)
        if group.size == ranks or op.kind == "collective-permute":
            return group
        first, second, *_ = replica_groups(op.attributes, self.mesh.size)[0]
        return self.cluster.join_legs([(ranks, second - first)])

    def _instruction(self, computation: str, op: Operation) -> Timed:
        moved = self.work.moved(computation, op)
        # a kernel of experts reads what is in use, and writes zeros for the rest of the room
        of_experts = op.opcode == "custom-call" and _EXPERTS.search(op.attributes)
        memory = (
            moved.written if of_experts else moved.bytes
        ) / self.device.memory_rate
        products = sum(
            float8.product(self.device, self.dtype, "rowwise", *shape)
            if dtype == "float8"
            else compute.product(self.device, dtype, *shape)
            for dtype, shape in self._products(computation, op)
        ) + self._attention(computation, op)
        if products:
            return Timed(max(products, memory), max(products, memory))
        return Timed(memory, 0.0, memory)

    def _products(
        self, computation: str, op: Operation
    ) -> Iterator[tuple[str, tuple[float, float, float]]]:
        """dtype and (m, k, n) of each matrix product that an instruction is or holds."""
        if op.opcode == "dot" or (
            op.opcode == "custom-call" and "__cublas" in op.attributes
        ):
            known = self.module.named(computation)
            left, right = (elements(known[name].result) for name in op.operands[:2])
            depth = self.work.flops(computation, op) / (2.0 * elements(op.result))
            dtype = DTYPES.get(known[op.operands[0]].result.split("[")[0], "float32")
            # Of several at once, such as the parts of a sum that XLA has cut, each is one.
            several = left * right / depth**2 / elements(op.result)
            yield from [
                (dtype, (left / depth / several, depth, right / depth / several))
            ] * round(several)
        elif op.opcode == "custom-call" and (kernel := _EXPERTS.search(op.attributes)):
            yield self._of_experts(computation, op, kernel.group(1))
        elif op.opcode != "while":
            for called in self.module.called(op):
                for inner in self.module.computations[called]:
                    yield from self._products(called, inner)

    def _of_experts(
        self, computation: str, op: Operation, kernel: str
    ) -> tuple[str, tuple[float, float, float]]:
        """The product that a kernel of `grouped_kernels` is: of the rows that come to the fullest device, of all that
        it has room for.
        """
        known = self.module.named(computation)
        widest = op.result if kernel == "product" else known[op.operands[1]].result
        (rows, depth), (_, width) = (
            map(int, re.findall(r"(?<=[\[,])\d+", of)[:2])
            for of in (known[op.operands[0]].result, widest)
        )
        rows = min(
            rows,
            DEFAULT_PROFILE.imbalance
            * shapes.tokens(self.config)
            * self.config.model.moe.top_k,
        )
        return self.dtype, (rows, depth, width) if kernel == "product" else (
            depth,
            rows,
            width,
        )

    def _attention(self, computation: str, op: Operation) -> float:
        """Seconds of a kernel of attention, forward or backward, by the planner's rate."""
        if op.opcode != "custom-call" or "fmha" not in op.attributes:
            return 0.0
        backward = "Backward" in op.attributes
        sizes = re.search(
            r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]',
            op.attributes,
        )
        assert sizes is not None, "cuDNN's attention tells the shape of its scores"
        scores = 1.0
        for n in re.findall(r"\d+", sizes.group(1)):
            scores *= int(n)
        model, length = self.config.model, self.config.train.sequence_length
        scores *= shapes.seen(model, length) / length
        causal = FAMILIES[model.family].causal
        forward = compute.attention(
            self.device,
            self.dtype,
            model.head_dim,
            length,
            scores,
            DEFAULT_PROFILE,
            causal,
        )
        looped = compute.looped(length, causal)
        return (
            compute.layer_backward(forward, self.device, looped)
            if backward
            else forward
        ).total


def main(path: str, target: str) -> None:
    config = load(path)
    name = parse_target(target, config.mesh.devices)
    cluster = named(CLUSTERS.get(name, name), config.mesh.devices)
    compiled = compile_step(config, target)
    program = timed(compiled.module, compiled.mesh, config, cluster)
    sent = {
        f"{kind} over {axis}": asdict(spent)
        for (axis, kind), spent in program.sent.items()
    }
    found = {
        "compiled": compiled.as_json(),
        "program_seconds": program.seconds,
        "program_sent": sent,
    }
    print(json.dumps(plan(config, cluster).as_json() | found))


if __name__ == "__main__":
    main(*sys.argv[1:])
