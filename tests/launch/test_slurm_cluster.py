"""What `launch slurm` prints, run by a real Slurm: three nodes on this machine (`slurm_cluster`)."""

import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from documented import GUIDE, ROOT, fenced
from slurm_cluster import SlurmCluster, missing, until
from small_runs import losses, overrides, step

from meshtrain.launch.__main__ import main

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can be"),
]
SHORT, LONG = 12, 400  # steps


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, engine_environment):
    directory = tmp_path_factory.mktemp("slurm")
    with SlurmCluster(directory) as cluster:
        yield cluster


class Run:
    """A run's job: its script, submitted, and what it has written."""

    def __init__(
        self,
        cluster: SlurmCluster,
        directory: Path,
        capsys,
        steps: int,
        *words: str,
        **settings: object,
    ) -> None:
        self.cluster, self.run, self.began = (
            cluster,
            directory / "run",
            time.monotonic(),
        )
        words = ("slurm", "--config", "configs/quickstart.yaml", "--nodes", "2", *words)
        assert main([*words, *overrides(self.run, steps, **settings)]) == 0
        (directory / "job.sh").write_text(capsys.readouterr().out)
        self.output = directory / "output"
        self.number = cluster.submit(directory / "job.sh", f"--output={self.output}")

    def reached(self, number: int, seconds: float = 180) -> None:
        try:
            until(lambda: step(self.run) >= number, seconds, f"step {number}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def ended(self) -> dict[str, str]:
        try:
            return self.cluster.ended(self.number)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()[-6000:] if self.output.exists() else "no output"


@pytest.fixture
def submitted(cluster, tmp_path, capsys):
    runs: list[Run] = []

    def submit(steps: int, *words: str, **settings: object) -> Run:
        directory = tmp_path / str(len(runs))
        directory.mkdir()
        runs.append(Run(cluster, directory, capsys, steps, *words, **settings))
        return runs[-1]

    yield submit
    for run in runs:
        cluster.command("scancel", "--signal=KILL", "--full", run.number, check=False)
        cluster.command("scancel", run.number, check=False)


def test_the_guides_walk_ends_with_a_trained_model(cluster, tmp_path, scenario):
    (walk,) = [
        block
        for language, block in fenced(GUIDE)
        if language == "sh" and "sbatch" in block
    ]
    installs, *lines = walk.splitlines()
    assert installs.endswith("pip install -e '.[cuda12]'")
    began = time.monotonic()
    typed = "\n".join(lines).replace(
        "--nodes 2",
        f"--nodes 2 {shlex.join(overrides(Path('runs/quickstart'), SHORT))}",
    )
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").write_text("echo activated")
    before = f"cd {tmp_path}\nset -e\n"
    output = cluster.command(
        "bash",
        "-c",
        before + re.sub("meshtrain (monitor|survive status|report)", "echo", typed),
    )
    job = cluster.ended(re.search(r"Submitted batch job (\d+)", output)[1])
    (written,) = tmp_path.glob("quickstart-*.out")
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (
        written.read_text()
    )
    assert len(losses(tmp_path / "runs" / "quickstart")) == SHORT
    assert written.read_text().startswith("activated\n")
    scenario("the guide's walk, without pip", began, "COMPLETED, 0")


def test_a_cancelled_job_stops_with_a_checkpoint_and_stays_away(
    submitted, cluster, scenario
):
    run = submitted(10**6)
    run.reached(5)
    began = time.monotonic()
    cluster.command("scancel", run.number)
    until(
        lambda: (
            cluster.command("squeue", "-h", "-j", run.number, check=False).strip() == ""
        ),
        60,
        "an empty queue",
    )
    scenario("scancel", began, "CANCELLED, nodes free")
    assert cluster.job(run.number)["JobState"] == "CANCELLED"
    saved = [
        int(path.name)
        for path in (run.run / "checkpoints").iterdir()
        if path.name.isdecimal()
    ]
    assert max(saved) == step(run.run), run.text()


def test_a_stopped_run_goes_back_into_the_queue_and_on_with_the_same_losses(
    submitted, cluster, scenario
):
    # So many that the run is not over before the signal comes, on a machine that is fast, or slow to look.
    alone = submitted(LONG)
    whole = alone.ended() and losses(alone.run)
    run = submitted(LONG)
    run.reached(25)
    began = time.monotonic()
    cluster.command("scancel", "--signal=TERM", run.number)
    until(lambda: cluster.job(run.number)["Restarts"] == "1", 120, "a requeue")
    stopped = step(run.run)
    run.reached(stopped + 1)
    scenario("scancel --signal=TERM", began, f"75 at step {stopped}, requeued, went on")
    assert run.ended()["JobState"] == "COMPLETED"
    assert losses(run.run) == whole


def test_a_rank_a_supervisor_and_slurmd_are_killed(submitted, cluster, scenario):
    run = submitted(LONG)
    at = 10
    for what, words in (
        ("a rank", "meshtrain.train"),
        ("a supervisor", "-m meshtrain.survive"),
        ("slurmd", ""),
    ):
        run.reached(at)
        began = time.monotonic()
        if words:
            pids = [
                pid
                for pid in cluster.processes("n2", words)
                if "bash" not in _name(pid)
            ]
            os.kill(pids[0], signal.SIGKILL)
        else:
            cluster.kill_daemon("n2")
            cluster.start_daemon("n2")
        killed = step(run.run)
        run.reached(killed + 5)
        scenario(f"{what} killed", began, "went on")
        at = step(run.run) + 5
    job = run.ended()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == (
        "COMPLETED",
        "0:0",
        "0",
    ), run.text()
    assert len(losses(run.run)) == LONG


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


@pytest.mark.slow
def test_the_node_of_the_script_is_lost_and_the_others_end_the_job(
    submitted, cluster, scenario
):
    run = submitted(LONG, **{"survive.least": 1})
    run.reached(10)
    began = time.monotonic()
    host = cluster.job(run.number)["BatchHost"]
    killed = step(run.run)
    cluster.kill_node(host)
    try:
        run.reached(killed + 40)
        scenario("node of the batch script lost", began, "went on")
        job = run.ended()
        scenario(
            "node of the batch script lost", began, f"{LONG} steps, {job['JobState']}"
        )
        assert len(losses(run.run)) == LONG and job["JobState"] == "CANCELLED"
        until(
            lambda: (
                cluster.command("squeue", "-h", "-j", run.number, check=False).strip()
                == ""
            ),
            60,
            "free nodes",
        )
    finally:
        cluster.start_node(host)
        until(
            lambda: (
                cluster.command("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3"
            ),
            120,
            "idle nodes",
        )


@pytest.mark.parametrize(
    "code, settings",
    [(2, {"data.source": "/none/of/it"}), (3, {"survive.restarts": 0})],
)
def test_what_never_works_is_not_queued_again(submitted, cluster, code, settings):
    run = submitted(LONG, **settings)
    if code == 3:
        run.reached(5)
        os.kill(cluster.processes("n2", "meshtrain.train")[0], signal.SIGKILL)
    job = run.ended()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == (
        "FAILED",
        f"{code}:0",
        "0",
    ), run.text()


@pytest.mark.slow
def test_a_time_limit_ends_in_75_and_the_run_goes_on(submitted, cluster, scenario):
    # Slurm's signal 120 s before the end comes up to 60 s early.
    run = submitted(10**6, "--time", "0:04:00")
    run.reached(1, 60)
    until(lambda: cluster.job(run.number)["Restarts"] == "1", 240, "a requeue")
    stopped = step(run.run)
    began = time.monotonic()
    run.reached(stopped + 1)
    scenario("the time limit", began, f"75 at step {stopped}, requeued, went on")
    cluster.command("scancel", run.number)
    run.ended()
    losses(run.run)


ALONE = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive
{start} python -m meshtrain.train --config configs/quickstart.yaml {words}
"""


@pytest.mark.parametrize("start", ["srun --cpu-bind=none", ""])
def test_srun_of_the_same_command_on_every_node(cluster, tmp_path, start):
    words = overrides(tmp_path / "run", SHORT)
    (tmp_path / "job.sh").write_text(ALONE.format(start=start, words=" ".join(words)))
    number = cluster.submit(tmp_path / "job.sh", f"--output={tmp_path / 'output'}")
    job, output = cluster.ended(number), (tmp_path / "output").read_text()
    if start:
        assert job["JobState"] == "COMPLETED", output
        assert (
            len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= SHORT
        )
    else:
        assert (
            job["ExitCode"] == "2:0"
            and "start it with srun" in output
            and "Traceback" not in output
        ), output
