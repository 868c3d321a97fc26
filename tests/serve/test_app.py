"""The routes: OpenAI's objects, the key, and what is refused before a route sees it."""

import pytest
from fake_decoding import continuation, saying
from fake_serving import fake

from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.generate.request import Sampling


@pytest.fixture(scope="module")
def server():
    with fake() as made:
        yield made


def test_there_is_one_model_and_it_is_told(server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (
        "fake",
        "model",
        64,
    )
    assert server.client.get("/v1/models/fake").json() == model
    missing = server.client.get("/v1/models/meta/llama")
    assert (
        missing.status_code == 404
        and missing.json()["error"]["code"] == "model_not_found"
    )


def test_a_completion_is_what_the_model_says_with_what_it_took(server):
    answer = server.completion(
        prompt=["abc", [120]], temperature=0, max_tokens=3
    ).json()
    assert (
        answer["object"] == "text_completion"
        and answer["model"] == "fake"
        and answer["id"].startswith("cmpl-")
    )
    said = [
        (choice["text"], choice["index"], choice["finish_reason"])
        for choice in answer["choices"]
    ]
    assert said == [
        (bytes(continuation(p, 3)).decode(), i, "length")
        for i, p in enumerate((b"abc", b"x"))
    ]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
    }


def test_answers_to_one_prompt_differ_and_come_again_with_their_seed(server):
    def texts(**fields):
        answer = server.completion(n=3, max_tokens=8, temperature=1, **fields).json()
        return [choice["text"] for choice in answer["choices"]]

    seeded = texts(seed=5)
    assert (
        len(set(seeded)) == 3
        and texts(seed=5) == seeded != texts(seed=8)
        and texts() != texts()
    )
    assert (
        seeded[1]
        == texts(seed=6)[0]
        == bytes(continuation(b"abc", 8, Sampling(1.0, seed=6))).decode()
    )


def test_an_answer_ends_before_a_stop_string_or_behind_an_end_token():
    with fake(choose=saying("one two three")) as server:
        (choice,) = server.completion(
            prompt=">", stop=[" th", "x"], max_tokens=30
        ).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
        answer = server.completion(prompt=">", max_tokens=30).json()
        assert (
            answer["choices"][0]["text"] == "one two three"
            and answer["choices"][0]["finish_reason"] == "stop"
        )
        assert answer["usage"]["completion_tokens"] == len("one two three") + 1, (
            "the end token was chosen too"
        )


def test_log_probabilities_of_a_completion_are_of_each_token_with_its_place(server):
    (choice,) = server.completion(logprobs=2, temperature=0).json()["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"] and told["text_offset"] == [
        0,
        1,
        2,
        3,
    ]
    assert told["token_logprobs"] == [-ord(token) / 100 for token in told["tokens"]]
    assert all(
        len(top) == 2 and token in top
        for token, top in zip(told["tokens"], told["top_logprobs"], strict=True)
    )
    (alone,) = server.completion(logprobs=0, temperature=0).json()["choices"]
    assert (
        alone["logprobs"]["tokens"] == told["tokens"]
        and alone["logprobs"]["top_logprobs"] is None
    )
    assert server.completion().json()["choices"][0]["logprobs"] is None


def test_a_conversation_is_written_by_the_template_and_answered(server):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
    ]
    answer = server.chat(messages=messages, temperature=0).json()
    (choice,) = answer["choices"]
    expected = bytes(continuation(b"developer:be brief;user:hello;>", 4)).decode()
    assert choice["message"] == {
        "role": "assistant",
        "content": expected,
        "refusal": None,
    }
    assert (answer["object"], choice["finish_reason"]) == ("chat.completion", "length")
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = server.chat(messages=messages, temperature=0, tools=tools).json()
    assert with_tools["usage"]["prompt_tokens"] == answer["usage"][
        "prompt_tokens"
    ] + len("tools;")
    without = server.chat(
        messages=messages, temperature=0, tools=tools, tool_choice="none"
    ).json()
    assert without["usage"] == answer["usage"]


def test_log_probabilities_of_a_conversation_have_the_bytes_of_each_token(server):
    (choice,) = server.chat(logprobs=True, top_logprobs=2).json()["choices"]
    told = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in told) == choice["message"]["content"]
    assert all(
        bytes(each["bytes"]).decode() == each["token"]
        and len(each["top_logprobs"]) == 2
        for each in told
    )
    (alone,) = server.chat(logprobs=True).json()["choices"]
    assert [each["top_logprobs"] for each in alone["logprobs"]["content"]] == [[]] * 4


def test_a_conversation_that_sets_no_end_goes_on_as_far_as_there_is_room(server):
    answer = server.chat(max_tokens=None).json()
    assert (
        answer["usage"]["total_tokens"] == 64
        and answer["choices"][0]["finish_reason"] == "length"
    )
    answer = server.chat(max_tokens=None, max_completion_tokens=3).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_a_model_without_a_template_takes_no_conversation_and_one_without_tools_no_tools():
    with fake(template=False) as server:
        assert server.chat().json()["error"]["code"] == "no_chat_template"
        assert server.completion().status_code == 200
    with fake() as server:
        server.engine.opened.template.reads_tools = False
        refused = server.chat(tools=[{"type": "function"}])
        assert (
            refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
        )


def test_too_long_a_prompt_has_openais_code(server):
    for answer in (server.completion(prompt="a" * 64), server.chat("a" * 64)):
        assert (
            answer.status_code == 400
            and answer.json()["error"]["code"] == "context_length_exceeded"
        )


