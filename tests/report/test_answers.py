"""Answers that a run has drawn, in its report: samples spread over the run, whatever a model or a stranger wrote."""

import json
import os
import re
import time
from itertools import pairwise

import pytest
from drawn import check_page
from refusals import tells

from meshtrain.draw.page import folded, table
from meshtrain.report import answers
from meshtrain.report.__main__ import main
from meshtrain.report.facts import gather
from meshtrain.report.page import page
from meshtrain.report.summary import summarise, to_json
from meshtrain.report.text import render
from meshtrain.rl import answering
from meshtrain.run.directory import ANSWERS, GAPS, WATCHED

SAMPLE = {
    "step": 1,
    "kind": "best",
    "prompt": "17+58=",
    "answer": "75",
    "reward": 1.0,
    "advantage": 1.5,
    "group_rewards": [1.0, 0.0, 0.0, 1.0],
}


def sample(**other):
    return SAMPLE | other


def written(directory, samples, steps=3):
    """Returns the facts of a run whose file has these samples; texts are lines as they stand."""
    directory.mkdir()
    (directory / "config.yaml").write_text(
        "run: {fake_devices: 8}\nrl: {gap_limit: 0.01}\n"
    )
    rows = [
        {"step": k, "loss": 0.1 * (k % 2), "rl/reward": k / 10, "rl/reward_std": 0.1}
        | {
            "rl/gap_max": 1e-6 * k,
            "rl/answer_tokens": 3.0,
            "rl/ended": 0.5,
            "rl/entropy": 1.0,
        }
        for k in range(1, steps + 1)
    ]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    lines = (one if isinstance(one, str) else json.dumps(one) + "\n" for one in samples)
    (directory / ANSWERS).write_text("".join(lines))
    return gather(directory)


def html_of(facts):
    html = page([facts], [summarise(facts)])
    check_page(html)
    html.encode()
    return html


def cells(html):
    """Returns the rows of the table of answers."""
    inside = html.partition("<h2>Answers</h2>")[2].partition("</table>")[0]
    return [
        re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)
        for row in inside.split("<tr>")[2:]
    ]


def test_a_page_has_the_best_a_median_and_the_worst_answer_of_steps(tmp_path):
    of_step = [
        sample(
            kind="worst",
            answer="9",
            reward=0.0,
            advantage=-0.5,
            group_rewards=[0, 0, 1, 0],
        ),
        sample(kind="median", reward=0.5),
        sample(),
    ]
    facts = written(tmp_path / "run", [*of_step, sample(step=1003)])
    assert cells(html_of(facts)) == [
        ["1", "best", "1", "17+58=", "75", "1.5", "2 × 1, 2 × 0"],
        ["1", "median", "0.5", "17+58=", "75", "1.5", "2 × 1, 2 × 0"],
        ["1", "worst", "0", "17+58=", "9", "-0.5", "3 × 0, 1 × 1"],
        ["1,003", "best", "1", "17+58=", "75", "1.5", "2 × 1, 2 × 0"],
    ]
    text = render(facts, summarise(facts))
    assert re.search(r"\n +1,003 +best +1 +17\+58= +75 +1\.5 +2 × 1, 2 × 0\n", text)
    assert (
        tells(text, "reward 0.1 → 0.3") and summarise(facts).figures["gap"] == "3e-06"
    )
    assert to_json(facts, summarise(facts))["reward"] == pytest.approx(0.3)


def test_a_page_has_charts_of_what_was_learned(tmp_path):
    labels = re.findall(
        r'aria-label="(.+?) over steps"', html_of(written(tmp_path / "run", []))
    )
    wanted = {"reward", "gap between drawing and training", "length of an answer"}
    assert {*wanted, "answers that ended", "entropy of answers"} <= set(labels)


