"""Runs that never were: seconds with a memory, as on a machine that is busy for a while, and steps now and then that
take far longer.
"""

import json
import math

import numpy as np
import pytest
from refusals import tells

from meshtrain.report.compare import blocks, compare, memory, render, sentences, student
from meshtrain.report.facts import gather
from meshtrain.report.page import page
from meshtrain.report.summary import summarise

RUNS = 60


def ar1(dice, steps, remembers):
    """float64 [steps]: normal, each value depending on the one before it."""
    noise = dice.standard_normal(steps) * math.sqrt(1 - remembers**2)
    x = np.empty(steps)
    x[0] = dice.standard_normal()
    for i in range(1, steps):
        x[i] = remembers * x[i - 1] + noise[i]
    return x


def seconds(dice, steps, remembers, scale=1.0):
    """float64 [steps]: log-normal with such a noise, 2% of them several times as long."""
    found = (
        0.3
        * scale
        * np.exp(0.1 * ar1(dice, steps, remembers) + 0.03 * dice.standard_normal(steps))
    )
    found[dice.random(steps) < 0.02] *= 4
    return found


def run(directory, times, loss, tokens=1000, config="train: {steps: 100}", every=1):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(config)
    rows = [
        {
            "step": k,
            "loss": loss[k - 1],
            "tokens": tokens,
            "step_seconds": t,
            "tokens_per_second": tokens / t,
        }
        for k, t in enumerate(times, 1)
        if k % every == 0
    ]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return gather(directory)


def losses(dice, steps, offset=0.0):
    return (
        2
        + 3 * np.exp(-np.arange(steps) / 100)
        + 0.05 * dice.standard_normal(steps)
        + offset
    ).tolist()


def pairs(tmp_path, steps, remembers, slower):
    """Of each seed a run beside an equal one, and beside one that is so many times as slow."""
    for seed in range(RUNS):
        dice = np.random.default_rng(seed)
        loss = losses(dice, steps)
        one, two, slow = (
            run(tmp_path / name, seconds(dice, steps, remembers, scale), loss)
            for name, scale in (("one", 1.0), ("two", 1.0), ("slow", slower))
        )
        yield compare(one, two), compare(one, slow).time


@pytest.mark.thorough
@pytest.mark.parametrize("steps, remembers", [(150, 0.0), (400, 0.5), (1000, 0.9)])
def test_equal_runs_do_not_differ_and_a_tenth_is_found(tmp_path, steps, remembers):
    compared = list(pairs(tmp_path, steps, remembers, 1.1))
    assert sum(equal.same for equal, _ in compared) >= 0.95 * RUNS
    found = sum(
        bool(slower and slower.differs and 0.0 < slower.value < 0.25)
        for _, slower in compared
    )
    assert found >= (0.75 if steps == 150 else 0.9) * RUNS


@pytest.mark.thorough
def test_of_short_runs_on_a_busy_machine_what_is_plain_is_found_and_equal_ones_do_not_differ(
    tmp_path,
):
    compared = list(pairs(tmp_path, 150, 0.9, 2.0))
    assert sum(equal.same for equal, _ in compared) >= 0.95 * RUNS
    assert (
        sum(slower is None or slower.differs for _, slower in compared) >= 0.95 * RUNS
    )


