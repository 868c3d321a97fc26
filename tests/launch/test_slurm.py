"""The script for sbatch, run by bash with programs that stand for Slurm's and write down what they were told."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from supervisors import Supervisors

from meshtrain.launch import job, slurm
from meshtrain.launch.__main__ import main
from meshtrain.survive.records import RestartPlan, encode

# srun runs the first node's task, then ends with the code that it is told, as the highest of several would be.
PROGRAMS = {
    "srun": '#!{python}\nimport json, os, sys\njson.dump(sys.argv[1:], open(os.environ["TOLD"] + "/srun", "w"))\n'
    'plan = os.environ["PLAN"]\nif plan: open(os.environ["RUN"] + "/survive/plans/000008.json", "w").write(plan)\n'
    'sys.exit(int(os.environ["CODE"]))\n',
    "scontrol": '#!/bin/sh\necho "$@" >> "$TOLD/scontrol"\n',
    "python": '#!/bin/sh\nexec {python} "$@"\n',
}


def _plan(number: int, state: str, code: int) -> bytes:
    return encode(
        RestartPlan(
            number, 1, state, leader="n0", wall=0.0, kind="start", reason="", code=code
        )
    )


@pytest.fixture
def script(config: Path, tmp_path: Path, capsys) -> Path:
    words = [
        "slurm",
        "--config",
        str(config),
        "--nodes",
        "4",
        "--set",
        "data.source=my 'text'/",
        "--requeues",
        "3",
    ]
    assert (
        main(
            [
                *words,
                "--time",
                "1-00:00:00",
                "--partition",
                "gpu",
                "--cpus-per-node",
                "32",
            ]
        )
        == 0
    )
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
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TOLD": str(told),
        "RUN": str(run),
        "SLURM_JOB_ID": "42",
    }

    def submit(
        code: int, plan: bytes = b"", **variables: str
    ) -> tuple[int, list[str], str]:
        environment = (
            os.environ | given | variables | {"CODE": str(code), "PLAN": plan.decode()}
        )
        ended = subprocess.run(["bash", str(script)], env=environment, timeout=120)
        requeued = (
            (told / "scontrol").read_text() if (told / "scontrol").exists() else ""
        )
        return ended.returncode, json.loads((told / "srun").read_text()), requeued

    return submit


@pytest.mark.thorough
@pytest.mark.parametrize(
    "code, requeued", [(0, ""), (1, ""), (2, ""), (3, ""), (75, "requeue 42\n")]
)
def test_only_a_stopped_run_goes_back_into_the_queue(sbatch, code, requeued):
    words = "--label --kill-on-bad-exit=0 --no-kill --export=ALL --cpus-per-task=32 bash -c node"
    assert sbatch(code) == (code, words.split(), requeued)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "highest, agreed, ended",
    [
        (137, 0, 0),  # a node was lost, and the others went on to the end
        (137, 75, 75),
        (75, 3, 3),  # one was stopped, the run given up
        (143, None, 1),  # they have agreed on nothing
    ],
)
def test_what_the_supervisors_agreed_on_counts_more_than_the_highest_code(
    sbatch, highest, agreed, ended
):
    plan = _plan(8, "running", 0) if agreed is None else _plan(8, "over", agreed)
    code, _, told = sbatch(highest, plan)
    assert (code, bool(told)) == (ended, ended == 75)


@pytest.mark.thorough
@pytest.mark.parametrize("before, requeued", [("2", True), ("3", False)])
def test_a_run_is_started_again_so_often(sbatch, before, requeued):
    code, _, told = sbatch(75, SLURM_RESTART_COUNT=before)
    assert (code, bool(told)) == (75, requeued)


def test_the_settings_of_the_job(script):
    lines = script.read_text().splitlines()
    settings = {
        line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")
    }
    assert settings == {
        "job-name=the-run-s",
        "nodes=4",
        "ntasks-per-node=1",
        "gpus-per-node=2",
        "cpus-per-task=32",
        "time=1-00:00:00",
        "partition=gpu",
        "output=the-run-s-%j.out",
        "open-mode=append",
        "signal=TERM@120",
        "requeue",
        "no-kill",
    }
    # sbatch reads no setting behind the first command.
    assert all(line.startswith("#") for line in lines[: 1 + len(settings)])


def test_without_cores_the_node_is_taken_whole(config, capsys):
    assert main(["slurm", "--config", str(config), "--gpus-per-node", "0"]) == 0
    text = capsys.readouterr().out
    assert (
        "#SBATCH --exclusive\n" in text
        and "--cpu-bind=none" in text
        and "gpus" not in text
    )


SITE = """\
#!/bin/bash
#SBATCH -p gpu-of-the-site
#SBATCH --output=logs/%j.out --comment="my run"
module load cuda/12.4
source ~/venv/bin/activate
"""


def test_a_sites_lines_come_first_and_win(config, tmp_path, capsys):
    (tmp_path / "site.sh").write_text(SITE)
    words = ["slurm", "--config", str(config), "--template", str(tmp_path / "site.sh")]
    words += ["--partition", "ours", "--qos", "high"]
    more = [
        "--account",
        "a1",
        "--constraint",
        "h100&ib",
        "--mail-user",
        "a@b.org",
        "--directory",
        "/shared/my project",
    ]
    assert main([*words, *more]) == 0
    text = capsys.readouterr().out
    head, _, rest = text.partition("# One supervisor a node")
    assert "ours" not in head and "the-run-s-%j.out" not in head
    for line in (
        "-p gpu-of-the-site",
        '--output=logs/%j.out --comment="my run"',
        "--qos=high",
        "--account=a1",
        "--constraint='h100&ib'",
        "--mail-user=a@b.org",
        "--mail-type=END,FAIL,REQUEUE",
        "--chdir='/shared/my project'",
    ):
        assert head.count(f"#SBATCH {line}\n") == 1
    assert text.count("#!/bin/bash") == 1
    assert (
        "module load cuda/12.4\nsource ~/venv/bin/activate\n"
        in rest.partition("srun")[0]
    )


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("#SBATCH --ntasks-per-node=8", "line 2: --ntasks-per-node is "),
        ("#SBATCH -p gpu -N 4", "line 2: -N is .*; give --nodes "),
        ("#SBATCH -c8", "give --cpus-per-node"),
        (None, r"site\.sh cannot be read: "),
    ],
)
def test_a_template_that_is_not_there_or_sets_how_many_supervisors_there_are(
    config, tmp_path, capsys, line, sentence
):
    if line:
        (tmp_path / "site.sh").write_text(f"#!/bin/bash\n{line}\n")
    assert (
        main(
            ["slurm", "--config", str(config), "--template", str(tmp_path / "site.sh")]
        )
        == 2
    )
    assert re.search(sentence, capsys.readouterr().err)


@pytest.fixture
def node(supervisors: Supervisors, tmp_path, config, capsys, monkeypatch):
    """Runs what srun starts on a node; its exit code, and what Slurm was told."""
    monkeypatch.setattr(job, "PAUSE", 0)
    monkeypatch.setattr(slurm, "PATIENCE", 1)
    words = [
        "slurm",
        "--config",
        str(config),
        "--nodes",
        "2",
        "--python",
        str(supervisors.python),
    ]
    # A stand-in asks for the node's name, which on a host is the host's.
    assert main([*words, "--set", "survive.restarts=2"]) == 0
    text = capsys.readouterr().out.replace(
        "survive.wanted=2 ||", "survive.wanted=2 --node n0 ||"
    )
    told = tmp_path / "told"
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>"{told}"\n')
        (tmp_path / name).chmod(0o755)
    functions = text[text.index("ended=") : text.index("before=")]
    given = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
    }

    def run(number: int, port: int = 9) -> tuple[int, str]:
        srun = {"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_SRUN_COMM_PORT": str(port)}
        with open(tmp_path / "errors", "w") as errors:
            ended = subprocess.run(
                ["bash", "-c", f"{functions}\nnode"],
                env=given | srun | {"SLURM_NODEID": str(number)},
                cwd=tmp_path,
                stderr=errors,
                timeout=60,
            )
        return ended.returncode, told.read_text() if told.exists() else ""

    return run


def test_a_killed_supervisor_is_started_again_on_its_node(node, supervisors, tmp_path):
    supervisors.does("n0", kill=9)
    assert node(0) == (137, "")
    assert (tmp_path / "errors").read_text().count("it is started again") == 2


ENDINGS = [
    (0, "scancel 42\n"),
    (3, "scancel 42\n"),
    (75, "scontrol requeue 42\n"),
    (1, ""),
    (2, ""),
]


@pytest.mark.thorough
@pytest.mark.parametrize("code, told", ENDINGS)
def test_the_other_nodes_end_the_job_when_the_first_one_is_lost(
    node, supervisors, code, told
):
    supervisors.does("n0", exit=code)
    assert node(1) == (code, told)


def test_while_srun_is_there_it_ends_the_job(node, supervisors, tmp_path):
    supervisors.does("n0", exit=0)
    with socket.create_server(("127.0.0.1", 0)) as srun:
        assert node(1, srun.getsockname()[1]) == (0, "")
    # The first node has ended: nobody asks srun.
    (tmp_path / ".meshtrain-42-0").touch()
    assert node(1) == (0, "")


def test_shellcheck_finds_nothing(script):
    checker = Path(sys.executable).with_name("shellcheck")
    # SC2016: a file's name holds a dollar sign here, and is not to be expanded. SC2329, SC2317: a function is run by
    # name, by srun.
    words = [
        str(checker) if checker.exists() else "shellcheck",
        "--exclude=SC2016,SC2317,SC2329",
        str(script),
    ]
    subprocess.run(words, check=True)