MANY = 400_000
FAR_TOO_LONG = {
    "a text": {"prompt": "a" * 10 * MANY},
    "texts": {"prompt": ["a" * 2 * MANY] * 4},
    "token ids": {"prompt": [97] * MANY},
    "lists of token ids": {"prompt": [[97], [97] * MANY]},
    "a message": {"messages": [{"role": "user", "content": "a" * 10 * MANY}]},
    "many parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a" * 4000}] * 100}
        ]
    },
    "many messages": {"messages": [{"role": "user", "content": ""}] * 3000},
}


@pytest.mark.parametrize("what", FAR_TOO_LONG)
def test_what_is_far_too_long_is_refused_before_it_is_tokenized(
    server, what, monkeypatch
):
    seen: list[int] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer,
        "encode",
        lambda self, texts: seen.extend(map(len, texts)) or encode(self, texts),
    )
    fields = FAR_TOO_LONG[what]
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    answer = server.client.post(path, json={"model": "fake", "max_tokens": 1, **fields})
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    assert sum(seen) < 10_000


def test_more_prompts_than_answers_are_refused_before_they_are_looked_at(server):
    answer = server.completion(prompt=["a"] * 100_000 + [7])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


def test_other_paths_and_methods_are_told_what_there_is(server):
    answer = server.client.get("/v1/completion")
    assert answer.status_code == 404 and answer.json()["error"]["message"].endswith(
        "did you mean /v1/completions?"
    )
    answer = server.client.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "given",
    [
        None,
        "Bearer wrong",
        "Bearer ",
        "Basic s3cret",
        "s3cret",
        "Bearer s3cretx",
        "Bearer schlüssel",
    ],
)
def test_without_the_key_nothing_is_told_but_health_and_metrics(given):
    with fake(key="s3cret") as server:
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        for path in ("/v1/models", "/v1/nowhere"):
            answer = server.client.get(path, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (
                401,
                "Bearer",
            )
            assert (
                answer.json()["error"]["type"] == "authentication_error"
                and "s3cret" not in answer.text
            )
        assert (
            server.client.post("/v1/completions", headers=headers, json={}).status_code
            == 401
        )
        assert (
            server.client.get("/health").status_code
            == server.client.get("/metrics").status_code
            == 200
        )
        for right in ("Bearer s3cret", "bearer  s3cret"):
            named = {"Authorization": right, "Host": "any.example"}
            assert server.client.get("/v1/models", headers=named).status_code == 200


def test_a_full_queue_is_429_and_leaves_nothing_behind():
    with fake(slots=1, waiting=2) as server:
        server.pace.hold()
        answers = [server.later() for _ in range(2)]
        server.until(lambda status: status.busy + status.waiting == 2)
        refused = server.completion(n=2)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (
            "rate_limit_error",
            None,
            "queue_full",
        )
        server.pace.go()
        assert [answer().status_code for answer in answers] == [200, 200]
        server.until(lambda status: (status.busy, status.waiting) == (0, 0))


def test_before_a_model_is_loaded_it_says_so():
    with fake() as server:
        server.service.served, served = None, server.service.served
        assert server.client.get("/health").json()["status"] == "loading"
        answer = server.completion()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        assert "retry-after" in answer.headers
        server.service.served = served
        assert server.completion().status_code == 200


def test_what_goes_wrong_on_the_device_is_500_and_the_next_request_is_answered():
    with fake() as server:
        server.pace.error = RuntimeError("the device is on fire")
        answer = server.completion()
        assert (
            answer.status_code == 500 and "on fire" in answer.json()["error"]["message"]
        )
        assert (
            answer.json()["error"]["type"] == "server_error"
            and server.completion().status_code == 200
        )


def test_an_engine_that_is_closed_is_503():
    with fake() as server:
        server.engine.close()
        answer = server.completion()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "closed"


def test_what_goes_wrong_in_the_server_is_500_and_told_on_stderr_alone(
    capsys, monkeypatch
):
    with fake() as server:
        monkeypatch.setattr(server.engine, "submit", lambda *_: 1 / 0)
        answer = server.completion()
        assert answer.status_code == 500 and "division" not in answer.text
        assert "ZeroDivisionError" in capsys.readouterr().err
        assert server.service.open_requests == len(server.service.running) == 0


def test_a_request_that_takes_too_long_ends_and_frees_its_slot():
    with fake(request_timeout=0.1) as server:
        server.pace.hold()
        answer = server.completion()
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        server.pace.go()
        server.until(lambda status: status.busy == 0)


def test_eight_at_once_get_what_each_gets_alone():
    with fake(slots=3, waiting=64) as server:
        prompts = [f"prompt {i}" for i in range(8)]
        alone = [
            server.completion(prompt=prompt, temperature=0).json()["choices"]
            for prompt in prompts
        ]
        answers = [server.later(prompt=prompt, temperature=0) for prompt in prompts]
        assert [answer().json()["choices"] for answer in answers] == alone


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LocalHost.:80", 200),
        ("[::1]:8000", 200),
        ("10.0.0.7", 200),
        ("Here.example:8000", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("here.example.evil.example", 421),
    ],
)
def test_without_a_key_only_its_own_names_are_answered(host, status):
    with fake(hosts=frozenset({"here.example"})) as server:
        answer = server.client.post(
            "/v1/completions",
            json={"model": "fake", "prompt": "a"},
            headers={"Host": host},
        )
        assert (
            server.client.get("/v1/models", headers={"Host": host}).status_code
            == answer.status_code
            == status
        )
        if status == 421:
            error = answer.json()["error"]
            assert (
                error["code"] == "unknown_host" and "evil.example" in error["message"]
            )
        assert server.client.get("/health", headers={"Host": host}).status_code == 200
