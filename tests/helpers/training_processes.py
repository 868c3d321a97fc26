"""Training processes to be killed, stopped and starved: forked from a server that has imported everything, so that they
start fast.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import yaml

from meshtrain.checkpoint import digests, steps
from meshtrain.train import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["meshtrain.train"])
STEPS, EVERY = 60, 15  # of the runs that several tests share
PATIENCE = 120.0  # seconds, of a loaded machine


def settings(directory: Path, steps: int, every: int, **sections: dict) -> Path:
    """The config file of a run whose steps take a few milliseconds."""
    values = {
        "run": {"directory": str(directory / "run")},
        "model": {
            "layers": 2,
            "d_model": 16,
            "heads": 2,
            "d_ff": 32,
            "vocab_size": 257,
        },
        "data": {"source": "synthetic"},
        "train": {"steps": steps, "global_batch_size": 4, "sequence_length": 16},
        "checkpoint": {"every": every},
    }
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class Trainer:
    """A process that trains as `python -m meshtrain.train --config PATH` does; `log` has what it prints.

    `before` and `after` run in it.
    """

    def __init__(
        self,
        config: Path,
        before: Callable[[], None] = bool,
        after: Callable[[], None] = bool,
    ) -> None:
        self.run = Path(yaml.safe_load(config.read_text())["run"]["directory"])
        self.log = config.with_suffix(".log")
        self.log.write_text("")
        self.process: ForkServerProcess = CONTEXT.Process(
            target=_train, args=(config, self.log, before, after)
        )
        self.process.start()

    def end(self) -> int:
        """Waits for the exit code; a signal's number, negative, if that ended it."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, (
            f"still running: {self.log.read_text()}"
        )
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        assert self.end() == -9, self.log.read_text()

    def until(self, condition: Callable[[], bool]) -> bool:
        """Polls until the condition holds (true) or the process has ended (false)."""
        deadline = time.monotonic() + PATIENCE
        while self.process.is_alive():
            if condition():
                return True
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.0005)
        return False

    def wrote(self, step: int) -> Callable[[], bool]:
        return lambda: (rows(self.run) or [{"step": 0}])[-1]["step"] >= step

    def training(self) -> bool:
        return (
            "compiled for batches" in self.log.read_text()
        )  # what is said last before the first step

    def saving(self) -> bool:
        return any((self.run / "checkpoints").glob("*.writing/*"))


def rows(run: Path) -> list[dict]:
    """The whole rows of a run's metrics."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [
        json.loads(line)
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
    ]


def losses_of(
    directory: Path, count: int, every: int, **sections: dict
) -> dict[int, float]:
    """Of an uninterrupted run, by step."""
    trainer = Trainer(settings(directory, count, every, **sections))
    assert trainer.end() == 0, trainer.log.read_text()
    found = {row["step"]: row["loss"] for row in rows(trainer.run)}
    assert list(found) == list(range(1, count + 1))
    return found


def assert_undisturbed(run: Path, expected: dict[int, float]) -> None:
    """Each step once, each loss the same bits."""
    assert [row["step"] for row in rows(run)] == list(expected)
    assert {row["step"]: row["loss"] for row in rows(run)} == expected


def committed(run: Path) -> list[int]:
    return steps.committed_in(run / "checkpoints")


def newest_is_intact(run: Path) -> bool:
    newest = run / "checkpoints" / str(committed(run)[-1])
    return steps.commit_problem(newest) is None and digests.problems(newest) == []


def _train(
    config: Path, log: Path, before: Callable[[], None], after: Callable[[], None]
) -> None:
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    before()
    try:
        sys.exit(main(["--config", str(config)]))
    finally:
        after()
