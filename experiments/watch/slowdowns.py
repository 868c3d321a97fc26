"""Eight slowdowns made on purpose, and healthy runs: does the diagnosis name what was done?

    python -m experiments.watch.slowdowns --repeats 5            the table: 9 kinds, 5 times each, about 15 minutes
    python -m experiments.watch.slowdowns --only loader disk     some kinds
    python -m experiments.watch.slowdowns --healthy 20           healthy runs alone: how often anything is found

Each run is a short training of a tiny model in processes of its own, which the slowdown is put into: the product knows
nothing of it. The machine must be quiet, else "the machine is shared" is what is found, rightly. Devices are faked,
each with one thread, as a GPU has its
own units: then a stage that waits is time lost on a machine with as many cores as devices.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from experiments import bench
from experiments.bench import Table
from meshtrain.survive.supervisor import free_port

SECONDS = 180  # that a run may take
HOGS = 1  # busy processes a core
BALLAST_LIMIT = 3.0  # GiB that the memory run is to stay below
WRITING = 4e6  # bytes a second of the throttled disk


@dataclass(frozen=True)
class Kind:
    """What is done, and what must be found first."""

    name: str
    finds: str
    does: str
    settings: Sequence[str] = ()
    processes: int = 1
    cached: bool = True  # whether programs come from the cache of compilations


# quickstart's model and batch, data parallel: nothing to be won by another layout
CONFIG = yaml.safe_load("""
run: {fake_devices: 2}
model: {layers: 4, d_model: 128, heads: 8, kv_heads: 4, d_ff: 352, vocab_size: 260}
mesh: {data: 2, tensor: 1, pipeline: 1}
data: {source: stdlib, tokenizer: byte}
train: {steps: 40, global_batch_size: 16, sequence_length: 128}
checkpoint: {every: 20, keep: 1}
log: {every: 1}
telemetry: {every: 1, trace_at: [30]}
""")
# Runs of which nothing is to be said, one after the other.
HEALTHY: tuple[tuple[str, ...], ...] = (
    (),
    ("mesh.data=1", "run.fake_devices=1"),
    ("parallel.zero_stage=0", "eval.every=20", "eval.batches=2"),
    ("model.family=gpt2", "model.kv_heads=8", "parallel.microbatches=2"),
)
# What is found, what is done, and by which settings
KINDS = {
    name: Kind(name, **fields)
    for name, fields in yaml.safe_load(f"""
healthy: {{finds: none, does: nothing}}
loader:
  finds: loader
  does: each batch is read 0.4 s late
  settings: [train.steps=16, "telemetry.trace_at=[10]"]
disk:
  finds: disk
  does: checkpoints are written at 4 MB/s
  settings: [checkpoint.every=5, train.steps=24, "telemetry.trace_at=[17]"]
slow_rank:
  finds: slow_rank
  does: one of two processes is 0.3 s late at each step
  settings: [model.layers=1, train.steps=14, "telemetry.trace_at=[]"]
  processes: 2
bubble:
  finds: bubble
  does: 2 stages, 2 microbatches
  settings: [mesh.data=1, mesh.pipeline=2, parallel.schedule=1f1b, parallel.virtual_stages=1, parallel.microbatches=2]
tensor:
  finds: tensor
  does: 8 ways over tensor
  settings: [model.kv_heads=8, train.steps=24, "telemetry.trace_at=[16]", mesh.data=1, mesh.tensor=8, run.fake_devices=8]
memory:
  finds: memory
  does: {0.96 * BALLAST_LIMIT:.2f} of the {BALLAST_LIMIT:.0f} GiB that it may use are taken
  settings: [telemetry.memory_limit={BALLAST_LIMIT}]
compiling:
  finds: compiling
  does: batches of many lengths, each to be compiled
  settings: [data.batching=grouped, data.lengths=32, data.length_multiple=4, model.layers=1, model.d_model=32, model.d_ff=64,
    train.steps=8, mesh.data=1, run.fake_devices=1, "telemetry.trace_at=[]", checkpoint.every=0]
  cached: false
