"""A stand-in for a training process: it beats as one does, without JAX, so that supervisors can be tried in fractions of a second.

python stand_in.py CONFIG: takes train.steps steps of 20 ms, "saves" every checkpoint.every of them (a number in a file that all share), and
goes on from there. What it is to do besides stands in DIR/do.RANK, read at every step: `kill`, `frozen`, `asleep`, `error`, `exit N`.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import yaml

told = json.loads(os.environ["MESHTRAIN_SUPERVISED"])
config = yaml.safe_load(Path(sys.argv[1]).read_text())
run, rank = Path(config["run"]["directory"]), told["rank"]
files, local = Path(told["generation"]), Path(told["local"])
faulthandler.register(signal.SIGUSR1, open(files / f"rank-{rank}.stack", "w"), all_threads=True)  # noqa: SIM115
saved = run / "step"
told_to = os.open(local / "beat", os.O_WRONLY | os.O_CREAT)
step = start = int(saved.read_text()) if saved.exists() else 0
n = alive = 0
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
        "n": n,
        "alive": alive,
        "step": step,
        "phase": phase,
        "pace": 0.02,
        "start": start,
        "seconds": seconds,
        "at_save": at_save,
    }
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
    (files / f"rank-{rank}.fault.json").write_text(json.dumps({"kind": kind, "sentence": sentence, "step": step}))
    os._exit(code)


def stop(*_: object) -> None:
    global stopping
    stopping = True


def do() -> None:
    asked = run / f"do.{rank}"
    if not asked.exists():
        return
    what = asked.read_text().split()
    if "always" not in what:
        asked.unlink()
    if what[0] in ("kill", "frozen", "abort"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "frozen": signal.SIGSTOP, "abort": signal.SIGABRT}[what[0]])
    elif what[0] == "asleep":
        time.sleep(1000)
    elif what[0] == "error":
        fail("error", "RuntimeError: as asked", 1)
    elif what[0] == "exit":
        fail(what[2] if len(what) > 2 else "error", "as asked", int(what[1]))


signal.signal(signal.SIGTERM, stop)
threading.Thread(target=live, daemon=True).start()
for name in ("join", "restore", "compile"):
    beat(name)
count = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
number = told["number"]
while step < config["train"]["steps"]:
    beat("data")
    do()
    beat("wait")
    # A barrier of all ranks, as a collective is one; a peer that is gone ends it.
    (files / f"at.{rank}").write_text(str(step))
    while True:
        others = [files / f"at.{r}" for r in range(count)]
        if all(o.exists() and int(o.read_text() or 0) >= step for o in others):
            break
        if list(files.glob("gone.*")):
            fail("peer", "another process of this run died", 73)
        time.sleep(0.002)
    time.sleep(0.02)
    step += 1
    beat("log")
    if step % config["checkpoint"]["every"] == 0 or step == config["train"]["steps"] or stopping:
        at_save = {"step": step, "seconds": {"step": time.monotonic() - began}}
        beat("save")
        if rank == 0:
            saved.with_suffix(".new").write_text(str(step))
            os.replace(saved.with_suffix(".new"), saved)
    if stopping:
        sys.exit(75)
beat("end")
