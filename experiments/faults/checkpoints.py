"""Checkpoints: step directories under other names, and every file of a step damaged in every way."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from experiments.faults.harness import (
    DAMAGE,
    LAST,
    NO_FILE,
    STEPS,
    Ended,
    Place,
    Silent,
    done,
    fault,
    flip,
    kind,
    last_line,
    refused,
    resign,
    resumed,
    told_or_done,
)

ROOM = "checkpoints"
TOLD = "damaged|set aside|passed over|step of|not the|left alone|is no|manifest|cannot be read"


def goes_on(p: Place, after: int, *words: str, settings: tuple[str, ...] = ()) -> Ended:
    """The run goes on after this step, says these words, and ends as if nothing had been."""
    ended = p.train(*settings)
    done(ended)
    resumed(ended, after)
    done(ended, *words)
    p.undisturbed()
    p.intact(STEPS)
    return ended


# --- names (point 1)
kind(
    "step-renamed",
    "checkpoint/test_odd_steps.py::test_a_renamed_step_directory_is_never_restored",
    "checkpoint/test_odd_steps.py::test_two_steps_that_changed_places_are_both_reported_and_the_one_between_is_restored",
    "checkpoint/test_odd_steps.py::test_the_real_step_is_saved_later_and_what_had_its_name_stays",
    "checkpoint/test_command.py::test_ls_and_verify_name_each_that_is_not_the_step_of_its_name",
)


def step_names(
    name: str, arrange: Callable[[Place], None], after: int, point: str, told: bool = True
) -> None:
    @fault(ROOM, name, point)
    def _(p: Place) -> None:
        p.base()
        before = p.digests(p.checkpoints)
        arrange(p)
        goes_on(p, after, *((TOLD,) if told else ()))
        p.survive(before)

    @fault(ROOM, f"{name}: verify says so", point)
    def _(p: Place) -> None:
        p.base()
        arrange(p)
        ended = p.command("checkpoint.__main__", "verify", "run")
        if told:
            if ended.code == 0:
                raise Silent(f"verify: {last_line(ended.out)}")
            done(ended, "damaged", code=1)
        else:
            done(ended, "intact")


def move(old: str, new: str) -> Callable[[Place], None]:
    return lambda p: os.rename(p.checkpoints / old, p.checkpoints / new)


def swap(p: Place) -> None:
    for old, new in (("4", "x"), ("6", "4"), ("x", "6")):
        move(old, new)(p)


def copy(p: Place) -> None:
    shutil.copytree(p.checkpoints / "2", p.checkpoints / "40")


def link(p: Place) -> None:
    (p.checkpoints / "40").symlink_to("2")


def elsewhere(p: Place) -> None:
    """A step that was moved to another volume, with a link in its place: it is what its name says."""
    os.rename(p.checkpoints / "6", p.dir / "volume")
    (p.checkpoints / "6").symlink_to(p.dir / "volume")


step_names("an old step renamed to a later number", move("2", "40"), LAST, "1")
step_names("the newest step renamed to an earlier number", move("6", "5"), 4, "1")
step_names("an old step copied to a later number", copy, LAST, "1")
step_names("two steps swapped", swap, 2, "1")
step_names("a link with a later number to an old step", link, LAST, "1")


@fault(ROOM, "a renamed step: later saves do not fail", "1")
def later_saves(p: Place) -> None:
    p.base()
    move("2", "8")(p)
    goes_on(p, LAST)
    p.intact(4, 6, 8)


kind("step-linked")


@fault(ROOM, "the newest step is a link to where it was moved, and retention passes over it", "10")
def linked(p: Place) -> None:
    p.base()
    elsewhere(p)
    before = p.digests(p.dir / "volume")
    ended = p.train("checkpoint.keep=1", "checkpoint.keep_best=0", "train.steps=8")
    done(ended)
    again = p.train("checkpoint.keep=1", "checkpoint.keep_best=0", "train.steps=10")
    done(again)
    resumed(again, STEPS)
    p.survive(before)


@fault(ROOM, "an old step is a link, and retention passes over it", "10")
def linked_old(p: Place) -> None:
    p.base()
    os.rename(p.checkpoints / "2", p.dir / "volume")
    (p.checkpoints / "2").symlink_to(p.dir / "volume")
    before = p.digests(p.dir / "volume")
    for steps, after in ((8, LAST), (10, 8)):
        ended = p.train("checkpoint.keep=1", "checkpoint.keep_best=0", f"train.steps={steps}")
        done(ended)
        resumed(ended, after)
    p.survive(before)


# --- what else may lie in checkpoints/
kind("step-litter")


def litter(name: str, arrange: Callable[[Path], object], point: str = "", *words: str) -> None:
    @fault(ROOM, f"in checkpoints/: {name}", point)
    def _(p: Place) -> None:
        p.base()
        before = p.digests(p.checkpoints)
        arrange(p.checkpoints)
        goes_on(p, LAST, *words)
        p.survive(before)
        p.intact(2, 4, 6)


def unfinished(root: Path) -> None:
    shutil.copytree(root / "2", root / "8.writing")


kind(
    "step-litter",
    "checkpoint/test_odd_steps.py::test_a_name_that_is_no_number_is_no_step_and_reported_if_it_is_newer",
    "checkpoint/test_odd_steps.py::test_a_number_that_is_not_the_steps_own_is_passed_over",
    "checkpoint/test_odd_steps.py::test_what_is_no_step_at_all_is_set_aside",
    "checkpoint/test_odd_steps.py::test_what_is_named_like_a_leftover_and_is_none_is_left_alone",
    "checkpoint/test_finding.py::test_leftovers_are_removed_and_reported",
    "checkpoint/test_steps.py::test_setting_aside_never_overwrites",
)
litter("a plain file 40.writing", lambda root: (root / "40.writing").write_text("x"), "10")
litter("a plain file 40.removing", lambda root: (root / "40.removing").write_text("x"))
litter("a link 40.writing to an intact step", lambda root: (root / "40.writing").symlink_to("2"))
litter("a dangling link 40.removing", lambda root: (root / "40.removing").symlink_to("nowhere"))
litter("a directory 030", lambda root: (root / "030").mkdir(), "10")
litter(
    "a directory 030 that is a copy of a step",
    lambda root: shutil.copytree(root / "2", root / "030"),
    "10",
)
litter("a directory 006 beside 6", lambda root: shutil.copytree(root / "6", root / "006"))
litter("an empty directory 99", lambda root: (root / "99").mkdir())
litter("a directory of 400 digits", lambda root: (root / ("9" * 200)).mkdir())
litter("a directory in Arabic digits", lambda root: (root / "٤٠").mkdir())
litter("a directory -4", lambda root: (root / "-4").mkdir())
litter("a plain file 99", lambda root: (root / "99").write_text("x"))
litter("a link 99 to itself", lambda root: (root / "99").symlink_to("99"))
litter("8.writing with a COMMIT, as a kill before the rename leaves it", unfinished)
litter("2.damaged of an earlier run", lambda root: shutil.copytree(root / "2", root / "2.damaged"))
kind("step-litter")
litter("a FIFO 99", lambda root: os.mkfifo(root / "99"))
litter("8.removing that is there already", lambda root: (root / "8.removing").mkdir())
litter("a name that is not UTF-8", lambda root: os.mkdir(os.fsencode(root) + b"/\xff\xfe"))
litter("a step 0", lambda root: (root / "0").mkdir())


@fault(ROOM, "the step to be written next stands there already, half written")
def taken(p: Place) -> None:
    p.base()
    shutil.copytree(p.checkpoints / "4", p.checkpoints / "8")
    (p.checkpoints / "8" / "COMMIT").unlink()
    goes_on(p, LAST)


# --- every file of the newest step, damaged in every way


def damaged(file: str, way: str, point: str = "") -> None:
    @fault(ROOM, f"{file} of the newest step {way}", point)
    def _(p: Place) -> None:
        p.base()
        DAMAGE[way](array_file(p, file))
        goes_on(p, 4, "damaged|no COMMIT|never finished|cannot be read|missing")


def array_file(p: Place, name: str) -> Path:
    step = p.checkpoints / str(LAST)
    if name != "an array file":
        return step / name
    return max(
        (f for f in (step / "arrays").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size
    )


kind(
    "step-damaged",
    "checkpoint/test_finding.py::test_every_flipped_bit_is_caught_and_the_step_before_is_used",
    "checkpoint/test_finding.py::test_truncated_and_missing_files_are_caught_in_each_kind_of_file",
    "checkpoint/test_odd_steps.py::test_a_step_whose_own_files_are_garbled_is_set_aside",
)
for file in ("COMMIT", "digests.json", "manifest.json"):
    for way in DAMAGE:
        damaged(
            file,
            way,
            "10" if file in ("COMMIT", "digests.json") and way == "become a directory" else "",
        )


for way in (way for way in DAMAGE if way not in NO_FILE):
    damaged("an array file", way)
kind("step-damaged")
for way in NO_FILE:
    damaged("an array file", way)


def with_manifest(
    name: str, change: Callable[[dict], object], *words: str, point: str = ""
) -> None:
    """A manifest that is wrong under digests that are right: of another program, or of a disk that lied."""

    def arrange(p: Place) -> None:
        p.base()
        path = p.checkpoints / str(LAST) / "manifest.json"
        values = json.loads(path.read_bytes())
        changed = change(values)
        path.write_text(changed if isinstance(changed, str) else json.dumps(values))
        resign(path.parent)

    @fault(ROOM, f"a sealed manifest {name}: training", point)
    def _(p: Place) -> None:
        arrange(p)
        before = p.digests(p.checkpoints)
        ended = p.train()
        if told_or_done(ended):
            done(ended, *words)
            p.undisturbed()
        p.survive(before)

    @fault(ROOM, f"a sealed manifest {name}: ls, show, verify, diff", point)
    def _(p: Place) -> None:
        arrange(p)
        for arguments in (
            ["ls", "run"],
            ["show", "run"],
            ["verify", "run"],
            ["diff", "run/checkpoints/4", "run/checkpoints/6"],
        ):
            ended = p.command("checkpoint.__main__", *arguments)
            if ended.code:
                if ended.code == 2:
                    refused(ended)
                elif arguments[0] not in ("verify", "diff"):
                    raise Silent(f"{arguments[0]}: exit code {ended.code}")


def broken_dtype(values: dict) -> None:
    next(iter(values["leaves"].values()))["dtype"] = "float99"


def broken_shape(values: dict) -> None:
    next(record for record in values["leaves"].values() if record["shape"])["shape"] = ["many"]


kind(
    "manifest-sealed",
    "checkpoint/test_manifest.py::test_what_is_no_value_of_its_key_is_named",
    "checkpoint/test_manifest.py::test_what_is_no_manifest_at_all_is_named",
    "checkpoint/test_manifest.py::test_a_missing_key_is_named_and_one_of_a_later_version_is_passed_over",
    "checkpoint/test_command.py::test_a_manifest_that_is_wrong_under_right_digests_is_one_sentence",
)
with_manifest("with a dtype that there is not", broken_dtype, point="10")
with_manifest("with a shape of words", broken_shape)
with_manifest("of another step", lambda values: values.update(step=2), "damaged|set aside|manifest")
with_manifest("without its leaves", lambda values: values.pop("leaves") and None)
with_manifest("with a key of a later version", lambda values: values.update(novelty=1))
with_manifest("that is a list", lambda values: "[]")
with_manifest("with leaves that are a list", lambda values: values.update(leaves=[]))


kind("commit-odd")


@fault(ROOM, "a checkpoint of a later format")
def later_format(p: Place) -> None:
    import hashlib

    p.base()
    path = p.checkpoints / str(LAST) / "COMMIT"
    head = path.read_text().rpartition("the lines above")[0].replace("format 1", "format 99")
    path.write_text(f"{head}the lines above sha256 {hashlib.sha256(head.encode()).hexdigest()}\n")
    before = p.digests(p.run)
    refused(p.train(), "format 99")
    p.survive(before)


@fault(ROOM, "a COMMIT whose digest is right and whose words make no sense")
def senseless(p: Place) -> None:
    import hashlib

    p.base()
    path = p.checkpoints / str(LAST) / "COMMIT"
    head = "no format at all\n"
    path.write_text(f"{head}the lines above sha256 {hashlib.sha256(head.encode()).hexdigest()}\n")
    goes_on(p, 4, "damaged")


kind("step-damaged")


@fault(ROOM, "every step damaged")
def all_damaged(p: Place) -> None:
    p.base()
    for step in ("2", "4", "6"):
        flip(p.checkpoints / step / "manifest.json")
    before = p.digests(p.run)
    refused(p.train(), "damaged", "checkpoint.resume")
    p.survive(before)


@fault(ROOM, "an array file more than was written")
def one_more(p: Place) -> None:
    p.base()
    (p.checkpoints / "6" / "arrays" / "stranger").write_text("x")
    ended = p.train()
    done(ended)
    p.undisturbed()


@fault(ROOM, "a step without its arrays/")
def without_arrays(p: Place) -> None:
    p.base()
    shutil.rmtree(p.checkpoints / "6" / "arrays")
    goes_on(p, 4, "damaged|missing")


@fault(ROOM, "arrays/ that is a link to another step's")
def others_arrays(p: Place) -> None:
    p.base()
    shutil.rmtree(p.checkpoints / "6" / "arrays")
    (p.checkpoints / "6" / "arrays").symlink_to("../4/arrays")
    goes_on(p, 4, "damaged")


# --- resuming from another run
kind("resume-path")


def other_run(name: str, resume: str, arrange: Callable[[Place], object], *words: str) -> None:
    @fault(ROOM, f"checkpoint.resume {name}")
    def _(p: Place) -> None:
        p.base()
        os.rename(p.run, p.dir / "other")
        arrange(p)
        before = p.digests(p.dir / "other")
        refused(p.train(f"checkpoint.resume={resume}"), *words)
        p.survive(before)


other_run("names nothing", "nothing", lambda p: None, "checkpoint.resume", "nothing")
other_run("names a file", "file", lambda p: p.file("file", "x"), "checkpoint.resume|file")
other_run("names an empty directory", "void", lambda p: (p.dir / "void").mkdir(), "void")
other_run("names a dangling link", "link", lambda p: (p.dir / "link").symlink_to("gone"), "link")
other_run("names a link to itself", "link", lambda p: (p.dir / "link").symlink_to("link"), "link")
other_run("names a FIFO", "pipe", lambda p: os.mkfifo(p.dir / "pipe"), "pipe")
other_run("has a slip of the pen", "neverr", lambda p: None, "did you mean never")
other_run(
    "names a step whose manifest is gone",
    "other/checkpoints/6",
    lambda p: (p.dir / "other/checkpoints/6/manifest.json").unlink(),
    "other/checkpoints",
)
other_run("names a path of 5,000 characters", "x" * 5000, lambda p: None, "checkpoint.resume")


@fault(
    ROOM, "another run's newest step damaged: the one before is taken, and nothing of it is renamed"
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
    name: str,
    *words: str,
    arguments: tuple[str, ...],
    arrange: Callable[[Place], object] = lambda p: None,
    code: int = 2,
) -> None:
    @fault(ROOM, f"checkpoint {name}")
    def _(p: Place) -> None:
        p.base()
        arrange(p)
        refused(p.command("checkpoint.__main__", *arguments), *words, code=code)


commanded("ls of nothing", "nowhere", arguments=("ls", "nowhere"))
commanded("ls of a file", "config.yaml", arguments=("ls", "config.yaml"))
commanded(
    "ls of an empty directory",
    "void",
    arguments=("ls", "void"),
    arrange=lambda p: (p.dir / "void").mkdir(),
)
commanded(
    "show of a link to itself",
    "loop",
    arguments=("show", "loop"),
    arrange=lambda p: (p.dir / "loop").symlink_to("loop"),
)
commanded("with a slip of the pen", "verify", arguments=("verfy", "run"))
commanded("diff with one side missing", "second", arguments=("diff", "run"))
commanded(
    "diff with a damaged side",
    "damaged",
    arguments=("diff", "run/checkpoints/4", "run/checkpoints/6"),
    arrange=lambda p: flip(array_file(p, "an array file")),
)
commanded("show with a name of 300 characters", "name", arguments=("show", "x" * 300))


kind("notebook-lock")


@fault(ROOM, "a constructor that fails lets go of its lock: a notebook tries again", "10")
def leaked(p: Place) -> None:
    p.base()

    def notebook() -> int:
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
        (p.checkpoints / "40.writing").symlink_to("/proc/1")  # the directory cannot be tidied
        try:
            Checkpointer(config, program).close()
        except Exception as error:
            print(f"meshtrain: {error}")
        (p.checkpoints / "40.writing").unlink(missing_ok=True)
        Checkpointer(config, program).close()
        return 0

    ended = p.start("", call=notebook).end()
    if "in use" in ended.said:
        raise Silent("the notebook is locked out by itself")
    ended.checked()
    done(ended)


@fault(ROOM, "a notebook that fails while it opens its checkpoints can open them again", "10")
def leaked_again(p: Place) -> None:
    p.base()

    def notebook() -> int:
        from meshtrain.checkpoint import Checkpointer, steps
        from meshtrain.config import load
        from meshtrain.mesh import make_mesh
        from meshtrain.step import Program

        config = load("config.yaml")
        program = Program(config, make_mesh(config))
        real = steps.remove_leftovers

        def fails(root: Path) -> list[str]:
            raise OSError(5, "Input/output error")

        steps.remove_leftovers = fails
        try:
            Checkpointer(config, program)
            return 3
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        steps.remove_leftovers = real
        Checkpointer(config, program).close()
        return 0

    ended = p.start("", call=notebook).end()
    if "in use" in ended.said:
        raise Silent("the notebook is locked out by itself")
    ended.checked()
    done(ended)
