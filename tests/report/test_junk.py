"""Runs whose files hold anything that JSON can: each is told of, and nothing raises, warns or writes what JSON and HTML
have no word for.
"""

import json
import random
import warnings

import pytest

from meshtrain.monitor.__main__ import line, screen
from meshtrain.monitor.watched import WatchedRun
from meshtrain.report import compare
from meshtrain.report.facts import gather
from meshtrain.report.page import page
from meshtrain.report.summary import summarise, to_json
from meshtrain.report.text import render

# fmt: off
NAMES = [
    "step", "loss", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds", "mfu", "eval_loss", "grad_norm", "wait_seconds",
    "dispatch_seconds", "compiles", "compile_seconds", "checkpoint_blocked_seconds", "memory_in_use_bytes", "skipped", "time", "phase_seconds",
    "device_memory_used_bytes", "device_memory_limit_bytes", "memory_limit_bytes", "process_rss_bytes", "rank", "host", "rule", "state",
    "severity", "sentence", "not_finite", "findings", "parts", "name", "seconds", "planned", "cannot_tell", "settings", "advice",
    "expert_tokens", "layer_expert_load", "rl/reward", "rl/reward_std", "rl/gap_max", "kind", "prompt", "answer", "reward",
    "group_rewards", "role", "content", "text",
]
# fmt: on
FAKE = "run: {fake_devices: 8}\ntrain: {steps: 100}\n"
CONFIGS = (
    FAKE,
    "model: {moe: {experts: 4}}\n",
    "mesh: {data: 2}\n",
    "a: [1",
    "train: {steps: x}\n",
    "x: {y: 1}\n",
    "",
)
NUMBERS = (0, 1, -1, 0.0, -0.5, 1e-300, 1e300, 1e18, 5, 7.5, 10**400)
TEXTS = ("", "x", "firing", "resolved", "\x1b[31m", "<b>", "é\ud800")


def value(dice, depth=0):
    kind = dice.randrange(10)
    if kind < 5:
        return dice.choice(
            [*NUMBERS, dice.random() * 10.0 ** dice.randrange(-5, 6), -dice.random()]
        )
    if kind < 7:
        return dice.choice([None, True, False, *TEXTS])
    if depth == 3:
        return 0
    some = [value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return (
        some
        if kind == 7
        else {dice.choice([*NAMES, "a", "data", "wait", "0", ""]): one for one in some}
    )


def row(dice, sane):
    found = {
        name: value(dice) for name in dice.sample(NAMES, dice.randrange(len(NAMES)))
    }
    if dice.random() < sane:
        seconds = dice.random() + 0.1
        found |= {
            "step": dice.randrange(1, 200),
            "loss": dice.random() * 5,
            "tokens": 64,
            "step_seconds": seconds,
        }
    return found


def lines(dice, number, sane):
    torn = ("{", "\n", "null\n", '{"step":\n')
    return "".join(
        json.dumps(row(dice, sane)) + "\n"
        if dice.random() < 0.95
        else dice.choice(torn)
        for _ in range(number)
    )


def samples(dice):
    """Lines that are almost samples of answers."""
    for step in range(dice.randrange(5)):
        known = {"step": step, "kind": "best", "answer": dice.choice(TEXTS)}
        prompt = dice.choice(
            [value(dice), "1+1=", [{"role": "user", "content": value(dice)}]]
        )
        yield json.dumps(row(dice, 0) | known | {"prompt": prompt}) + "\n"


def spoilt(dice, run):
    (run / "resources").mkdir(parents=True)
    if dice.random() < 0.9:
        (run / "config.yaml").write_text(dice.choice(CONFIGS))
    (run / "metrics.jsonl").write_text(
        lines(dice, dice.choice([0, 1, 2, 5, 50, 300]), dice.choice([0, 0.5, 1]))
    )
    if dice.random() < 0.6:
        (run / "alerts.jsonl").write_text(lines(dice, 10, 0))
    if dice.random() < 0.6:
        (run / "answers.jsonl").write_text(lines(dice, 10, 0) + "".join(samples(dice)))
    for rank in range(dice.randrange(3)):
        (run / "resources" / f"{rank}.jsonl").write_text(
            lines(dice, dice.choice([0, 1, 5, 30]), 0.5)
        )
    if dice.random() < 0.5:
        found = {
            name: [row(dice, 0) for _ in range(3)] for name in ("findings", "parts")
        }
        (run / "findings.json").write_text(
            json.dumps(dice.choice([found | {"cannot_tell": value(dice)}, value(dice)]))
        )
    return run


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", [range(24), range(24, 100)], ids=["few", "many"])
def test_whatever_the_files_hold_a_run_is_told_of(tmp_path, seeds):
    for seed in seeds:
        dice = random.Random(seed)
        runs = [spoilt(dice, tmp_path / f"{seed}{name}") for name in "ab"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            facts = [gather(run) for run in runs]
            summaries = [summarise(one) for one in facts]
            for one, summary in zip(facts, summaries, strict=True):
                assert render(one, summary).strip()
                json.dumps(to_json(one, summary), allow_nan=False)
                assert "\x1b" not in page([one], [summary]).encode().decode()
            found = compare.compare(*facts)
            assert compare.render(found).strip() and json.dumps(
                found.as_json(), allow_nan=False
            )
            page(facts, summaries, found).encode()
            for run in runs:
                watched = WatchedRun(run)
                for look in (watched.look(), watched.look()):
                    assert line(look) and screen([look], 80, 24)
