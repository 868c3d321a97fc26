import errno
import hashlib

import pytest
from refusals import tells

from meshtrain.checkpoint import digests, steps


@pytest.fixture
def step(tmp_path):
    """A committed step directory with two files."""
    directory = tmp_path / "12"
    (directory / "arrays").mkdir(parents=True)
    (directory / "arrays" / "data").write_bytes(b"numbers" * 100)
    (directory / steps.MANIFEST).write_text("{}")
    digests.write(directory)
    steps.commit(directory)
    return directory


def test_every_bit_of_the_marker_and_of_the_digests_counts(step):
    for name in (steps.COMMIT, steps.DIGESTS):
        path = step / name
        whole = path.read_bytes()
        for at in range(0, 8 * len(whole), 61):
            damaged = bytearray(whole)
            damaged[at // 8] ^= 1 << at % 8
            path.write_bytes(damaged)
            assert steps.commit_problem(step) == f"{name} is damaged"
        path.write_bytes(whole)
    assert steps.commit_problem(step) is None


def mark(step, head):
    """A marker of these lines, under their own digest."""
    own = hashlib.sha256(head).hexdigest().encode()
    (step / steps.COMMIT).write_bytes(head + b"the lines above sha256 " + own + b"\n")


@pytest.mark.parametrize(
    "first",
    [
        b"format x",
        b"format 0",
        b"format -1",
        b"format 1e9",
        "format １".encode(),
        b"\xff\xfe 2",
    ],
)
def test_a_marker_with_another_number_is_damaged_even_if_its_digest_is_right(
    first, step
):
    head = (
        b"meshtrain checkpoint, "
        + first
        + b"\n"
        + (step / steps.COMMIT).read_bytes().splitlines(keepends=True)[1]
    )
    mark(step, head)
    assert steps.commit_problem(step) == "COMMIT is damaged"


def test_a_marker_that_vouches_for_nothing_is_damage(step):
    for rest in (b"", b"digests.json\n", b"digests.json sha256\n", b"\xff\xff\xff\n"):
        mark(step, b"meshtrain checkpoint, format 1\n" + rest)
        assert steps.commit_problem(step) == "digests.json is damaged"


def test_a_newer_format_is_no_damage(step, monkeypatch):
    monkeypatch.setattr(steps, "WHOLE", 7)
    steps.commit(step)
    monkeypatch.undo()
    with pytest.raises(steps.NewerFormat) as newer:
        steps.commit_problem(step)
    assert newer.value.number == 7


def test_steps_are_ordered_as_numbers_and_nothing_else_counts(tmp_path):
    for name in (
        "9",
        "100",
        "020",
        "30.writing",
        "40.damaged",
        "50.removing",
        "latest",
        "+5",
        "１０",
        "-1",
        "³",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "60").write_text("a file, to be reported")
    assert [p.name for p in steps.numbered(tmp_path)] == ["9", "020", "60", "100"]
    assert steps.numbered(tmp_path / "absent") == []


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    for name in ("9", "30.writing", "40.damaged", "50.removing"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "60.writing").write_text("a file")
    (tmp_path / "70.removing").symlink_to(tmp_path / "9")
    said = [sentence.split(",")[0] for sentence in steps.remove_leftovers(tmp_path)]
    assert said == [f"removed {tmp_path}/30.writing", f"removed {tmp_path}/50.removing"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "40.damaged",
        "60.writing",
        "70.removing",
        "9",
    ]
    assert (tmp_path / "9" / "arrays").is_dir()


def test_a_leftover_that_cannot_be_removed_is_reported_and_no_reason_to_stop(
    tmp_path, monkeypatch
):
    def refused(path):
        raise OSError(errno.EACCES, "Permission denied")

    (tmp_path / "30.writing").mkdir()
    monkeypatch.setattr(steps.shutil, "rmtree", refused)
    sentence = steps.remove_leftovers(tmp_path)[0]
    assert tells(sentence, "30.writing", "cannot be removed: permission denied.")


def test_a_step_is_removed_even_if_its_last_removal_was_cut_short_or_the_name_is_taken(
    tmp_path,
):
    for leave in (
        lambda path: (path / "arrays").mkdir(parents=True),
        lambda path: path.write_text("mine"),
    ):
        (tmp_path / "9").mkdir()
        leave(tmp_path / "9.removing")
        steps.remove(tmp_path / "9")
    assert [p.name for p in tmp_path.iterdir()] == ["9.removing.damaged"]


def test_setting_aside_never_overwrites(tmp_path):
    names = []
    for _ in range(3):
        (tmp_path / "9").mkdir()
        names.append(steps.set_aside(tmp_path / "9").name)
    (tmp_path / "9.damaged-4").symlink_to("nowhere")
    (tmp_path / "9").write_text("a file")
    assert steps.set_aside(tmp_path / "9").name == "9.damaged-5"
    assert names == ["9.damaged", "9.damaged-2", "9.damaged-3"]


def test_a_path_names_one_step_or_all_of_a_run(step):
    run = step.parent / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(step.parent)
    assert steps.directories(step) == [step]
    assert steps.directories(step.parent) == [step]
    assert steps.directories(run) == [run / "checkpoints" / "12"]
    own_name = step.rename(step.parent / "best")
    assert steps.directories(own_name) == [own_name]
    assert steps.directories(own_name / "arrays") == []
