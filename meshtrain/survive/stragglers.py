"""Ranks that are slow: in SPMD all steps take equally long, so the slow rank is the one that waits least for the others.

    step time T   ├── host: loader, dispatch, log ──┼── wait: devices, and the others in their collectives ──┤
    slow rank     ├──────────── host ───────────────┼─ wait ─┤

Its score is (T - (its host part - the least host part)) / T. Slow devices are told by a small matrix product: the least seconds over its.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshtrain.survive.records import Node, Plan

SLOW = 0.75  # a score below this is slow; NVIDIA's resiliency extension takes the same
TIMES = 3  # looks in a row, with new figures


class Stragglers:
    """Remembers who was slow how often."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, object]] = {}  # how often in a row, and the last figure
        self._told: set[tuple[int, str]] = set()

    def look(self, nodes: Sequence[Node], plan: Plan) -> Iterator[tuple[str, float, str]]:
        """(node, score, sentence) of those whose new figures were slow three times in a row; each once a generation."""
        members = [n for n in nodes if n.name in plan.members and n.generation == plan.generation and n.rank]
        for score in [*_hosts(members), *_products(members)]:
            times, last = self._seen.get((score.node, score.of), (0, None))
            if score.figure == last:
                continue
            times = times + 1 if score.value < SLOW else 0
            self._seen[score.node, score.of] = times, score.figure
            if times >= TIMES and (plan.generation, score.node) not in self._told:
                self._told.add((plan.generation, score.node))
                yield score.node, round(score.value, 3), score.sentence


class Score(NamedTuple):
    """How fast a rank is, 1 being best, by its `of`; another `figure` is another measurement."""

    node: str
    of: str
    value: float
    figure: object
    sentence: str


def _hosts(members: Sequence[Node]) -> Iterator[Score]:
    """By the part of a step that is spent on the host."""
    hosts = {n.name: n.rank.host for n in members if n.rank and n.rank.host is not None}
    paces = [n.rank.pace for n in members if n.rank and n.rank.pace]
    if len(hosts) < 2 or not paces:
        return
    pace, least = max(paces), min(hosts.values())
    for node in members:
        if node.rank and node.name in hosts:
            excess = hosts[node.name] - least
            score = max(0.0, (pace - excess) / pace)
            words = f"{excess:.3f} of the {pace:.3f} s of a step go on its host, where the others wait for it"
            yield Score(node.name, "host", score, node.rank.step, _slow(node, words, score))


def _products(members: Sequence[Node]) -> Iterator[Score]:
    """By the seconds of a small matrix product."""
    products = {n.name: n.rank.matmul for n in members if n.rank and n.rank.matmul and n.rank.matmul.get("seconds")}
    if len(products) < 2:
        return
    least = min(p["seconds"] for p in products.values())
    for node in members:
        if node.name in products:
            score = least / products[node.name]["seconds"]
            words = f"a small matrix product takes {1 / score:.1f} times as long as elsewhere"
            yield Score(node.name, "product", score, products[node.name], _slow(node, words, score))


def _slow(node: Node, words: str, score: float) -> str:
    assert node.rank is not None
    return f"rank {node.rank.number} on {node.name} ({node.host}) is slow: {words} (score {score:.2f})."
