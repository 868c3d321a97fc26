"""The command itself: mistakes in one sentence, the same text for the same input, on stdout alone, and no JAX."""

import subprocess
import sys
from itertools import permutations

import pytest
from refusals import code_of, refused

from meshtrain.launch import outcome
from meshtrain.launch.__main__ import LAUNCHERS, main

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


MISTAKES = [
    (
        "--nodes 3",
        "the 8 devices of the mesh do not divide into 3 nodes; legal are 1, 2, 4, 8.",
    ),
    ("--nodes 0", "argument --nodes: '0' is not a whole number"),
    ("--name ../x", "argument --name: '../x' is not a name"),
    ("--gpus-per-node=-1", "argument --gpus-per-node: '-1' is not a whole number"),
    ("--set mesh.dat=2", "there is no key mesh.dat; did you mean mesh.data?"),
    ("--hosts a", "--hosts is an option of ssh, and not of"),
    ("--nods 2", "there is no option --nods; did you mean --nodes?"),
]


@pytest.mark.parametrize("way", NEEDED)
@pytest.mark.parametrize("more, sentence", MISTAKES)
def test_a_mistake_is_one_sentence(way, more, sentence, config, capsys):
    assert sentence in refused(
        main, capsys, way, "--config", str(config), *NEEDED[way], *more.split()
    )


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([], f"legal are {', '.join(LAUNCHERS)}."),
        (["slrm"], "slrm; did you mean slurm?"),
        (["local", "--config", "x"], "the following arguments are required: N"),
        (["local", "two", "--config", "x"], "argument N: 'two' is not a whole number"),
        (["local", "2", "--config", "missing.yaml"], "missing.yaml"),
        (["ssh", "--config", "x"], "--hosts --hostfile is required"),
        (
            ["jobset", "--config", "x", "--image", "i"],
            "the following arguments are required: --volume",
        ),
        (
            ["slurm", "--config", "x", "--partition", "a b"],
            "argument --partition: 'a b' is not a name",
        ),
        (
            ["slurm", "--config", "x", "--time", "10"],
            "argument --time: '10' is not a time; write H:MM:SS",
        ),
        (
            ["ray", "--config", "x", "--directory", "runs"],
            "--directory: 'runs' is not an absolute path",
        ),
    ],
)
def test_wrong_usage_is_one_sentence(words, sentence, capsys):
    assert sentence in refused(main, capsys, *words)


def test_the_help_has_every_way(capsys):
    assert code_of(main, ["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(launcher.meaning in said for launcher in LAUNCHERS.values())


def test_no_jax_is_loaded():
    code = (
        "import sys, meshtrain.launch.__main__, meshtrain.launch.on_ray, meshtrain.survive.agreed; sys.exit('jax' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


CODES = [
    ([0, 0], 0), ([0, -9], 0),  # killed, and the others went on to the end
    # Or it would be started again for ever
    ([0, 137, 75], 0), ([3, 3, -9], 3), ([75, 3, 2], 3), ([2, 75, 75], 2),
    ([75, 75, -9], 75), ([1, 75], 75), ([1, 137, -15], 1), ([255], 1), ([], 1),
]  # fmt: skip


def test_one_code_of_many():
    for codes, whole in CODES:
        assert {outcome(order) for order in permutations(codes)} == {whole}, codes
