"""The script for sbatch, run by bash with programs that stand for Slurm's and write down what they were told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.launch.__main__ import main
from meshtrain.survive.records import Plan, encode

# srun runs the first node's task, then ends with the code that it is told, as the highest of several would be.
PROGRAMS = {
    "srun": '#!{python}\nimport json, os, sys\njson.dump(sys.argv[1:], open(os.environ["TOLD"] + "/srun", "w"))\n'
    'plan = os.environ["PLAN"]\nif plan: open(os.environ["RUN"] + "/survive/plans/000008.json", "w").write(plan)\n'
    'sys.exit(int(os.environ["CODE"]))\n',
    "scontrol": '#!/bin/sh\necho "$@" >> "$TOLD/scontrol"\n',
    "python": '#!/bin/sh\nexec {python} "$@"\n',
}


def _plan(number: int, state: str, code: int) -> bytes:
    return encode(Plan(number, 1, state, leader="n0", wall=0.0, kind="start", reason="", code=code))


@pytest.fixture
def script(config: Path, tmp_path: Path, capsys) -> Path:
    words = ["slurm", "--config", str(config), "--nodes", "4", "--set", "data.source=my 'text'/", "--requeues", "3"]
    assert main([*words, "--time", "1-00:00:00", "--partition", "gpu", "--cpus-per-node", "32"]) == 0
    path = tmp_path / "job.sh"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.fixture
def sbatch(script: Path, tmp_path: Path):
    """Runs the script as a job; the exit code, what srun and what scontrol were told."""
    programs, told, run = tmp_path / "bin", tmp_path / "told", tmp_path / "the run's"
    for directory in (programs, told, run / "survive" / "plans"):
        directory.mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text.replace("{python}", sys.executable))
        (programs / name).chmod(0o755)
    # An earlier start was stopped.
    (run / "survive" / "plans" / "000007.json").write_bytes(_plan(7, "over", 75))

    def submit(code: int, plan: bytes = b"", **variables: str) -> tuple[int, list[str], str]:
        given = {"PATH": f"{programs}:{os.environ['PATH']}", "TOLD": str(told), "RUN": str(run), "CODE": str(code)}
        given |= {"SLURM_JOB_ID": "42"} | variables | {"PLAN": plan.decode()}
        ended = subprocess.run(["bash", str(script)], env=os.environ | given, timeout=120)
        requeued = told / "scontrol"
        return (
            ended.returncode,
            json.loads((told / "srun").read_text()),
            requeued.read_text() if requeued.exists() else "",
        )

    return submit


@pytest.mark.parametrize("code, requeued", [(0, ""), (1, ""), (2, ""), (3, ""), (75, "requeue 42\n")])
def test_only_a_stopped_run_goes_back_into_the_queue(sbatch, config, code, requeued):
    ended, words, told = sbatch(code)
    assert (ended, told) == (code, requeued)
    assert words == [
        "--label", "--kill-on-bad-exit=0", "--no-kill", "--cpus-per-task=32", "python", "-m", "meshtrain.survive",
        "--config", str(config), "--set", "data.source=my 'text'/", "--set", "survive.wanted=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "highest, agreed, ended",
    [
        (137, 0, 0),  # a node was lost, and the others went on to the end
        (137, 75, 75),
        (75, 3, 3),  # one was stopped, the run given up
        (143, None, 1),  # they have agreed on nothing
    ],
)
def test_what_the_supervisors_agreed_on_counts_more_than_the_highest_code(sbatch, highest, agreed, ended):
    plan = _plan(8, "running", 0) if agreed is None else _plan(8, "over", agreed)
    code, _, told = sbatch(highest, plan)
    assert (code, bool(told)) == (ended, ended == 75)


@pytest.mark.parametrize("before, requeued", [("2", True), ("3", False)])
def test_a_run_is_started_again_so_often(sbatch, before, requeued):
    code, _, told = sbatch(75, SLURM_RESTART_COUNT=before)
    assert (code, bool(told)) == (75, requeued)


def test_the_settings_of_the_job(script):
    lines = script.read_text().splitlines()
    settings = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert settings == {
        "job-name=the-run-s", "nodes=4", "ntasks-per-node=1", "gpus-per-node=2", "cpus-per-task=32", "time=1-00:00:00", "partition=gpu",
        "output=the-run-s-%j.out", "open-mode=append", "signal=TERM@120", "requeue", "no-kill",
    }  # fmt: skip
    # sbatch reads no setting behind the first command.
    assert all(line.startswith("#") for line in lines[: 1 + len(settings)])


def test_without_cores_the_node_is_taken_whole(config, capsys):
    assert main(["slurm", "--config", str(config), "--gpus-per-node", "0"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --exclusive\n" in text and "--cpu-bind=none" in text and "gpus" not in text


def test_shellcheck_finds_nothing(script):
    checker = Path(sys.executable).with_name("shellcheck")
    # SC2016: a file's name holds a dollar sign here, and is not to be expanded.
    words = [str(checker) if checker.exists() else "shellcheck", "--exclude=SC2016", str(script)]
    subprocess.run(words, check=True)
