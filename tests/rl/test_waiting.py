"""Answers that wait beside a checkpoint come back whole, or not at all: then they are drawn anew, with a word."""

from pathlib import Path

import numpy as np
import pytest
from answering_runs import answering

from meshtrain.rl import waiting
from meshtrain.rl.episodes import begin_episode
from meshtrain.rl.prompts import Prompts
from meshtrain.rl.rollouts import Answer
from meshtrain.run.directory import WAITING


class Group:
    def __init__(self, prompts: Prompts) -> None:
        episode = begin_episode(prompts.all[3], np.uint32(7))
        tokens = np.array([5, 6], np.int32)
        logprobs = np.array([-0.1, -0.7], np.float32)
        experts = np.arange(8, dtype=np.int32).reshape(-1, 2, 1)
        episode.add_answer(Answer(tokens, logprobs, False, experts), "é\ud800")
        self.groups = [[episode]]


def kept(directory: Path) -> tuple[Prompts, Path]:
    prompts = Prompts(answering(directory))
    waiting.write(directory, 4, {9: Group(prompts)})
    return prompts, directory / WAITING / "4.json"


def test_answers_that_waited_come_back_to_the_bit(tmp_path: Path) -> None:
    prompts, _ = kept(tmp_path)
    ((number, ((episode,),)),) = waiting.read(tmp_path, 4, prompts).items()
    right = Group(prompts).groups[0][0]
    assert (number, episode.prompt, episode.seed) == (9, right.prompt, right.seed)
    assert (episode.answer, episode.ended, episode.given) == (
        "é\ud800",
        False,
        right.given,
    )
    for name in waiting.ARRAYS:
        array = getattr(episode, name)
        np.testing.assert_array_equal(array, getattr(right, name))
        assert array.dtype == getattr(right, name).dtype


def test_a_step_without_a_file_has_none(tmp_path: Path) -> None:
    prompts, _ = kept(tmp_path)
    assert waiting.read(tmp_path, 5, prompts) == {}


@pytest.mark.parametrize(
    "content",
    [
        lambda whole: b"",
        lambda whole: whole[:-20],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b"-0.1", b"-0.2"),
        lambda whole: b"null",
        lambda whole: b"[1]",
        lambda whole: b"\xff" * 40,
        lambda whole: whole + b"x",
    ],
)
def test_a_damaged_file_is_a_sentence_and_its_answers_are_drawn_anew(
    tmp_path, content, capsys
):
    prompts, file = kept(tmp_path)
    file.write_bytes(content(file.read_bytes()))
    assert waiting.read(tmp_path, 4, prompts) == {}
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(file) in said and "drawn anew" in said


def test_what_cannot_be_written_is_a_sentence_and_the_run_goes_on(tmp_path, capsys):
    prompts = Prompts(answering(tmp_path))
    (tmp_path / WAITING).write_text("in the way")
    waiting.write(tmp_path, 4, {9: Group(prompts)})
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(tmp_path / WAITING) in said and "drawn anew" in said
