"""What the runtime throws, in a sentence."""

import re

import jax
import pytest

from meshtrain.errors import ConfigError, PortTaken
from meshtrain.run.lock import RunInUse
from meshtrain.run.processes import RunFailure, SickDevice, explain, kind_of, room
from meshtrain.survive.heartbeat import CODES


@pytest.fixture
def of_several(monkeypatch):
    """This process, as one of several."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(
            "UNKNOWN: Gloo all-reduce failed: [127.0.0.1]:7071: Connection reset"
        ),
        ValueError(
            "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:39064"
        ),
        jax.errors.JaxRuntimeError(
            "INTERNAL: NCCL operation ncclAllReduce failed: remote process exited"
        ),
        jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat timeout."),
    ],
)
def test_a_process_that_is_gone_is_reported_with_the_step_to_go_on_from(
    error, of_several
):
    for newest, start in ((40, "from step 40"), (None, "from the start")):
        failure = explain(error, newest)
        assert isinstance(failure, RunFailure)
        assert re.match(f"another process .*: {re.escape(str(error))}; ", str(failure))
        assert str(failure).endswith(f"run again to go on {start}.")


def test_memory_that_a_device_lacks_is_reported_with_what_needs_less():
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nStack: ..."
    )
    sentence = str(explain(error, None))
    assert "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.; " in sentence
    assert "meshtrain plan" in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a mistake of ours"),
        ValueError("Gloo failed"),
        RunFailure("said already"),
    ],
)
def test_what_has_no_sentence_or_has_one_stays_as_it_is(error):
    assert explain(error, None) is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FloatingPointError("the loss is nan"), "numbers"),
        (SickDevice("wrong bits", [1]), "sick"),
        (
            jax.errors.JaxRuntimeError(
                "UNKNOWN: Gloo all-reduce failed: connection reset"
            ),
            "peer",
        ),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "memory"),
        (MemoryError(), "memory"),
        (RunInUse("in use"), "lock"),
        (PortTaken("in use"), "port"),
        (ConfigError("wrong"), "config"),
        (RunFailure("no directory"), "error"),
        (ValueError("a mistake of ours"), "error"),
    ],
)
def test_a_supervisor_is_told_of_what_kind_a_failure_was(error, kind, of_several):
    assert kind_of(explain(error, None)) == kind in CODES


def test_values_of_all_sizes_have_room_in_few():
    """JAX compiles a program for each size."""
    sizes = range(1, 5000)
    assert all(room(size) >= size for size in sizes)
    assert len({room(size) for size in sizes}) == 6
