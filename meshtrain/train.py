"""python -m meshtrain.train --config FILE: parse, build, restore, loop, stop.

    next batch ─► step k dispatched ─► metrics of step k-1 fetched ─► evaluate, save, stop where due

So devices never wait for the host; fake CPU devices do after every step, since steps in flight together deadlock them.
"""

if __name__ == "__main__":
    from meshtrain.run import early
    from meshtrain.survive import beat as _beat

    early.hear()
    # So that its supervisor sees it live while it imports.
    _beat.begin()

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from meshtrain.checkpoint import Checkpointer, CheckpointError
from meshtrain.checkpoint.steps import committed_in
from meshtrain.cli import DONE, FAILED, STOPPED, Parser, command
from meshtrain.compat import meet
from meshtrain.config import Config, ConfigError, chosen, load, notes, to_yaml
from meshtrain.data import Loader, TextBatches, open_data
from meshtrain.errors import say
from meshtrain.given import a_config
from meshtrain.mesh import join_cluster, own_rows, platform
from meshtrain.model.hooks import AttentionHook, BlockHook, LossHook
from meshtrain.modules import callable_as
from meshtrain.parallel import offload, placement
from meshtrain.precision import Watch
from meshtrain.run.directory import CHECKPOINTS, run_directory
from meshtrain.run.failures import RunFailure, end_at_once, explained
from meshtrain.run.record import RunRecord
from meshtrain.run.signals import StopSignals
from meshtrain.step import Program, State
from meshtrain.survive.tended import Tended, note
from meshtrain.telemetry.progress import Reporter

COMPILING = 3600  # seconds by which one process may be later than another
PLAIN = (ConfigError, CheckpointError, FloatingPointError, RunFailure)  # errors that are one sentence


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m meshtrain.train", description="Trains a transformer on a 3-D device mesh.")
    parser.add_config()
    parser.add_argument("--print-config", action="store_true", help="print the whole resolved config as YAML and exit")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config, options.set)
        if options.print_config:
            print(to_yaml(config), end="")
            return DONE
        return train(config)
    except ConfigError as error:
        note("config", str(error))
        raise
    except (CheckpointError, FloatingPointError, RunFailure) as error:
        say(error)
        return FAILED
    except KeyboardInterrupt as request:
        say(request or "SIGINT: stopped before the first step; nothing is lost.")
        return STOPPED


def train(
    config: Config,
    *,
    block: BlockHook | None = None,
    attention: AttentionHook | None = None,
    loss: LossHook | None = None,
) -> int:
    """A whole run, or the rest of one; the exit code: 0 done, 75 stopped on request with its checkpoint written.

    `block`, `attention` and `loss` replace the built-in ones, see `model.hooks`; a run must be resumed and read with the same.
    ConfigError for what cannot run, CheckpointError if the last checkpoint cannot be written, FloatingPointError if the loss is
    not finite.
    """
    a_config(config, "mt.train")
    tended = Tended(config)
    with StopSignals() as stop, ExitStack() as closing:
        directory = run_directory(config)
        try:
            closing.callback(tended.close)
            tended.phase("open")
            data, held_out = open_data(config)
            tended.phase("join")
            tended.at("join")
            with stop.held():
                join_cluster()
            tended.phase("init")
            program = Program(config, block=block, attention=attention, loss=loss)
            tended.build(program.mesh, program.state_shapes.params)
            checkpointer = Checkpointer(config, program, read=digests(config, data, held_out))
            closing.callback(checkpointer.close)
            tended.phase("restore")
            tended.at("restore")
            state, start = checkpointer.restore_or_init()
            tended.start(state.params, start, checkpointer.newest)
            record = RunRecord(directory, config, start, checkpointer.lock)
            closing.callback(record.close)
            with Reporter(config.train.steps, start, quiet=jax.process_index() != 0) as report:
                for sentence in opening(program, data, start):
                    report.write(sentence)
                loop = Loop(program, data, held_out, checkpointer, report, record, start, tended)
                closing.callback(loop.close)
                code = loop.run(state, stop)
                tended.phase("end")
                return code
        except Exception as error:
            newest = max(committed_in(directory / CHECKPOINTS), default=None)
            failure = error if isinstance(error, PLAIN) else explained(error, newest)
            if tended.supervised is not None:
                tended.fail(failure, PLAIN)
            # of all processes alike
            if isinstance(error, PLAIN) and not isinstance(error, RunFailure):
                raise
            if jax.distributed.is_initialized():
                end_at_once(failure, FAILED, PLAIN)
            if failure is error:
                raise
            raise failure from None


