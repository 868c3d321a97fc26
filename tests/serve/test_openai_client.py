"""A server driven by OpenAI's own client: answers, streams, errors, disconnects, many at once, and no growth of
memory.
"""

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import psutil
import pytest
from fake_serving import until
from serving_processes import serving
from tiny_models import hugging_face

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("openai") is None, reason="there is no openai"),
]
KEY = "s3cret"
MEMORY = 1 << 20  # bytes that a process may come to hold over hundreds of requests


def client(address, key=KEY, **settings):
    import openai  # takes a second, of every process that collects the tests

    return openai.OpenAI(
        base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60, **settings
    )


def metric(address, name):
    page = urllib.request.urlopen(f"{address}/metrics", timeout=20).read().decode()
    return next(
        float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith(f"meshtrain_serve_{name} ")
    )


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The address of a server of a small model."""
    model = hugging_face(tmp_path_factory.mktemp("models") / "tiny")
    words = [
        "-m",
        "meshtrain.serve",
        str(model),
        "--port",
        "0",
        "--slots",
        "8",
        "--length",
        "64",
        "--queue",
        "256",
    ]
    with serving(words, {"MESHTRAIN_API_KEY": KEY}) as (process, address):
        line = process.stderr.readline()
        while line.startswith("meshtrain: compiled"):  # which it says on a slow machine
            line = process.stderr.readline()
        assert line.startswith("meshtrain: tiny is ready after"), line
        yield address


@pytest.fixture(scope="module")
def faked():
    """A server of a model without a device, whose steps take a millisecond."""
    with serving(["-m", "fake_serving"]) as found:
        yield found


def test_models_completions_and_conversations(real):
    api = client(real)
    assert [model.id for model in api.models.list()] == [
        "tiny"
    ] and api.models.retrieve("tiny").object == "model"
    answer = api.completions.create(
        model="tiny", prompt="to be", max_tokens=6, temperature=0, logprobs=2
    )
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.tokens) <= 6
    said = api.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=6,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=3,
    )
    assert [choice.message.role for choice in said.choices] == ["assistant"] * 2
    assert (
        said.usage.total_tokens
        == said.usage.prompt_tokens + said.usage.completion_tokens
    )
    assert all(
        len(token.top_logprobs) == 3 for token in said.choices[0].logprobs.content
    )


def test_a_stream_is_the_whole_answer_and_ends_on_what_it_took(real):
    api = client(real)
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = api.chat.completions.create(**asked)
    chunks = list(
        api.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert (
        chunks[0].choices[0].delta.role == "assistant"
        and chunks[-1].usage == whole.usage
    )
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    )
    assert text == whole.choices[0].message.content
    ends = [
        c.choices[0].finish_reason
        for c in chunks
        if c.choices and c.choices[0].finish_reason
    ]
    assert ends == [whole.choices[0].finish_reason]
    streamed = api.completions.create(
        model="tiny", prompt="to be", max_tokens=9, temperature=0, stream=True
    )
    alone = api.completions.create(
        model="tiny", prompt="to be", max_tokens=9, temperature=0
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == alone.choices[0].text


def test_errors_are_the_clients_own_kinds(real):
    import openai

    with pytest.raises(openai.AuthenticationError, match="a key is needed"):
        client(real, "wrong").models.list()
    api = client(real)
    with pytest.raises(openai.NotFoundError, match="tini; did you mean tiny"):
        api.completions.create(model="tini", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model="tiny", prompt=[7] * 64)
    assert (refused.value.code, refused.value.param) == (
        "context_length_exceeded",
        "prompt",
    )
    with pytest.raises(openai.BadRequestError, match="not built here"):
        api.completions.create(model="tiny", prompt="a", suffix="b")


def test_200_requests_with_8_at_once_get_what_each_gets_alone(real):
    api = client(real)

    def ask(k):
        how = {
            "temperature": k % 2,
            "seed": k % 50,
            "extra_body": {"ignore_eos": True, "top_k": 20},
        }
        answer = api.completions.create(
            model="tiny", prompt=[7 + k % 25, 9], max_tokens=8, **how
        )
        assert answer.usage.completion_tokens == 8
        return answer.choices[0].text

    alone = [ask(k) for k in range(50)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(200))) == alone * 4
    assert metric(real, "busy_slots") == metric(real, "waiting") == 0


def test_a_thousand_requests_leave_no_memory_behind(faked):
    process, address = faked
    memory = psutil.Process(process.pid).memory_info
    api = client(address)

    def ask(k):
        fields = {
            "model": "fake",
            "prompt": f"prompt {k}",
            "max_tokens": 20,
            "logprobs": 3,
        }
        if k % 3 == 0:
            list(api.completions.create(**fields, stream=True))
        elif k % 3 == 1:
            api.completions.create(**fields)
        else:
            # every third goes away
            with api.completions.create(
                **fields | {"max_tokens": 500}, stream=True
            ) as stream:
                next(iter(stream))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(500)))
        before = memory().rss
        list(pool.map(ask, range(500, 1500)))
    until(
        lambda: metric(address, "busy_slots") == metric(address, "open_requests") == 0
    )
    grown = memory().rss - before
    print(f"{grown / 1e6:.2f} MB over 1,000 requests, of {before / 1e6:.0f} MB")
    assert grown < MEMORY, f"{grown / 1e6:.1f} MB"
