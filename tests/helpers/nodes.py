"""Supervisors of a run on this machine, one process each as on a cluster of nodes, with stand-ins for the training
processes.

One process that has imported what they need forks each of them, at once: python nodes.py reads a line of JSON for each
from its input.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE = 40.0  # seconds, of a loaded machine
STAND_IN = Path(__file__).with_name("stand_in.py")
CONFIG = """
run: {{directory: {run}}}
mesh: {{data: {nodes}}}
data: {{source: synthetic}}
train: {{steps: {steps}, global_batch_size: 12}}
checkpoint: {{every: 10}}
survive: {{wanted: {nodes}, node_timeout: 2, step_timeout: 1.5}}
"""


class Node:
    """A supervisor's process."""

    def __init__(self, cluster: "Nodes", name: str, pid: int, output: Path) -> None:
        self.cluster, self.name, self.pid, self.output = cluster, name, pid, output

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    @property
    def code(self) -> int | None:
        """Its exit code, a signal's number as a negative one; None while it runs."""
        return self.cluster.codes().get(self.pid)

    def end(self) -> int | None:
        until(lambda: self.code is not None, f"{self.name} to end", self.cluster.told)
        return self.code

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.is_file() else ""


class Server:
    """The process that forks supervisors, and writes their exit codes into the file `codes`."""

    def __init__(self, directory: Path) -> None:
        self.codes = directory / "codes"
        self.codes.touch()
        environment = os.environ | {"PYTHONPATH": str(STAND_IN.parents[2])}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.codes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def fork(self, told: dict[str, Any]) -> int:
        """The number of a new supervisor's process."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(told).encode() + b"\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Nodes:
    """Of the run in a directory of its own. Used as a context: at its end nothing is left of them."""

    def __init__(
        self,
        server: Server,
        directory: Path,
        nodes: int = 3,
        steps: int = 60,
        **survive: Any,
    ) -> None:
        self.server, self.directory, self.run = server, directory, directory / "run"
        self.config = directory / "config.yaml"
        self.config.write_text(CONFIG.format(run=self.run, nodes=nodes, steps=steps))
        self.set = [f"survive.{name}={value}" for name, value in survive.items()]
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(
        self, *names: str, output: Path | str | None = None, **how: Any
    ) -> list[Node]:
        """`how`: `clock` seconds by which its clock is ahead, `set` more of the config, constants by module.NAME."""
        found = []
        for name in names:
            where = Path(output or self.directory / f"{name}.said")
            told = {
                "config": str(self.config),
                "name": name,
                "output": str(where),
                **how,
            }
            told["set"] = [*self.set, *how.get("set", [])]
            found.append(Node(self, name, self.server.fork(told), where))
            self.nodes[name] = found[-1]
        return found

    def codes(self) -> dict[int, int]:
        lines = self.server.codes.read_text().splitlines()
        return {int(pid): int(code) for pid, code in map(str.split, lines)}

    def do(self, rank: int, what: str, moment: str = "") -> None:
        """What the stand-in of a rank is to do."""
        aside = self.run / f".do.{rank}{moment}"
        aside.write_text(what)
        os.rename(aside, self.run / f"do.{rank}{moment}")

    @property
    def step(self) -> int:
        rows = self.run / "rows"
        return len(rows.read_text().splitlines()) if rows.exists() else 0

    def until_step(self, step: int) -> None:
        until(lambda: self.step >= step, f"step {step}", self.told)

    def plans(self) -> list[dict[str, Any]]:
        return [
            json.loads(p.read_text())
            for p in sorted((self.run / "survive" / "plans").glob("[0-9]*.json"))
        ]

    def until_plan(self, state: str, generation: int = 1) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [
                p
                for p in self.plans()
                if p["state"] == state and p["generation"] == generation
            ]

        until(
            lambda: bool(found()), f"generation {generation} to be {state}", self.told
        )
        return found()[-1]

    def faults(self) -> list[tuple[str, list[str]]]:
        return [
            (p["kind"], p["blamed"])
            for p in self.plans()
            if p["state"] == "forming" and p["kind"] != "start"
        ]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of one kind, from all nodes."""
        files = (self.run / "survive").glob("events.*.jsonl")
        lines = [
            json.loads(line) for file in files for line in file.read_text().splitlines()
        ]
        return [line for line in lines if line["event"] == name]

    def living(self) -> list[int]:
        """Processes of this run that there are: supervisors, stand-ins, and what these have started."""
        found, mark = [], str(self.run).encode()
        ours = {node.pid for node in self.nodes.values()} - self.codes().keys()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(") ")[2][0]
                words = (entry / "cmdline").read_bytes() + (
                    entry / "environ"
                ).read_bytes()
                if state not in "ZX" and (mark in words or int(entry.name) in ours):
                    found.append(int(entry.name))
        return found

    def told(self) -> str:
        outputs = sorted(self.run.glob("survive/gen-*/*.out"))
        said = [f"{name}: {node.said}" for name, node in self.nodes.items()]
        return "\n".join(
            [
                *said,
                *(
                    f"{path.parent.name}/{path.name}: {path.read_text()}"
                    for path in outputs
                ),
            ]
        )

    def check(self, steps: int = 60) -> None:
        """The run is done: each step is there once, in order; no two generations were at work at once; nothing is
        left.
        """
        rows = [
            int(line.split()[0])
            for line in (self.run / "rows").read_text().splitlines()
        ]
        assert rows == list(range(1, steps + 1)), self.told()
        overlaps = self.run / "overlaps"
        assert not overlaps.exists(), overlaps.read_text()
        until(lambda: not self.living(), "all processes to be gone")


def until(
    condition: Callable[[], object], what: str, told: Callable[[], str] = str
) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"waited for {what}\n{told()}"
        time.sleep(0.02)


# --- the process that forks


def _serve(codes: Path) -> None:
    import meshtrain.survive.supervisor  # noqa: F401  so that each of them has it already

    for line in _lines(codes):
        told = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = _supervise(told)
            finally:
                os._exit(code)
        os.write(1, b"%d\n" % pid)


def _lines(codes: Path) -> Iterator[str]:
    """What is asked for; meanwhile, the exit codes of those who ended are written down."""
    import select

    pending = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            given = os.read(0, 65536)
            if not given:
                return
            *whole, pending = (pending + given).split(b"\n")
            yield from (line.decode() for line in whole)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            with codes.open("a") as file:
                file.write(f"{pid} {os.waitstatus_to_exitcode(status)}\n")


def _supervise(told: dict[str, Any]) -> int:
    import importlib

    from meshtrain.cli import command
    from meshtrain.config import load
    from meshtrain.survive.supervisor import Supervisor

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    output = (
        os.open(told["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if told["output"]
        else nowhere
    )
    for number, to in ((0, nowhere), (1, output), (2, output)):
        os.dup2(to, number)
    for place, value in told.get("constants", {}).items():
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(f"meshtrain.survive.{module}"), name, value)
    if ahead := told.get("clock"):
        true = time.time
        time.time = lambda: true() + ahead

    @command
    def main(_: object) -> int:
        words, config = (
            [sys.executable, "-IS", str(STAND_IN)],
            load(told["config"], told["set"]),
        )
        address = told.get("address", "127.0.0.1")
        return Supervisor(
            config, told["name"], address, lambda c: [*words, str(c)]
        ).run()

    code = main()
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
