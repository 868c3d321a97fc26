"""Texts and conversations as tokens."""

import numpy as np
import pytest
from tiny_models import SPECIAL, TEMPLATE, tokenizer

pytest.importorskip("jinja2")

from meshtrain.data.template import TemplateText
from meshtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from meshtrain.errors import ConfigError
from meshtrain.generate.prompts import Conversations, of_text

ASKED = [{"role": "user", "content": "hi"}]


@pytest.fixture
def path(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def conversations(path: str, template: str = TEMPLATE) -> Conversations:
    return Conversations(TemplateText("t", template, {"bos_token": "<s>"}), load_tokenizer(path, chat=True), now=0.0)


def test_a_text_begins_as_the_tokenizers_own_post_processor_begins_one(path):
    theirs = tokenizer().encode("hi you").ids
    assert of_text(load_tokenizer(path), "hi you").tolist() == theirs and theirs[0] == SPECIAL.index("<s>")
    assert of_text(ByteTokenizer(), "hi").tolist() == [104, 105]


def test_nothing_is_what_follows_the_end_of_a_document(path):
    assert of_text(ByteTokenizer(), "").tolist() == [256]
    assert of_text(load_tokenizer(path), "").tolist() == [SPECIAL.index("<s>")]


def test_a_special_token_in_a_text_is_text_and_in_a_conversation_itself(path):
    end = SPECIAL.index("<|end|>")
    assert end not in of_text(load_tokenizer(path), "a<|end|>")
    said = conversations(path)
    expected = [SPECIAL.index(t) for t in ("<s>", "<|user|>")], [end, SPECIAL.index("<|model|>")]
    tokens = said.tokens(ASKED).tolist()
    assert (tokens[:2], tokens[-2:]) == expected and tokens.count(SPECIAL.index("<s>")) == 1
    assert said.end_of_turn() == end
    said.close()


def test_a_template_without_a_mark_behind_an_answer_has_no_end_of_turn(path):
    said = conversations(path, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert said.end_of_turn() is None
    said.close()


def test_messages_that_are_none_are_refused_and_the_next_is_taken(path):
    said = conversations(path, "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}" + TEMPLATE)
    with pytest.raises(ConfigError, match="does not take these messages \\(too many\\)"):
        said.tokens(ASKED * 3)
    for wrong in ([], "hi", [{"content": "x"}], [{"role": "user", "content": 3}]):
        with pytest.raises(ConfigError, match="does not take these messages"):
            said.tokens(wrong)
    assert len(said.tokens(ASKED))
    said.close()


def test_a_template_whose_process_has_ended_is_started_again(path):
    said = conversations(path)
    assert said._template is not None
    said._template._process.kill()
    with pytest.raises(ConfigError, match="ended the process that renders it"):
        said.tokens(ASKED)
    np.testing.assert_array_equal(said.tokens(ASKED)[:1], [SPECIAL.index("<s>")])
    said.close()
