"""python -m meshtrain.train --config FILE: parse, build, restore, loop, stop.

    next batch ─► step k dispatched ─► metrics of step k-1 fetched ─► evaluate, save, stop where due
        hooks (`meshtrain.run.hooks`): rows, what watches the run, the check of the numbers, tracing, supervision

So devices never wait for the host; fake CPU devices do after every step, since steps in flight together deadlock them.
"""

if __name__ == "__main__":
    from meshtrain import survive as _survive

    # So that its supervisor sees it live while it imports.
    _survive.begin()
    from meshtrain.cli import train_parser as _parser

    # wrong usage and --help do not wait for JAX
    _parser().parse_args()

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain.checkpoint import Checkpointer, CheckpointError
from meshtrain.checkpoint.steps import committed_in
from meshtrain.cli import DONE, FAILED, STOPPED, command, train_parser
from meshtrain.compat import meet
from meshtrain.config import Config, ConfigError, chosen, load, notes, to_yaml
from meshtrain.data import Loader, SplitBatches, open_data, resolve_epochs
from meshtrain.data.batches import digests
from meshtrain.errors import Unreadable, say
from meshtrain.evaluate.evaluation import Evaluation
from meshtrain.families import FAMILIES
from meshtrain.inputs import a_config, inputs
from meshtrain.mesh import join_cluster, platform
from meshtrain.model.hooks import AttentionHook, BlockHook, LossHook
from meshtrain.model.weights import trained_text
from meshtrain.modules import callable_as
from meshtrain.parallel import offload, placement
from meshtrain.precision import NumbersCheck
from meshtrain.run.directory import CHECKPOINTS, METRICS, made_for_nothing, run_directory
from meshtrain.run.garbage import GarbageCollection
from meshtrain.run.hooks import Batch, Row, RunHook, RunResult, as_hooks
from meshtrain.run.processes import RunFailure, end_at_once, explained, first_decides
from meshtrain.run.record import RunRecord
from meshtrain.run.signals import StopSignals
from meshtrain.step import Program, State, TrainStep
from meshtrain.survive.supervision import Supervision, note
from meshtrain.telemetry.hub import watch
from meshtrain.telemetry.measured import Measured, measured
from meshtrain.telemetry.progress import Reporter
from meshtrain.units import size

COMPILING = 3600  # seconds by which one process may be later than another
PLAIN = (
    ConfigError,
    CheckpointError,
    FloatingPointError,
    RunFailure,
    Unreadable,
)  # errors that are one sentence


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = train_parser().parse_args(arguments)
    try:
        config = load(options.config, options.set, reading=options.print_config)
        if options.print_config:
            print(to_yaml(config), end="")
            return DONE
        result = train(config)
        if result.exit_code != FAILED and jax.process_index() == 0:
            print(_commands(config))
        return result.exit_code
    except ConfigError as error:
        note("config", str(error))
        raise
    except (CheckpointError, FloatingPointError, RunFailure, Unreadable) as error:
        say(error)
        return FAILED


def train(
    config: Config,
    *,
    block: BlockHook | None = None,
    attention: AttentionHook | None = None,
    loss: LossHook | None = None,
    callbacks: Sequence[RunHook | Callable[[Row], Any]] = (),
) -> RunResult:
    """Trains a whole run, or the rest of one, and returns how it ended.

    `callbacks` are called around each step: a RunHook at its moments, a function with the metrics of each step.
    `block`, `attention` and `loss` replace the built-in ones, see `model.hooks`; a run must be resumed and read with
    the same. ConfigError for what cannot run, CheckpointError if the last checkpoint cannot be written,
    FloatingPointError if the loss is not finite.
    """
    a_config(config, "mt.train")
    after = as_hooks(callbacks)
    supervision = Supervision(config)
    with StopSignals() as stop, ExitStack() as closing:
        closing.callback(made_for_nothing(config))
        closing.callback(supervision.close)
        directory = run_directory(config)
        try:
            return _run(
                config,
                directory,
                supervision,
                stop,
                closing,
                after,
                block=block,
                attention=attention,
                loss=loss,
            )
        except Exception as error:
            newest = None
            with suppress(Unreadable):
                newest = max(committed_in(directory / CHECKPOINTS), default=None)
            failure = error if isinstance(error, PLAIN) else explained(error, newest)
            if supervision.supervised is not None:
                supervision.fail(failure, PLAIN)
            if isinstance(error, PLAIN) and not isinstance(error, RunFailure | Unreadable):
                raise  # as all processes do
            if jax.distributed.is_initialized():
                end_at_once(failure, FAILED, PLAIN)
            if failure is error:
                raise
            raise failure from None


