"""An episode holds what the model drew and what it was given, turn by turn, and ends for a reason."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_tokenizers import written

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.rl.episodes import Episode, play
from meshtrain.rl.prompts import Prompts
from meshtrain.rl.rewards import Rewards
from meshtrain.rl.rollouts import Answer

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENVIRONMENT = """
import time

class Guess:
    def __init__(self, record):
        self.wanted = record["answer"]

    def step(self, messages):
        answer = messages[-1]["content"].strip()
        if answer == self.wanted:
            return None
        if answer == "raise":
            raise RuntimeError("no")
        if answer == "nonsense":
            return [{"content": "without a role"}]
        if answer == "refused":
            return [{"role": 3, "content": "x"}]
        return [{"role": "user", "content": "more" if answer < self.wanted else "less"}]
"""


@pytest.fixture
def config(tmp_path: Path) -> mt.Config:
    tokenizer = written(
        tmp_path / "tokenizer", SPECIAL, tokenizer_config={"chat_template": TEMPLATE}
    )
    prompts = tmp_path / "prompts.jsonl"
    record = {"prompt": [{"role": "user", "content": "a number"}], "answer": "50"}
    prompts.write_text(json.dumps(record))
    environment = tmp_path / "guessing.py"
    environment.write_text(ENVIRONMENT)
    return mt.load(
        {
            "run": {"imports": [str(environment)]},
            "model": {"vocab_size": 302},
            "data": {"tokenizer": str(tokenizer), "template": None},
            "train": {
                "objective": "grpo",
                "global_batch_size": 2,
                "sequence_length": 160,
            },
            "rl": {
                "prompts": str(prompts),
                "reward": "number",
                "group": 2,
                "answers": 20,
                "environment": "guessing:Guess",
            },
        }
    )


class Told:
    """Rollouts that draw what they are told."""

    def __init__(self, prompts: Prompts, *turns: Sequence[str]) -> None:
        self._prompts = prompts
        self._turns = list(turns)
        self.read: list[str] = []
        self.rewards: Any = None

    def draw(
        self, prompts: Sequence[np.ndarray], seeds: np.ndarray
    ) -> list[list[Answer]]:
        self.read += [
            self._prompts._marked.decode(np.array(tokens)) for tokens in prompts
        ]
        group = seeds.shape[1]
        rooms = [
            self._prompts.length - len(tokens)
            for tokens in prompts
            for _ in range(group)
        ]
        answers = [
            self._answer(*of) for of in zip(self._turns.pop(0), rooms, strict=True)
        ]
        return [
            answers[first : first + group] for first in range(0, len(answers), group)
        ]

    def _answer(self, text: str, room: int) -> Answer:
        whole = self._prompts._marked.encode([text])[0].astype(np.int32)
        tokens = whole[:room]
        ended = text.endswith("<|im_end|>") and len(tokens) == len(whole)
        return Answer(tokens, -np.arange(1.0, len(tokens) + 1, dtype=np.float32), ended)


def played(
    config: mt.Config, *turns: Sequence[str]
) -> tuple[list[Episode], dict[str, int], Told]:
    prompts = Prompts(config)
    rollouts = Told(prompts, *turns)
    seeds = np.array([[3, 4]], np.uint32)
    with Rewards([("number", 1.0)], 10, config.rl.environment) as rewards:
        rollouts.rewards = rewards
        groups, failed = play(rollouts, prompts, rewards, prompts.all, seeds)  # type: ignore[arg-type]
    return groups[0], dict(failed), rollouts


def text_of(config: mt.Config, tokens: np.ndarray) -> str:
    marked = Prompts(config)._marked
    spell: Any = getattr(marked, "spell", marked.decode)
    return spell(np.array(tokens, np.int64))


def test_turns_follow_one_another_as_the_template_writes_them(
    config: mt.Config,
) -> None:
    (first, second), failed, _ = played(
        config, ["50<|im_end|>", " 7 <|im_end|>"], ["90<|im_end|>"], ["50<|im_end|>"]
    )
    assert failed == {}
    assert first.answer == second.answer == "50"
    assert text_of(config, second.tokens) == (
        "<|im_start|>user\na number<|im_end|>\n<|im_start|>assistant\n 7 <|im_end|>\n"
        "<|im_start|>user\nless<|im_end|>\n<|im_start|>assistant\n90<|im_end|>\n"
        "<|im_start|>user\nless<|im_end|>\n<|im_start|>assistant\n50<|im_end|>"
    )
    drawn = second.tokens[second.drawn]
    assert text_of(config, drawn) == " 7 <|im_end|>90<|im_end|>50<|im_end|>"
    assert (second.logprobs[second.drawn] < 0).all()
    assert (second.logprobs[~second.drawn] == 0).all()
    assert [m["role"] for m in second.messages] == 3 * ["user", "assistant"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("raise", "raised"), ("nonsense", "not_messages"), ("refused", "not_messages")],
)
def test_an_environment_that_fails_ends_the_episode_and_is_counted(
    config: mt.Config, answer: str, kind: str
) -> None:
    (_, second), failed, rollouts = played(
        config, ["50<|im_end|>", f"{answer}<|im_end|>"]
    )
    rewards = rollouts.rewards
    assert failed == {kind: 1}
    assert second.answer == answer
    ((failure, sentence),) = rewards.first.items()
    assert failure == f"turn {kind}" and "guessing:Guess" in sentence


def test_an_answer_that_ends_by_length_ends_the_episode(config: mt.Config) -> None:
    episodes, failed, _ = played(config, ["7", "8"])
    assert failed == {}
    assert [episode.ended for episode in episodes] == [False, False]


def test_no_turn_begins_without_room_for_an_answer(config: mt.Config) -> None:
    answer = "1" * 19 + "<|im_end|>"
    (_, second), _, rollouts = played(
        config, ["50<|im_end|>", answer], [answer], [answer], [answer]
    )
    assert len(second.tokens) <= config.train.sequence_length
    assert len(rollouts.read) > 2
    assert all(len(text) < config.train.sequence_length for text in rollouts.read)


def test_a_prompt_that_is_a_text_is_refused_with_an_environment(
    config: mt.Config,
) -> None:
    Path(str(config.rl.prompts)).write_text('{"prompt": "a", "answer": "b"}')
    with pytest.raises(
        ConfigError, match=r"rl.prompts.*text.*rl.environment.*messages"
    ):
        Prompts(config)


def test_a_record_without_an_answer_is_refused_where_a_reward_compares_with_it(
    config: mt.Config,
) -> None:
    Path(str(config.rl.prompts)).write_text(
        '{"prompt": [{"role": "user", "content": "a"}]}'
    )
    with pytest.raises(ConfigError, match=r'rl.prompts.*"answer".*number'):
        Prompts(config)
