"""The prompts of a run are taken whole, or refused in a sentence that names the file, the record and what is legal."""

import json
from pathlib import Path
from typing import Any

import pytest
from answering_runs import answering
from refusals import tells

from meshtrain.config import ConfigError
from meshtrain.rl.prompts import Prompts

Records = str | bytes | list[Any]


def written(path: Path, records: Records) -> Path:
    """Writes records eight times, as many as a step needs twice; a text or bytes as they stand."""
    if isinstance(records, list):
        records = "".join(
            json.dumps(record) + "\n" for record in records for _ in range(8)
        )
    path.write_bytes(records if isinstance(records, bytes) else records.encode())
    return path


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        ("", ("rl.prompts", "0 prompts", "4", "rl.group")),
        ('{"prompt": "a"}\n', ("rl.prompts", "1 prompt", "4")),
        ([{"question": "a"}], ("rl.prompts", "p.jsonl#0", "no prompt", '"prompt"')),
        ([{"prompt": ""}], ("rl.prompts", "p.jsonl#0", "no prompt", '"prompt"')),
        ([{"prompt": []}], ("rl.prompts", "p.jsonl#0", "no prompt", '"prompt"')),
        ([["a"]], ("rl.prompts", "p.jsonl#0", "no prompt", '"prompt"')),
        (
            [{"prompt": 3}],
            ("rl.prompts", "p.jsonl#0", "3", "a text or a list of messages"),
        ),
        (
            [{"prompt": {"a": 1}}],
            ("p.jsonl#0", "{'a': 1}", "a text or a list of messages"),
        ),
        ("hello\n", ("rl.prompts", "p.jsonl#0: not JSON", '"prompt"')),
        (b'{"prompt": "\xe9"}\n', ("rl.prompts", "p.jsonl#0: not UTF-8")),
        ('{"prompt": "\\ud800"}\n', ("rl.prompts", "p.jsonl#0: not Unicode")),
        ([{"prompt": "a" * 40}], ("p.jsonl#0", "40", "rl.answers 6", "32", "27")),
        ([{"prompt": [{"role": "user", "content": "a"}]}], ("byte", "data.template")),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(
    tmp_path: Path, records: Records, parts: tuple[str, ...]
) -> None:
    prompts = str(written(tmp_path / "p.jsonl", records))
    with pytest.raises(ConfigError) as refused:
        Prompts(answering(tmp_path, rl={"prompts": prompts}))
    assert tells(str(refused.value), *parts), refused.value


@pytest.mark.parametrize("name", ["p.csv", "p.txt"])
def test_a_file_of_another_kind_is_refused_with_the_kinds_that_there_are(
    tmp_path: Path, name: str
) -> None:
    prompts = str(written(tmp_path / name, "prompt,answer\n1,2\n"))
    with pytest.raises(ConfigError) as refused:
        Prompts(answering(tmp_path, rl={"prompts": prompts}))
    assert tells(str(refused.value), "rl.prompts", name, ".jsonl"), refused.value


def test_a_file_that_is_missing_is_refused_by_its_key(tmp_path: Path) -> None:
    config = answering(tmp_path, rl={"prompts": str(tmp_path / "promts.jsonl")})
    with pytest.raises(ConfigError) as refused:
        Prompts(config)
    assert tells(str(refused.value), "rl.prompts", "promts.jsonl"), refused.value


@pytest.mark.parametrize("reward", ["exact", "0.5 number + evenness:score"])
@pytest.mark.parametrize("answer", [{}, {"answer": None}])
def test_a_record_without_an_answer_is_refused_where_a_reward_compares_with_it(
    tmp_path: Path, reward: str, answer: dict[str, Any]
) -> None:
    prompts = str(written(tmp_path / "p.jsonl", [{"prompt": "a", **answer}]))
    with pytest.raises(ConfigError, match=r'rl\.prompts.*p\.jsonl#0.*"answer"'):
        Prompts(answering(tmp_path, rl={"prompts": prompts, "reward": reward}))


@pytest.mark.parametrize("answer", ["three", "", ["x"]])
def test_an_answer_without_a_number_is_refused_where_numbers_are_compared(
    tmp_path: Path, answer: Any
) -> None:
    prompts = str(written(tmp_path / "p.jsonl", [{"prompt": "a", "answer": answer}]))
    with pytest.raises(ConfigError, match=r"rl\.prompts.*p\.jsonl#0.*no number"):
        Prompts(answering(tmp_path, rl={"prompts": prompts, "reward": "number"}))
    Prompts(answering(tmp_path, rl={"prompts": prompts, "reward": "exact"}))


def test_a_prompt_of_tokens_that_the_model_does_not_have_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"rl\.prompts.*token 98 .*model\.vocab_size is 98"
    ):
        Prompts(answering(tmp_path, model={"vocab_size": 98}))
    Prompts(answering(tmp_path, model={"vocab_size": 99}))
