"""What is learned of a conversation, to the token: as transformers' masks say, with the template's marks and without."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.data.chat import Unfit
from meshtrain.data.documents import Document
from meshtrain.data.examples import APART, SPECIAL, Examples
from meshtrain.data.manifest import Contents
from meshtrain.data.shards import ID, LEARNED, REJECTED
from meshtrain.data.template import ChatTemplate, TemplateText, find_template
from meshtrain.data.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent / "golden" / "chats"
TOKENIZER = str(GOLDEN / "tokenizer.json")
CONVERSATIONS = json.loads((GOLDEN / "conversations.json").read_text())
MARKED = find_template(None, TOKENIZER)
PLAIN = re.sub(r"{%-? (end)?generation %}", "{{- '' -}}", MARKED.text)
# Drops what an answer thought once a user has asked again; and says how it begins.
FORGETTING = """{%- for m in messages %}{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list -%}
<|turn|>{{ m.role }}: {{ m.content.split('/')[-1] if later else m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"""

Make = Callable[..., Examples]


@pytest.fixture(scope="module")
def make() -> Make:
    """Examples of a template, shared by all tests that ask for the same one."""
    made: dict[tuple[str, str, str], Examples] = {}

    def examples(text: str, tokenizer: str = TOKENIZER, contents: Contents = "chat") -> Examples:
        if (text, tokenizer, contents) not in made:
            template = ChatTemplate(TemplateText("mine.jinja", text, MARKED.special))
            made[text, tokenizer, contents] = Examples(contents, template, load_tokenizer(tokenizer, chat=True))
        return made[text, tokenizer, contents]

    return examples


def tokens_of(examples: Examples, messages: Any, counts: Counter[str] | None = None) -> list[np.ndarray]:
    found = examples.of(Document("x", "", record={"messages": messages}), Counter() if counts is None else counts)
    return examples.encode(found, Counter())


def learned(examples: Examples, tokens: np.ndarray) -> list[str]:
    """The stretches of it that are learned, as text."""
    runs = np.flatnonzero(np.diff(np.pad((tokens & LEARNED) > 0, 1))).reshape(-1, 2).tolist()
    return [examples.tokenizer.spell(tokens[begin:end] & ID) for begin, end in runs]


@pytest.mark.parametrize("text", [MARKED.text, PLAIN], ids=["marked", "prefix differences"])
@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_ids_and_masks_are_those_of_transformers(number, text, make):
    golden = CONVERSATIONS[number]
    (tokens,) = tokens_of(make(text), golden["messages"])
    assert (tokens & ID).tolist() == golden["ids"]
    assert ((tokens & LEARNED) > 0).astype(int).tolist() == golden["learned"]


def test_special_tokens_in_what_is_said_are_counted(make):
    counts: Counter[str] = Counter()
    for golden in CONVERSATIONS:
        tokens_of(make(PLAIN), golden["messages"], counts)
    assert counts[SPECIAL] == 1


@pytest.mark.parametrize("text", [MARKED.text, PLAIN], ids=["marked", "prefix differences"])
def test_an_answer_of_no_weight_is_not_learned(text, make):
    messages = [dict(each) for each in CONVERSATIONS[1]["messages"]]
    messages[2]["weight"] = 0
    examples = make(text)
    (tokens,) = tokens_of(examples, messages)
    assert learned(examples, tokens) == ["漢字 😀<|end|>"]


def test_a_template_that_forgets_thoughts_makes_an_example_of_each_answer(make):
    examples, counts = make(FORGETTING), Counter[str]()
    said = [("user", "2?"), ("assistant", "hm/4"), ("user", "3?"), ("assistant", "oh/6")]
    found = tokens_of(examples, [{"role": role, "content": content} for role, content in said], counts)
    assert [learned(examples, tokens) for tokens in found] == [["hm/4<|end|>"], ["oh/6<|end|>"]]
    assert examples.tokenizer.spell(found[1] & ID).count("hm/") == 0 and counts[APART] == 1


def test_what_is_learned_ends_with_the_mark_of_the_end_where_there_is_one(make):
    """Without one the white space behind an answer is all that ends it."""
    bare = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    for text, end in ((bare, "4\n"), (bare.replace("m.content", "m.content ~ '<end>'"), "4<end>")):
        examples = make(text, tokenizer="byte")
        (tokens,) = tokens_of(examples, messages)
        assert learned(examples, tokens) == [end]


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        (PLAIN.replace("<|turn|>assistant\\n", "<|turn|>assistant\\n<think>"), "not to be told apart", "answer 1 does not begin"),
        (MARKED.text.replace("generation %}{{", "generation %}{{ '' and"), "without an answer", "that the template marks"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_found_are_refused(text, kind, detail, make):
    with pytest.raises(Unfit) as caught:
        tokens_of(make(text), CONVERSATIONS[0]["messages"])
    assert caught.value.kind == kind and detail in caught.value.detail


def test_of_a_pair_both_answers_are_marked_and_nothing_of_what_they_share(make):
    examples = make(PLAIN, contents="pairs")
    shared = CONVERSATIONS[1]["messages"][:4]
    record = {"prompt": shared, "chosen": "the mesh", "rejected": "of a token"}
    (tokens,) = examples.encode(examples.of(Document("x", "", record=record), Counter()), Counter())
    second = (tokens & REJECTED) > 0
    assert second[np.argmax(second) :].all()
    assert learned(examples, tokens[~second]) == ["the mesh<|end|>"]
    assert learned(examples, tokens[second]) == ["of a token<|end|>"]
    assert ((tokens & ID)[~second][:30] == (tokens & ID)[second][:30]).all()
