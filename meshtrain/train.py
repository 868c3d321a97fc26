"""python -m meshtrain.train --config FILE: open the data, build the program, resume its state, take the steps, end.

    next batch ─► step k dispatched ─► metrics of step k-1 fetched ─► evaluate, save, stop where due
        hooks (`meshtrain.run.hooks`): rows, what watches the run, the check of the numbers, tracing, supervision

A step is dispatched before the host waits for the one before it, so accelerators never idle. On CPU the host waits for
each step: fake devices deadlock with two steps in flight.
"""

if __name__ == "__main__":
    from meshtrain import survive as _survive

    # So that its supervisor sees it live while it imports.
    _survive.begin()
    from meshtrain.cli import train_parser as _parser

    # wrong usage and --help do not wait for JAX
    _parser().parse_args()

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshtrain.checkpoint import Checkpointer, CheckpointError
from meshtrain.checkpoint.steps import committed_in
from meshtrain.cli import DONE, FAILED, STOPPED, command, train_parser
from meshtrain.compat import cache_compiled, wait_for_processes
from meshtrain.config import Config, ConfigError, chosen, load, notes, to_yaml
from meshtrain.data import Loader, SplitBatches, open_data, resolve_epochs
from meshtrain.data.batches import digests
from meshtrain.errors import Unreadable, say
from meshtrain.evaluate.evaluation import Evaluation
from meshtrain.files import cache_directory
from meshtrain.inputs import a_config, inputs
from meshtrain.mesh import join_cluster, platform
from meshtrain.model.hooks import AttentionHook, BlockHook, LossHook
from meshtrain.model.weights import trained_text
from meshtrain.modules import callable_as
from meshtrain.optim import load_hooks
from meshtrain.parallel import offload, placement
from meshtrain.precision import NumbersCheck
from meshtrain.run.directory import (
    CHECKPOINTS,
    METRICS,
    remove_if_unused,
    run_directory,
)
from meshtrain.run.garbage import GarbageCollection
from meshtrain.run.hooks import Batch, Row, RunHook, RunResult, as_hooks, callbacks_of
from meshtrain.run.processes import (
    RunFailure,
    end_at_once,
    explain,
    first_decides,
    is_first,
)
from meshtrain.run.record import RunRecord
from meshtrain.run.signals import StopSignals
from meshtrain.step import Program, State, TrainStep
from meshtrain.survive.supervision import Supervision, note
from meshtrain.telemetry.hub import watch
from meshtrain.telemetry.measured import Measured, measured
from meshtrain.telemetry.progress import Reporter, next_commands
from meshtrain.units import size

if TYPE_CHECKING:
    from meshtrain.rl.answering import AnswerBatches
    from meshtrain.rl.prompts import Prompts

