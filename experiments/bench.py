"""Times things beside each other on a machine that others use too, and prints the table: the helper of all benchmarks
here.

    turns      runs take turns, so that what else the machine does falls on all of them
    compare    a step beside a reference, in the same minutes
    quiet      waits until others leave the machine alone; `busy` is such others
    Table      is printed row by row, as Markdown
    MODELS     are the sizes that figures are of, of models.yaml

Wall-clock time says how long one waits. Where other work has the cores too, the seconds of the processor bear it
better: those that the program computes (user), and those that the kernel does for it (system: mostly zeroing memory
that is touched for the first time, so page faults are counted beside).
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from meshtrain.config import Config, load

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
# shapes by whose they are and their name, as `model` of a config
MODELS = yaml.safe_load((ROOT / "experiments" / "models.yaml").read_text())
LLAMA_3 = MODELS["Llama 3"]


def config_of(
    model: dict[str, Any],
    mesh: dict[str, int],
    rows: int,
    length: int,
    parallel: dict[str, Any] | None = None,
    compute: str = "bfloat16",
) -> Config:
    """Returns a config of so many rows of `length` tokens a step."""
    return load(
        {
            "model": model,
            "mesh": mesh,
            "parallel": parallel or {},
            "precision": {"compute": compute},
            "train": {"global_batch_size": rows, "sequence_length": length},
        }
    )


class Spent(NamedTuple):
    """Seconds on the wall, of the processor in the program and in the kernel, and page faults."""

    wall: float
    user: float
    system: float
    faults: float

    @property
    def processor(self) -> float:
        return self.user + self.system

    def __str__(self) -> str:
        return f"{self.wall:6.2f} {self.user:6.2f} {self.system:5.2f} {self.faults / 1e3:6.0f}"


def spent(function: Callable[[], Any], whose: int = resource.RUSAGE_SELF) -> Spent:
    """Returns what a call takes. `whose`: RUSAGE_CHILDREN where it waits for processes."""
    began = time.perf_counter()
    before = resource.getrusage(whose)
    function()
    wall = time.perf_counter() - began
    after = resource.getrusage(whose)
    user = after.ru_utime - before.ru_utime
    system = after.ru_stime - before.ru_stime
    return Spent(wall, user, system, after.ru_minflt - before.ru_minflt)


def turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 1
) -> dict[str, list[Spent]]:
    """Returns what each run takes in `rounds` turns, after `warm` turns that do not count."""
    found: dict[str, list[Spent]] = {name: [] for name in runs}
    for turn in range(warm + rounds):
        for name, run in runs.items():
            one = spent(run)
            if turn >= warm:
                found[name].append(one)
    return found


def typical(times: Sequence[Spent]) -> Spent:
    """Returns the median of each column."""
    return Spent(*(median(column) for column in zip(*times, strict=True)))


def least(function: Callable[[], Any], times: int = 3) -> float:
    """Returns the wall-clock seconds of the quickest of several calls."""
    return min(spent(function).wall for _ in range(times))


class Stepping:
    """A compiled step with its state, run again and again."""

    def __init__(
        self, step: Callable[..., tuple[Any, Any]], state: Any, *batch: Any
    ) -> None:
        self.step = step
        self.state = state
        self.batch = batch

    def __call__(self) -> Any:
        """Takes a step, and returns its loss or metrics."""
        import jax

        self.state, measured = self.step(self.state, *self.batch)
        return jax.block_until_ready((self.state, measured))[1]


class Compared(NamedTuple):
    """What a step and its reference took, round by round."""

    step: list[Spent]
    reference: list[Spent]

    @property
    def walls(self) -> list[float]:
        """The step's wall-clock time over the reference's."""
        return [
            step.wall / reference.wall for step, reference in zip(*self, strict=True)
        ]

    @property
    def processors(self) -> list[float]:
        """The same of processor seconds."""
        return [
            step.processor / reference.processor
            for step, reference in zip(*self, strict=True)
        ]

    @property
    def processor(self) -> float:
        return median(self.processors)

    def __str__(self) -> str:
        ratios = f"{spread(self.walls)} {self.processor:5.2f}"
        return f"{ratios} {typical(self.step)} | {typical(self.reference)}"


_SPENT = f"{'wall':>6} {'user':>6} {'sys':>5} {'faults':>6}"
HEADER = f"{'ratio':>6} {'(min-max)':>11} {'CPU':>5} {_SPENT} | {_SPENT} of the reference; s, thousands"


def spread(values: Sequence[float]) -> str:
    """Returns the median, the least and the largest."""
    return f"{median(values):6.2f} ({min(values):.2f}-{max(values):.2f})"


def compare(reference: Stepping, step: Stepping, rounds: int) -> Compared:
    """Runs one, then the other, twice a round, and times the second time: a run's steps follow each other, and find
    memory and caches as the step before left them.
    """
    found = Compared([], [])
    for _ in range(rounds):
        for run, times in ((reference, found.reference), (step, found.step)):
            run()
            times.append(spent(run))
    return found


def quiet(most: float = 10.0, patience: float = 20.0) -> None:
    """Waits for a moment in which others use at most so many per cent of the machine, but not for ever."""
    import psutil

    end = time.monotonic() + patience
    while (busy := psutil.cpu_percent(interval=0.5)) > most:
        if time.monotonic() > end:
            print(f"the machine is not quiet: others use {busy:.0f}% of it", flush=True)
            return


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keeps so many processes busy meanwhile."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


class Table:
    """A table in Markdown, printed row by row, so that a long run shows what it has found.

    A column is as wide as its head.
    """

    def __init__(self, *heads: str, title: str = "") -> None:
        self.widths = [len(head) for head in heads]
        if title:
            print(f"\n{title}\n")
        self.row(*(head.strip() for head in heads))
        self.row(*("-" * max(3, width) for width in self.widths))

    def row(self, *cells: object) -> None:
        """Prints a row, the first cell to the left and numbers to the right."""
        texts = [
            str(cell).ljust(width)
            for cell, width in zip(cells[:1], self.widths, strict=False)
        ]
        texts += [
            str(cell).rjust(width)
            for cell, width in zip(cells[1:], self.widths[1:], strict=True)
        ]
        print(f"| {' | '.join(texts)} |", flush=True)


def until(
    condition: Callable[[], Any],
    seconds: float,
    alive: Callable[[], Any] = lambda: True,
) -> bool:
    """Waits for a condition for at most so many seconds, or as long as what must meet it is alive."""
    end = time.monotonic() + seconds
    while not (met := bool(condition())) and time.monotonic() < end and alive():
        time.sleep(0.1)
    return met


def parser(text: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the docstring of a script as it stands."""
    module = sys.modules["__main__"].__spec__
    name = module.name.removesuffix(".__main__") if module else ""
    return argparse.ArgumentParser(
        prog=f"python -m {name}" if name else None,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@contextmanager
def directory(given: Path | None) -> Iterator[Path]:
    """Yields the directory that was asked for, which is kept, or a temporary one."""
    place = given or Path(tempfile.mkdtemp(prefix="bench-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        yield place
    finally:
        if given is None:
            shutil.rmtree(place, ignore_errors=True)


def in_process(*words: object, **environment: str) -> Any:
    """Runs `python -m words` in a process of its own, and returns the JSON of its last line, if it prints any."""
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.split("\n")
    return json.loads(lines[-2]) if len(lines) > 1 else None
