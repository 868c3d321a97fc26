"""The run directory: rows without checkpoints, files that vanish or change under a run, two runs at once."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from experiments.faults.harness import (
    LAST,
    Place,
    Silent,
    Unclear,
    done,
    fault,
    kind,
    last_line,
    refused,
    resumed,
    told_or_done,
    went_on,
)

ROOM = "run"
MANY = 3000  # steps of a run that is met on its way


def begun(p: Place, *settings: str, **how):
    """A long run that has written its fifth row."""
    running = p.training(f"train.steps={MANY}", *settings, **how)
    running.until(lambda: p.last_step() >= 5)
    return running


# --- rows without a checkpoint to go on from (point 3)


def no_way_on(name: str, arrange: Callable[[Place], object], point: str = "3") -> None:
    @fault(ROOM, name, point)
    def _(p: Place) -> None:
        p.base()
        arrange(p)
        before = p.digests(p.run)
        refused(p.train(), "checkpoint.resume|run.directory", "never|run.directory")
        p.survive(before)


def without_commits(p: Place) -> None:
    for step in (2, 4, 6):
        (p.checkpoints / str(step) / "COMMIT").unlink()


def empty_volume(p: Place) -> None:
    shutil.rmtree(p.checkpoints)
    p.checkpoints.mkdir()


kind(
    "steps-missing",
    "checkpoint/test_finding.py::test_a_run_that_had_a_checkpoint_and_has_none_is_refused_with_both_ways_out",
)
no_way_on(
    "checkpoints/ is missing, as a volume that is not mounted",
    lambda p: shutil.rmtree(p.checkpoints),
)
no_way_on("checkpoints/ is empty, though metrics.jsonl has rows", empty_volume)
no_way_on("no step has its COMMIT", without_commits)
no_way_on("checkpoints/ was renamed", lambda p: os.rename(p.checkpoints, p.run / "checkpoints-old"))


kind("resume-never")


@fault(ROOM, "resume: never sets the rows and checkpoints before aside", "3")
def never(p: Place) -> None:
    p.base()
    before = p.digests(p.metrics, p.checkpoints)
    ended = p.train("checkpoint.resume=never")
    done(ended, "never|earlier")
    resumed(ended, 0)
    p.survive(before)
    p.undisturbed()


@fault(ROOM, "resume: never, with rows but without checkpoints/", "3")
def never_without(p: Place) -> None:
    p.base()
    shutil.rmtree(p.checkpoints)
    before = p.digests(p.metrics)
    done(p.train("checkpoint.resume=never"), "never|earlier")
    p.survive(before)
    p.undisturbed()


@fault(ROOM, "resume: never, twice, beside an earlier-1 that is a file")
def never_twice(p: Place) -> None:
    p.base()
    (p.run / "earlier-1").write_text("mine")
    before = p.digests(p.metrics, p.checkpoints, p.run / "earlier-1")
    for _ in range(2):
        done(p.train("checkpoint.resume=never"), "never|earlier")
    p.survive(before)
    p.undisturbed()


@fault(ROOM, "killed before its first checkpoint: the rows are kept or the way on is told", "3")
def killed_early(p: Place) -> None:
    running = p.training("checkpoint.every=0", f"train.steps={MANY}")
    running.until(lambda: p.last_step() >= 3)
    running.send(signal.SIGKILL)
    running.end()
    before = p.digests(p.metrics)
    ended = p.train()
    if ended.code == 0:
        p.undisturbed()
        p.survive(before)
    else:
        refused(ended, "run.directory|checkpoint.resume")
        p.survive(before)


# --- what vanishes under a run (point 6)
kind("vanished-while-running")


def vanishes(name: str, act: Callable[[Place], object], *words: str, point: str = "") -> None:
    """The run ends with an error that says so, or goes on having said so; never with exit code 0 and its rows gone."""

    @fault(ROOM, f"while running: {name}", point)
    def _(p: Place) -> None:
        running = begun(p, "train.steps=60", "checkpoint.every=20")
        with running.frozen():
            seen = p.last_step()
            act(p)
        ended = running.end().checked()
        steps = [row["step"] for row in p.rows()]
        if ended.code == 0:
            if steps != list(range(1, 61)):
                raise Silent(
                    f"exit code 0, and metrics.jsonl has {len(steps)} of 60 rows (there were {seen})"
                )
            p.intact(60)
            return
        if ended.code != 1:
            raise Unclear(f"exit code {ended.code}: {last_line(ended.err)}")
        if not ended.sentences or not all(
            line.startswith("meshtrain: ") for line in ended.sentences
        ):
            raise Unclear(last_line(ended.err))
        if words and not any(word in ended.err.lower() for word in words):
            raise Unclear(last_line(ended.err))


def remake(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


vanishes("the run directory is deleted", lambda p: shutil.rmtree(p.run), "run", point="6")
vanishes(
    "the run directory is deleted and made again, empty", lambda p: remake(p.run), "run", point="6"
)
vanishes(
    "the run directory is renamed", lambda p: os.rename(p.run, p.dir / "renamed"), "run", point="6"
)
vanishes("metrics.jsonl is deleted", lambda p: p.metrics.unlink(), "metrics", point="6")
vanishes(
    "metrics.jsonl is renamed, as log rotation does",
    lambda p: os.rename(p.metrics, p.run / "metrics.jsonl.1"),
    "metrics",
)
vanishes(
    "metrics.jsonl is replaced by a copy of itself",
    lambda p: p.file("run/new", p.metrics.read_bytes()).rename(p.metrics),
    "metrics",
)
vanishes("checkpoints/ is deleted", lambda p: shutil.rmtree(p.checkpoints), "checkpoint")
vanishes(
    "checkpoints/ is replaced by a file",
    lambda p: (shutil.rmtree(p.checkpoints), p.checkpoints.write_text("x")),
    "checkpoint",
)
vanishes("config.yaml is deleted", lambda p: (p.run / "config.yaml").unlink())
vanishes(".lock is deleted", lambda p: (p.run / ".lock").unlink())


@fault(ROOM, "while running: the working directory is deleted")
def working_directory(p: Place) -> None:
    (p.dir / "here").mkdir()
    running = begun(
        p,
        f"run.directory={p.run}",
        "train.steps=60",
        "checkpoint.every=20",
        config=p.config(),
        before=lambda: os.chdir("here"),
    )
    with running.frozen():
        (p.dir / "here").rmdir()
    done(running.end().checked())
    p.intact(20, 40, 60)


@fault(ROOM, "while running: .lock is deleted, and a second run starts", "")
def stolen_lock(p: Place) -> None:
    first = begun(p, "train.steps=100", "checkpoint.every=50")
    with first.frozen():
        (p.run / ".lock").unlink()
        second = p.train("train.steps=20", "checkpoint.every=50")
    result = first.end().checked()
    if second.code == 0 and result.code == 0:
        if [row["step"] for row in p.rows()] != list(range(1, 101)):
            raise Silent("two runs wrote into one directory")
        return
    if second.code:
        refused(second, "in use")
    else:
        refused(result, "lock|another", code=1)


@fault(ROOM, "while running: metrics.jsonl is copied and truncated, as log rotation does")
def copied_and_truncated(p: Place) -> None:
    running = begun(p, "train.steps=60", "checkpoint.every=20")
    with running.frozen():
        seen = [row["step"] for row in p.rows()]
        os.truncate(p.metrics, 0)
    done(running.end().checked())
    if seen + [row["step"] for row in p.rows()] != list(range(1, 61)):
        raise Silent("rows are lost between the copy and the file")


# --- metrics.jsonl, found damaged at a resume


def metrics_file(
    name: str, act: Callable[[Place], object], refuses: bool = False, point: str = ""
) -> None:
    @fault(ROOM, f"metrics.jsonl {name}, at a resume", point)
    def _(p: Place) -> None:
        p.base()
        act(p)
        before = p.digests(p.checkpoints)
        ended = p.train()
        if refuses or ended.code:
            refused(ended, "metrics.jsonl", code=ended.code if ended.code == 1 else 2)
        else:
            resumed(ended, LAST)
            p.undisturbed()
        p.survive(before)


def append(content: bytes) -> Callable[[Place], object]:
    return lambda p: p.metrics.write_bytes(p.metrics.read_bytes() + content)


def instead(
    path: Callable[[Place], Path], make: Callable[[Path], object]
) -> Callable[[Place], object]:
    def act(p: Place) -> None:
        path(p).unlink()
        make(path(p))

    return act


def linked(p: Place) -> None:
    os.rename(p.metrics, p.dir / "rows")
    p.metrics.symlink_to(p.dir / "rows")


kind(
    "metrics-damaged",
    "run/test_rows.py::test_a_torn_last_row_is_dropped_even_if_its_step_counts",
    "run/test_rows.py::test_a_link_to_the_rows_is_followed",
    "run/test_directory.py::test_metrics_that_are_no_file_are_refused",
)
metrics_file("ends in half a row", append(b'{"step": 8, "lo'))
metrics_file("ends in zeros, as a crash of the machine leaves them", append(bytes(4096)))
metrics_file("ends in bytes that are not UTF-8", append(b"\xff\xfe\n"))
metrics_file("has a row of a list", append(b"[1, 2]\n"))
metrics_file("has a row whose step is a word", append(b'{"step": "six"}\n'))
metrics_file("has a row whose step is null", append(b'{"step": null, "loss": 1}\n'))
metrics_file("has a row nested 100,000 deep", append(b"[" * 100_000 + b"\n"))
metrics_file("is a directory", instead(lambda p: p.metrics, Path.mkdir), refuses=True)
metrics_file("is a FIFO", instead(lambda p: p.metrics, os.mkfifo), refuses=True)
metrics_file(
    "is a link to itself",
    instead(lambda p: p.metrics, lambda path: path.symlink_to(path)),
    refuses=True,
)
metrics_file("is a link to a file elsewhere", linked)
kind("metrics-damaged")
metrics_file(
    "has a row with a number of 10,000 digits", append(b'{"step": ' + b"9" * 10_000 + b"}\n")
)
metrics_file(
    "has Windows line ends",
    lambda p: p.metrics.write_bytes(p.metrics.read_bytes().replace(b"\n", b"\r\n")),
)


@fault(ROOM, "metrics.jsonl has every row twice, at a resume")
def rows_twice(p: Place) -> None:
    p.base()
    p.metrics.write_bytes(p.metrics.read_bytes() * 2)
    if told_or_done(p.train(), "metrics"):
        p.undisturbed()


def rows_left(name: str, keep: Callable[[list[bytes]], list[bytes]], *steps: int) -> None:
    """Nothing can bring lost rows back; what is there must stay, and the rest be right."""

    @fault(ROOM, f"metrics.jsonl {name}")
    def _(p: Place) -> None:
        p.base()
        rows = keep(p.metrics.read_bytes().splitlines(keepends=True))
        p.metrics.unlink()
        if rows:
            p.metrics.write_bytes(b"".join(rows))
        if told_or_done(p.train(), "metrics") and [row["step"] for row in p.rows()] != list(steps):
            raise Silent(f"steps {[row['step'] for row in p.rows()]}")


rows_left(
    "has lost rows in the middle, at a resume",
    lambda rows: rows[:2] + rows[3:],
    1,
    2,
    4,
    5,
    6,
    7,
    8,
)
rows_left("is missing, though checkpoints are there", lambda rows: [], 7, 8)


# --- the directory itself
kind("run-path")


def place_of_run(
    name: str,
    arrange: Callable[[Place], object],
    *words: str,
    setting: str = "run",
    refuses: bool = True,
    point: str = "",
) -> None:
    @fault(ROOM, f"run.directory {name}", point)
    def _(p: Place) -> None:
        arrange(p)
        ended = p.train(f"run.directory={setting}")
        if refuses:
            refused(ended, "run.directory", *words)
        else:
            done(ended)


place_of_run("is a file", lambda p: p.file("run", "x"))
place_of_run("is a dangling link", lambda p: p.run.symlink_to("/nonexistent/place"))
place_of_run("is a link to itself", lambda p: p.run.symlink_to("run"), point="13")
place_of_run("is a FIFO", lambda p: os.mkfifo(p.run))
place_of_run("is /dev/null", lambda p: None, setting="/dev/null", point="13")
place_of_run("lies under a file", lambda p: p.file("file", "x"), setting="file/run")
place_of_run("has a name of 300 characters", lambda p: None, setting="x" * 300)
place_of_run("is a path of 5,000 characters", lambda p: None, setting="y/" * 2500, point="13")
place_of_run("is /proc/nowhere", lambda p: None, setting="/proc/nowhere")
place_of_run("has a NUL in it", lambda p: None, setting='"run\\0x"', point="11")
place_of_run(
    "has half of a surrogate pair in it", lambda p: None, setting='"run\\ud800"', point="11"
)
place_of_run(
    "has blanks, quotes and an emoji", lambda p: None, setting='"a b\'\\"😀"', refuses=False
)
place_of_run("is the directory of the config file", lambda p: None, setting=".", refuses=False)
place_of_run(
    "has checkpoints that is a file", lambda p: p.file("run/checkpoints", "x"), refuses=True
)
place_of_run(
    "has a .lock that is a directory", lambda p: (p.run / ".lock").mkdir(parents=True), refuses=True
)


for setting in (
    "run.directory",
    "data.source",
    "data.tokenizer",
    "checkpoint.resume",
    "model.weights",
):

    @fault(ROOM, f"{setting} has characters that turn the direction of a line")
    def _(p: Place, setting: str = setting) -> None:
        ended = p.train(f'{setting}="a\\u202eb"')
        if "\u202e" in ended.said:
            raise Unclear(f"printed as they are: {last_line(ended.said)!a}")
        told_or_done(ended)


@fault(ROOM, "run.directory has checkpoints that is a link to another volume")
def checkpoints_elsewhere(p: Place) -> None:
    p.base()
    os.rename(p.checkpoints, p.dir / "volume")
    p.checkpoints.symlink_to(p.dir / "volume")
    ended = p.train()
    went_on(p, ended)
    p.intact(2, 4, 6, 8)


@fault(ROOM, "run.directory has a config.yaml that is a directory")
def config_directory(p: Place) -> None:
    p.base()
    (p.run / "config.yaml").unlink()
    (p.run / "config.yaml").mkdir()
    before = p.digests(p.checkpoints)
    refused(p.train(), "config.yaml")
    p.survive(before)


@fault(ROOM, "run.directory has a config.yaml that is a link to the one that is given")
def config_link(p: Place) -> None:
    """Writing through it would replace what a person wrote."""
    p.base()
    (p.run / "config.yaml").unlink()
    (p.run / "config.yaml").symlink_to("../config.yaml")
    before = p.digests(p.dir / "config.yaml")
    done(p.train())
    p.survive(before)


@fault(ROOM, "the config that is given is the run's own config.yaml")
def config_own(p: Place) -> None:
    p.base()
    went_on(p, p.train(config="run/config.yaml"))


# --- two at once
kind("two-at-once")


def second(name: str, setting: str = "run.directory=run") -> None:
    @fault(ROOM, f"a second run in the directory{name}")
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


@fault(ROOM, "a second run that takes a running one's checkpoints as its start")
def second_from(p: Place) -> None:
    first = begun(p, "checkpoint.every=3")
    first.until(lambda: (p.checkpoints / "6").is_dir())
    with first.frozen():
        ended = p.train("checkpoint.resume=run", "run.directory=second", "train.steps=4")
    first.send(signal.SIGTERM)
    done(ended)
    done(first.end().checked(), code=75)


kind("leftovers")


@fault(ROOM, "the lock file of a process that was killed")
def stale_lock(p: Place) -> None:
    p.base()
    (p.run / ".lock").write_text("process 1 on elsewhere")
    went_on(p, p.train())


@fault(ROOM, "leftovers of killed processes: .writable-1, .metrics.jsonl.abc, .config.yaml.abc")
def leftovers(p: Place) -> None:
    p.base()
    for name in (".writable-1", ".metrics.jsonl.abc", ".config.yaml.abc"):
        (p.run / name).write_text("x")
    went_on(p, p.train())


kind("run-over")


def over(name: str, *settings: str) -> None:
    @fault(ROOM, name)
    def _(p: Place) -> None:
        p.base(interrupted=False)
        before = p.digests(p.checkpoints, p.metrics)
        done(p.train(*settings), "nothing is left to do")
        p.survive(before)


over("nothing left to do: a run that is over is started again")
over("fewer steps than are taken already", "train.steps=3")
