"""What `launch ray` prints, run by a real Ray: two nodes on this machine (`ray_cluster`)."""

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import slurm_cluster
from ray_cluster import RayCluster, missing
from small_runs import losses, overrides, step

from meshtrain.launch.__main__ import main
from meshtrain.launch.job import GRACE

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can be"),
]
LONG = 200  # steps


@pytest.fixture(scope="module")
def cluster(engine_environment):
    with RayCluster() as cluster:
        yield cluster


class Job:
    """A run's job: submitted by the printed script, its output followed."""

    def __init__(
        self,
        cluster: RayCluster,
        directory: Path,
        capsys,
        steps: int,
        **settings: object,
    ) -> None:
        self.cluster, self.run = cluster, directory / "run"
        words = [
            "ray",
            "--config",
            "configs/quickstart.yaml",
            "--nodes",
            "2",
            "--gpus-per-node",
            "0",
        ]
        assert (
            main(
                [
                    *words,
                    "--directory",
                    os.getcwd(),
                    *overrides(self.run, steps, **settings),
                ]
            )
            == 0
        )
        self.process = subprocess.Popen(
            ["bash", "-c", capsys.readouterr().out],
            env=os.environ | cluster.variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line

    def ended(self, seconds: float = 300) -> int:
        """Returns the exit code of the script."""
        code = self.process.wait(seconds)
        self._reader.join(30)
        return code

    @property
    def name(self) -> str:
        found = re.search(r"Job '([^']+)' submitted", self.text)
        assert found, self.text
        return found[1]

    def reached(self, number: int) -> None:
        self.until(lambda: step(self.run) >= number, f"step {number}")

    def until(self, holds, what: str) -> None:
        try:
            slurm_cluster.until(holds, 240, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text[-6000:]}") from None


@pytest.fixture
def submitted(cluster, tmp_path, capsys):
    jobs: list[Job] = []

    def submit(steps: int, **settings: object) -> Job:
        jobs.append(Job(cluster, tmp_path, capsys, steps, **settings))
        return jobs[-1]

    yield submit
    for job in jobs:
        if job.process.poll() is None:
            cluster.command("job", "stop", job.name, check=False)
            job.process.kill()


def _pid(run: Path, words: str) -> int:
    """Returns the first process of a run whose command has some words."""
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        command = slurm_cluster.command_of(int(entry.name))
        if (
            words in command
            and (str(run) in command or "ray::" in words)
            and "launch.on_ray" not in command
        ):
            return int(entry.name)
    raise AssertionError(f"no {words} runs")


def test_a_job_is_stopped_with_a_checkpoint_and_goes_on(submitted, cluster, scenario):
    job = submitted(10**6)
    job.reached(25)
    began = time.monotonic()
    cluster.command("job", "stop", job.name)
    job.ended(GRACE + 60)
    stopped = step(job.run)
    checkpoints = [
        int(path.name)
        for path in (job.run / "checkpoints").iterdir()
        if path.name.isdecimal()
    ]
    assert max(checkpoints) == stopped, job.text
    scenario("ray job stop", began, f"stopped with a checkpoint of step {stopped}")
    began = time.monotonic()
    job = submitted(stopped + 20)
    job.reached(stopped + 1)
    scenario("submitted again", began, "went on")
    assert job.ended() == 0, job.text
    assert len(losses(job.run)) == stopped + 20


def test_a_rank_a_supervisor_and_a_worker_are_killed(submitted, cluster, scenario):
    job, at = submitted(LONG), 10
    for what, words in (
        ("a rank", "meshtrain.train"),
        ("a supervisor", "meshtrain.survive"),
        ("a worker of Ray's", "ray::on_node"),
    ):
        job.reached(at)
        began, killed = time.monotonic(), step(job.run)
        os.kill(_pid(job.run, words), signal.SIGKILL)
        job.until(lambda: step(job.run) > killed + 5, f"a step after {killed}")  # noqa: B023
        scenario(f"{what} killed", began, "went on")
        at = step(job.run) + 5
    assert job.ended() == 0, job.text
    assert len(losses(job.run)) == LONG
