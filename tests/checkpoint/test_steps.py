import pytest

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


def test_a_committed_step_has_no_problem(step):
    assert steps.commit_problem(step) is None
    assert digests.problems(step) == []


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


def test_a_directory_without_marker_is_no_checkpoint(step):
    (step / steps.COMMIT).unlink()
    assert "it has no COMMIT file" in steps.commit_problem(step)


def test_missing_digests_are_named(step):
    (step / steps.DIGESTS).unlink()
    assert steps.commit_problem(step) == "digests.json is missing"


def test_a_newer_format_is_no_damage(step, monkeypatch):
    monkeypatch.setattr(steps, "FORMAT", 7)
    steps.commit(step)
    monkeypatch.undo()
    with pytest.raises(steps.NewerFormat) as newer:
        steps.commit_problem(step)
    assert newer.value.number == 7


def test_steps_are_ordered_as_numbers_and_nothing_else_counts(tmp_path):
    for name in ("9", "100", "20", "30.writing", "40.damaged", "50.removing", "latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "60").write_text("a file")
    assert steps.steps_in(tmp_path) == [9, 20, 100]
    assert steps.steps_in(tmp_path / "absent") == []


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    for name in ("9", "30.writing", "40.damaged", "50.removing"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    assert steps.remove_leftovers(tmp_path) == ["30.writing", "50.removing"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["40.damaged", "9"]


def test_setting_aside_never_overwrites(tmp_path):
    names = []
    for _ in range(3):
        (tmp_path / "9").mkdir()
        names.append(steps.set_aside(tmp_path / "9").name)
    assert names == ["9.damaged", "9.damaged-2", "9.damaged-3"]


def test_a_path_names_one_step_or_all_of_a_run(step):
    run = step.parent / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(step.parent)
    assert steps.directories(step) == [step]
    assert steps.directories(step.parent) == [step]
    assert steps.directories(run) == [run / "checkpoints" / "12"]
