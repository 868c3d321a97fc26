"""Asked to stop, or killed, at every moment: importing, compiling, training, evaluating, saving, preparing."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from experiments.faults.bases import text
from experiments.faults.harness import (
    PATIENCE,
    REPOSITORY,
    STEPS,
    Crash,
    Ended,
    NotTried,
    Place,
    Silent,
    Unclear,
    done,
    fault,
    kind,
    last_line,
    told_or_done,
)

ROOM = "requests"
MANY = 3000


def new_process(p: Place, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "XDG_CACHE_HOME": str(p.dir / "cache"),
        **(env or {}),
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=p.dir,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen) -> Ended:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Crash("it does not stop") from None
    return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def stopped(result: Ended) -> None:
    """Exit code 75 and a sentence."""
    result.checked()
    if result.code != 75:
        raise Unclear(f"exit code {result.code}: {last_line(result.said)}")
    if "meshtrain: " not in result.err and "stopped on request" not in result.out:
        raise Unclear(f"no sentence: {last_line(result.said)}")


# --- before the handlers exist (point 12)
kind(
    "stopped-importing",
    "test_train.py::test_a_signal_in_the_imports_is_one_sentence_and_code_75",
    "test_cli.py::test_an_interrupt_while_a_command_imports_is_a_sentence",
)


SLOW_IMPORT = """
import importlib.abc, os, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ.get("SLOW_IMPORT"):
            os.write(1, b"<import>\\n")
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                time.sleep(0.01)
sys.meta_path.insert(0, Slow())
"""


def early(module: str, number: int) -> None:
    """The import of a module that the program needs is made slow by a sitecustomize.py of the place."""

    @fault(ROOM, f"{signal.Signals(number).name} while {module} is imported", "12")
    def _(p: Place) -> None:
        p.config(train={"steps": MANY})
        p.file("site/sitecustomize.py", SLOW_IMPORT)
        env = {"PYTHONPATH": f"{REPOSITORY}:{p.dir / 'site'}", "SLOW_IMPORT": module}
        process = new_process(p, "-m", "meshtrain.train", "--config", "config.yaml", env=env)
        assert process.stdout is not None
        if b"<import>" not in process.stdout.readline():
            process.kill()
            raise NotTried(f"the program does not import {module}")
        process.send_signal(number)
        stopped(ended(process))


for module in ("numpy", "jax", "flax", "optax", "orbax.checkpoint"):
    early(module, signal.SIGTERM)
early("jax", signal.SIGINT)
early("optax", signal.SIGINT)


# --- in a state of the run that is made long
kind("stopped")


def slow(module: str, name: str, wait: float = 1.0) -> Callable[[], None]:
    """Patches a function so that it says where it is, and takes its time before it does its work."""

    def before() -> None:
        *parents, last = name.split(".")
        target: object = None
        for choice in module.split("|"):
            target = importlib.import_module(choice) if importlib.util.find_spec(choice) else None
            for parent in parents:
                target = getattr(target, parent, None)
            if hasattr(target, last):
                break
        real = getattr(target, last)

        def slowly(*arguments: object, **keywords: object) -> object:
            os.write(1, f"<{name}>\n".encode())
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline:
                time.sleep(0.01)
            return real(*arguments, **keywords)

        setattr(target, last, slowly)

    return before


def asked(
    name: str,
    module: str,
    function: str,
    *settings: str,
    number: int = signal.SIGTERM,
    point: str = "",
    base: str = "",
) -> None:
    """Asked to stop while in that function: 75, a checkpoint of the last step, and going on gives the same losses."""

    @fault(ROOM, f"{signal.Signals(number).name} {name}", point)
    def _(p: Place) -> None:
        if base:
            p.base(base)
        running = p.training(*settings, before=slow(module, function))
        running.until(lambda: f"<{function}>" in running.out)
        running.send(number)
        stopped(running.end())
        last = p.last_step()
        if last and not (base and last == STEPS - 1):  # with a base: nothing was trained
            p.intact(last)
        done(p.train(*settings))
        p.undisturbed(base or "synthetic")


asked("while compiling", "meshtrain.train", "Loop.compiled", point="12")
asked("while compiling", "meshtrain.train", "Loop.compiled", number=signal.SIGINT, point="12")
asked("while the data is opened", "meshtrain.train", "open_data", point="12")
asked("while the program is built", "meshtrain.train", "Program", point="12")
asked("while restoring", "meshtrain.checkpoint.restoring", "_check", base="synthetic", point="12")
asked("while verifying", "meshtrain.checkpoint.digests", "problems", base="synthetic", point="12")
asked(
    "in evaluation",
    "meshtrain.train",
    "Loop.evaluate",
    "eval.every=4",
    "eval.batches=2",
    point="12",
)
asked(
    "in evaluation",
    "meshtrain.train",
    "Loop.evaluate",
    "eval.every=4",
    "eval.batches=2",
    number=signal.SIGINT,
    point="12",
)
asked("while saving", "meshtrain.checkpoint.digests", "write")
asked("while committing", "meshtrain.checkpoint.steps", "commit")
asked(
    "while removing old steps",
    "meshtrain.checkpoint.steps",
    "remove",
    "checkpoint.keep=1",
    "checkpoint.keep_best=0",
)
asked(
    "while metrics are trimmed",
    "meshtrain.run.record|meshtrain.train",
    "trim_metrics",
    base="synthetic",
)


kind("stopped-compiling")


def in_a_compile(number: int, after: float) -> None:
    """While the compiler itself is at work, whose call comes back late: 75 and a sentence, and no crash at the end."""

    @fault(ROOM, f"{signal.Signals(number).name} {after} s into the compiler")
    def _(p: Place) -> None:
        def before() -> None:
            import jax

            jax.config.update("jax_enable_compilation_cache", False)
            real = jax.stages.Lowered.compile

            def told(self: jax.stages.Lowered, *arguments: object, **keywords: object) -> object:
                os.write(1, b"<compiler>\n")
                return real(self, *arguments, **keywords)  # type: ignore[arg-type]

            jax.stages.Lowered.compile = told  # type: ignore[assignment, method-assign]

        settings = (
            "model.layers=8",
            "mesh.pipeline=4",
            "parallel.microbatches=4",
            "parallel.schedule=zb_h1",
        )
        running = p.training(*settings, before=before)
        running.until(lambda: "<compiler>" in running.out)
        time.sleep(after)
        running.send(number)
        stopped(running.end())


for number in (signal.SIGINT, signal.SIGTERM):
    for after in (0.0, 0.3, 1.0):
        in_a_compile(number, after)
kind("stopped")


@fault(ROOM, "SIGTERM in the last step")
def last_step(p: Place) -> None:
    running = p.training(before=slow("meshtrain.checkpoint.digests", "write", 0.3))
    running.until(lambda: p.last_step() == STEPS)
    running.send(signal.SIGTERM)
    result = running.end().checked()
    if result.code not in (0, 75):
        raise Unclear(f"exit code {result.code}")
    p.undisturbed()
    p.intact(STEPS)


@fault(ROOM, "SIGTERM twenty times")
def many_signals(p: Place) -> None:
    running = p.training(f"train.steps={MANY}")
    running.until(lambda: p.last_step() >= 3)
    for _ in range(20):
        try:
            running.send(signal.SIGTERM)
        except ProcessLookupError:
            break
    result = running.end()
    if (
        result.code not in (75, -signal.SIGTERM) or "Traceback" in result.said
    ):  # the second means at once
        raise Unclear(f"exit code {result.code}")
    done(p.train(f"train.steps={p.last_step() + 2}"))


def harmless(number: int) -> None:
    @fault(ROOM, f"{signal.Signals(number).name} while training")
    def _(p: Place) -> None:
        running = p.training()
        running.until(lambda: p.last_step() >= 2)
        running.send(number)
        result = running.end()
        if result.code == -number:  # the system's default, as of any program: it can be run again
            done(p.train())
        else:
            done(result.checked())
        p.undisturbed()


kind("other-signal")
for number in (signal.SIGCONT, signal.SIGWINCH, signal.SIGCHLD, signal.SIGPIPE, signal.SIGURG):
    harmless(number)


@fault(ROOM, "SIGHUP while training: the terminal was closed")
def hang_up(p: Place) -> None:
    running = p.training(f"train.steps={MANY}")
    running.until(lambda: p.last_step() >= 5)
    running.send(signal.SIGHUP)
    result = running.end()
    if result.code not in (75, -signal.SIGHUP):
        raise Unclear(f"exit code {result.code}")
    done(p.train(f"train.steps={max(8, p.last_step() + 1)}"))


def killed(
    name: str, module: str, function: str, *settings: str, base: str = "", count: int = 1
) -> None:
    @fault(ROOM, f"SIGKILL {name}")
    def _(p: Place) -> None:
        if base:
            p.base(base)
        running = p.training(*settings, before=slow(module, function))
        running.until(lambda: running.out.count(f"<{function}>") >= count)
        running.send(signal.SIGKILL)
        running.end()
        done(p.train(*settings))
        p.undisturbed(base or "synthetic")
        p.intact(STEPS)


kind("killed")
killed("before digests are written", "meshtrain.checkpoint.digests", "write", count=2)
killed("before COMMIT", "meshtrain.checkpoint.steps", "commit", count=2)
killed("between COMMIT and the rename", "meshtrain.checkpoint.steps", "publish", count=2)
killed(
    "before an old step is removed",
    "meshtrain.checkpoint.steps",
    "remove",
    "checkpoint.keep=1",
    "checkpoint.keep_best=0",
)
killed(
    "before a damaged step is renamed",
    "meshtrain.run.record|meshtrain.train",
    "trim_metrics",
    base="synthetic",
)


@fault(ROOM, "SIGKILL while the text of a run is prepared")
def killed_preparing(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    running = p.training(before=slow("meshtrain.data.prepare", "_finish"))
    running.until(lambda: "<_finish>" in running.out)
    running.send(signal.SIGKILL)
    running.end()
    done(p.train())
    p.undisturbed("text")


# --- preparing
kind("stopped-preparing")


PREPARE = ("prepare", "--input", "text", "--output", "shards", "--workers", "1")


def prepared_undisturbed(p: Place) -> None:
    """The shards that must come out, as whole/."""
    for k in range(12):
        p.file(f"text/{k:02d}.txt", text(k))
    done(p.command("data.__main__", *PREPARE))
    os.rename(p.dir / "shards", p.dir / "whole")


def goes_on_to_the_same_shards(p: Place) -> None:
    done(p.command("data.__main__", *PREPARE))
    for name in ("manifest.json", "train-00000.tokens"):
        if (p.dir / "shards" / name).read_bytes() != (p.dir / "whole" / name).read_bytes():
            raise Silent(f"{name} differs")


@fault(ROOM, "SIGTERM while preparing: run again, it goes on to the same shards")
def prepare_stopped(p: Place) -> None:
    prepared_undisturbed(p)
    running = p.start(
        "meshtrain.data.__main__",
        *PREPARE,
        before=slow("meshtrain.data.prepare", "read_record", 0.5),
    )
    running.until(lambda: "<read_record>" in running.out)
    running.send(signal.SIGTERM)
    result = running.end().checked()
    if result.code != 75:
        raise Unclear(f"exit code {result.code}: {last_line(result.err)}")
    goes_on_to_the_same_shards(p)


@fault(ROOM, "SIGKILL while preparing: run again, it goes on to the same shards")
def prepare_killed(p: Place) -> None:
    prepared_undisturbed(p)
    running = p.start(
        "meshtrain.data.__main__", *PREPARE, before=slow("meshtrain.data.prepare", "_finish", 5)
    )
    running.until(lambda: "<_finish>" in running.out)
    running.send(signal.SIGKILL)
    running.end()
    goes_on_to_the_same_shards(p)


def early_command(module: str, *arguments: str, seconds: float) -> None:
    @fault(ROOM, f"SIGTERM {seconds} s after the start of meshtrain.{module}", "12")
    def _(p: Place) -> None:
        p.base("text")
        process = new_process(p, "-m", f"meshtrain.{module}", *arguments)
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        result = ended(process)
        if result.code in (0, 75):
            return
        if result.code == -signal.SIGTERM and "Traceback" not in result.said:
            return  # reads only: as of any program
        result.checked()
        raise Unclear(f"exit code {result.code}: {last_line(result.err)}")


early_command("data", "prepare", "--input", "text", "--output", "shards", seconds=0.2)
early_command("checkpoint", "verify", "run", seconds=0.8)
early_command("plan.__main__", "--config", "config.yaml", seconds=0.3)


# --- one of two processes (point 12)
kind(
    "one-of-two",
    "checkpoint/test_faults.py::test_a_process_that_is_killed_is_reported_by_the_other_in_one_sentence",
    "checkpoint/test_faults.py::test_a_preemption_notice_to_one_of_two_processes_stops_both_with_a_checkpoint_and_code_75",
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def two(p: Place, *settings: str) -> list:
    port = free_port()
    environment = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2"}
    sets = ("mesh.data=2", "run.fake_devices=1", *settings)
    return [p.training(*sets, env={**environment, "JAX_PROCESS_ID": str(rank)}) for rank in (0, 1)]


def one_of_two(name: str, victim: int, number: int) -> None:
    @fault(ROOM, f"of two processes, {name}", "12")
    def _(p: Place) -> None:
        both = two(p, f"train.steps={MANY}", "checkpoint.every=5")
        both[0].until(lambda: p.last_step() >= 12)
        both[victim].send(number)
        results = [process.end(150) for process in both]
        if number == signal.SIGTERM:
            for result in results:
                if result.checked().code != 75:
                    raise Unclear(f"exit code {result.code}: {last_line(result.said)}")
            if not any("stopp" in result.said for result in results):
                raise Silent("neither says that it stopped")
        else:
            survivor = results[1 - victim]
            for sign in ("Traceback", "Fatal Python error"):
                if sign in survivor.said:
                    raise Crash(last_line(survivor.said))
            if survivor.code != 1:
                raise Crash(f"exit code {survivor.code}: {last_line(survivor.err)}")
            if not any(line.startswith("meshtrain: ") for line in survivor.sentences):
                raise Unclear(last_line(survivor.err))
        last = p.last_step()
        done(p.train(f"train.steps={last + 2}"))
        if [row["step"] for row in p.rows()] != list(range(1, last + 3)):
            raise Silent("not each step once")


one_of_two("the second is killed", 1, signal.SIGKILL)
one_of_two("the first is killed", 0, signal.SIGKILL)
one_of_two("the second is asked to stop", 1, signal.SIGTERM)


def environment(name: str, env: dict[str, str], *words: str) -> None:
    @fault(ROOM, f"a process of several whose environment {name}")
    def _(p: Place) -> None:
        from experiments.faults.harness import refused

        refused(p.training(env=env).end().checked(), *words)


kind("rank-environment")
address = {"JAX_COORDINATOR_ADDRESS": "localhost:1"}
environment("lacks the number of processes", address, "JAX_NUM_PROCESSES")
environment(
    "has a number of processes that is a word",
    address | {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
    "JAX_NUM_PROCESSES",
)
environment(
    "has a rank beyond the number",
    address | {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
    "JAX_PROCESS_ID",
)
environment(
    "has 0 processes",
    address | {"JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"},
    "JAX_NUM_PROCESSES",
)
environment(
    "has an address without a port",
    {"JAX_COORDINATOR_ADDRESS": "localhost", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
    "JAX_COORDINATOR_ADDRESS",
)


@fault(ROOM, "SLURM_NTASKS is a word")
def ntasks(p: Place) -> None:
    ended = p.training(env={"SLURM_NTASKS": "many"}).end().checked()
    if told_or_done(ended, "SLURM_NTASKS"):
        p.undisturbed()
