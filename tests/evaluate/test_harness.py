"""A model as lm-evaluation-harness asks for one: against sums of the model's own logits, and in lm-eval itself where
that is installed.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("safetensors")

from experiments.evaluate.harness import NAMES, ROLLING, TASKS, ByHand
from experiments.evaluate.tiny import LENGTH, tiny
from meshtrain.config import ConfigError
from meshtrain.errors import install_command
from meshtrain.evaluate import harness as harness_module
from meshtrain.evaluate.harness import Harness, model_class, run_tasks
from meshtrain.generate.opened import open_model
from meshtrain.generate.request import Piece
from meshtrain.telemetry.progress import EvaluationProgress

ROOT = Path(__file__).parents[2]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.thorough) for name in ("llama", "gpt2")
    ],
)
def made(request, tmp_path_factory):
    """A directory, the harness on it, and its requests answered by the plainest means; llama begins a text with BOS,
    gpt2 does not.
    """
    directory = tiny(tmp_path_factory.mktemp("tiny"), request.param)
    opened = open_model(directory, slots=3)
    return directory, Harness(opened, rows=3), ByHand(directory)


def asked(*args):
    return [SimpleNamespace(args=each) for each in args]


PAIRS = [
    ("A triangle has", " three sides"),
    ("A triangle has", " four"),
    ("One two three four five", " six seven eight nine"),
    ("a", "b"),
]


def test_an_answer_is_as_likely_as_the_logits_say(made):
    _, harness, hand = made
    found = harness.loglikelihood(asked(*PAIRS), disable_tqdm=True)
    for (total, greedy), (right, likeliest) in zip(
        found, (hand.loglikelihood(*pair) for pair in PAIRS), strict=True
    ):
        assert total == pytest.approx(right, abs=1e-4) and greedy == likeliest


def test_what_the_model_would_say_is_greedy(made):
    _, harness, hand = made
    likeliest = {}
    for row in (
        json.loads(line) for line in (TASKS / "choice.jsonl").read_text().splitlines()
    ):
        context = row["question"]
        token = int(hand.log_p(hand.tokenizer.encode(context).ids)[-1].argmax())
        text = hand.tokenizer.decode([token])
        # random weights say bytes of no character, too
        if harness.pair(context, text)[1] == [token]:
            likeliest[context] = text
    assert likeliest
    assert all(
        greedy
        for _, greedy in harness.loglikelihood(
            asked(*likeliest.items()), disable_tqdm=True
        )
    )


def test_spaces_at_the_end_of_a_context_belong_to_the_answer(made):
    _, harness, hand = made
    (found,) = harness.loglikelihood(
        asked(("A triangle has ", "three")), disable_tqdm=True
    )
    assert found[0] == pytest.approx(
        hand.loglikelihood("A triangle has", " three")[0], abs=1e-4
    )


def test_an_empty_context_is_what_a_document_begins_behind(made):
    _, harness, hand = made
    ids = hand.tokenizer.encode("three", add_special_tokens=False).ids
    log_p = hand.log_p([hand.prefix, *ids[:-1]])
    (found,) = harness.loglikelihood(asked(("", "three")), disable_tqdm=True)
    assert found[0] == pytest.approx(log_p[np.arange(len(ids)), ids].sum(), abs=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning(made):
    _, harness, hand = made
    context, answer = "word after word " * 40 + "and", " more"
    before, ids = harness.pair(context, answer)
    assert len(before) > LENGTH
    row = [*before, *ids][-(LENGTH + 1) :]
    log_p = hand.log_p(row[:-1])[-len(ids) :]
    (found,) = harness.loglikelihood(asked((context, answer)), disable_tqdm=True)
    assert found[0] == pytest.approx(log_p[np.arange(len(ids)), ids].sum(), abs=1e-4)
    with pytest.raises(ConfigError, match=r"tokens is asked for .* takes 64"):
        harness.loglikelihood(asked(("a", context)), disable_tqdm=True)


def test_a_text_of_any_length_is_scored_once(made):
    _, harness, hand = made
    found = harness.loglikelihood_rolling(
        asked(*[(text,) for text in ROLLING]), disable_tqdm=True
    )
    assert found == pytest.approx([hand.rolling(text) for text in ROLLING], abs=1e-4)


@pytest.mark.thorough
def test_generated_text_is_greedy_and_ends_before_what_it_must_end_at(made):
    _, harness, hand = made
    whole = hand.generate("A triangle has", ["\0"], 20)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    prompts = [
        ("A triangle has", {"until": ["\0"], "max_gen_toks": 20}),
        (
            "A triangle has",
            {"until": stop, "max_gen_toks": 20, "do_sample": False, "temperature": 0.7},
        ),
        ("One", {"until": ["\n\n"], "max_new_tokens": 3}),
        ("word after word " * 40, {"until": [], "max_gen_toks": 5}),
    ]
    found = harness.generate_until(asked(*prompts), disable_tqdm=True)
    assert found[0] == whole and found[1] == whole.partition(stop)[0] != whole
    assert found[2] == hand.generate("One", ["\n\n"], 3)
    assert found[3] == hand.generate("word after word " * 40, ["\0"], 5)
    assert harness.generate_until([]) == []
    with pytest.raises(ConfigError, match=r"answers of 64 tokens, .* model takes 64"):
        harness.generate_until(asked(("a", {"max_gen_toks": 64})))


def test_answers_are_counted_as_they_end(made, monkeypatch):
    class Scripted:
        def __init__(self, *_, **__):
            self.step = self.close = lambda: False

        def submit(self, request, receive):
            for piece in (Piece("a"), Piece("a"), Piece("b", finish="stop")):
                receive(piece)

    counted = []
    monkeypatch.setattr(harness_module, "Engine", Scripted)
    monkeypatch.setattr(
        EvaluationProgress, "__call__", lambda self, *count: counted.append(count)
    )
    assert made[1].generate_until(
        asked(("One", {"max_gen_toks": 5}), ("Two", {"max_gen_toks": 5}))
    ) == ["aab", "aab"]
    assert counted == [(1, 2), (2, 2)]


def test_a_conversation_is_written_by_the_models_own_template(made):
    directory, harness, hand = made
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    begin = "<|begin|>" if directory.name == "llama" else "</s>"
    assert harness.apply_chat_template(said[:1]) == f"{begin}<user>Hi<|end|><assistant>"
    assert (
        harness.apply_chat_template(said, add_generation_prompt=False)
        == f"{begin}<user>Hi<|end|><assistant>So"
    )
    assert (
        "add_generation_prompt" in harness.chat_template(True)
        and harness.chat_template(False) is None
    )
    # special tokens are themselves, and BOS stands once
    ids = harness.tokens(harness.apply_chat_template(said[:1]))
    assert ids[0] == hand.tokenizer.token_to_id(begin) and ids.count(ids[0]) == 1
    assert ids.count(hand.tokenizer.token_to_id("<|end|>")) == 1


# --- without lm-eval, and with it


def test_without_lm_eval_a_sentence_says_what_is_needed(monkeypatch):
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=re.escape(install_command("evaluate"))):
        model_class.__wrapped__()


@pytest.fixture
def lm_eval(monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)
    return pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed (extra evaluate)"
    )


def test_lm_eval_takes_it_for_one_of_its_models(lm_eval, made):
    from lm_eval.api.model import LM
    from lm_eval.api.registry import get_model

    found = model_class()
    assert (
        get_model("meshtrain") is found
        and issubclass(found, LM)
        and issubclass(found, Harness)
    )
    model = found.create_from_arg_string(
        f"path={made[0]},step=newest", {"batch_size": 2, "device": None}
    )
    in_8_bits = found.create_from_arg_string(
        f"path={made[0]},weights=int8", {"device": None}
    )
    assert in_8_bits.opened.weights == "int8" and model.opened.weights is None
    assert model.scorer.rows == 2 and model.rank == 0 and model.world_size == 1
    with pytest.raises(ConfigError, match=r"model_args has pth, .* mean path"):
        found.create_from_arg_string(f"pth={made[0]}")


def test_tasks_of_ones_own_are_run_and_counted(lm_eval, made):
    results = run_tasks(made[1].opened, list(NAMES), include=TASKS, rows=3)
    rows = [
        json.loads(line) for line in (TASKS / "choice.jsonl").read_text().splitlines()
    ]
    hand = made[2]
    best = [
        int(
            np.argmax(
                [hand.loglikelihood(r["question"], f" {c}")[0] for c in r["choices"]]
            )
        )
        for r in rows
    ]
    found = results["results"]
    right = [b == r["answer"] for b, r in zip(best, rows, strict=True)]
    assert found["meshtrain_choice"]["acc,none"] == np.mean(right)
    assert found["meshtrain_again"]["exact_match,none"] == 0
    assert math.isfinite(found["meshtrain_choice"]["acc_norm,none"])
    says = r"no task \w+_choise .* mean \w+_choice"
    with pytest.raises(ConfigError, match=says):
        run_tasks(made[1].opened, ["meshtrain_choise"], include=TASKS)


def test_the_command_prints_the_table_alone_on_stdout(lm_eval, made):
    words = f"-m meshtrain.evaluate {made[0]} --tasks meshtrain_choice --limit 3 --include-path {TASKS}".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("|") and all(
        line.startswith("|") for line in done.stdout.splitlines() if line
    )
    assert "meshtrain_choice" in done.stdout and "acc_norm" in done.stdout
