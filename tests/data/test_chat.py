"""Records of conversations: each shape that is understood, the public shapes that are refused by name, and what is said
twice.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from meshtrain.data.chat import CHATS, FOREIGN, conversation, pair
from meshtrain.data.messages import Unfit, text_of

ASKED = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
LAST = [{"role": "user", "content": "And\n3+3?"}, {"role": "assistant", "content": "6"}]
BRIEF = {"role": "system", "content": "Be brief."}
SHAREGPT = [
    {"from": "human", "value": "2+2?"},
    {"from": "gpt", "value": "4"},
    {"from": "human", "value": "And\n3+3?"},
    {"from": "gpt", "value": "6"},
]
CALLED = {"name": "add", "arguments": {"a": 2}}
CALL = {"type": "function", "function": CALLED}
TEXT_CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}

# (shape, record) of what all says the same: BRIEF, ASKED, LAST.
BOTH: dict[str, dict[str, Any]] = {
    "messages": {"messages": [BRIEF, *ASKED, *LAST]},
    "messages, one role in another's word": {
        "messages": [
            BRIEF,
            {"role": "human", "content": "2+2?"},
            {"role": "model", "content": "4"},
            *LAST,
        ]
    },
    "conversations": {
        "conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]
    },
    "conversation": {"conversation": [BRIEF, *ASKED, *LAST]},
    "dialogue": {"dialogue": [BRIEF, *ASKED, *LAST]},
    "system beside": {"system": "Be brief.", "conversations": SHAREGPT},
    "system_prompt beside": {"system_prompt": "Be brief.", "messages": [*ASKED, *LAST]},
    "system twice": {"system": "Be brief.", "messages": [BRIEF, *ASKED, *LAST]},
    "both lists": {
        "messages": [BRIEF, *ASKED, *LAST],
        "conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT],
    },
    "prompt twice": {"prompt": "2+2?", "messages": [BRIEF, *ASKED, *LAST]},
    "Alpaca with history": {
        "system": "Be brief.",
        "instruction": "And",
        "input": "3+3?",
        "output": "6",
        "history": [["2+2?", "4"]],
    },
    "Capybara": {
        "system": "Be brief.",
        "conversation": [
            {"input": "2+2?", "output": "4"},
            {"input": "And\n3+3?", "output": "6"},
        ],
    },
    "UltraChat": {"system": "Be brief.", "data": ["2+2?", "4", "And\n3+3?", "6"]},
}


@pytest.mark.parametrize("shape", BOTH)
def test_shapes_of_a_dialogue_are_one_conversation(shape):
    found = conversation(BOTH[shape])
    assert list(found.messages) == [BRIEF, *ASKED, *LAST] and found.learned == (2, 4)


ONE: dict[str, dict[str, Any]] = {
    "messages": {"messages": ASKED},
    "Alpaca": {"instruction": "2+2?", "input": "", "output": "4"},
    "Alpaca with its text": {"instruction": "2+2?", "input": "", "output": "4", "text": "Below is an instruction. 2+2? 4"},
    "Dolly": {"instruction": "2+2?", "context": "", "response": "4", "category": "open_qa"},
    "Magpie": {"conversations": SHAREGPT[:2], "instruction": "2+2?", "response": "4"},
    "no_robots": {"prompt": "2+2?", "prompt_id": "1", "messages": ASKED, "category": "Chat"},
    "WildChat": {"conversation": [{**turn, "language": "English", "toxic": False} for turn in ASKED], "model": "x"},
    "TRL": {"prompt": "2+2?", "completion": "4"},
    "TRL, of messages": {"prompt": ASKED[:1], "completion": ASKED[1:]},
    "TRL, of one message": {"prompt": ASKED[:1], "completion": ASKED[1]},
    "HelpSteer": {"prompt": "2+2?", "response": "4", "helpfulness": 4},
    "OpenOrca": {"id": "1", "system_prompt": "", "question": "2+2?", "response": "4"},
    "GSM8K": {"question": "2+2?", "answer": "4"},
    "MetaMath": {"query": "2+2?", "response": "4", "original_question": "?"},
    "a prompt that is a dialogue": {"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "completion": " 4"},
}  # fmt: skip


@pytest.mark.parametrize("shape", ONE)
def test_shapes_of_a_question_are_one_conversation(shape):
    found = conversation(ONE[shape])
    assert [(m["role"], text_of(m["content"]).strip()) for m in found.messages] == [
        ("user", "2+2?"),
        ("assistant", "4"),
    ]
    assert found.learned == (1,)


def test_each_row_of_the_table_of_shapes_is_tried():
    tried = [
        record for records in (BOTH, ONE, {"xLAM": XLAM}) for record in records.values()
    ]
    assert all(any(shape.fits(record) for record in tried) for shape in CHATS)


def test_of_a_prompt_and_its_completion_only_the_completion_is_learned():
    found = conversation({"prompt": [*ASKED, LAST[0]], "completion": "6"})
    assert list(found.messages) == [*ASKED, *LAST] and found.learned == (3,)
    whole = conversation({"prompt": [*ASKED, LAST[0]], "completion": [*ASKED, *LAST]})
    assert [m["content"] for m in whole.messages] == ["2+2?", "4", "And\n3+3?", "6"]
    assert conversation(
        {"system": "Be brief.", "prompt": "2+2?", "completion": "4"}
    ).learned == (2,)


def test_the_shapes_on_the_page_are_read():
    page = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()
    records = [json.loads(line) for line in page.splitlines() if line.startswith("{")]
    pairs = [record for record in records if "chosen" in record]
    assert len(pairs) == 7 and all(len(pair(record)) == 2 for record in pairs)
    chats = [conversation(record) for record in records if record not in pairs]
    assert len(chats) == 10 and all(talk.learned for talk in chats)


# --- what is called


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
XLAM = {
    "query": "2+2?",
    "tools": json.dumps(TOOLS),
    "answers": json.dumps([CALLED, CALLED]),
}


@pytest.mark.parametrize(
    ("turns", "calls"),
    [
        ([{"role": "assistant", "content": None, "tool_calls": [CALL]}], [CALL]),
        (
            [{"role": "assistant", "content": None, "tool_calls": [TEXT_CALL]}],
            [TEXT_CALL],
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [CALLED, CALLED]}],
            [CALLED, CALLED],
        ),
        ([{"role": "assistant", "tool_calls": json.dumps([CALL])}], [CALL]),
        ([{"role": "assistant", "content": None, "function_call": CALLED}], [CALL]),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": TEXT_CALL["function"],
                }
            ],
            [TEXT_CALL],
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": CALLED,
                    "tool_calls": [CALL],
                }
            ],
            [CALL],
        ),
        ([{"from": "function_call", "value": json.dumps(CALLED)}], [CALL]),
        ([{"from": "function_call", "value": CALLED}], [CALL]),
        (
            [{"from": "function_call", "value": json.dumps([CALLED, CALLED])}],
            [CALL, CALL],
        ),
        ([{"from": "function_call", "value": json.dumps(CALLED)}] * 2, [CALL, CALL]),
        ([{"role": "tool_call", "content": json.dumps(CALLED)}], [CALL]),
    ],
)
def test_calls_are_read_as_they_stand_in_each_spelling(turns, calls):
    answered = [{"role": "tool", "content": "4"}, ASKED[1]]
    found = conversation({"conversations": [ASKED[0], *turns, *answered]})
    assert [m["role"] for m in found.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found.messages[1]["tool_calls"] == calls and not found.messages[1]["content"]
    assert "function_call" not in found.messages[1] and found.learned == (1, 3)


def test_a_question_with_calls_in_place_of_an_answer_is_one_message_that_calls():
    found = conversation(XLAM)
    assert (
        found.messages[1]
        == {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
        and found.tools == TOOLS
    )


@pytest.mark.parametrize(
    "role", ["tool", "function", "observation", "tool_response", "function_response"]
)
def test_what_a_tool_says_is_a_tool_s_in_each_word_and_keeps_its_fields(role):
    answer = {"role": role, "content": {"sum": [4]}, "name": "add", "tool_call_id": "1"}
    found = conversation({"messages": [*ASKED, answer, ASKED[1]]})
    assert found.messages[2] == {**answer, "role": "tool"}


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]])
def test_tools_are_a_list_or_json(tools):
    assert conversation({"messages": ASKED, "tools": tools}).tools == TOOLS
    assert (
        pair({"prompt": "x", "chosen": "y", "rejected": "z", "tools": tools})[0].tools
        == TOOLS
    )


@pytest.mark.parametrize("tools", [None, [], "", "[]", " "])
def test_no_tools_are_none(tools):
    assert conversation({"messages": ASKED, "tools": tools}).tools is None


def test_functions_of_the_legacy_spelling_are_tools():
    functions = [TOOLS[0]["function"]]
    assert conversation({"messages": ASKED, "functions": functions}).tools == TOOLS
    assert (
        conversation({"messages": ASKED, "functions": functions, "tools": TOOLS}).tools
        == TOOLS
    )


def test_tools_that_the_system_s_text_has_already_are_read_once():
    system = {
        "from": "system",
        "value": f"You may call <tools>{json.dumps(TOOLS)}</tools>",
    }
    assert (
        conversation(
            {"conversations": [system, *SHAREGPT], "tools": json.dumps(TOOLS)}
        ).tools
        is None
    )


def test_nothing_that_a_message_says_is_dropped():
    extra = {"name": "me", "reasoning_content": "hm", "tool_call_id": "1", "id": 3}
    for spelt in ({"role": "assistant", "content": "4"}, {"from": "gpt", "value": "4"}):
        found = conversation({"messages": [ASKED[0], {**spelt, **extra}]})
        assert found.messages[1] == {"role": "assistant", "content": "4", **extra}
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "?"}]
    assert (
        conversation(
            {"messages": [{"role": "user", "content": parts}, ASKED[1]]}
        ).messages[0]["content"]
        == parts
    )


def test_documents_and_the_values_of_a_template_come_with_the_conversation():
    record = {
        "messages": ASKED,
        "documents": [{"title": "a"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert conversation(record).values == {
        "documents": [{"title": "a"}],
        "enable_thinking": False,
    }


# --- what is learned


@pytest.mark.parametrize("spelt", ["role", "from"])
@pytest.mark.parametrize("mark", ["weight", "train", "loss", "loss_mask"])
@pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True), (0.0, 1.0)])
def test_an_answer_that_is_marked_as_context_is_not_learned(mark, spelt, no, yes):
    turns = [dict(turn) for turn in ([*ASKED, *LAST] if spelt == "role" else SHAREGPT)]
    turns[0][mark], turns[1][mark], turns[3][mark] = no, no, yes
    found = conversation({"conversations": turns})
    assert found.learned == (3,) and not any(
        mark in message for message in found.messages
    )
    assert list(found.messages) == [*ASKED, *LAST]


def test_a_question_that_is_marked_as_learned_is_counted():
    found = conversation({"messages": [{**ASKED[0], "train": True}, ASKED[1]]})
    assert found.learned == (1,) and found.passed_over == 1


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0.5},
        {"weight": 2},
        {"weight": -1},
        {"weight": "0"},
        {"train": "no"},
        {"mask": True},
        {"masked": 1},
        {"train_detail": []},
        {"loss_weight": 0},
        {"loss_mask": [0, 1]},
    ],
)
def test_a_mark_that_is_no_yes_or_no_is_refused_by_name(mark):
    with pytest.raises(Unfit, match=next(iter(mark))) as caught:
        conversation({"messages": [ASKED[0], {**ASKED[1], **mark}]})
    assert caught.value.kind == "marked in a way that is not known"


# --- pairs


CHOSEN, REJECTED = (
    {"role": "assistant", "content": "6"},
    {"role": "assistant", "content": "5"},
)
GPT = [{"from": "gpt", "value": "6"}, {"from": "gpt", "value": "5"}]
QUESTION = LAST[0]
WHOLE = {"chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]}
HH = {
    "chosen": "\n\nHuman: And\n3+3?\n\nAssistant: 6",
    "rejected": "\n\nHuman: And\n3+3?\n\nAssistant: 5",
}
TEXTS = {"chosen": "6", "rejected": "5"}

PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "And\n3+3?", **TEXTS},
    "messages": {"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "prompt as text, sides as messages": {
        "prompt": "And\n3+3?",
        "chosen": [CHOSEN],
        "rejected": [REJECTED],
    },
    "prompt as messages, sides as text": {"prompt": [QUESTION], **TEXTS},
    "sides as one message": {
        "prompt": "And\n3+3?",
        "chosen": CHOSEN,
        "rejected": REJECTED,
    },
    "whole": WHOLE,
    "whole, prompt as text": {"prompt": "And\n3+3?", **WHOLE},
    "whole, prompt as messages": {"prompt": [QUESTION], **WHOLE},
    "UltraFeedback-binarized": {
        "prompt": "And\n3+3?",
        "prompt_id": "1",
        **WHOLE,
        "messages": [QUESTION, CHOSEN],
        "score_chosen": 8.0,
        "score_rejected": 7.0,
    },
    "Capybara-DPO": {
        "prompt": "And\n3+3?",
        **WHOLE,
        "conversation": [{"input": "And\n3+3?", "output": "7"}],
        "rating_chosen": 5,
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "And\n3+3?"}],
        "chosen": GPT[0],
        "rejected": GPT[1],
    },
    "messages with the chosen answer": {"messages": [QUESTION, CHOSEN], **TEXTS},
    "HH": HH,
    "HH with its prompt": {
        "prompt": "\n\nHuman: And\n3+3?\n\nAssistant:",
        "chosen": " 6",
        "rejected": " 5",
    },
    "HH, prompt and wholes": {"prompt": "\n\nHuman: And\n3+3?\n\nAssistant:", **HH},
    "Alpaca": {"instruction": "And", "input": "3+3?", **TEXTS},
    "argilla": {
        "instruction": "And\n3+3?",
        "chosen_response": "6",
        "rejected_response": "5",
    },
    "orca, question": {"system": "", "question": "And\n3+3?", **TEXTS},
    "orca, input": {"system": "", "input": "And\n3+3?", **TEXTS},
}


@pytest.mark.parametrize("shape", PAIRS)
def test_pairs_are_two_conversations_that_differ_in_the_answer(shape):
    chosen, rejected = pair(PAIRS[shape])
    for side, answer in ((chosen, "6"), (rejected, "5")):
        assert [(m["role"], m["content"].strip()) for m in side.messages] == [
            ("user", "And\n3+3?"),
            ("assistant", answer),
        ]
        assert side.learned == (1,)


@pytest.mark.parametrize(
    "record",
    [
        {"system": "Be brief.", "question": "And\n3+3?", **TEXTS},
        {"system": "Be brief.", **WHOLE},
        {
            "system": "Be brief.",
            "chosen": [BRIEF, *WHOLE["chosen"]],
            "rejected": [BRIEF, *WHOLE["rejected"]],
        },
        {"prompt": [BRIEF, QUESTION], **WHOLE},
        {"prompt": [BRIEF, QUESTION], **TEXTS},
    ],
)
def test_a_pair_s_system_prompt_stands_once_before_both(record):
    for side in pair(record):
        assert [m["role"] for m in side.messages] == [
            "system",
            "user",
            "assistant",
        ] and side.messages[0] == BRIEF


def test_answers_that_repeat_a_long_prompt_have_it_once():
    prompt = "What is three and three, please?"
    record = {
        "prompt": prompt,
        "chosen": f"{prompt} It is 6",
        "rejected": f"{prompt} It is 5",
    }
    assert [[m["content"] for m in side.messages] for side in pair(record)] == [
        [prompt, "It is 6"],
        [prompt, "It is 5"],
    ]
    assert (
        pair({"prompt": "A", "chosen": "Apple", "rejected": "Ant"})[0].messages[1][
            "content"
        ]
        == "Apple"
    )


def test_dialogues_that_part_early_learn_all_answers_from_there():
    chosen = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"
    rejected = "\n\nHuman: a\n\nAssistant: B\n\nHuman: e\n\nAssistant: f"
    assert [
        side.learned for side in pair({"chosen": chosen, "rejected": rejected})
    ] == [
        (1, 3),
        (1, 3),
    ]


# --- what is refused


@pytest.mark.parametrize(
    ("record", "kind", "detail"),
    [
        ([1], "no conversation", "not a JSON object"),
        ({}, "no conversation", "but nothing"),
        ({"text": "x"}, "no conversation", "but text"),
        ({"mesages": ASKED}, "no conversation", "did you mean messages?"),
        ({"prompt": "x"}, "no conversation", "but prompt"),
        ({"messages": []}, "no conversation", "not a list of messages"),
        ({"messages": "[]"}, "no conversation", "not a list of messages"),
        ({"messages": ["hi"]}, "no conversation", "not a JSON object"),
        ({"messages": [ASKED]}, "no conversation", "not a JSON object"),
        ({"messages": [{"content": "x"}]}, "no conversation", "whose it is"),
        ({"messages": [{"role": 3, "content": "x"}]}, "no conversation", "whose it is"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "no conversation",
            "of user is not text",
        ),
        (
            {"messages": [{"role": "user", "content": True}]},
            "no conversation",
            "of user is not text",
        ),
        (
            {"messages": [{"role": "user", "content": {"a": 1}}]},
            "no conversation",
            "of user is not text",
        ),
        (
            {"messages": [{"role": "user", "content": []}]},
            "no conversation",
            "of user is not text",
        ),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "no conversation",
            "of user is not text",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "no conversation",
            "of user is not text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "no conversation",
            "not text",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x"},
                            {"type": "image_url"},
                        ],
                    }
                ]
            },
            "no conversation",
            "but image_url",
        ),
        (
            {"messages": [*ASKED, {"role": "tool", "content": 3}]},
            "no conversation",
            "of tool is not text",
        ),
        (
            {"messages": [{"role": "user", "from": "gpt", "content": "x"}]},
            "ambiguous",
            "role and from",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "value": "y"}]},
            "ambiguous",
            "content and value",
        ),
        (
            {"conversations": [{"from": "nobody", "value": "x"}]},
            "no conversation",
            "'nobody'",
        ),
        (
            {
                "conversations": [
                    SHAREGPT[0],
                    {"from": "function_call", "value": "add(2)"},
                ]
            },
            "no conversation",
            "not JSON",
        ),
        (
            {
                "conversations": [
                    SHAREGPT[0],
                    {"from": "function_call", "value": '{"name": "add"}'},
                ]
            },
            "no conversation",
            "name and arguments",
        ),
        (
            {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "[]"}]},
            "no conversation",
            "calls nothing",
        ),
        (
            {
                "messages": [
                    ASKED[0],
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"arguments": {}}],
                    },
                ]
            },
            "no conversation",
            "no name",
        ),
        (
            {
                "messages": [
                    ASKED[0],
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [CALL],
                        "function_call": {"name": "sub", "arguments": {}},
                    },
                ]
            },
            "ambiguous",
            "function_call",
        ),
        ({"messages": ASKED, "tools": "add"}, "no conversation", "tools is not JSON"),
        (
            {"messages": ASKED, "tools": {"a": 1}},
            "no conversation",
            "tools is not a list",
        ),
        ({"messages": ASKED, "tools": [1]}, "no conversation", "not a list of objects"),
        (
            {"messages": ASKED, "tools": TOOLS, "functions": [{"name": "sub"}]},
            "ambiguous",
            "functions",
        ),
        (
            {"instruction": "x", "output": "y", "history": [["q"]]},
            "no conversation",
            "history",
        ),
        (
            {"instruction": "x", "output": ["y", "z"]},
            "no conversation",
            "of assistant is not text",
        ),
        ({"messages": [ASKED[0]]}, "without an answer", ""),
        ({"messages": [ASKED[0], {**ASKED[1], "weight": 0}]}, "without an answer", ""),
        (
            {"messages": [ASKED[0], {"role": "assistant", "content": " "}]},
            "with an empty answer",
            "",
        ),
        (
            {
                "messages": [
                    ASKED[0],
                    {"role": "assistant", "content": "", "tool_calls": []},
                ]
            },
            "with an empty answer",
            "",
        ),
        ({"messages": [ASKED[1]]}, "without a user's turn", ""),
        ({"messages": [BRIEF, ASKED[1]]}, "without a user's turn", ""),
        (
            {"messages": [{"role": "developer", "content": "x"}, ASKED[1]]},
            "without a user's turn",
            "",
        ),
        (
            {"system": "Be long.", "messages": [BRIEF, *ASKED]},
            "ambiguous",
            "two system prompts",
        ),
        (
            {"system": "a", "system_prompt": "b", "messages": ASKED},
            "ambiguous",
            "two system prompts",
        ),
        ({"system": 3, "messages": ASKED}, "no conversation", "system is not text"),
        ({"messages": ASKED, "conversations": SHAREGPT}, "ambiguous", "conversations"),
        ({"messages": ASKED, "prompt": "3+3?"}, "ambiguous", "prompt"),
        (
            {"conversations": SHAREGPT[:2], "instruction": "5+5?", "response": "10"},
            "ambiguous",
            "instruction",
        ),
        (
            {"messages": ASKED, "chat_template_kwargs": [1]},
            "no conversation",
            "chat_template_kwargs",
        ),
        ({"messages": ASKED, "kto_tag": True}, "no conversation", "KTO"),
        ({"prompt": "x", "completion": "y", "label": False}, "no conversation", "KTO"),
        (WHOLE, "no conversation", "data.format pairs"),
        (
            {"prompt": "x", "answers": [{"answer": "y", "rank": 1}]},
            "no conversation",
            "ranked",
        ),
        (
            {"history": "x", "human_ref_A": "y", "human_ref_B": "z", "labels": 1},
            "no conversation",
            "ranked",
        ),
        (
            {"prompt": "x", "response_0": "y", "response_1": "z"},
            "no conversation",
            "ranked",
        ),
        (
            {"conversation_a": ASKED, "conversation_b": ASKED, "winner": "a"},
            "no conversation",
            "ranked",
        ),
        (
            {"instruction": "x", "completions": [{"response": "y"}]},
            "no conversation",
            "ranked",
        ),
        (
            {"message_id": "1", "parent_id": "0", "text": "x", "role": "prompter"},
            "no conversation",
            "tree",
        ),
        (
            {"system": "SYSTEM: x", "chat": "USER: x\n\nASSISTANT: y"},
            "no conversation",
            "dialogue in one text",
        ),
    ],
)
def test_a_record_that_is_no_conversation_says_why(record, kind, detail):
    with pytest.raises(Unfit) as caught:
        conversation(record)
    assert caught.value.kind == kind and detail in caught.value.detail


@pytest.mark.parametrize(
    ("record", "kind", "detail"),
    [
        ({"prompt": "x", "chosen": "y"}, "no pair", "no chosen and rejected"),
        ({"messages": ASKED}, "no pair", "data.format chat"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "no pair", "are the same"),
        (
            {"chosen": "The sky is blue", "rejected": "The sky is green"},
            "no pair",
            "no prompt",
        ),
        ({"chosen": [CHOSEN], "rejected": [REJECTED]}, "no pair", "no prompt"),
        (
            {"prompt": [BRIEF], "chosen": [CHOSEN], "rejected": [REJECTED]},
            "without a user's turn",
            "",
        ),
        (
            {"chosen": [ASKED[0], CHOSEN], "rejected": [QUESTION, REJECTED]},
            "no pair",
            "different prompts",
        ),
        (
            {"chosen": [QUESTION, CHOSEN], "rejected": "5"},
            "ambiguous",
            "whole conversation",
        ),
        ({"prompt": "1+1?", **WHOLE}, "ambiguous", "prompt"),
        ({"prompt": "And\n3+3?", **WHOLE, "messages": ASKED}, "ambiguous", "messages"),
        (
            {
                "prompt": [{**BRIEF, "content": "Be long."}, QUESTION],
                "system": "Be brief.",
                **WHOLE,
            },
            "ambiguous",
            "two system",
        ),
        ({"messages": ASKED, **TEXTS}, "ambiguous", "ends on an answer"),
        (
            {"prompt": "1+1?", "conversations": [QUESTION], **TEXTS},
            "ambiguous",
            "prompt",
        ),
        ({"prompt": "x", "chosen": " ", "rejected": "y"}, "with an empty answer", ""),
        (
            {"prompt": "x", "chosen": 1, "rejected": 2},
            "no conversation",
            "not a JSON object",
        ),
        (
            {"prompt": "x", "chosen": [QUESTION], "rejected": [REJECTED]},
            "without an answer",
            "chosen",
        ),
        ({"prompt": "x", "answers": [{"answer": "y", "rank": 1}]}, "no pair", "ranked"),
        (
            {
                "context": "x",
                "response1": "y",
                "response2": "z",
                "overall_preference": 1,
            },
            "no pair",
            "ranked",
        ),
        ({"prompt": "x", "completion": "y", "label": True}, "no pair", "KTO"),
    ],
)
def test_a_record_that_is_no_pair_says_why(record, kind, detail):
    with pytest.raises(Unfit) as caught:
        pair(record)
    assert caught.value.kind == kind and detail in caught.value.detail


@pytest.mark.parametrize(
    "foreign", FOREIGN, ids=lambda foreign: " ".join(foreign.fields)
)
def test_each_public_shape_that_cannot_be_learned_is_refused_by_its_fields(foreign):
    record = dict.fromkeys(foreign.fields, "x")
    for read in (conversation, pair):
        with pytest.raises(Unfit) as caught:
            read(record)
        assert all(name in caught.value.detail for name in foreign.fields)
