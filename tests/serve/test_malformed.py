"""Requests that are wrong, each in its own way: none ends the server, each gets its 4xx, a sentence, and the field at
fault.
"""

import json

import pytest
from fake_serving import fake

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "fake", "prompt": "abc", "max_tokens": 2}
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields):
    return COMPLETION, {**GOOD, **fields}


def chat(**fields):
    return CHAT, {"model": "fake", "messages": HELLO, "max_tokens": 2, **fields}


def message(**fields):
    return chat(messages=[{"role": "user", "content": "hello", **fields}])


# (path and body, HTTP status, the field at fault, of what the sentence tells)
MALFORMED = {
    "no JSON": ((COMPLETION, b"{"), 400, None, "the body is not JSON"),
    "nothing": ((COMPLETION, b""), 400, None, "the body is not JSON"),
    "no text": (
        (COMPLETION, b'{"prompt": "\xff\xfe"}'),
        400,
        None,
        "the body is not JSON",
    ),
    "too deep": ((COMPLETION, b"[" * 60_000), 400, None, "the body is not JSON"),
    "a number that is none": (
        (COMPLETION, b'{"temperature": NaN}'),
        400,
        None,
        "NaN is not a number",
    ),
    "a number of 5,000 digits": (
        (COMPLETION, b'{"seed": ' + b"1" * 5000 + b"}"),
        400,
        None,
        "the body is not JSON",
    ),
    "an infinite number": (
        (COMPLETION, b'{"model": "fake", "prompt": "a", "temperature": 1e999}'),
        400,
        "temperature",
        "at most 2",
    ),
    "no object": ((COMPLETION, b"[1]"), 400, None, "must be an object"),
    "null": ((COMPLETION, b"null"), 400, None, "must be an object"),
    "zeros": ((COMPLETION, bytes(64)), 400, None, "the body is not JSON"),
    "gzip": (
        (COMPLETION, b"\x1f\x8b\x08\x00" + bytes(40)),
        400,
        None,
        "the body is not JSON",
    ),
    "a body that is too large": (
        (COMPLETION, b" " * 70_000),
        413,
        None,
        "larger than 65536 bytes",
    ),
    "no model": ((COMPLETION, {"prompt": "a"}), 400, "model", "model is missing"),
    "a model that is none": (completion(model=7), 400, "model", "must be a string"),
    "another model": (
        completion(model="fke"),
        404,
        "model",
        "there is no model fke; did you mean fake?",
    ),
    "no prompt": ((COMPLETION, {"model": "fake"}), 400, "prompt", "prompt is missing"),
    "an empty prompt": (completion(prompt=[]), 400, "prompt", "an empty list is none"),
    "an empty prompt among others": (
        completion(prompt=[[1], []]),
        400,
        "prompt",
        "an empty list is none",
    ),
    "a prompt that is a number": (
        completion(prompt=3),
        400,
        "prompt",
        "must be a string",
    ),
    "a prompt of all kinds": (
        completion(prompt=["a", 1]),
        400,
        "prompt",
        "must be a string",
    ),
    "a token that there is not": (
        completion(prompt=[257]),
        400,
        None,
        "the prompt has the token 257; the model has 257",
    ),
    "a token below 0": (completion(prompt=[3, -1]), 400, "prompt", "must be a string"),
    "a token beyond all bounds": (
        completion(prompt=[[2**70]]),
        400,
        "prompt",
        "must be a string",
    ),
    "half a character": (
        (COMPLETION, b'{"model": "fake", "prompt": "\\ud800"}'),
        400,
        "prompt",
        "half a surrogate pair",
    ),
    "too long a prompt": (
        completion(prompt="a" * 64),
        400,
        "prompt",
        "more than the 64 positions",
    ),
    "too long a prompt and answer": (
        completion(prompt="a" * 60, max_tokens=5),
        400,
        "prompt",
        "60 tokens of prompt and 5",
    ),
    "too many answers": (
        completion(n=5),
        400,
        "n",
        "5 answers are asked for, but a request may have 4",
    ),
    "too many answers to several": (
        completion(prompt=["a", "b", "c"], n=2),
        400,
        "n",
        "6 answers",
    ),
    "a misspelt field": (
        completion(max_token=3),
        400,
        "max_token",
        "did you mean max_tokens?",
    ),
    "a field of another kind": (
        completion(messages=HELLO),
        400,
        "messages",
        "not known here",
    ),
    "no tokens": (completion(max_tokens=0), 400, "max_tokens", "at least 1"),
    "tokens in words": (
        completion(max_tokens="3"),
        400,
        "max_tokens",
        "a whole number",
    ),
    "half a token": (completion(max_tokens=2.5), 400, "max_tokens", "a whole number"),
    "true tokens": (completion(max_tokens=True), 400, "max_tokens", "a whole number"),
    "too hot": (
        completion(temperature=2.1),
        400,
        "temperature",
        "at least 0 and at most 2",
    ),
    "heat in words": (
        completion(temperature="hot"),
        400,
        "temperature",
        "must be a number",
    ),
    "no nucleus": (completion(top_p=0), 400, "top_p", "above 0 and at most 1"),
    "fewer than none of the likeliest": (
        completion(top_k=-1),
        400,
        "top_k",
        "at least 0",
    ),
    "a seed of half a unit": (completion(seed=0.5), 400, "seed", "a whole number"),
    "an empty stop": (completion(stop=""), 400, "stop", "1 to 1000 characters"),
    "a stop that is a number": (completion(stop=[1]), 400, "stop", "a list of strings"),
    "too many stops": (completion(stop=["a"] * 17), 400, "stop", "at most 16"),
    "a stream in words": (completion(stream="yes"), 400, "stream", "true or false"),
    "options of no stream": (
        completion(stream_options={"include_usage": True}),
        400,
        "stream_options",
        "left out unless stream is true",
    ),
    "options that are no object": (
        completion(stream=True, stream_options=[]),
        400,
        "stream_options",
        "must be an object",
    ),
    "a misspelt option": (
        completion(stream=True, stream_options={"include_usge": True}),
        400,
        "stream_options.include_usge",
        "did you mean include_usage?",
    ),
    "too many log-probabilities": (
        completion(logprobs=21),
        400,
        "logprobs",
        "at most 20",
    ),
    "an echo": (completion(echo=True), 400, "echo", "not built here"),
    "a suffix": (completion(suffix="b"), 400, "suffix", "not built here"),
    "the best of more": (completion(best_of=3), 400, "best_of", "must be n (1)"),
    "a penalty": (
        completion(presence_penalty=0.5),
        400,
        "presence_penalty",
        "not built here",
    ),
    "a bias": (completion(logit_bias={"5": 3}), 400, "logit_bias", "not built here"),
    "no messages": ((CHAT, {"model": "fake"}), 400, "messages", "messages is missing"),
    "an empty conversation": (
        chat(messages=[]),
        400,
        "messages",
        "at least one message",
    ),
    "messages that are a text": (
        chat(messages="hello"),
        400,
        "messages",
        "a list of messages",
    ),
    "a message that is a text": (
        chat(messages=["hello"]),
        400,
        "messages[0]",
        "must be an object",
    ),
    "an unknown speaker": (message(role="usr"), 400, "messages[0].role", '"user"'),
    "no speaker": (
        chat(messages=[{"content": "x"}]),
        400,
        "messages[0].role",
        "messages[0].role is missing",
    ),
    "nothing said": (
        chat(messages=[*HELLO, {"role": "user"}]),
        400,
        "messages[1].content",
        "messages[1].content is missing",
    ),
    "a number said": (message(content=5), 400, "messages[0].content", "text parts"),
    "a picture": (
        message(content=[{"type": "image_url", "image_url": {}}]),
        400,
        "messages[0].content[0].type",
        "this model reads nothing else",
    ),
    "a part without text": (
        message(content=[{"type": "text"}]),
        400,
        "messages[0].content[0].text",
        "is missing",
    ),
    "a misspelt part of a message": (
        message(contnt="x"),
        400,
        "messages[0].contnt",
        "did you mean content?",
    ),
    "half a character said": (
        (
            CHAT,
            b'{"model": "fake", "messages": [{"role": "user", "content": "\\udfff"}]}',
        ),
        400,
        "messages[0].content",
        "half a surrogate",
    ),
    "what the template refuses": (
        message(content="refuse me"),
        400,
        "messages",
        "does not take these messages",
    ),
    "two numbers of tokens": (
        chat(max_completion_tokens=9),
        400,
        "max_tokens",
        "the same as max_completion_tokens",
    ),
    "likeliest without log-probabilities": (
        chat(top_logprobs=2),
        400,
        "top_logprobs",
        "unless logprobs is true",
    ),
    "log-probabilities in numbers": (
        chat(logprobs=2),
        400,
        "logprobs",
        "true or false",
    ),
    "a form": (
        chat(response_format={"type": "json_object"}),
        400,
        "response_format.type",
        '"text"',
    ),
    "a call that must be": (
        chat(tools=[{}], tool_choice="required"),
        400,
        "tool_choice",
        "no call can be promised",
    ),
    "tools that are none": (chat(tools={"a": 1}), 400, "tools", "a list of objects"),
    "a voice": (
        chat(modalities=["text", "audio"]),
        400,
        "modalities",
        "not built here",
    ),
    "the older functions": (
        chat(functions=[{"name": "f"}]),
        400,
        "functions",
        "not built here",
    ),
}


