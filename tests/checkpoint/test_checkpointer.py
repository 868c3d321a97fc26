"""The lock that a run's checkpoints hold, and that it is let go whatever fails."""

import pytest
from checkpoint_runs import config, program

from meshtrain.checkpoint import Checkpointer, steps
from meshtrain.config import ConfigError
from meshtrain.errors import Unreadable


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), KeyboardInterrupt()]
)
def test_a_checkpointer_that_could_not_be_made_does_not_lock_its_own_process_out(
    error, tmp_path, monkeypatch
):
    """As in a notebook: the cell is run again."""

    def refused(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(steps, "remove_leftovers", refused)
        with pytest.raises(
            (Unreadable, KeyboardInterrupt), match=r"input/output error|^$"
        ):
            Checkpointer(config(tmp_path), program())
    Checkpointer(config(tmp_path), program()).close()


def test_one_that_was_refused_leaves_the_lock_with_its_owner(tmp_path):
    first = Checkpointer(config(tmp_path), program())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is in use by process \d+ on "):
            Checkpointer(config(tmp_path), program())
    first.close()
    Checkpointer(config(tmp_path), program()).close()


def phases(directory, **checkpoint) -> list[str]:
    """Those that a run goes through until it has its state, and what it does in them; a step is saved at the end."""
    checkpointer, did = (
        Checkpointer(config(directory, checkpoint=checkpoint), program()),
        [],
    )

    def noted(name):
        work = getattr(checkpointer, name)

        def note(*arguments):
            did.append(name)
            return work(*arguments)

        return note

    checkpointer._init, checkpointer._restore = noted("_init"), noted("_restore")
    try:
        state, step = checkpointer.restore_or_init(did.append)
        checkpointer.save(step + 1, state, 1.0)
        checkpointer.wait()
    finally:
        checkpointer.close()
    return did


@pytest.mark.thorough
def test_a_new_run_makes_its_weights_in_the_phase_init_and_one_that_goes_on_reads_them_in_restore(
    tmp_path,
):
    assert phases(tmp_path / "run") == ["restore", "init", "_init"]
    assert phases(tmp_path / "run") == ["restore", "_restore"]
    assert phases(tmp_path / "another", resume=str(tmp_path / "run")) == [
        "restore",
        "_restore",
    ]
    assert phases(
        tmp_path / "weights", resume=str(tmp_path / "run"), weights_only=True
    ) == [
        "restore",
        "_restore",
    ]
    (tmp_path / "killed" / "checkpoints" / "3").mkdir(parents=True)
    assert phases(tmp_path / "killed") == ["restore", "init", "_init"]
    assert phases(tmp_path / "run", resume="never") == ["restore", "init", "_init"]
