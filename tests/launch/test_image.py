"""The Dockerfile: a linter reads it, and its lines run here, without a container, as they would in one."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    lines = [
        line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")
    ]
    return [
        (name, rest)
        for name, _, rest in (line.partition(" ") for line in lines if line)
    ]


def test_a_linter_finds_nothing_in_it():
    linter = shutil.which("hadolint")
    assert linter, "hadolint comes with the extra `test`"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_it_copies_is_there_and_is_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [words.split() for name, words in instructions() if name == "COPY"]
    assert copied
    for source in (source for words in copied for source in words[:-1]):
        assert (ROOT / source).exists() and f"!{source}" in ignored, source


@pytest.mark.engines
def test_its_lines_make_a_python_that_trains(tmp_path):
    """Without CUDA's libraries, 5 GB: the extra is the image's argument."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = {**os.environ, "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    here = tmp_path
    for name, rest in instructions():
        if name == "WORKDIR":
            here = tmp_path / rest.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                _copy(ROOT / source, here / target)
        elif name in ("ARG", "ENV"):
            environment |= dict(word.split("=", 1) for word in shlex.split(rest))
            environment["EXTRAS"] = "adopt"
        elif name == "RUN":
            subprocess.run(["sh", "-euc", rest], cwd=here, env=environment, check=True)
        else:
            assert name == "FROM", name
    command = ["meshtrain", "train", "--config", "quickstart", "--set", "train.steps=2"]
    done = subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stderr


def _copy(source: Path, target: Path) -> None:
    """Copies as COPY does: a file into a directory, a directory's contents, links as links."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