@pytest.fixture(scope="module")
def server():
    with fake(most_body=65_536) as made:
        yield made


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_its_own_4xx_and_the_server_goes_on(server, name):
    (path, body), status, field, says = MALFORMED[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.client.post(
        path, content=content, headers={"Content-Type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, field)
    assert error["type"] == "invalid_request_error" and says in error["message"]
    assert (
        error["message"][-1] in ".?"
        and "\n" not in error["message"]
        and len(error["message"]) < 700
    )
    assert (server.engine.status.busy, server.engine.status.waiting) == (0, 0)


def test_after_all_of_them_requests_are_answered(server):
    assert len(MALFORMED) >= 40
    assert server.completion().status_code == 200
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", ""]
)
def test_a_body_that_is_not_said_to_be_json_is_refused(server, kind):
    answer = server.client.post(
        COMPLETION, content=json.dumps(GOOD), headers={"Content-Type": kind}
    )
    assert (
        answer.status_code == 415
        and "Content-Type: application/json" in answer.json()["error"]["message"]
    )


def test_what_a_client_spells_out_without_wanting_it_is_taken(server):
    harmless = {
        "echo": False,
        "suffix": "",
        "best_of": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "user": "me",
        "stop": None,
        "n": None,
        "stream_options": None,
    }
    assert server.completion(**harmless).status_code == 200
    harmless = {
        "tools": [],
        "functions": [],
        "response_format": {"type": "text"},
        "store": False,
        "modalities": ["text"],
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "top_logprobs": None,
    }
    assert server.chat(**harmless).status_code == 200


ODD = ("x" * 3000, [[1]], {"a": 1}, -1, 1.5, 2**70)
FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "stream",
    "ignore_eos",
)
FIELDS += (
    "frequency_penalty",
    "logit_bias",
    "stream_options",
    "no_such_field",
    "\u202efield",
)


@pytest.mark.thorough
@pytest.mark.parametrize("ask", [completion, chat])
def test_no_field_takes_an_odd_value_and_none_is_shown_as_it_is(server, ask):
    for field in FIELDS:
        for value in ODD:
            if (field, value) == ("temperature", 1.5):
                continue
            path, body = ask(**{field: value})
            answer = server.client.post(path, json=body)
            said = answer.json()["error"]["message"]
            assert answer.status_code == 400 and said.isprintable() and len(said) < 700
