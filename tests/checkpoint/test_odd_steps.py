"""Which step a run goes on from when names are not what they were, links lead elsewhere, or this user may not read
all.
"""

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
from checkpoint_runs import config, numbered, opened, program, restored, same
from refusals import tells

from meshtrain.checkpoint import finding, steps
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.config import ConfigError
from meshtrain.errors import Unreadable


def chosen(directory, **checkpoint):
    """(the step that a run in `directory` would restore, what it said); nothing is read but what is verified."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "meshtrain.checkpoint.restoring.restore",
            lambda _, start, say: start.directory.name,
        )
        state, step, said = restored(
            config(directory, checkpoint={"keep": 3, **checkpoint}), program()
        )
    assert step == 0 or Path(state).name == str(step)
    return step, said


def names(run):
    return sorted(p.name for p in (run / "checkpoints").iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "put, left",
    [
        (lambda root: (root / "1").rename(root / "40"), ["2", "3", "40.damaged"]),
        (
            lambda root: shutil.copytree(root / "1", root / "40"),
            ["1", "2", "3", "40.damaged"],
        ),
        (lambda root: (root / "40").symlink_to("1"), ["1", "2", "3", "40.damaged"]),
    ],
    ids=["moved", "copied", "linked"],
)
def test_a_renamed_step_directory_is_never_restored(put, left, run):
    put(run / "checkpoints")
    step, said = chosen(run)
    assert step == 3 and names(run) == left
    (sentence,) = said
    damaged = f"{run}/checkpoints/40 is damaged: "
    assert tells(sentence, damaged, "step 1, renamed", "set aside as 40.damaged.")
    assert chosen(run) == (3, [])  # said once


def test_the_real_step_is_saved_later_and_what_had_its_name_stays(run):
    root = run / "checkpoints"
    (root / "1").rename(root / "4")
    with opened(config(run, checkpoint={"keep": 3}), program()) as (checkpointer, _):
        state, step = checkpointer.restore_or_init()
        checkpointer.save(step + 1, state, 1.0)
        checkpointer.wait()
    assert names(run) == ["2", "3", "4", "4.damaged"]
    assert (
        finding.problems(root / "4") == [] and StepManifest.read(root / "4").step == 4
    )
    assert (
        finding.problems(root / "4.damaged") == []
        and StepManifest.read(root / "4.damaged").step == 1
    )


def test_checkpoints_and_a_step_that_are_links_to_another_disk_are_as_good_as_directories(
    run,
):
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").symlink_to("elsewhere")
    (run / "elsewhere" / "3" / steps.COMMIT).write_bytes(b"")
    (run / "elsewhere" / "2").rename(run / "two")
    (run / "elsewhere" / "2").symlink_to(run / "two")
    assert chosen(run)[0] == 2
    assert names(run) == ["1", "2", "3.damaged"]


def test_two_steps_that_changed_places_are_both_reported_and_the_one_between_is_restored(
    run,
):
    root = run / "checkpoints"
    for old, new in (("1", "x"), ("3", "1"), ("x", "3")):
        (root / old).rename(root / new)
    step, said = chosen(run)
    assert step == 2
    first, second = said
    assert tells(first, "/3 is damaged: ", "step 1, renamed", "set aside as 3.damaged.")
    assert tells(second, f"{root}/1 is step 3, renamed", "passed over", "only as 3.")


@pytest.mark.parametrize("name", ["best", "+5", "１０", "-3", "3 ", "\udcff\udcfe"])
def test_a_name_that_is_no_number_is_no_step_and_reported_if_it_is_newer(name, run):
    root = run / "checkpoints"
    shutil.copytree(root / "1", root / name)
    assert chosen(run) == (3, [])
    (root / "3").rename(root / "moved")
    step, (sentence,) = chosen(run)
    assert step == 2
    assert tells(
        sentence, f"{root}/moved is step 3, renamed", "passed over", "only as 3."
    )
    assert {name, "moved"} <= set(names(run))


@pytest.mark.parametrize("name", ["003", "99999999999999999999", "9" * 250])
def test_a_number_that_is_not_the_steps_own_is_passed_over(name, run):
    root = run / "checkpoints"
    (root / "3").rename(root / name)
    step, said = chosen(run)
    assert step == 2 and tells(said[0], "is damaged: ", "step 3, renamed; ")
    after = f"{name}.damaged" if len(name) < 248 else name
    assert after in names(run)


def test_a_checkpoint_with_a_name_of_a_persons_own_is_gone_on_from_if_asked_for(
    run, tmp_path
):
    (run / "checkpoints" / "2").rename(run / "best")
    state, step, said = restored(
        config(tmp_path / "new", checkpoint={"resume": str(run / "best")}), program()
    )
    assert (step, said) == (2, []) and same(state, numbered(program(), seed=2))


def test_a_checkpoint_with_another_steps_number_is_refused_even_if_asked_for(
    run, tmp_path
):
    (run / "checkpoints" / "2").rename(run / "40")
    with pytest.raises(ConfigError, match=r"/40 is damaged: .* step 2, renamed; give"):
        chosen(tmp_path / "new", resume=str(run / "40"))


def test_stray_files_of_a_step_do_not_make_the_checkpoints_a_step(run):
    """As after `cp -r 3/* .`: the directory of the steps must not be set aside."""
    shutil.copytree(run / "checkpoints" / "1", run / "checkpoints", dirs_exist_ok=True)
    assert chosen(run) == (3, [])
    assert chosen(run.parent / "new", resume=str(run))[0] == 3


def test_a_newer_step_under_another_name_in_another_run_is_reported(run, tmp_path):
    moved = (run / "checkpoints" / "3").rename(run / "checkpoints" / "moved")
    step, (sentence,) = chosen(tmp_path / "new", resume=str(run))
    assert step == 2
    assert tells(sentence, f"{moved} is step 3, renamed", "passed over", "only as 3.")
    assert chosen(tmp_path / "by its path", resume=str(run / "checkpoints" / "2")) == (
        2,
        [],
    )


# --- what cannot be read


def replaced(path, content):
    path.unlink()
    path.write_bytes(content)


def a_directory(path):
    path.unlink()
    path.mkdir()


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_link_to_itself(path):
    path.unlink()
    path.symlink_to(path)


GARBAGE = {
    "empty": partial(replaced, content=b""),
    "no text": partial(replaced, content=bytes(range(128, 256))),
    "no JSON": partial(replaced, content=b"["),
    "nested deep": partial(replaced, content=b"[" * 100_000),
    "a directory": a_directory,
    "a pipe": a_pipe,
    "a link to itself": a_link_to_itself,
    "zeros": partial(replaced, content=bytes(99)),
    "twice as long": lambda path: path.write_bytes(path.read_bytes() * 2),
}


@pytest.mark.parametrize("name", [steps.COMMIT, steps.DIGESTS, steps.MANIFEST])
@pytest.mark.parametrize("garbled", GARBAGE.values(), ids=GARBAGE)
def test_a_step_whose_own_files_are_garbled_is_set_aside(name, garbled, run):
    garbled(run / "checkpoints" / "3" / name)
    step, said = chosen(run)
    assert step == 2 and len(said) == 1
    assert f"checkpoints/3 is damaged: {name} " in said[0] and said[0].endswith(
        "set aside as 3.damaged."
    )


def a_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def a_link_to_nothing(path):
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    "put", [a_pipe, a_device, a_directory, a_link_to_itself, a_link_to_nothing]
)
def test_what_is_no_file_in_the_place_of_an_array_is_damage_and_never_waited_for(
    put, run
):
    step = run / "checkpoints" / "3"
    array = max(
        (path for path in (step / steps.ARRAYS).rglob("*") if path.is_file()),
        key=lambda p: p.stat().st_size,
    )
    put(array)
    taken, said = chosen(run)
    assert (
        taken == 2
        and f"checkpoints/3 is damaged: {array.relative_to(step)} " in said[0]
    )


@pytest.mark.parametrize("instead", [None, "../2/arrays"])
def test_a_step_without_arrays_or_with_another_steps_is_damaged(instead, run):
    arrays = run / "checkpoints" / "3" / steps.ARRAYS
    shutil.rmtree(arrays)
    if instead:
        arrays.symlink_to(instead)
    step, (sentence,) = chosen(run)
    assert step == 2 and tells(sentence, "checkpoints/3 is damaged: ")


def test_a_strangers_file_among_the_arrays_is_no_damage(run):
    (run / "checkpoints" / "3" / steps.ARRAYS / "stranger").write_text("x")
    assert chosen(run) == (3, [])


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda path: path.write_text("a file"), "it is not a directory"),
        (os.mkfifo, "it is not a directory"),
        (lambda path: path.symlink_to("nowhere"), "it is a link to nothing"),
        (lambda path: path.symlink_to("9"), "it is a link to nothing"),
        (
            lambda path: path.mkdir(),
            "it has no COMMIT file",
        ),
    ],
    ids=[
        "a file",
        "a pipe",
        "a link to nothing",
        "a link to itself",
        "an empty directory",
    ],
)
def test_what_is_no_step_at_all_is_set_aside(make, sentence, run):
    make(run / "checkpoints" / "9")
    where = f"checkpoint {run}/checkpoints/9"
    step, (said,) = chosen(run)
    assert step == 3 and tells(
        said, f"{where} is damaged: {sentence}", "set aside as 9.damaged."
    )
    assert "9.damaged" in names(run)


def test_a_link_to_a_disk_that_is_not_there_does_not_start_the_run_anew(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "9").symlink_to("/mnt/not/there/9")
    with pytest.raises(
        ConfigError, match=r"every checkpoint .* damaged .9: .* link to nothing"
    ):
        chosen(tmp_path)


@pytest.mark.parametrize("what", ["a file", "a link", "a directory of somebody's"])
def test_what_is_named_like_a_leftover_and_is_none_is_left_alone(what, run, tmp_path):
    """Only a directory that a save or a removal made goes; nothing is followed out of the checkpoints."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    stray = (
        run
        / "checkpoints"
        / ("notes.writing" if what == "a directory of somebody's" else "40.writing")
    )
    if what == "a file":
        stray.write_text("a file")
    elif what == "a link":
        stray.symlink_to(kept)
    else:
        stray.mkdir()
    assert chosen(run) == (3, [])
    assert os.path.lexists(stray) and (kept / "file").exists()


