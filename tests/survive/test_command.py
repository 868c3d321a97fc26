"""python -m meshtrain.survive and its words, as people mistype them: one sentence, exit code 2, nothing is made."""

import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import refusals

from meshtrain.config import load
from meshtrain.config.inject import KINDS, parse
from meshtrain.survive.__main__ import _set_flags, _warn_if_unreachable, main
from meshtrain.survive.records import RestartPlan
from meshtrain.survive.store import Store

CONFIG = """
run: {{directory: {run}}}
mesh: {{data: 4}}
data: {{source: synthetic}}
train: {{steps: 10, global_batch_size: 12}}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(run=tmp_path / "run"))
    return path


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run that a supervisor looks after, below runs/ where a command looks for it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    plan = RestartPlan(
        1,
        1,
        "running",
        "n0",
        1.0,
        "start",
        "",
        members=["n0", "n1"],
        incarnations=["a", "b"],
        coordinator="h:1",
    )
    assert Store(path, "n0").propose(plan)
    return path


refused = partial(refusals.refused, main)


@pytest.mark.parametrize(("address", "said"), [("127.0.1.1", 1), ("10.0.0.7", 0)])
def test_a_host_whose_name_is_its_own_alone_is_told(monkeypatch, capsys, address, said):
    monkeypatch.setattr(socket, "gethostname", lambda: "h7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    monkeypatch.setattr(Path, "glob", lambda *_: [])
    _warn_if_unreachable()
    assert capsys.readouterr().err.count("this host, h7, is 127.0.1.1 ") == said


@pytest.mark.parametrize(
    ("option", "values"),
    [
        (
            "--node",
            [
                "../x",
                "x" * 65,
                ".hidden",
                "-x",
                "a b",
                "ä",
                "a\nb",
                "n0\0",
                "$(reboot)",
            ],
        ),
        ("--address", ["a b", "h\nx", "x" * 256, "h;reboot", "http://h", "ä"]),
    ],
)
def test_a_name_or_an_address_that_is_none(config, tmp_path, capsys, option, values):
    for value in values:
        assert f"{option} is" in refused(
            capsys, "--config", str(config), f"{option}={value}"
        )
    refused(capsys, "--config", str(config), "--node=")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("survive.least=3", r"survive\.least 3, survive\.wanted 1"),
        ("survive.wanted=3", r"survive\.wanted 3 .*4 devices.*; legal are 1, 2, 4\."),
        ("survive.wanted=0", "survive.wanted"),
        ("survive.node_timeout=0.1", "survive.node_timeout"),
        ("survive.node_timeout=.nan", "survive.node_timeout"),
        ("survive.restarts=-1", "survive.restarts"),
        ("survive.inject=[kill@3:1]", "kill@3:1 is for rank 1, .* has 1, .*from 0"),
        ("survive.inject=[disk-full@3:0]", "disk-full .*before a run"),
        ("survive.leest=1", r"did you mean survive.least\?"),
    ],
)
def test_a_config_that_no_run_can_have(config, tmp_path, capsys, key, words):
    assert re.search(words, refused(capsys, "--config", str(config), "--set", key))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((), "--config"),
        (("--config", "no.yaml"), "no.yaml"),
        (("inyect", "kill@1:0"), "did you mean inject?"),
        (("status",), "RUN"),
        (("status", "nowhere"), "nowhere"),
        (("stats", "nowhere"), "nowhere"),
        (("--config", "x.yaml", "--nodes", "a"), "did you mean --node?"),
    ],
)
def test_words_that_are_none(tmp_path, monkeypatch, capsys, words, answer):
    monkeypatch.chdir(tmp_path)
    assert answer in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


def test_a_record_that_cannot_be_written_is_told_at_once(config, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (Store(run, "n0").root / "nodes" / "n0.json").mkdir()
    assert "this node's record" in refused(
        capsys, "--config", str(config), "--node", "n0"
    )


# --- inject


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("kil@3:0", "did you mean kill?"),
        ("kill@3:0/../../x", "KIND@STEP:RANK"),
        ("../x@3:0", "there is no fault"),
        ("kill@3:2", "is for rank 2, but"),
        ("kill-two@3:1", "is for rank 2, but"),
        ("node-lost@3:99999", "has 2, counted from 0."),
        ("disk-full@3:0", "is made before a run begins"),
    ],
)
def test_a_fault_that_is_none(run, capsys, fault, answer):
    assert answer in refused(capsys, "inject", fault, str(run))
    assert not list((run / "survive" / "inject").iterdir())


def test_a_run_that_is_none_to_inject_into(run, tmp_path, capsys):
    for other in ("nowhere", str(tmp_path), "/dev/null"):
        assert f"{other} is not a run" in refused(capsys, "inject", "kill@3:0", other)
    run.with_name("other").mkdir()
    Store(run.with_name("other"), "n0")
    assert "there are 2 supervised runs" in refused(capsys, "inject", "kill@3:0")
    run.chmod(0o777)
    assert "can be written by everybody" in refused(
        capsys, "inject", "kill@3:0", str(run)
    )
    run.chmod(0o755)
    (run / "survive" / "inject").chmod(0o777)
    assert "can be written by everybody" in refused(
        capsys, "inject", "kill@3:0", str(run)
    )


def test_no_run_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "there are 0 supervised runs" in refused(capsys, "inject", "kill@3:0")
    assert "a fault is missing" in refused(capsys, "inject")
    assert not list(tmp_path.iterdir())


def test_a_fault_is_asked_for_once_more_under_a_name_of_its_own(run, capsys):
    assert main(["inject", "kill@3:0"]) == main(["inject", "kill@3:0", str(run)]) == 0
    assert main(["inject", "kill@3:0.2"]) == 0
    asked = sorted(os.listdir(run / "survive" / "inject"))
    assert asked == ["kill@3:0", "kill@3:0.2", "kill@3:0.3"] and all(
        parse(name) for name in asked
    )
    capsys.readouterr()
    assert main(["inject", "--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(KINDS) == 32
    assert main(["inject", "--list", "--json"]) == 0
    assert [kind["name"] for kind in json.loads(capsys.readouterr().out)] == list(KINDS)


@pytest.mark.thorough
def test_a_supervisor_without_an_output_is_none_the_worse(config, tmp_path):
    command = (
        f"exec {sys.executable} -m meshtrain.survive --config {config} --node ../x"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(
        ["sh", "-c", f"{command} >&- 2>&-"], env=environment, capture_output=True
    )
    assert (found.returncode, found.stdout, found.stderr) == (2, b"", b"")


def test_flags_of_the_cluster_are_set_where_the_node_has_none_of_its_own(
    monkeypatch, capsys
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    _set_flags(load({"mesh": {"tensor": 4, "pipeline": 4}}), "h100")
    permute = "--xla_gpu_collective_permute_connected_components=true"
    patience = "--xla_gpu_nccl_termination_timeout_seconds=3600"
    assert os.environ["XLA_FLAGS"].split() == ["--xla_dump_to=/x", permute, patience]
    assert os.environ["NCCL_DEBUG"] == "INFO"
    said = capsys.readouterr().err
    assert f"{permute[2:]}: " in said and "NCCL_DEBUG is left alone" in said
