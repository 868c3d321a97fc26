"""From OpenAI's JSON to what is asked; what is refused is in test_malformed.py."""

import pytest

from meshtrain.generate.request import Sampling
from meshtrain.serve.requests import Asked, Fields, chat, completion

USUAL = Sampling(1.0)
HELLO = [{"role": "user", "content": "hello"}]


def completed(**fields) -> Asked:
    return completion(
        Fields({"model": "m", "prompt": "a", **fields}, "the body"), 8, USUAL
    )


def chatted(**fields) -> Asked:
    return chat(
        Fields({"model": "m", "messages": HELLO, **fields}, "the body"), 8, USUAL
    )


def test_what_is_left_out_is_as_openai_has_it():
    asked = completed()
    assert (asked.prompts, asked.n, asked.most, asked.logprobs, asked.stop) == (
        ("a",),
        1,
        16,
        None,
        (),
    )
    assert (asked.stream, asked.usage, asked.ignore_ends) == (False, False, False)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (
        1.0,
        1.0,
        0,
    )
    assert (
        chatted().most is None
        and chatted().logprobs is None
        and chatted().tools is None
    )


def test_null_is_as_good_as_left_out():
    names = (
        "n",
        "max_tokens",
        "temperature",
        "seed",
        "stop",
        "stream",
        "logprobs",
        "suffix",
        "stream_options",
        "user",
    )
    asked, plain = completed(**dict.fromkeys(names)), completed()
    assert {**vars(asked), "sampling": 0} == {**vars(plain), "sampling": 0}
    assert asked.sampling.seed != plain.sampling.seed, "drawn anew for each"


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, 0), (7, 7), (2**32 + 3, 3), (-1, 2**32 - 1), (-(2**63), 0)],
)
def test_any_seed_of_64_bits_is_one_of_the_generators(seed, expected):
    asked = completed(seed=seed, temperature=0.5, top_p=0.9, top_k=4)
    assert asked.sampling == Sampling(0.5, 4, 0.9, expected)


def test_what_a_request_leaves_out_is_as_the_models_makers_have_it():
    usual = Sampling(0.6, 20, 0.9)

    def how(**fields):
        found = completion(
            Fields({"model": "m", "prompt": "a", "seed": 3, **fields}, "the body"),
            8,
            usual,
        ).sampling
        return found.temperature, found.top_k, found.top_p

    assert how() == how(temperature=None) == (0.6, 20, 0.9)
    assert how(temperature=1.5, top_p=1) == (1.5, 20, 1.0) and how(top_k=0) == (
        0.6,
        0,
        0.9,
    )
    assert how(temperature=0) == (0, 0, 1.0)


def test_at_temperature_0_nothing_else_decides():
    asked = completed(temperature=0, seed=3, top_p=0.5, top_k=9)
    assert asked.sampling == Sampling() == completed(temperature=0.0).sampling


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_a_prompt_has_openais_four_forms(prompt, expected):
    assert completed(prompt=prompt).prompts == expected


def test_stops_tokens_and_log_probabilities():
    assert completed(stop="x").stop == ("x",) and completed(stop=["x", "y"]).stop == (
        "x",
        "y",
    )
    assert chatted(max_tokens=3).most == chatted(max_completion_tokens=3).most == 3
    assert chatted(max_tokens=3, max_completion_tokens=3).most == 3
    assert [chatted(logprobs=True, top_logprobs=n).logprobs for n in (None, 0, 5)] == [
        0,
        0,
        5,
    ]
    assert (
        chatted(logprobs=False).logprobs is None and completed(logprobs=0).logprobs == 0
    )
    streamed = completed(stream=True, stream_options={"include_usage": True})
    assert streamed.stream and streamed.usage


def test_messages_stand_as_they_are_asked():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "me",
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    assert list(chatted(messages=messages).messages) == messages
    assert chatted(messages=[{**messages[2], "refusal": None}]).messages == (
        messages[2],
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (
        chatted(tools=tools).tools == tools
        and chatted(tools=tools, tool_choice="none").tools is None
    )
