"""Where a run starts from, and which checkpoints stay."""

import math
import os
import random
import shutil
from pathlib import Path

import checkpoint_runs
import pytest
from checkpoint_runs import config, numbered, opened, program, same, saved
from refusals import tells

from meshtrain.checkpoint import steps
from meshtrain.checkpoint.finding import rank_by_eval_loss, retained
from meshtrain.config import CheckpointConfig, ConfigError
from meshtrain.run.directory import NEWEST

FLIPS = 6  # in each kind of file


def restored(directory, read=None, **checkpoint):
    """(the step that a run in `directory` starts from, its state, what it said)."""
    settings = config(directory, checkpoint={"keep": 3, **checkpoint})
    state, step, said = checkpoint_runs.restored(settings, program(), read=read)
    return step, state, said


def files(directory):
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.stat().st_size)


@pytest.mark.thorough
def test_an_empty_run_directory_starts_at_step_0(tmp_path):
    step, state, said = restored(tmp_path / "new")
    assert (step, int(state.step), said) == (0, 0, [])


def test_every_flipped_bit_is_caught_and_the_step_before_is_used(run):
    """FLIPS single bits in each file of a step, found before a number is restored."""
    newest, kept = run / "checkpoints" / "3", run / "3"
    shutil.copytree(newest, kept)
    chosen, flips = random.Random(0), 0
    for path in files(kept):
        for _ in range(FLIPS):
            damaged = newest / path.relative_to(kept)
            content = bytearray(damaged.read_bytes())
            content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
            damaged.write_bytes(content)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "meshtrain.checkpoint.restoring.restore",
                    lambda _, start, say: start.directory.name,
                )
                state, step, said = checkpoint_runs.restored(config(run), program())
            assert (state, step) == ("2", 2), damaged
            assert len(said) == 1 and "checkpoints/3 is damaged: " in said[0]
            assert str(path.relative_to(kept)) in said[0] or path.name == steps.COMMIT
            assert said[0].endswith("it is set aside as 3.damaged.")
            shutil.rmtree(run / "checkpoints" / "3.damaged")
            shutil.copytree(kept, newest)
            flips += 1
    print(
        f"{flips} bits flipped in {len(files(kept))} files: {flips} caught before a number was restored"
    )
    assert flips >= 60


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_truncated_and_missing_files_are_caught_in_each_kind_of_file(fault, run):
    newest, kept = run / "checkpoints" / "3", run / "3"
    shutil.copytree(newest, kept)
    for path in files(kept):
        damaged = newest / path.relative_to(kept)
        if fault == "truncated":
            os.truncate(damaged, damaged.stat().st_size // 2)
        else:
            damaged.unlink()
        step, _, said = restored(run)
        assert step == 2, damaged
        assert len(said) == 1 and "3 is damaged" in said[0]
        shutil.rmtree(run / "checkpoints" / "3.damaged")
        shutil.copytree(kept, newest)


def test_two_damaged_steps_are_both_reported(run):
    for step in ("2", "3"):
        (run / "checkpoints" / step / steps.MANIFEST).unlink()
    step, state, said = restored(run)
    assert step == 1 and same(state, numbered(program(), seed=1))
    assert [
        f"{k} is damaged: manifest.json is missing" in s
        for k, s in zip((3, 2), said, strict=True)
    ] == [True, True]


def test_an_empty_step_directory_alone_does_not_keep_a_run_from_starting(tmp_path):
    (tmp_path / "checkpoints" / "9").mkdir(parents=True)
    assert restored(tmp_path)[0] == 0


def test_if_all_is_damaged_nothing_is_started_or_touched(run):
    for step in ("1", "2", "3"):
        (run / "checkpoints" / step / steps.MANIFEST).unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
            restored(run)
    assert steps.committed_in(run / "checkpoints") == [1, 2, 3]


def test_a_newer_format_is_refused_not_damaged(run, monkeypatch):
    monkeypatch.setattr(steps, "WHOLE", 3)
    steps.commit(run / "checkpoints" / "3")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"format 3.* reads up to 2; update"):
        restored(run)
    assert (run / "checkpoints" / "3").is_dir()


