"""Any number of runs are ranked by their losses, with the keys in which they differ."""

import json
import re

import pytest

import meshtrain as mt
from meshtrain.config import to_yaml
from meshtrain.report import ranking
from meshtrain.report.__main__ import main


@pytest.fixture
def runs(tmp_path):
    """Four runs of three rates, the third of which diverged; of the last nothing is evaluated yet."""

    def written(name, rate, losses, evaluated):
        directory = tmp_path / name
        directory.mkdir()
        overrides = [f"optimizer.learning_rate={rate}", f"run.directory={directory}"]
        overrides += ["train.steps=3", "mesh.data=1"]
        (directory / "config.yaml").write_text(to_yaml(mt.load(None, overrides)))
        rows = [
            {"step": k, "loss": loss, "tokens": 64, "step_seconds": 0.5}
            for k, loss in enumerate(losses, 1)
        ]
        rows[-1] |= evaluated
        (directory / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows)
        )
        return directory

    return [
        written("a", 0.01, [5.0, 4.0, 3.0], {"eval_loss": 3.5}),
        written("b", 0.02, [5.0, 4.5, 3.2], {"eval_loss": 3.1}),
        written("c", 0.5, [5.0, 9.0, None], {"not_finite": ["loss"]}),
    ]


def test_the_lowest_validation_loss_is_first_and_a_run_that_diverged_is_last(runs):
    ranked = ranking.rank(runs)
    assert [run.run[-1] for run in ranked.runs] == ["b", "a", "c"]
    assert ranked.keys == ("optimizer.learning_rate",)
    best = ranked.runs[0]
    assert (best.eval_loss, best.loss, best.step, best.steps) == (3.1, 3.2, 3, 3)
    assert best.config == {"optimizer.learning_rate": 0.02}


def test_without_validation_the_loss_at_the_end_decides(runs):
    text = (runs[0] / "metrics.jsonl").read_text()
    (runs[0] / "metrics.jsonl").write_text(text.replace(', "eval_loss": 3.5', ""))
    assert [run.run[-1] for run in ranking.rank(runs).runs] == ["a", "b", "c"]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_table_keeps_to_its_width_and_counts_the_keys_that_it_leaves_out(runs, width):
    names = [
        f"{'optimizer.learning_rate'}",
        "model.layers",
        "data.source",
        "train.sequence_length",
    ]
    lines = ranking.render(ranking.rank(runs, names), width).splitlines()
    table = [line for line in lines if "keys that differ" not in line]
    assert all(len(line) <= width for line in table)
    assert (len(lines) > len(table)) == ("sequence_length" not in table[0])


def test_the_command_takes_any_number_of_runs(runs, tmp_path, capsys):
    page = tmp_path / "all.html"
    assert main([*map(str, runs), "--html", str(page)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == [
        "run",
        "eval",
        "loss",
        "loss",
        "tokens/s",
        "step",
        "learning_rate",
    ]
    assert [line.split()[0] for line in printed[1:4]] == ["b", "a", "c"]
    assert "<svg" in page.read_text()
    legend = re.findall(r'background:([^"]+)">&nbsp;</span> (\w)', page.read_text())
    assert [name for _, name in legend] == ["b", "a", "c"]
    assert all(f'stroke="{colour}"' in page.read_text() for colour, _ in legend)
    assert "0.02" in page.read_text()
    assert main([*map(str, runs), "--json"]) == 0
    assert [
        run["eval_loss"] for run in json.loads(capsys.readouterr().out)["runs"]
    ] == [
        3.1,
        3.5,
        None,
    ]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--diagnose"], "takes one run or two, not 3"),
        (["nowhere"], "no run directory nowhere"),
    ],
)
def test_what_cannot_be_ranked_is_refused(runs, more, sentence, capsys):
    assert main([*map(str, runs), *more]) == 2
    assert sentence in capsys.readouterr().err
