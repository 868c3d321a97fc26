"""Checkpoints: what else may lie among the steps, and what a step may lack; another run's; the command."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from experiments.faults.harness import (
    DAMAGE,
    LAST,
    NO_FILE,
    Place,
    Silent,
    done,
    fault,
    flip,
    goes_on,
    kind,
    nothing,
    refuses,
    resumed,
    with_settings,
)

kind("step-linked")


def linked(name: str, step: str) -> None:
    """A step that was moved to another volume, with a link in its place: it is what its name says."""

    @fault(f"{name} step is a link to where it was moved, and retention passes over it")
    def _(p: Place) -> None:
        p.base()
        os.rename(p.checkpoints / step, p.dir / "volume")
        (p.checkpoints / step).symlink_to(p.dir / "volume")
        before = p.digests(p.dir / "volume")
        for steps, after in ((8, LAST), (10, 8)):
            ended = p.train(
                "checkpoint.keep=1", "checkpoint.keep_best=0", f"train.steps={steps}"
            )
            done(ended)
            resumed(ended, after)
        p.survive(before)


linked("the newest", "6")
linked("an old", "2")

# --- what else may lie in checkpoints/
kind("step-litter")


def litter(name: str, arrange: Callable[[Path], object]) -> None:
    goes_on(
        f"in checkpoints/: {name}", lambda p: arrange(p.checkpoints), intact=(2, 4, 6)
    )


def copied(step: str, name: str) -> Callable[[Path], object]:
    return lambda root: shutil.copytree(root / step, root / name)


def half_written(root: Path) -> None:
    copied("4", "8")(root)
    (root / "8" / "COMMIT").unlink()


litter("a directory 006 beside 6", copied("6", "006"))
litter(
    "8.writing with a COMMIT, as a kill before the rename leaves it",
    copied("2", "8.writing"),
)
litter("2.damaged of an earlier run", copied("2", "2.damaged"))
litter("a FIFO 99", lambda root: os.mkfifo(root / "99"))
litter("8.removing that is there already", lambda root: (root / "8.removing").mkdir())
litter(
    "a name that is not UTF-8", lambda root: os.mkdir(os.fsencode(root) + b"/\xff\xfe")
)
litter("a step 0", lambda root: (root / "0").mkdir())
litter("the step to be written next, half written", half_written)

# --- what a step may lack
kind("step-damaged")


def array_file(p: Place) -> Path:
    return p.largest("run/checkpoints/6/arrays", "**/*")


def arrays(p: Place) -> Path:
    return p.checkpoints / "6/arrays"


def others_arrays(p: Place) -> None:
    shutil.rmtree(arrays(p))
    arrays(p).symlink_to("../4/arrays")


def damaged(name: str, arrange: Callable[[Place], object]) -> None:
    goes_on(
        f"the newest step: {name}", arrange, "damaged|cannot be read|missing", after=4
    )


for way in NO_FILE:
    damaged(f"an array file {way}", lambda p, way=way: DAMAGE[way](array_file(p)))
damaged("no arrays/", lambda p: shutil.rmtree(arrays(p)))
damaged("arrays/ that is a link to another step's", others_arrays)
goes_on(
    "an array file more than was written",
    lambda p: (arrays(p) / "stranger").write_text("x"),
)
refuses(
    "every step damaged",
    with_settings(),
    "damaged",
    "checkpoint.resume",
    base="synthetic",
    arrange=lambda p: [flip(p.checkpoints / step / "manifest.json") for step in "246"],
)

kind("commit-odd")


def sealed(change: Callable[[str], str]) -> Callable[[Place], object]:
    """A COMMIT of other words, whose digest is right."""

    def arrange(p: Place) -> None:
        path = p.checkpoints / "6/COMMIT"
        head = change(path.read_text().rpartition("the lines above")[0])
        digest = hashlib.sha256(head.encode()).hexdigest()
        path.write_text(f"{head}the lines above sha256 {digest}\n")

    return arrange


refuses(
    "a checkpoint of a later format",
    with_settings(),
    "format 99",
    base="synthetic",
    arrange=sealed(lambda head: head.replace("format 1", "format 99")),
)
damaged("a COMMIT whose words make no sense", sealed(lambda head: "no format at all\n"))

# --- resuming from another run
kind("resume-path")


def other_run(
    name: str, resume: str, *words: str, arrange: Callable[[Place], object] = nothing
) -> None:
    def renamed(p: Place) -> None:
        os.rename(p.run, p.dir / "other")
        arrange(p)

    command = with_settings(f"checkpoint.resume={resume}")
    refuses(
        f"checkpoint.resume {name}", command, *words, base="synthetic", arrange=renamed
    )


def at(name: str, make: Callable[[Path], object]) -> Callable[[Place], object]:
    return lambda p: make(p.dir / name)


other_run("names nothing", "nothing", "checkpoint.resume", "nothing")
other_run("names a file", "config.yaml", "checkpoint.resume|config.yaml")
other_run("names an empty directory", "void", "void", arrange=at("void", Path.mkdir))
other_run(
    "names a dangling link",
    "x",
    "x",
    arrange=at("x", lambda path: path.symlink_to("gone")),
)
other_run(
    "names a link to itself",
    "x",
    "x",
    arrange=at("x", lambda path: path.symlink_to("x")),
)
other_run("names a FIFO", "pipe", "pipe", arrange=at("pipe", os.mkfifo))
other_run("has a slip of the pen", "neverr", "did you mean never")
other_run("names a path of 5,000 characters", "x" * 5000, "checkpoint.resume")
other_run(
    "names a step whose manifest is gone",
    "other/checkpoints/6",
    "other/checkpoints",
    arrange=at("other/checkpoints/6/manifest.json", Path.unlink),
)


@fault(
    "another run's newest step damaged: the one before is taken, and nothing of it is renamed"
)
def of_another_run(p: Place) -> None:
    p.base()
    os.rename(p.run, p.dir / "other")
    flip(p.dir / "other/checkpoints/6/manifest.json")
    before = {str(path) for path in (p.dir / "other").rglob("*")}
    ended = p.train("checkpoint.resume=other")
    done(ended, "passed over|damaged")
    resumed(ended, 4)
    if before != {str(path) for path in (p.dir / "other").rglob("*")}:
        raise Silent("the other run was changed")


# --- the command
kind("command-path")


def commanded(
    name: str, *words: str, said: str, arrange: Callable[[Place], object] = nothing
) -> None:
    refuses(
        f"checkpoint {name}",
        ("checkpoint", *words),
        said,
        base="synthetic",
        arrange=arrange,
    )


commanded("ls of nothing", "ls", "nowhere", said="nowhere")
commanded("ls of a file", "ls", "config.yaml", said="config.yaml")
commanded(
    "ls of an empty directory",
    "ls",
    "void",
    said="void",
    arrange=at("void", Path.mkdir),
)
commanded(
    "show of a link to itself",
    "show",
    "loop",
    said="loop",
    arrange=at("loop", lambda path: path.symlink_to("loop")),
)
commanded("with a slip of the pen", "verfy", "run", said="verify")
commanded("diff with one side missing", "diff", "run", said="second")
commanded("show with a name of 300 characters", "show", "x" * 300, said="name")
commanded(
    "diff with a damaged side",
    "diff",
    "run/checkpoints/4",
    "run/checkpoints/6",
    said="damaged",
    arrange=lambda p: flip(array_file(p)),
)


kind("notebook-lock")


def notebook(name: str, spoil: Callable[[Place], Callable[[], object]]) -> None:
    """A notebook whose Checkpointer fails as it is opened can open it again: nothing keeps the lock.

    `spoil` makes it fail, and gives what mends it.
    """

    @fault(f"a notebook opens its checkpoints again, having failed with {name}")
    def _(p: Place) -> None:
        p.base()

        def call() -> int:
            from meshtrain.checkpoint import Checkpointer
            from meshtrain.config import ConfigError, load
            from meshtrain.mesh import make_mesh
            from meshtrain.step import Program

            config = load("config.yaml")
            program = Program(config, make_mesh(config))
            wrong = load("config.yaml", ["checkpoint.weights_only=true"])
            for _ in range(2):
                try:
                    Checkpointer(wrong, program)
                    return 3
                except ConfigError as error:
                    print(f"meshtrain: {error}")
            mend = spoil(p)
            try:
                Checkpointer(config, program).close()
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
            mend()
            Checkpointer(config, program).close()
            return 0

        ended = p.start("", call=call).end()
        if "in use" in ended.said:
            raise Silent("the notebook is locked out by itself")
        done(ended.checked())


def untidy(p: Place) -> Callable[[], object]:
    link = p.checkpoints / "40.writing"
    link.symlink_to("/proc/1")
    return lambda: link.unlink(missing_ok=True)


def failing(p: Place) -> Callable[[], object]:
    from meshtrain.checkpoint import steps

    real = steps.remove_leftovers

    def fails(root: Path) -> list[str]:
        raise OSError(5, "Input/output error")

    steps.remove_leftovers = fails
    return lambda: setattr(steps, "remove_leftovers", real)


notebook("a directory that cannot be tidied", untidy)
notebook("an error of the disk", failing)
