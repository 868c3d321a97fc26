"""Runs of many minutes: faults at random until the run ends by itself, and a healthy run on a machine that is busy."""

import contextlib
import itertools
import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from experiments import bench
from experiments.bench import Table
from experiments.survive.cluster import (
    EVERY,
    Cluster,
    batches_of,
    load_average,
    median,
    rows_of,
    say,
    settings,
)
from experiments.survive.judge import checkpoint_problem
from meshtrain.plan.failures import goodput
from meshtrain.survive.history import read
from meshtrain.survive.ledger import ledger

# What a run outlives, without those that change all that comes after.
ALL_RANKS = [
    "kill",
    "segv",
    "abort",
    "out-of-memory",
    "error",
    "kill-save",
    "kill-two",
    "frozen",
    "asleep",
    "loader",
    "gil",
    "d-state",
    "collective",
    "nan",
    "damage",
]
OF_NODES = [
    "node-lost",
    "leader-lost",
    "coordinator-lost",
    "supervisor-frozen",
    "node-returns",
]


def soak(work: Path, minutes: float, every: float, processes: int, seed: int) -> int:
    """A fault every so many seconds until the last step is taken.

    Goodput as the ledger has it, and as the planner's formula says.
    """
    pace = calibrated(work, processes)
    steps = int(60 * minutes * 0.8 / pace / EVERY) * EVERY
    say(f"{steps} steps, each {pace:.3f} s with its share of a save")
    directory = work / f"soak-{processes}"
    shutil.rmtree(directory, ignore_errors=True)
    # Who fails again and again is kept out for a while; with a fault every few minutes it would soon be all of them.
    values = settings(
        directory / "run", processes, steps, survive={"least": max(1, processes - 1)}
    )
    cluster = Cluster(directory, values, work / "compiled").start()
    draw = random.Random(seed)
    faults: list[str] = []
    try:
        cluster.until_going(0)
        began = time.time()
        for number in itertools.count(1):
            while time.time() < began + number * every and not cluster.is_over():
                wake(cluster)
                time.sleep(1.0)
            if cluster.is_over():
                break
            kind = draw.choice(ALL_RANKS + OF_NODES)
            members = cluster.members(cluster.generation)
            first = kind in ("leader-lost", "coordinator-lost")
            rank = (
                0
                if first
                else draw.randrange(max(1, len(members) - (kind == "kill-two")))
            )
            faults.append(cluster.inject(f"{kind}@0:{rank}"))
            say(
                f"{faults[-1]} after step {cluster.step()}, {len(members)} nodes, load {load_average():.1f}"
            )
        codes = {node: process.poll() for node, process in cluster.supervisors.items()}
    finally:
        left = cluster.close()
    done = ledger(read(cluster.run))
    rows = rows_of(cluster.run)
    verdicts = [e for e in cluster.of("verdict") if e["kind"] not in ("start", "grow")]
    restart = sum(restarts(cluster)) / max(1, len(verdicts))
    # What a step and a save take of the loop, with all that belongs to them; of those that count.
    step_seconds, write = (
        done.seconds["step"] / len(rows),
        done.seconds["checkpoint"] / (len(rows) / EVERY),
    )
    # The formula knows of no first start.
    first = min(e["wall"] for e in cluster.of("going")) - done.began
    found, between = (
        done.seconds["step"] / (done.wall - first),
        (done.wall - first) / max(1, len(verdicts)),
    )
    expected = goodput(EVERY * step_seconds, write, restart, between)
    twice = differing(cluster.run)
    right = [row["step"] for row in rows] == list(range(1, steps + 1))
    table = Table("of the run".ljust(48), "found".ljust(20))
    table.row("minutes", f"{done.wall / 60:.1f}")
    table.row("faults asked for", len(faults))
    table.row("verdicts", len(verdicts))
    table.row("exit codes", ", ".join(f"{n} {c}" for n, c in codes.items()))
    table.row("each step once in metrics.jsonl", right)
    table.row("rows of batches that differed when taken again", twice)
    table.row("newest checkpoint", checkpoint_problem(cluster.run) or "verifies")
    table.row("processes left over", len(left))
    table.row("seconds of restarts a fault", f"{restart:.1f}")
    table.row("seconds a step, a save", f"{step_seconds:.3f}, {write:.3f}")
    table.row("goodput by the ledger, from the first step on", f"{found:.3f}")
    table.row("goodput by plan's formula", f"{expected:.3f}")
    for kind, seconds in done.seconds.items():
        table.row(f"ledger: {kind}", f"{seconds:.1f} s, {seconds / done.wall:.1%}")
    for kind in sorted({v["kind"] for v in verdicts}):
        print(f"{kind}: {sum(v['kind'] == kind for v in verdicts)} verdicts")
    ended = set(codes.values()) == {0} and right and not left and not twice
    return int(not ended or abs(expected - found) > 0.05)