hog: {{finds: shared, does: a busy process a core beside it}}
""").items()
}


# --- the run, in a process of its own


def child(kind: str, directory: str, number: int) -> int:
    """Trains, with the slowdown put in; the healthy runs take turns."""
    rank = int(os.environ.get("JAX_PROCESS_ID", "0"))
    _SLOWED.get(kind, lambda rank: None)(rank)
    from meshtrain.config import load
    from meshtrain.train import train

    settings = [*_settings(KINDS[kind], number), f"run.directory={directory}"]
    if kind == "compiling":
        settings.append(f"data.source={_texts(Path(directory).parent / 'texts')}")
    return train(load(CONFIG, settings)).exit_code


def _settings(kind: Kind, number: int) -> Sequence[str]:
    return HEALTHY[number % len(HEALTHY)] if kind.name == "healthy" else kind.settings


def _texts(directory: Path) -> Path:
    """Documents of all lengths that a sequence may have."""
    directory.mkdir()
    lengths = [4 + number % 125 for number in range(4000)]
    (directory / "texts.jsonl").write_text(
        "".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths)
    )
    return directory


def _slow_loader(rank: int) -> None:
    from meshtrain.data import TextBatches

    whole = TextBatches.batch

    def late(self, *arguments, **named):  # type: ignore[no-untyped-def]
        time.sleep(0.4)
        return whole(self, *arguments, **named)

    TextBatches.batch = late  # type: ignore[method-assign]


def _slow_disk(rank: int) -> None:
    from meshtrain.checkpoint import saving

    whole = saving._failure

    def late(response, directory, final):  # type: ignore[no-untyped-def]
        failure = whole(response, directory, final)
        time.sleep(
            sum(p.stat().st_size for p in Path(directory).rglob("*") if p.is_file())
            / WRITING
        )
        return failure

    saving._failure = late


def _slow_rank(rank: int) -> None:
    from meshtrain.survive.health import Health

    whole = Health.check_product

    def late(self, *arguments):  # type: ignore[no-untyped-def]
        time.sleep(0.3 if rank == 1 else 0.0)
        return whole(self, *arguments)

    Health.check_product = late  # type: ignore[method-assign]


def _fill_memory(rank: int) -> None:
    """Takes memory until little of the limit is left, on a thread."""
    import numpy as np

    def fill() -> None:
        taken, process = [], psutil.Process()
        while True:
            missing = 0.96 * BALLAST_LIMIT * 2**30 - process.memory_info().rss
            if missing > 2**20:
                taken.append(np.ones(int(min(missing, 2**28)), np.uint8))
            else:
                time.sleep(0.2)

    threading.Thread(target=fill, daemon=True).start()


_SLOWED: dict[str, Callable[[int], None]] = {
    "loader": _slow_loader,
    "disk": _slow_disk,
    "slow_rank": _slow_rank,
    "memory": _fill_memory,
}

# --- the campaign


def environment(
    kind: Kind, number: int, cache: Path, rank: int, port: int
) -> dict[str, str]:
    from meshtrain.config import load

    devices = load(CONFIG, _settings(kind, number)).run.fake_devices
    flags = f"--xla_force_host_platform_device_count={devices // kind.processes} --xla_cpu_multi_thread_eigen=false"
    found = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if kind.cached:
        found |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    if kind.processes > 1:
        found |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_PROCESS_ID": str(rank),
        }
        found |= {"JAX_NUM_PROCESSES": str(kind.processes)}
    return found


def train_one(kind: Kind, number: int, directory: Path, cache: Path) -> None:
    """One run, with all its processes; RuntimeError if it fails."""
    port = free_port("127.0.0.1")
    directory.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "experiments.watch.slowdowns",
        "--child",
        kind.name,
    ]
    command += [str(directory / "run"), str(number)]
    with contextlib.ExitStack() as stack:
        if kind.name == "hog":
            stack.enter_context(bench.busy(HOGS * (os.cpu_count() or 1)))
        processes = []
        for rank in range(kind.processes):
            log = stack.enter_context((directory / f"log-{rank}").open("wb"))
            own = environment(kind, number, cache, rank, port)
            processes.append(
                subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT)
            )
        try:
            if not bench.until(
                lambda: all(one.poll() is not None for one in processes), SECONDS
            ):
                raise RuntimeError(f"took more than {SECONDS} s")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(codes := [process.returncode for process in processes]):
        last = (directory / "log-0").read_text(errors="replace").splitlines()[-1:]
        raise RuntimeError(f"ended with {codes}: {' '.join(last)}")


def judged(directory: Path) -> dict:
    """The diagnosis of a run, as data; its trace is read if it has one."""
    from meshtrain.report.diagnosis.diagnose import diagnose, read
    from meshtrain.report.diagnosis.tracing import attributed, newest_trace

    trace = newest_trace(directory)
    return diagnose(
        read(directory, None if trace is None else attributed(trace))
    ).as_json()


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    first: str
    seconds: float
    sentence: str

    @property
    def right(self) -> bool:
        return self.first == self.kind.finds


def once(kind: Kind, work: Path, number: int) -> Outcome:
    """One run and its diagnosis; one that fails is an outcome too."""
    bench.quiet()
    began, directory = time.monotonic(), work / f"{kind.name}-{number}"
    try:
        train_one(kind, number, directory, work / "compiled")
        found = judged(directory / "run")
        (directory / "diagnosis.json").write_text(json.dumps(found, indent=1))
        sentence = found["findings"][0]["sentence"] if found["findings"] else ""
        outcome = Outcome(kind, found["first"], time.monotonic() - began, sentence)
    # Whatever it is, the others go on.
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(kind, "failed", time.monotonic() - began, str(error))
    shutil.rmtree(directory / "run" / "checkpoints", ignore_errors=True)
    verdict = "ok" if outcome.right else "WRONG"
    print(
        f"{kind.name} {number}: {outcome.first} {verdict} ({outcome.seconds:.0f} s) {outcome.sentence}",
        flush=True,
    )
    return outcome


def table(outcomes: list[Outcome]) -> None:
    made = Table(
        "done                                           ",
        "to be found",
        "found first",
        "right",
    )
    for name in dict.fromkeys(o.kind.name for o in outcomes):
        of = [o for o in outcomes if o.kind.name == name]
        right = f"{sum(o.right for o in of)} of {len(of)}"
        made.row(
            of[0].kind.does, of[0].kind.finds, ", ".join(o.first for o in of), right
        )
    print(f"right: {sum(o.right for o in outcomes)} of {len(outcomes)}", flush=True)


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--healthy",
        type=int,
        default=0,
        metavar="N",
        help="N healthy runs, and nothing else",
    )
    parser.add_argument(
        "--child", nargs=3, metavar=("KIND", "DIR", "NUMBER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.child:
        kind, directory, number = options.child
        sys.exit(child(kind, directory, int(number)))
    names = ["healthy"] * options.healthy or options.only * options.repeats
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with bench.directory(None) as work:
        try:
            for number, name in enumerate(names, 1):
                outcomes.append(once(KINDS[name], work, number))
        finally:
            table(outcomes)
            print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
