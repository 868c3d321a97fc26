"""A run under supervisors on this machine, one a node, with tiny training processes: started, hurt, watched, ended.

What happened is read from what the supervisors write (`events.*.jsonl`, `plans/`), and from /proc: a process counts as
ended when the kernel no longer has it, whatever anybody says of it.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from meshtrain.files import write_atomically

REPOSITORY = Path(__file__).resolve().parents[2]
EVERY = 5  # steps between two checkpoints
TIMEOUT = 6.0  # of a node and of a step, seconds
PATIENCE = 150.0  # for anything at all, on a machine that others use too
LOOK = 0.05  # seconds between two looks
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": str(REPOSITORY),
}

Event = dict[str, Any]


class TooLate(Exception):
    """What was waited for did not come."""


def settings(
    run: Path, processes: int, steps: int, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A config whose steps take some tenths of a second, about as long as a save; two fake devices a process."""
    # Whatever train.steps is, it is the same run. Whoever was ill stands back only where the others are enough: here they
    # never are, and the mesh stays what it is.
    values = yaml.safe_load(f"""
run: {{directory: {run}}}
model: {{layers: 2, d_model: 64, heads: 2, d_ff: 128, vocab_size: 260}}
mesh: {{data: {processes}, tensor: 2}}
data: {{source: synthetic}}
train: {{steps: {steps}, global_batch_size: 16, sequence_length: 128}}
optimizer: {{schedule: constant, warmup_steps: 10}}
checkpoint: {{every: {EVERY}}}
log: {{batches: true}}
survive: {{wanted: {processes}, least: {processes}, node_timeout: {TIMEOUT}, step_timeout: {TIMEOUT}, restarts: 1000}}
""")
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    return values


@dataclasses.dataclass
class Start:
    """How the supervisor of a node is started, where that is another way than the others'."""

    before: tuple[str, ...] = ()  # words before the command, such as ip netns exec
    address: str = "127.0.0.1"
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    set: tuple[str, ...] = ()  # of its config


