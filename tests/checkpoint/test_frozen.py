"""What a run never changes: written twice, linked by every later step, and found again by whoever reads one."""

import errno
import os
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from checkpoint_runs import (
    build_for,
    config,
    numbered,
    opened,
    program,
    restored,
    same,
    saved,
)
from refusals import tells

from meshtrain.checkpoint import Checkpointer, arrays, digests, steps
from meshtrain.checkpoint.__main__ import main
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.errors import ConfigError
from meshtrain.reader import read_model

LORA = {"lora": {"rank": 2, "alpha": 4.0}}
INTERLEAVED = "data 2, pipeline 2, interleaved, ZeRO-1"


@pytest.fixture(scope="module")
def tuned():
    return build_for(config(**LORA))


class Run:
    """A process of a run with adapters."""

    def __init__(self, directory, built, keep=9):
        self.root, self.built, self.said = directory / "checkpoints", built, []
        new = not self.root.is_dir()
        settings = config(directory, checkpoint={"keep": keep}, **LORA)
        self.checkpointer = Checkpointer(settings, built, say=self.said.append)
        self.state, self.step = (
            (numbered(built), 0) if new else self.checkpointer.restore_or_init()
        )

    def save(self, *which):
        """Saves such steps, each with other numbers in all but what is frozen; the bytes that each wrote."""
        found = []
        for step in which:
            other = jax.device_put(
                numbered(self.built, step), self.built.state_shardings
            )
            keep = lambda weight, new, old: new if weight.trained else old
            self.state = other._replace(
                params=self.built.layout.map(keep, other.params, self.state.params)
            )
            self.checkpointer.save(step, self.state, 1.0)
            self.checkpointer.wait()
            found.append(self.checkpointer.metrics()["checkpoint_bytes"])
        return found

    def close(self):
        self.checkpointer.close()
        return self

    def base(self, step):
        """The files that hold what is frozen in a step, as the disk knows them."""
        return {
            p.lstat().st_ino
            for p in (self.root / str(step) / "frozen").rglob("*")
            if p.is_file()
        }


@pytest.fixture(scope="module")
def three(tmp_path_factory, tuned):
    """A run of one process that has saved steps 1 to 3, and the bytes that each wrote."""
    run = Run(tmp_path_factory.mktemp("run"), tuned)
    written = run.save(1, 2, 3)
    return run.close(), written


@pytest.fixture
def copied(three, tmp_path):
    """A copy of it to damage, with the same links."""
    subprocess.run(["cp", "-a", three[0].root, tmp_path], check=True)
    return tmp_path


