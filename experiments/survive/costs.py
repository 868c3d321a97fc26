"""What supervisors cost: their share of a core, a decision, a beat."""

import os
import shutil
import tempfile
import time
import timeit
from pathlib import Path

from experiments.bench import Table
from experiments.survive.cluster import (
    Cluster,
    alive,
    load_average,
    say,
    settings,
)
from meshtrain.survive.decide import decide
from meshtrain.survive.records import (
    Node,
    Rank,
    RestartPlan,
    Supervised,
    SupervisorOptions,
)
from meshtrain.survive.supervised import LEASE, SupervisedHeartbeat

PHASES = ("data", "dispatch", "wait")


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
    table = Table("what it costs".ljust(40), "       ")
    for name, share in shares.items():
        table.row(f"supervisor {name}, share of a core", f"{share:.2%}")
    table.row("decide on 1,000 nodes, best of 20", f"{1e3 * decision:.1f} ms")
    table.row("a change of phase, best of 5 x 1,000", f"{1e6 * phase(work):.0f} us")
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
