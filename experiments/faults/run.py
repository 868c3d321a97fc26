"""A run under way: files that vanish, signals at every moment, another run beside it, a config that lies in its
directory.
"""

import importlib
import os
import shutil
import signal
import time
from collections.abc import Callable

from experiments.faults.bases import PREPARE, folder
from experiments.faults.harness import (
    STEPS,
    Ended,
    Place,
    Running,
    Silent,
    done,
    failed,
    fault,
    goes_on,
    kind,
)

SIXTY = ("train.steps=60", "checkpoint.every=20")
MANY = "train.steps=3000"  # of a run that is met on its way


def begun(p: Place, *settings: str, **how: object) -> Running:
    """A long run that has written its fifth row."""
    running = p.training(*settings, **how)
    running.until(lambda: p.last_step() >= 5)
    return running


# --- what vanishes under a run
kind("vanished-while-running")


def vanishes(name: str, act: Callable[[Place], object]) -> None:
    """The run ends with an error that says so, or has all of its rows and the checkpoint of its last step."""

    @fault(f"while running: checkpoints/ is {name}")
    def _(p: Place) -> None:
        running = begun(p, *SIXTY)
        with running.frozen():
            shutil.rmtree(p.checkpoints)
            act(p)
        ended = running.end().checked()
        if ended.code:
            failed(ended, "checkpoint", codes=(1,))
        elif [row["step"] for row in p.rows()] != list(range(1, 61)):
            raise Silent(f"exit code 0, and {len(p.rows())} of 60 rows")
        else:
            p.intact(60)


vanishes("deleted", lambda p: None)
vanishes("replaced by a file", lambda p: p.checkpoints.write_text("x"))


@fault("while running: the working directory is deleted")
def working_directory(p: Place) -> None:
    (p.dir / "here").mkdir()
    running = begun(
        p,
        f"run.directory={p.run}",
        *SIXTY,
        config=p.config(),
        before=lambda: os.chdir("here"),
    )
    with running.frozen():
        (p.dir / "here").rmdir()
    done(running.end().checked())
    p.intact(20, 40, 60)


kind("run-path")


def config_link(p: Place) -> None:
    """Writing through it would replace what a person wrote."""
    p.config()
    (p.run / "config.yaml").unlink()
    (p.run / "config.yaml").symlink_to("../config.yaml")


goes_on("run.directory has a config.yaml that links to the one given", config_link)
goes_on("the config that is given is the run's own", config="run/config.yaml")


@fault("a second run that takes a running one's checkpoints as its start")
def second_from(p: Place) -> None:
    first = begun(p, MANY, "checkpoint.every=3")
    first.until(lambda: (p.checkpoints / "6").is_dir())
    with first.frozen():
        ended = p.train(
            "checkpoint.resume=run", "run.directory=second", "train.steps=4"
        )
    first.send(signal.SIGTERM)
    done(ended)
    done(first.end().checked(), code=75)


# --- signals
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


def stopped(result: Ended) -> None:
    """Exit code 75 and a sentence."""
    done(result.checked(), "meshtrain: |stopped on request", code=75)


TIDY = ("checkpoint.keep=1", "checkpoint.keep_best=0")
# A moment of the run that is made long: its name, its function, the base of the run, of how many calls it is the last.
MOMENTS = (
    ("digests are verified", "checkpoint.digests", "problems", "synthetic", 1),
    ("digests are written", "checkpoint.digests", "write", "", 2),
    ("COMMIT is written", "checkpoint.steps", "commit", "", 2),
    ("a step has its name", "checkpoint.steps", "publish", "", 2),
    ("an old step is removed", "checkpoint.steps", "remove", "", 1),
    ("metrics are trimmed", "run.record", "trim_metrics", "synthetic", 1),
    ("its text is prepared", "data.prepare", "_finish", "text", 1),
)


def at(moment: tuple[str, str, str, str, int], number: int) -> None:
    """A signal before that moment: after SIGTERM the last step is saved; and going on gives the same losses."""
    name, module, function, base, count = moment

    @fault(f"{signal.Signals(number).name} before {name}")
    def _(p: Place) -> None:
        settings = TIDY if function == "remove" else ()
        if base:
            p.base(base)
        if base == "text":
            shutil.rmtree(p.dir / "cache")
        before = slow(f"meshtrain.{module}", function)
        result = sent(p.training(*settings, before=before), number, count)
        last = p.last_step()
        if number == signal.SIGTERM:
            stopped(result)
            # With a base: nothing was trained.
            if not base or last != STEPS - 1:
                p.intact(last)
        done(p.train(*settings))
        p.undisturbed(base or "synthetic")
        p.intact(STEPS)


kind("stopped")
for moment in MOMENTS[:-1]:
    at(moment, signal.SIGTERM)
kind("killed")
for moment in MOMENTS:
    at(moment, signal.SIGKILL)
kind("other-signal")


def harmless(number: int) -> None:
    @fault(f"{signal.Signals(number).name} while training")
    def _(p: Place) -> None:
        running = begun(p)
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
kind("two-at-once")


@fault("two preparations at once into one output")
def both(p: Place) -> None:
    folder(p)
    for running in [p.start("meshtrain.data.__main__", *PREPARE) for _ in range(2)]:
        done(running.end().checked())
    done(p.command("data", "verify", "shards"))
