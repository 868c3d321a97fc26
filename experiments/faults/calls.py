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
    judge: Callable[["Place"], None]  # type: ignore[name-defined]  # noqa: F821


def _trained(place) -> None:
    place.undisturbed()
    place.intact(2, 4, 6, 8)
    if aside := [
        path.name for path in place.checkpoints.iterdir() if not path.name.isdigit()
    ]:
        raise _silent(f"checkpoints/ holds {aside}")


def _prepared(place) -> None:
    _same(place, "shards")


def _exported(place) -> None:
    _same(place, "out")


def _same(place, name: str) -> None:
    """What was written is what is written without a fault, byte for byte."""
    expected, made = (
        {p.relative_to(d): p.read_bytes() for p in _files(d)}
        for d in (place.bases / "calls" / name, place.dir / name)
    )
    if expected != made:
        raise _silent(
            f"{name} differs in {sorted(map(str, expected.keys() ^ made.keys())) or 'a file'}"
        )


def _files(directory: Path) -> list[Path]:
    return [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    ]


def _silent(reason: str) -> Exception:
    from experiments.faults.harness import Silent

    return Silent(reason)


TRAIN = ("--config", "config.yaml")
PREPARE = ("prepare", "--input", "text", "--output", "shards", "--workers", "1")
EXPORT = ("export", "run", "out")
COMMANDS = {
    "resume": Command(
        "synthetic",
        "train",
        TRAIN,
        (
            "run/checkpoints",
            STEP,
            *(
                f"{STEP}/{name}"
                for name in ("COMMIT", "digests.json", "manifest.json", *ARRAYS)
            ),
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
            *(
                f"{NEW}/{name}"
                for name in (
                    "*COMMIT*",
                    "*digests.json*",
                    "*manifest.json*",
                    "arrays",
                    *ARRAYS,
                )
            ),
            "run/*.newest-checkpoint*",
            "run/metrics.jsonl",
        ),
        _trained,
    ),
    "prepare": Command(
        "text",
        "data.__main__",
        PREPARE,
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
        _prepared,
    ),
    "export": Command(
        "synthetic",
        "adopt.__main__",
        EXPORT,
        (
            STEP,
            *(
                f"{STEP}/{name}"
                for name in ("COMMIT", "digests.json", "manifest.json", *ARRAYS)
            ),
            "out.writing",
            "out.writing/.lock",
            "out.writing/config.json",
            "out.writing/*.safetensors",
            "out.writing/*",
        ),
        _exported,
    ),
}


def cells(only: Sequence[str] = (), how: Sequence[str] = ()) -> list[Cell]:
    """Returns every cell of the table, of these commands and these refusals if any are named."""
    table = []
    for name, command in COMMANDS.items():
        if only and name not in only:
            continue
        for file, call, times in itertools.product(command.files, CALLS, (1, 0)):
            hows = [*ERRORS, *(["short"] if call in SHORT else []), "delay"]
            table += [
                Cell(name, file, call, one, times)
                for one in hows
                if not how or one in how
            ]
    return table


def made(table: Sequence[Cell], work: Path, directory: Path) -> list[Cell]:
    """Returns the cells whose call a command makes on a file of that name, where nothing is refused."""
    from experiments.faults.harness import Place

    directory.mkdir()
    calls: dict[str, set[str]] = {}
    for name in dict.fromkeys(cell.command for cell in table):
        place = Place(directory / name, work / "bases")
        place.dir.mkdir()
        _arrange(place, name)
        log = place.dir / "calls"
        recorded = dict(
            zip(VARIABLES, ("all", f"{place.dir}/*", "0", str(log), "0"), strict=True)
        )
        ended = place.start(
            f"meshtrain.{COMMANDS[name].module}",
            *COMMANDS[name].arguments,
            env=recorded,
        ).end(PATIENCE)
        assert ended.code == 0, ended.said
        calls[name] = set(log.read_text(errors="replace").splitlines())
    return [
        cell
        for cell in table
        if fnmatch.filter(calls[cell.command], f"{cell.call} *{cell.file}")
    ]


def _arrange(place, name: str) -> None:
    place.base(COMMANDS[name].base)
    if name == "prepare":
        shutil.rmtree(place.run)


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


