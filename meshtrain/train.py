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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from meshtrain.checkpoint import Checkpointer, CheckpointError
from meshtrain.checkpoint.steps import committed_in
from meshtrain.cli import DONE, FAILED, STOPPED, Parser, command
from meshtrain.compat import meet
from meshtrain.config import Config, ConfigError, load, to_yaml
from meshtrain.data import Loader, SplitBatches, in_epochs, open_data
from meshtrain.data.digests import digests
from meshtrain.errors import say
from meshtrain.given import a_config
from meshtrain.inputs import inputs
from meshtrain.mesh import join_cluster, own_rows, platform
from meshtrain.model.hooks import AttentionHook, BlockHook, LossHook
from meshtrain.modules import callable_as
from meshtrain.parallel import offload
from meshtrain.parallel.sync.states import visible
from meshtrain.plan import reducing, ticks
from meshtrain.plan.peak import tokens_at_peak
from meshtrain.precision import Watch
from meshtrain.run import said
from meshtrain.run.directory import CHECKPOINTS, METRICS, run_directory
from meshtrain.run.evaluation import Evaluation
from meshtrain.run.failures import RunFailure, end_at_once, explained
from meshtrain.run.record import RunRecord
from meshtrain.run.signals import StopSignals
from meshtrain.step import Program, State, TrainStep
from meshtrain.survive.tended import Tended, note
from meshtrain.telemetry.hub import Hub
from meshtrain.telemetry.measured import Measured
from meshtrain.telemetry.progress import Reporter
from meshtrain.telemetry.trace import Tracer
from meshtrain.telemetry.watching import watch

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
    """A whole run, or the rest of one; the exit code: 0 done (its steps, or eval.patience), 75 stopped on request with its checkpoint written.

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
            config = in_epochs(config, data.batches_per_epoch)
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
            # Ends before what failed is said, since that may end the process at once.
            with (
                watch(config, directory, tended.beat, program.mesh) as hub,
                Reporter(config.train.steps, start, quiet=jax.process_index() != 0) as report,
            ):
                evaluation = Evaluation(program, held_out, directory / METRICS, start)
                for sentence in said.opening(program, data, start, evaluation):
                    report.write(sentence)
                loop = Loop(program, data, evaluation, checkpointer, report, record, start, tended, hub)
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
        data: SplitBatches,
        evaluation: Evaluation,
        checkpointer: Checkpointer,
        report: Reporter,
        record: RunRecord,
        start: int,
        tended: Tended,
        hub: Hub,
    ) -> None:
        self.config, self.program, self.tended = program.config, program, tended
        self.data, self.evaluation, self.checkpointer, self.report = data, evaluation, checkpointer, report
        self.record, self.start, self.hub = record, start, hub
        self.watch = Watch(self.config, start)
        self.tracer = Tracer(self.config, record.directory, program.mesh, program.layout.table, tended.phase)
        depth = self.config.data.prefetch
        self.loader = Loader(data, start, rows=self.own_rows, put=self.place, depth=depth)
        self.synchronous = platform(program.mesh) == "cpu"  # steps in flight together deadlock fake devices
        devices = program.mesh.devices
        peak = tokens_at_peak(self.config, devices.flat[0].device_kind, devices.size)
        self.measured = Measured(tended.beat.phases, program.mesh.local_devices, peak)
        self.sent = reducing.row(self.config, ticks.trips(self.config, skips=self.synchronous))
        self.waited, self.clock = 0.0, time.perf_counter()
        self.steps: dict[tuple[TrainStep, tuple[int, ...]], jax.stages.Compiled] = {}

    def run(self, state: State, stop: StopSignals) -> int:
        config, steps = self.config, self.config.train.steps
        pending: tuple[int, int, dict[str, jax.Array]] | None = None
        step, stopping = self.start, stop.requested
        tended = self.tended
        while step < steps and not stopping and not self.evaluation.ended:
            self.tracer.before(step + 1)
            tended.begin_step(step, self.checkpointer.newest)
            k, batch = next(self.loader)
            tended.take(step + 1, self.own_rows(self.data.batch_shape(k)[0]).start)
            if config.parallel.remat_offload and step == self.start:
                difference = self.program.check_offload(state, batch)
                self.report.write(offload.judged(difference, config.precision.compute))
            train_step = self.compiled(state, batch, step)
            stop.finish_steps()
            tended.phase("dispatch")
            tended.check_product(state)
            state, batch = tended.at("dispatch", step, (state, batch))
            if self.synchronous:
                tended.phase("wait")  # such devices may compute within the call
            state, metrics = train_step(state, batch)
            step += 1
            if self.program.islands is not None:
                state, metrics = self.program.islands.finish(state, metrics, step)
            if pending is not None:
                self.log(*pending)
            pending = (step, self.data.tokens(k), metrics)
            tracing = self.tracer.after(step, train_step, metrics)
            self.clock += tracing
            self.measured.leave_out(tended.beat.name, tracing)
            evaluates = self.evaluation.due(step)
            # Asked once a step, so that a request is met by a save, and by every process alike.
            stopping = stop.requested
            saves = self.checkpointer.due(step) or step == steps or stopping
            if evaluates or saves or self.synchronous:
                measured = self.evaluate(state) if evaluates else {}
                eval_loss = measured.get("eval_loss")
                is_best = eval_loss is not None and self.evaluation.is_best(step, eval_loss)
                row = self.log(*pending, measured)
                pending = None
                if saves or is_best or self.evaluation.ended:
                    tended.begin_save(step, self.checkpointer.due(step) or is_best)
                    self.watch.state(step, self.program.sound(state))
                    tended.check_copies(state.params)
                    tended.at("save", step)
                    self.checkpointer.save(step, state, loss=row["loss"], eval_loss=eval_loss)
        if pending is not None:
            self.log(*pending)
        tended.phase("save")
        self.checkpointer.wait()
        for sentence in said.closing(self.evaluation, step, self.checkpointer.metrics()):
            self.report.write(sentence)
        # What the run says of itself is a part of it: it did not end well without.
        if not self.record.is_written():
            tended.note("error", "rows of metrics.jsonl could not be written.")
            return FAILED
        if step < steps and not self.evaluation.ended:
            left = f"after step {step}; its checkpoint is written" if step > self.start else "before the first step"
            self.report.write(f"stopped on request {left}, run again to go on.")
            return STOPPED
        return DONE

    def compiled(self, state: State, batch: dict[str, jax.Array], step: int) -> jax.stages.Compiled:
        """The step after `step` steps for this shape of batch; compiling is reported, and does not count as a step's time."""
        train_step, shape = self.program.step_after(step), inputs(batch).shape
        key = train_step, shape
        if key not in self.steps:
            self.tended.phase("compile")
            self.tended.at("compile", step)
            began = time.perf_counter()
            self.steps[key] = train_step.lower(state, batch).compile()
            if self.program.islands is not None:
                self.program.islands.prepare()
            meet(f"compiled for {shape}, program {len(self.steps)}", COMPILING)
            sizes = " x ".join(map(str, shape))
            self.report.write(f"compiled for batches of {sizes} in {time.perf_counter() - began:.1f} s")
            self.tended.see_compiled(self.steps[key], self.program.mesh, self.program.busy)
            self.clock = time.perf_counter()
        return self.steps[key]

    def log(self, step: int, tokens: int, metrics: dict[str, Any], evaluated: Mapping[str, float] | None = None) -> dict[str, Any]:  # fmt: skip
        """Waits for the metrics of `step`, writes and shows them where due, with what it `evaluated` to."""
        self.tended.phase("wait")
        values = visible(metrics)
        self.tended.took(step)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        waited, self.waited = self.loader.waited - self.waited, self.loader.waited
        row = {"step": step, **values, "tokens": tokens, "tokens_per_second": tokens / seconds}
        row |= self.sent | {"step_seconds": seconds, "data_wait_seconds": waited} | self.measured.step(tokens / seconds)
        row |= evaluated or {}
        due = step % self.config.log.every == 0 or step == self.config.train.steps or bool(evaluated)
        if due:
            # of all saves and compilations since the row before
            row |= self.checkpointer.metrics() | self.measured.row()
            self.record.write(row)
        self.hub.row(row, due)
        self.report.step(row, show=due)
        self.watch.metrics(step, values, self.evaluation.ended)
        return row

    def evaluate(self, state: State) -> dict[str, float]:
        """What held-out data comes to."""
        self.tended.phase("wait")
        jax.block_until_ready(state)
        self.tended.phase("eval")
        began = time.perf_counter()
        found = self.evaluation.measure(state.params, self.synchronous)
        self.clock += time.perf_counter() - began  # no part of a step's time
        return found

    def own_rows(self, rows: int) -> slice:
        """The rows of a global batch that this process's devices hold."""
        return own_rows(self.program.batch_sharding, rows)

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows onto its devices, on the loader's thread."""
        self.tended.read(batch)
        return self.program.place(batch)

    def close(self) -> None:
        self.loader.close()
        self.tracer.close()


callable_as(__name__, train)

if __name__ == "__main__":
    sys.exit(main())
