"""Supervisors that start at once, and a config that needs them on several nodes."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from supervisors import Supervisors

ODD = 'it\'s "odd" $HOME `x` é.yaml'  # a legal name of a file


@pytest.fixture
def supervisors(tmp_path: Path) -> Supervisors:
    return Supervisors(tmp_path / "super visors")


@pytest.fixture
def launched(supervisors: Supervisors) -> Iterator[list[subprocess.Popen[str]]]:
    """For launchers that a test starts: at its end they and their supervisors are gone."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        supervisors.end()
        process.communicate()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / ODD
    path.write_text(
        yaml.safe_dump({"run": {"directory": str(tmp_path / "the run's")}, "mesh": {"data": 4, "tensor": 2}})
    )
    return path
