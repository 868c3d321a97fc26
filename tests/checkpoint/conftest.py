"""What the tests of training processes, and of steps to damage, share."""

import shutil

import jax
import pytest
from checkpoint_runs import saved
from training_processes import EVERY, STEPS, losses_of


@pytest.fixture(scope="session")
def compiled_before():
    """The processes find the tests' compiled programs."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kept.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def undisturbed(compiled_before, tmp_path_factory):
    """The losses of an uninterrupted run, by step."""
    return losses_of(tmp_path_factory.mktemp("undisturbed"), STEPS, EVERY)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run directory with intact steps 1, 2 and 3."""
    return saved(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(three, tmp_path):
    """A copy to damage."""
    return shutil.copytree(three, tmp_path / "run")
