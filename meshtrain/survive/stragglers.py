"""Ranks that are slow: in SPMD all steps take equally long, so the slow rank is the one that waits least for the
others.

    step time T   ├── own: loader, dispatch, log, not running ──┼── wait: devices, and others in their collectives ──┤
    slow rank     ├──────────────────── own ────────────────────┼─ wait ─┤

Its score is 1 less the difference of the shares that its own phases and those of the rank with the least have in their
steps. `judge` computes it, from sums over a while, in which bursts count as they must; all reports on slow ranks use
it. Slow devices are
found by a small matrix product: the least seconds over its.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from meshtrain.survive.heartbeat import HOST, STEPPING, WAIT
from meshtrain.survive.records import Node, Rank, RestartPlan

SLOW = 0.75  # a score below this is slow; NVIDIA's resiliency extension takes the same
TIMES = 3  # looks in a row, with new figures
SPAN = 3.0  # seconds of steps between two looks of a supervisor
DOES = {
    "data": "gets its batch",
    "dispatch": "starts the step",
    "log": "writes down what came of it",
    "stopped": "does not run: stopped, frozen or throttled",
    "queued": "has no core to run on",
}

Name = TypeVar("Name")


class Pace(NamedTuple):
    """Compares the speed of a rank with the others'. `score`: 1 is best."""

    score: float
    share: float  # of its steps in which it waits for no other
    least: float  # that any rank has of it
    phase: str  # of HOST: in which it is longest beside the rank with the least

    @property
    def is_slow(self) -> bool:
        return self.score < SLOW

    def words(self) -> str:
        return (
            f"{self.share:.0%} of its steps' time it waits for no other (elsewhere {self.least:.0%}), mostly while it "
            f"{DOES[self.phase]} "
            f"(score {self.score:.2f})"
        )


def own_share(spent: Mapping[str, float]) -> float | None:
    """Returns the share of the seconds in phases of steps in which a rank waits for no other; None if there are
    none.
    """
    total = sum(spent.get(phase, 0.0) for phase in STEPPING)
    return 1 - spent.get(WAIT, 0.0) / total if total > 0 else None


def judge(spent: Mapping[Name, Mapping[str, float]]) -> dict[Name, Pace]:
    """Returns the paces of ranks that took the same steps, by the seconds that each spent in its phases; nothing where
    fewer than two have any.
    """
    shares = {
        rank: share
        for rank, phases in spent.items()
        if (share := own_share(phases)) is not None
    }
    if len(shares) < 2:
        return {}
    first = min(shares, key=shares.__getitem__)

    def longest(rank: Name) -> str:
        total = {
            name: sum(spent[name].get(phase, 0.0) for phase in STEPPING)
            for name in (rank, first)
        }
        return max(
            HOST,
            key=lambda p: (
                spent[rank].get(p, 0.0) / total[rank]
                - spent[first].get(p, 0.0) / total[first]
            ),
        )

    least = shares[first]
    return {
        rank: Pace(1 - (share - least), share, least, longest(rank))
        for rank, share in shares.items()
    }


class Stragglers:
    """Counts how often each rank was slow, in one generation."""

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self._times: dict[
            tuple[str, str], int
        ] = {}  # looks in a row, by node and what was looked at
        self._spent: dict[
            str, dict[str, float]
        ] = {}  # seconds in the phases of steps at the last look, by node
        self._products: dict[str, object] = {}  # the last one looked at
        self._reported: set[str] = set()

    def look(
        self, nodes: Sequence[Node], plan: RestartPlan
    ) -> Iterator[tuple[str, float, str]]:
        """Yields (node, score, sentence) of those whose new figures were slow three times in a row; each once."""
        current = {
            n.name: n
            for n in nodes
            if n.name in plan.members and n.generation == self.generation
        }
        ranks = {name: n.rank for name, n in current.items() if n.rank}
        for name, of, score, words in [
            *self._paces(ranks),
            *self._product_scores(ranks),
        ]:
            self._times[name, of] = (
                self._times.get((name, of), 0) + 1 if score < SLOW else 0
            )
            if self._times[name, of] >= TIMES and name not in self._reported:
                self._reported.add(name)
                sentence = f"rank {ranks[name].number} on {name} ({current[name].host}) is slow: {words}."
                yield name, round(score, 3), sentence

    def _paces(self, ranks: Mapping[str, Rank]) -> list[tuple[str, str, float, str]]:
        now = {name: rank.phases for name, rank in ranks.items() if rank.phases}
        spent = {
            name: {
                phase: seconds - self._spent[name].get(phase, 0.0)
                for phase, seconds in phases.items()
            }
            for name, phases in now.items()
            if name in self._spent
        }
        complete = len(spent) == len(now)
        if complete and any(sum(phases.values()) < SPAN for phases in spent.values()):
            return []
        self._spent = now
        paces = judge(spent) if complete else {}
        return [(name, "own", pace.score, pace.words()) for name, pace in paces.items()]

    def _product_scores(
        self, ranks: Mapping[str, Rank]
    ) -> list[tuple[str, str, float, str]]:
        """Scores those who have done another small matrix product since the last look, by its seconds."""
        products = {name: rank.matmul for name, rank in ranks.items() if rank.matmul}
        seconds = {
            name: product["seconds"]
            for name, product in products.items()
            if product.get("seconds")
        }
        new = [name for name in seconds if products[name] != self._products.get(name)]
        self._products |= products
        if len(seconds) < 2:
            return []
        scores = {name: min(seconds.values()) / seconds[name] for name in new}
        words = "a small matrix product takes {:.1f} times as long as elsewhere (score {:.2f})"
        return [
            (name, "product", score, words.format(1 / score, score))
            for name, score in scores.items()
        ]