def flip(path):
    """A bit of a file, in its place, as a disk would."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def largest(directory):
    return max(
        (p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )


def test_frozen_weights_are_written_twice_and_linked_from_then_on(three, capsys):
    run, written = three
    assert run.base(3) == run.base(1) and not run.base(1) & run.base(2)
    whole = [digests.total_bytes(run.root / str(step)) for step in (1, 2, 3)]
    frozen = sum(
        p.stat().st_size for p in (run.root / "3" / "frozen").rglob("*") if p.is_file()
    )
    assert written == [whole[0], whole[1], whole[2] - frozen] and frozen > whole[2] / 2
    leaves = StepManifest.read(run.root / "3").leaves
    base = {f"params.{leaf.name}" for leaf in run.built.layout.flat if not leaf.trained}
    assert {name for name, leaf in leaves.items() if "frozen" in leaf} == base
    assert [digests.problems(run.root / str(step)) for step in (1, 2, 3)] == [
        [],
        [],
        [],
    ]
    assert main(["show", str(run.root)]) == 0
    shown = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.endswith("  frozen")
    ]
    assert len(shown) == len(base) and shown[0].split()[0] in min(
        base, key=list(leaves).index
    )


def test_a_step_whose_files_are_linked_is_whole_without_the_others(
    copied, tuned, three
):
    elsewhere = shutil.copytree(copied / "checkpoints" / "3", copied / "alone")
    for step in "12":
        steps.remove(copied / "checkpoints" / step)
    run = Run(copied, tuned).close()
    assert (run.step, run.said) == (3, []) and same(run.state, three[0].state)
    assert same(read_model(elsewhere).params, three[0].state.params)


@pytest.mark.thorough
def test_a_bit_that_flips_is_reported_of_every_step_that_shares_it_and_costs_the_steps_since_the_one_before(
    copied, tuned, capsys
):
    flip(largest(copied / "checkpoints" / "3" / "frozen"))
    assert main(["verify", str(copied)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    shared = r": DAMAGED: frozen/\S+ .* bytes 0 and \S+, .* 1 other step .*$"
    assert (
        re.match(f"1{shared}", first)
        and second.startswith("2: intact")
        and re.match(f"3{shared}", third)
    )
    run = Run(copied, tuned)
    assert run.step == 2 and run.said[0].endswith("it is set aside as 3.damaged.")
    run.save(3)
    assert not digests.problems(run.close().root / "3")


def test_a_run_that_keeps_one_step_has_one_copy_and_says_plainly_that_it_is_damaged(
    tmp_path, tuned
):
    run = Run(tmp_path, tuned, keep=1)
    first, second = run.save(1, 2)
    run.close()
    assert second < first / 2 and steps.committed_in(run.root) == [2]
    flip(largest(run.root / "2" / "frozen"))
    says = r"every checkpoint .* damaged \(2: frozen/\S+ is damaged"
    with pytest.raises(ConfigError, match=says):
        Run(tmp_path, tuned, keep=1)


@pytest.mark.thorough
def test_where_links_are_refused_all_is_written_again_and_that_is_said_once(
    tmp_path, tuned, monkeypatch
):
    made, link = [], os.link

    def refused(source, target):
        """Refuses every third link."""
        made.append(target)
        if len(made) % 3 == 0:
            raise OSError(errno.EMLINK, "Too many links")
        link(source, target)

    monkeypatch.setattr(os, "link", refused)
    run = Run(tmp_path, tuned)
    run.save(1, 2, 3, 4)
    run.close()
    assert len(made) == 6
    (said,) = run.said
    assert tells(
        said, f"{run.root}/1 cannot be linked", "(too many links)", "written again"
    )
    assert len(set.union(*map(run.base, (1, 2, 3, 4)))) == 4 * len(run.base(1))
    assert not digests.problems(run.root / "3")


@pytest.mark.thorough
def test_a_file_that_somebody_has_cut_short_or_moved_away_is_not_linked_to(
    copied, tuned
):
    run = Run(copied, tuned)
    run.save(4)
    file = largest(run.root / "3" / "frozen")
    file.rename(copied / "moved")
    file.symlink_to(copied / "moved")
    run.save(5)
    run.close()
    assert "not as it was written" in run.said[0]
    assert not any(
        p.is_symlink() for p in (run.root / "5").rglob("*")
    ) and not digests.problems(run.root / "5")


@pytest.mark.thorough
def test_a_process_that_goes_on_links_to_what_it_has_verified_once_it_has_another_copy(
    copied, tuned
):
    run = Run(copied, tuned)
    fourth, fifth = run.save(4, 5)
    run.close()
    assert (
        run.base(5) == run.base(3)
        and fifth < fourth / 2
        and not run.base(4) & run.base(3)
    )


def test_a_killed_process_s_links_go_and_the_files_stay(copied, tuned):
    third, ninth = copied / "checkpoints" / "3", copied / "checkpoints" / "9.writing"
    shutil.copytree(third / "frozen", ninth, copy_function=os.link)
    Run(copied, tuned).close()
    assert not ninth.exists() and not digests.problems(third)


@pytest.mark.thorough
def test_with_another_dtype_all_is_written_again_and_that_is_said(copied):
    half = build_for(config(precision={"compute": "bfloat16"}, **LORA))
    settings = config(
        copied, precision={"compute": "bfloat16"}, checkpoint={"keep": 9}, **LORA
    )
    with opened(settings, half) as (checkpointer, said):
        checkpointer.save(4, checkpointer.restore_or_init()[0], 1.0)
    leaf, rest = said[-1].split(maxsplit=1)
    written = f"frozen as float32 in {copied}/checkpoints/3"
    assert tells(rest, written, "held as bfloat16 from here on: ")
    assert (
        StepManifest.read(copied / "checkpoints" / "4").leaves[leaf]["dtype"]
        == "bfloat16"
    )
    assert not digests.problems(copied / "checkpoints" / "4")


@pytest.mark.thorough
def test_a_run_goes_on_on_another_mesh_with_the_same_weights(copied, three, tuned):
    other = build_for(config(layout=INTERLEAVED, **LORA))
    run = Run(copied, other)
    before, after = (
        GlobalArrays(b).arrays(state)
        for b, state in ((tuned, three[0].state), (other, run.state))
    )
    assert all(np.array_equal(before[name], after[name]) for name in before)
    run.save(4, 5)
    run.close()
    assert run.base(5) == run.base(3)
    # step 4 has files of its own, 5 those of 3
    fifth, fourth = (read_model(run.root / step) for step in "54")
    base = [weight.name for weight in fifth.program.layout.flat if not weight.trained]
    assert all(
        np.array_equal(fifth.weights[name], fourth.weights[name]) for name in base
    )
    assert any(
        not np.array_equal(x, fourth.weights[name]) for name, x in fifth.weights.items()
    )


@pytest.mark.thorough
def test_what_is_frozen_in_a_checkpoint_may_be_trained_by_who_starts_from_it(tmp_path):
    frozen = build_for(config(train={"trainable": ["head.*"]}))
    state = numbered(frozen)
    with opened(config(tmp_path, train={"trainable": ["head.*"]}), frozen) as (
        checkpointer,
        _,
    ):
        checkpointer.save(1, state, 1.0)
    resume = {"resume": str(tmp_path), "weights_only": True}
    began, step, _ = restored(config(tmp_path / "full", checkpoint=resume), program())
    assert step == 0 and same(began.params, state.params)


def test_a_run_that_trains_everything_has_neither_another_directory_nor_another_format(
    tmp_path,
):
    step = saved(tmp_path, steps=1) / "checkpoints" / "1"
    assert {p.name for p in step.iterdir()} == {
        "arrays",
        "manifest.json",
        "digests.json",
        "COMMIT",
    }
    assert (
        (step / steps.COMMIT).read_text().startswith("meshtrain checkpoint, format 1\n")
    )
    assert all(
        leaf.keys() == {"shape", "dtype"}
        for leaf in StepManifest.read(step).leaves.values()
    )


@pytest.mark.thorough
def test_a_disk_that_is_full_in_the_middle_costs_that_save_and_the_second_copy(
    tmp_path, tuned, monkeypatch
):
    write, ended = arrays.write, []

    class Late:
        def result(self, timeout=None):
            ended.append(True)

    def full(directory, found):
        if directory.name == "frozen":
            return Late()
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(tmp_path, tuned)
    first = run.save(1)[0]
    monkeypatch.setattr(arrays, "write", full)
    run.checkpointer.save(2, run.state, 1.0)
    monkeypatch.setattr(arrays, "write", write)
    third = run.save(3)[0]
    run.close()
    (failed,) = run.said
    assert tells(
        failed, "step 2 could not be written: ", "no space", "step 1 is intact."
    )
    # the half that was still being written has been waited for, so that it does not come back
    assert ended == [True] and sorted(p.name for p in run.root.iterdir()) == ["1", "3"]
    assert run.base(3) == run.base(1) and third < first / 2
