"""A stand-in for a training process: it beats as one does, without JAX, so that supervisors can be tried in fractions
of a second.

python stand_in.py CONFIG: takes train.steps steps of 20 ms, "saves" every checkpoint.every of them (a number in the
file `step`), goes on from there, and keeps the file `rows` as a run keeps metrics.jsonl: a line a step, none twice.
What it is to do besides stands in RUN/do.RANK, read at every step and once before the first (`do.RANK.start`): `kill`,
`frozen`, `nap`, `exit N KIND`, `deaf` (to SIGTERM), `fork`, `print BYTES`; with `always` it does so in every process
that comes. A process of another generation that is alive still is written down in the file `overlaps`.
"""

import faulthandler
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

told = json.loads(os.environ["MESHTRAIN_SUPERVISED"])
config = Path(sys.argv[1]).read_text()
steps = int(re.search(r"^  steps: (\d+)$", config, re.M)[1])
every = int(re.search(r"^checkpoint:\n(?:  .*\n)*?  every: (\d+)$", config, re.M)[1])
rank, number = told["rank"], told["number"]
files, local, run = (
    Path(told["generation"]),
    Path(told["local"]),
    Path(told["survive"]).parent,
)
faulthandler.register(
    signal.SIGUSR1,
    open(files / f"rank-{rank}.stack", "w"),  # noqa: SIM115
    all_threads=True,
)
count = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
# From within: if the directory is renamed away, what is written goes with it, and not to the run that has taken its
# name.
os.chdir(run)
run = Path()
saved, rows = run / "step", run / "rows"
told_to = os.open(local / "beat", os.O_WRONLY | os.O_CREAT)
step = start = n = alive = 0
phase = "start"
at_save: dict | None = None
began = time.monotonic()
stopping = False


def beat(to: str) -> None:
    global n, phase
    n, phase = n + 1, to
    write()


def write() -> None:
    seconds = {"step": time.monotonic() - began}
    said = {
        "n": n, "alive": alive, "step": step, "phase": phase, "pace": 0.02, "start": start, "seconds": seconds, "at_save": at_save,
    }  # fmt: skip
    os.pwrite(told_to, json.dumps(said).ljust(4095).encode() + b"\n", 0)


def live() -> None:
    global alive
    lease, since = b"", time.monotonic()
    while True:
        alive += 1
        write()
        now = (local / "lease").read_bytes()
        if now != lease:
            lease, since = now, time.monotonic()
        if time.monotonic() - since > told["fence"]:
            os._exit(72)
        time.sleep(0.1)


def fail(kind: str, sentence: str, code: int) -> None:
    (files / f"rank-{rank}.fault.json").write_text(
        json.dumps({"kind": kind, "sentence": sentence, "step": step})
    )
    os._exit(code)


def stop(*_: object) -> None:
    global stopping
    stopping = True


def do(asked: Path) -> None:
    if not asked.exists():
        return
    what = asked.read_text().split()
    if "always" not in what:
        asked.unlink()
    if what[0] in ("kill", "frozen"):
        os.kill(
            os.getpid(), {"kill": signal.SIGKILL, "frozen": signal.SIGSTOP}[what[0]]
        )
    elif what[0] == "exit":
        fail(what[2], "as asked", int(what[1]))
    elif what[0] == "nap":
        (run / "napping").touch()
        time.sleep(1.0)
    elif what[0] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif what[0] == "fork":
        deaf = f"trap '' TERM HUP; echo $$ >> {run}/forked; sleep 1000 & wait"
        subprocess.Popen(["sh", "-c", deaf])
    elif what[0] == "print":
        os.write(1, b"".join(b"%09d\n" % i for i in range(int(what[1]) // 10)))


def hold(path: Path, how: int) -> int | None:
    """The file's lock, for as long as this process lives; None if another process has it."""
    held = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(held, how | fcntl.LOCK_NB)
        return held
    except BlockingIOError:
        os.close(held)
        return None


def look_for_others() -> None:
    """A lock of a generation that is not ours and is held means that two generations are at work at once."""
    hold(run / f"alive.{number}", fcntl.LOCK_SH)
    for other in run.glob("alive.*"):
        for _ in range(3):
            # Two processes of this generation may look at once.
            if (
                other.name == f"alive.{number}"
                or (held := hold(other, fcntl.LOCK_EX)) is not None
            ):
                break
            time.sleep(0.01)
        else:
            with open(run / "overlaps", "a") as file:
                file.write(f"{number} {rank} {other.name}\n")
            continue
        if other.name != f"alive.{number}":
            os.close(held)


def await_others(at: int) -> None:
    """A barrier of all ranks, as a collective is one."""
    (files / f"at.{rank}").write_text(str(at))
    others = [files / f"at.{r}" for r in range(count)]
    while not all(o.exists() and int(o.read_text() or 0) >= at for o in others):
        time.sleep(0.002)


beat("start")
do(run / f"do.{rank}.start")
signal.signal(signal.SIGTERM, stop)
look_for_others()
threading.Thread(target=live, daemon=True).start()
for name in ("join", "restore", "compile"):
    beat(name)
await_others(0)
step = start = int(saved.read_text()) if saved.exists() else 0
if rank == 0:
    lock = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fail("lock", "the run's lock is held", 72)
    kept = rows.read_text().splitlines()[:step] if rows.exists() else []
    assert len(kept) == step, f"{len(kept)} rows for {step} steps"
    rows.with_suffix(".new").write_text("".join(line + "\n" for line in kept))
    os.replace(rows.with_suffix(".new"), rows)
# The step after which all stop, as JAX's preemption service has it
asked = files / "stop"
while step < steps:
    beat("data")
    do(run / f"do.{rank}")
    beat("wait")
    await_others(step)
    time.sleep(0.02)
    step += 1
    beat("log")
    if rank == 0:
        with rows.open("a") as file:
            file.write(f"{step} of generation {number}\n")
    if stopping and not asked.exists():
        Path(f"{asked}.{rank}").write_text(str(step + 2))
        os.rename(f"{asked}.{rank}", asked)
    last = asked.exists() and step >= int(asked.read_text())
    if step % every == 0 or step == steps or last:
        at_save = {"step": step, "seconds": {"step": time.monotonic() - began}}
        beat("save")
        do(run / f"do.{rank}.save")
        if rank == 0:
            saved.with_suffix(".new").write_text(str(step))
            os.replace(saved.with_suffix(".new"), saved)
    if last:
        sys.exit(75)
beat("end")
