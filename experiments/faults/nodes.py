"""Runs under supervisors, two nodes each: the network between them, phases in which a rank stands still, memory, disks,
versions, clocks.

Each takes minutes (`--long`). All are held against one undisturbed run: each step once, each loss the same bits on the
same mesh.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.faults.harness import (
    REPOSITORY,
    Hang,
    NotTried,
    Place,
    Silent,
    Unclear,
    done,
    fault,
    kind,
    last_line,
)
from experiments.survive.cluster import Cluster, Start, TooLate, rows_of, settings
from experiments.survive.network import NoNetwork, Wire
from meshtrain.survive.child import LEFT

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
    judged: bool = True,
    **sections: dict[str, Any],
) -> Iterator[Cluster]:
    """A run that is not yet started; what it has trained is judged when the context ends well."""
    directory = place or p.dir / "cluster"
    shared = p.bases.parent / "supervised"
    shared.mkdir(exist_ok=True)
    expected = reference(shared) if judged else {}
    cluster = Cluster(
        directory, values(directory / "run", steps, **sections), shared / "compiled"
    )
    try:
        yield cluster
        if judged:
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


def named(cluster: Cluster, said: str, *blamed: str) -> dict[str, Any]:
    """The first verdict is of this kind, and blames these nodes."""
    found = verdicts(cluster)
    if not found:
        raise Silent(f"no verdict: {words(cluster)}")
    if found[0]["kind"] not in said.split("|") or sorted(found[0]["blamed"]) != sorted(
        blamed
    ):
        raise Unclear(
            f"{found[0]['kind']} {found[0]['blamed']}, where {said} {list(blamed)} is right: {found[0]['reason'][:300]}"
        )
    return found[0]


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
            elif verdicts(cluster):
                raise Silent(f"a false alarm: {words(cluster)}")
            cluster.stop()


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
if os.environ.get("FREEZE"):
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
if os.environ.get("AHEAD"):
    real_time, real_ns, ahead = time.time, time.time_ns, int(os.environ["AHEAD"])
    time.time = lambda: real_time() + ahead
    time.time_ns = lambda: real_ns() + ahead * 10**9
"""


def site(p: Place, **variables: str) -> dict[str, str]:
    """An environment in which every Python process is changed as SITE says."""
    path = p.file("site/sitecustomize.py", SITE)
    return {"PYTHONPATH": f"{path.parent}:{REPOSITORY}", **variables}


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
        with supervised(p, steps=steps, **sections) as cluster:
            cluster.starts = {
                node: Start(environment=site(p, FREEZE=f"{phase}:1:{step}:{number}"))
                for node in NODES
            }
            cluster.start()
            if number == 2:  # there must be a checkpoint to restore
                cluster.until_going(0, PATIENCE)
                cluster.until(lambda: cluster.step() >= 12, "some steps", PATIENCE)
                cluster.inject("kill@0:0")
            cluster.until(
                lambda: len(verdicts(cluster)) >= number, "a verdict", PATIENCE
            )
            said = verdicts(cluster)[number - 1]
            node = cluster.members(number)[1]
            if said["kind"] != "frozen" or said["blamed"] != [node]:
                raise Unclear(
                    f"{said['kind']} {said['blamed']}, where {node} is frozen: {said['reason'][:300]}"
                )
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

kind("node-paused")


@fault(
    "a node is paused whole, as a virtual machine: the other goes on soon, and no restart is spent",
    long=True,
)
def paused(p: Place) -> None:
    with supervised(p, survive={"restarts": 3}) as cluster:
        going(cluster)
        victims = [
            cluster.supervisors["n0"].pid,
            *(e["pid"] for e in cluster.of("started") if e["node_of"] == "n0"),
        ]
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        try:
            cluster.until_going(1, 90.0)
            more(cluster)
        finally:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        more(cluster, 6)
        named(cluster, "lost", "n0")
        cluster.stop()


kind("node-throttled")


@fault(
    "a rank is stopped for 0.4 of each 0.5 s, as by a throttled neighbour: it is named, and not ended",
    long=True,
)
def throttled(p: Place) -> None:
    with supervised(
        p, survive={"step_timeout": SIXTY}, train={"sequence_length": 128}, judged=False
    ) as cluster:
        going(cluster)
        pid = next(e["pid"] for e in cluster.of("started") if e["node_of"] == "n1")
        stop = threading.Event()

        def throttle() -> None:
            while not stop.is_set():
                for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                    time.sleep(seconds)

        thread = threading.Thread(target=throttle)
        thread.start()
        try:
            cluster.until(
                lambda: cluster.of("straggler") or verdicts(cluster),
                "a slow rank to be found",
                240.0,
            )
        except TooLate:
            raise Silent("nobody is called slow in 240 s") from None
        finally:
            stop.set()
            thread.join()
        if [e["node"] for e in cluster.of("straggler")][:1] != ["n1"]:
            raise Unclear(words(cluster))
        cluster.stop()


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


