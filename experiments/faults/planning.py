"""python -m meshtrain.plan: cluster files, tables of schedules, targets, files to write."""

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
    refused,
    told_or_done,
)

ROOM = "planning"
# A cluster whose every figure is given.
CPU = """name: mine
nodes: 1
devices_per_node: 2
shared: true
topology: flat
accelerator:
  name: cpu
  memory: 16
  bandwidth: 33
  peak: {float32: 0.45, bfloat16: 0.44, float16: 0.44}
links:
  node: {devices: 2, latency: 7.4e-5, bandwidth: 21}
"""


def plan(p: Place, *arguments: str) -> Ended:
    if not (p.dir / "config.yaml").exists():
        p.config()
    return p.command("plan.__main__", "--config", "config.yaml", *arguments)


# --- cluster files


def cluster(name: str, text: str | bytes, *words: str, point: str = "") -> None:
    @fault(ROOM, f"a cluster file {name}", point)
    def _(p: Place) -> None:
        p.file("c.yaml", text)
        ended = plan(p, "--cluster", "c.yaml")
        refused(ended, *words)
        if name == "that is empty" and "mesh:" in ended.err:
            raise Silent(f"it suggests a mesh: {ended.err}")


def altered(old: str, new: str) -> str:
    assert old in CPU
    return CPU.replace(old, new)


kind(
    "cluster-file",
    "cluster/test_cluster.py::test_a_bad_description_is_one_sentence_with_what_is_legal",
    "cluster/test_cluster.py::test_an_empty_description_is_told_what_it_needs_and_that_is_enough",
    "cluster/test_cluster.py::test_an_empty_description_is_told_what_it_needs_and_that_is_enough",
    "test_config.py::test_bad_input_is_refused_in_one_sentence",
)
cluster("that is empty", "", "c.yaml", point="13")
cluster("that is a list", "- 1\n", "mapping")
cluster("that is not UTF-8", b"\xff\xfe", "UTF-8|text")
cluster("nested 3,000 deep", "a: " + "[" * 3000 + "]" * 3000, point="11")
cluster("with a list as key", "? [a]\n: 1\n", point="13")
cluster("with a key that there is not", altered("nodes: 1", "nods: 1"), "did you mean nodes")
cluster("with no nodes", altered("nodes: 1", "nodes: 0"), "nodes", "at least 1")
cluster(
    "with nodes of 5,000 digits", altered("nodes: 1", "nodes: " + "9" * 5000), "nodes", point="13"
)
cluster(
    "with .nan as bandwidth", altered("bandwidth: 33", "bandwidth: .nan"), "bandwidth", point="13"
)
cluster("with .inf as memory", altered("memory: 16", "memory: .inf"), "memory", point="13")
cluster("with memory below zero", altered("memory: 16", "memory: -1"), "memory")
cluster("with a link of no bandwidth", altered("bandwidth: 21", "bandwidth: 0"), "bandwidth")
cluster(
    "with an accelerator that there is not",
    "accelerator: {name: h1000}\n",
    "did you mean h100|accelerator.name",
)
cluster(
    "with links that shrink",
    "accelerator: {name: h100}\nlinks:\n  node: {devices: 8, bandwidth: 1}\n  rail: {devices: 4, bandwidth: 1}\n",
    "grow|rail",
)
cluster(
    "with a topology that there is not",
    altered("topology: flat", "topology: flt"),
    "did you mean flat",
)
cluster(
    "with shared that is neither true nor false",
    altered("shared: true", "shared: perhaps"),
    "shared",
)
cluster("with a bracket left open", "accelerator: {name: h100\n", "YAML")


def cluster_path(
    name: str, arrange: Callable[[Place], object], path: str, *words: str, point: str = ""
) -> None:
    @fault(ROOM, f"--cluster {name}", point)
    def _(p: Place) -> None:
        arrange(p)
        refused(plan(p, "--cluster", path), *words)