def differing(run: Path) -> int:
    """Rows of batches that two generations read differently; of the last step that a killed one took not all ranks may
    have told.
    """
    found = 0
    for by in batches_of(run).values():
        read_as: dict[int, list[int]] = {}
        for rows in by.values():
            found += sum(
                read_as.setdefault(place, row) != row for place, row in rows.items()
            )
    return found


def restarts(cluster: Cluster) -> Iterator[float]:
    """Seconds of each new generation but the first, from what led to it to the first step: to grow costs a restart
    too.
    """
    done = sorted(
        path.stat().st_mtime for path in (cluster.root / "injected").iterdir()
    )
    for formed in cluster.of("formed"):
        going = [
            e["wall"] for e in cluster.of("going", generation=formed["generation"])
        ]
        caused = [
            e["wall"]
            for e in cluster.of("verdict", generation=formed["generation"] - 1)
            if e["kind"] != "start"
        ]
        if going and caused:
            fault = max([t for t in done if t < caused[0]], default=caused[0])
            yield max(going) - (caused[0] if formed["kind"] == "grow" else fault)


def wake(cluster: Cluster) -> None:
    """What a cluster's keeper would do: nodes that went are started again, those that are frozen go on."""
    if cluster.plan.get("state") == "over":
        return
    for node, process in cluster.supervisors.items():
        if process.poll() is not None:
            cluster.start(node)
        else:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][
                    :1
                ] == "T" and lost(cluster, node):
                    cluster.signal(node, signal.SIGCONT)


def lost(cluster: Cluster, node: str) -> bool:
    """Whether the others have gone on without a node."""
    return cluster.generation > 0 and node not in cluster.members(cluster.generation)


def calibrated(work: Path, processes: int) -> float:
    """Seconds a step, saves included, here and now."""
    directory = work / "calibration"
    shutil.rmtree(directory, ignore_errors=True)
    cluster = Cluster(
        directory, settings(directory / "run", processes, 10_000), work / "compiled"
    ).start()
    try:
        cluster.until_going(0)
        cluster.until(lambda: cluster.step() >= 10, "ten steps")
        first, began = cluster.step(), time.monotonic()
        time.sleep(20.0)
        pace = (time.monotonic() - began) / (cluster.step() - first)
        cluster.stop()
    finally:
        cluster.close()
    return pace


def alarms(work: Path, minutes: float, load: int, processes: int) -> int:
    """A healthy run under default timeouts, beside `load` busy processes: whatever is decided is a false alarm."""
    directory = work / f"alarms-{processes}"
    shutil.rmtree(directory, ignore_errors=True)
    values = settings(directory / "run", processes, 1_000_000)
    values["survive"] = {"wanted": processes}
    cluster, loads = Cluster(directory, values, work / "compiled"), list[float]()
    with contextlib.closing(cluster), bench.busy(load):
        cluster.start()
        cluster.until_going(0, 900.0)
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline and not cluster.is_over():
            time.sleep(min(60.0, max(0.0, deadline - time.monotonic())))
            loads.append(load_average())
            say(
                f"step {cluster.step()}, generation {cluster.generation}, load {loads[-1]:.1f}"
            )
        alarm = [e for e in cluster.of("verdict", "over") if e["kind"] != "start"]
        slow = cluster.of("straggler")
        codes = cluster.stop()
    print(
        f"{len(alarm)} false alarms, {len(slow)} ranks called slow, in {minutes:.0f} minutes at load "
        f"{median(loads):.1f}; exit codes {codes}"
    )
    for event in alarm + slow:
        print(json.dumps(event))
    return int(bool(alarm))
