"""A collective of a step, and how often a device goes through what has it."""

from dataclasses import dataclass
from fractions import Fraction

from meshtrain.plan.cluster.algorithms import sent


@dataclass(frozen=True)
class Trips:
    """How often a device goes forward and backward through a chunk and through the loss head in a step.

    The embedding's passes, forward and backward (`unembedding`), and the messages `down` and `up` are as many where not given; the
    head's backward (`unhead`) comes with its forward.
    """

    forward: int
    head: int
    backward: int
    embedding: int | None = None
    unembedding: int | None = None
    unhead: int | None = None
    down: int | None = None
    up: int | None = None

    def of(self, moment: str) -> int:
        """Passes through what one of the fields names."""
        own = getattr(self, moment)
        if own is not None:
            return own
        return {"embedding": self.forward, "down": self.forward, "unhead": self.head}.get(moment, self.backward)


@dataclass(frozen=True)
class Flow:
    """Collectives of one sort in a step: `nbytes` is the size S of the whole array (see `algorithms`), `count` how many."""

    axis: str
    kind: str
    what: str
    nbytes: float
    count: float  # of what does not come in every step, the mean over steps
    size: int  # devices that talk to each other
    hides: bool = False  # products of the weights' gradients, which wait for nothing, can be computed meanwhile

    @property
    def times(self) -> str:
        """`count` for people: 1,024, or 1/10 of what comes every 10 steps."""
        if self.count == int(self.count):
            return f"{int(self.count):,}"
        return str(Fraction(self.count).limit_denominator(1_000_000))

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step."""
        return self.count * sent(self.kind, self.size, self.nbytes)
