"""The lock that a run's checkpoints hold, and that it is let go whatever fails."""

import pytest
from checkpoint_runs import config, program

from meshtrain.checkpoint import Checkpointer, steps
from meshtrain.config import ConfigError


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_checkpointer_that_could_not_be_made_does_not_lock_its_own_process_out(
    error, tmp_path, monkeypatch
):
    """As in a notebook: the cell is run again."""

    def refused(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(steps, "remove_leftovers", refused)
        with pytest.raises((ConfigError, KeyboardInterrupt), match=r"input/output error|^$"):
            Checkpointer(config(tmp_path), program())
    Checkpointer(config(tmp_path), program()).close()


def test_one_that_was_refused_leaves_the_lock_with_its_owner(tmp_path):
    first = Checkpointer(config(tmp_path), program())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is in use by process \d+ on "):
            Checkpointer(config(tmp_path), program())
    first.close()
    Checkpointer(config(tmp_path), program()).close()
