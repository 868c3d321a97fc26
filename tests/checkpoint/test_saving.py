"""Writing in the background: what was saved, when it blocks, and what a failure costs."""

import errno
import os
import shutil
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import jax
import pytest
from checkpoint_runs import config, numbered, opened, program, restored, same, take
from refusals import tells

from meshtrain.checkpoint import CheckpointError, arrays, digests, saving, steps
from meshtrain.checkpoint.manifest import StepManifest


@pytest.fixture
def open_run(tmp_path):
    """A function (keys of checkpoint) -> a checkpointer of the run, closed at the end, and what it says."""
    with ExitStack() as stack:
        yield lambda **keys: stack.enter_context(
            opened(config(tmp_path, checkpoint={"keep": 5, **keys}), program())
        )


@pytest.fixture
def gate(monkeypatch):
    """Commits wait until the gate is set."""
    gate, commit = threading.Event(), steps.commit
    monkeypatch.setattr(
        steps, "commit", lambda directory: (gate.wait(30), commit(directory))
    )
    yield gate
    gate.set()


def committed(directory):
    return steps.committed_in(directory / "checkpoints")


def save(checkpointer, *steps):
    for step in steps:
        checkpointer.save(step, numbered(program()), 1.0)
    checkpointer.wait()


@pytest.mark.thorough
def test_what_was_saved_is_the_state_even_if_the_next_step_takes_its_memory(
    tmp_path, open_run
):
    checkpointer, _ = open_run()
    state, _ = checkpointer.restore_or_init()
    state, loss = take(program(), state, 1)
    kept = jax.tree.map(lambda x: x.copy(), state)
    checkpointer.save(1, state, loss)
    for step in range(2, 5):  # donates the state that is being written
        state, _ = take(program(), state, step)
    checkpointer.wait()
    checkpointer.close()
    found, step, _ = restored(config(tmp_path), program())
    assert step == 1 and same(found, kept) and not same(found, state)


def test_a_second_save_waits_for_the_first(tmp_path, gate, open_run):
    checkpointer, _ = open_run()
    checkpointer.save(1, numbered(program()), 1.0)
    # It returns while the step is being written.
    assert committed(tmp_path) == [] and checkpointer.metrics() == {}
    second = threading.Thread(
        target=checkpointer.save, args=(2, numbered(program()), 1.0)
    )
    second.start()
    second.join(0.3)
    assert second.is_alive() and not (tmp_path / "checkpoints" / "2.writing").exists()
    gate.set()
    second.join(30)
    checkpointer.close()
    assert committed(tmp_path) == [1, 2]


def test_the_metrics_count_each_save_once(tmp_path, gate, open_run):
    checkpointer, _ = open_run()
    began = time.perf_counter()
    checkpointer.save(1, numbered(program()), 1.0)
    blocked = time.perf_counter() - began
    time.sleep(0.2)
    gate.set()
    checkpointer.wait()
    found = checkpointer.metrics()
    assert checkpointer.metrics() == {}
    assert 0 < found["checkpoint_blocked_seconds"] <= blocked
    assert found["checkpoint_seconds"] >= found["checkpoint_blocked_seconds"] + 0.2
    assert (
        found["checkpoint_bytes"]
        == digests.total_bytes(tmp_path / "checkpoints" / "1")
        > program().state_bytes
    )


@pytest.mark.parametrize(("every", "due"), [(3, [3, 6, 9]), (0, [])])
def test_due_follows_every(open_run, every, due):
    checkpointer, _ = open_run(every=every)
    assert [step for step in range(1, 10) if checkpointer.due(step)] == due


@pytest.mark.thorough
def test_retention_removes_what_it_need_not_keep(tmp_path, open_run):
    checkpointer, _ = open_run(keep=2, keep_best=1, keep_every=4)
    for step, eval_loss in enumerate([5.0, 1.0, None, 3.0, 4.0, 2.0, 6.0], start=1):
        checkpointer.save(step, numbered(program()), 1.0, eval_loss)
    checkpointer.wait()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "2",
        "4",
        "6",
        "7",
    ]


def test_a_step_that_is_on_disk_is_not_saved_again(tmp_path, open_run):
    checkpointer, _ = open_run()
    save(checkpointer, 1, 1)  # nor while it is being written
    before = (tmp_path / "checkpoints" / "1").stat().st_ino
    save(checkpointer, 1)
    assert (tmp_path / "checkpoints" / "1").stat().st_ino == before


