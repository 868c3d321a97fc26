"""A Ray cluster on this machine, for tests: a head and further nodes, each a raylet with its own CPUs, ended with who
started them.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from free_port import free_port
from slurm_cluster import kill_tree, until

from meshtrain.orphans import die_with_parent


def missing() -> str:
    """Returns why no cluster can be started here; nothing if one can."""
    if (
        importlib.util.find_spec("ray") is None
        or importlib.util.find_spec("ray.dashboard") is None
    ):
        return "ray is not installed (pip install 'ray[default]', 0.3 GB)"
    return ""


class RayCluster:
    """A running cluster; `variables` are what `ray job submit` needs."""

    def __init__(self, nodes: int = 2) -> None:
        # Ray makes sockets below it, whose paths may have 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self.count, self.variables = nodes, dict[str, str]()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "RayCluster":
        try:
            port, dashboard = free_port(), free_port()
            head = [
                "--head",
                f"--port={port}",
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={dashboard}",
            ]
            text = self._start(*head, f"--temp-dir={self.directory}")
            # Where it is by its own words: loopback, if given, is not what it takes.
            (address,) = set(re.findall(r"ray start --address='([^']+)'", text))
            # One after the other: of two that start at once one may time out.
            for _ in range(self.count - 1):
                self._start(f"--address={address}")
            self.variables = {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
            until(
                lambda: self.command("job", "list", check=False) is not None,
                120,
                "an answer of the dashboard",
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            kill_tree(process.pid)
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, *words: str, tries: int = 5) -> str:
        output = self.directory / f"node{len(self._processes)}.out"
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
        command = [
            ray(),
            "start",
            "--block",
            "--num-cpus=1",
            "--object-store-memory=100000000",
            *words,
        ]
        with open(output, "wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | quiet,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        until(
            lambda: (
                "Ray runtime started" in output.read_text()
                or process.poll() is not None
            ),
            300,
            "a node of Ray",
        )
        if process.returncode is not None:
            # Ray gives a raylet 30 s to begin, which a loaded machine may not.
            if tries == 1:
                pytest.skip(f"no node of Ray starts here: {output.read_text()[-300:]}")
            return self._start(*words, tries=tries - 1)
        self._processes.append(process)
        return output.read_text()

    def command(self, *words: str, check: bool = True) -> str | None:
        """Runs a command of Ray's; returns what it printed, None if it failed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(
                [ray(), *words],
                env=os.environ | self.variables,
                capture_output=True,
                text=True,
                timeout=180,
            )
            assert not check or ended.returncode == 0, ended.stderr
            return ended.stdout + ended.stderr if ended.returncode == 0 else None
        return None


def ray() -> str:
    return str(Path(sys.executable).with_name("ray"))
