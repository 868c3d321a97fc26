"""Says where the time of a step went: the kinds, each once, and how they lie beside the planner's.

    traces/STEP/ ──read──► events, instructions ──attribute──► Attribution: seconds of a step by kind; sum: its wall

The kinds share the wall: what hides behind something else has no seconds of its own. So a collective counts with what
of it no compute hides.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal[
    "forward",
    "backward",
    "recomputation",
    "head",
    "embedding",
    "optimizer",
    "data",
    "island",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "masked",
    "bubble",
    "schedule",
    "host",
    "idle",
    "unknown",
]

MEANING: dict[Kind, str] = {
    "forward": "the layers, forward",
    "backward": "the layers, backward: gradients of their inputs and of their weights",
    "recomputation": "the layers' forward pass once more, for a backward that did not keep it",
    "head": "the loss head, forward and backward",
    "embedding": "the embedding, forward and backward",
    "optimizer": "the update of the weights, with the gradient's norm and what ZeRO casts",
    "data": "collectives over data (gradients, ZeRO's weights) that no compute hides",
    "island": "sums of gradients across islands, over the slow links, that no compute hides",
    "tensor": "collectives over tensor that no compute hides",
    "context": "keys, values and their gradients over context that no compute hides",
    "expert": "rows on their way to their experts and back that no compute hides",
    "pipeline": "messages between stages, and sums over the stages that share the vocabulary, that no compute hides",
    "masked": "slots that are idle in the schedule's table and computed all the same, since every device runs one "
    "program",
    "bubble": "a stage without work waits for another",
    "schedule": "upkeep of microbatches and stages: stash written and read, slices, rows of the table, sums of "
    "gradients",
    "host": "no device ran, and the step had not reached them yet or had left them: batches, dispatch, metrics",
    "idle": "no device ran between the first and the last instruction of the step",
    "unknown": "instructions of which the program does not say what they are for",
}
NO_BUFFERS = (
    # In XLA_FLAGS: the empty list of what may go into one
    "--xla_gpu_enable_command_buffer="
)
KINDS: tuple[Kind, ...] = get_args(Kind)
COLLECTIVES: tuple[Kind, ...] = (
    "data",
    "island",
    "tensor",
    "context",
    "expert",
    "pipeline",
)

# What trace and planner both know: a name, the kinds of a trace, and the fields of `plan.seconds.StepTime` that it
# stands beside. The planner knows forward and backward of a layer only together, sums across islands as data's, and
# nothing of schedule's upkeep, host and unknown; hosts that wait for the slowest are idle in a trace.
PARTS: dict[str, tuple[tuple[Kind, ...], tuple[str, ...]]] = {
    "layers": (("forward", "backward"), ("matmul", "attention", "memory", "reference")),
    "recomputation": (("recomputation",), ("recompute",)),
    "head": (("head", "embedding"), ("head",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "data": (("data",), ("data",)),
    "across islands": (("island",), ()),
    "tensor": (("tensor",), ("tensor",)),
    "context": (("context",), ("context",)),
    "expert": (("expert",), ("expert",)),
    "pipeline": (("pipeline",), ("pipeline",)),
    "bubble": (("masked", "bubble"), ("bubble",)),
    "schedule": (("schedule",), ()),
    "host": (("host",), ("host", "checkpoint")),
    "other": (("idle", "unknown"), ("stragglers",)),
    # outside the step that is traced
    "rollout": ((), ("synchronise", "draw")),
    "evaluation": ((), ("evaluation",)),
}


def axis_kind(axes: tuple[str, ...]) -> Kind:
    """The kind of a collective along some mesh axes.

    One along several counts with the outermost of them, as the planner has it.
    """
    for kind in ("island", "data", "expert", "context", "pipeline", "tensor"):
        if kind in axes:
            return kind  # type: ignore[return-value]
    return "unknown"


def planned(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a plan (`StepTime.parts()`, or `plan --json`'s) by the names of `PARTS`; those that no plan knows are
    left out.
    """
    known = {
        name: [f for f in fields if f in parts] for name, (_, fields) in PARTS.items()
    }
    return {
        name: sum(parts[f] for f in fields) for name, fields in known.items() if fields
    }


@dataclass(frozen=True)
class Attribution:
    """Seconds of a step by kind.

    All are means over the traced steps, and over the devices where these are looked at apart.
    """

    platform: str  # cpu, gpu
    devices: int
    steps: int  # traced
    wall_seconds: float  # of a traced step
    seconds: dict[Kind, float]  # by kind, together at most `wall_seconds`
    # Of the collectives' exposed seconds, where they can be told apart: those that move bytes, and that wait for later
    # devices.
    moving: dict[Kind, float] = field(default_factory=dict)
    waiting: dict[Kind, float] = field(default_factory=dict)
    # (kind, axis) → executions a step and device, as `hlo.collectives` counts `times`
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: int = 0  # of instructions
    unjoined: int = 0  # events that name no instruction of the program
    # Of the same run's steps without tracing, if known
    untraced_seconds: float | None = None
    # A sentence each, with what would cure it
    cannot_tell: list[str] = field(default_factory=list)

    @property
    def attributed(self) -> float:
        """Share of the wall of which is known what it went into: all but `idle` and `unknown`."""
        return (
            sum(
                s for kind, s in self.seconds.items() if kind not in ("idle", "unknown")
            )
            / self.wall_seconds
        )

    def share(self, kind: Kind) -> float:
        return self.seconds.get(kind, 0.0) / self.wall_seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the names of `PARTS`, to compare with `planned`."""
        return {
            name: sum(self.seconds.get(k, 0.0) for k in kinds)
            for name, (kinds, _) in PARTS.items()
        }
