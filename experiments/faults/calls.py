"""Refuses each call of the system on each file that a command reads or writes: python -m experiments.faults.calls

    open read write fsync rename mkdir stat unlink rmdir list
        x EIO ENOSPC EDQUOT EMFILE ESTALE EROFS, half of what is asked for, a delay of 10 s
        x once, or each time
        x each file of a resume, a save, a preparation, an export

Each cell is a process, in which a library stands before the system's own (`refusing_calls.c`, compiled here by gcc), so
that what C++ asks for (TensorStore) is refused, too. It ends in one of

    done         as if nothing had been; the call was not made again, or need not be
    retried      likewise, and the call was refused more than once, or said in words
    told         plain sentences and another exit code; nothing is lost, and the same command ends well afterwards
    silent       exit code 0, but something is missing, altered or set aside
    lost         something that was there is gone, or the same command does not end well afterwards
    traceback, hang

One run of each command without a fault records which calls it makes on which files: other cells are left out. Exit code 0 if none is silent, lost, a traceback or a hang.
"""

import argparse
import errno
import fnmatch
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.faults import bases, harness
from experiments.faults.harness import Place, Silent

SOURCE = Path(__file__).with_name("refusing_calls.c")
VARIABLES = ("REFUSE_CALL", "REFUSE_FILE", "REFUSE_HOW", "REFUSE_LOG", "REFUSE_TIMES")
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EMFILE", "ESTALE", "EROFS")
CALLS = (
    "open",
    "read",
    "write",
    "fsync",
    "rename",
    "mkdir",
    "stat",
    "unlink",
    "rmdir",
    "list",
)
SHORT = ("read", "write")
DELAY = 10.0  # seconds
# Seconds that a command may take: of a call that is delayed each time it may make dozens, on a machine with much else to do.
PATIENCE = 600.0
WELL, WRONG = ("done", "retried", "told"), ("silent", "lost", "traceback", "hang")
STEP = "run/checkpoints/6"
NEW = "run/checkpoints/8.writing"
ARRAYS = (
    "arrays/orbax.checkpoint",
    "arrays/state/_METADATA",
    "arrays/state/manifest.ocdbt",
    "arrays/state/*/d/*",
)


@dataclass(frozen=True)
class Cell:
    """One fault of one command: `how` is a name of errno, short or delay; `times` 0: each time."""

    command: str
    file: str  # a pattern, from the place
    call: str
    how: str
    times: int


@dataclass(frozen=True)
class Command:
    """What is run on a copy of a base, and the files of which calls are refused."""

    base: str
    module: str
    arguments: tuple[str, ...]
    files: tuple[str, ...]
    judge: Callable[[Place], None]


def _trained(place: Place) -> None:
    place.undisturbed()
    place.intact(2, 4, 6, 8)
    names = [path.name for path in place.checkpoints.iterdir()]
    if aside := [name for name in names if not name.isdigit()]:
        raise Silent(f"checkpoints/ holds {aside}")


def _same(name: str) -> Callable[[Place], None]:
    """What was written is what is written without a fault, byte for byte."""

    def judge(place: Place) -> None:
        expected, made = (
            {
                str(path.relative_to(directory)): path.read_bytes()
                for path in harness.files_of(directory / name)
                if path.name != ".lock"
            }
            for directory in (place.bases / "calls", place.dir)
        )
        if expected != made:
            odd = sorted(expected.keys() ^ made.keys())
            raise Silent(f"{name} differs in {odd or 'a file'}")

    return judge


STEP_FILES = ("COMMIT", "digests.json", "manifest.json", *ARRAYS)
TRAIN = ("--config", "config.yaml")
EXPORT = ("export", "run", "out")
COMMANDS = {
    "resume": Command(
        "synthetic",
        "train",
        TRAIN,
        (
            "run/checkpoints",
            STEP,
            *(f"{STEP}/{name}" for name in STEP_FILES),
            "run/checkpoints/4/manifest.json",
            "run",
            "run/metrics.jsonl",
            "run/config.yaml",
            "run/.lock",
            "config.yaml",
        ),
        _trained,
    ),
    "save": Command(
        "synthetic",
        "train",
        TRAIN,
        (
            "run/checkpoints/8",
            NEW,
            *(f"{NEW}/*{name}*" for name in STEP_FILES[:3]),
            f"{NEW}/arrays",
            *(f"{NEW}/{name}" for name in ARRAYS),
            "run/*.newest-checkpoint*",
            "run/metrics.jsonl",
        ),
        _trained,
    ),
    "prepare": Command(
        "text",
        "data.__main__",
        bases.PREPARE,
        (
            "text",
            "text/03.txt",
            "shards",
            "shards/units",
            "shards/*plan.json*",
            "shards/units/*00000.json*",
            "shards/units/*.skipped*",
            "shards/*train-00000.tokens*",
            "shards/*train-00000.offsets*",
            "shards/*manifest.json*",
            "shards/.lock",
        ),
        _same("shards"),
    ),
    "export": Command(
        "synthetic",
        "adopt.__main__",
        EXPORT,
        (
            STEP,
            *(f"{STEP}/{name}" for name in STEP_FILES),
            "out.writing",
            "out.writing/.lock",
            "out.writing/config.json",
            "out.writing/*.safetensors",
            "out.writing/*",
        ),
        _same("out"),
    ),
}