def _run(
    config: Config,
    directory: Path,
    supervision: Supervision,
    stop: StopSignals,
    closing: ExitStack,
    after: list[RunHook],
    **parts: Any,
) -> RunResult:
    """Builds what a run needs in order, takes the steps, and ends the run."""
    heartbeat = supervision.heartbeat
    heartbeat.phase("open")
    data, held_out = open_data(config)
    config = resolve_epochs(config, data.batches_per_epoch)
    supervision.enter("join")
    with stop.held():
        join_cluster()
    heartbeat.phase("init")
    program = Program(config, **parts)
    config = program.config
    supervision.build(program)
    checkpointer = Checkpointer(config, program, read=digests(config, data, held_out))
    closing.callback(checkpointer.close)
    state, start = checkpointer.restore_or_init(supervision.enter)
    supervision.start(state, start, lambda: checkpointer.newest)
    record = RunRecord(directory, config, start, checkpointer.lock)
    closing.callback(record.close)
    if config.data.tokenizer != "byte" or config.data.template is not None:
        from meshtrain.data.copies import keep

        first_decides(lambda: keep(config, directory))
    # These end before the failure's sentence, which may end the process at once.
    with (
        watch(config, directory, heartbeat, program.mesh) as hub,
        Reporter(config.train.steps, start, quiet=jax.process_index() != 0) as report,
    ):
        evaluation = Evaluation(program, held_out, directory / METRICS, start)
        for sentence in _opening(program, data, start, evaluation):
            report.write(sentence)
        measures = measured(program, heartbeat.phases)
        check = NumbersCheck(config, start, program.is_finite, lambda: evaluation.ended)
        hooks: list[RunHook] = [record, hub, report, check]
        if config.telemetry.experts_every and config.model.moe.experts:
            from meshtrain.parallel.loads import LayerLoads

            hooks.insert(0, LayerLoads(config))
        if config.telemetry.trace_at:
            from meshtrain.telemetry.trace import Tracer

            tracer = Tracer(
                config,
                directory,
                program.mesh,
                program.layout.table,
                heartbeat.phase,
                measures.leave_out,
            )
            closing.callback(tracer.close)
            hooks.append(tracer)
        if config.train.gc_every:
            collection = GarbageCollection(config.train.gc_every)
            closing.callback(collection.close)
            hooks.append(collection)
        if config.parallel.remat_offload:
            hooks.append(OffloadCheck(program, report.write, measures.leave_out))
        losses: list[float] = []
        hooks += [supervision, *as_hooks([lambda row: losses.append(row["loss"])]), *after]

        def place(batch: dict[str, np.ndarray]) -> Batch:
            supervision.read(batch)
            return program.place(batch)

        loader = Loader(data, start, program.part, place, config.data.prefetch)
        closing.callback(loader.close)
        loop = Loop(
            program,
            data,
            loader,
            evaluation,
            checkpointer,
            supervision,
            measures,
            report.write,
            hooks,
        )
        last = loop.run(state, start, stop)
        heartbeat.phase("save")
        checkpointer.wait()
        for sentence in _closing(evaluation, last, checkpointer.metrics()):
            report.write(sentence)
        # Its rows are a part of a run: it did not end well without.
        if not record.is_written():
            heartbeat.note("error", "rows of metrics.jsonl could not be written.")
            return RunResult(directory, FAILED, last, tuple(losses))
        stopped = last < config.train.steps and not evaluation.ended
        if stopped:
            where = (
                f"after step {last}; its checkpoint is written"
                if last > start
                else "before the first step"
            )
            report.write(f"stopped on request {where}, run again to go on.")
        heartbeat.phase("end")
        return RunResult(directory, STOPPED if stopped else DONE, last, tuple(losses))


