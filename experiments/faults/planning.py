"""python -m meshtrain.plan: paths of clusters, what train refuses, other directories, sizes, streams."""

import os
from collections.abc import Callable
from pathlib import Path

from experiments.faults.harness import (
    Ended,
    Place,
    Silent,
    done,
    fault,
    kind,
    nothing,
    refused,
    refuses,
    told_or_done,
)

PLAN = ("plan", "--config", "config.yaml")


def plan(p: Place, *arguments: str) -> Ended:
    if not (p.dir / "config.yaml").exists():
        p.config()
    return p.command(*PLAN, *arguments)


kind("cluster-path")


def cluster(
    name: str, path: str, *words: str, make: Callable[[Path], object] = nothing
) -> None:
    command = (*PLAN, "--cluster", path)
    refuses(
        f"--cluster {name}", command, *words, arrange=lambda p: make(p.dir / "c.yaml")
    )


cluster("with a slip of the pen", "h10", "did you mean h100")
cluster("that is not there", "gone.yaml", "gone.yaml")
cluster("that is empty: ''", "", "--cluster|argument")
cluster("that is a directory", "c.yaml", "directory", make=os.mkdir)
cluster(
    "that is a link to itself",
    "c.yaml",
    "c.yaml",
    make=lambda path: path.symlink_to(path),
)
cluster(
    "that is a dangling link",
    "c.yaml",
    "c.yaml",
    make=lambda path: path.symlink_to("gone"),
)
cluster("with a NUL", "a\0.yaml")
cluster("of 5,000 characters", "x" * 5000)
cluster("../../etc/passwd", "../../../../etc/passwd", "passwd")

kind("plan-as-train")


def noted(name: str, key: str, *settings: str) -> None:
    """What training refuses on this machine may be planned for another, with a note that names the key."""

    @fault(f"plan of what train refuses: {name}")
    def _(p: Place) -> None:
        refused(p.train(*settings))
        words = (word for setting in settings for word in ("--set", setting))
        done(plan(p, *words), f"note: {key}")


noted("data.source that is not there", "data.source gone", "data.source=gone")
noted(
    "a tokenizer that is not there",
    "data.tokenizer gone.json",
    "data.tokenizer=gone.json",
)
noted("too few fake devices", "run.fake_devices 2", "mesh.data=4", "run.fake_devices=2")


@fault("plan of what train refuses: weights that are not there")
def no_weights(p: Place) -> None:
    refused(p.train("model.weights=gone"))
    refused(plan(p, "--set", "model.weights=gone"))


@fault("plan --jobs from another directory: its configs lie beside its file")
def jobs_elsewhere(p: Place) -> None:
    (p.dir / "there").mkdir()
    p.config("there/mine.yaml")
    p.file(
        "there/jobs.yaml",
        "nodes: 2\njobs:\n  - {name: a, config: mine.yaml, steps: 10}\n",
    )
    for path in ("there/jobs.yaml", str(p.dir / "there/jobs.yaml")):
        done(p.command("plan", "--jobs", path, "--cluster", "h100"))


kind("full-output")


@fault("plan on a full disk: --html is whole or not there")
def html_full(p: Place) -> None:
    (p.dir / "small").mkdir()
    p.mount(p.dir / "small", "size=64k")
    p.fill(p.dir / "small", leave=4096)
    refused(plan(p, "--html", "small/x.html"), "no space")
    if (p.dir / "small/x.html").exists():
        raise Silent("half a page is left")


kind("plan-size")


@fault("plan of a model that fits nowhere")
def too_large(p: Place) -> None:
    sizes = ("model.d_model=1048576", "model.layers=1000", "model.heads=64")
    ended = plan(
        p, "--cluster", "h100", *(word for size in sizes for word in ("--set", size))
    )
    told_or_done(ended)
    if "plan: " not in ended.err and "meshtrain: " not in ended.err:
        raise Silent("it does not say that it does not fit")


@fault("plan of numbers beyond 64 bits")
def beyond(p: Place) -> None:
    told_or_done(
        plan(p, "--set", "model.d_model=9223372036854775808", "--set", "model.heads=1")
    )


kind("stdout")


@fault("plan into a pipe that is closed")
def pipe(p: Place) -> None:
    p.config()
    ended = p.python(
        "-m", "meshtrain.plan", "--config", "config.yaml", shell="| head -1"
    )
    if "Traceback" in ended.err or ended.code != 0:
        raise Silent(ended.err)
