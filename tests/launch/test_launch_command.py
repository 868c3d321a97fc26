"""The command itself: mistakes in one sentence, the same text for the same input, on stdout alone, and no JAX."""

import subprocess
import sys

import pytest

from meshtrain.launch.__main__ import WAYS, main

NEEDED = {
    "slurm": [],
    "jobset": ["--image", "i", "--volume", "v"],
    "trainjob": ["--image", "i", "--volume", "v"],
    "ray": ["--directory", "/shared"],
    "sky": ["--volume", "v", "--accelerator", "H100"],
}


@pytest.mark.parametrize("way", NEEDED)
def test_the_text_is_on_stdout_alone_and_the_same_each_time(way, config, capsys):
    words = [way, "--config", str(config), "--nodes", "2", *NEEDED[way]]
    assert main(words) == 0
    first = capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr() == first
    assert "meshtrain: " not in first.out
    assert first.err.startswith("meshtrain: ") and first.err.count("\n") == 1


def _code(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("way", NEEDED)
@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--nodes", "3"], "the 8 devices of the mesh do not divide into 3 nodes; legal are 1, 2, 4, 8."),
        (["--nodes", "0"], "argument --nodes: '0' is not a whole number"),
        (["--name", "../x"], "argument --name: '../x' is no name"),
        (["--gpus-per-node=-1"], "argument --gpus-per-node: '-1' is not a whole number"),
        (["--set", "mesh.dat=2"], "there is no key mesh.dat; did you mean data?"),
        (["--hosts", "a"], "--hosts is an option of ssh, and not of"),
        (["--nods", "2"], "there is no option --nods; did you mean --nodes?"),
    ],
)
def test_a_mistake_is_one_sentence(way, more, sentence, config, capsys):
    assert _code([way, "--config", str(config), *NEEDED[way], *more]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([], "a command is missing; legal are local, ssh, slurm, jobset, trainjob, ray, sky."),
        (["slrm"], "there is no command slrm; did you mean slurm?"),
        (["local", "--config", "x"], "the following arguments are required: N"),
        (["local", "two", "--config", "x"], "argument N: 'two' is not a whole number"),
        (["local", "2", "--config", "missing.yaml"], "missing.yaml"),
        (["ssh", "--config", "x"], "one of the arguments --hosts --hostfile is required"),
        (["jobset", "--config", "x", "--image", "i"], "the following arguments are required: --volume"),
        (["slurm", "--config", "x", "--partition", "a b"], "argument --partition: 'a b' is no name"),
        (["slurm", "--config", "x", "--time", "10"], "argument --time: '10' is no time; write H:MM:SS"),
        (["ray", "--config", "x", "--directory", "runs"], "argument --directory: 'runs' is no absolute path"),
    ],
)
def test_wrong_usage_is_one_sentence(words, sentence, capsys):
    assert _code(words) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_the_help_has_every_way():
    words = [sys.executable, "-m", "meshtrain.launch", "--help"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert all(way.meaning in said for way in WAYS.values())


def test_no_jax_is_loaded():
    code = "import sys, meshtrain.launch.__main__, meshtrain.launch.on_ray, meshtrain.launch.outcome; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