class Cluster:
    """The supervisors of one run in `directory`. `compiled`: the compilation cache, which runs share."""

    def __init__(self, directory: Path, values: dict[str, Any], compiled: Path) -> None:
        self.directory, self.values = directory, values
        self.run = Path(values["run"]["directory"])
        self.root = self.run / "survive"
        self.config = directory / "config.yaml"
        directory.mkdir(parents=True, exist_ok=True)
        self.config.write_text(yaml.safe_dump(values))
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
        }
        self.nodes = [f"n{i}" for i in range(values["survive"]["wanted"])]
        self.starts: dict[str, Start] = {}  # of the nodes that are not as the others
        self.supervisors: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}
        self.died: dict[int, float] = {}  # when a training process was gone, by its id
        self._read: dict[Path, int] = {}
        self._events: list[Event] = []
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    # --- supervisors

    def start(self, *nodes: str) -> "Cluster":
        for node in nodes or self.nodes:
            log = (self.directory / f"{node}.log").open("ab")
            how = self.starts.get(node, Start())
            sets = [word for setting in how.set for word in ("--set", setting)]
            command = [
                *how.before,
                sys.executable,
                "-m",
                "meshtrain.survive",
                "--config",
                str(self.config),
                "--node",
                node,
            ]
            self.supervisors[node] = subprocess.Popen(
                [*command, "--address", how.address, *sets],
                cwd=REPOSITORY,
                env={**self.environment, **how.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def inject(self, request: str) -> str:
        """`survive inject`, as a person asks for it; the name under which it is done."""
        command = [
            sys.executable,
            "-m",
            "meshtrain.survive",
            "inject",
            request,
            str(self.run),
        ]
        said = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return said.stdout.split()[0]

    def signal(self, node: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.supervisors[node].send_signal(number)

    def end(self, patience: float = PATIENCE) -> dict[str, int]:
        """Waits until all supervisors have ended; their exit codes."""
        self.until(
            lambda: all(p.poll() is not None for p in self.supervisors.values()),
            "the supervisors to end",
            patience,
        )
        return {
            node: int(process.returncode) for node, process in self.supervisors.items()
        }

    def stop(self) -> dict[str, int]:
        """Asks all to save and stop."""
        for node in self.supervisors:
            self.signal(node, signal.SIGTERM)
        return self.end()

    def close(self) -> list[int]:
        """Ends what is left by force; processes of the run that no supervisor had ended by then, orphans, if all
        supervisors had.
        """
        alone = all(p.poll() is not None for p in self.supervisors.values())
        if alone:
            time.sleep(1.0)
        left = self.processes() if alone else []
        for process in self.supervisors.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._closed.set()
        self._watcher.join()
        return left

    def processes(self) -> list[int]:
        """All processes of this machine that name the run in their command or environment, without this one and its
        supervisors.
        """
        known = {
            os.getpid(),
            *(p.pid for p in self.supervisors.values() if p.poll() is None),
        }
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) not in known:
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes() + (
                        entry / "environ"
                    ).read_bytes()
                    if str(self.run).encode() in words:
                        found.append(int(entry.name))
        return found

    # --- what happened

    @property
    def events(self) -> list[Event]:
        """All events so far, oldest first, with the node that wrote each."""
        with self._lock:
            return list(self._events)

    def of(self, *names: str, generation: int | None = None) -> list[Event]:
        whole = [e for e in self.events if e["event"] in names]
        return (
            whole
            if generation is None
            else [e for e in whole if e.get("generation") == generation]
        )

    @property
    def generation(self) -> int:
        return max((e["generation"] for e in self.of("formed")), default=0)

    @property
    def plan(self) -> dict[str, Any]:
        newest = sorted((self.root / "plans").glob("0*.json"))[-1:]
        return json.loads(newest[0].read_text()) if newest else {}

    def pause(self, generation: int) -> float:
        """Seconds that were waited before a generation, by plan."""
        plans = [
            json.loads(path.read_text())
            for path in (self.root / "plans").glob("0*.json")
        ]
        return max(
            (plan["delay"] for plan in plans if plan["generation"] == generation),
            default=0.0,
        )

    def members(self, generation: int) -> list[str]:
        return self.of("formed", generation=generation)[0]["members"]

    def is_going(self, generation: int) -> bool:
        """Whether every rank of a generation has taken a step."""
        formed = self.of("formed", generation=generation)
        ranks = {e["rank"] for e in self.of("going", generation=generation)}
        return bool(formed) and len(ranks) == len(formed[0]["members"])

    def rank_pids(self, generation: int) -> list[int]:
        return [e["pid"] for e in self.of("started", generation=generation)]

    def step(self) -> int:
        """Steps taken, by the metrics."""
        rows = rows_of(self.run)
        return rows[-1]["step"] if rows else 0

    def until(
        self, condition: Callable[[], Any], what: str, patience: float = PATIENCE
    ) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            if self.is_over() and not condition():
                raise TooLate(f"the run was over before {what}")
            if time.monotonic() > deadline:
                raise TooLate(f"{patience:.0f} s were not enough for {what}")
            time.sleep(LOOK)

    def until_going(self, after: int, patience: float = PATIENCE) -> int:
        """Waits for a generation beyond `after` of which every rank has taken a step."""

        def ready() -> bool:
            return (
                self.generation > after and self.is_going(self.generation)
            ) or self.is_over()

        self.until(ready, f"a generation after {after} to go on", patience)
        return self.generation

    def is_over(self) -> bool:
        return all(p.poll() is not None for p in self.supervisors.values())

    def _watch(self) -> None:
        while not self._closed.is_set():
            for path in sorted(self.root.glob("events.*.jsonl")):
                self._follow(path)
            now = time.time()
            for event in self.of("started"):
                if event["pid"] not in self.died and not alive(event["pid"]):
                    self.died[event["pid"]] = now
            time.sleep(LOOK)

    def _follow(self, path: Path) -> None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            node = path.name.split(".")[1]
            found = [
                {"node_of": node, **json.loads(line)} for line in whole.splitlines()
            ]
            with self._lock:
                self._events = sorted([*self._events, *found], key=lambda e: e["wall"])


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in (
            "Z",
            "X",
        )
    except OSError:
        return False


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The whole rows of a run's metrics."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [
        json.loads(line)
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
    ]


Batches = dict[int, dict[int, dict[int, int]]]


def batches_of(run: Path) -> Batches:
    """step -> generation -> place in the global batch -> checksum of that row, in order, as all ranks of that
    generation wrote them.
    """
    found: Batches = {}
    for path in (run / "survive").glob("gen-*/rank-*.batches.jsonl"):
        generation = int(path.parent.name[4:])
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                said = json.loads(line)
                of = found.setdefault(said["step"], {}).setdefault(generation, {})
                of.update(
                    {said["first"] + i: row for i, row in enumerate(said["rows"])}
                )
    return {
        step: {g: dict(sorted(of.items())) for g, of in by.items()}
        for step, by in found.items()
    }


def load_average() -> float:
    return os.getloadavg()[0]


def say(*words: object) -> None:
    print(time.strftime("%H:%M:%S", time.gmtime()), *words, file=sys.stderr, flush=True)


def write_json(path: Path, value: object) -> None:
    write_atomically(path, json.dumps(value).encode())


def median(values: Iterable[float]) -> float:
    found = sorted(values)
    return found[len(found) // 2] if found else float("nan")