CACHE = 4 << 30  # bytes of compiled programs that stay for later runs
# seconds that a process waits for the last one to have compiled
COMPILE_TIMEOUT = 3600
# errors that are one sentence
PLAIN = (
    ConfigError,
    CheckpointError,
    FloatingPointError,
    RunFailure,
    Unreadable,
)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = train_parser().parse_args(arguments)
    try:
        config = load(options.config, options.set, reading=options.print_config)
        if options.print_config:
            print(to_yaml(config), end="")
            return DONE
        # A user without a home has no cache.
        with suppress(ConfigError):
            cache_compiled(cache_directory() / "compiled", CACHE)
        result = train(config)
        if result.exit_code != FAILED and is_first():
            print(next_commands(config))
        return result.exit_code
    except ConfigError as error:
        note("config", str(error))
        raise
    except PLAIN as error:
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
    given = [*callbacks_of(config), *as_hooks(callbacks)]
    supervision = Supervision(config)
    with StopSignals() as stop, ExitStack() as closing:
        closing.callback(remove_if_unused(config))
        closing.callback(supervision.close)
        directory = run_directory(config)
        try:
            return _run(
                config,
                directory,
                supervision,
                stop,
                closing,
                given,
                block=block,
                attention=attention,
                loss=loss,
            )
        except Exception as error:
            newest = None
            with suppress(Unreadable):
                newest = max(committed_in(directory / CHECKPOINTS), default=None)
            failure = error if isinstance(error, PLAIN) else explain(error, newest)
            if supervision.supervised is not None:
                supervision.fail(failure, PLAIN)
            # None is left waiting for this one.
            all_raise_it = not isinstance(error, RunFailure | Unreadable)
            if isinstance(error, PLAIN) and all_raise_it:
                raise
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
    given: list[RunHook],
    **parts: Any,
) -> RunResult:
    """Opens the data, builds the program, resumes its state, takes the steps, and ends the run.

    `given` are the user's hooks, which are called last; `parts` replace those of the model.
    """
    config, data, held_out = _open(config, supervision, stop)
    program = _build(config, supervision, parts)
    config = program.config
    checkpointer = Checkpointer(config, program, read=digests(config, data, held_out))
    closing.callback(checkpointer.close)
    state, start = _resume(checkpointer, supervision)
    record = RunRecord(directory, config, start, checkpointer.lock)
    closing.callback(record.close)
    _keep_tokenizer(config, directory)
    # Both close before `train` meets an error: it may end the process at once.
    with (
        watch(config, directory, supervision.heartbeat, program.mesh) as hub,
        Reporter(config.train.steps, start, quiet=not is_first()) as report,
    ):
        evaluation = Evaluation(program, held_out, directory / METRICS, start)
        for sentence in _opening(program, data, start, evaluation):
            report.write(sentence)
        loop = Loop(
            program,
            data,
            _read_ahead(program, data, start, supervision, directory),
            evaluation,
            checkpointer,
            supervision,
            measured(program, supervision.heartbeat.phases),
            report.write,
        )
        closing.callback(loop.loader.close)
        check = NumbersCheck(config, start, program.is_finite, lambda: evaluation.ended)
        loop.hooks += [record, hub, report, check]
        _add_chosen_hooks(loop, directory, closing)
        loop.hooks += [supervision, *given]
        last = loop.run(state, start, stop)
        exit_code = _end(loop, start, last, record)
        return RunResult(directory, exit_code, last, tuple(loop.losses))


def _open(
    config: Config, supervision: Supervision, stop: StopSignals
) -> tuple[Config, Any, SplitBatches | None]:
    """Opens training and validation data, counts the steps of `train.epochs`, and joins the other processes."""
    supervision.heartbeat.phase("open")
    data: Any
    if config.train.objective == "grpo":
        data, held_out = _answering().Prompts(config), None
    else:
        data, held_out = open_data(config)
    config = resolve_epochs(config, data.batches_per_epoch)
    supervision.enter("join")
    with stop.held():
        join_cluster()
    return config, data, held_out


