"""An error of reading says nothing of the bytes: a step that cannot be read now is tried again, then left as it is."""

import errno
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpoint_runs import config, opened, program, restored
from refusing_disk import refusing

from meshtrain.checkpoint import arrays, digests, steps
from meshtrain.checkpoint.__main__ import main
from meshtrain.checkpoint.finding import rank_by_eval_loss
from meshtrain.config import ConfigError
from meshtrain.errors import Unreadable

ERRORS = (
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.EINTR,
    errno.EAGAIN,
    errno.ETIMEDOUT,
    errno.ENOMEM,
)
FILES = (steps.COMMIT, steps.DIGESTS, steps.MANIFEST, "arrays/orbax.checkpoint")


def chosen(directory, **checkpoint):
    """(the step that a run in `directory` would restore, what it said)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "meshtrain.checkpoint.restoring.restore",
            lambda _, start, say: start.directory.name,
        )
        _, step, said = restored(
            config(directory, checkpoint={"keep": 3, **checkpoint}), program()
        )
    return step, said


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("call", ["open", "read", "stat"])
@pytest.mark.parametrize("name", FILES)
def test_one_passing_error_while_a_step_is_verified_changes_nothing(call, name, run):
    for number in ERRORS:
        with refusing(call, f"3/{name}", number, times=1) as disk:
            assert chosen(run) == (3, [])
        assert disk.refused == 1
    assert names(run) == ["1", "2", "3"]


@pytest.mark.parametrize("call", ["open", "read", "stat"])
@pytest.mark.parametrize("name", FILES)
def test_an_error_that_stays_is_no_damage_and_sets_nothing_aside(call, name, run):
    for number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES):
        with refusing(call, f"3/{name}", number), pytest.raises(Unreadable) as refused:
            chosen(run)
        sentence = str(refused.value)
        assert f"3/{name} cannot be read now: {errno_text(number)}" in sentence
        assert "damaged" not in sentence and "never" not in sentence
    assert names(run) == ["1", "2", "3"]
    assert chosen(run) == (3, [])


def errno_text(number):
    return os.strerror(number).lower()


@pytest.mark.parametrize(
    ("call", "name"),
    [("stat", "checkpoints/3"), ("list", "checkpoints"), ("stat", "checkpoints")],
)
def test_a_directory_that_cannot_be_looked_at_is_not_an_empty_one(call, name, run):
    with refusing(call, f"run/{name}", errno.EIO, times=1):
        assert chosen(run) == (3, [])
    with refusing(call, f"run/{name}", errno.EIO), pytest.raises(Unreadable):
        chosen(run)
    assert names(run) == ["1", "2", "3"]


@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/3", "checkpoints/3/manifest.json"]
)
def test_another_run_that_cannot_be_read_now_is_not_one_without_checkpoints(
    name, three, tmp_path
):
    call = "list" if name == "checkpoints" else "stat"
    with (
        refusing(call, f"{three.name}/{name}", errno.ESTALE),
        pytest.raises(Unreadable),
    ):
        chosen(tmp_path / "new", resume=str(three))
    assert not (tmp_path / "new" / "metrics.jsonl").exists()


def test_a_step_that_is_damaged_stays_where_it_is_while_the_one_before_cannot_be_read(
    run,
):
    (run / "checkpoints" / "3" / steps.COMMIT).write_bytes(b"")
    with refusing("read", f"2/{steps.MANIFEST}", errno.EIO), pytest.raises(Unreadable):
        chosen(run)
    assert names(run) == ["1", "2", "3"]
    assert chosen(run)[0] == 2 and names(run) == ["1", "2", "3.damaged"]


def test_a_note_of_the_newest_step_that_cannot_be_read_starts_nothing_anew(run):
    for step in ("1", "2", "3"):
        steps.remove(run / "checkpoints" / step)
    with refusing("open", ".newest-checkpoint", errno.EIO), pytest.raises(Unreadable):
        chosen(run)
    with pytest.raises(ConfigError, match="had a checkpoint of step 3"):
        chosen(run)


def test_the_best_step_is_not_another_because_its_manifest_cannot_be_read(run):
    with refusing("read", f"2/{steps.MANIFEST}", errno.EIO), pytest.raises(Unreadable):
        rank_by_eval_loss(run)


def test_a_stranger_beside_the_steps_that_cannot_be_read_keeps_no_run_from_going_on(
    run,
):
    stranger = run / "checkpoints" / "lost+found"
    stranger.mkdir()
    with refusing("stat", "lost+found/COMMIT", errno.EACCES):
        step, said = chosen(run)
    assert (
        step == 3
        and len(said) == 1
        and "lost+found" in said[0]
        and "not known" in said[0]
    )


# --- retention and links


def test_a_step_that_cannot_be_read_is_not_removed_and_no_save_fails_for_it(run):
    with opened(config(run, checkpoint={"keep": 1}), program()) as (checkpointer, said):
        state, step = checkpointer.restore_or_init()
        with refusing("read", f"3/{steps.MANIFEST}", errno.EIO):
            checkpointer.save(step + 1, state, 1.0)
            checkpointer.wait()
    assert names(run) == ["3", "4"]
    said = [sentence for sentence in said if "is left alone" in sentence]
    assert (
        len(said) == 1
        and "3 is left alone" in said[0]
        and "cannot be read now" in said[0]
    )


# --- the arrays, which TensorStore reads


def stored(tmp_path):
    arrays.write(tmp_path / "arrays", {"a": jnp.arange(4.0)}).result()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {"a": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=device)}


def refusals(monkeypatch, times, error):
    load, left = arrays.ocp.load, [times]

    def refused(*arguments):
        if left[0] > 0:
            left[0] -= 1
            raise error
        return load(*arguments)

    monkeypatch.setattr(arrays.ocp, "load", refused)
    monkeypatch.setattr("meshtrain.files.PAUSES", (0.0, 0.0))


TENSORSTORE = ValueError(
    "ABORTED: Failed to open: \"x\": Stale file handle [os_error_code='116'] [source='y']"
)


@pytest.mark.parametrize(
    "error",
    [TENSORSTORE, OSError(errno.EIO, "Input/output error", "x")],
    ids=["C++", "Python"],
)
def test_arrays_are_read_again_after_an_error_that_passes(error, tmp_path, monkeypatch):
    targets = stored(tmp_path)
    refusals(monkeypatch, 2, error)
    assert arrays.read(tmp_path / "arrays", targets)["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "error",
    [TENSORSTORE, OSError(errno.EIO, "Input/output error", "x")],
    ids=["C++", "Python"],
)
def test_arrays_that_cannot_be_read_now_are_not_said_to_be_of_another_version(
    error, tmp_path, monkeypatch
):
    targets = stored(tmp_path)
    refusals(monkeypatch, 9, error)
    with pytest.raises(Unreadable, match="cannot be read now"):
        arrays.read(tmp_path / "arrays", targets)


def test_arrays_that_are_not_there_are_still_a_config_error(tmp_path):
    targets = stored(tmp_path)
    with pytest.raises(ConfigError):
        arrays.read(tmp_path / "other", targets)


# --- commands


def test_verify_calls_no_step_damaged_that_it_cannot_read(run, capsys):
    with refusing("read", f"3/{steps.MANIFEST}", errno.EIO):
        assert main(["verify", str(run)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert main(["verify", "--json", str(run)]) == 1
        entries = json.loads(capsys.readouterr().out)
    assert (
        "not verified" in lines[2]
        and "cannot be read now" in lines[2]
        and "DAMAGED" not in lines[2]
    )
    assert [entry["intact"] for entry in entries] == [True, True, None]


def test_ls_shows_a_step_that_it_cannot_read(run, capsys):
    with refusing("stat", "checkpoints/3", errno.EIO):
        assert main(["ls", str(run)]) == 0
    assert "cannot be read now" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["show"], ["diff"]])
def test_other_commands_end_with_1_at_a_step_that_they_cannot_read(
    command, run, capsys
):
    step = str(run / "checkpoints" / "3")
    with refusing("open", f"3/{steps.MANIFEST}", errno.EIO):
        assert main([*command, *[step] * (2 if command == ["diff"] else 1)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "manifest.json cannot be read now: " in said


def test_a_short_read_is_read_on_and_is_no_damage(run, monkeypatch):
    monkeypatch.setattr(digests, "READ", 7)
    assert digests.problems(Path(run) / "checkpoints" / "3") == []