@pytest.fixture
def as_another_user():
    """Runs what it is given as a user to whom modes mean something, in a run directory of that user's."""
    with tempfile.TemporaryDirectory() as place:
        yield Unprivileged(Path(place))


class Unprivileged:
    NOBODY = 65534

    def __init__(self, place):
        self.place = place

    def copy(self, run):
        directory = shutil.copytree(run, self.place / "run")
        if os.geteuid() == 0:
            for path in (self.place, directory, *directory.rglob("*")):
                os.chown(path, self.NOBODY, -1)
        return directory

    def __call__(self, function, *arguments):
        before = os.geteuid()
        if before == 0:
            os.seteuid(self.NOBODY)
        try:
            return function(*arguments)
        finally:
            os.seteuid(before)


def test_a_link_to_where_this_user_may_not_look_is_left_alone(three, as_another_user):
    run = as_another_user.copy(three)
    (run / "hidden").mkdir(mode=0)
    (run / "checkpoints" / "9").symlink_to(run / "hidden" / "9")
    with pytest.raises(Unreadable, match="/9 cannot be read now: permission denied"):
        as_another_user(chosen, run)
    assert names(run) == ["1", "2", "3", "9"]


@pytest.mark.parametrize(
    "file", [steps.COMMIT, steps.DIGESTS, steps.MANIFEST, "arrays", "."]
)
def test_a_step_that_this_user_may_not_read_is_left_alone_and_no_earlier_one_is_taken(
    file, three, as_another_user
):
    run = as_another_user.copy(three)
    (run / "checkpoints" / "3" / file).chmod(0)
    with pytest.raises(Unreadable, match="cannot be read now: permission denied"):
        as_another_user(chosen, run)
    assert names(run) == ["1", "2", "3"]
    (run / "checkpoints" / "3" / file).chmod(0o700)


def test_a_damaged_step_that_cannot_be_set_aside_is_passed_over(three, as_another_user):
    run = as_another_user.copy(three)
    (run / "checkpoints" / "3" / steps.COMMIT).write_bytes(b"")
    (run / "checkpoints").chmod(0o500)
    step, said = as_another_user(chosen, run)
    assert step == 2
    assert tells(said[0], "cannot be set aside (permission denied)", "passed over.")
    assert names(run) == ["1", "2", "3"]


def test_steps_that_this_user_may_not_read_are_no_reason_to_start_anew(
    three, as_another_user
):
    run = as_another_user.copy(three)
    for step in ("1", "2", "3"):
        (run / "checkpoints" / step).chmod(0)
    with pytest.raises(
        Unreadable, match="COMMIT cannot be read now: permission denied"
    ):
        as_another_user(chosen, run)
    for step in ("1", "2", "3"):
        (run / "checkpoints" / step).chmod(0o700)
