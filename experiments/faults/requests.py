"""Asked to stop, or killed, at every moment: importing, compiling, training, evaluating, saving, preparing."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from experiments.faults.bases import PREPARE, folder
from experiments.faults.harness import (
    PATIENCE,
    REPOSITORY,
    STEPS,
    Crash,
    Ended,
    Place,
    Running,
    Silent,
    Unclear,
    done,
    fault,
    kind,
    last_line,
    refused,
    told_or_done,
)

MANY = 3000


def stopped(result: Ended) -> None:
    """Exit code 75 and a sentence."""
    result.checked()
    if result.code != 75:
        raise Unclear(f"exit code {result.code}: {last_line(result.said)}")
    if "meshtrain: " not in result.err and "stopped on request" not in result.out:
        raise Unclear(f"no sentence: {last_line(result.said)}")


def slow(module: str, name: str, wait: float = 1.0) -> Callable[[], None]:
    """Patches a function so that it says where it is, and takes its time before it does its work."""

    def before() -> None:
        *parents, last = name.split(".")
        target: object = importlib.import_module(module)
        for parent in parents:
            target = getattr(target, parent)
        real = getattr(target, last)

        def slowly(*arguments: object, **keywords: object) -> object:
            os.write(1, b"<here>\n")
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline:
                time.sleep(0.01)
            return real(*arguments, **keywords)

        setattr(target, last, slowly)

    return before


def sent(running: Running, number: int, count: int = 1) -> Ended:
    """Sends a signal to a process that is in a function that was made slow, for the `count`-th time."""
    running.until(lambda: running.out.count("<here>") >= count)
    running.send(number)
    return running.end()


# --- in a state of the run that is made long: where, which function, and the run that is met
TIDY = ("checkpoint.keep=1", "checkpoint.keep_best=0")
EVALUATES = ("eval.every=4", "eval.batches=2")
TRIMS = ("meshtrain.run.record", "trim_metrics")
ASKED = (
    ("while compiling", ("meshtrain.train", "Loop.compiled"), (), ""),
    ("while the data is opened", ("meshtrain.train", "open_data"), (), ""),
    ("while the program is built", ("meshtrain.train", "Program"), (), ""),
    ("while restoring", ("meshtrain.checkpoint.restoring", "_check"), (), "synthetic"),
    ("while verifying", ("meshtrain.checkpoint.digests", "problems"), (), "synthetic"),
    ("in evaluation", ("meshtrain.train", "Loop.evaluate"), EVALUATES, ""),
    ("while saving", ("meshtrain.checkpoint.digests", "write"), (), ""),
    ("while committing", ("meshtrain.checkpoint.steps", "commit"), (), ""),
    ("while removing old steps", ("meshtrain.checkpoint.steps", "remove"), TIDY, ""),
    ("while metrics are trimmed", TRIMS, (), "synthetic"),
)
KILLED = (
    (
        "before digests are written",
        ("meshtrain.checkpoint.digests", "write"),
        (),
        "",
        2,
    ),
    ("before COMMIT", ("meshtrain.checkpoint.steps", "commit"), (), "", 2),
    (
        "between COMMIT and the rename",
        ("meshtrain.checkpoint.steps", "publish"),
        (),
        "",
        2,
    ),
    (
        "before an old step is removed",
        ("meshtrain.checkpoint.steps", "remove"),
        TIDY,
        "",
        1,
    ),
    ("before metrics are trimmed", TRIMS, (), "synthetic", 1),
    (
        "while its text is prepared",
        ("meshtrain.data.prepare", "_finish"),
        (),
        "text",
        1,
    ),
)
Where = tuple[str, str]


def asked(
    name: str, where: Where, settings: tuple[str, ...], base: str, number: int
) -> None:
    """Asked to stop while in that function: 75, a checkpoint of the last step, and going on gives the same losses."""

    @fault(f"{signal.Signals(number).name} {name}")
    def _(p: Place) -> None:
        if base:
            p.base(base)
        stopped(sent(p.training(*settings, before=slow(*where)), number))
        last = p.last_step()
        # With a base: nothing was trained
        if last and not (base and last == STEPS - 1):
            p.intact(last)
        done(p.train(*settings))
        p.undisturbed(base or "synthetic")


def killed(
    name: str, where: Where, settings: tuple[str, ...], base: str, count: int
) -> None:
    @fault(f"SIGKILL {name}")
    def _(p: Place) -> None:
        if base:
            p.base(base)
        if base == "text":
            shutil.rmtree(p.dir / "cache")
        sent(p.training(*settings, before=slow(*where)), signal.SIGKILL, count)
        done(p.train(*settings))
        p.undisturbed(base or "synthetic")
        p.intact(STEPS)


kind("stopped")
for row in ASKED:
    asked(*row, signal.SIGTERM)
for row in (ASKED[0], ASKED[5]):
    asked(*row, signal.SIGINT)


@fault("SIGTERM in the last step")
def last_step(p: Place) -> None:
    running = p.training(before=slow("meshtrain.checkpoint.digests", "write", 0.3))
    running.until(lambda: p.last_step() == STEPS)
    running.send(signal.SIGTERM)
    result = running.end().checked()
    if result.code not in (0, 75):
        raise Unclear(f"exit code {result.code}")
    p.undisturbed()
    p.intact(STEPS)


@fault("SIGTERM twenty times")
def many_signals(p: Place) -> None:
    running = p.training(f"train.steps={MANY}")
    running.until(lambda: p.last_step() >= 3)
    for _ in range(20):
        try:
            running.send(signal.SIGTERM)
        except ProcessLookupError:
            break
    result = running.end()
    # The second one means at once.
    if result.code not in (75, -signal.SIGTERM) or "Traceback" in result.said:
        raise Unclear(f"exit code {result.code}")
    done(p.train(f"train.steps={p.last_step() + 2}"))


kind("killed")
for row in KILLED:
    killed(*row)

kind("stopped-compiling")


def in_a_compile(number: int, after: float) -> None:
    """While the compiler itself is at work, whose call comes back late: 75 and a sentence, and no crash at the end."""

    @fault(f"{signal.Signals(number).name} {after} s into the compiler")
    def _(p: Place) -> None:
        def before() -> None:
            import jax

            jax.config.update("jax_enable_compilation_cache", False)
            slow("jax.stages", "Lowered.compile", wait=0.0)()

        settings = ("model.layers=8", "mesh.pipeline=4", "parallel.microbatches=4")
        running = p.training(*settings, "parallel.schedule=zb_h1", before=before)
        running.until(lambda: "<here>" in running.out)
        time.sleep(after)
        running.send(number)
        stopped(running.end())


for number in (signal.SIGINT, signal.SIGTERM):
    for after in (0.0, 0.3, 1.0):
        in_a_compile(number, after)

kind("other-signal")


def harmless(number: int) -> None:
    @fault(f"{signal.Signals(number).name} while training")
    def _(p: Place) -> None:
        running = p.training()
        running.until(lambda: p.last_step() >= 2)
        running.send(number)
        result = running.end()
        # The system's default, as of any program: it can be run again
        if result.code == -number:
            done(p.train())
        else:
            done(result.checked())
        p.undisturbed()


for number in (
    signal.SIGCONT,
    signal.SIGWINCH,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGURG,
):
    harmless(number)


@fault("SIGHUP while training: the terminal was closed")
def hang_up(p: Place) -> None:
    running = p.training(f"train.steps={MANY}")
    running.until(lambda: p.last_step() >= 5)
    running.send(signal.SIGHUP)
    result = running.end()
    if result.code not in (75, -signal.SIGHUP):
        raise Unclear(f"exit code {result.code}")
    done(p.train(f"train.steps={max(8, p.last_step() + 1)}"))


# --- preparing
kind("stopped-preparing")


def preparing(number: int, function: str, wait: float) -> None:
    @fault(
        f"{signal.Signals(number).name} while preparing: run again, it ends with the same shards"
    )
    def _(p: Place) -> None:
        folder(p)
        done(p.command("data", *PREPARE))
        os.rename(p.dir / "shards", p.dir / "whole")
        before = slow("meshtrain.data.prepare", function, wait)
        result = sent(
            p.start("meshtrain.data.__main__", *PREPARE, before=before), number
        )
        if number == signal.SIGTERM:
            stopped(result)
        done(p.command("data", *PREPARE))
        for name in ("manifest.json", "train-00000.tokens"):
            if (p.dir / "shards" / name).read_bytes() != (
                p.dir / "whole" / name
            ).read_bytes():
                raise Silent(f"{name} differs")


preparing(signal.SIGTERM, "read_record", 0.5)
preparing(signal.SIGKILL, "_finish", 5)


def early_command(seconds: float, module: str, *arguments: str) -> None:
    @fault(f"SIGTERM {seconds} s after the start of meshtrain.{module}")
    def _(p: Place) -> None:
        p.base("text")
        process = subprocess.Popen(
            [sys.executable, "-m", f"meshtrain.{module}", *arguments],
            cwd=p.dir,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "XDG_CACHE_HOME": str(p.dir / "cache"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        try:
            result = Ended(process.wait(PATIENCE), *process.communicate())
        except subprocess.TimeoutExpired:
            process.kill()
            raise Crash("it does not stop") from None
        if result.code == -signal.SIGTERM and "Traceback" not in result.said:
            return  # reads only: as of any program
        result.checked()
        if result.code not in (0, 75):
            raise Unclear(f"exit code {result.code}: {last_line(result.err)}")


early_command(0.2, "data", *PREPARE)
early_command(0.8, "checkpoint", "verify", "run")
early_command(0.3, "plan", "--config", "config.yaml")

# --- one of several processes
kind("rank-environment")


def environment(name: str, named: str, **env: str) -> None:
    @fault(f"a process of several whose environment {name}")
    def _(p: Place) -> None:
        address = {"JAX_COORDINATOR_ADDRESS": "localhost:1"}
        given = {f"JAX_{key.upper()}": value for key, value in env.items()}
        refused(p.train(env=address | given), named)


environment("lacks the number of processes", "JAX_NUM_PROCESSES")
environment(
    "has a number of processes that is a word",
    "JAX_NUM_PROCESSES",
    num_processes="two",
    process_id="0",
)
environment("has 0 processes", "JAX_NUM_PROCESSES", num_processes="0", process_id="0")
environment(
    "has a rank beyond the number", "JAX_PROCESS_ID", num_processes="2", process_id="2"
)
environment(
    "has an address without a port",
    "JAX_COORDINATOR_ADDRESS",
    coordinator_address="localhost",
    num_processes="1",
    process_id="0",
)


@fault("SLURM_NTASKS is a word")
def ntasks(p: Place) -> None:
    if told_or_done(p.train(env={"SLURM_NTASKS": "many"}), "SLURM_NTASKS"):
        p.undisturbed()
