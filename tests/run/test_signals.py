import os
import signal

import pytest

from meshtrain.run.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_is_told(number, capsys):
    with StopSignals() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.requested
    assert capsys.readouterr().err == f"meshtrain: {number.name}: stopping after this step, with a checkpoint.\n"


def test_the_handlers_of_before_are_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