def test_a_model_may_write_anything(tmp_path):
    evil = "<script>alert(1)</script>\x1b[31m\u202e\ud800\0 </td></table>"
    messages = [
        {"role": evil, "content": "<b>Be brief.</b>"},
        {"role": "user", "content": [{"type": "text", "text": evil}, {"image": 1}, 3]},
        {"role": "assistant", "content": None, "tool_calls": []},
        "no message",
    ]
    facts = written(tmp_path / "run", [sample(prompt=messages, answer=evil)])
    html = html_of(facts)
    ((_, _, _, prompt, answer, *_),) = cells(html)
    assert "<script" not in html and "\x1b" not in html and "\u202e" not in html
    assert (
        "&lt;b&gt;Be brief.&lt;/b&gt;\nuser: [{" in prompt
        and "&lt;script&gt;" in prompt
    )
    assert (
        answer.startswith("&lt;script&gt;alert(1)")
        and r"\x1b[31m\u202e\ud800\x00" in answer
    )
    text = render(facts, summarise(facts))
    text.encode()
    assert "\x1b" not in text and "\0" not in text


def test_long_texts_are_folded_and_cut_and_keep_their_begin_and_end(tmp_path):
    long = "begin " + "x" * 5000 + "\n" * 50 + " end"
    facts = written(tmp_path / "run", [sample(prompt=long, answer="a\nb\nc\nd\ne")])
    html = html_of(facts)
    ((_, _, _, prompt, answer, *_),) = cells(html)
    assert prompt.startswith("<details><summary>begin x") and prompt.endswith(
        " end</details>"
    )
    assert len(prompt) < 1000
    assert answer == "<details><summary>a b c d e …</summary>a\nb\nc\nd\ne</details>"
    assert max(map(len, render(facts, summarise(facts)).splitlines())) < 200


def test_a_short_text_is_not_folded():
    assert folded("a < b\nc") == "a &lt; b\nc"


@pytest.mark.parametrize("steps", [39, 40, 41, 320, 321, 5000])
def test_steps_are_spread_over_the_run_and_the_page_stays_small(tmp_path, steps):
    kinds = ("worst", "median", "best")
    long = "word " * 200
    samples = (
        sample(step=5 * k + 1, kind=kind, prompt=long, answer=long)
        for k in range(steps)
        for kind in kinds
    )
    path = tmp_path / ANSWERS
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    told = answers.read(path)
    shown = sorted({int(row[0].replace(",", "")) for row in told.rows})
    assert told.left_out == 0
    assert shown[0] == 1 and shown[-1] == 5 * steps - 4
    assert len(shown) == min(steps, 40) and len(told.rows) == 3 * len(shown)
    apart = [b - a for a, b in pairwise(shown)]
    assert max(apart) <= 2 * max(5, 5 * steps / 40)
    assert sum(len(cell) for row in told.rows for cell in row) < 100_000


@pytest.mark.parametrize("depth", [*range(100, 1000, 100), *range(940, 1010)])
def test_a_prompt_of_any_depth_is_told_of(tmp_path, depth):
    (tmp_path / ANSWERS).write_text(
        json.dumps(sample(prompt=[{"role": 1, "content": "IN"}])).replace(
            '"IN"', "[" * depth + "]" * depth
        )
        + "\n"
    )
    told = answers.read(tmp_path / ANSWERS)
    assert len(told.rows) + told.left_out == 1


def test_a_run_that_went_on_shows_each_answer_once(tmp_path):
    again = [sample(answer="old"), sample(step=2), sample(answer="new")]
    facts = written(tmp_path / "run", again)
    assert [(row[0], row[4]) for row in facts.answers.rows] == [
        ("1", "new"),
        ("2", "75"),
    ]


def test_rewards_of_a_group_are_counted_the_most_frequent_first():
    group = answers._group
    assert (
        group([1, 0.0, 1.0]) == "2 × 1, 1 × 0" and group([True, "1", None]) == "3 × -"
    )
    assert (
        group([0.5, 3, 1, 2, 3, -4]) == "2 × 3, 1 × 0.5, 1 × 1, 1 × 2, …"
        and group([]) == "-"
    )