def test_a_clock_that_was_set_back_changes_nothing(run):
    """Whatever the dates say: order is by step."""
    for day, step in enumerate(("3", "2", "1")):
        for path in (run / "checkpoints" / step).rglob("*"):
            # In the year 2096, the lowest step last
            os.utime(path, (4e9 + 86400 * day,) * 2)
        os.utime(run / "checkpoints" / step, (4e9 + 86400 * day,) * 2)
    with opened(config(run, checkpoint={"keep": 3}), program()) as (checkpointer, _):
        state, step = checkpointer.restore_or_init()
        assert step == 3
        checkpointer.save(4, state, 1.0)
        checkpointer.wait()
    assert steps.committed_in(run / "checkpoints") == [2, 3, 4]


def test_leftovers_are_removed_and_reported(run):
    shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "4.writing")
    step, _, said = restored(run)
    assert step == 3 and tells(said[0], "4.writing", "left unfinished")
    assert not (run / "checkpoints" / "4.writing").exists()


@pytest.mark.thorough
def test_never_moves_what_was_there_out_of_the_way(run):
    names = ("metrics.jsonl", "config.yaml", "alerts.jsonl", "trackers.json")
    for name in names:
        (run / name).write_text("{}\n")
    step, _, said = restored(run, resume="never")
    assert step == 0 and "are now in" in said[0]
    assert steps.committed_in(run / "checkpoints") == []
    assert steps.committed_in(run / "earlier-1" / "checkpoints") == [1, 2, 3]
    for name in names:
        assert (run / "earlier-1" / name).read_text() == "{}\n" and not (
            run / name
        ).exists()
    assert restored(run)[0] == 0  # what was set aside is not missed


# --- a run whose checkpoints are not there


def tree(directory):
    return {
        p.relative_to(directory): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "resume"),
    [
        ("missing", "auto"),
        ("empty", "another run"),
        ("unmarked", "auto"),
        ("only the rows show it", "another run"),
    ],
)
def test_a_run_that_had_a_checkpoint_and_has_none_is_refused_with_both_ways_out(
    fault, resume, run, three, tmp_path
):
    (run / "metrics.jsonl").write_text(
        '{"step": 1}\n{"step": 2, "checkpoint_bytes": 9}\n'
    )
    if fault == "unmarked":
        for step in ("1", "2", "3"):
            (run / "checkpoints" / step / steps.COMMIT).unlink()
    else:
        shutil.rmtree(run / "checkpoints")
    if fault == "empty":  # a disk that is not mounted
        (run / "checkpoints").mkdir()
    if fault.endswith("rows show it"):
        (run / NEWEST).unlink()
    before = tree(run)
    with pytest.raises(ConfigError) as refused:
        restored(run, resume=resume if resume == "auto" else str(three))
    sentence = str(refused.value)
    assert f"the run in {run} had " in sentence
    assert ("3 has no COMMIT" if fault == "unmarked" else "there is none") in sentence
    assert tells(sentence, "mount or restore", "--set checkpoint.resume=never")
    assert tree(run) == before
    step, _, said = restored(run, resume="never")
    assert step == 0 and len(said) == 1
    kept = {
        path.relative_to("earlier-1"): content for path, content in tree(run).items()
    }
    assert kept == before


@pytest.mark.thorough
def test_a_run_that_ended_before_its_first_checkpoint_starts_anew_and_its_rows_are_set_aside(
    tmp_path,
):
    """As under Slurm, which starts it again; whatever its rows say of steps at which a save failed."""
    (tmp_path / "checkpoints" / "2.writing").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    step, _, said = restored(tmp_path)
    assert step == 0 and not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "earlier-1" / "metrics.jsonl").read_text() == '{"step": 9}\n'
    assert tells(said[1], "no checkpoint was written", "starts anew", "metrics")
    assert restored(tmp_path)[2] == []


