"""The section `rl` is taken whole or refused in a sentence that names the key, its value and what is legal."""

from typing import Any

import pytest
from refusals import tells

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.config.rl import reward_terms

Sections = dict[str, dict[str, Any]]


def sections_of(more: Sections) -> Sections:
    given: Sections = {
        "train": {"objective": "grpo", "global_batch_size": 16, "sequence_length": 64},
        "rl": {
            "prompts": "prompts.jsonl",
            "reward": "exact",
            "group": 4,
            "answers": 16,
        },
    }
    return {
        name: {**given.get(name, {}), **more.get(name, {})} for name in given | more
    }


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"rl": {"prompts": None}}, ("rl.prompts", "null", "JSON Lines")),
        ({"rl": {"reward": None}}, ("rl.reward", "MODULE:NAME", "rl.teacher")),
        ({"rl": {"reward": "exact + "}}, ("rl.reward", "exact + ", "MODULE:NAME")),
        (
            {"rl": {"reward": "exact + twice mine:brief"}},
            ("rl.reward", "twice", "weights"),
        ),
        ({"rl": {"group": 5}}, ("rl.group", "5", "16", "legal are 2, 4, 8, 16")),
        ({"rl": {"group": 1}}, ("rl.group", "1", "2")),
        ({"rl": {"answers": 64}}, ("rl.answers", "64", "train.sequence_length", "64")),
        ({"rl": {"clip": [0.2]}}, ("rl.clip", "two numbers")),
        ({"rl": {"beta": 0.1}}, ("rl.beta", "0.1", "lora.rank", "0")),
        (
            {"rl": {"reward": "exact, mine:brief"}},
            ("rl.reward", "exact, mine:brief", "weights"),
        ),
        ({"rl": {"reward": "nan exact"}}, ("rl.reward", "nan exact", "weights")),
        ({"rl": {"reward": "exact + inf mine:brief"}}, ("rl.reward", "inf", "weights")),
        ({"rl": {"reward": "1e400 exact"}}, ("rl.reward", "1e400", "weights")),
        ({"rl": {"reward": "1e39 exact"}}, ("rl.reward", "1e39", "weights")),
        ({"rl": {"answers": 0}}, ("rl.answers", "0", "1")),
        ({"rl": {"clip": [1.0, 0.2]}}, ("rl.clip", "1.0", "below 1")),
        ({"rl": {"lag": -1}}, ("rl.lag", "-1", "0")),
        ({"rl": {"epochs": 0}}, ("rl.epochs", "0", "1")),
        ({"rl": {"gap_limit": 0}}, ("rl.gap_limit", "0")),
        ({"rl": {"reward_seconds": 0}}, ("rl.reward_seconds", "0")),
        ({"rl": {"scale": "std"}}, ("rl.scale", "std", "group, none")),
        (
            {"rl": {"average": "mean"}},
            ("rl.average", "mean", "token, sequence, constant"),
        ),
        ({"rl": {"temprature": 1}}, ("rl.temprature", "temperature")),
        ({"train": {"objective": "rl"}}, ("train.objective", "rl", "grpo")),
        ({"rl": {"loss": "grpo"}}, ("rl.loss", "grpo", "ppo_clip")),
        ({"rl": {"temperature": 0}}, ("rl.temperature", "0")),
        ({"rl": {"lag": 1, "epochs": 2}}, ("rl.lag", "1", "rl.epochs", "2")),
        ({"rl": {"lag": 1, "loss": "reinforce"}}, ("rl.lag", "reinforce", "cispo")),
        ({"rl": {"rewards": "exact"}}, ("rl.rewards", "reward")),
        ({"train": {"z_loss": 0.1}}, ("train.z_loss", "0.1", "grpo")),
        ({"train": {"objective": "next_token"}}, ("rl", "next_token", "grpo")),
        ({"eval": {"every": 5}}, ("eval.every", "0")),
        ({"mesh": {"data": 2, "islands": 2}}, ("mesh.islands", "2")),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(
    more: Sections, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        mt.load(sections_of(more))
    assert tells(str(refused.value), *parts), refused.value


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rl": {"reward": "exact + 0.2 mine:brief"}},
        {"data": {"template": "messages.jinja"}},
        {"rl": {"beta": 0.1}, "lora": {"rank": 4}},
        {"rl": {"teacher": "runs/teacher", "reward": None}},
        {"rl": {"lag": 1, "loss": "cispo"}},
        {"rl": {"epochs": 4, "loss": "gspo", "average": "sequence"}},
    ],
)
def test_what_can_be_meant_is_taken(more: Sections) -> None:
    mt.load(sections_of(more))


def test_a_sum_of_rewards_has_a_weight_each() -> None:
    assert reward_terms("mine:score") == (("mine:score", 1.0),)
    assert reward_terms("exact + 0.2 mine:brief") == (
        ("exact", 1.0),
        ("mine:brief", 0.2),
    )
    assert reward_terms("exact - 0.2 mine:brief") == (
        ("exact", 1.0),
        ("mine:brief", -0.2),
    )
    assert reward_terms("exact - mine:brief") == (("exact", 1.0), ("mine:brief", -1.0))
    assert reward_terms(None) == ()