def cells(only: Sequence[str] = tuple(COMMANDS)) -> list[Cell]:
    """Returns every cell of the table, of these commands."""
    table = []
    for name in only:
        files = COMMANDS[name].files
        for file, call, times in itertools.product(files, CALLS, (1, 0)):
            short = ["short"] if call in SHORT else []
            hows = [*ERRORS, *short, "delay"]
            table += [Cell(name, file, call, how, times) for how in hows]
    return table


def made(table: Sequence[Cell], directory: Path, bases: Path) -> list[Cell]:
    """Returns the cells whose call a command makes on a file of that name, where nothing is refused."""
    calls: dict[str, list[str]] = {}
    for name in dict.fromkeys(cell.command for cell in table):
        place = _arranged(name, directory / name, bases)
        log = place.dir / "calls"
        asked = ("all", f"{place.dir}/*", "0", str(log), "0")
        ended = _start(name, place, env=dict(zip(VARIABLES, asked, strict=True)))
        assert ended.code == 0, ended.said
        calls[name] = log.read_text(errors="replace").splitlines()
    return [
        cell
        for cell in table
        if fnmatch.filter(calls[cell.command], f"{cell.call} *{cell.file}")
    ]


def _arranged(name: str, directory: Path, bases: Path) -> Place:
    place = Place(directory, bases).base(COMMANDS[name].base)
    if name == "prepare":
        shutil.rmtree(place.run)
    return place


def _start(name: str, place: Place, **how: Any) -> harness.Ended:
    command = COMMANDS[name]
    module = f"meshtrain.{command.module}"
    return place.start(module, *command.arguments, **how).end(PATIENCE)


def few(table: Sequence[Cell], count: int) -> list[Cell]:
    """Returns `count` cells, spread so evenly that each call, error and file has its turn."""
    return [
        table[number * 7919 % len(table)] for number in range(min(count, len(table)))
    ]


# --- meeting a cell


def library(directory: Path) -> Path | None:
    """Compiles the library that refuses; None where there is no compiler, or it does not know what it needs."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    made = directory / "refusing_calls.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", made, SOURCE, "-ldl"],
        capture_output=True,
        check=False,
    )
    return made if done.returncode == 0 else None


def meet(cell: Cell, directory: Path, bases: Path, scale: float) -> tuple[str, str]:
    """Runs a cell's command in its place, and the same again without the fault; returns what became of it, and why."""
    command = COMMANDS[cell.command]
    place = _arranged(cell.command, directory, bases)
    before = place.digests(place.dir / "text", place.checkpoints)
    log = place.dir / "refusals"
    how = f"ms{round(1000 * DELAY * scale)}" if cell.how == "delay" else cell.how
    how = str(getattr(errno, how)) if how in ERRORS else how
    asked = (cell.call, f"*{cell.file}", how, str(log), str(cell.times))

    def refuse() -> None:
        from meshtrain import files

        files.PAUSES = tuple(pause * scale for pause in files.PAUSES)
        os.environ.update(zip(VARIABLES, asked, strict=True))

    ended = _start(cell.command, place, before=refuse)
    met = log.stat().st_size if log.exists() else 0
    if not met:
        return "not met", ""
    reason = harness.last_line(ended.err)
    try:
        ended.checked()
        if ended.code == 0:
            command.judge(place)
            verdict = "retried" if met > 1 or ended.sentences else "done"
        else:
            # A process that fails says so, and leaves what was there.
            harness.failed(ended, codes=(1, 2))
            verdict = "told"
    except harness.Crash as crash:
        return crash.name, f"{crash}; it said: {reason}"
    except harness.Verdict as wrong:
        return "silent", f"{wrong}; it said: {reason}"
    try:
        place.survive(before)
        if verdict == "told":
            if cell.command in ("resume", "save"):
                place.intact(2, 4, 6)
            harness.done(_start(cell.command, place).checked())
            command.judge(place)
    except harness.Verdict as lost:
        return "lost", f"{lost}; it had said: {reason}"
    return verdict, reason