kind("cluster-path")
cluster_path("with a slip of the pen", lambda p: None, "h10", "did you mean h100")
cluster_path("that is not there", lambda p: None, "gone.yaml", "gone.yaml")
cluster_path("that is empty: ''", lambda p: None, "", "--cluster|argument")
cluster_path("that is a directory", lambda p: (p.dir / "d.yaml").mkdir(), "d.yaml", "directory")
cluster_path(
    "that is a link to itself",
    lambda p: (p.dir / "l.yaml").symlink_to("l.yaml"),
    "l.yaml",
    "l.yaml",
    point="13",
)
cluster_path(
    "that is a dangling link",
    lambda p: (p.dir / "l.yaml").symlink_to("gone"),
    "l.yaml",
    "l.yaml",
    point="13",
)
cluster_path("with a NUL", lambda p: None, "a\0.yaml", point="11")
cluster_path("of 5,000 characters", lambda p: None, "x" * 5000, point="13")
cluster_path("../../etc/passwd", lambda p: None, "../../../../etc/passwd", "passwd")


# --- a schedule's table (point 11)
kind(
    "schedule-table",
    "schedule/test_table.py::test_csv_errors_name_row_column_and_what_is_legal",
    "schedule/test_table.py::test_what_is_no_table_is_one_sentence",
    "plan/test_plan_command.py::test_every_table_that_is_wrong_is_one_sentence_and_code_2",
)


def legal_table(p: Place) -> str:
    """A table that the program itself writes, for 2 stages and 2 microbatches."""
    from meshtrain.schedule import generators

    return generators.make_table("1f1b", 2, 2).to_csv()


def table(name: str, text: Callable[[Place], str | bytes], *words: str, point: str = "11") -> None:
    def arrange(p: Place) -> None:
        p.file("t.csv", text(p))
        p.config(mesh={"pipeline": 2}, parallel={"schedule": "t.csv", "microbatches": 2})

    @fault(ROOM, f"a schedule's CSV {name}: plan", point)
    def _(p: Place) -> None:
        arrange(p)
        refused(plan(p), *words)

    @fault(ROOM, f"a schedule's CSV {name}: train", point)
    def _(p: Place) -> None:
        arrange(p)
        refused(p.train(), *words)


