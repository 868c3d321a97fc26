"""What is learned of a conversation, to the token: as transformers' masks say, with the template's marks and
without.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.data.documents import Document
from meshtrain.data.examples import PASSED_OVER, THOUGHTS, UNREAD, UNWRITTEN, Examples
from meshtrain.data.manifest import APART, ID, LEARNED, REJECTED, SPECIAL, Contents
from meshtrain.data.messages import Unfit
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

    def examples(
        text: str, tokenizer: str = TOKENIZER, contents: Contents = "chat"
    ) -> Examples:
        if (text, tokenizer, contents) not in made:
            template = ChatTemplate(TemplateText("mine.jinja", text, MARKED.special))
            made[text, tokenizer, contents] = Examples(
                contents, template, load_tokenizer(tokenizer, chat=True)
            )
        return made[text, tokenizer, contents]

    return examples


def tokens_of(
    examples: Examples, messages: Any, counts: Counter[str] | None = None
) -> list[np.ndarray]:
    found = examples.read(
        Document("x", "", record={"messages": messages}),
        Counter() if counts is None else counts,
    )
    return examples.encode(found, Counter())


def learned(examples: Examples, tokens: np.ndarray) -> list[str]:
    """The stretches of it that are learned, as text."""
    runs = (
        np.flatnonzero(np.diff(np.pad((tokens & LEARNED) > 0, 1)))
        .reshape(-1, 2)
        .tolist()
    )
    return [examples.tokenizer.spell(tokens[begin:end] & ID) for begin, end in runs]


@pytest.mark.parametrize(
    "text", [MARKED.text, PLAIN], ids=["marked", "prefix differences"]
)
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


@pytest.mark.parametrize(
    "text", [MARKED.text, PLAIN], ids=["marked", "prefix differences"]
)
def test_an_answer_of_no_weight_is_not_learned(text, make):
    messages = [dict(each) for each in CONVERSATIONS[1]["messages"]]
    messages[2]["weight"] = 0
    examples = make(text)
    (tokens,) = tokens_of(examples, messages)
    assert learned(examples, tokens) == ["漢字 😀<|end|>"]


def test_a_template_that_forgets_thoughts_makes_an_example_of_each_answer(make):
    examples, counts = make(FORGETTING), Counter[str]()
    said = [
        ("user", "2?"),
        ("assistant", "hm/4"),
        ("user", "3?"),
        ("assistant", "oh/6"),
    ]
    found = tokens_of(
        examples, [{"role": role, "content": content} for role, content in said], counts
    )
    assert [learned(examples, tokens) for tokens in found] == [
        ["hm/4<|end|>"],
        ["oh/6<|end|>"],
    ]
    assert (
        examples.tokenizer.spell(found[1] & ID).count("hm/") == 0 and counts[APART] == 1
    )


def test_what_is_learned_ends_with_the_mark_of_the_end_where_there_is_one(make):
    """Without one the white space behind an answer is all that ends it."""
    bare = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}{% if add_generation_prompt "
        "%}assistant: {% endif %}"
    )
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "4"},
    ]
    for text, end in (
        (bare, "4\n"),
        (bare.replace("m.content", "m.content ~ '<end>'"), "4<end>"),
    ):
        examples = make(text, tokenizer="byte")
        (tokens,) = tokens_of(examples, messages)
        assert learned(examples, tokens) == [end]


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        (
            PLAIN.replace("<|turn|>assistant\\n", "<|turn|>bot\\n"),
            "not to be told apart",
            "answer 1 does not begin",
        ),
        (
            PLAIN.replace("<|turn|>assistant\\n", "<|other|>assistant\\n"),
            "not to be told apart",
            "answer 1 does not begin",
        ),
        (
            PLAIN.replace(
                "message.content",
                "('' if message.role == 'assistant' else message.content)",
            ),
            "with an empty answer",
            "what the template makes of it",
        ),
        (
            MARKED.text.replace(
                "message.content",
                "('' if message.role == 'assistant' else message.content)",
            ),
            "with an empty answer",
            "what the template makes of it",
        ),
        (
            MARKED.text.replace("generation %}{{", "generation %}{{ '' and"),
            "without an answer",
            "that the template marks",
        ),
    ],
)
def test_answers_that_cannot_be_found_are_refused(text, kind, detail, make):
    with pytest.raises(Unfit) as caught:
        tokens_of(make(text), CONVERSATIONS[0]["messages"])
    assert caught.value.kind == kind and detail in caught.value.detail


def test_of_a_pair_both_answers_are_marked_and_nothing_of_what_they_share(make):
    examples = make(PLAIN, contents="pairs")
    shared = CONVERSATIONS[1]["messages"][:4]
    record = {"prompt": shared, "chosen": "the mesh", "rejected": "of a token"}
    (tokens,) = examples.encode(
        examples.read(Document("x", "", record=record), Counter()), Counter()
    )
    second = (tokens & REJECTED) > 0
    assert second[np.argmax(second) :].all()
    assert learned(examples, tokens[~second]) == ["the mesh<|end|>"]
    assert learned(examples, tokens[second]) == ["of a token<|end|>"]
    assert ((tokens & ID)[~second][:30] == (tokens & ID)[second][:30]).all()


# --- what a template sees


BYTES = "byte"
END = "{% if add_generation_prompt %}<A>{% endif %}"
NULLS = (
    """{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<A>CALL {{ m.tool_calls[0].function.name }}<E>\
{% elif m.role == 'assistant' %}<A>{{ m.content }}<E>{% else %}<U>{{ m.content }}{% endif %}{% endfor %}"""
    + END
)
STRINGS = (
    """{% for m in messages %}{% if m.tool_calls %}<A>{{ m.content }}{% for c in m.tool_calls %}[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}<E>\
{% elif m.role == 'assistant' %}<A>{{ m.content }}<E>{% else %}<U>{{ m.content }}{% endif %}{% endfor %}"""
    + END
)
OBJECTS = STRINGS.replace(
    "c.function.name + ' ' + c.function.arguments",
    "c.function.name ~ ' ' ~ c.function.arguments | tojson",
)
LOOSE = STRINGS.replace(
    "c.function.name + ' ' + c.function.arguments",
    "c.function.name ~ ' ' ~ c.function.arguments",
)
WHOLE = STRINGS.replace(
    "c.function.name + ' ' + c.function.arguments", "c.function | tojson"
)
FLAT = STRINGS.replace(
    "c.function.name + ' ' + c.function.arguments",
    "c.name ~ ' ' ~ c.arguments | tojson",
)
ITEMS = STRINGS.replace(
    "c.function.name + ' ' + c.function.arguments",
    "c.function.name ~ '(' ~ c.function.arguments['city'] ~ ')'",
)
EITHER = (
    """{% for m in messages %}{% if m.role == 'assistant' %}<A>{% for c in m.tool_calls or [] %}[{{ c.function.name + ' ' + c.function.arguments }}]<E>{% endfor %}\
{% if m.content is not none %}{{ m.content }}<E>{% endif %}{% else %}<U>{{ m.content }}{% endif %}{% endfor %}"""
    + END
)
RAIN, DRY, NO = (
    {"role": "user", "content": "Rain?"},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "No"},
)


def calling(
    arguments: Any, content: Any = None, wrapped: bool = True
) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "function": function} if wrapped else function
    return [
        RAIN,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        DRY,
        NO,
    ]


def shown(
    examples: Examples, messages: Any, counts: Counter[str] | None = None, **fields: Any
) -> str:
    """The only example of a record, what is learned between brackets of its own."""
    record = {"messages": messages, **fields}
    ((found,),) = examples.read(
        Document("x", "", record=record), Counter() if counts is None else counts
    )
    text, moved = found.text, 0
    for begin, end in found.learned:
        text = f"{text[: begin + moved]}«{text[begin + moved : end + moved]}»{text[end + moved :]}"
        moved += 2
    return text


CALLS = [
    (NULLS, "<U>Rain?<A>«CALL weather<E>»<U>dry<A>«No<E>»"),
    (STRINGS, '<U>Rain?<A>«[weather {"city": "Ulm"}]<E>»<U>dry<A>«No<E>»'),
    (OBJECTS, '<U>Rain?<A>«[weather {"city": "Ulm"}]<E>»<U>dry<A>«No<E>»'),
    (LOOSE, '<U>Rain?<A>«[weather {"city": "Ulm"}]<E>»<U>dry<A>«No<E>»'),
    (
        WHOLE,
        '<U>Rain?<A>«[{"name": "weather", "arguments": {"city": "Ulm"}}]<E>»<U>dry<A>«No<E>»',
    ),
    (FLAT, '<U>Rain?<A>«[weather {"city": "Ulm"}]<E>»<U>dry<A>«No<E>»'),
    (ITEMS, "<U>Rain?<A>«[weather(Ulm)]<E>»<U>dry<A>«No<E>»"),
    (EITHER, '<U>Rain?<A>«[weather {"city": "Ulm"}]<E>»<U>dry<A>«No<E>»'),
]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("content", [None, ""], ids=["null", "nothing"])
@pytest.mark.parametrize(
    "arguments", ['{"city": "Ulm"}', {"city": "Ulm"}], ids=["text", "object"]
)
@pytest.mark.parametrize(("text", "expected"), CALLS)
def test_calls_are_written_from_either_form_as_the_template_wants_them(
    text, expected, arguments, content, wrapped, make
):
    assert shown(make(text, BYTES), calling(arguments, content, wrapped)) == expected


def test_a_call_that_does_not_say_its_type_has_one_where_the_template_asks(make):
    typed = STRINGS.replace("c.function.name", "c['type'] + ' ' + c.function.name")
    messages = calling("{}")
    del messages[1]["tool_calls"][0]["type"]
    assert "[function weather {}]" in shown(make(typed, BYTES), messages)
    assert (
        shown(
            make(
                STRINGS.replace(
                    "c.function.name + ' ' + c.function.arguments", "c | tojson"
                ),
                BYTES,
            ),
            messages,
        ).count("type")
        == 0
    )


def test_arguments_that_are_no_json_stay_as_they_are(make):
    assert "[weather Ulm]" in shown(make(STRINGS, BYTES), calling("Ulm"))
    assert "[weather {}]" in shown(make(STRINGS, BYTES), calling("{}"))


@pytest.mark.parametrize(
    "arguments",
    ['{"who": "Zoë \\"Z\\" 😀"}', {"who": 'Zoë "Z" 😀'}],
    ids=["text", "object"],
)
@pytest.mark.parametrize("text", [STRINGS, OBJECTS, LOOSE])
def test_arguments_with_quotes_and_emoji_are_json_once(text, arguments, make):
    assert '[weather {"who": "Zoë \\"Z\\" 😀"}]' in shown(
        make(text, BYTES), calling(arguments)
    )


def test_what_a_tool_answers_may_be_an_object(make):
    messages = [*calling("{}")[:2], {"role": "tool", "content": {"wet": False}}, NO]
    assert '<U>{"wet": false}<A>' in shown(make(STRINGS, BYTES), messages)
    assert '<U>{"wet": false}<A>' in shown(
        make(
            STRINGS.replace(
                "<U>{{ m.content }}",
                "<U>{{ m.content if m.role == 'user' else m.content | tojson }}",
            ),
            BYTES,
        ),
        messages,
    )


def test_parts_are_written_whether_the_template_takes_parts_or_texts(make):
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Rain"},
                {"type": "text", "text": "?"},
            ],
        },
        NO,
    ]
    parts = STRINGS.replace(
        "<U>{{ m.content }}", "<U>{% for p in m.content %}{{ p.text }}{% endfor %}"
    )
    assert {shown(make(text, BYTES), messages) for text in (STRINGS, parts)} == {
        "<U>Rain?<A>«No<E>»"
    }
    assert shown(
        make(parts, BYTES), [{"role": "user", "content": "Rain?"}, NO]
    ).endswith("«No<E>»")


def test_a_template_that_drops_a_call_teaches_nothing(make):
    deaf = (
        "{% for m in messages %}{{ '<A>' if m.role == 'assistant' else '<U>' }}{{ m.content }}<E>{% endfor %}"
        + END
    )
    for content in (None, "", "Let me see."):
        with pytest.raises(Unfit) as caught:
            shown(make(deaf, BYTES), calling("{}", content))
        assert (
            caught.value.kind == "not written by the template"
            and "weather" in caught.value.detail
        )


def test_a_tool_of_either_form_is_named_by_the_template(make):
    function = {"name": "weather", "parameters": {}}
    for words in ("t.function.name", "t.name"):
        text = "{% for t in tools or [] %}T {{ " + words + " }};{% endfor %}" + STRINGS
        for tool in (function, {"type": "function", "function": function}):
            assert shown(make(text, BYTES), [RAIN, NO], tools=[tool]).startswith(
                "T weather;<U>"
            )


@pytest.mark.parametrize(
    ("role", "written"),
    [("developer", "system"), ("ipython", "tool"), ("critic", "critic")],
)
def test_a_role_has_the_name_that_the_template_knows(role, written, make):
    text = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt "
        "%}<assistant>{% endif %}"
    )
    messages = [{"role": role, "content": "x"}, RAIN, NO]
    assert (
        shown(make(text, BYTES), messages) == f"<{written}>x<user>Rain?<assistant>«No»"
    )
    knowing = text.replace(
        "<{{ m.role }}>",
        "<{{ m.role ~ ('!' if m.role == 'developer' or m.role == 'ipython') }}>",
    )
    assert shown(make(knowing, BYTES), messages).startswith(
        f"<{role}{'!' if role != 'critic' else ''}>x"
    )


# --- thoughts


THINKING = """{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}<E>{% else %}<U>{{ m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<A><think>
{% endif %}"""


@pytest.mark.parametrize(
    "said", ["4", "<b>4</b>", "<|4", "😀", "thinking", "< 4", "[4]"]
)
def test_an_answer_is_learned_from_where_a_thought_would_begin(said, make):
    counts: Counter[str] = Counter()
    assert (
        shown(make(THINKING, BYTES), [RAIN, {**NO, "content": said}], counts)
        == f"<U>Rain?<A>«{said}<E>»"
    )
    assert counts[THOUGHTS] == 1


@pytest.mark.parametrize(
    "prompt",
    ["<A><think>\n", "<A><think>\n\n</think>\n\n", "<A>[THINK]", "<A>◁think▷", "<A>\n"],
)
def test_thoughts_are_opened_by_any_mark(prompt, make):
    text = THINKING.replace("<A><think>\n", prompt)
    assert (
        shown(make(text, BYTES), [RAIN, NO, RAIN, NO])
        == "<U>Rain?<A>«No<E>»<U>Rain?<A>«No<E>»"
    )


def test_thoughts_that_a_template_takes_out_are_counted_and_never_an_empty_answer(make):
    counts: Counter[str] = Counter()
    plain = THINKING.replace("<think>\n", "")
    assert shown(
        make(plain, BYTES), [RAIN, {**NO, "content": "<think>hm</think>No"}], counts
    ).endswith("<A>«No<E>»")
    assert counts[THOUGHTS] == 1
    with pytest.raises(Unfit, match="with an empty answer"):
        shown(make(plain, BYTES), [RAIN, {**NO, "content": "<think>hm</think>"}])


# --- what a template does not read


def test_what_the_template_never_reads_is_counted_by_name(make):
    counts: Counter[str] = Counter()
    tools = [{"type": "function", "function": {"name": "weather"}}]
    messages = [{**RAIN, "name": "me"}, {**NO, "reasoning_content": "hm"}]
    shown(
        make(STRINGS, BYTES),
        messages,
        counts,
        tools=tools,
        documents=[{"text": "x"}],
        chat_template_kwargs={"a": 1},
    )
    unread = ("tools", "documents", "chat_template_kwargs", "name", "reasoning_content")
    assert {field for field, count in UNREAD.items() if counts[count] == 1} == set(
        unread
    )
    reading = (
        "{{ tools }}{{ documents }}{{ a }}{{ messages[0].name }}{{ '!' if messages | selectattr('reasoning_content', "
        "'equalto', 'x') | list }}" + STRINGS
    )
    counts.clear()
    text = shown(
        make(reading, BYTES),
        messages,
        counts,
        tools=tools,
        documents=[{"text": "x"}],
        chat_template_kwargs={"a": 1},
    )
    assert (
        not any(counts[count] for count in UNREAD.values())
        and text.startswith("[{'type'")
        and "1me<U>" in text
    )


def test_what_a_message_says_and_the_template_does_not_write_is_counted(make):
    deaf = (
        "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% "
        "if add_generation_prompt %}<a>{% endif %}"
    )
    counts: Counter[str] = Counter()
    assert (
        shown(
            make(deaf, BYTES),
            [{"role": "system", "content": "Be brief."}, RAIN, NO],
            counts,
        )
        == "<u>Rain?<a>«No»"
    )
    assert counts[UNWRITTEN] == 1


def test_messages_marked_as_learned_that_are_no_answers_are_counted(make):
    counts: Counter[str] = Counter()
    shown(make(STRINGS, BYTES), [{**RAIN, "train": True}, NO], counts)
    assert counts[PASSED_OVER] == 1


def test_of_a_record_that_is_refused_nothing_is_counted(make):
    counts: Counter[str] = Counter()
    with pytest.raises(Unfit):
        shown(
            make(NULLS, BYTES),
            [
                {**RAIN, "name": "me", "train": True},
                {
                    "role": "assistant",
                    "content": "<think>x</think>",
                    "tool_calls": [{"name": "f", "arguments": "{}"}],
                },
            ],
            counts,
        )
    assert not +counts
