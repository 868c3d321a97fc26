"""What watching costs a run: microseconds of each step, a thread's share of a core, milliseconds a scrape; against what
was allowed.

    python -m experiments.watch.cost                    all three, 70 s
    python -m experiments.watch.cost loop               what the step loop does more for being watched: at most 150 µs a step
    python -m experiments.watch.cost thread --seconds 600    processor time of the telemetry thread: at most 0.1% of a core
    python -m experiments.watch.cost scrape             a page of 1,000 series over HTTP, rendered anew: at most 10 ms

Loop: the row's figures, the row handed to the hub, the tracer that waits for its step, and in the same breath the row
written to metrics.jsonl, which a run does anyway; the median of many batches of steps, with all listeners on. Thread: a
row every 0.3 s and a sample every 10 s, with alerts, the page and TensorBoard. Scrape: the median, and the slowest of
50.

Exit code 1 if one of them is over what was allowed.
"""

import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import jax

from experiments import bench
from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.run.rows import MetricsFile
from meshtrain.survive.heartbeat import Heartbeat
from meshtrain.telemetry.endpoint import Board, Endpoint
from meshtrain.telemetry.hub import Hub, watch
from meshtrain.telemetry.measured import Measured
from meshtrain.telemetry.trace import Tracer

ALLOWED = {"loop": 150.0, "thread": 0.1, "scrape": 10.0}
UNITS = {
    "loop": "µs a step on the loop",
    "thread": "% of a core, the thread",
    "scrape": "ms a scrape",
}
SERIES = 1000
STEP = 0.3  # seconds


def watched(
    directory: Path, every: float = 10.0
) -> tuple[Hub, Heartbeat, jax.sharding.Mesh, Tracer]:
    """All of it on."""
    given = [
        "mesh.data=1",
        "mesh.tensor=1",
        "mesh.pipeline=1",
        f"telemetry.every={every}",
        "telemetry.endpoint=19533",
    ]
    config = load(
        "configs/quickstart.yaml",
        [
            *given,
            "telemetry.trackers=[tensorboard]",
            "telemetry.trace_at=[100]",
            "train.steps=100",
        ],
    )
    mesh, heartbeat = make_mesh(config), Heartbeat()
    return (
        watch(config, directory, heartbeat, mesh),
        heartbeat,
        mesh,
        Tracer(config, directory, mesh, None),
    )


def row(step: int) -> dict[str, float]:
    """What the step itself gives, as the loop has it."""
    learned = {
        "loss": 2.5 + 1 / (step + 1),
        "grad_norm": 1.234567,
        "learning_rate": 3e-4,
    }
    took = {
        "tokens": 2048,
        "tokens_per_second": 6826.6,
        "step_seconds": STEP,
        "data_wait_seconds": 2e-5,
    }
    return {"step": step} | learned | took


def loop(steps: int = 200, batches: int = 20) -> tuple[float, str]:
    """µs of a step."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        hub, heartbeat, mesh, tracer = watched(directory)
        measured = Measured(heartbeat.phases, mesh.local_devices, 1e6)
        file, found, writing = (
            MetricsFile(directory / "metrics.jsonl"),
            list[float](),
            list[float](),
        )
        tracer.before_batch(1)
        tracer.begins = set()
        with hub:
            for batch in range(batches):
                spent = wrote = 0.0
                for step in range(batch * steps, (batch + 1) * steps):
                    began = time.perf_counter()
                    tracer.before_batch(step + 2)
                    whole = row(step) | measured.step(2048, 0.0)
                    whole |= measured.row()
                    middle = time.perf_counter()
                    file.write(whole)
                    wrote += time.perf_counter() - middle
                    hub.after_metrics(whole, due=True)
                    tracer.after_step(step + 1, None, None)  # type: ignore[arg-type]
                    spent += time.perf_counter() - began
                found.append((spent - wrote) / steps * 1e6)
                writing.append(wrote / steps * 1e6)
        file.close()
    return statistics.median(
        found
    ), f"besides {statistics.median(writing):.0f} µs for the row in metrics.jsonl"


def thread(seconds: float) -> tuple[float, str]:
    """Its processor time over the time that went by, in %."""
    with tempfile.TemporaryDirectory() as place:
        hub, *_ = watched(Path(place))
        with hub:
            telemetry = next(
                one
                for one in threading.enumerate()
                if one.name == "meshtrain-telemetry"
            )
            clock = time.pthread_getcpuclockid(telemetry.ident or 0)
            time.sleep(3)
            began, spent, step = time.perf_counter(), time.clock_gettime(clock), 0
            while time.perf_counter() - began < seconds:
                hub.after_metrics(
                    row(step := step + 1) | {"time": time.time()}, due=True
                )
                time.sleep(STEP)
            share = (time.clock_gettime(clock) - spent) / (time.perf_counter() - began)
    return share * 100, f"over {seconds:.0f} s, {step} rows"


def scrape(times: int = 50) -> tuple[float, str]:
    """Milliseconds of a request, from its begin to its last byte."""
    board = Board(
        0,
        "host",
        "runs/x",
        {"tokens": 1e9, "compiles": 1, "compile_seconds": 2.0},
        10.0,
    )
    board(row(1) | {"time": 1.0}, "step")
    reasons = ("power_cap", "hardware", "heat", "hardware_heat", "power_brake")
    devices = [str(k) for k in range(80)]
    names = "memory_used_bytes memory_limit_bytes load_ratio power_watts temperature_celsius memory_temperature_celsius"
    sample: dict[str, dict] = {
        f"device_{name}": {device: 0.123456789 * k for k, device in enumerate(devices)}
        for name in names.split()
    }
    sample["device_throttled"] = {
        device: dict.fromkeys(reasons, 0) for device in devices
    }
    for rank in range(64):
        board(
            {"rank": rank, "cpu_ratio": 0.5, "phase_seconds": {"wait": 1.0}}
            | (sample if rank == 0 else {}),
            "process",
        )
    endpoint, found = Endpoint("127.0.0.1", 0, board), list[float]()
    for _ in range(times):
        began = time.perf_counter()
        with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
            page = answer.read().decode()
        found.append((time.perf_counter() - began) * 1e3)
    endpoint.close()
    series = sum(not line.startswith("#") for line in page.splitlines())
    assert series >= SERIES * 0.9, series
    return statistics.median(
        found
    ), f"{series} series, {len(page) / 1000:.0f} kB, the slowest {max(found):.1f} ms"


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "what", nargs="*", choices=[*ALLOWED, []], help="all of them without a word"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of the thread's measurement"
    )
    options = parser.parse_args()
    measures: dict[str, Callable[[], tuple[float, str]]] = {
        "loop": loop,
        "thread": lambda: thread(options.seconds),
        "scrape": scrape,
    }
    over = False
    for name in options.what or measures:
        figure, beside = measures[name]()
        over |= figure > ALLOWED[name]
        print(f"{figure:8.3g} {UNITS[name]} (allowed {ALLOWED[name]:g}); {beside}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
