"""The run directory: files that vanish or change under a run, odd rows, odd paths, two runs at once."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from experiments.faults.harness import (
    LAST,
    Place,
    Running,
    Silent,
    Unclear,
    done,
    failed,
    fault,
    goes_on,
    instead,
    kind,
    last_line,
    nothing,
    refused,
    refuses,
    resumed,
    told_or_done,
    went_on,
    with_settings,
)

MANY = 3000  # steps of a run that is met on its way
SIXTY = ("train.steps=60", "checkpoint.every=20")


def begun(p: Place, *settings: str, **how: object) -> Running:
    """A long run that has written its fifth row."""
    running = p.training(f"train.steps={MANY}", *settings, **how)
    running.until(lambda: p.last_step() >= 5)
    return running


def steps(p: Place) -> list[int]:
    return [row["step"] for row in p.rows()]


# --- begun anew
kind("resume-never")


def never(name: str, arrange: Callable[[Place], object], times: int = 1) -> None:
    """What was there is set aside, and said so."""

    @fault(f"resume: never, {name}")
    def _(p: Place) -> None:
        p.base()
        arrange(p)
        before = p.digests(p.metrics, p.checkpoints, p.run / "earlier-1")
        for _ in range(times):
            ended = p.train("checkpoint.resume=never")
            done(ended, "never|earlier")
            resumed(ended, 0)
        p.survive(before)
        p.undisturbed()


never("with rows and checkpoints", nothing)
never("with rows but without checkpoints/", lambda p: shutil.rmtree(p.checkpoints))
never(
    "twice, beside an earlier-1 that is a file",
    lambda p: p.file("run/earlier-1", "mine"),
    2,
)


@fault("killed before its first checkpoint: the rows are kept or the way on is told")
def killed_early(p: Place) -> None:
    running = p.training("checkpoint.every=0", f"train.steps={MANY}")
    running.until(lambda: p.last_step() >= 3)
    running.send(signal.SIGKILL)
    running.end()
    before = p.digests(p.metrics)
    if told_or_done(p.train(), "run.directory|checkpoint.resume"):
        p.undisturbed()
    p.survive(before)


# --- what vanishes under a run
kind("vanished-while-running")


def vanishes(name: str, act: Callable[[Place], object], *words: str) -> None:
    """The run ends with an error that says so, or goes on having said so; never with exit code 0 and its rows gone."""

    @fault(f"while running: {name}")
    def _(p: Place) -> None:
        running = begun(p, *SIXTY)
        with running.frozen():
            seen = p.last_step()
            act(p)
        ended = running.end().checked()
        if ended.code:
            failed(ended, *words, codes=(1,))
            return
        if steps(p) != list(range(1, 61)):
            raise Silent(
                f"exit code 0, and {len(steps(p))} of 60 rows (there were {seen})"
            )
        p.intact(60)


def remake(p: Place) -> None:
    shutil.rmtree(p.run)
    p.run.mkdir()


def no_directory(p: Place) -> None:
    shutil.rmtree(p.checkpoints)
    p.checkpoints.write_text("x")


def itself(p: Place) -> None:
    p.file("run/new", p.metrics.read_bytes()).rename(p.metrics)


vanishes("the run directory is deleted", lambda p: shutil.rmtree(p.run), "run")
vanishes("the run directory is deleted and made again, empty", remake, "run")
vanishes(
    "the run directory is renamed", lambda p: p.run.rename(p.dir / "renamed"), "run"
)
vanishes("metrics.jsonl is deleted", lambda p: p.metrics.unlink(), "metrics")
vanishes(
    "metrics.jsonl is renamed", lambda p: p.metrics.rename(p.run / "rows"), "metrics"
)
vanishes("metrics.jsonl is replaced by a copy of itself", itself, "metrics")
vanishes(
    "checkpoints/ is deleted", lambda p: shutil.rmtree(p.checkpoints), "checkpoint"
)
vanishes("checkpoints/ is replaced by a file", no_directory, "checkpoint")
vanishes("config.yaml is deleted", lambda p: (p.run / "config.yaml").unlink())
vanishes(".lock is deleted", lambda p: (p.run / ".lock").unlink())


@fault("while running: the working directory is deleted")
def working_directory(p: Place) -> None:
    (p.dir / "here").mkdir()
    before = lambda: os.chdir("here")
    running = begun(
        p, f"run.directory={p.run}", *SIXTY, config=p.config(), before=before
    )
    with running.frozen():
        (p.dir / "here").rmdir()
    done(running.end().checked())
    p.intact(20, 40, 60)


@fault("while running: .lock is deleted, and a second run starts")
def stolen_lock(p: Place) -> None:
    first = begun(p, "train.steps=100", "checkpoint.every=50")
    with first.frozen():
        (p.run / ".lock").unlink()
        second = p.train("train.steps=20", "checkpoint.every=50")
    result = first.end().checked()
    if second.code:
        refused(second, "in use")
    elif result.code:
        refused(result, "lock|another", code=1)
    elif steps(p) != list(range(1, 101)):
        raise Silent("two runs wrote into one directory")


@fault("while running: metrics.jsonl is copied and truncated, as log rotation does")
def copied_and_truncated(p: Place) -> None:
    running = begun(p, *SIXTY)
    with running.frozen():
        seen = steps(p)
        os.truncate(p.metrics, 0)
    done(running.end().checked())
    if seen + steps(p) != list(range(1, 61)):
        raise Silent("rows are lost between the copy and the file")


# --- metrics.jsonl, found damaged at a resume
kind("metrics-damaged")


def metrics_file(name: str, change: Callable[[bytes], bytes], *left: int) -> None:
    """Refused by its name; or the run goes on, and ends with these rows, or as if nothing had been.

    Nothing can bring lost rows back; what is there must stay, and the rest be right.
    """

    @fault(f"metrics.jsonl {name}, at a resume")
    def _(p: Place) -> None:
        p.base()
        rows = change(p.metrics.read_bytes())
        p.metrics.unlink()
        if rows:
            p.metrics.write_bytes(rows)
        before = p.digests(p.checkpoints)
        ended = p.train()
        if told_or_done(ended, "metrics"):
            resumed(ended, LAST)
            if not left:
                p.undisturbed()
            elif steps(p) != list(left):
                raise Silent(f"steps {steps(p)}")
        p.survive(before)


def without(rows: bytes, at: int) -> bytes:
    lines = rows.splitlines(keepends=True)
    return b"".join(lines[:at] + lines[at + 1 :])


metrics_file(
    "has a number of 10,000 digits", lambda x: x + b'{"step": ' + b"9" * 10_000 + b"}\n"
)
metrics_file("has Windows line ends", lambda x: x.replace(b"\n", b"\r\n"))
metrics_file("has every row twice", lambda x: x * 2)
metrics_file(
    "has lost a row in the middle", lambda x: without(x, 2), 1, 2, 4, 5, 6, 7, 8
)
metrics_file("is missing, though checkpoints are there", lambda x: b"", 7, 8)

# --- the directory itself
kind("run-path")


def path(
    name: str, setting: str = "run", arrange: Callable[[Place], object] = nothing
) -> None:
    command = with_settings(f"run.directory={setting}")
    refuses(f"run.directory {name}", command, "run.directory", arrange=arrange)


path("is a file", arrange=lambda p: p.file("run", "x"))
path("is a dangling link", arrange=lambda p: p.run.symlink_to("/nonexistent/place"))
path("is a link to itself", arrange=lambda p: p.run.symlink_to("run"))
path("is a FIFO", arrange=lambda p: os.mkfifo(p.run))
path("has checkpoints that is a file", arrange=lambda p: p.file("run/checkpoints", "x"))
path(
    "has a .lock that is a directory",
    arrange=lambda p: (p.run / ".lock").mkdir(parents=True),
)
path("is /dev/null", "/dev/null")
path("lies under a file", "config.yaml/run")
path("has a name of 300 characters", "x" * 300)
path("is a path of 5,000 characters", "y/" * 2500)
path("is /proc/nowhere", "/proc/nowhere")
path("has a NUL in it", '"run\\0x"')
path("has half of a surrogate pair in it", '"run\\ud800"')


def taken(name: str, setting: str) -> None:
    @fault(f"run.directory {name}")
    def _(p: Place) -> None:
        done(p.train(f"run.directory={setting}"))


taken("has blanks, quotes and an emoji", '"a b\'\\"😀"')
taken("is the directory of the config file", ".")


def turned(key: str) -> None:
    @fault(f"{key} has characters that turn the direction of a line")
    def _(p: Place) -> None:
        ended = p.train(f'{key}="a\\u202eb"')
        if "\u202e" in ended.said:
            raise Unclear(f"printed as they are: {last_line(ended.said)!a}")
        told_or_done(ended)


for key in (
    "run.directory",
    "data.source",
    "data.tokenizer",
    "checkpoint.resume",
    "model.weights",
):
    turned(key)


def elsewhere(p: Place) -> None:
    os.rename(p.checkpoints, p.dir / "volume")
    p.checkpoints.symlink_to(p.dir / "volume")


def other_config(make: Callable[[Path], object]) -> Callable[[Place], object]:
    return lambda p: instead(make)(p.run / "config.yaml")


goes_on(
    "run.directory has checkpoints that is a link to a volume",
    elsewhere,
    intact=(2, 4, 6),
)
refuses(
    "run.directory has a config.yaml that is a directory",
    with_settings(),
    "config.yaml",
    base="synthetic",
    arrange=other_config(Path.mkdir),
)


@fault("run.directory has a config.yaml that is a link to the one that is given")
def config_link(p: Place) -> None:
    """Writing through it would replace what a person wrote."""
    p.base()
    other_config(lambda path: path.symlink_to("../config.yaml"))(p)
    before = p.digests(p.dir / "config.yaml")
    done(p.train())
    p.survive(before)


@fault("the config that is given is the run's own config.yaml")
def config_own(p: Place) -> None:
    p.base()
    went_on(p, p.train(config="run/config.yaml"))


# --- two at once
kind("two-at-once")


def second(name: str, setting: str = "run.directory=run") -> None:
    @fault(f"a second run in the directory{name}")
    def _(p: Place) -> None:
        first = begun(p)
        (p.dir / "link").symlink_to("run")
        with first.frozen():
            before = p.digests(p.checkpoints, p.metrics)
            ended = p.train(setting)
            p.survive(before)
        first.send(signal.SIGTERM)
        refused(ended, "in use")
        done(first.end().checked(), code=75)


second("")
second(", by another path", "run.directory=link")
second(", with resume: never", "checkpoint.resume=never")


@fault("a second run that takes a running one's checkpoints as its start")
def second_from(p: Place) -> None:
    first = begun(p, "checkpoint.every=3")
    first.until(lambda: (p.checkpoints / "6").is_dir())
    with first.frozen():
        ended = p.train(
            "checkpoint.resume=run", "run.directory=second", "train.steps=4"
        )
    first.send(signal.SIGTERM)
    done(ended)
    done(first.end().checked(), code=75)


kind("leftovers")


def left(*names: str) -> Callable[[Place], object]:
    return lambda p: [p.file(f"run/{name}", "process 1 on elsewhere") for name in names]


goes_on("the lock file of a process that was killed", left(".lock"))
goes_on(
    "leftovers of killed processes",
    left(".writable-1", ".metrics.jsonl.abc", ".config.yaml.abc"),
)

kind("run-over")


def over(name: str, *settings: str) -> None:
    @fault(name)
    def _(p: Place) -> None:
        p.base(interrupted=False)
        before = p.digests(p.checkpoints, p.metrics)
        done(p.train(*settings), "nothing is left to do")
        p.survive(before)


over("nothing left to do: a run that is over is started again")
over("fewer steps than are taken already", "train.steps=3")