class Loop:
    """The steps of one process of a run."""

    def __init__(
        self,
        program: Program,
        data: TextBatches,
        held_out: TextBatches | None,
        checkpointer: Checkpointer,
        report: Reporter,
        record: RunRecord,
        start: int,
        tended: Tended,
    ) -> None:
        self.config, self.program, self.tended = program.config, program, tended
        self.data, self.held_out, self.checkpointer, self.report = data, held_out, checkpointer, report
        self.record, self.start = record, start
        self.watch = Watch(self.config, start)
        depth = self.config.data.prefetch
        self.loader = Loader(data, start, rows=self.own_rows, put=self.place, depth=depth)
        self.synchronous = platform(program.mesh) == "cpu"  # steps in flight together deadlock fake devices
        self.waited, self.clock = 0.0, time.perf_counter()
        self.steps: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def run(self, state: State, stop: StopSignals) -> int:
        config, steps = self.config, self.config.train.steps
        pending: tuple[int, int, dict[str, jax.Array]] | None = None
        step, stopping = self.start, stop.requested
        tended = self.tended
        while step < steps and not stopping:
            tended.begin_step(step, self.checkpointer.newest)
            k, batch = next(self.loader)
            tended.take(step + 1, self.own_rows(self.data.batch_shape(k)[0]).start)
            if config.parallel.remat_offload and step == self.start:
                self.check_offload(state, batch)
            train_step = self.compiled(state, batch, step)
            stop.finish_steps()
            tended.phase("dispatch")
            tended.check_product(state)
            state, batch = tended.at("dispatch", step, (state, batch))
            if self.synchronous:
                tended.phase("wait")  # such devices may compute within the call
            state, metrics = train_step(state, batch)
            step += 1
            if pending is not None:
                self.log(*pending)
            pending = (step, self.data.tokens(k), metrics)
            evaluates = bool(config.eval.every) and (step % config.eval.every == 0 or step == steps)
            # Asked once a step, so that a request is met by a save, and by every process alike.
            stopping = stop.requested
            saves = self.checkpointer.due(step) or step == steps or stopping
            if evaluates or saves or self.synchronous:
                eval_loss = self.evaluate(state) if evaluates else None
                row = self.log(*pending, eval_loss)
                pending = None
                if saves:
                    tended.begin_save(step, self.checkpointer.due(step))
                    self.watch.state(step, self.program.sound(state))
                    tended.check_copies(state.params)
                    tended.at("save", step)
                    self.checkpointer.save(step, state, loss=row["loss"], eval_loss=eval_loss)
        if pending is not None:
            self.log(*pending)
        tended.phase("save")
        self.checkpointer.wait()
        if last := self.checkpointer.metrics():  # of saves that no row of metrics follows
            self.report.write(
                f"last save: {last['checkpoint_bytes'] / 1e6:.1f} MB in {last['checkpoint_seconds']:.2f} s, "
                f"{last['checkpoint_blocked_seconds']:.3f} s of them blocking"
            )
        # What the run says of itself is a part of it: it did not end well without.
        if not self.record.is_written():
            tended.note("error", "rows of metrics.jsonl could not be written.")
            return FAILED
        if step < steps:
            left = f"after step {step}; its checkpoint is written" if step > self.start else "before the first step"
            self.report.write(f"stopped on request {left}, run again to go on.")
            return STOPPED
        return DONE

    def compiled(self, state: State, batch: dict[str, jax.Array], step: int) -> jax.stages.Compiled:
        """The train step for this shape of batch; compiling is reported, and does not count as a step's time."""
        shape = batch["tokens"].shape
        if shape not in self.steps:
            self.tended.phase("compile")
            self.tended.at("compile", step)
            began = time.perf_counter()
            self.steps[shape] = self.program.train_step.lower(state, batch).compile()
            meet(f"compiled for {shape}", COMPILING)
            self.report.write(f"compiled for batches of {shape[0]} x {shape[1]} in {time.perf_counter() - began:.1f} s")
            self.tended.see_compiled(self.steps[shape], self.program.mesh, self.program.busy)
            self.clock = time.perf_counter()
        return self.steps[shape]

    def log(
        self, step: int, tokens: int, metrics: dict[str, jax.Array], eval_loss: float | None = None
    ) -> dict[str, Any]:
        """Waits for the metrics of `step`, writes and shows them where due."""
        self.tended.phase("wait")
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.tended.took(step)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        waited, self.waited = self.loader.waited - self.waited, self.loader.waited
        row = {"step": step, **values, "tokens": tokens, "tokens_per_second": tokens / seconds}
        row |= {"step_seconds": seconds, "data_wait_seconds": waited}
        if eval_loss is not None:
            row["eval_loss"] = eval_loss
        due = step % self.config.log.every == 0 or step == self.config.train.steps or eval_loss is not None
        if due:
            self.record.write(row | self.checkpointer.metrics())  # of all saves since the row before
        self.report.step(row, show=due)
        self.watch.metrics(step, values)
        return row

    def check_offload(self, state: State, batch: dict[str, jax.Array]) -> None:
        """Before the first step: offloaded activations must give the gradients that recomputed ones give."""
        difference = self.program.check_offload(state, batch)
        if not difference < offload.TOLERANCE * (1 if self.config.precision.compute == "float32" else 1000):
            raise FloatingPointError(
                f"with parallel.remat_offload the gradients differ by {difference:.1e} from those without; "
                "this backend offloads wrongly, so leave it out."
            )
        self.report.write(f"offloaded activations checked: gradients differ by {difference:.1e}")

    def evaluate(self, state: State) -> float:
        """Mean loss over the first eval.batches batches of held-out text."""
        assert self.held_out is not None
        self.tended.phase("eval")
        jax.block_until_ready(state)
        began, losses = time.perf_counter(), []
        for k in range(self.config.eval.batches):
            rows = self.own_rows(self.held_out.batch_shape(k)[0])
            losses.append(self.program.eval_step(state.params, self.program.place(self.held_out.batch(k, rows))))
            if self.synchronous:
                jax.block_until_ready(losses[-1])
        mean = float(np.mean(jax.device_get(losses)))
        self.clock += time.perf_counter() - began  # no part of a step's time
        return mean

    def own_rows(self, rows: int) -> slice:
        """The rows of a global batch that this process's devices hold."""
        return own_rows(self.program.batch_sharding, rows)

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows onto its devices, on the loader's thread."""
        self.tended.read(batch)
        return self.program.place(batch)

    def close(self) -> None:
        self.loader.close()


