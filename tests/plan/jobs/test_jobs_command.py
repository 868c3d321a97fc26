"""`python -m meshtrain.plan --jobs`: what it prints, writes and refuses."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
import yaml
from drawn import axes, check_page
from refusals import tells

from meshtrain.plan.__main__ import main
from meshtrain.plan.jobs import listed
from meshtrain.plan.jobs.requests import wanted


@pytest.mark.thorough
def test_json_has_where_each_job_lies(written, capsys):
    assert main(["--jobs", written(), "--cluster", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {
        "cluster",
        "accelerator",
        "nodes",
        "devices_per_node",
        "strategy",
        "goal",
        "jobs",
        "strategies",
    }
    assert keys <= set(found)
    assert (found["nodes"], found["devices_per_node"], found["strategy"]) == (
        2,
        8,
        "search",
    )
    figures = {
        "utilisation",
        "fragmentation",
        "balance",
        "tokens_per_second",
        "mean_seconds_until_done",
    }
    figures.add("seconds_until_all_done")
    assert figures <= set(found) and all(
        set(other) == figures for other in found["strategies"].values()
    )
    assert list(found["strategies"]) == ["first_fit", "best_fit", "balance", "search"]
    run, short, bare, large = found["jobs"]
    assert (
        run["runs_now"]
        and run["devices"] == 8
        and run["mesh"] == {"data": 4, "tensor": 2, "pipeline": 1}
    )
    assert run["step_seconds"] > 0 and run["slowdown"] >= 1
    assert run["ends_seconds"] == pytest.approx(100 * run["step_seconds"])
    taken = [
        (n["node"], device)
        for job in (run, short, bare)
        for n in job["nodes"]
        for device in n["devices"]
    ]
    assert len(taken) == len(set(taken)) == 14
    assert short["devices"] == 4 and [
        choice["devices"] for choice in short["choices"]
    ] == [2, 4]
    assert bare["step_seconds"] is None and bare["ends_seconds"] == 3600
    assert not large["runs_now"] and re.fullmatch(
        r"large .*fit: .* 64 devices, .*dgx-h100 has 16\.", large["reason"]
    )
    assert found["utilisation"] == 14 / 16


def test_a_name_is_as_large_as_all_jobs_need(written, capsys):
    jobs = written(
        "jobs:\n  - {name: one, devices: 4, hours: 1}\n  - {name: two, devices: 9, hours: 3}"
    )
    assert main(["--jobs", jobs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["accelerator"], found["nodes"]) == ("h100", 3)
    assert (found["mean_seconds_until_done"], found["seconds_until_all_done"]) == (
        2 * 3600,
        3 * 3600,
    )


def test_the_report_shows_nodes_strategies_and_reasons(written, capsys):
    jobs = written(
        "nodes: 2\njobs:\n  - {name: one, devices: 16, hours: 2}\n  - {name: two, devices: 8}"
    )
    assert main(["--jobs", jobs]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "0-1 AAAAAAAA" in out and "first fit 100.0%" in out
    assert re.search(r"two waits 2 h 0 min: .* 8 devices; all 16 .* taken\.", out)


@pytest.mark.thorough
def test_in_80_columns_no_cell_is_cut(written, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--jobs", written(), "--cluster", "h100"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    placed = [
        line
        for line in lines
        if re.match(r"[A-C]  \w+ +\d+ +\d+  \d.* now +\d\S* \w+( \d+ \w+)?$", line)
    ]
    speeds = [
        line
        for line in lines
        if re.match(r"[AB]  \w+ +\d+ x \d+ x \d+ +\S+ \w+ +\S+ \w$", line)
    ]
    assert (len(placed), len(speeds)) == (3, 2), lines
    heads = [
        "utilisation",
        "fragmentation",
        "balance",
        "tokens/s",
        "mean end",
        "last end",
    ]
    assert any(re.search(" +".join(heads), line) for line in lines)


def test_where_nothing_fits_all_is_free(written, capsys):
    jobs = written(
        "nodes: 1\njobs: [{name: large, devices: 16}, {name: odd, devices: 9}]"
    )
    assert main(["--jobs", jobs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["utilisation"], found["fragmentation"], found["balance"]) == (
        0.0,
        0.0,
        1.0,
    )
    assert found["mean_seconds_until_done"] is None and not any(
        job["runs_now"] for job in found["jobs"]
    )


def test_a_job_that_waits_is_told_what_is_free(written, capsys):
    jobs = written(
        "nodes: 2\njobs:\n  - {name: one, devices: 5}\n  - {name: two, devices: 5}\n  - {name: more, devices: 4}"
    )
    assert main(["--jobs", jobs, "--json"]) == 0
    assert re.fullmatch(
        r"more waits .* nobody .* 4 devices; 6 of 16 .*at most 3 .*",
        json.loads(capsys.readouterr().out)["jobs"][2]["reason"],
    )


@pytest.mark.thorough
def test_the_page_has_a_cell_a_device_and_fetches_nothing(written, tmp_path, capsys):
    page = tmp_path / "jobs.html"
    assert main(["--jobs", written(), "--html", str(page)]) == 0
    text = page.read_text()
    check_page(text)
    assert axes(text) == ["node", "devices"]
    assert capsys.readouterr().out == ""
    assert (
        not re.search('<script|src=|href="(?!data:,)', text)
        and 'name="viewport"' in text
    )
    picture = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert len(picture.findall("{*}rect")) == 16 and picture.get("viewBox").startswith(
        "0 0 400 "
    )
    assert {
        title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")
    } == {
        "run",
        "short",
        "bare",
    }


BAD = {
    "": "is empty; it needs at least 'jobs: [{name: one, devices: 8}]'",
    "jobs: []": "there are 0 jobs; at least 1",
    "jobs: 3": "line 1: jobs is the single value '3'; it must be a list of mappings.",
    "jobs: [3]": "section 'jobs[0]' must be a mapping",
    "jobs: [{nme: a}]": "there is no key jobs[0].nme; did you mean jobs[0].name?",
    "job: [{name: a}]": "there is no key job; did you mean jobs?",
    "goal: trougput\njobs: [{name: a, devices: 1}]": "goal is 'trougput'; it must be one of utilisation, latency, "
    "throughput; did you mean throughput?",
    "strategy: bestfit\njobs: [{name: a, devices: 1}]": "did you mean best_fit?",
    "jobs: [{name: a, devices: 1.5}]": "jobs[0].devices is '1.5'; it must be a whole number",
    "jobs: [{name: a, any_of: [0]}]": "jobs[0].any_of[0] is 0; it must be at least 1",
    "jobs: [{name: A, devices: 1}]": "jobs[0].name is 'A'; it begins with a letter",
    "jobs: [{devices: 1}]": "jobs[0].name is ''; it begins with a letter",
    "jobs: [{name: a, devices: 1}, {name: a, devices: 1}]": "jobs[1].name is a, as that of a job before it",
    "jobs: [{name: a}]": "job a has no config, devices or any_of; give one of them.",
    "jobs: [{name: a, devices: 1, any_of: [2]}]": "job a has both devices and any_of",
    "jobs: [{name: a, config: CONFIG, steps: 1, hours: 1}]": "job a has both steps and hours",
    "jobs: [{name: a, devices: 1, steps: 1}]": "job a has steps but no config",
    "jobs: [{name: a, devices: 1, set: [mesh.data=1]}]": "job a has set but no config",
    "goal: latency\njobs: [{name: a, devices: 1}]": "job a has no hours, which goal: latency needs",
    "jobs: [{name: a, config: nowhere.yaml}]": "job a: there is no config file nowhere.yaml.",
    "jobs: [{name: a, config: CONFIG, set: [mesh.dta=2]}]": "job a: --set mesh.dta=2: there is no key mesh.dta; did "
    "you mean mesh.data?",
}


@pytest.mark.parametrize("text", BAD)
def test_mistakes_are_one_sentence(written, capsys, text):
    assert main(["--jobs", written(text)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and BAD[text] in said


@pytest.mark.parametrize(
    "more, said",
    [
        (["--config", "x.yaml"], "--config and --jobs"),
        (["--set", "mesh.data=2"], "--set and --jobs"),
        (["--search"], "--search and --jobs"),
        (["--cluster", "h1000"], "did you mean h100"),
        (
            ["--html", "/nowhere/at/all.html"],
            "/nowhere/at/all.html ... no directory",
        ),
        (
            ["--kueue", "/nowhere/at/all"],
            "--kueue /nowhere/at/all: ... directory.",
        ),
        (["--cluster", "tpu-v5p", "--kueue", "out"], "--kueue is for NVIDIA GPUs"),
    ],
)
def test_options_that_do_not_go_together(
    written, capsys, monkeypatch, tmp_path, more, said
):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["--jobs", written("nodes: 1\njobs: [{name: a, devices: 1}]"), *more]) == 2
    )
    assert tells(capsys.readouterr().err, said)


def test_kueue_is_for_jobs(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--kueue", "out"])
    assert (
        ended.value.code == 2
        and "--kueue DIR is for --jobs FILE" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_example_is_placed_whole_by_the_search_alone(capsys):
    assert (
        main(["--jobs", "configs/jobs/llama.yaml", "--cluster", "h100", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)["strategies"]
    assert (
        found["search"]["utilisation"]
        == 1.0
        > max(found[name]["utilisation"] for name in found if name != "search")
    )


def test_the_docstring_shows_a_file_of_jobs(written):
    text = listed.__doc__
    given = yaml.safe_load(text[text.index("    strategy") : text.index("\n\nA job")])
    names = [job.name for job in listed.read(written(yaml.safe_dump(given))).jobs]
    assert names == ["base", "short", "other"]


def test_a_jobs_islands_are_told(written, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("mesh: {data: 4, islands: 2}\ntrain: {steps: 3}")
    jobs = written(
        f"nodes: 1\njobs:\n  - {{name: one, config: {tmp_path / 'run.yaml'}}}"
    )
    assert main(["--jobs", jobs, "--cluster", "h100"]) == 0
    out = capsys.readouterr().out  # the column is narrow
    assert "4 x 1 x" in out and "islands" in out
    assert main(["--jobs", jobs, "--cluster", "h100", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["jobs"]
    assert one["mesh"] == {"data": 4, "tensor": 1, "pipeline": 1, "islands": 2}


def test_a_config_is_found_beside_the_list_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "one.yaml").write_text("mesh: {data: 2}\n")
    (tmp_path / "lists" / "jobs.yaml").write_text(
        "jobs: [{name: run, config: one.yaml}]\n"
    )
    for directory, given in (("lists", "jobs.yaml"), (".", "lists/jobs.yaml")):
        monkeypatch.chdir(tmp_path / directory)
        (job,) = listed.read(given).jobs
        assert wanted(job) == 2
