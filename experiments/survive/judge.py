"""Whether what a fault led to is right: the verdict and whom it blames, the times, and that nothing of the training is
lost or done twice.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.survive.cluster import (
    EVERY,
    Cluster,
    batches_of,
    load_average,
    rows_of,
)
from meshtrain.checkpoint import digests, steps

# Relative, of losses on another mesh: tests/test_equivalence.py; batches are compared to the bit
TOLERANCE = 2e-5
OVERLAP = (
    # Seconds by which two generations may seem to overlap: the watcher looks now and then
    0.5
)
# The kind of verdict that an injected fault must lead to, and who is to be blamed.
EXPECTED = {
    fault: (kind, whom)
    for kind, whom, faults in (
        ("signal", "rank", "kill segv abort kill-compile kill-restore kill-save"),
        ("signal", "rank", "kill-forming damage crash-loop"),
        ("signal", "both", "kill-two"),
        ("frozen", "rank", "frozen"),
        ("stuck", "rank", "asleep loader"),
        ("gil", "rank", "gil"),
        ("uninterruptible", "rank", "d-state"),
        ("lost", "rank", "node-lost leader-lost coordinator-lost"),
        ("lost", "rank", "supervisor-frozen store-lost node-returns"),
        ("memory", "rank", "out-of-memory"),
        ("error", "rank", "error"),
        ("collective", "nobody", "collective"),
        ("numbers", "nobody", "nan nan-always"),
        ("sick", "rank", "bit-flip"),
        ("port", "nobody", "port-taken"),
        ("straggler", "rank", "slow"),
    )
    for fault in faults.split()
}


@dataclasses.dataclass
class Judged:
    """One fault, and what came of it.

    Times in seconds: of the verdict after the fault; of `ended` after the verdict, of `started` after that, of `first`
    after that.
    """

    kind: str
    processes: int
    rank: int
    step: int | None = None
    said: str = ""  # kind and nodes of the verdict
    reason: str = ""
    named: bool = False
    verdict: float | None = None
    ended: float | None = None
    started: float | None = None
    first: float | None = None
    lost: int | None = None  # steps
    load: float = dataclasses.field(default_factory=load_average)
    problems: list[str] = dataclasses.field(default_factory=list)
    since: int = 0  # the step that the generation after it went on from
    # Largest relative difference of a loss, in the run whose last fault this is
    off: float = 0.0


def judge_verdict(
    cluster: Cluster, found: Judged, generation: int, hit: list[str]
) -> dict[str, Any] | None:
    """The verdict on a generation, held against what is right; `hit`: the nodes that the fault was done to."""
    events = [
        e
        for e in cluster.of("verdict", "over", generation=generation)
        if e["kind"] not in ("start", "grow")
    ]
    if not events:
        found.problems.append("no verdict")
        return None
    event = events[0]
    kind, whom = EXPECTED[found.kind]
    right = {"rank": hit[:1], "both": hit[:2], "nobody": []}[whom]
    found.said = f"{event['kind']} {','.join(event['blamed']) or '-'}"
    found.reason, found.step = event["reason"], event["step"]
    found.named = event["kind"] == kind and sorted(event["blamed"]) == sorted(right)
    if not found.named:
        found.problems.append(
            f"said {found.said}, where {kind} {','.join(right) or '-'} is right: {event['reason'][:160]}"
        )
    return event


def judge_times(
    cluster: Cluster,
    found: Judged,
    generation: int,
    fault: float,
    verdict: dict[str, Any],
) -> None:
    """From the fault to the first step of the generation after it."""
    found.verdict = verdict["wall"] - fault
    deaths = [cluster.died.get(pid) for pid in cluster.rank_pids(generation)]
    after = generation + 1
    started, going = (
        cluster.of("started", generation=after),
        cluster.of("going", generation=after),
    )
    if None in deaths:
        found.problems.append(f"a process of generation {generation} is there still")
    last = max([d for d in deaths if d is not None], default=verdict["wall"])
    found.ended = max(0.0, last - verdict["wall"])
    if not started or not going:
        found.problems.append(f"generation {after} did not go on")
        return
    begun = max(e["wall"] for e in started)
    if last > min(e["wall"] for e in started) + OVERLAP:
        found.problems.append("two generations at once")
    # A pause after a fault without progress is meant.
    found.started = begun - max(last, verdict["wall"] + cluster.pause(after))
    found.first = max(e["wall"] for e in going) - begun
    found.since = min(e["start"] for e in going)
    # Who ended before the restore had taken no step.
    taken = [e["step"] for e in cluster.of("ended", generation=generation)] + [
        verdict["step"] or 0,
        found.since,
    ]
    found.lost = max(taken) - found.since
    # The newest checkpoint may be in the making; a damaged one is passed over.
    most = (3 if found.kind == "damage" else 1) * EVERY + 1
    if found.lost > most:
        found.problems.append(f"{found.lost} steps lost")


def judge_training(
    cluster: Cluster, found: list[Judged], reference: dict[str, Any]
) -> None:
    """Of a run that has ended: steps, losses and batches are the undisturbed run's.

    What is wrong is put to the fault before it.
    """
    rows = rows_of(cluster.run)

    def blame(step: int, problem: str) -> None:
        of = [f for f in found if f.since < step] or found[:1]
        if problem not in of[-1].problems:
            of[-1].problems.append(problem)

    if (taken := [row["step"] for row in rows]) != list(range(1, len(rows) + 1)):
        wrong = next((s for i, s in enumerate(taken) if s != i + 1), 0)
        blame(wrong, f"metrics.jsonl goes wrong at step {wrong}")
    if not rows:
        blame(0, "no step was taken")
    whole = cluster.values["survive"]["wanted"]
    # The first step on another mesh.
    smaller = [
        e["start"]
        for e in cluster.of("going")
        if len(cluster.members(e["generation"])) < whole
    ]
    other = min(smaller, default=len(rows)) + 1
    for row in rows:
        if row["loss"] is None and row is rows[-1] and found[-1].kind == "nan-always":
            break
        right = reference["losses"][row["step"] - 1]
        off = (
            float("inf")
            if row["loss"] is None
            else abs(row["loss"] - right) / abs(right)
        )
        most = 0.0 if row["step"] < other else TOLERANCE
        if not off <= most:
            blame(
                row["step"], f"losses differ from step {row['step']} on, by {off:.1e}"
            )
            break
        found[-1].off = max(found[-1].off, off)
    for step, by in sorted(batches_of(cluster.run).items()):
        last = list(by[max(by)].values())
        # The newest step may have been begun only, by some.
        if step <= len(rows) and last != reference["rows"][step - 1]:
            blame(step, f"the batch of step {step} is another one")
            break
    problem = checkpoint_problem(cluster.run)
    if problem and found:
        found[-1].problems.append(problem)


def checkpoint_problem(run: Path) -> str | None:
    """What is wrong with the newest checkpoint."""
    there = steps.committed_in(run / "checkpoints")
    if not there:
        return "there is no checkpoint"
    newest = run / "checkpoints" / str(max(there))
    wrong = steps.commit_problem(newest) or "; ".join(
        map(str, digests.problems(newest))
    )
    return f"checkpoint {newest.name}: {wrong}" if wrong else None


def reference_of(cluster: Cluster) -> dict[str, Any]:
    """What later runs are held against: of each step of an undisturbed run its loss and its rows."""
    rows, batches = rows_of(cluster.run), batches_of(cluster.run)
    assert cluster.generation == 1, "the undisturbed run was disturbed"
    return {
        "losses": [row["loss"] for row in rows],
        "rows": [list(batches[row["step"]][1].values()) for row in rows],
    }
