"""Every test sees 8 fake CPU devices, a compiler told to be quick, what was compiled the last time, and nothing that a
user left behind.
"""

import os
import signal
import time
from pathlib import Path

import jax
import pytest

from experiments import quick_compile
from meshtrain.mesh import fake_cpu_devices

ROOT = Path(__file__).parents[1]
DEVICES = 8
# A hang fails soon, and says where; tests compile far longer than they run.
FLAGS = ["--xla_cpu_collective_call_terminate_timeout_seconds=60", *quick_compile.FLAGS]

BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes",
        type=float,
        help="tests that would begin later are skipped, and counted",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"not begun within {minutes:g} minutes")


def pytest_configure() -> None:
    # Under nohup, or in a script's background, they are ignored, as a run then does too; the tests of signals send
    # them.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join(
        [*FLAGS, given]
    ).strip()  # what the user sets comes last and wins
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # a test asks no hub that it has not set up itself
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    fake_cpu_devices(DEVICES)
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "meshtrain" / "compiled-tests"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="module")
def shared_programs():
    """What a module's tests run or read in this process builds each program once."""
    from shared_programs import shared_program

    with pytest.MonkeyPatch.context() as patch:
        for module in ("train", "reader"):
            patch.setattr(f"meshtrain.{module}.Program", shared_program)
        yield


@pytest.fixture(scope="session", autouse=True)
def a_directory_and_a_home_of_its_own(tmp_path_factory):
    """Tests run in a directory that holds the checkout's configs and guides alone, and in an empty home."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "experiments", "docs", "README.md"):
        (directory / name).symlink_to(ROOT / name)
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    os.chdir(directory)