def digests(config: Config, data: TextBatches, held_out: TextBatches | None) -> dict[str, str]:
    """Of what is read, for the checkpoints; nothing of random tokens."""
    found = {"digest": data.digest}
    if config.data.validation_source is not None and held_out is not None:
        found["validation_digest"] = held_out.digest
    return {name: digest for name, digest in found.items() if digest}


def opening(program: Program, data: TextBatches, start: int) -> list[str]:
    """What a run says of itself before its first step."""
    config, mesh = program.config, program.config.mesh
    lines = [
        f"{config.model.family} with {program.layout.parameters:,} parameters on data {mesh.data} x tensor {mesh.tensor} x "
        f"pipeline {mesh.pipeline} ({program.mesh.devices.size} {platform(program.mesh)} devices), "
        f"ZeRO-{config.parallel.zero_stage}: {program.state_bytes / 2**20:.1f} MiB of state a device",
        data.describe(),
        *chosen(config),
        *(f"note: {sentence}" for sentence in (*notes(config), *placement.notes(config))),
    ]
    if start >= config.train.steps:
        lines.append(f"step {start} is taken already and train.steps is {config.train.steps}: nothing is left to do")
    elif start:
        lines.append(f"going on after step {start}")
    return lines


callable_as(__name__, train)

if __name__ == "__main__":
    sys.exit(main())
