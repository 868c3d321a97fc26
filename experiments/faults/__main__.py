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
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from experiments import quick_compile
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
ROOMS = (
    "controls",
    "checkpoints",
    "run",
    "sources",
    "prepare",
    "config",
    "library",
    "planning",
    "adopting",
    "requests",
    "starved",
    "surroundings",
    "numbers",
    "features",
    "nodes",
    "refused",
)
VERDICTS = ("named", "unclear", "silent", "traceback", "hang", "not tried")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="faults whose 'room: name', room or kind matches, such as 'data*', '*FIFO*' or clock",
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
        "--json",
        action="store_true",
        help="one JSON object on stdout in place of the table",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=None,
        help="faults at a time (default: one more than the cores, since many only wait, at most 4; 1 with --long)",
    )
    options = parser.parse_args()
    options.jobs = options.jobs or (
        1 if options.long else min(4, (os.cpu_count() or 1) + 1)
    )

    # In a script's background they are ignored, and so would be the faults that send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ.update(ENVIRONMENT)
    # Read when JAX is imported, so all else comes after.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(work / "compiled")
    from experiments.faults import harness

    harness.register(ROOMS)
    matching = [
        f
        for f in harness.FAULTS
        if _matches(f, options.only) and f.long == options.long
    ]
    chosen = matching if options.all or options.only or options.long else _few(matching)
    if len(chosen) < len(matching):
        alike = len(matching) - len(chosen)
        print(
            f"left out: {alike} of kinds that two others are of (--all injects them)",
            file=sys.stderr,
        )
    try:
        if options.list:
            for fault in chosen:
                print(f"{fault.room:<12} {fault.kind:<22} {fault.name}")
            for (room, kind), tests in COVERED.items():
                print(f"{room:<12} {kind:<22} injected by {', '.join(tests)}")
            return 0
        return _run(chosen, work, options)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _matches(fault, pattern: str | None) -> bool:
    if pattern is None:
        return True
    texts = (f"{fault.room}: {fault.name}", fault.room, fault.kind)
    return any(fnmatch.fnmatch(text, pattern) for text in texts)


def _few(faults: list) -> list:
    """Returns the first and the last fault of each kind of a room, and all controls."""
    kinds: dict[tuple[str, str], list] = {}
    for fault in faults:
        kinds.setdefault((fault.room, fault.kind), []).append(fault)
    ends = {id(fault) for of in kinds.values() for fault in (of[0], of[-1])}
    return [f for f in faults if id(f) in ends or f.room == "controls"]


def _run(chosen: list, work: Path, options: argparse.Namespace) -> int:
    from experiments.faults import bases, harness

    began = time.monotonic()
    work.chmod(0o755)
    (work / "compiled").mkdir(mode=0o777)
    (work / "compiled").chmod(0o777)
    bases.make(work / "bases")
    found: list[dict] = []

    def tell(fault: harness.Fault, verdict: str, reason: str, seconds: float) -> None:
        known = {"room": fault.room, "kind": fault.kind, "fault": fault.name}
        found.append(
            {
                **known,
                "verdict": verdict,
                "reason": reason,
                "seconds": round(seconds, 2),
            }
        )
        if verdict != "named":
            print(
                f"{verdict:<10} {fault.room}: {fault.name}: {reason}",
                file=sys.stderr,
                flush=True,
            )

    (work / "places").mkdir()
    harness.meet(chosen, work / "places", work / "bases", options.jobs, tell)
    sums = _sums(found)
    seconds, processor = time.monotonic() - began, sum(os.times()[:4])
    if options.json:
        print(
            json.dumps(
                {"faults": found, "sums": sums, "seconds": round(seconds)}, indent=1
            )
        )
    else:
        columns = ("tried", "kinds", *VERDICTS, "seconds")
        print(f"{'room':<14}" + "".join(f"{column:>10}" for column in columns))
        for room, counts in sums.items():
            print(
                f"{room:<14}" + "".join(f"{counts[column]:>10}" for column in columns)
            )
        every = sums["all"]
        print(
            f"tried {every['tried']} cases of {every['kinds']} kinds in {seconds:.0f} s ({processor:.0f} of "
            f"processor), {options.jobs} at a time"
        )
    controls = sums.get("controls", Counter())
    wrong = any(sums["all"][verdict] for verdict in ("silent", "traceback", "hang"))
    return int(wrong or controls["tried"] > controls["named"])


def _sums(found: list[dict]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for room in [*dict.fromkeys(f["room"] for f in found), "all"]:
        of = [f for f in found if room in ("all", f["room"])]
        counts = Counter(f["verdict"] for f in of)
        kinds = {f["kind"] for f in of if f["verdict"] != "not tried"}
        sums[room] = {
            "tried": len(of) - counts["not tried"],
            "kinds": len(kinds),
            **{v: counts[v] for v in VERDICTS},
            "seconds": round(sum(f["seconds"] for f in of)),
        }
    return sums


if __name__ == "__main__":
    sys.exit(main())
