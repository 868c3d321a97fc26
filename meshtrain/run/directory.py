"""The run directory: config.yaml, metrics.jsonl, checkpoints/."""

import os
from pathlib import Path

from meshtrain.config import Config, ConfigError, refusal


def run_directory(config: Config) -> Path:
    """The run directory, made; ConfigError if it cannot be written."""
    directory = Path(config.run.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run.directory {directory} cannot be written: {refusal(error)}; give another with --set run.directory=PATH."
        ) from None
    return directory
