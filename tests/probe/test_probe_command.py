import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from free_port import free_port
from probed import devices, pairs, probe
from refusals import refused

from meshtrain.cluster.algorithms import KINDS
from meshtrain.config import ConfigError, MeshConfig
from meshtrain.plan import load_cluster, named
from meshtrain.probe import __main__ as command
from meshtrain.probe.devices import ELEMENTS, SIDES
from meshtrain.probe.links import SIZES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("data=2,pipeline=4", MeshConfig(data=2, pipeline=4)),
        ("islands=2,data=6", MeshConfig(data=6, islands=2)),
    ],
)
def test_a_mesh_is_given_by_its_axes(text, mesh):
    assert MeshConfig.read(text) == mesh


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=2,tensr=2", r"'tensr'; did you mean tensor\?"),
        ("data", "data is ''; .* a whole number"),
        ("data=0", "data is '0'; it must be"),
        ("data=2,data=4", "data is given twice"),
        ("data=4,islands=3", r"mesh\.islands 3 .*mesh\.data 4"),
        ("", "''; legal are data, tensor, pipeline"),
    ],
)
def test_another_mesh_is_one_sentence(text, said):
    with pytest.raises(ConfigError, match=said):
        MeshConfig.read(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "data=2", "--config", "x.yaml"], "both give a mesh"),
        (["--set", "mesh.data=2"], "--set .*--config FILE, which is missing"),
        (["--only", "pears"], "--only"),
        (["--only", "pairs", "--output", "c.yaml"], "leave --only out"),
        (["--algorithms", "rink"], r"--algorithms .*'rink'; did you mean ring\?"),
        (
            ["--only", "pairs", "--algorithms", "all"],
            "--algorithms .*--only pairs leaves out",
        ),
        (
            ["--mesh", "data=2", "--algorithms", "hierarchical"],
            "hierarchical .*islands.*the mesh has none",
        ),
        (["--html", "c.htm"], r"must end in \.html"),
        (["--output", "c.json"], r"must end in \.yaml"),
        (["--output", "nowhere/c.yaml"], "there is no directory"),
        (["--cluster", "h1000"], "h1000.* no such file or accelerator"),
        (["--mesh", "data=4096"], r"run\.fake_devices fakes at most 1024"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2_before_anything_is_measured(
    arguments, said, capsys, monkeypatch
):
    from meshtrain.probe import measure

    monkeypatch.setattr(
        measure, "measure", lambda *_, **__: pytest.fail("it was measured")
    )
    assert re.search(said, refused(command.main, capsys, *arguments))


def test_a_cluster_smaller_than_what_is_measured_is_refused(tmp_path):
    (tmp_path / "small.yaml").write_text(
        "nodes: 1\ndevices_per_node: 4\naccelerator: {name: h100}\nlinks: {node: {devices: 4, bandwidth: 450}}\n"
    )
    with pytest.raises(ConfigError, match="describes 4 devices, and 8 are measured"):
        command._cluster(str(tmp_path / "small.yaml"), 8)


def test_the_json_has_scores_only_beside_a_description_and_no_nan():
    found = probe(pairs=pairs(8), devices=devices(8))
    alone = json.loads(json.dumps(command.as_json(found, None), allow_nan=False))
    assert "score" not in alone["collectives"][0] and "cluster" not in alone
    assert alone["pairs"]["seconds"][0][0][0] is None
    scored = command.as_json(found, named("h100", 8))
    assert 0 < scored["collectives"][0]["score"] < 1
    sized = scored["collectives"][0]["sizes"][-1]
    assert scored["collectives"][0]["score"] == pytest.approx(
        sized["described_seconds"] / sized["seconds"]
    )


OF_LESS = """
import sys
from meshtrain.probe import devices, links
from meshtrain.probe.__main__ import main
devices.SIDES["cpu"], devices.ELEMENTS["cpu"], links.SIZES["cpu"] = 128, 2**16, (2**12, 2**16)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_measure_together_and_the_first_alone_prints(tmp_path):
    words = [
        sys.executable,
        "-c",
        OF_LESS,
        "--mesh",
        "data=2",
        "--json",
        "--output",
        "c.yaml",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "PJRT_NPROC"
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_PROCESSES": "2",
    }
    environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
    how = {
        "cwd": tmp_path,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    both = [
        subprocess.Popen(words, env=environment | {"JAX_PROCESS_ID": str(rank)}, **how)
        for rank in (0, 1)
    ]
    (out, err), (silent, _) = (process.communicate(timeout=120) for process in both)
    assert [process.returncode for process in both] == [0, 0], err
    found = json.loads(out)
    assert silent == "" and found["processes"] == 2 and found["machines"] == [0, 1]
    assert [entry["kind"] for entry in found["collectives"]] == list(KINDS)
    assert all(
        sized["seconds"] > 0
        for entry in found["collectives"]
        for sized in entry["sizes"]
    )
    assert (
        len(found["each_device"]["flops"]) == 2
        and found["pairs"]["seconds"][0][1][0] > 0
    )
    cluster = load_cluster(tmp_path / "c.yaml")
    assert (cluster.nodes, [name for name, _ in cluster.levels()]) == (2, ["rail"])


@pytest.mark.thorough
def test_all_of_it_on_fake_devices_writes_a_file_that_the_planner_reads_and_a_picture(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIDES, "cpu", 128)
    monkeypatch.setitem(ELEMENTS, "cpu", 2**16)
    arguments = [
        "--mesh",
        "data=2,tensor=2",
        "--cluster",
        "cpu",
        "--output",
        "c.yaml",
        "--html",
        "c.html",
    ]
    assert command.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "over data 2" in out and "over tensor 2" in out and "left out  score" in out
    assert "meshtrain: measuring 12 pairs of devices\n" in err and err.endswith(
        "wrote c.html\n"
    )
    assert named("c.yaml", 4).devices == 4
    assert (tmp_path / "c.html").read_text().count("<g><title>") == 12


@pytest.mark.slow
def test_programs_of_messages_stand_in_the_table_and_on_the_page(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "cpu", (2**12, 2**16))  # a program is compiled for each
    arguments = [
        "--mesh",
        "data=4,islands=2",
        "--only",
        "collectives",
        "--algorithms",
        "all",
        "--html",
        "c.html",
    ]
    assert command.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "over island+data 4" in out
    assert (out.count("\n    hierarchical "), out.count("\n    two_way_ring ")) == (
        1,
        7,
    )
    assert (
        err.endswith("wrote c.html\n")
        and "<td>hierarchical</td>" in (tmp_path / "c.html").read_text()
    )
