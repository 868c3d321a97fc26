"""Injects faults of each kind that no test covers, and prints what became of each: python -m experiments.faults

Of each kind the first and the last of a room, and all controls; CI runs that. `--all`: every fault that was found or
thought of and that no test injects; which test injects the others stands in `covered.py`, and `--list` says so. Prints
per room and in sum how many were tried, of how many kinds, and what became of them (the words: `harness.py`), and each
that was not named with its reason. Exit code 0 if none is silent, a traceback or a hang, and every control was judged
rightly. Full disks and read-only ones are mounts that the fault's processes alone see, another user is nobody: both
need root, and are counted as not tried without. `--long`: the faults that take minutes, of runs under supervisors
(`nodes.py`).
"""

import argparse
import fnmatch
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from experiments import quick_compile
from experiments.faults import bases, harness
from experiments.faults.covered import COVERED

# Of every process, so that it starts and compiles fast and says nothing of its own
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": " ".join(quick_compile.FLAGS),
    "PYTHONDONTWRITEBYTECODE": "1",
    "COLUMNS": "200",
}
# Each a module that registers its faults when it is imported.
ROOMS = ("controls", "run", "starved", "surroundings", "numbers", "nodes")
WRONG = ("silent", "traceback", "hang")
VERDICTS = ("named", "unclear", *WRONG, "not tried")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="faults whose 'room: name', room or kind matches, such as 'run*', '*SIGKILL*' or clock",
    )
    parser.add_argument("--all", action="store_true", help="every fault of each kind")
    parser.add_argument(
        "--long",
        action="store_true",
        help="the faults that take minutes, in place of the others",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="lists the faults, and the tests that inject others; injects none",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="faults at a time (default: one more than the cores, since many only wait, at most 4; 1 with --long)",
    )
    options = parser.parse_args()

    # In a script's background they are ignored, and so would be the faults that send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    # Read when JAX is imported, which the rooms do.
    os.environ.update(ENVIRONMENT, JAX_COMPILATION_CACHE_DIR=str(work / "compiled"))
    harness.register(ROOMS)
    matching = [
        fault
        for fault in harness.FAULTS
        if _matches(fault, options.only) and fault.long == options.long
    ]
    chosen = matching if options.all or options.only or options.long else _few(matching)
    if alike := len(matching) - len(chosen):
        print(
            f"left out: {alike} of kinds that two others are of (--all injects them)",
            file=sys.stderr,
        )
    try:
        if options.list:
            for fault in chosen:
                print(f"{fault.room:<12} {fault.kind:<22} {fault.name}")
            for covered, tests in COVERED.items():
                room, kind = covered.split()
                print(f"{room:<12} {kind:<22} injected by {', '.join(tests)}")
            return 0
        jobs = 1 if options.long else min(4, (os.cpu_count() or 1) + 1)
        return _run(chosen, work, options.jobs or jobs)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _matches(fault: harness.Fault, pattern: str | None) -> bool:
    texts = (f"{fault.room}: {fault.name}", fault.room, fault.kind)
    return pattern is None or any(fnmatch.fnmatch(text, pattern) for text in texts)


def _few(faults: list[harness.Fault]) -> list[harness.Fault]:
    """Returns the first and the last fault of each kind of a room, and all controls."""
    kinds = defaultdict(list)
    for fault in faults:
        kinds[fault.room, fault.kind].append(fault)
    ends = {id(fault) for of in kinds.values() for fault in (of[0], of[-1])}
    return [f for f in faults if id(f) in ends or f.room == "controls"]


def _run(chosen: list[harness.Fault], work: Path, jobs: int) -> int:
    began = time.monotonic()
    work.chmod(0o755)
    (work / "compiled").mkdir()
    (work / "compiled").chmod(0o777)
    bases.make(work / "bases")
    rooms: dict[str, Counter] = defaultdict(Counter)
    kinds: dict[str, set[str]] = defaultdict(set)
    for fault, verdict, reason, seconds in harness.meet(
        chosen,
        lambda fault, place: harness.verdict_of(fault, place, work / "bases"),
        work / "places",
        jobs,
        lambda fault: harness.LONGEST if fault.long else 4 * harness.PATIENCE,
    ):
        tried = verdict != "not tried"
        for room in (fault.room, "all"):
            rooms[room].update({verdict: 1, "tried": int(tried), "seconds": seconds})
            kinds[room].update([fault.kind] * tried)
        if verdict != "named":
            print(
                f"{verdict:<10} {fault.room}: {fault.name}: {reason}",
                file=sys.stderr,
                flush=True,
            )
    columns = ("tried", "kinds", *VERDICTS, "seconds")
    print(f"{'room':<14}" + "".join(f"{column:>10}" for column in columns))
    every = rooms.pop("all", Counter())
    for room, counts in [*rooms.items(), ("all", every)]:
        counts["kinds"] = len(kinds[room])
        print(f"{room:<14}" + "".join(f"{counts[name]:>10.0f}" for name in columns))
    print(
        f"tried {every['tried']} cases of {every['kinds']} kinds in {time.monotonic() - began:.0f} s "
        f"({sum(os.times()[:4]):.0f} of processor), {jobs} at a time"
    )
    controls = rooms["controls"]
    wrong = any(every[verdict] for verdict in WRONG)
    return int(wrong or controls["tried"] > controls["named"])


if __name__ == "__main__":
    sys.exit(main())
