"""Each kind of fault, several times at random steps and ranks, on 2 and on 4 processes.

shared run      faults after which the same nodes go on, one after the other while the run goes on: `survive inject`
run of nodes    nodes are lost, come back and are taken in: losses only to the tolerance of another mesh
run of its own  what ends a run, or is there before it begins
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.survive import alone
from experiments.survive.cluster import (
    EVERY,
    Cluster,
    TooLate,
    say,
    settings,
    write_json,
)
from experiments.survive.judge import (
    Judged,
    judge_times,
    judge_training,
    judge_verdict,
    reference_of,
)

STEPS = 300  # of the undisturbed run, and the most of any other
# Faults of a start, which another one must bring about first.
AT_START = ("kill-compile", "kill-restore", "kill-forming", "port-taken")
SAME_NODES = (
    "kill", "segv", "abort", "out-of-memory", "error", "kill-save", "kill-two", "frozen", "asleep", "loader", "gil", "d-state",
    "collective", "nan", "bit-flip", "damage", *AT_START,
)  # fmt: skip
# That is who leads, and holds the coordinator
FIRST_NODE = ("leader-lost", "coordinator-lost")
NODES = (*FIRST_NODE, "node-lost", "supervisor-frozen", "store-lost", "node-returns")
KINDS = (*SAME_NODES, *NODES, *alone.KINDS)


class Campaign:
    """All faults of one number of processes. `results`: a line of JSON each, appended."""

    def __init__(self, processes: int, work: Path, results: Path, seed: int) -> None:
        self.processes, self.work, self.results = processes, work, results
        self.draw = random.Random(f"{seed} {processes}")
        self.number = 0

    def cluster(
        self, steps: int = STEPS, place: Path | None = None, **sections: dict[str, Any]
    ) -> Cluster:
        """A new run, not yet started."""
        self.number += 1
        directory = (place or self.work) / f"run-{self.processes}-{self.number}"
        shutil.rmtree(directory, ignore_errors=True)
        return Cluster(
            directory,
            settings(directory / "run", self.processes, steps, **sections),
            self.work / "compiled",
        )

    def reference(self) -> dict[str, Any]:
        """Losses and batches of the undisturbed run, which is taken once."""
        path = self.work / f"reference-{self.processes}.json"
        if not path.exists():
            say(f"the undisturbed run of {self.processes} processes")
            cluster = self.cluster().start()
            try:
                codes = cluster.end(20 * 60.0)
                assert set(codes.values()) == {0}, codes
                write_json(path, reference_of(cluster))
            finally:
                cluster.close()
        return json.loads(path.read_text())

    def run(self, kinds: list[str], times: int) -> None:
        left = [kind for kind in kinds for _ in range(times)]
        shared = [kind for kind in left if kind in SAME_NODES]
        self.draw.shuffle(shared)
        while shared:
            shared = self.together(shared)
        for group in self.groups([kind for kind in left if kind in NODES]):
            self.nodes(group)
        for kind in left:
            if kind in alone.KINDS:
                self.alone(kind)

    def groups(self, kinds: list[str]) -> Iterator[list[str]]:
        """Faults of nodes, as many to a run as there are nodes, since a node that is lost twice is no longer taken
        in.
        """
        first = [kind for kind in kinds if kind in FIRST_NODE]
        others = [kind for kind in kinds if kind not in FIRST_NODE]
        self.draw.shuffle(others)
        while first or others:
            group = [first.pop()] if first else []
            while others and len(group) < self.processes - (0 if group else 1):
                group.append(others.pop())
            yield group

    # --- the same nodes go on

    def together(self, kinds: list[str]) -> list[str]:
        """One run with as many of the faults as it has steps for; those that are left."""
        cluster, found = self.cluster(), list[Judged]()
        with self.judged(cluster, found):
            cluster.start()
            cluster.until_going(0)
            left = list(kinds)
            while left and cluster.step() < STEPS - 60:
                kind = left.pop(0)
                rank = self.draw.randrange(self.processes - (kind == "kill-two"))
                found.append(Judged(kind, self.processes, rank))
                self.hurt(cluster, found[-1])
                say(*shown(found[-1]))
            codes = cluster.stop()
            if set(codes.values()) != {75}:
                found[-1].problems.append(f"exit codes {codes} after SIGTERM")
        return kinds[len(found) :]

    def hurt(self, cluster: Cluster, found: Judged) -> None:
        """One fault of a run that goes on, after some steps: without them it would look like a loop."""
        generation, start = cluster.generation, cluster.step()
        cluster.until(lambda: cluster.step() >= start + EVERY + 3, "some steps")
        if found.kind in AT_START:
            name = cluster.inject(f"{found.kind}@0:{found.rank}")
            cluster.inject(
                f"kill@{cluster.step()}:{self.draw.randrange(self.processes)}"
            )
            generation += 1
        else:
            name = cluster.inject(
                f"{found.kind}@{self.moment(cluster, found.kind)}:{found.rank}"
            )
        cluster.until_going(generation)
        done = cluster.root / "injected" / name
        if not done.exists():
            found.problems.append("it was not injected")
            return
        before = cluster.members(generation)
        hit = before[found.rank : found.rank + 2]
        if verdict := judge_verdict(cluster, found, generation, hit):
            judge_times(cluster, found, generation, done.stat().st_mtime, verdict)

    def moment(self, cluster: Cluster, kind: str) -> int:
        """A step that comes soon."""
        step = cluster.step() + self.draw.randrange(1, 12)
        # Two that are to go at once must both have heard of it, and neither wait for the other in a save.
        return (step // EVERY + 5) * EVERY + 2 if kind == "kill-two" else step

    # --- nodes are lost

    def nodes(self, kinds: list[str]) -> None:
        """One run in which each of these faults meets another node."""
        least = {"survive": {"least": 1}}
        cluster, found = self.cluster(**least), list[Judged]()
        with self.judged(cluster, found):
            cluster.start()
            cluster.until_going(0)
            others = (
                list(range(1, self.processes))
                if kinds[0] in FIRST_NODE
                else list(range(self.processes))
            )
            self.draw.shuffle(others)
            for kind in kinds:
                rank = 0 if kind in FIRST_NODE else others.pop()
                found.append(Judged(kind, self.processes, rank))
                self.lose(cluster, found[-1])
                say(*shown(found[-1]))
            cluster.stop()

    def lose(self, cluster: Cluster, found: Judged) -> None:
        """A node is lost, the others go on, it comes back and is taken in."""
        generation = cluster.generation
        node = cluster.members(generation)[found.rank]
        name = cluster.inject(
            f"{found.kind}@{cluster.step() + self.draw.randrange(1, 12)}:{found.rank}"
        )
        done = cluster.root / "injected" / name
        cluster.until(done.exists, f"{name} to be done")
        after = cluster.until_going(generation)
        if verdict := judge_verdict(cluster, found, generation, [node]):
            judge_times(cluster, found, generation, done.stat().st_mtime, verdict)
        if found.kind == "supervisor-frozen":
            cluster.signal(node, signal.SIGCONT)
        elif found.kind != "node-returns":
            cluster.signal(node, signal.SIGKILL)
            cluster.supervisors[node].wait()
            cluster.start(node)
        began = time.monotonic()
        cluster.until_going(after)
        if len(cluster.members(cluster.generation)) == self.processes:
            say(
                f"{node} was taken in {time.monotonic() - began:.1f} s after it came back"
            )
        else:
            found.problems.append(f"{node} was not taken in")

    # --- runs of their own

    def alone(self, kind: str) -> None:
        rank = self.draw.randrange(self.processes)
        found = Judged(kind, self.processes, rank)
        cluster = alone.cluster_for(self, found)
        if cluster is None:
            say(f"{kind} cannot be tried here")
            return
        with self.judged(cluster, [found], trains=kind != "bad-config"):
            alone.KINDS[kind](cluster, found, self.draw)
            say(*shown(found))
        alone.clear(cluster)

    def judged(
        self, cluster: Cluster, found: list[Judged], trains: bool = True
    ) -> "Judging":
        return Judging(self, cluster, found, trains)


class Judging:
    """What is judged when a run has ended, however it did; then the results are written down."""

    def __init__(
        self, campaign: Campaign, cluster: Cluster, found: list[Judged], trains: bool
    ) -> None:
        self.campaign, self.cluster, self.found, self.trains = (
            campaign,
            cluster,
            found,
            trains,
        )
        self.reference = campaign.reference()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> bool:
        late = isinstance(error, TooLate)
        found = self.found or [Judged("no fault", self.campaign.processes, 0)]
        if late:
            found[-1].problems.append(f"{error}")
            say(*shown(found[-1]))
            self.keep()
        left = self.cluster.close()
        if left:
            found[-1].problems.append(f"{len(left)} processes are left over")
        if self.trains and not late:
            judge_training(self.cluster, found, self.reference)
        with self.campaign.results.open("a") as file:
            file.writelines(json.dumps(vars(one)) + "\n" for one in self.found)
        for one in found:
            if one.problems:
                say(f"  {one.kind} on {one.processes}: {'; '.join(one.problems)}")
        if not late and any(one.problems for one in found):
            self.keep()
        elif not late:
            shutil.rmtree(self.cluster.directory, ignore_errors=True)
        return late

    def keep(self) -> None:
        say(f"  kept for a look: {self.cluster.directory}")


def shown(found: Judged) -> list[object]:
    times = [
        f"{name} {value:.1f}"
        for name in ("verdict", "ended", "started", "first")
        if (value := getattr(found, name)) is not None
    ]
    lost = [] if found.lost is None else [f"{found.lost} steps lost"]
    return [
        f"{found.kind}@{found.step}:{found.rank} of {found.processes}:",
        found.said,
        *times,
        *lost,
        f"load {found.load:.1f}",
        *found.problems,
    ]
