import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from drawn import check_drawing

from meshtrain.plan import advice
from meshtrain.plan.__main__ import main
from meshtrain.plan.estimate import Plan
from meshtrain.schedule.generators import SCHEDULES, Schedule, make_table
from meshtrain.schedule.table import read_csv
from meshtrain.train import main as train

CONFIG = {
    "run": {"fake_devices": 8},
    "model": {
        "layers": 4,
        "d_model": 128,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 352,
        "vocab_size": 260,
    },
    "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
    "parallel": {"microbatches": 4, "sequence_parallel": True, "schedule": "1f1b"},
    "train": {"global_batch_size": 16, "sequence_length": 128},
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def planned(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_promised_fields(config, capsys):
    found = planned(capsys, "--config", config, "--json")
    assert found["parameters"] > 0 and found["devices"] == 8
    held = found["per_device_bytes"]
    parts = ("parameters", "gradients", "optimizer_state", "activations")
    assert held["total"] == pytest.approx(sum(held[part] for part in parts), abs=4)
    assert {"data", "tensor", "pipeline"} <= set(found["traffic_bytes_per_step"])
    assert set(found["pipeline"]) == {"bubble_fraction", "peak_in_flight", "ticks"}
    assert found["pipeline"]["ticks"] == 6 and found["pipeline"]["peak_in_flight"] == 3
    assert found["step_seconds"] > 0 and 0 < found["mfu"] < 1
    assert (
        sum(
            transfer["times"]
            for transfer in found["traffic"]
            if transfer["kind"] == "permute"
        )
        > 0
    )
    assert {
        "checkpoint_copy_seconds",
        "checkpoint_write_seconds",
        "seconds_lost_by_a_failure",
    } <= set(found["faults"])


def test_the_way_that_a_collective_is_run_is_named(config, capsys):
    """An accelerator's few bytes by LL, its many by Simple; a machine of fake devices has none of NCCL's names."""
    keys = [
        "--set",
        "model.d_model=4096",
        "--set",
        "train.sequence_length=4096",
        "--cluster",
        "h100",
    ]
    ways = {
        transfer["algorithm"]
        for transfer in planned(capsys, "--config", config, "--json", *keys)["traffic"]
    }
    assert {"ring LL", "ring Simple", "direct"} <= ways
    assert main(["--config", str(config), *keys]) == 0
    assert "ring LL" in capsys.readouterr().out
    faked = {
        transfer["algorithm"]
        for transfer in planned(capsys, "--config", config, "--json")["traffic"]
    }
    assert faked and not any("LL" in way for way in faked)


@pytest.mark.thorough
def test_borrowed_efficiencies_are_said(config, capsys):
    for cluster, lender in (
        ("b200", "GB200"),
        ("h100", None),
        ("cpu", None),
        ("tpu-v5p", None),
    ):
        arguments = ["--config", config, "--cluster", cluster]
        assert (
            planned(capsys, *arguments, "--json")["efficiencies_borrowed_from"]
            == lender
        )
        assert main([str(a) for a in arguments]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("a guess, borrowed from" in said) == (lender is not None)
        assert ("fitted on published runs" in said) == (cluster in ("h100", "tpu-v5p"))
        share = planned(capsys, *arguments, "--json")["share_of_peak"]
        assert (
            f"products reach up to {share['products']:.3g} of" in said
            and share["evidence"] in said
        )


@pytest.mark.thorough
def test_a_search_replaces_a_mesh_that_is_not_legal_and_refuses_what_it_does_not_replace(
    config, tmp_path, capsys
):
    keys = (
        "mesh.data=1",
        "mesh.tensor=8",
        "mesh.pipeline=1",
        "model.heads=2",
        "model.kv_heads=2",
    )
    sets = [word for key in keys for word in ("--set", key)]
    illegal = ["--config", config, *sets]
    assert (
        main([str(a) for a in illegal]) == 2
        and "mesh.tensor 8 does not divide" in capsys.readouterr().err
    )
    found = planned(
        capsys, *illegal, "--search", "--write", tmp_path / "best.yaml", "--json"
    )
    assert found["devices"] == 8 and found["best"]
    assert all(best["settings"]["mesh.tensor"] <= 2 for best in found["best"])
    wrong = [*illegal, "--search", "--set", "optimizer.name=adamx"]
    assert (
        main([str(a) for a in wrong]) == 2
        and "optimizer.name" in capsys.readouterr().err
    )


def test_set_and_cluster_change_the_plan(config, capsys):
    on_cpu = planned(capsys, "--config", config, "--json")
    on_gpu = planned(
        capsys,
        "--config",
        config,
        "--json",
        "--cluster",
        "h100",
        "--set",
        "mesh.pipeline=1",
    )
    assert on_gpu["devices"] == 4 and on_gpu["step_seconds"] < on_cpu["step_seconds"]


def test_the_table_says_whether_it_fits_and_what_bounds_it(config, capsys):
    assert main(["--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert (
        "fits" in out
        and "bound" in out
        and "each device holds" in out
        and "each device sends" in out
    )


def test_the_longest_stage_is_named(config, capsys):
    assert (
        main(
            [
                "--config",
                str(config),
                "--set",
                "model.layers=5",
                "--set",
                "parallel.layer_split=[2,3]",
            ]
        )
        == 0
    )
    assert re.search("3 layers: stage 1 .* longest with 3", capsys.readouterr().out)


BAD = {
    ("--set", "mesh.dta=2"): "did you mean mesh.data",
    ("--set", "mesh.tensor=3"): "does not divide",
    ("--cluster", "h1000"): "did you mean h100",
    ("--cluster", "nowhere.yaml"): "there is no cluster description",
    ("--cluster", "../../etc/passwd"): "passwd",
    ("--cluster", "."): "no such file or accelerator",
    ("--compile", "h300"): "must be one of cpu, a100, h100, h200, b200",
    ("--compile", "h100x4"): "the mesh has 8 devices",
    ("--compile", "h100x0"): "h100x0",
    ("--set", "mesh.pipeline=1", "--gantt", "x.svg"): "mesh.pipeline is 1",
    (
        "--gantt",
        "/nowhere/at/all.svg",
    ): "/nowhere/at/all.svg cannot be written: there is no directory /nowhere/at.",
    (
        "--gantt",
        "mine.png",
    ): "--gantt mine.png: the picture is SVG, so that its name must end in .svg; did you mean mine.svg?",
    (
        "--gantt",
        "all.svg",
        "--html",
        "/nowhere/at/all.html",
    ): "/nowhere/at/all.html cannot be written: there is no",
    (
        "--set",
        "mesh.pipeline=1",
        "--csv",
        "x.csv",
    ): "--csv writes a pipeline's schedule, but mesh.pipeline is 1",
    (
        "--csv",
        "mine.txt",
    ): "--csv mine.txt: parallel.schedule takes a name that ends in .csv; did you mean mine.csv?",
    (
        "--csv",
        "/nowhere/at/all.csv",
    ): "/nowhere/at/all.csv cannot be written: there is no directory /nowhere/at.",
    ("--html", "."): ". cannot be written: is a directory",
    (
        "--html",
        "/dev/null/all.html",
    ): "/dev/null/all.html cannot be written: not a directory",
    (
        "--search",
        "--write",
        "/nowhere/at/all.yaml",
    ): "/nowhere/at/all.yaml cannot be written: there is no directory",
    ("--html", "a\0b.html"): "a\\x00b.html is not a path that a file can have",
    ("--search", "--devices", "7"): "no layout of 7 devices is legal",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_sentence_and_code_2_before_anything_is_done(
    config, tmp_path, monkeypatch, capsys, arguments
):
    monkeypatch.chdir(tmp_path)
    assert main(["--config", str(config), *arguments]) == 2
    assert list(tmp_path.iterdir()) == [config]
    caught = capsys.readouterr()
    assert caught.out == ""
    assert BAD[arguments] in caught.err and caught.err.count("\n") == 1


ILLEGAL = """# stages=2 microbatches=4
stage 0,stage 1
F0,
F1 B0,F0 B0
F2,F1 B1
F3,F2 B2
B3,F3 B3
B1,
B2,
"""


TITLE, NAMES = (
    "# schedule=mine stages=2 microbatches=4 chunks=1 split=no placement=loop",
    "stage 0,stage 1",
)
# What is wrong with a table: its text, and what the sentence says.
WRONG = {
    "nothing": ("", "must begin with '#'"),
    "no title": (f"{NAMES}\nF0,\n", "must begin with '#'"),
    "no names": (f"{TITLE}\n", "there must be 2 comma-separated stage names"),
    "no rows": (f"{TITLE}\n{NAMES}\n", "0 rows after the first two"),
    "idle rows": (f"{TITLE}\n{NAMES}\n" + ",\n" * 100_000, "100000 rows after the first two"),
    "a column too many": (f"{TITLE}\n{NAMES}\nF0,,\n" + ",\n" * 9, "3 columns, and there must be 2"),
    "a word": (f"{TITLE}\n{NAMES}\nX0,\n" + ",\n" * 9, "'X0' must be one of the letters F, B"),
    "a microbatch": (f"{TITLE}\n{NAMES}\nF9,\n" + ",\n" * 9, "microbatches are 0 to 3"),
    "no stages": (f"{TITLE.replace('stages=2', 'stages=0')}\n{NAMES}\nF0,\n", "stages is '0'"),
    "huge": (f"{TITLE.replace('batches=4', 'batches=9999999999')}\n{NAMES}\nF0,\n", "microbatches is '9999999999'"),
    "a placement": (f"{TITLE.replace('loop', 'vee')}\n{NAMES}\nF0,\n", "placement is 'vee', and must be loop or v"),
    "an unknown key": (f"{TITLE} color=red\n{NAMES}\nF0,\n", "there is no color"),
    "another size": ("# stages=2 microbatches=1\nstage 0,stage 1\nF0,\n,F0 B0\nB0,\n", "is for microbatches=1, and microbatches=4"),
    "an op twice": (f"# stages=2 microbatches=4\n{NAMES}\n" + "F0,\nF0,F0\n" + ",\n" * 8, "each op must stand once"),
    "an open quote": (f'{TITLE}\n{NAMES}\n"F0,\n' + ",\n" * 9, "1 columns, and there must be 2"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_every_table_that_is_wrong_is_one_sentence_and_code_2(
    config, tmp_path, capsys, wrong
):
    text, said = WRONG[wrong]
    (tmp_path / "mine.csv").write_text(text)
    assert (
        main(
            [
                "--config",
                str(config),
                "--set",
                f"parallel.schedule={tmp_path / 'mine.csv'}",
            ]
        )
        == 2
    )
    caught = capsys.readouterr()
    assert caught.out == "" and said in caught.err and caught.err.count("\n") == 1


@pytest.mark.parametrize(
    "more",
    [[], ["--json"], ["--gantt", "-"], ["--html", "page.html"], ["--compile", "cpu"]],
    ids=str,
)
def test_an_illegal_table_is_the_validators_sentence(
    config, tmp_path, monkeypatch, capsys, more
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(ILLEGAL)
    assert (
        main(["--config", str(config), "--set", "parallel.schedule=mine.csv", *more])
        == 2
    )
    caught = capsys.readouterr()
    assert (
        caught.out == ""
        and caught.err.count("\n") == 1
        and caught.err.startswith("meshtrain: ")
    )
    assert "parallel.schedule cannot run: mine.csv: " in caught.err
    assert re.search(
        r"clock 1 \(CSV row 4\), stage 0, .*B0 is too early.*\.\n$", caught.err
    )


@pytest.mark.parametrize("wrong", [*WRONG, "one that cannot run"])
def test_a_table_that_a_plan_refuses_is_refused_with_the_same_sentence_by_what_prints_the_config_and_what_trains(
    config, tmp_path, capsys, wrong
):
    (tmp_path / "mine.csv").write_text(WRONG[wrong][0] if wrong in WRONG else ILLEGAL)
    words = [
        "--config",
        str(config),
        "--set",
        f"parallel.schedule={tmp_path / 'mine.csv'}",
    ]
    said = []
    for command in (
        lambda: main(words),
        lambda: train([*words, "--print-config"]),
        lambda: train(words),
    ):
        assert command() == 2
        caught = capsys.readouterr()
        assert caught.out == ""
        said.append(caught.err)
    assert said[0] and said == said[:1] * 3


def test_a_registered_schedule_whose_table_cannot_run_is_refused_by_what_prints_the_config_too(
    config, capsys
):
    late = Schedule(
        "too_early",
        lambda stages, microbatches, chunks: (
            (np.zeros((stages, microbatches), int),) * 2
        ),
    )
    SCHEDULES.register(late)
    try:
        words = ["--config", str(config), "--set", "parallel.schedule=too_early"]
        said = []
        for command in (lambda: main(words), lambda: train([*words, "--print-config"])):
            assert command() == 2
            said.append(capsys.readouterr().err)
        assert said[0] == said[1] and "too_early" in said[0]
    finally:
        SCHEDULES.forget("too_early")


@pytest.mark.thorough
def test_a_search_takes_the_place_of_a_table(config, tmp_path, capsys):
    (tmp_path / "mine.csv").write_text(ILLEGAL)
    table, best = (
        sets(f"parallel.schedule={tmp_path / 'mine.csv'}"),
        str(tmp_path / "best.yaml"),
    )
    assert main(["--config", str(config), *table, "--search", "--write", best]) == 0
    assert "mine.csv" not in (tmp_path / "best.yaml").read_text()


@pytest.mark.thorough
def test_a_legal_table_has_a_page_although_it_is_for_one_size_of_run(
    config, tmp_path, capsys
):
    (tmp_path / "mine.csv").write_text(make_table("1f1b", 2, 4).to_csv())
    keys = [
        "--set",
        f"parallel.schedule={tmp_path / 'mine.csv'}",
        "--set",
        "train.global_batch_size=24",
    ]
    assert (
        main(["--config", str(config), *keys, "--html", str(tmp_path / "page.html")])
        == 0
    )
    assert "</html>" in (tmp_path / "page.html").read_text()


@pytest.mark.thorough
def test_a_table_that_does_not_fit_its_device_is_still_told_what_would(
    config, tmp_path, capsys
):
    """Advice that asks for other microbatches than the table's is no advice."""
    (tmp_path / "mine.csv").write_text(make_table("1f1b", 2, 4).to_csv())
    keys = sets(
        f"parallel.schedule={tmp_path / 'mine.csv'}",
        "model.d_model=8192",
        "model.layers=80",
    )
    assert main(["--config", str(config), *keys, "--cluster", "v100"]) == 1
    assert "more than" in capsys.readouterr().err


def test_a_mesh_larger_than_the_cluster_is_refused(config, tmp_path, capsys):
    cluster = tmp_path / "tiny.yaml"
    links = {"node": {"devices": 2, "bandwidth": 450}}
    cluster.write_text(
        yaml.safe_dump(
            {"devices_per_node": 2, "accelerator": {"name": "h100"}, "links": links}
        )
    )
    assert main(["--config", str(config), "--cluster", str(cluster)]) == 2
    assert "needs 8 devices, but cluster tiny has 2" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"]], ids=str)
@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 1)])
def test_a_layout_that_does_not_fit_ends_with_1(
    config, form, fits, code, capsys, monkeypatch
):
    monkeypatch.setattr(Plan, "fits", property(lambda _: fits))
    monkeypatch.setattr(advice, "changes", lambda _: [])
    monkeypatch.setattr(advice, "sentence", lambda *_: "too large.")
    assert main(["--config", str(config), *form]) == code
    assert capsys.readouterr().err == ("" if fits else "meshtrain: too large.\n")


@pytest.mark.thorough
def test_what_does_not_fit_says_by_how_much_and_three_ways_out(config, capsys):
    large = ("d_model=8192", "heads=64", "d_ff=28672", "layers=24", "kv_heads=8")
    big = sets(
        *(f"model.{key}" for key in large),
        "train.sequence_length=4096",
        "precision.compute=bfloat16",
    )
    big += ["--cluster", "h100"]
    assert main(["--config", str(config), *big, "--json"]) == 1
    caught = capsys.readouterr()
    found = json.loads(caught.out)
    assert not found["fits"] and len(found["changes"]) == 3
    assert "GiB more than" in caught.err and caught.err.count("\n") == 1
    for settings in found["changes"]:
        again = planned(capsys, "--config", config, *big, *sets(*settings), "--json")
        assert again["fits"]


@pytest.mark.thorough
@pytest.mark.parametrize("more", [[], ["--gantt", "-"], ["--json"]], ids=str)
def test_a_reader_that_has_had_enough_gets_no_traceback(config, more):
    command = [sys.executable, "-m", "meshtrain.plan", "--config", str(config), *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.thorough
def test_search_prints_ten_with_reasons_and_writes_a_config_that_plans(
    config, tmp_path, capsys
):
    best = tmp_path / "best.yaml"
    arguments = [
        "--config",
        str(config),
        "--cluster",
        "h100",
        "--search",
        "--write",
        str(best),
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "fastest:" in out and "10  " in out
    found = planned(capsys, "--config", best, "--cluster", "h100", "--json")
    assert found["devices"] == 8 and found["fits"]
    given = planned(capsys, "--config", config, "--cluster", "h100", "--json")
    assert found["step_seconds"] <= given["step_seconds"]


@pytest.mark.thorough
def test_pictures_are_written(config, tmp_path, capsys):
    gantt, page = tmp_path / "gantt.svg", tmp_path / "plan.html"
    assert (
        main(["--config", str(config), "--gantt", str(gantt), "--html", str(page)]) == 0
    )
    assert gantt.read_text().startswith("<svg") and "</html>" in page.read_text()
    plain = tmp_path / "plain"
    assert main(["--config", str(config), "--gantt", str(plain)]) == 0
    assert plain.read_text() == gantt.read_text()
    capsys.readouterr()
    assert main(["--config", str(config), "--gantt", "-", "--html", "/dev/null"]) == 0
    assert "stage 1" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "target, name",
    [
        ("--html", "plan.html"),
        ("--gantt", "g.svg"),
        ("--csv", "t.csv"),
        ("--write", "best.yaml"),
    ],
)
def test_where_only_a_file_is_asked_for_only_its_name_is_printed(
    target, name, config, tmp_path, capsys
):
    assert (
        main(
            ["--config", str(config), "--cluster", "h100", target, str(tmp_path / name)]
        )
        == 0
    )
    caught = capsys.readouterr()
    assert caught.out == "" and caught.err == f"meshtrain: wrote {tmp_path / name}\n"
    assert (tmp_path / name).stat().st_size > 100
    if target == "--gantt":
        drawn = (tmp_path / name).read_text()
        check_drawing(drawn)
        assert (
            "<title>" in drawn
            and "prefers-color-scheme:dark" in drawn
            and "makespan" in drawn
            and "ms" in drawn
        )


def test_in_80_columns_no_line_wraps_and_sections_are_apart(
    config, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--config", str(config), "--cluster", "h100"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    for title in ("each device holds", "each device sends in a step", "a step takes"):
        assert lines[lines.index(title) - 1] == ""
    assert lines[1].startswith("memory    ")
    # A transfer is a line: what is sent, how often, how much, in all.
    first = lines.index("each device sends in a step") + 2
    sent = lines[first : lines.index("", first)]
    assert len(sent) > 10 and all(
        re.search(r"(^\S+: )|(\d+ +\S+ \w+ +\S+ \w+$)", line) for line in sent
    ), sent


@pytest.mark.thorough
def test_in_80_columns_a_ranking_has_a_line_of_figures_and_its_layout_indented(
    config, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        main(
            [
                "--config",
                str(config),
                "--cluster",
                "h100",
                "--search",
                "--write",
                str(tmp_path / "b.yaml"),
            ]
        )
        == 0
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    first = next(
        i for i, line in enumerate(lines) if re.match(r" 1  .* MFU [\d.]+%$", line)
    )
    last = next(
        i for i, line in enumerate(lines) if line.startswith("the fastest step")
    )
    ranked = lines[first:last]
    assert len(ranked) > 20 and all(
        re.match(r"[ \d]\d  .* MFU [\d.]+%$|    \S", line) for line in ranked
    ), ranked


@pytest.mark.thorough
def test_compile_sets_the_compilers_bytes_beside_the_plans(config, capsys):
    found = planned(capsys, "--config", config, "--json", "--compile", "cpux8")
    compiled = found["compiled"]
    assert {
        "argument_bytes",
        "temp_bytes",
        "output_bytes",
        "compile_seconds",
        "collectives",
    } <= set(compiled)
    state = (
        found["memory_items"]["float32 masters"] + found["memory_items"]["adamw state"]
    )
    assert compiled["argument_bytes"] == pytest.approx(state, rel=0.02)
    assert {c["axis"] for c in compiled["collectives"]} >= {
        "data",
        "tensor",
        "pipeline",
    }


@pytest.mark.thorough
def test_measure_describes_this_machine_as_a_cluster(tmp_path):
    """In a process of its own, with two fake devices."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "meshtrain.plan", "--measure"]
    found = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    path = tmp_path / "mine.yaml"
    path.write_text(found.stdout)
    from meshtrain.plan import load_cluster

    cluster = load_cluster(path)
    assert cluster.devices == 2 and cluster.accelerator.flops("float32") > 1e8
    assert "bandwidth in GB/s" in found.stderr


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for name in (
        "--config",
        "--set",
        "--cluster",
        "--json",
        "--search",
        "--compile",
        "--gantt",
        "--html",
        "--measure",
    ):
        assert name in out


def test_what_zero_pads_is_said_with_its_cost_as_in_the_log_of_a_run(config, capsys):
    keys = sets("mesh.data=7", "run.fake_devices=28", "train.global_batch_size=28")
    assert main(["--config", str(config), *keys]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"note: embedding\.tokens \(260, 128\) .* \(260, 133\) .* data 7 .*: 3\.9% more\.",
        said,
    )


@pytest.mark.parametrize(
    "schedule, chunks", [("1f1b", 1), ("zb_interleaved", 2), ("v_1f1b", 2)]
)
def test_the_table_is_written_as_a_start_for_ones_own(
    schedule, chunks, config, tmp_path, capsys
):
    keys = [
        "--set",
        f"parallel.schedule={schedule}",
        "--set",
        f"parallel.virtual_stages={chunks}",
    ]
    assert (
        main(["--config", str(config), *keys, "--csv", str(tmp_path / "mine.csv")]) == 0
    )
    assert f"wrote {tmp_path / 'mine.csv'}" in capsys.readouterr().err
    table = read_csv(tmp_path / "mine.csv")
    assert table.drop_sends() == make_table(schedule, 2, 4, chunks)
    assert ("G1" in table.to_csv()) == ("R1" in table.to_csv()) == (chunks > 1)
    before = planned(capsys, "--config", config, *keys, "--json")
    keys[1] = f"parallel.schedule={tmp_path / 'mine.csv'}"
    assert (
        planned(capsys, "--config", config, *keys, "--json")["pipeline"]
        == before["pipeline"]
    )
    assert main(["--config", str(config), *keys, "--csv", "-"]) == 0
    assert capsys.readouterr().out.endswith(table.to_csv())


def test_an_open_schedule_is_said(config, capsys):
    assert main(["--config", str(config), "--set", "parallel.schedule=auto"]) == 0
    assert "note: schedule: auto -> interleaved, 2 virtual stages" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_training_would_refuse_here_is_noted(capsys):
    settings = [
        "--set",
        "data.source=/no/such/text",
        "--set",
        "data.tokenizer=/no/such.json",
        "--set",
        "run.fake_devices=2",
    ]
    assert main(["--config", "configs/quickstart.yaml", *settings]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "data.source /no/such/text " in said
    assert "data.tokenizer /no/such.json " in said
    assert re.search("run.fake_devices 2 is less .* 8 devices", said)