@dataclass
class Loop:
    """The steps of one process of a run."""

    program: Program
    data: SplitBatches
    loader: Loader
    evaluation: Evaluation
    checkpointer: Checkpointer
    supervision: Supervision
    measures: Measured
    report: Callable[[str], None]
    hooks: Sequence[RunHook]
    steps: dict[tuple[TrainStep, tuple[int, ...]], jax.stages.Compiled] = field(
        default_factory=dict
    )  # by batch shape

    def run(self, state: State, start: int, stop: StopSignals) -> int:
        """Takes the steps after `start`, until all are taken, evaluation ends the run, or it is asked to stop; returns
        the last step.
        """
        steps = self.program.config.train.steps
        step = start
        stopping = stop.requested
        synchronous = (
            platform(self.program.mesh) == "cpu"
        )  # steps in flight together deadlock fake devices
        pending: tuple[int, dict[str, jax.Array]] | None = (
            None  # the step whose metrics are still on the devices
        )
        while step < steps and not stopping and not self.evaluation.ended:
            for hook in self.hooks:
                hook.before_batch(step + 1)
            _, batch = next(self.loader)
            train_step = self.compiled(state, batch, step)
            stop.finish_steps()
            for hook in self.hooks:
                state, batch = hook.before_step(step + 1, train_step, state, batch)
            state, metrics = train_step(state, batch)
            step += 1
            if self.program.islands is not None:
                state, metrics = self.program.islands.finish(state, metrics, step)
            if pending is not None:
                self.log(*pending)
            pending = step, metrics
            for hook in self.hooks:
                hook.after_step(step, train_step, metrics)
            # Asked once a step, so that a request is met by a save, and by every process alike.
            stopping = stop.requested
            saves = self.checkpointer.due(step) or step == steps or stopping
            if saves or synchronous or self.evaluation.due(step):
                self.pause(step, state, metrics, saves)
                pending = None
        if pending is not None:
            self.log(*pending)
        return step

    def pause(self, step: int, state: State, metrics: dict[str, Any], saves: bool) -> None:
        """Waits for a step; evaluates and saves its state where that is due, or the state is the best so far."""
        evaluated = self.evaluate(state) if self.evaluation.due(step) else {}
        eval_loss = evaluated.get("eval_loss")
        is_best = eval_loss is not None and self.evaluation.is_best(step, eval_loss)
        row = self.log(step, metrics, evaluated)
        if saves or is_best or self.evaluation.ended:
            self.supervision.heartbeat.begin_save(step, self.checkpointer.due(step) or is_best)
            for hook in self.hooks:
                hook.before_save(step, state)
            self.checkpointer.save(step, state, loss=row["loss"], eval_loss=eval_loss)

    def compiled(self, state: State, batch: Batch, step: int) -> jax.stages.Compiled:
        """Returns the step after `step` steps for this shape of batch; compiling is reported, and does not count as a
        step's time.
        """
        train_step = self.program.step_after(step)
        shape = inputs(batch).shape
        key = train_step, shape
        if key not in self.steps:
            self.supervision.enter("compile", step)
            began = time.perf_counter()
            self.steps[key] = train_step.lower(state, batch).compile()
            if self.program.islands is not None:
                self.program.islands.prepare()
            meet(f"compiled for {shape}, program {len(self.steps)}", COMPILING)
            self.report(
                f"compiled for batches of {' x '.join(map(str, shape))} in {time.perf_counter() - began:.1f} s"
            )
            self.measures.restart()
        return self.steps[key]

    def log(
        self, step: int, metrics: dict[str, Any], evaluated: Mapping[str, float] | None = None
    ) -> Row:
        """Waits for the metrics of `step`, and hands its row, with what it `evaluated` to, to the hooks."""
        self.supervision.heartbeat.phase("wait")
        islands = self.program.islands
        config = self.program.config
        if islands is None:
            values = {name: float(x) for name, x in jax.device_get(metrics).items()}
        else:
            values = islands.visible(metrics)
        self.supervision.heartbeat.took(step)
        row = {"step": step, **values} | self.measures.step(
            self.data.tokens(step - 1), self.loader.waited
        )
        row |= {"padding_tokens": self.data.padding_tokens(step - 1), **(evaluated or {})}
        due = step % config.log.every == 0 or step == config.train.steps or bool(evaluated)
        if due:
            # of all saves and compilations since the row before
            row |= self.checkpointer.metrics() | self.measures.row()
        for hook in self.hooks:
            hook.after_metrics(row, due)
        return row

    def evaluate(self, state: State) -> dict[str, float]:
        """Returns the metrics of validation."""
        self.supervision.heartbeat.phase("wait")
        jax.block_until_ready(state)
        self.supervision.heartbeat.phase("eval")
        began = time.perf_counter()
        values = self.evaluation.measure(state.params, platform(self.program.mesh) == "cpu")
        self.measures.leave_out(time.perf_counter() - began)
        return values