@pytest.mark.parametrize(
    "line",
    [
        "{\n",
        "null\n",
        "[1]\n",
        "\xff\n",
        *(
            sample(**other)
            for other in (
                {"step": "1"},
                {"step": -1},
                {"step": 10**400},
                {"step": None},
                {"kind": "last"},
                {"kind": ["best"]},
                {"answer": None},
                {"answer": ["75"]},
                {"prompt": {"role": "user"}},
                {"prompt": 3},
            )
        ),
    ],
)
def test_lines_of_other_shapes_are_left_out_with_a_sentence(tmp_path, line):
    facts = written(tmp_path / "run", [sample(), line, sample(kind="worst")])
    assert [row[1] for row in facts.answers.rows] == ["best", "worst"]
    assert tells(" ".join(facts.notes), "1 ", ANSWERS, "left out")
    assert tells(html_of(facts), ANSWERS)


@pytest.mark.parametrize("value", ["1", None, [1], 10**400, float("inf")])
@pytest.mark.parametrize("name", ["reward", "advantage", "group_rewards"])
def test_a_number_that_is_none_is_a_dash(tmp_path, name, value):
    (row,) = written(tmp_path / "run", [sample(**{name: value})]).answers.rows
    place = answers.HEADS.index(name) if name in answers.HEADS else -1
    counted = name == "group_rewards" and value == [1]
    assert row[place] == ("1 × 1" if counted else "-")


@pytest.mark.parametrize(
    "last", [json.dumps(sample(step=2))[:30], json.dumps(sample(step=2)), ""]
)
def test_a_line_that_is_still_written_is_none_yet(tmp_path, last):
    facts = written(tmp_path / "run", [sample(), last])
    assert len(facts.answers.rows) == 1 and not [
        note for note in facts.notes if ANSWERS in note
    ]


@pytest.mark.parametrize("file", ["missing", "empty", "directory", "pipe"])
def test_without_samples_there_is_no_section(tmp_path, file):
    facts = written(tmp_path / "run", [])
    path = facts.directory / ANSWERS
    if file != "empty":
        path.unlink()
    make = {"directory": path.mkdir, "pipe": lambda: os.mkfifo(path)}
    make.get(file, lambda: None)()
    facts = gather(facts.directory)
    assert not [note for note in facts.notes if ANSWERS in note]
    assert "<h2>Answers</h2>" not in html_of(facts)


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path, capsys):
    facts = written(tmp_path / "run", [])
    (facts.directory / ANSWERS).unlink()
    (facts.directory / ANSWERS).symlink_to(ANSWERS)
    assert main([str(facts.directory)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and tells(err, ANSWERS)


def test_a_step_in_which_drawing_and_training_disagreed_is_the_reason_until_it_is_taken(
    tmp_path,
):
    facts = written(tmp_path / "run", [])
    (facts.directory / GAPS).mkdir()
    for name in ("2.npz", "4.npz", "x.npz", "5.txt"):
        (facts.directory / GAPS / name).touch()
    summary = summarise(gather(facts.directory))
    assert summary.level == "bad"
    assert tells(
        " ".join(reason.sentence for reason in summary.reasons), "step 4", "gaps/4.npz"
    )
    (facts.directory / GAPS / "4.npz").unlink()
    assert summarise(gather(facts.directory)).level != "bad"


@pytest.mark.parametrize("metric", ["rl/answer_tokens", "learning_rate"])
def test_a_loss_of_a_policy_that_rises_is_no_reason(tmp_path, metric):
    facts = written(tmp_path / "run", [])
    rows = [{"step": k, "loss": k / 1000, metric: 1.0} for k in range(1, 101)]
    (facts.directory / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, rows)) + "\n"
    )
    reasons = [reason.sentence for reason in summarise(gather(facts.directory)).reasons]
    assert any("risen" in sentence for sentence in reasons) == (
        metric != "rl/answer_tokens"
    )


def test_no_text_of_a_cell_takes_long():
    began = time.perf_counter()
    html = table(["x"], [["1" + "a" * 4000 + "!"], ["1 " * 4000 + "!"]])
    assert time.perf_counter() - began < 0.5 and 'class="n"' not in html
    assert (
        table([], [["1,234.5 MiB"], ["-"], ["<7 s"], ["50%"]]).count('class="n"') == 4
    )


def test_answers_belong_to_the_run_and_are_set_aside_with_it():
    assert {ANSWERS, GAPS} <= set(WATCHED)
    assert answering.ANSWERS == ANSWERS
