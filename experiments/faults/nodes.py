"""Runs under supervisors, two nodes each: the network between them, phases in which a rank stands still, memory, disks.

Each takes minutes (`--long`). All are held against one undisturbed run: each step once, each loss the same bits on the
same mesh.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.faults.harness import (
    REPOSITORY,
    Hang,
    NotTried,
    Place,
    Silent,
    Unclear,
    fault,
    kind,
    last_line,
)
from experiments.survive.cluster import Cluster, Start, TooLate, rows_of, settings
from experiments.survive.network import NoNetwork, Wire

NODES = ["n0", "n1"]
PATIENCE = 400.0
STEPS = 160  # of the undisturbed run
SIXTY = 60.0


def values(
    run: Path, steps: int = 100_000, **sections: dict[str, Any]
) -> dict[str, Any]:
    survive = {
        "node_timeout": 8.0,
        "step_timeout": 20.0,
        "least": 1,
        **sections.pop("survive", {}),
    }
    base = settings(run, len(NODES), steps, survive=survive)
    base["model"] = {
        "layers": 2,
        "d_model": 16,
        "heads": 2,
        "d_ff": 32,
        "vocab_size": 260,
    }
    base["train"] |= {"sequence_length": 32}
    for name, keys in sections.items():
        base[name] = {**base.get(name, {}), **keys}
    return base


@contextlib.contextmanager
def supervised(
    p: Place,
    place: Path | None = None,
    steps: int = 100_000,
    **sections: dict[str, Any],
) -> Iterator[Cluster]:
    """A run that is not yet started; what it has trained is judged when the context ends well."""
    directory = place or p.dir / "cluster"
    shared = p.bases.parent / "supervised"
    shared.mkdir(exist_ok=True)
    expected = reference(shared)
    cluster = Cluster(
        directory, values(directory / "run", steps, **sections), shared / "compiled"
    )
    try:
        yield cluster
        trained(cluster, expected)
    except TooLate as late:
        raise Hang(f"{late}; {words(cluster)}") from None
    finally:
        cluster.close()


def reference(shared: Path) -> dict[int, float]:
    """Losses of the run that nothing disturbs, which is made once."""
    path = shared / "losses.json"
    if not path.exists():
        cluster = Cluster(
            shared / "undisturbed",
            values(shared / "undisturbed/run", STEPS),
            shared / "compiled",
        ).start()
        try:
            assert set(cluster.end(900.0).values()) == {0}, "the undisturbed run failed"
            path.write_text(
                json.dumps({row["step"]: row["loss"] for row in rows_of(cluster.run)})
            )
        finally:
            cluster.close()
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


def trained(cluster: Cluster, expected: dict[int, float]) -> None:
    rows = rows_of(cluster.run)
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)) or not rows:
        raise Silent(
            f"metrics.jsonl has steps {[row['step'] for row in rows][-5:]}, {len(rows)} rows"
        )
    whole = all(len(e["members"]) == len(NODES) for e in cluster.of("formed"))
    for row in rows:
        right = expected.get(row["step"], row["loss"])
        if abs(row["loss"] - right) > (0 if whole else 2e-5) * abs(right):
            raise Silent(
                f"the loss of step {row['step']} is {row['loss']}, not {right}"
            )


def words(cluster: Cluster) -> str:
    """What was decided, and what was said last."""
    decided = [
        f"{e['kind']} {','.join(e['blamed']) or '-'}: {e['reason']}"
        for e in cluster.of("verdict", "over")
    ]
    logs = [
        last_line((cluster.directory / f"{node}.log").read_text(errors="replace"))
        for node in NODES
    ]
    return " | ".join([*decided[-3:], *logs])[:500]


def verdicts(cluster: Cluster) -> list[dict[str, Any]]:
    return [
        e for e in cluster.of("verdict", "over") if e["kind"] not in ("start", "grow")
    ]


def going(cluster: Cluster, steps: int = 12) -> None:
    """Started, and some steps are taken."""
    cluster.start()
    cluster.until_going(0, PATIENCE)
    cluster.until(lambda: cluster.step() >= steps, "some steps", PATIENCE)


def more(cluster: Cluster, steps: int = 12) -> None:
    """Some steps more than there are now."""
    now = cluster.step()
    cluster.until(lambda: cluster.step() >= now + steps, f"steps after {now}", PATIENCE)


def quietly(cluster: Cluster) -> None:
    """Nothing was decided, and it stops when it is asked to."""
    if found := verdicts(cluster):
        raise Silent(f"a false alarm: {found[0]['kind']}: {found[0]['reason'][:300]}")
    if set(codes := cluster.stop().values()) != {75}:
        raise Unclear(f"exit codes {list(codes)}: {words(cluster)}")


def named(cluster: Cluster, said: str, *blamed: str, number: int = 1) -> None:
    """The first verdict, or the one of that number, is of this kind, and blames these nodes."""
    found = verdicts(cluster)[number - 1 :]
    if not found:
        raise Silent(f"no verdict: {words(cluster)}")
    kind, wrong, reason = (found[0][key] for key in ("kind", "blamed", "reason"))
    if kind not in said.split("|") or sorted(wrong) != sorted(blamed):
        raise Unclear(
            f"{kind} {wrong}, where {said} {list(blamed)} is right: {reason[:300]}"
        )


# --- the network

kind("partition")


@contextlib.contextmanager
def networked(p: Place, **sections: dict[str, Any]) -> Iterator[tuple[Cluster, Wire]]:
    try:
        wire = Wire(NODES, f"f{os.getpid()}")
    except NoNetwork as reason:
        raise NotTried(str(reason)) from None
    try:
        with supervised(p, **sections) as cluster:
            cluster.starts = {
                node: Start(before=wire.inside(node), address=wire.addresses[node])
                for node in NODES
            }
            yield cluster, wire
    finally:
        wire.close()


def cut(seconds: float, told: str) -> None:
    @fault(
        f"no word passes between the nodes for {seconds:.0f} s, though both reach the run directory",
        long=True,
    )
    def _(p: Place) -> None:
        with networked(p) as (cluster, wire):
            going(cluster)
            wire.cut = True
            time.sleep(seconds)
            wire.cut = False
            more(cluster)
            if told:
                named(cluster, told)
                cluster.stop()
            else:
                quietly(cluster)


cut(5.0, "")
cut(SIXTY, "collective")

kind("slow-network")


def slow(name: str, delay: float, loss: float) -> None:
    @fault(f"between the nodes {name}", long=True)
    def _(p: Place) -> None:
        with networked(p, survive={"step_timeout": SIXTY}) as (cluster, wire):
            wire.delay, wire.loss = delay, loss
            going(cluster)
            more(cluster)
            quietly(cluster)


slow("each message takes 25 ms", 0.025, 0.0)
slow("one frame in fifty is lost", 0.0, 0.02)
slow("each message takes 10 ms, and one frame in a hundred is lost", 0.010, 0.01)

# --- a rank that stands still

kind("frozen-in-phase")
SITE = """
import os, signal, time
from meshtrain.survive import heartbeat
phase, rank, step, number = os.environ["FREEZE"].split(":")
def stops(name, real):
    def frozen(self, *arguments, **keywords):
        found = real(self, *arguments, **keywords)
        told = self.supervised
        if told and (name or arguments[0], told.rank, told.number) == (phase, int(rank), int(number)) and self.step >= int(step):
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        return found
    return frozen
