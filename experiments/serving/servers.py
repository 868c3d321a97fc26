"""Processes of meshtrain.serve on this machine, with a small model; what they say of themselves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments import bench
from meshtrain.survive.supervisor import free_port

STARTED = 300.0  # seconds that a server may take to load and compile, on a busy machine
ENDED = 60.0
SLOTS, LENGTH = 8, 128
# Seconds in which a server that is to end still takes requests: those that a balancer needs to see it
NOTICE = 3.0
ROOT = Path(__file__).parents[2]
# The quickstart's model on one device, after two steps: what it says is nonsense, in as much time as sense would take.
RUN = (
    "--config",
    "configs/quickstart.yaml",
    "--set",
    "train.steps=2",
    "--set",
    "eval.every=0",
    "--set",
    "mesh.data=1",
    "--set",
    "mesh.tensor=1",
    "--set",
    "mesh.pipeline=1",
    "--set",
    "run.fake_devices=1",
)

# Servers that are started again find their programs compiled.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

# The command line of a server, by its port.
Command = Callable[[int], Sequence[str]]


def made_run(work: Path, *more: str) -> Path:
    """The run directory of a small model with the tokenizer byte. `more`: words of the command line."""
    run = work / "small"
    command = [
        sys.executable,
        "-m",
        "meshtrain.train",
        *RUN,
        "--set",
        f"run.directory={run}",
        *more,
    ]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    return run


def serving(run: Path, *more: str) -> Command:
    """The command that serves a run, by its port."""
    sizes = ["--slots", str(SLOTS), "--length", str(LENGTH), "--notice", str(NOTICE)]
    return lambda port: [
        sys.executable,
        "-m",
        "meshtrain.serve",
        str(run),
        "--port",
        str(port),
        *sizes,
        *more,
    ]


class Server:
    """One process, which keeps its port through kills and new starts."""

    def __init__(self, command: Command, log: Path) -> None:
        self.port = free_port("127.0.0.1")
        self._command, self._log = command(self.port), log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            environment = ENVIRONMENT | {
                "JAX_COMPILATION_CACHE_DIR": str(self._log.parent / "compiled")
            }
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment
            )

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, within: float = ENDED) -> int:
        """Its exit code, after a signal."""
        self.send(number)
        return self.process.wait(within)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def healthy(self) -> bool:
        return status(self.url("/health")) == 200

    def ready(self) -> None:
        """Waits until it is healthy; RuntimeError if it ends before, or takes too long."""
        if not bench.until(
            self.healthy, STARTED, alive=lambda: self.process.poll() is None
        ):
            said = self._log.read_text()
            raise RuntimeError(f"the server on port {self.port} did not start:\n{said}")

    def metrics(self) -> dict[str, float]:
        """Its page of metrics, each series by its whole name."""
        with urllib.request.urlopen(self.url("/metrics"), timeout=10) as answer:
            lines = [
                line
                for line in answer.read().decode().splitlines()
                if line and line[0] != "#"
            ]
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines)
        }

    def model(self) -> str:
        with urllib.request.urlopen(self.url("/v1/models"), timeout=10) as answer:
            return json.load(answer)["data"][0]["id"]


@contextlib.contextmanager
def servers(command: Command, work: Path, number: int) -> Iterator[list[Server]]:
    """So many, healthy; they are killed at the end."""
    running: list[Server] = []
    try:
        running += [
            Server(command, work / f"server_{index}.log") for index in range(number)
        ]
        for server in running:
            server.ready()
        yield running
    finally:
        for server in running:
            server.process.kill()
            server.process.wait()


def status(url: str) -> int | None:
    """An answer's status; None if there is none within two seconds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
