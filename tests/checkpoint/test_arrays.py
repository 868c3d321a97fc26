"""Orbax reads what it wrote, and prints nothing of a failed save."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from checkpoint_runs import saved

from meshtrain.checkpoint import arrays
from meshtrain.config import ConfigError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return (
        saved(tmp_path_factory.mktemp("run"), steps=1) / "checkpoints" / "1" / "arrays"
    )


@pytest.mark.parametrize(
    "name, shape, sentence",
    [
        (
            "params.head.weight",
            (24, 256),
            r"arrays cannot be read by Orbax .*\(24, 256\)",
        ),
        (
            "params.head.nothing",
            (24, 257),
            r"/arrays .* no array params\.head\.nothing\.$",
        ),
    ],
)
def test_an_array_that_is_not_as_the_manifest_says_is_one_sentence(
    name, shape, sentence, directory
):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ConfigError, match=sentence) as refused:
        arrays.read(
            directory, {name: jax.ShapeDtypeStruct(shape, "float32", sharding=device)}
        )
    assert "\n" not in str(refused.value)


def record(path: str, error: bool) -> logging.LogRecord:
    info = (OSError, OSError(28, "full"), None) if error else None
    return logging.LogRecord("absl", logging.ERROR, path, 1, "failed", (), info)


def test_orbax_logs_no_traceback_and_all_else_is_logged():
    logger = logging.getLogger("absl")
    assert not logger.filter(record("/x/orbax/checkpoint/futures.py", error=True))
    assert logger.filter(record("/x/orbax/checkpoint/futures.py", error=False))
    assert logger.filter(record("/x/mine.py", error=True))


def test_a_closed_event_loop_is_not_printed_and_every_other_error_is(monkeypatch):
    passed = []
    monkeypatch.setattr(arrays, "unraisable_hook", passed.append)
    closed = "Event loop is closed"
    for error in (
        RuntimeError(closed),
        RuntimeError("something else"),
        OSError(closed),
    ):
        arrays._report(SimpleNamespace(exc_type=type(error), exc_value=error))
    assert [str(u.exc_value) for u in passed] == [
        "something else",
        "Event loop is closed",
    ]


@pytest.mark.thorough
def test_what_orbax_began_and_never_awaited_is_not_printed_and_of_all_else_it_is():
    command = """
import meshtrain.checkpoint.arrays
async def run(): pass
for name in ("OrbaxLayout.save_checkpointables.<locals>._run_background", "mine"):
    run.__qualname__ = name
    run()
"""
    printed = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True
    ).stderr
    assert (
        "OrbaxLayout" not in printed and "coroutine 'mine' was never awaited" in printed
    )