@fault("the disk is full for 20 s, and what each rank reads is logged", long=True)
def full(p: Place) -> None:
    place = p.dir / "disk"
    p.mount(place, "size=24m")
    with supervised(p, place=place / "cluster", log={"batches": True}) as cluster:
        going(cluster)
        p.fill(place)
        time.sleep(20.0)
        (place / ".filler").unlink()
        more(cluster, 20)
        quietly(cluster)


# --- nodes that are not alike

kind("nodes-differ")


def differs(name: str, arrange: Callable[[Place], Start], *said: str) -> None:
    """Refused when they form, in one sentence, with 2."""

    @fault(f"one node has {name}", long=True)
    def _(p: Place) -> None:
        with supervised(p, judged=False) as cluster:
            cluster.starts = {"n1": arrange(p)}
            cluster.start()
            cluster.until(
                lambda: (
                    cluster.step() >= 12
                    or any(s.poll() is not None for s in cluster.supervisors.values())
                ),
                "steps, or an end",
                PATIENCE,
            )
            if cluster.step() >= 12:
                raise Silent(
                    f"{cluster.step()} steps are taken without a word: {words(cluster)}"
                )
            codes = cluster.end(60.0)
            if 2 not in codes.values():
                raise Unclear(f"exit codes {codes}: {words(cluster)}")
            text = words(cluster)
            if not any(word in text for word in said):
                raise Unclear(text)


def other_code(p: Place) -> Start:
    shutil.copytree(
        REPOSITORY / "meshtrain",
        p.dir / "other/meshtrain",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    path = p.dir / "other/meshtrain/optim.py"
    path.write_text(path.read_text() + "\nNEWER = True\n")
    return Start(
        environment={"PYTHONPATH": str(p.dir / "other")},
        before=("env", f"--chdir={p.dir}"),
    )


differs(
    "another learning rate",
    lambda p: Start(set=("optimizer.learning_rate=0.02",)),
    "config",
    "learning_rate",
)
differs("another seed", lambda p: Start(set=("run.seed=7",)), "config", "seed")
differs("another version of the code", other_code, "code", "version")
kind("clock-of-a-node")


@fault(
    "the clock of one node is an hour ahead: nothing is said, and nothing is lost",
    long=True,
)
def ahead(p: Place) -> None:
    with supervised(p) as cluster:
        cluster.starts = {"n1": Start(environment=site(p, AHEAD="3600"))}
        going(cluster)
        more(cluster, 20)
        quietly(cluster)


@fault(
    "the clock of one node is an hour behind, and its rank is killed: both go on",
    long=True,
)
def behind(p: Place) -> None:
    with supervised(p) as cluster:
        cluster.starts = {"n1": Start(environment=site(p, AHEAD="-3600"))}
        going(cluster)
        cluster.inject("kill@0:1")
        cluster.until_going(1, PATIENCE)
        named(cluster, "signal", "n1")
        more(cluster)
        cluster.stop()


# --- what is left over, and quiet

kind("launch-killed")


@fault(
    "launch is killed: no process is left, and after the next run no file in /dev/shm",
    long=True,
)
def launched(p: Place) -> None:
    before = set(Path("/dev/shm").glob("meshtrain-*"))
    p.config(
        mesh={"data": 2},
        train={"steps": 100_000, "global_batch_size": 4, "sequence_length": 16},
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "meshtrain.launch",
            "local",
            "2",
            "--config",
            "config.yaml",
        ],
        cwd=p.dir,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE
    while p.last_step() < 5 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.kill()
    process.wait()
    time.sleep(LEFT + 10.0)
    # What is left in memory goes with the next run of the machine.
    p.config(
        "next.yaml",
        run={"directory": "next"},
        train={"steps": 2, "global_batch_size": 4, "sequence_length": 16},
    )
    done(p.python("-m", "meshtrain.survive", "--config", "next.yaml"))
    left = [
        path
        for path in Path("/dev/shm").glob("meshtrain-*")
        if path not in before and path.stat().st_uid == os.getuid()
    ]
    # Others' runs are here too: only what names this run, or nobody, counts.
    running = [
        e.name
        for e in Path("/proc").iterdir()
        if e.name.isdecimal() and names(e, str(p.run))
    ]
    if running:
        raise Silent(f"processes {running} go on")
    if left and not any(
        names(e, str(path))
        for path in left
        for e in Path("/proc").iterdir()
        if e.name.isdecimal()
    ):
        raise Silent(f"{len(left)} directories are left, such as {left[0]}")


def names(entry: Path, word: str) -> bool:
    with contextlib.suppress(OSError):
        return (
            word.encode()
            in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        )
    return False


kind("quiet-under-load")


@fault(
    "nothing, for 10 minutes beside 15 busy processes, default timeouts: no alarm",
    long=True,
)
def quiet(p: Place) -> None:
    ended = p.python(
        "-m",
        "experiments.survive",
        "alarms",
        "--minutes",
        "10",
        "--load",
        "15",
        "--processes",
        "2",
        "--work",
        str(p.dir / "alarms"),
        patience=1700.0,
    )
    if ended.code or not ended.out.startswith("0 false alarms, 0 ranks called slow"):
        raise Silent(ended.out.strip()[:500])