def test_rows_of_before_a_start_from_another_run_are_set_aside(three, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert restored(tmp_path, resume=str(three))[0] == 3
    assert (tmp_path / "earlier-1" / "metrics.jsonl").exists() and not (
        tmp_path / "metrics.jsonl"
    ).exists()


@pytest.mark.parametrize("path", ["{}", "{}/checkpoints", "{}/checkpoints/3"])
def test_another_run_or_one_of_its_steps_is_gone_on_from(path, three, tmp_path):
    step, state, _ = restored(tmp_path / "new", resume=path.format(three))
    assert step == 3 and same(state, numbered(program(), seed=3))


def test_a_run_that_began_from_another_goes_on_from_its_own(run, three):
    (run / "checkpoints" / "3").rename(run / "3")
    step, _, said = restored(run, resume=str(three))
    assert step == 2 and "it goes on from its own" in said[0]


def test_damage_in_another_run_is_passed_over_and_left_there(run, tmp_path):
    (run / "checkpoints" / "3" / steps.MANIFEST).unlink()
    before = sorted(run.rglob("*"))
    step, _, said = restored(tmp_path / "new", resume=str(run))
    assert step == 2 and said[0].endswith("it is passed over.")
    with pytest.raises(ConfigError, match="checkpoints/3"):
        restored(tmp_path / "other", resume=str(run / "checkpoints" / "3"))
    assert sorted(run.rglob("*")) == before


def test_a_file_in_place_of_the_checkpoints_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(
        ConfigError, match=r"checkpoints cannot .* file exists; .* a directory"
    ):
        restored(tmp_path)


# --- the data


@pytest.mark.thorough
def test_a_run_from_another_ones_weights_may_read_other_data_and_one_that_goes_on_may_not(
    tmp_path,
):
    with opened(config(tmp_path / "old"), program(), read={"digest": "aa"}) as (
        checkpointer,
        _,
    ):
        checkpointer.save(1, numbered(program(), 1), loss=1.0)
    old, other = str(tmp_path / "old"), {"digest": "bb"}
    assert restored(tmp_path / "same", {"digest": "aa"}, resume=old)[::2] == (1, [])
    assert restored(tmp_path / "weights", other, resume=old, weights_only=True)[0] == 0
    with pytest.raises(ConfigError, match=r"data\.source synthetic .* \(bb, was aa\)"):
        restored(tmp_path / "whole", other, resume=old)
    step, _, said = restored(
        tmp_path / "whole", other, resume=old, allow=["data.source"]
    )
    assert step == 1 and "holds other tokens than it did" in said[0]


def test_a_checkpoint_of_before_digests_were_kept_is_gone_on_from(run):
    assert restored(run, {"digest": "aa"})[::2] == (3, [])


def test_processes_that_read_different_data_are_refused(run, monkeypatch):
    others = lambda own: [own, {"digest": "bb"}]
    monkeypatch.setattr("meshtrain.checkpoint.checkpointer.gathered", others)
    with pytest.raises(ConfigError, match=r"processes .* read different data; "):
        restored(run, {"digest": "aa"})


@pytest.mark.thorough
def test_steps_are_in_the_order_of_their_eval_losses_and_of_equal_ones_the_earlier_is_first(
    tmp_path,
):
    run = saved(tmp_path / "run", 5, evals={2: 1.5, 3: 1.0, 4: 1.0}, keep_best=0)
    for path in (run, run / "checkpoints"):
        assert [d.name for d in rank_by_eval_loss(path)] == ["3", "4", "2"]


EVALUATED = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 4.0}


@pytest.mark.parametrize(
    ("losses", "keys", "stay"),
    [
        ({1: None, 10: None, 9: None, 2: None}, {"keep": 2}, {9, 10}),
        ({1: None, 2: None}, {"keep": 3}, {1, 2}),
        (EVALUATED, {"keep": 1, "keep_best": 1}, {2, 5}),
        (EVALUATED, {"keep": 1, "keep_best": 2}, {2, 3, 5}),
        (EVALUATED, {"keep": 1, "keep_best": 0}, {5}),
        ({1: math.nan, 2: 5.0, 3: None}, {"keep": 1, "keep_best": 1}, {2, 3}),
        (dict.fromkeys(range(1, 11)), {"keep": 1, "keep_every": 4}, {4, 8, 10}),
    ],
)
def test_the_newest_the_best_and_every_nth_stay(losses, keys, stay):
    assert retained(losses, CheckpointConfig(**keys)) == stay


@pytest.mark.parametrize(
    ("resume", "make", "sentence"),
    [
        ("atuo", None, r"checkpoint\.resume is atuo, .* mean auto"),
        ("{}/nothing", None, "no checkpoint; .*auto, never, .*run directory"),
        ("{}/file", Path.touch, "checkpoint"),
        ("{}/void", Path.mkdir, "no checkpoint"),
        ("{}/link", lambda path: path.symlink_to("gone"), "checkpoint"),
        ("{}/loop", lambda path: path.symlink_to("loop"), "checkpoint"),
        ("{}/pipe", os.mkfifo, "checkpoint"),
        ("{}/" + "x" * 5000, None, "checkpoint"),
    ],
)
def test_what_names_no_checkpoint_is_refused(resume, make, sentence, tmp_path):
    if make:
        make(Path(resume.format(tmp_path)))
    with pytest.raises(ConfigError, match=sentence):
        restored(tmp_path / "new", resume=resume.format(tmp_path))