class OffloadCheck(RunHook):
    """Compares gradients with and without offloaded activations on the first batch of a process; ConfigError if they
    differ.
    """

    def __init__(
        self, program: Program, report: Callable[[str], None], leave_out: Callable[[float], None]
    ) -> None:
        self._program = program
        self._report = report
        self._leave_out = leave_out
        self._checked = False

    def before_step(
        self, step: int, compiled: jax.stages.Compiled, state: State, batch: Batch
    ) -> tuple[State, Batch]:
        if not self._checked:
            began = time.perf_counter()
            self._checked = True
            difference = self._program.check_offload(state, batch)
            self._report(offload.judged(difference, self._program.config.precision.compute))
            self._leave_out(time.perf_counter() - began)
        return state, batch


def _costs(config: Config) -> list[str]:
    """Returns a sentence on each thing that is legal but costs something."""
    sentences = [*notes(config), *placement.notes(config)]
    if config.precision.matmul == "compute":
        return sentences
    from meshtrain.parallel import float8

    return [*sentences, *float8.notes(config)]


def _opening(program: Program, data: SplitBatches, start: int, evaluation: Evaluation) -> list[str]:
    """Returns sentences on the model, the data, what was chosen for the user, what the config asks in vain, and what is
    left to do.
    """
    config = program.config
    devices = program.mesh.devices.size
    trained = trained_text(config.model, config.lora, config.train.trainable)
    lines = [
        f"{config.model.family} with {program.layout.parameters:,} parameters{trained} on {config.mesh} "
        f"({devices} {platform(program.mesh)} devices), "
        f"ZeRO-{config.parallel.zero_stage}: {size(program.state_bytes)} of state a device",
        data.describe(),
        *(
            [f"train.epochs {config.train.epochs:g}: {config.train.steps:,} steps"]
            if config.train.epochs
            else []
        ),
        *_stands_in(program),
        *chosen(config),
        *(f"note: {sentence}" for sentence in _costs(config)),
    ]
    if start >= config.train.steps:
        return [
            *lines,
            f"step {start} is taken already and train.steps is {config.train.steps}: nothing is left to do",
        ]
    if evaluation.ended:
        return [
            *lines,
            f"{evaluation.why()}: nothing is left to do; with a larger eval.patience it goes on",
        ]
    return [*lines, *evaluation.opening(), *([f"going on after step {start}"] if start else [])]


def _stands_in(program: Program) -> list[str]:
    """Returns the sentence on CPUs that compute in what accelerators are for."""
    compute = program.config.precision.compute
    if platform(program.mesh) != "cpu" or compute == "float32":
        return []
    return [
        f"note: JAX finds no accelerator here: CPUs stand in and compute in {compute}, far slower, which is for "
        "trying it out"
    ]


def _closing(evaluation: Evaluation, step: int, last: Mapping[str, float]) -> list[str]:
    """Returns sentences on the saves that no row of metrics follows (`last`: their metrics), and on the evaluations."""
    lines = evaluation.closing(step)
    if last:
        size, seconds, blocking = (
            last[f"checkpoint_{name}"] for name in ("bytes", "seconds", "blocked_seconds")
        )
        lines.insert(
            0,
            f"last save: {size / 1e6:.1f} MB in {seconds:.2f} s, {blocking:.3f} s of them blocking",
        )
    return lines


def _commands(config: Config) -> str:
    """Returns where a run is, and the commands that look at it."""
    run = shlex.quote(config.run.directory)
    use = (
        f"evaluate {run}"
        if FAMILIES[config.model.family].images
        else f"generate {run} --prompt TEXT"
    )
    return "\n  meshtrain ".join(
        [f"the run is in {run}", f"report {run}", f"checkpoint ls {run}", use]
    )


callable_as(__name__, train)

if __name__ == "__main__":
    sys.exit(main())
