"""Records of conversations: three forms say the same, pairs in five, and one reason for each record that is none."""

import pytest

from meshtrain.data.chat import Unfit, conversation, pair

ASKED = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
LAST = [{"role": "user", "content": "And\n3+3?"}, {"role": "assistant", "content": "6"}]
OPENAI = {"messages": [{"role": "system", "content": "Be brief."}, *ASKED, *LAST]}
SHAREGPT = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"},
        {"from": "human", "value": "And\n3+3?"}, {"from": "gpt", "value": "6"},
    ],
}  # fmt: skip
ALPACA = {"system": "Be brief.", "instruction": "And", "input": "3+3?", "output": "6", "history": [["2+2?", "4"]]}


def test_three_forms_of_a_record_are_one_conversation():
    found = conversation(OPENAI)
    assert list(found.messages) == OPENAI["messages"] and found.learned == (2, 4)
    assert conversation(SHAREGPT) == found and conversation(ALPACA) == found


def test_an_answer_that_weighs_nothing_is_context():
    found = conversation({"messages": [ASKED[0], {**ASKED[1], "weight": 0}, *LAST]})
    assert found.learned == (3,) and "weight" not in found.messages[1]


def test_tools_come_with_their_calls_in_both_forms():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    called = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    sharegpt = {"tools": '[{"name": "add"}]', "conversations": [SHAREGPT["conversations"][0], called]}
    assert conversation({"tools": [{"name": "add"}], "messages": messages}) == conversation(sharegpt)


def test_of_a_prompt_and_its_completion_only_the_completion_is_learned():
    found = conversation({"prompt": [*ASKED, LAST[0]], "completion": "6"})
    assert list(found.messages) == [*ASKED, *LAST] and found.learned == (3,)


CHOSEN, REJECTED = {"role": "assistant", "content": "6"}, {"role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "And\n3+3?", "chosen": "6", "rejected": "5"},
        {"prompt": [LAST[0]], "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"chosen": [LAST[0], CHOSEN], "rejected": [LAST[0], REJECTED]},
        {"conversations": [{"from": "human", "value": "And\n3+3?"}], "chosen": {"from": "gpt", "value": "6"}, "rejected": {"from": "gpt", "value": "5"}},
        {"instruction": "And", "input": "3+3?", "chosen": "6", "rejected": "5"},
    ],
)  # fmt: skip
def test_pairs_are_two_conversations_that_differ_in_the_answer(record):
    chosen, rejected = pair(record)
    assert list(chosen.messages) == [LAST[0], CHOSEN] and list(rejected.messages) == [LAST[0], REJECTED]
    assert chosen.learned == rejected.learned == (1,)


@pytest.mark.parametrize(
    ("record", "kind", "detail"),
    [
        ([1], "no conversation", "no JSON object"),
        ({"text": "x"}, "no conversation", "neither messages"),
        ({"messages": []}, "no conversation", "no list of messages"),
        ({"messages": ["hi"]}, "no conversation", "no JSON object"),
        ({"messages": [{"content": "x"}]}, "no conversation", "whose it is"),
        ({"messages": [{"role": "user", "content": 3}]}, "no conversation", "of user is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no conversation", "no text"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "no conversation", "'nobody'"),
        ({"instruction": "x", "output": "y", "history": [["q"]]}, "no conversation", "history"),
        ({"messages": [ASKED[0]]}, "without an answer", ""),
        ({"messages": [ASKED[0], {**ASKED[1], "weight": 0}]}, "without an answer", ""),
        ({"messages": [ASKED[0], {"role": "assistant", "content": " "}]}, "with an empty answer", ""),
    ],
)  # fmt: skip
def test_a_record_that_is_no_conversation_says_why(record, kind, detail):
    with pytest.raises(Unfit) as caught:
        conversation(record)
    assert caught.value.kind == kind and detail in caught.value.detail


@pytest.mark.parametrize("record", [{"prompt": "x", "chosen": "y"}, {"prompt": "x", "chosen": "y", "rejected": "y"}])
def test_a_record_without_two_different_answers_is_no_pair(record):
    with pytest.raises(Unfit, match="no pair"):
        pair(record)