def meet(cell: Cell, place, scale: float) -> tuple[str, str]:
    """Runs a cell's command in its place, and the same again without the fault; returns what became of it, and why."""
    from experiments.faults import harness

    command = COMMANDS[cell.command]
    _arrange(place, cell.command)
    before, log = (
        place.digests(place.dir / "text") | place.digests(place.checkpoints),
        place.dir / "refusals",
    )
    how = f"ms{round(1000 * DELAY * scale)}" if cell.how == "delay" else cell.how
    how = str(getattr(errno, how)) if how in ERRORS else how
    refusals = [cell.call, f"*{cell.file}", how, str(log), str(cell.times)]

    def refuse() -> None:
        from meshtrain import files

        files.PAUSES = tuple(pause * scale for pause in files.PAUSES)
        os.environ.update(dict(zip(VARIABLES, refusals, strict=True)))

    ended = place.start(
        f"meshtrain.{command.module}", *command.arguments, before=refuse
    ).end(PATIENCE)
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
    except harness.Hang:
        return "hang", reason
    except harness.Crash as crash:
        return "traceback", str(crash)
    except harness.Verdict as wrong:
        return "silent", f"{wrong}; it said: {reason}"
    try:
        place.survive(before)
        if verdict == "told":
            if cell.command in ("resume", "save"):
                place.intact(2, 4, 6)
            harness.done(place.command(command.module, *command.arguments))
            command.judge(place)
    except harness.Verdict as lost:
        return "lost", f"{lost}; it had said: {reason}"
    return verdict, reason


def _without_fault(bases: Path) -> None:
    """What a preparation and an export write when nothing is refused."""
    from experiments.faults.harness import Place

    if (bases / "calls").is_dir():
        return
    place = Place(bases / "calls", bases)
    place.dir.mkdir()
    place.base("text")
    shutil.rmtree(place.run)
    place.base("synthetic")
    for name in ("prepare", "export"):
        ended = place.command(COMMANDS[name].module, *COMMANDS[name].arguments)
        assert ended.code == 0, ended.said


def run(
    table: Sequence[Cell],
    count: int | None,
    work: Path,
    jobs: int,
    scale: float,
    say: Callable[[str], None],
) -> list[dict]:
    """Meets the cells that there are, or `count` of them, `jobs` at a time, each in a process and a place of its own."""
    from experiments.faults import bases
    from experiments.faults.harness import Place

    shutil.rmtree(work / "places", ignore_errors=True)
    (work / "places").mkdir()
    for name in {command.base for command in COMMANDS.values()}:
        place = Place(work / "bases" / name, work / "bases")
        if not place.metrics.exists():
            place.dir.mkdir(parents=True)
            bases.BASES[name](place)
    _without_fault(work / "bases")
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

    there = made(table, work, work / "places" / "recorded")
    chosen = few(there, count) if count else there
    say(f"{len(chosen)} of {len(there)} cells whose call is made, of {len(table)}")
    waiting, running, found = list(enumerate(chosen)), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            number, cell = waiting.pop(0)
            directory, result = (
                work / "places" / str(number),
                work / "places" / f"{number}.json",
            )
            directory.mkdir()
            pid = os.fork()
            if not pid:
                _meet_and_leave(cell, Place(directory, work / "bases"), result, scale)
            running[pid] = cell, directory, result
        for pid, (cell, directory, result) in list(running.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                verdict, reason = (
                    json.loads(result.read_text())
                    if result.exists()
                    else ("traceback", "the cell itself failed")
                )
                found.append({**vars(cell), "verdict": verdict, "reason": reason})
                with (work / "found.jsonl").open("a") as lines:
                    lines.write(json.dumps(found[-1]) + "\n")
                if verdict in WRONG:
                    say(f"{verdict:<10} {cell}: {reason}")
                shutil.rmtree(directory, ignore_errors=True)
                del running[pid]
        time.sleep(0.01)
    return found


def _meet_and_leave(cell: Cell, place, result: Path, scale: float) -> None:
    try:
        result.write_text(json.dumps(meet(cell, place, scale)))
    except BaseException as error:
        result.write_text(
            json.dumps(
                (
                    "traceback",
                    f"the cell itself failed: {type(error).__name__}: {error}",
                )
            )
        )
    os._exit(0)


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
        "--how",
        action="append",
        choices=[*ERRORS, "short", "delay"],
        help="refused in this way alone (may be given again)",
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
        "--work",
        type=Path,
        help="a directory for the runs that nothing disturbs, which is kept and used again",
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
    begun = os.environ.get("MESHTRAIN_CALLS")
    work = Path(begun or options.work or tempfile.mkdtemp(prefix="calls-")).absolute()
    if begun is None:
        work.mkdir(parents=True, exist_ok=True)
        made = library(work)
        if made is None:
            print(
                "not tried: there is no C compiler here (Debian: apt install gcc)",
                file=sys.stderr,
            )
            return 0
        # What stands before the system's own library has to be there when a process begins.
        os.environ.update(LD_PRELOAD=str(made), MESHTRAIN_CALLS=str(work))
        os.execv(
            sys.executable,
            [sys.executable, "-m", "experiments.faults.calls", *sys.argv[1:]],
        )
    from experiments.faults.__main__ import ENVIRONMENT

    os.environ.update(ENVIRONMENT, JAX_COMPILATION_CACHE_DIR=str(work / "compiled"))
    try:
        chosen = cells(options.command or (), options.how or ())
        began = time.monotonic()
        found = run(
            chosen,
            options.few,
            work,
            options.jobs,
            options.scale,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
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
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
