"""The newest trace of a run; of a run that has none a trace of a few steps of its config on this machine, from new
weights, beside the run.

    parent   trace_beside(config) ──► child ──► SCRATCH/traces/4/ ──► Attribution; SCRATCH is removed
    child    build, compile, 3 steps, 3 traced ones, 3 more; no checkpoint, nothing in the run's directory

In a process of its own, since the devices are faked before JAX starts, and since a program that does not fit ends it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from meshtrain.config import Config, load, replaced, to_yaml
from meshtrain.data import open_data
from meshtrain.errors import ConfigError, say
from meshtrain.registry import NotImported, Unimported
from meshtrain.report.trace import attribute, read_trace
from meshtrain.report.trace.attribution import NO_BUFFERS, Attribution
from meshtrain.run.directory import CONFIG, METRICS, TRACES
from meshtrain.step import Program
from meshtrain.telemetry.trace import FACTS, Tracer

# steps before the trace, and in it
WARM = 3
TRACED = 3
STEPS = WARM + 2 * TRACED
# What would make the child one of several processes, or a supervisor's.
NOT_ITS_OWN = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "MESHTRAIN_SUPERVISED",
)


def newest_trace(directory: Path) -> Path | None:
    """Returns the trace that a run has taken last; None if it has none."""
    traces = [path.parent for path in (directory / TRACES).glob(f"*/{FACTS}")]
    return max(traces, key=lambda path: (path / FACTS).stat().st_mtime, default=None)


def attributed(trace: Path) -> Attribution:
    """Returns where the time of a trace's steps went. ConfigError if it cannot be read."""
    return attribute(read_trace(trace))


def trace_beside(config: Config) -> Attribution:
    """Traces a few steps of a config in a process of its own; RuntimeError, in a sentence, if that fails."""
    for entry in config.run.imports:
        if isinstance(entry, Unimported):
            raise NotImported(entry)
    what = f"so {STEPS} steps of its config are taken beside it, from new weights; nothing of them is kept."
    say(f"there is no trace of this run, {what}")
    with tempfile.TemporaryDirectory(prefix="meshtrain-trace-") as scratch:
        try:
            return attributed(steps_traced(config, Path(scratch)))
        except ConfigError as problem:
            raise RuntimeError(str(problem)) from None


def steps_traced(config: Config, directory: Path) -> Path:
    """The trace of the child's steps, and what else it leaves in a directory; RuntimeError, in a sentence, if it
    fails.
    """
    telemetry = {
        "trace_at": (WARM + 1,),
        "trace_steps": TRACED,
        "endpoint": 0,
        "trackers": (),
        "alerts": (),
    }
    steps = {"steps": max(STEPS, config.train.steps)}
    chosen = replaced(
        config, run={"directory": str(directory)}, telemetry=telemetry, train=steps
    )
    (directory / CONFIG).write_text(to_yaml(chosen))
    environment = {
        name: value for name, value in os.environ.items() if name not in NOT_ITS_OWN
    }
    # On GPUs what runs in command buffers does not tell its name; elsewhere the flag changes nothing.
    environment["XLA_FLAGS"] = (
        f"{environment.get('XLA_FLAGS', '')} {NO_BUFFERS}".strip()
    )
    command = [sys.executable, "-m", __spec__.name, str(directory)]
    # Its log is no part of this command's output.
    with (directory / "stderr").open("w+") as log:
        ended = subprocess.run(
            command, env=environment, stdout=sys.stderr.fileno(), stderr=log
        )
        log.seek(0)
        last = log.read().strip().splitlines()[-1:]
    trace = newest_trace(directory)
    if ended.returncode or trace is None:
        why = " ".join(last) or f"exit code {ended.returncode}"
        raise RuntimeError(f"the steps that were to be traced failed: {why}")
    return trace


def main(directory: Path) -> None:
    """The child: takes the steps of the config in a directory, one of them after the other, and leaves rows and a trace
    there.
    """
    config = load(directory / CONFIG)
    program = Program(config)
    data, _ = open_data(config)
    state = program.init()
    # The same batch each time: another may have another length, and is another program then.
    batch = program.place(data.batch(0, *program.part(data.batch_shape(0))))
    began = time.perf_counter()
    compiled = program.train_step.lower(state, batch).compile()
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    tracer = Tracer(config, directory, program.mesh, program.layout.table)
    with (directory / METRICS).open("w") as metrics_file:
        for step in range(1, STEPS + 1):
            tracer.before_batch(step)
            began = time.perf_counter()
            state, metrics = compiled(state, batch)
            # On fake devices steps may not be under way together.
            jax.block_until_ready(metrics)
            seconds = time.perf_counter() - began
            tracer.after_step(step, compiled, metrics)
            metrics_file.write(
                json.dumps({"step": step, "step_seconds": seconds}) + "\n"
            )
            metrics_file.flush()
            traced = " traced" if WARM < step <= WARM + TRACED else ""
            print(f"step {step}/{STEPS}  {seconds:.3f} s{traced}", flush=True)
    tracer.close()


if __name__ == "__main__":
    from meshtrain.errors import ConfigError as Refused

    try:
        main(Path(sys.argv[1]))
    except Refused as refused:
        say(refused)
        sys.exit(2)