@pytest.mark.thorough
def test_students_quantile_is_that_of_the_tables():
    """The two-sided 99% of Student's t, from any textbook's table."""
    for freedom, value in ((3, 5.841), (10, 3.169), (30, 2.750)):
        assert student(freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.thorough
def test_losses_of_two_seeds_of_the_same_do_not_differ_and_an_offset_does(tmp_path):
    same = found = 0
    for seed in range(RUNS):
        dice = np.random.default_rng(seed)
        times = seconds(dice, 400, 0.5)
        one, two, worse = (
            run(tmp_path / name, times, losses(dice, 400, offset))
            for name, offset in (("a", 0), ("b", 0), ("c", 0.05))
        )
        same += not compare(one, two).loss.differs
        apart = compare(one, worse).loss
        found += apart.differs and apart.value > 0
    assert same >= 0.95 * RUNS and found >= 0.95 * RUNS


def test_losses_that_draw_apart_differ_however_they_change_on_the_way(tmp_path):
    """One falls faster: the difference between them is plain, though it is another at each step."""
    dice = np.random.default_rng(0)
    times = seconds(dice, 120, 0)
    one = run(
        tmp_path / "a",
        times,
        (5 - 0.01 * np.arange(120) + 0.02 * dice.standard_normal(120)).tolist(),
    )
    two = run(
        tmp_path / "b",
        times,
        (5 - 0.02 * np.arange(120) + 0.02 * dice.standard_normal(120)).tolist(),
    )
    apart = compare(one, two).loss
    assert apart.differs and apart.most < -0.8


def test_the_same_losses_bit_by_bit_are_told_so(tmp_path):
    dice = np.random.default_rng(0)
    loss = losses(dice, 60)
    found = compare(
        run(tmp_path / "a", seconds(dice, 60, 0), loss),
        run(tmp_path / "b", seconds(dice, 50, 0), loss),
    )
    assert found.identical == 50 and found.same
    assert any(
        tells(sentence, "bit by bit", "all 50 steps") for sentence in sentences(found)
    )


def test_losses_are_held_against_each_other_at_the_same_tokens(tmp_path):
    """One run reads twice as much a step, and every second of the other's steps is logged."""
    dice = np.random.default_rng(0)
    curve = [5 - 0.002 * k for k in range(1, 1001)]
    one = run(tmp_path / "a", seconds(dice, 1000, 0), curve, every=2)
    two = run(tmp_path / "b", seconds(dice, 500, 0), curve[1::2], tokens=2000)
    found = compare(one, two)
    assert found.tokens == 1_000_000
    assert not found.loss.differs and abs(found.loss.value) < 0.01


def test_too_few_steps_tell_nothing_and_say_so(tmp_path):
    dice = np.random.default_rng(0)
    found = compare(
        *(run(tmp_path / name, seconds(dice, 4, 0), losses(dice, 4)) for name in "ab")
    )
    assert found.time is None and found.loss is None and len(found.cannot_tell) == 2


def test_a_run_without_rows_is_compared_all_the_same(tmp_path):
    dice = np.random.default_rng(0)
    found = compare(
        run(tmp_path / "a", [], []),
        run(tmp_path / "b", seconds(dice, 50, 0), losses(dice, 50)),
    )
    assert found.time is None and found.loss is None and json.dumps(found.as_json())


def test_the_keys_that_differ_are_named(tmp_path):
    dice = np.random.default_rng(0)
    one, two = (
        run(
            tmp_path / name,
            seconds(dice, 50, 0),
            losses(dice, 50),
            config=f"run: {{directory: {name}, seed: {name == 'b':d}}}",
        )
        for name in "ab"
    )
    assert compare(one, two).config == (("run.seed", 0, 1),)
    assert compare(one, one).config == ()


def test_what_was_compiled_counts_for_nothing(tmp_path):
    """A run whose steps are followed by compiling now and then is as fast as another."""
    dice = np.random.default_rng(0)
    times, loss = seconds(dice, 300, 0), losses(dice, 300)
    plain = run(tmp_path / "a", times, loss)
    slow = np.where(np.arange(300) % 3 == 0, times * 20, times)
    run(tmp_path / "b", slow, loss)
    path = tmp_path / "b" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert compare(plain, gather(tmp_path / "b")).time.most > 0.005
    rows = [
        row | ({"compiles": 1, "compile_seconds": 5.0} if i % 3 == 0 else {})
        for i, row in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert abs(compare(plain, gather(tmp_path / "b")).time.value) < 0.005


@pytest.mark.parametrize("remembers, expected", [(0.0, 1.0), (0.5, 3.0), (0.9, 19.0)])
def test_how_long_an_ar1_noise_remembers_is_found(remembers, expected):
    """(1 + φ) / (1 − φ)."""
    found = [
        memory(ar1(np.random.default_rng(seed), 20_000, remembers)) for seed in range(5)
    ]
    assert expected * 0.85 < np.median(found) < expected * 1.15


def test_blocks_are_at_most_so_many_and_hold_every_value_but_the_first():
    assert blocks(np.arange(1000.0) % 2).size <= 64
    assert blocks(np.ones(1000)).tolist() == [1.0] * 62
    assert blocks(np.ones(3)).size == 0


def test_every_key_that_differs_is_named_in_text_and_page(tmp_path):
    other = {
        "model": "{layers: 2, d_model: 64, heads: 2, vocab_size: 300, norm_eps: 1.0e-6}",
        "optimizer": "{learning_rate: 0.1, beta1: 0.8, beta2: 0.8, eps: 1.0e-6, weight_decay: 0.2, grad_clip: 2}",
        "train": "{steps: 99, global_batch_size: 8, label_smoothing: 0.1, z_loss: 0.1}",
        "eval": "{every: 3, batches: 2}",
        "log": "{every: 2}",
        "checkpoint": "{every: 7, keep: 9}",
    }
    times = [0.3] * 20
    one = run(tmp_path / "one", times, [5.0] * 20)
    two = run(
        tmp_path / "two",
        times,
        [5.0] * 20,
        config="\n".join(f"{name}: {keys}" for name, keys in other.items()),
    )
    both = compare(one, two)
    changed = [path for path, *_ in both.config]
    assert len(changed) > 15
    text, html = render(both), page([one, two], [summarise(one), summarise(two)], both)
    assert (
        not [path for path in changed if path not in text or path not in html]
        and "newest" not in text
    )


@pytest.mark.parametrize("scale", [1.0, 2.0, 6.0])
@pytest.mark.parametrize("steps", [8, 16, 40])
def test_a_bound_of_speed_that_says_nothing_is_not_given(steps, scale, tmp_path):
    for seed in range(6):
        dice = np.random.default_rng(seed)
        wild = [0.3 * np.exp(1.5 * dice.standard_normal(steps)) for _ in range(2)]
        both = compare(
            run(tmp_path / f"{seed}a", wild[0], [5.0] * steps),
            run(tmp_path / f"{seed}b", scale * wild[1], [4.9] * steps),
        )
        said = " ".join(sentences(both))
        if both.time is None:
            assert "speed: it cannot be told apart" in said
        elif not both.time.differs:
            assert both.time.most < 1.8 and both.time.least > -0.7
        elif both.time.most > 4 * (1 + both.time.least):
            assert "at least" in said and f"{both.time.most:+.1%}" not in said


def test_a_bound_of_losses_that_says_nothing_is_not_given(tmp_path):
    dice = np.random.default_rng(0)
    one, two = (
        run(tmp_path / name, [0.3] * 20, (6 + 5 * dice.standard_normal(20)).tolist())
        for name in "ab"
    )
    both = compare(one, two)
    assert both.loss is None and any(
        why.startswith("loss: it cannot be told apart") for why in both.cannot_tell
    )
