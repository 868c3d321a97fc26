"""A run on the accelerator beside the same run on the CPU."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshtrain.check_gpu.cases import tolerance

CHILD = ("-m", "meshtrain.check_gpu.child")
PROCESSES = {"cpu": 2}
ON_ACCELERATOR = 4  # compile beside one another


@dataclass(frozen=True)
class Difference:
    """How far a run is from the CPU's, relative; or why that is not known."""

    name: str
    loss: float | None = None
    norm: float | None = None
    problem: str = ""

    @property
    def is_right(self) -> bool:
        limits = tolerance(self.name)
        if self.loss is None or self.norm is None:
            return False
        return self.loss <= limits.loss and self.norm <= limits.norm

    @property
    def verdict(self) -> str:
        if self.problem:
            return self.problem
        limits = tolerance(self.name)
        if self.is_right:
            return ""
        return f"WRONG: at most {limits.loss:.0e} and {limits.norm:.0e}"


def difference(
    name: str, ours: dict[str, Any] | None, theirs: dict[str, Any] | None
) -> Difference:
    """Returns a run's difference, by the lines of two children."""
    for where, line in (("here", ours), ("on the CPU", theirs)):
        if line is None:
            return Difference(name, problem=f"gave no result {where}")
        if "error" in line:
            return Difference(name, problem=f"failed {where}: {line['error']}")
    assert ours is not None and theirs is not None
    pairs = list(zip(ours["steps"], theirs["steps"], strict=True))
    (_, first), (_, right) = pairs[0]
    loss = max(_apart(mine[0], other[0]) for mine, other in pairs)
    return Difference(name, loss, _apart(first, right))


def _apart(mine: float, right: float) -> float:
    return abs(mine / right - 1)


@dataclass
class Children:
    """The processes that take the runs on one platform, and what they have told."""

    platform: str  # as JAX_PLATFORMS has it; "": the accelerator, if there is one
    device: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)

    def start(
        self, names: Sequence[str], told: Callable[[], None]
    ) -> list[threading.Thread]:
        """Starts them, each with its share of the runs; returns the threads that read what they tell."""
        number = min(PROCESSES.get(self.platform, ON_ACCELERATOR), len(names))
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self.platform:
            environment["JAX_PLATFORMS"] = self.platform
        self._processes = [
            subprocess.Popen(
                [sys.executable, *CHILD, *names[first::number]],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for first in range(number)
        ]
        threads = [
            threading.Thread(target=self._read, args=(process, told), daemon=True)
            for process in self._processes
        ]
        for thread in threads:
            thread.start()
        return threads

    def _read(self, process: "subprocess.Popen[str]", told: Callable[[], None]) -> None:
        assert process.stdout is not None and process.stderr is not None
        for text in process.stdout:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if "name" in line:
                self.lines[line["name"]] = line
            else:
                self.device = line
            told()
        # a negative code: it was ended here
        if process.wait() > 0:
            self.errors.add(process.stderr.read()[-2000:])

    def end(self) -> None:
        """Ends those that are still at work."""
        for process in self._processes:
            process.kill()
