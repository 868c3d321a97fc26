"""What the tests of training processes share."""

import jax
import pytest
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
