"""What it costs: a new start after a fault beside any other start, the supervisors' share of a core, a decision, a
beat.
"""

import os
import shutil
import tempfile
import time
import timeit
from pathlib import Path

from experiments.survive.cluster import (
    Cluster,
    alive,
    load_average,
    median,
    say,
    settings,
)
from experiments.survive.tables import table
from meshtrain.survive.decide import decide
from meshtrain.survive.history import read
from meshtrain.survive.ledger import ledger
from meshtrain.survive.records import (
    Node,
    Rank,
    RestartPlan,
    Supervised,
    SupervisorOptions,
)
from meshtrain.survive.supervised import LEASE, SupervisedHeartbeat

PHASES = ("data", "dispatch", "wait")


def startup(work: Path, processes: int, times: int) -> int:
    """Seconds from the start of the processes to their first step: supervisors started anew, and re-formed after a
    kill, in turns.
    """
    directory = work / f"startup-{processes}"
    shutil.rmtree(directory, ignore_errors=True)
    cluster = Cluster(
        directory, settings(directory / "run", processes, 100_000), work / "compiled"
    )
    found: dict[str, list[tuple[float, int, int, float]]] = {
        "anew": [],
        "after a fault": [],
    }
    try:
        # The first one of all compiles, and the first one after it what a restore needs.
        for turn in range(times + 2):
            cluster.start()
            for way in found:
                generation = cluster.until_going(
                    cluster.generation if way != "anew" or turn else 0
                )
                one = started(cluster, generation)
                say(
                    f"{way}: {one[0]:.1f} s, {one[1]} programs found, {one[2]} compiled, load {one[3]:.1f}"
                )
                if turn > 1:
                    found[way].append(one)
                step = cluster.step()
                cluster.until(
                    lambda step=step: cluster.step() >= step + 12, "some steps"
                )
                if way == "anew":
                    cluster.inject(f"kill@{cluster.step()}:{turn % processes}")
            cluster.stop()
    finally:
        cluster.close()
    told = ledger(read(cluster.run))
    rows = [
        (
            way,
            processes,
            len(of),
            f"{median(s for s, *_ in of):.1f}, {max(s for s, *_ in of):.1f}",
            sum(h for _, h, _, _ in of),
            sum(m for _, _, m, _ in of),
            f"{median(load for *_, load in of):.1f}",
        )
        for way, of in found.items()
    ]
    print(
        table(
            (
                "first step",
                "processes",
                "times",
                "seconds: median, worst",
                "cache hits",
                "misses",
                "load",
            ),
            rows,
        )
    )
    anew, again = (median(s for s, *_ in of) for of in found.values())
    print(f"ratio {again / anew:.2f}")
    down = without_process(cluster, told.began, told.ended)
    print(
        f"ledger: {', '.join(f'{kind} {seconds:.1f}' for kind, seconds in told.seconds.items())}; sum "
        f"{sum(told.seconds.values()):.1f} s, "
        f"wall time {told.wall:.1f} s; down as /proc has it {down:.1f} s"
    )
    return int(
        again > 1.2 * anew or any(m for of in found.values() for _, _, m, _ in of)
    )


def started(cluster: Cluster, generation: int) -> tuple[float, int, int, float]:
    """Seconds to the first step of all ranks, programs that the cache had and had not, the load."""
    going = cluster.of("going", generation=generation)
    seconds = max(e["wall"] for e in going) - max(
        e["wall"] for e in cluster.of("started", generation=generation)
    )
    return (
        seconds,
        sum(e["cache"]["hits"] for e in going),
        sum(e["cache"]["misses"] for e in going),
        load_average(),
    )


def without_process(cluster: Cluster, began: float, ended: float) -> float:
    """Seconds in which no process of rank 0 was there."""
    lives = [
        (e["wall"], cluster.died.get(e["pid"], ended))
        for e in cluster.of("started")
        if e["rank"] == 0
    ]
    return ended - began - sum(min(b, ended) - a for a, b in lives)


def cost(work: Path, processes: int, seconds: float) -> int:
    """The supervisors' share of a core over so many seconds of training; `decide` on 1,000 nodes; a change of phase."""
    directory = work / f"cost-{processes}"
    shutil.rmtree(directory, ignore_errors=True)
    values = settings(directory / "run", processes, 1_000_000)
    values["survive"] = {"wanted": processes}
    cluster = Cluster(directory, values, work / "compiled").start()
    try:
        cluster.until_going(0)
        before = {n: ticks(p.pid) for n, p in cluster.supervisors.items()}
        began = time.monotonic()
        first = cluster.step()
        time.sleep(seconds)
        passed = time.monotonic() - began
        steps = cluster.step() - first
        second = os.sysconf("SC_CLK_TCK")
        shares = {
            n: (ticks(p.pid) - before[n]) / second / passed
            for n, p in cluster.supervisors.items()
        }
        assert all(alive(p.pid) for p in cluster.supervisors.values())
        cluster.stop()
    finally:
        cluster.close()
    say(f"{steps} steps in {passed:.0f} s, load {load_average():.1f}")
    decision = decided(1000)
    print(
        table(
            ("what it costs", ""),
            [
                *(
                    (
                        f"supervisor {name}, share of a core over {passed:.0f} s",
                        f"{share:.2%}",
                    )
                    for name, share in shares.items()
                ),
                ("decide on 1,000 nodes, best of 20", f"{1e3 * decision:.1f} ms"),
                ("a change of phase, best of 5 x 1,000", f"{1e6 * phase(work):.0f} us"),
            ],
        )
    )
    return int(max(shares.values()) > 0.005 or decision > 0.05)


def ticks(pid: int) -> int:
    """Processor time of a process, user and system, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


def decided(nodes: int) -> float:
    """Seconds of a decision on so many nodes, all of them well, which takes longest: every fault is looked for."""
    names = [f"n{i:04}" for i in range(nodes)]
    found = [
        Node(
            name,
            f"i{name}",
            f"h{name}",
            state="running",
            generation=1,
            acked=1,
            age=0.5,
            known=100.0,
            rank=Rank(
                i,
                100 + i,
                "S",
                1.0,
                0.5,
                step=10,
                phase="wait",
                pace=0.5,
                start=0,
                saved=10,
            ),
        )
        for i, name in enumerate(names)
    ]
    plan = RestartPlan(
        2,
        1,
        "running",
        names[0],
        1e9,
        "start",
        "",
        members=names,
        incarnations=[n.incarnation for n in found],
        age=100.0,
    )
    options = SupervisorOptions(lambda n: n or None, wanted=nodes)
    assert decide(1e9, found, plan, [], options).verdict == "go on"
    return min(
        timeit.repeat(
            lambda: decide(1e9, found, plan, [], options), number=1, repeat=20
        )
    )


def phase(work: Path) -> float:
    """Seconds of one change of phase, its line in the file included."""
    local = Path(
        tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else work)
    )
    (local / LEASE).write_text("1".rjust(16))
    beat = SupervisedHeartbeat(Supervised(local, local, 1, 0, 1e6, local))
    turn = iter(range(1_000_000))
    try:
        return (
            min(
                timeit.repeat(
                    lambda: beat.phase(PHASES[next(turn) % 3]), number=1000, repeat=5
                )
            )
            / 1000
        )
    finally:
        shutil.rmtree(local)