def _build(config: Config, supervision: Supervision, parts: dict[str, Any]) -> Program:
    """Builds the program, with the caller's `parts` of the model in place of the built-in ones."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ConfigError(
            "JAX_ENABLE_X64 is set, but a run computes in precision.compute; unset it."
        )
    supervision.heartbeat.phase("init")
    is_policy = config.train.objective == "grpo"
    kind = _answering().PolicyProgram if is_policy else Program
    program: Program = kind(config, **parts)
    supervision.watch(program)
    return program


def _answering() -> Any:
    """Returns the module of runs that learn from their own answers, which no other run imports."""
    from meshtrain.rl import answering

    return answering


def _resume(checkpointer: Checkpointer, supervision: Supervision) -> tuple[State, int]:
    """Returns the state of the newest checkpoint, or a new one, and how many steps it has taken."""
    state, start = checkpointer.restore_or_init(supervision.enter)
    supervision.start(state, start, lambda: checkpointer.newest)
    return state, start


def _keep_tokenizer(config: Config, directory: Path) -> None:
    """Copies a tokenizer and a template from files of their own into the run."""
    if config.data.tokenizer == "byte" and config.data.template is None:
        return
    from meshtrain.data.copies import keep

    first_decides(lambda: keep(config, directory))


def _read_ahead(
    program: Program,
    data: "SplitBatches | Prompts",
    start: int,
    supervision: Supervision,
    directory: Path,
) -> "Loader | AnswerBatches":
    """Returns the loader of the batches after step `start`, which reads and places them on its own thread; of a run
    that learns from its own answers what draws them.
    """

    def open_loader(data: SplitBatches, program: Program) -> Loader:
        def place(batch: dict[str, np.ndarray]) -> Batch:
            supervision.read(batch)
            return program.place(batch)

        return Loader(data, start, program.part, place, program.config.data.prefetch)

    if isinstance(data, SplitBatches):
        return open_loader(data, program)
    phase = supervision.heartbeat.phase
    return _answering().begin_answering(
        program, data, start, open_loader, directory, phase
    )


def _add_chosen_hooks(loop: "Loop", directory: Path, closing: ExitStack) -> None:
    """Adds the hooks that a config asks for: those that change rows before all others, the rest behind them."""
    program = loop.program
    config = program.config
    if not isinstance(loop.loader, Loader):
        # It adds to the rows that other hooks read, and counts their tokens.
        loop.loader.newest = lambda: loop.state
        loop.data = loop.loader
        loop.hooks.insert(0, loop.loader)
    # They take counts out of the metrics before other hooks read them.
    loop.hooks[:0] = load_hooks(config)
    if config.telemetry.trace_at:
        from meshtrain.telemetry.trace import Tracer

        tracer = Tracer(
            config,
            directory,
            program.mesh,
            program.layout.table,
            loop.supervision.heartbeat.phase,
            loop.measures.leave_out,
        )
        closing.callback(tracer.close)
        loop.hooks.append(tracer)
    if config.train.gc_every:
        collection = GarbageCollection(config.train.gc_every)
        closing.callback(collection.close)
        loop.hooks.append(collection)
    if config.parallel.remat_offload:
        loop.hooks.append(OffloadCheck(program, loop.report, loop.measures.leave_out))


def _end(loop: "Loop", start: int, last: int, record: RunRecord) -> int:
    """Waits for the last save, says how the run ended, and returns its exit code."""
    heartbeat = loop.supervision.heartbeat
    evaluation = loop.evaluation
    heartbeat.phase("save")
    loop.checkpointer.wait()
    for sentence in _closing(evaluation, last, loop.checkpointer.metrics()):
        loop.report(sentence)
    # A run that lacks rows has failed, though all its steps are taken.
    if not record.finish():
        heartbeat.note("error", "rows of metrics.jsonl could not be written.")
        return FAILED
    stopped = last < loop.program.config.train.steps and not evaluation.ended
    if stopped:
        where = "before the first step"
        if last > start:
            where = f"after step {last}; its checkpoint is written"
        loop.report(f"stopped on request {where}, run again to go on.")
    heartbeat.phase("end")
    if stopped:
        return STOPPED
    return DONE


@dataclass
class Loop:
    """The steps of one process of a run."""

    program: Program
    data: "SplitBatches | AnswerBatches"
    loader: "Loader | AnswerBatches"
    evaluation: Evaluation
    checkpointer: Checkpointer
    supervision: Supervision
    measures: Measured
    report: Callable[[str], None]
    hooks: list[RunHook] = field(default_factory=list)  # called in their order
    losses: list[float] = field(default_factory=list)  # of the steps taken
    state: Any = None  # after the last step
    # by the step, and the shape of the batch
    compiled_steps: dict[tuple[TrainStep, tuple[int, ...]], jax.stages.Compiled] = (
        field(default_factory=dict)
    )

    def run(self, state: State, start: int, stop: StopSignals) -> int:
        """Takes the steps after `start`, until all are taken, evaluation ends the run, or it is asked to stop; returns
        the last step.
        """
        all_steps = self.program.config.train.steps
        step = start
        stopping = stop.requested
        # Fake devices deadlock with two steps in flight.
        synchronous = platform(self.program.mesh) == "cpu"
        # the step whose metrics are still on the devices
        pending: tuple[int, dict[str, jax.Array]] | None = None
        while step < all_steps and not stopping and not self.evaluation.ended:
            for hook in self.hooks:
                hook.before_batch(step + 1)
            batch = self.loader.next_batch(step, state)
            train_step = self.compile_step(state, batch, step)
            stop.finish_steps()
            for hook in self.hooks:
                state, batch = hook.before_step(step + 1, train_step, state, batch)
            state, metrics = train_step(state, batch)
            step += 1
            state, metrics = self.program.steps.finish(state, metrics, step)
            self.state = state
            if pending is not None:
                self.log(*pending)
            pending = step, metrics
            for hook in self.hooks:
                hook.after_step(step, train_step, metrics)
            # Asked at one moment of each step, so that all processes stop after the same one, whose state is saved.
            stopping = stop.requested
            saves = self.checkpointer.due(step) or step == all_steps or stopping
            if saves or synchronous or self.evaluation.due(step):
                self.pause(step, state, metrics, saves)
                pending = None
        if pending is not None:
            self.log(*pending)
        return step

    def pause(
        self,
        step: int,
        state: State,
        metrics: dict[str, Any],
        saves: bool,
    ) -> None:
        """Waits for a step; evaluates and saves its state where that is due, or the state is the best so far."""
        evaluated = self.evaluate(state) if self.evaluation.due(step) else {}
        eval_loss = evaluated.get("eval_loss")
        is_best = eval_loss is not None and self.evaluation.is_best(step, eval_loss)
        row = self.log(step, metrics, evaluated)
        if saves or is_best or self.evaluation.ended:
            is_kept = self.checkpointer.due(step) or is_best
            self.supervision.heartbeat.begin_save(step, is_kept)
            for hook in self.hooks:
                hook.before_save(step, state)
            self.checkpointer.save(step, state, loss=row["loss"], eval_loss=eval_loss)

    def compile_step(
        self,
        state: State,
        batch: Batch,
        step: int,
    ) -> jax.stages.Compiled:
        """Returns the program of the step that follows `step` steps, for this shape of batch.

        Compiling is reported, and does not count as a step's time.
        """
        train_step = self.program.step_after(step)
        shape = inputs(batch).shape
        key = train_step, shape
        if key not in self.compiled_steps:
            self.supervision.enter("compile", step)
            began = time.perf_counter()
            self.compiled_steps[key] = train_step.lower(state, batch).compile()
            self.program.steps.prepare()
            number = len(self.compiled_steps)
            wait_for_processes(
                f"compiled for {shape}, program {number}", COMPILE_TIMEOUT
            )
            seconds = time.perf_counter() - began
            sizes = " x ".join(map(str, shape))
            self.report(f"compiled for batches of {sizes} in {seconds:.1f} s")
            self.measures.restart()
        return self.compiled_steps[key]

    def log(
        self,
        step: int,
        metrics: dict[str, Any],
        evaluated: Mapping[str, Any] | None = None,
    ) -> Row:
        """Waits for the metrics of `step`, and hands the hooks its row, which holds those of an evaluation too."""
        self.supervision.heartbeat.phase("wait")
        config = self.program.config
        values = self.program.steps.fetch(metrics)
        self.supervision.heartbeat.took(step)
        tokens = self.data.tokens(step - 1)
        row = {"step": step, **values} | self.measures.step(tokens, self.loader.waited)
        row["padding_tokens"] = self.data.padding_tokens(step - 1)
        row |= evaluated or {}
        every = config.log.every
        due = step % every == 0 or step == config.train.steps or bool(evaluated)
        if due:
            # saves and compilations since the last logged row
            row |= self.checkpointer.metrics() | self.measures.row()
        self.losses.append(row["loss"])
        for hook in self.hooks:
            hook.after_metrics(row, due)
        return row

    def evaluate(self, state: State) -> dict[str, Any]:
        """Returns the metrics of validation, and the samples that are drawn beside them."""
        self.supervision.heartbeat.phase("wait")
        jax.block_until_ready(state)
        self.supervision.heartbeat.phase("eval")
        began = time.perf_counter()
        synchronous = platform(self.program.mesh) == "cpu"
        values = self.evaluation.measure(state.params, synchronous)
        self.measures.leave_out(time.perf_counter() - began)
        return values


class OffloadCheck(RunHook):
    """Compares gradients with and without offloaded activations on the first batch of a process; ConfigError if they
    differ.
    """

    def __init__(
        self,
        program: Program,
        report: Callable[[str], None],
        leave_out: Callable[[float], None],
    ) -> None:
        self._program = program
        self._report = report
        self._leave_out = leave_out
        self._checked = False

    def before_step(
        self,
        step: int,
        compiled: jax.stages.Compiled,
        state: State,
        batch: Batch,
    ) -> tuple[State, Batch]:
        if not self._checked:
            began = time.perf_counter()
            self._checked = True
            difference = self._program.check_offload(state, batch)
            compute = self._program.config.precision.compute
            self._report(offload.judged(difference, compute))
            self._leave_out(time.perf_counter() - began)
        return state, batch


def _opening(
    program: Program,
    data: SplitBatches,
    start: int,
    evaluation: Evaluation,
) -> Iterator[str]:
    """Yields sentences on the model, the data, what was chosen for the user, what the config asks in vain, and what is
    left to do.
    """
    config = program.config
    devices = program.mesh.devices.size
    trained = trained_text(config.model, config.lora, config.train.trainable)
    yield (
        f"{config.model.family} with {program.layout.parameters:,} parameters{trained} on {config.mesh} "
        f"({devices} {platform(program.mesh)} devices), "
        f"ZeRO-{config.parallel.zero_stage}: {size(program.state_bytes)} of state a device"
    )
    yield data.describe()
    if config.train.epochs:
        yield f"train.epochs {config.train.epochs:g}: {config.train.steps:,} steps"
    compute = config.precision.compute
    if platform(program.mesh) == "cpu" and compute != "float32":
        yield (
            f"note: JAX finds no accelerator here: CPUs stand in and compute in {compute}, far slower, which is for "
            "trying it out"
        )
    yield from chosen(config)
    # what is legal, but costs something
    costs = [*notes(config), *placement.notes(config), *program.layout.storage.notes()]
    yield from (f"note: {sentence}" for sentence in costs)
    if start >= config.train.steps:
        yield f"step {start} is taken already and train.steps is {config.train.steps}: nothing is left to do"
    elif evaluation.ended:
        yield f"{evaluation.why()}: nothing is left to do; with a larger eval.patience it goes on"
    else:
        yield from evaluation.opening()
        if start:
            yield f"going on after step {start}"


def _closing(
    evaluation: Evaluation, step: int, save: Mapping[str, float]
) -> Iterator[str]:
    """Yields a sentence on the last save, whose metrics no row has told (none: they have been), and on evaluations."""
    if save:
        megabytes = save["checkpoint_bytes"] / 1e6
        seconds = save["checkpoint_seconds"]
        blocking = save["checkpoint_blocked_seconds"]
        yield (
            f"last save: {megabytes:.1f} MB in {seconds:.2f} s, {blocking:.3f} s of them blocking"
        )
    yield from evaluation.closing(step)


callable_as(__name__, train)

if __name__ == "__main__":
    sys.exit(main())
