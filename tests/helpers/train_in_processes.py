"""A run of several processes of this machine, which find each other by the environment."""

import os
import subprocess
import sys
from pathlib import Path

import jax
from free_port import free_port

from meshtrain.config import Config, to_yaml


def train_in_processes(config: Config, count: int, path: Path) -> None:
    """Trains a config, written to `path`, in so many processes; AssertionError, with what they said, if one of them
    fails.
    """
    path.write_text(to_yaml(config))
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "meshtrain.train", "--config", str(path)]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"JAX_PROCESS_ID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, errors