def run(
    table: Sequence[Cell], count: int | None, work: Path, jobs: int, scale: float
) -> list[dict]:
    """Meets the cells that there are, or `count` of them, `jobs` at a time, each in a process and a place of its own."""
    for name in {command.base for command in COMMANDS.values()}:
        bases.make_one(name, work / "bases")
    # What a preparation and an export write when nothing is refused.
    whole = Place(work / "bases" / "calls", work / "bases").base("text")
    shutil.rmtree(whole.run)
    whole.base("synthetic")
    for name in ("prepare", "export"):
        assert _start(name, whole).code == 0
    # Here, so that no cell's process has to, which may not be able to read it.
    for module in (
        "train",
        "data.__main__",
        "data.prepare",
        "adopt.__main__",
        "adopt.exporting",
        "checkpoint.checkpointer",
    ):
        importlib.import_module(f"meshtrain.{module}")

    there = made(table, work / "recorded", work / "bases")
    chosen = few(there, count) if count else there
    _say(f"{len(chosen)} of {len(there)} cells whose call is made, of {len(table)}")
    found = []
    for cell, verdict, reason, _ in harness.meet(
        chosen,
        lambda cell, place: meet(cell, place, work / "bases", scale),
        work / "places",
        jobs,
        lambda cell: 4 * PATIENCE,
    ):
        found.append({**vars(cell), "verdict": verdict, "reason": reason})
        if verdict in WRONG:
            _say(f"{verdict:<10} {cell}: {reason}")
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- the table


def table(found: Sequence[dict]) -> str:
    """Returns what became of the cells, by command and call."""
    columns = ("cells", *WELL, *WRONG)
    lines = [f"{'':<18}" + "".join(f"{column:>11}" for column in columns)]
    met = [cell for cell in found if cell["verdict"] != "not met"]
    groups = [(name, [c for c in met if c["command"] == name]) for name in COMMANDS]
    groups += [(f"  {call}", [c for c in met if c["call"] == call]) for call in CALLS]
    for name, of in [*groups, ("all", met)]:
        counts = Counter(cell["verdict"] for cell in of)
        counts["cells"] = len(of)
        if of:
            lines.append(
                f"{name:<18}" + "".join(f"{counts[column]:>11}" for column in columns)
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.faults.calls", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--command",
        action="append",
        choices=list(COMMANDS),
        help="of this command alone (may be given again)",
    )
    parser.add_argument(
        "--few",
        type=int,
        metavar="N",
        help="N cells, spread over the table (default: all)",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor of delays, and of the pauses between two tries (default: 1)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 1)),
        help="cells at a time (default: the cores)",
    )
    parser.add_argument(
        "--json", action="store_true", help="every cell as JSON in place of the table"
    )
    options = parser.parse_args()
    if "MESHTRAIN_CALLS" not in os.environ:
        return _begin(Path(tempfile.mkdtemp(prefix="calls-")))
    work = Path(os.environ["MESHTRAIN_CALLS"])
    try:
        table_of = cells(options.command or tuple(COMMANDS))
        began = time.monotonic()
        found = run(table_of, options.few, work, options.jobs, options.scale)
        if options.json:
            print(json.dumps(found, indent=1))
        else:
            print(table(found))
            sums = Counter(cell["verdict"] for cell in found)
            tried = len(found) - sums["not met"]
            wrong = ", ".join(f"{name} {sums[name]}" for name in WRONG)
            print(f"tried {tried} cells in {time.monotonic() - began:.0f} s: {wrong}")
        return int(any(cell["verdict"] in WRONG for cell in found))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _begin(work: Path) -> int:
    """What stands before the system's own library has to be there when a process begins: begins this one anew."""
    from experiments.faults.__main__ import ENVIRONMENT

    made = library(work)
    if made is None:
        shutil.rmtree(work)
        _say("not tried: there is no C compiler here (Debian: apt install gcc)")
        return 0
    os.environ.update(
        ENVIRONMENT,
        JAX_COMPILATION_CACHE_DIR=str(work / "compiled"),
        LD_PRELOAD=str(made),
        MESHTRAIN_CALLS=str(work),
    )
    arguments = ["-m", "experiments.faults.calls", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    sys.exit(main())