@pytest.mark.thorough
def test_a_step_with_a_damaged_manifest_is_left_alone_and_reported_once(
    tmp_path, open_run
):
    checkpointer, said = open_run(keep=1, keep_best=0)
    save(checkpointer, 1)
    manifest = tmp_path / "checkpoints" / "1" / steps.MANIFEST
    size = manifest.stat().st_size
    manifest.write_text("{")
    save(checkpointer, 2, 3)
    assert committed(tmp_path) == [1, 3]
    wrong = f"manifest.json has 1 bytes instead of {size:,}"
    assert said == [f"checkpoint {tmp_path}/checkpoints/1 is left alone: {wrong}."]


def test_a_step_that_cannot_be_removed_is_reported_and_the_save_has_not_failed(
    tmp_path, monkeypatch, open_run
):
    def refused(directory):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(steps, "remove", refused)
    checkpointer, said = open_run(keep=1, keep_best=0, on_failed_save="stop")
    save(checkpointer, 1, 2)
    assert committed(tmp_path) == [1, 2]
    (sentence,) = said
    assert tells(
        sentence, f"{tmp_path}/checkpoints/1", "cannot be removed: permission denied."
    )


@pytest.fixture
def full_at_step_2(monkeypatch):
    """The disk is full while step 2 is committed."""
    write = digests.write

    def failing(directory, *more):
        if directory.name == "2.writing":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(directory, *more)

    monkeypatch.setattr(digests, "write", failing)


SENTENCE = "the checkpoint of step 2 could not be written: no space left on device; step 1 is intact."


@pytest.mark.thorough
def test_a_failed_save_is_reported_and_training_goes_on(
    tmp_path, full_at_step_2, open_run
):
    checkpointer, said = open_run()
    save(checkpointer, 1, 2, 3)
    assert said == [SENTENCE]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "3"]