heartbeat.Heartbeat.phase = stops("", heartbeat.Heartbeat.phase)
heartbeat.Heartbeat.begin_save = stops("save", heartbeat.Heartbeat.begin_save)
"""


def frozen(
    phase: str,
    step: int,
    steps: int = 100_000,
    number: int = 1,
    **sections: dict[str, Any],
) -> None:
    @fault(
        f"a rank is stopped (SIGSTOP) in {phase}{' of the last step' if steps < 100 else ''}",
        long=True,
    )
    def _(p: Place) -> None:
        site = p.file("site/sitecustomize.py", SITE).parent
        freeze = {
            "PYTHONPATH": f"{site}:{REPOSITORY}",
            "FREEZE": f"{phase}:1:{step}:{number}",
        }
        with supervised(p, steps=steps, **sections) as cluster:
            cluster.starts = {node: Start(environment=freeze) for node in NODES}
            if number == 2:  # there must be a checkpoint to restore
                going(cluster)
                cluster.inject("kill@0:0")
            else:
                cluster.start()
            cluster.until(
                lambda: len(verdicts(cluster)) >= number, "a verdict", PATIENCE
            )
            named(cluster, "frozen", cluster.members(number)[1], number=number)
            cluster.until_going(number, PATIENCE)
            if steps < 100:
                if set(codes := cluster.end(PATIENCE).values()) != {0}:
                    raise Unclear(f"exit codes {list(codes)}")
            else:
                more(cluster)
                cluster.stop()


frozen("compile", 0)
frozen("restore", 0, number=2)
frozen("eval", 10, eval={"every": 10, "batches": 2})
frozen("save", 10)
frozen("wait", 39, steps=40)
frozen("end", 40, steps=40)

# --- memory and disks

kind("memory-cgroup")
MEMORY = Path("/sys/fs/cgroup/memory")


@fault("a memory cgroup kills a rank", long=True)
def memory_cgroup(p: Place) -> None:
    group = MEMORY / f"faults-{os.getpid()}"
    if not (MEMORY / "memory.limit_in_bytes").exists() or os.getuid():
        raise NotTried("there is no memory cgroup (v1) that can be written")
    group.mkdir()
    try:
        with supervised(p) as cluster:
            going(cluster)
            pid = next(e["pid"] for e in cluster.of("started") if e["node_of"] == "n1")
            (group / "memory.limit_in_bytes").write_text(str(8 << 20))
            (group / "memory.swappiness").write_text("0")
            (group / "cgroup.procs").write_text(str(pid))
            cluster.until(lambda: verdicts(cluster), "the rank to be killed", 120.0)
            named(cluster, "signal|memory", "n1")
            cluster.until_going(1, PATIENCE)
            more(cluster)
            cluster.stop()
    finally:
        time.sleep(1.0)
        with contextlib.suppress(OSError):
            group.rmdir()


kind("disk-supervised")


@fault("the run directory is read-only for 10 s", long=True)
def read_only(p: Place) -> None:
    """A mount over it: what is open stays so, nothing can be made, renamed or opened for writing."""
    with supervised(
        p, survive={"node_timeout": 30.0, "step_timeout": SIXTY}
    ) as cluster:
        p._own_mounts()
        going(cluster)
        run = str(cluster.run)
        subprocess.run(["mount", "--bind", run, run], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
        try:
            time.sleep(10.0)
        finally:
            subprocess.run(["umount", "-l", run], check=True)
        more(cluster, 20)
        quietly(cluster)


@fault("there are no inodes left for 12 steps", long=True)
def no_inodes(p: Place) -> None:
    place = p.dir / "disk"
    p.mount(place, "size=64m,nr_inodes=600")
    with supervised(p, place=place / "cluster") as cluster:
        going(cluster)
        made = 0
        with contextlib.suppress(OSError):
            for made in range(1000):
                (place / f"filler-{made}").touch()
        if made > 900:
            raise NotTried("the limit on inodes is not kept")
        time.sleep(20.0)
        for path in place.glob("filler-*"):
            path.unlink()
        more(cluster, 20)
        quietly(cluster)
