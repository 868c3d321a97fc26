"""Processes as a supervisor starts them: a directory of their own, a lease that is renewed, a beat that is read."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from meshtrain.survive.heartbeat import VARIABLE
from meshtrain.survive.records import Supervised

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["meshtrain.train"])
PATIENCE = 180.0  # seconds, of a loaded machine
RENEW_EVERY = 0.05  # seconds


def supervised(directory: Path, rank: int = 0, fence: float = 30.0) -> Supervised:
    """Of rank `rank` of generation 0 of the run in `directory`, with the directories that a supervisor makes."""
    survive, local = directory / "survive", directory / f"local-{rank}"
    for made in (survive / "gen-0", survive / "inject", local):
        made.mkdir(parents=True, exist_ok=True)
    (local / "lease").write_text("0")
    return Supervised(local, survive / "gen-0", 0, rank, fence, survive)


def variable(told: Supervised) -> str:
    return json.dumps(
        {name: str(x) if isinstance(x, Path) else x for name, x in vars(told).items()}
    )


class Rank:
    """A process that does `work` under a supervisor; its lease is renewed as long as `renewing`."""

    def __init__(
        self,
        told: Supervised,
        work: Callable[..., None],
        *arguments: Any,
        **environment: str,
    ) -> None:
        self.told, self.renewing = told, True
        (told.local / "beat").unlink(missing_ok=True)
        environment[VARIABLE] = variable(told)
        self.output = told.own("out")
        self.output.touch()
        self.process = CONTEXT.Process(
            target=_work, args=(self.output, environment, work, arguments), daemon=True
        )
        self.process.start()
        threading.Thread(target=self._renew, daemon=True).start()

    @property
    def beat(self) -> dict[str, Any]:
        try:
            return json.loads((self.told.local / "beat").read_bytes())
        except (OSError, ValueError):
            return {}

    @property
    def fault(self) -> dict[str, Any]:
        return json.loads(self.told.own("fault.json").read_text())

    @property
    def state(self) -> str:
        """Of the process, as /proc has it: R, S, D, T."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]

    def end(self) -> int | None:
        """Waits for the exit code; a signal's number, negative, if that ended it."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, self.output.read_text()
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{self.beat} {self.output.read_text()}"
            time.sleep(0.01)

    def _renew(self) -> None:
        # The sentinel alone is asked. Both is_alive and join read the exit code from a pipe, once: where two threads do,
        # one of them finds nothing and takes the code for 255.
        count = 0
        while self.renewing and not wait([self.process.sentinel], RENEW_EVERY):
            count += 1
            with open(self.told.local / "lease", "r+") as lease:
                lease.write(f"{count:16d}")


def _work(
    output: Path,
    environment: dict[str, str],
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    with output.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    work(*arguments)
