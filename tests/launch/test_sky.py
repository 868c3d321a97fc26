"""The task for SkyPilot: its fields, its script, run by bash, and what SkyPilot's own loader reads of it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from supervisors import PATIENCE, Supervisors

from meshtrain.launch import job
from meshtrain.launch.__main__ import main


@pytest.fixture
def task(config: Path, supervisors: Supervisors, tmp_path: Path, capsys):
    def printed(*more: str) -> dict:
        words = [
            "sky",
            "--config",
            str(config),
            "--nodes",
            "2",
            "--volume",
            "runs",
            "--accelerator",
            "H100",
        ]
        assert (
            main(
                [
                    *words,
                    "--mount",
                    str(tmp_path),
                    "--python",
                    str(supervisors.python),
                    *more,
                ]
            )
            == 0
        )
        return yaml.safe_load(capsys.readouterr().out)

    return printed


def _run(task: dict, rank: int) -> subprocess.CompletedProcess[str]:
    given = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n",
    }
    return subprocess.run(
        ["bash", "-ec", task["run"]],
        env=os.environ | given,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_a_node_ends_with_its_supervisors_code(
    task, supervisors, config, tmp_path, code
):
    supervisors.does("n1", exit=code)
    assert _run(task(), 1).returncode == code
    shared = [
        "-m",
        "meshtrain.survive",
        "--config",
        str(config),
        "--set",
        "survive.wanted=2",
    ]
    assert supervisors.words("n1") == [*shared, "--node", "n1", "--address", "10.0.0.8"]
    assert supervisors.started("n1")["cwd"] == str(tmp_path)


def test_a_killed_supervisor_is_started_again_and_the_others_hear_of_no_error(
    task, supervisors, monkeypatch
):
    monkeypatch.setattr(job, "PAUSE", 0)
    supervisors.does("n0", kill=9)
    ended = _run(task("--set", "survive.restarts=2"), 0)
    assert ended.returncode == 137 and ended.stderr.count("it is started again") == 2


def test_the_fields(task):
    printed = task("--image", "registry/meshtrain:1", "--spot", "--cpus-per-node", "8")
    assert printed["num_nodes"] == 2 and list(printed["volumes"].values()) == ["runs"]
    recovery = {
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    }
    asked = {
        "accelerators": "H100:4",
        "cpus": "8+",
        "image_id": "docker:registry/meshtrain:1",
        "use_spot": True,
    }
    assert printed["resources"] == asked | recovery
    assert "setup" not in printed and "workdir" not in printed
    bare = task("--gpus-per-node", "0")
    assert "accelerators" not in bare["resources"]
    assert bare["workdir"] == "." and bare["setup"].endswith(
        " -m pip install --quiet '.'\n"
    )
    assert task()["setup"].endswith(" -m pip install --quiet '.[cuda12]'\n")


def test_devices_without_an_accelerators_name_are_refused(config, capsys):
    assert main(["sky", "--config", str(config), "--volume", "runs"]) == 2
    assert "--accelerator is missing: a node has 8 devices" in capsys.readouterr().err


READ = """
import json, sys, yaml
from sky.exceptions import InvalidSkyPilotConfigError
from sky.task import Task
from sky.utils import schemas

recovery = schemas.get_resources_schema()["properties"]["job_recovery"]["anyOf"]
known = next(of["properties"] for of in recovery if "properties" in of)
for document in yaml.safe_load_all(sys.stdin):
    # The loader takes any key of job_recovery, and its document apart.
    unknown = sorted(set(document["resources"]["job_recovery"]) - set(known))
    try:
        task = Task.from_yaml_config(document)
    except InvalidSkyPilotConfigError as error:
        print(json.dumps(str(error)))
        continue
    (resources,) = task.resources
    print(json.dumps([task.num_nodes, resources.accelerators, resources.use_spot, task.volumes, unknown]))
"""


@pytest.mark.engines
def test_skypilots_own_loader_reads_it(task):
    """SkyPilot pins libraries that others need newer, so it has a Python of its own."""
    python = os.environ.get("SKYPILOT_PYTHON") or pytest.skip(
        "SKYPILOT_PYTHON names no Python with SkyPilot"
    )
    spot = task("--image", "registry/meshtrain:1", "--spot", "--cpus-per-node", "8")
    documents = [task(), spot, task("--gpus-per-node", "0"), task() | {"volume": {}}]
    ended = subprocess.run(
        [python, "-c", READ],
        input=yaml.safe_dump_all(documents),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    *read, misspelt = [json.loads(line) for line in ended.stdout.splitlines()]
    volumes = documents[0]["volumes"]
    assert read == [[2, {"H100": 4}, spot, volumes, []] for spot in (False, True)] + [
        [2, None, False, volumes, []]
    ]
    assert "volume" in misspelt
