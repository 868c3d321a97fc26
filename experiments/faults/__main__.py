"""Injects every fault that was found or thought of, and prints what became of each: python -m experiments.faults

Prints per room and in sum how many were tried, named, unclear, silent and traceback (the words: `harness.py`), and each that was
not named with its reason. Exit code 0 if none is silent or a traceback, and every control was judged rightly. Full disks and read-only ones are mounts that the fault's
processes alone see, another user is nobody: both need root, and are counted as not tried without.
"""

import argparse
import fnmatch
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ENVIRONMENT = {  # of every process, so that it starts and compiles fast and says nothing of its own
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "COLUMNS": "200",
}
VERDICTS = ("named", "unclear", "silent", "traceback", "not tried")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.faults", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="faults whose 'room: name' or point matches, such as 'data*', '*FIFO*' or '#9'",
    )
    parser.add_argument("--list", action="store_true", help="lists the faults and injects none")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the table")
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="faults at a time (default: the cores, at most 4)"
    )
    options = parser.parse_args()

    work = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ.update(ENVIRONMENT)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
        work / "compiled"
    )  # read when JAX is imported, so all else comes after
    from experiments.faults import harness, rooms

    rooms.load()
    chosen = [f for f in harness.FAULTS if _matches(f, options.only)]
    try:
        if options.list:
            for fault in chosen:
                print(f"{fault.room:<12} {'#' + fault.point if fault.point else '':<4} {fault.name}")
            return 0
        return _run(chosen, work, options)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _matches(fault, pattern: str | None) -> bool:
    if pattern is None:
        return True
    return any(
        fnmatch.fnmatch(text, pattern) for text in (f"{fault.room}: {fault.name}", fault.room, f"#{fault.point}")
    )


def _run(chosen: list, work: Path, options: argparse.Namespace) -> int:
    from experiments.faults import bases, harness

    began = time.monotonic()
    work.chmod(0o755)
    (work / "compiled").mkdir(mode=0o777)
    (work / "compiled").chmod(0o777)
    bases.make(work / "bases")
    found: list[dict] = []

    def tell(fault: harness.Fault, verdict: str, reason: str) -> None:
        found.append(
            {"room": fault.room, "fault": fault.name, "point": fault.point, "verdict": verdict, "reason": reason}
        )
        if verdict != "named":
            print(
                f"{verdict:<10} {fault.room}: {fault.name}{' #' + fault.point if fault.point else ''}: {reason}",
                file=sys.stderr,
                flush=True,
            )

    (work / "places").mkdir()
    harness.meet(chosen, work / "places", work / "bases", options.jobs, tell)
    sums = _sums(found)
    seconds = time.monotonic() - began
    if options.json:
        print(json.dumps({"faults": found, "sums": sums, "seconds": round(seconds)}, indent=1))
    else:
        print(f"{'room':<14}{'tried':>7}" + "".join(f"{v:>11}" for v in VERDICTS))
        for room, counts in sums.items():
            print(f"{room:<14}{counts['tried']:>7}" + "".join(f"{counts[v]:>11}" for v in VERDICTS))
        print(f"{seconds:.0f} s, {options.jobs} at a time")
    controls = sums.get("controls", Counter())
    return int(bool(sums["all"]["silent"] or sums["all"]["traceback"] or controls["tried"] > controls["named"]))


def _sums(found: list[dict]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for room in [*dict.fromkeys(f["room"] for f in found), "all"]:
        counts = Counter(f["verdict"] for f in found if room in ("all", f["room"]))
        sums[room] = {"tried": sum(counts.values()) - counts["not tried"], **{v: counts[v] for v in VERDICTS}}
    return sums


if __name__ == "__main__":
    sys.exit(main())
