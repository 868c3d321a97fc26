"""Supervisors that start at once, and a config that needs them on several nodes."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    run = {"directory": str(tmp_path / "the run's")}
    path.write_text(yaml.safe_dump({"run": run, "mesh": {"data": 4, "tensor": 2}}))
    return path


@pytest.fixture(scope="module")
def engine_environment() -> Iterator[None]:
    """In jobs of an engine `python` is this one, with one device a process; what they compile is kept."""
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+",
        "",
        os.environ.get("XLA_FLAGS", ""),
    )
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": f"{os.environ['XDG_CACHE_HOME']}/meshtrain/compiled-tests",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def scenario(request, capsys) -> Callable[[str, float, str], None]:
    """Prints a row of the table in docs/benchmarks.md: what was done, when it began, what came of it."""
    engine = "Ray" if "ray" in request.module.__name__ else "Slurm"

    def row(what: str, began: float, outcome: str) -> None:
        # What a test captures is a script to run.
        with capsys.disabled():
            print(f"| {engine} | {what} | {outcome} | {time.monotonic() - began:.0f} |")

    return row
