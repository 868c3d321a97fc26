"""Ranks that are slow: in SPMD all steps take equally long, so the slow rank is the one that waits least for the others.

step time T   ├── host: loader, dispatch, log ──┼── wait: devices, and the others in their collectives ──┤
slow rank     ├──────────── host ───────────────┼─ wait ─┤

score = (T - (its host part - the least host part)) / T; slow devices are told by a small matrix product: least seconds / its seconds
"""

from collections.abc import Iterator, Sequence

from meshtrain.survive.records import Node, Plan

SLOW = 0.75  # a score below this is slow; NVIDIA's resiliency extension takes the same
TIMES = 3  # looks in a row, with new figures


class Stragglers:
    """Remembers who was slow how often."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}  # looks in a row, and the step of the last
        self._told: set[tuple[int, str]] = set()

    def look(self, nodes: Sequence[Node], plan: Plan) -> Iterator[tuple[str, float, str]]:
        """(node, score, sentence) of those who were slow three times; each once a generation."""
        members = [n for n in nodes if n.name in plan.members and n.generation == plan.generation and n.rank]
        for name, (score, sentence) in scores(members).items():
            step = next(n.rank.step for n in members if n.name == name and n.rank)
            times, last = self._seen.get(name, (0, -1))
            if step == last:
                continue
            times = times + 1 if score < SLOW else 0
            self._seen[name] = times, step
            if times >= TIMES and (plan.generation, name) not in self._told:
                self._told.add((plan.generation, name))
                yield name, round(score, 3), sentence


def scores(members: Sequence[Node]) -> dict[str, tuple[float, str]]:
    """Of each rank its score, at most 1, and what it says in words."""
    hosts = {n.name: n.rank.host for n in members if n.rank and n.rank.host is not None}
    paces = [n.rank.pace for n in members if n.rank and n.rank.pace]
    products = {
        n.name: n.rank.matmul["seconds"] for n in members if n.rank and n.rank.matmul and n.rank.matmul.get("seconds")
    }
    found = {}
    for node in members:
        rank = node.rank
        assert rank is not None
        who = f"rank {rank.number} on {node.name} ({node.host}) is slow"
        score, sentence = 1.0, ""
        if node.name in hosts and len(hosts) > 1 and paces:
            pace = max(paces)
            excess = hosts[node.name] - min(hosts.values())
            score = max(0.0, (pace - excess) / pace)
            sentence = f"{who}: {excess:.3f} of the {pace:.3f} s of a step go on its host, where others wait for it (score {score:.2f})"
        if node.name in products and len(products) > 1:
            of_product = min(products.values()) / products[node.name]
            if of_product < score:
                score, sentence = (
                    of_product,
                    f"{who}: a small matrix product takes {1 / of_product:.1f} times as long as elsewhere (score {of_product:.2f})",
                )
        if sentence:
            found[node.name] = score, sentence
    return found