table("that is empty", lambda p: "")
table("that is a line of words", lambda p: "these are words\n")
table("that is not UTF-8", lambda p: b"\xff\xfe\x00")
table("with NULs", lambda p: b"\0\0\0\n")
table("cut in half", lambda p: legal_table(p)[: len(legal_table(p)) // 2])
table("without its last row", lambda p: "\n".join(legal_table(p).splitlines()[:-1]) + "\n")
table("with its first two rows swapped", lambda p: swapped(legal_table(p)))
table("with every row twice", lambda p: legal_table(p) * 2)
table("of one stage more", lambda p: legal_table(p) + legal_table(p).splitlines()[-1] + "\n")
table(
    "with a number of 5,000 digits",
    lambda p: legal_table(p).replace("stages=2", "stages=" + "9" * 5000),
)
table("with a kind of work that there is not", lambda p: legal_table(p).replace("F", "X", 1))
table("with a microbatch too many", lambda p: legal_table(p).replace("1", "7"))


def swapped(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([lines[1], lines[0], *lines[2:]]) + "\n"


@fault(ROOM, "a schedule's CSV that is the program's own")
def legal(p: Place) -> None:
    p.file("t.csv", legal_table(p))
    p.config(mesh={"pipeline": 2}, parallel={"schedule": "t.csv", "microbatches": 2})
    done(plan(p))


for name, arrange in (
    ("a directory", lambda path: path.mkdir()),
    ("a FIFO", lambda path: os.mkfifo(path)),
    ("a link to itself", lambda path: path.symlink_to(path)),
    ("a dangling link", lambda path: path.symlink_to("gone")),
):

    @fault(ROOM, f"a schedule's CSV that is {name}")
    def _(p: Place, arrange: Callable[[Path], object] = arrange) -> None:
        arrange(p.dir / "t.csv")
        p.config(mesh={"pipeline": 2}, parallel={"schedule": "t.csv", "microbatches": 2})
        refused(plan(p), "t.csv")


# --- options
kind(
    "plan-option",
    "plan/test_plan_command.py::test_bad_input_is_one_sentence_and_code_2_before_anything_is_done",
    "test_cli.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
)


def option(name: str, *arguments: str, words: tuple[str, ...] = (), point: str = "") -> None:
    @fault(ROOM, f"plan {name}", point)
    def _(p: Place) -> None:
        refused(plan(p, *arguments), *words)


option("--devices 0", "--search", "--devices", "0", words=("--devices",))
option("--devices two", "--search", "--devices", "two", words=("--devices|devices",))
option(
    "--devices beyond the cluster",
    "--search",
    "--cluster",
    "cpu",
    "--devices",
    "99999999999999999999",
    words=("devices",),
)
option("--compile for a machine that there is not", "--compile", "h1000", words=("h1000",))
option("--compile for no devices", "--compile", "h100x0", words=("h100x0",))
option("--gantt without a pipeline", "--gantt", "-", words=("pipeline",))
option("--html under a file", "--html", "config.yaml/x.html", words=("config.yaml/x.html",))
option("--html into a directory", "--html", ".", words=(".",))
option("--html with a NUL in its name", "--html", "a\0b", point="11")
option("--write under a file", "--search", "--write", "config.yaml/x", words=("config.yaml/x",))
option("an option that there is not", "--jsn", words=("--jsn",))


@fault(ROOM, "plan without --config")
def without(p: Place) -> None:
    refused(p.command("plan.__main__"), "--config")


kind("plan-as-train")


def noted(name: str, key: str, *settings: str) -> None:
    """What training refuses on this machine may be planned for another, with a note that names the key."""

    @fault(ROOM, f"plan of what train refuses: {name}")
    def _(p: Place) -> None:
        refused(p.train(*settings))
        done(
            plan(p, *(word for setting in settings for word in ("--set", setting))), f"note: {key}"
        )


noted("data.source that is not there", "data.source gone", "data.source=gone")
noted(
    "a tokenizer that is not there",
    "data.tokenizer gone.json",
    "data.source=synthetic",
    "data.tokenizer=gone.json",
)
noted(
    "fewer fake devices than the mesh has",
    "run.fake_devices 2",
    "mesh.data=4",
    "run.fake_devices=2",
)


@fault(ROOM, "plan of what train refuses: weights that are not there")
def no_weights(p: Place) -> None:
    refused(p.train("model.weights=gone"))
    refused(plan(p, "--set", "model.weights=gone"))


@fault(ROOM, "plan --jobs from another directory: its configs lie beside its file")
def jobs_elsewhere(p: Place) -> None:
    (p.dir / "there").mkdir()
    p.config("there/mine.yaml")
    p.file("there/jobs.yaml", "nodes: 2\njobs:\n  - {name: a, config: mine.yaml, steps: 10}\n")
    for path in ("there/jobs.yaml", str(p.dir / "there/jobs.yaml")):
        done(p.command("plan.__main__", "--jobs", path, "--cluster", "h100"))


for shown in (
    "NVIDIA H100 80GB HBM3",
    "nvidia-h100-80gb-hbm3",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H200",
):

    @fault(ROOM, f"a cluster's accelerator is named {shown}, as its driver does")
    def _(p: Place, shown: str = shown) -> None:
        links = "links: {node: {devices: 2, bandwidth: 450}}\n"
        p.file(
            "c.yaml",
            f"name: mine\nnodes: 1\ndevices_per_node: 2\naccelerator: {{name: {shown}}}\n{links}",
        )
        done(plan(p, "--cluster", "c.yaml"))


kind("full-output")


@fault(ROOM, "plan on a full disk: --html is whole or not there")
def html_full(p: Place) -> None:
    (p.dir / "small").mkdir()
    p.mount(p.dir / "small", "size=64k")
    p.fill(p.dir / "small", leave=4096)
    refused(plan(p, "--html", "small/x.html"), "no space")
    if (p.dir / "small/x.html").exists():
        raise Silent("half a page is left")


kind("plan-size")


@fault(ROOM, "plan of a model that fits nowhere")
def too_large(p: Place) -> None:
    ended = plan(
        p,
        "--cluster",
        "h100",
        "--set",
        "model.d_model=1048576",
        "--set",
        "model.layers=1000",
        "--set",
        "model.heads=64",
    )
    told_or_done(ended)
    if "plan: " not in ended.err and "meshtrain: " not in ended.err:
        raise Silent("it does not say that it does not fit")


@fault(ROOM, "plan of numbers beyond 64 bits")
def beyond(p: Place) -> None:
    told_or_done(plan(p, "--set", "model.d_model=9223372036854775808", "--set", "model.heads=1"))


kind("stdout")


@fault(ROOM, "plan into a pipe that is closed")
def pipe(p: Place) -> None:
    p.config()
    ended = p.python("-m", "meshtrain.plan", "--config", "config.yaml", shell="| head -1")
    if "Traceback" in ended.err or ended.code != 0:
        raise Silent(ended.err)
