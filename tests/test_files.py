"""Files that the system does not let us read now: tried again while that may pass, and never taken for another
finding.
"""

import errno
import pickle

import pytest
from refusing_disk import refusing

from meshtrain import files
from meshtrain.cli import command
from meshtrain.config import load
from meshtrain.errors import ConfigError, Unreadable
from meshtrain.run.lock import RunLock
from meshtrain.run.processes import first_decides

PASSING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EINTR)


def failing(number, times):
    left = [times]

    def call():
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, "refused", "there")
        return "read"

    return call


@pytest.mark.parametrize("number", PASSING)
def test_what_may_pass_is_tried_again_and_no_more_often_than_there_are_pauses(
    number, monkeypatch
):
    monkeypatch.setattr(files, "PAUSES", (0.0, 0.0))
    assert files.retried(failing(number, 2)) == "read"
    with pytest.raises(OSError):
        files.retried(failing(number, 3))


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EROFS]
)
def test_what_does_not_pass_is_not_waited_for(number, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(OSError):
        files.retried(failing(number, 1))


def test_all_tries_together_take_less_than_ten_seconds():
    assert sum(files.PAUSES) < 10


@pytest.mark.parametrize("call", ["open", "read", "stat"])
def test_a_config_is_read_after_an_error_that_passes_and_is_no_bad_input_after_one_that_stays(
    call, tmp_path
):
    path = tmp_path / "config.yaml"
    path.write_text("train: {steps: 3}\n")
    with refusing(call, path, errno.EIO, times=2):
        assert load(path).train.steps == 3
    with (
        refusing(call, path, errno.EIO),
        pytest.raises(Unreadable, match=r"config\.yaml cannot be read now: "),
    ):
        load(path)
    with (
        refusing(call, path, errno.EACCES),
        pytest.raises(ConfigError, match="cannot be read: permission denied"),
    ):
        load(path)


def test_a_command_that_cannot_read_now_ends_with_1_and_one_sentence(capsys):
    @command
    def main(arguments):
        raise Unreadable("it cannot be read now")

    assert main([]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(
        "meshtrain: it cannot be read now; "
    )


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, Unreadable), (errno.ENOSPC, ConfigError)]
)
def test_what_the_disk_refuses_the_first_process_is_bad_input_only_where_it_stays(
    number, kind
):
    with pytest.raises(kind, match="there cannot be used"):
        first_decides(failing(number, 1))


def test_a_lock_that_cannot_be_opened_now_is_no_bad_input(tmp_path):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcntl.lockf", refuse)
        with pytest.raises(Unreadable):
            RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_the_error_comes_whole_from_a_worker_process():
    error = Unreadable("it cannot be read now: x")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
