"""A path in a config counts from the config's folder where something lies there; a config that comes along has a
name.
"""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import meshtrain as mt
from meshtrain.config.places import CONFIGS
from meshtrain.plan.jobs.listed import read

TABLE = (
    "# schedule=1f1b stages=2 microbatches=2 chunks=1 split=no placement=loop\nstage 0,stage 1\nF0,\nF1,F0 "
    "B0\nB0,F1 B1\nB1,\n"
)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A config in a folder of its own, with paths to what lies beside it, in the working directory, in both and
    nowhere.
    """
    folder = tmp_path / "configs"
    for name in ("beside", "both", "stdlib"):
        (folder / name).mkdir(parents=True)
    for name in ("here", "both"):
        (tmp_path / name).mkdir()
    (folder / "mine.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)

    def write(**sections):
        (folder / "x.yaml").write_text(yaml.safe_dump(sections))
        return "configs/x.yaml"

    return write


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("beside", "configs/beside"),
        ("both", "configs/both"),
        ("here", "here"),
        ("nowhere", "nowhere"),
        ("stdlib", "stdlib"),
        ("../here", "here"),
    ],
)
def test_a_path_counts_from_the_folder_of_its_file_and_else_from_the_working_directory(
    source, meant, written
):
    path = written(data={"source": source})
    assert mt.load(path).data.source.replace("configs/../", "") == meant
    overridden = mt.load(path, [f"data.source={source}"]).data.source
    assert overridden == source, "--set counts from the working directory"


def test_every_path_of_a_file_does_so(written):
    mesh, parallel = {"pipeline": 2}, {"schedule": "mine.csv", "microbatches": 2}
    data = {
        "source": "mixture",
        "mixture": ["beside", "here", "stdlib"],
        "weights": [1, 1, 1],
    }
    config = mt.load(written(mesh=mesh, parallel=parallel, data=data))
    assert config.parallel.schedule == "configs/mine.csv"
    assert config.data.mixture == ("configs/beside", "here", "stdlib")
    nowhere = "no such file, .* config .* nor .*working directory"
    with pytest.raises(mt.ConfigError, match=nowhere):
        mt.load(written(mesh=mesh, parallel={"schedule": "other.csv"}))


def test_a_config_read_in_its_own_folder_by_another_way_says_the_same(
    written, tmp_path, monkeypatch
):
    path = written(data={"source": "beside"})
    monkeypatch.chdir(tmp_path / "configs")
    assert mt.load("x.yaml") == mt.load(tmp_path / path) == mt.load("../configs/x.yaml")


def test_a_list_of_jobs_names_configs_from_its_folder(written, tmp_path):
    written(mesh={"data": 2})
    (tmp_path / "configs" / "jobs.yaml").write_text(
        "jobs: [{name: a, config: x.yaml}, {name: b, config: quickstart}]"
    )
    assert [job.config for job in read("configs/jobs.yaml").jobs] == [
        "configs/x.yaml",
        "quickstart",
    ]


def test_a_config_that_comes_along_is_taken_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mt.load("quickstart", ["mesh.tensor=1"]).run.directory == "runs/quickstart"
    with pytest.raises(
        mt.ConfigError, match=r"config quickstrt; did you mean quickstart\?"
    ):
        mt.load("quickstrt")
    names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    with pytest.raises(mt.ConfigError, match=rf"no config x; .*YAML file, .*{names}\."):
        mt.load("x")
    (tmp_path / "quickstart").write_text("")  # a file of that name is meant
    with pytest.raises(mt.ConfigError, match="quickstart is empty"):
        mt.load("quickstart")


def test_data_of_a_config_that_comes_along_lies_beside_it_and_is_installed_too(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = mt.load("rl_arithmetic")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["meshtrain.configs"]
    for path in map(Path, (config.data.source, config.rl.prompts)):
        assert path.is_file()
        name = str(path.relative_to(CONFIGS))
        assert any(fnmatch(name, pattern) for pattern in patterns)