@pytest.mark.parametrize(("free", "inodes"), [(0, 9), (9, 0)])
def test_what_is_not_found_since_the_disk_is_full_is_said_so(
    open_run, monkeypatch, free, inodes
):
    def lost(directory, *_):
        raise FileNotFoundError(
            errno.ENOENT, "No such file or directory", "array_metadatas/process_0"
        )

    monkeypatch.setattr(digests, "write", lost)
    room = SimpleNamespace(f_bavail=free, f_frsize=1 << 16, f_files=9, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    checkpointer, said = open_run()
    checkpointer.save(2, numbered(program()), 1.0)
    checkpointer.close()
    (sentence,) = said
    assert tells(
        sentence, "step 2 could not be written: ", "no space", "none before it."
    )


def test_a_failed_save_stops_the_run_if_it_is_to_and_is_no_good_end(
    tmp_path, full_at_step_2, open_run
):
    checkpointer, _ = open_run(on_failed_save="stop")
    for step in (1, 2):
        checkpointer.save(step, numbered(program()), 1.0)
    with pytest.raises(CheckpointError) as stopped:
        checkpointer.save(3, numbered(program()), 1.0)
    assert str(stopped.value) == SENTENCE and committed(tmp_path) == [1]
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        checkpointer.wait()


class Unfinished:
    """What Orbax writes on one process while another one has failed: it goes on to wait.

    After `turns` looks the directory is gone.
    """

    def __init__(self, directory, turns=2, writes_on=False):
        self.directory, self.turns, self.writes_on = directory, turns, writes_on

    def result(self, timeout=None):
        time.sleep(timeout)
        self.turns -= 1
        if not self.turns:
            (self.directory / "half").touch()
            steps.remove(self.directory)
            if self.writes_on:
                (self.directory / "arrays" / "state").mkdir(parents=True)
        raise TimeoutError


@pytest.mark.parametrize("writes_on", [False, True])
def test_a_process_does_not_wait_for_another_that_has_given_a_save_up(
    open_run, monkeypatch, writes_on
):
    monkeypatch.setattr(saving, "POLL_EVERY", 0.05)
    monkeypatch.setattr(
        arrays,
        "write",
        lambda directory, _: Unfinished(directory.parent, writes_on=writes_on),
    )
    checkpointer, said = open_run()
    checkpointer.save(2, numbered(program()), 1.0)
    checkpointer.close()
    (sentence,) = said
    assert tells(
        sentence, "step 2 could not be written: ", "another process", "none before it."
    )


def test_a_timeout_of_orbax_itself_is_a_failure(tmp_path, monkeypatch, open_run):
    def late(self, timeout=None):
        raise TimeoutError("a barrier timed out")

    monkeypatch.setattr(Unfinished, "result", late)
    monkeypatch.setattr(
        arrays, "write", lambda directory, _: Unfinished(directory.parent)
    )
    checkpointer, said = open_run()
    checkpointer.save(2, numbered(program()), 1.0)
    checkpointer.close()
    assert "a barrier timed out" in said[0]
    assert not list(
        (tmp_path / "checkpoints").iterdir()
    )  # the others see that there is nothing to wait for


# --- what stands where a step belongs


def a_full_directory(path):
    path.mkdir()
    (path / "file").write_text("mine")


def a_file(path):
    path.write_text("mine")


def a_link_to_nothing(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize("stands", [a_full_directory, a_file, a_link_to_nothing])
@pytest.mark.parametrize("name", ["2", "2.writing"])
def test_what_stands_where_a_step_belongs_is_set_aside_and_the_save_succeeds(
    name, stands, tmp_path, open_run
):
    path, (checkpointer, said) = tmp_path / "checkpoints" / name, open_run()
    stands(path)
    before = path.lstat().st_ino
    save(checkpointer, 2)
    (sentence,) = said
    assert tells(sentence, f"{path} stood", f"set aside as {name}.damaged.")
    assert path.with_name(f"{name}.damaged").lstat().st_ino == before
    assert StepManifest.read(tmp_path / "checkpoints" / "2").step == 2


def test_a_save_that_cannot_begin_removes_nothing_of_others(
    tmp_path, monkeypatch, open_run
):
    def refused(path):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(steps, "set_aside", refused)
    path = tmp_path / "checkpoints" / "2.writing"
    checkpointer, _ = open_run()
    a_full_directory(path)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written: .* busy"):
        save(checkpointer, 2)
    assert (path / "file").read_text() == "mine"


@pytest.mark.thorough
def test_retention_neither_removes_nor_counts_a_link_or_a_renamed_step(
    tmp_path, open_run
):
    root, (checkpointer, said) = tmp_path / "checkpoints", open_run(keep=2, keep_best=0)
    save(checkpointer, 1)
    (root / "1").rename(tmp_path / "elsewhere")
    (root / "1").symlink_to(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", root / "9")
    save(checkpointer, 2, 3, 4)
    assert sorted(p.name for p in root.iterdir()) == ["1", "3", "4", "9"]
    assert StepManifest.read(tmp_path / "elsewhere").step == 1
    (sentence,) = said
    assert tells(sentence, f"{root}/9 is left alone", "step 1, renamed.")


# --- what a save that failed leaves


def refuse_removal(monkeypatch, times):
    """The first `times` removals of a step fail, as on a disk that fails."""
    remove, left = steps.remove, [times]

    def refused(directory):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        remove(directory)

    monkeypatch.setattr(steps, "remove", refused)


def failing_commit(monkeypatch, step):
    commit = steps.commit

    def refused(directory):
        if directory.name.startswith(f"{step}."):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        commit(directory)

    monkeypatch.setattr(steps, "commit", refused)


@pytest.mark.thorough
def test_what_a_failed_save_could_not_remove_is_removed_before_the_next_one(
    tmp_path, open_run, monkeypatch
):
    checkpointer, said = open_run()
    checkpointer.restore_or_init()
    failing_commit(monkeypatch, 1)
    refuse_removal(monkeypatch, 1)
    checkpointer.save(1, numbered(program()), 1.0)
    save(checkpointer, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2"]
    assert len(said) == 1 and "step 1 could not be written: input/" in said[0]


@pytest.mark.thorough
def test_what_a_failed_save_could_not_remove_is_removed_at_the_end(
    tmp_path, monkeypatch
):
    failing_commit(monkeypatch, 1)
    refuse_removal(monkeypatch, 1)
    with opened(config(tmp_path), program()) as (checkpointer, _):
        checkpointer.restore_or_init()
        checkpointer.save(1, numbered(program()), 1.0)
        with pytest.raises(CheckpointError):
            checkpointer.wait()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_left_at_the_next_start_is_not_said_to_be_of_a_killed_process(tmp_path):
    for name in ("4.writing", "5.removing", "6.writing.removing"):
        (tmp_path / "checkpoints" / name / "arrays").mkdir(parents=True)
    _, step, said = restored(config(tmp_path), program())
    assert step == 0 and list((tmp_path / "checkpoints").iterdir()) == []
    assert len(said) == 3 and not any("killed" in sentence for sentence in said)
