"""Several models behind one server: each request is answered by its own, none is cut off, and no more are loaded than
may be.
"""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from fake_decoding import continuation, fake_opened, faked, letters
from fake_serving import Pace, on_a_port, until
from starlette.testclient import TestClient
from tiny_models import hugging_face

from meshtrain import cli
from meshtrain.config import ConfigError
from meshtrain.generate.engine import Engine
from meshtrain.serve.__main__ import main
from meshtrain.serve.app import application
from meshtrain.serve.cache import AnswerCache
from meshtrain.serve.listening import separate, served_model, several_models
from meshtrain.serve.models import Models, NamedModel, ServedModel
from meshtrain.serve.service import Service


def chooses(name):
    """A model whose tokens no other has."""
    return lambda history, how: letters((ord(name), *history), how)


class Several:
    """A server of models that a test may hold up, by name. `loads`: what was loaded, in order."""

    def __init__(self, names="abc", resident=1, queue=8, **settings):
        self.paces = {name: Pace() for name in names}
        self.resident, self.loads, self.engines, self.problems = resident, [], [], {}
        self.loading = threading.Event()
        self.loading.set()
        models = [
            NamedModel(name, lambda name=name: self._load(name)) for name in names
        ]
        for model in models[:resident]:
            model.served = model.load()
        self.models = Models(models, resident, queue)
        self.service = Service(", ".join(names), queue, models=self.models, **settings)

    def _load(self, name):
        self.loading.wait(20)
        if problem := self.problems.get(name):
            raise problem
        assert (
            sum(not engine._decoding.freed for engine in self.engines) < self.resident
        )
        self.loads.append(name)
        decoding = faked(choose=chooses(name), fails=self.paces[name])
        self.engines.append(
            Engine(fake_opened(), 2, waiting=8, decoding=decoding).start()
        )
        return ServedModel(name, self.engines[-1])

    @contextlib.contextmanager
    def running(self):
        with on_a_port(self.service) as (self.address, _):
            try:
                yield self
            finally:
                self.loading.set()
                for pace in self.paces.values():
                    pace.go()
        for served in self.service.loaded:
            served.close()

    def get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=20) as answer:
            return answer.read().decode()

    def ask(self, model, prompt="abc", timeout=30, **fields):
        """The HTTP status and the text, or the error's code."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0,
            **fields,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.address}/v1/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    def later(self, *asked, **fields):
        found = []
        thread = threading.Thread(
            target=lambda: found.append(self.ask(*asked, **fields)), daemon=True
        )
        thread.start()
        return lambda: (thread.join(30), found[0])[1]

    def waits_for(self, name):
        until(lambda: self.models.by_name[name].coming is not None)


def right(model, prompt="abc", most=6):
    return 200, bytes(
        continuation(prompt.encode(), most, choose=chooses(model))
    ).decode()


@pytest.mark.parametrize("resident", [1, 2])
def test_interleaved_requests_get_what_servers_of_one_model_say(resident):
    with (
        Several(resident=resident, queue=64).running() as server,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [("abc"[7 * k // 3 % 3], f"prompt {k % 5}") for k in range(48)]
        answers = list(pool.map(lambda one: server.ask(*one), asked))
        assert answers == [right(*one) for one in asked]
        assert len(server.loads) > resident and len(server.service.loaded) <= resident
        loaded = {served.engine for served in server.service.loaded}
        assert all(
            engine._decoding.freed == (engine not in loaded)
            for engine in server.engines
        )
        assert all(not model.users for model in server.models.by_name.values())


def test_what_runs_is_never_cut_and_who_came_first_is_first():
    with Several().running() as server:
        server.paces["a"].hold()
        first = [server.later("a", stream=False), server.later("a", "xyz")]
        until(lambda: len(server.service.running) == 2)
        other = server.later("b")
        until(lambda: server.models.by_name["a"].leaving)
        behind = server.later("a", "late")
        time.sleep(0.05)
        assert server.loads == ["a"] and len(server.service.running) == 2
        server.paces["a"].go()
        assert [answer() for answer in first] == [right("a"), right("a", "xyz")]
        assert other() == right("b") and behind() == right("a", "late")
        assert server.loads == ["a", "b", "a"]


def test_nobody_waits_for_ever_behind_a_model_that_is_always_asked():
    with Several(queue=64).running() as server, ThreadPoolExecutor(4) as pool:
        server.paces["a"].seconds = 0.005
        ended = threading.Event()

        def keep_asking(_):
            while not ended.is_set():
                assert server.ask("a") == right("a")

        busy = [pool.submit(keep_asking, k) for k in range(4)]
        until(lambda: server.service.running)
        assert [server.ask("b") for _ in range(3)] == [right("b")] * 3
        ended.set()
        assert [one.result(20) for one in busy] == [None] * 4


def test_the_one_used_least_lately_goes():
    with Several(resident=2).running() as server:
        server.ask("b")
        server.ask("a")
        server.ask("c")
        assert [served.name for served in server.service.loaded] == ["a", "c"]
        server.ask("a")
        server.ask("b")
        assert [served.name for served in server.service.loaded] == [
            "a",
            "b",
        ] and server.loads == [
            "a",
            "b",
            "c",
            "b",
        ]


def test_one_that_is_idle_goes_before_one_that_answers():
    with Several(resident=2).running() as server:
        server.paces["a"].hold()
        answer = server.later("a")
        until(lambda: server.service.running)
        server.ask("b")
        assert server.ask("c") == right("c") and server.loads == ["a", "b", "c"]
        server.paces["a"].go()
        assert answer() == right("a")


@pytest.mark.parametrize(
    "problem",
    [
        ConfigError("there is no checkpoint in runs/b."),
        RuntimeError("RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_a_model_that_no_longer_loads_is_a_sentence_and_the_others_are_answered(
    problem, capsys
):
    with Several().running() as server:
        server.problems["b"] = problem
        status, error = server.ask("b")
        assert (status, error["code"]) == (503, "not_loaded")
        assert (
            error["message"]
            == f"the model b cannot be loaded: {str(problem).rstrip('.')}."
        )
        assert (
            server.ask("a") == right("a")
            and json.loads(server.get("/health"))["status"] == "ready"
        )
        server.problems.clear()
        assert server.ask("b") == right("b")
        assert "Traceback" not in capsys.readouterr().err


def test_who_goes_away_while_a_model_is_loaded_takes_it_from_nobody():
    with Several(request_timeout=0.3).running() as server:
        server.loading.clear()
        assert server.ask("b")[1]["code"] == "timeout"
        server.service.request_timeout = 30.0
        others = [server.later("b") for _ in range(2)]
        server.waits_for("b")
        server.loading.set()
        assert [answer() for answer in others] == [right("b")] * 2 and server.loads == [
            "a",
            "b",
        ]
        until(lambda: not server.models.by_name["b"].users)
        assert server.ask("a") == right("a")


def test_more_than_may_wait_for_a_model_are_429():
    with Several(queue=2).running() as server:
        server.loading.clear()
        waiting = [server.later("b"), server.later("c")]
        until(lambda: server.models._waiting == 2)
        status, error = server.ask("b")
        assert (status, error["code"]) == (429, "queue_full")
        server.loading.set()
        assert [answer() for answer in waiting] == [right("b"), right("c")]


def test_all_models_are_listed_and_none_else_is_known():
    with Several().running() as server:
        listed = json.loads(server.get("/v1/models"))["data"]
        assert [model["id"] for model in listed] == ["a", "b", "c"]
        assert [model.get("max_model_len") for model in listed] == [64, None, None]
        assert json.loads(server.get("/v1/models/b"))["id"] == "b"
        status, error = server.ask("d")
        assert (
            status == 404
            and error["code"] == "model_not_found"
            and server.loads == ["a"]
        )
        assert json.loads(server.get("/health"))["loaded"] == ["a"]


def test_metrics_are_by_model_and_counts_do_not_fall_when_it_is_set_aside():
    parser = pytest.importorskip("prometheus_client.parser")
    with Several().running() as server:
        for model in "aabab":
            server.ask(model)
        server.ask("d")
        found = {}
        for family in parser.text_string_to_metric_families(server.get("/metrics")):
            for sample in family.samples:
                found[
                    sample.name.removeprefix("meshtrain_serve_"),
                    sample.labels.get("model"),
                    sample.labels.get("code"),
                ] = sample.value
        by_model = lambda name: [found[name, model, None] for model in "abc"]
        assert by_model("tokens_total") == [18, 12, 0] and by_model(
            "prompt_tokens_total"
        ) == [
            9,
            6,
            0,
        ]
        assert by_model("loaded") == [0, 1, 0] and by_model("slots") == [0, 2, 0]
        assert by_model("first_token_seconds_count") == [3, 2, 0]
        assert [found["requests_total", model, "200"] for model in "ab"] == [3, 2]
        assert (
            found["requests_total", None, "404"] == 1
            and found["ready", None, None] == 1
        )


def test_answers_that_are_kept_are_of_one_model_and_one_loading():
    with Several(cache=AnswerCache(1 << 20)).running() as server:
        assert [server.ask(model) for model in "aab"] == [
            right(model) for model in "aab"
        ]
        assert server.service.cache.hits == 1
        assert server.ask("a") == right("a")
        assert server.service.cache.hits == 1


def test_what_does_not_fit_several_models_is_a_sentence(capsys, tmp_path):
    assert main(["x", "y", "--name", "one"]) == cli.USAGE
    assert "--name is given 1 times for 2 models" in capsys.readouterr().err
    assert main(["x", "y", "--adapter", "z"]) == cli.USAGE
    assert "--adapter" in capsys.readouterr().err
    assert (
        main([str(tmp_path / "a/same"), str(tmp_path / "b/same"), "--port", "0"])
        == cli.USAGE
    )
    assert "two models are called same" in capsys.readouterr().err


@pytest.mark.thorough
def test_two_real_models_of_which_one_is_loaded_say_what_each_says_alone(tmp_path):
    paths = [hugging_face(tmp_path / "one"), hugging_face(tmp_path / "two", "qwen3")]
    options = Namespace(
        path=paths[0],
        others=paths[1:],
        name=None,
        mesh=None,
        precision=None,
        step="newest",
        adapter=None,
        slots=2,
        length=40,
        queue=4,
        weights=None,
    )
    bodies = [
        {
            "prompt": [7, 8, 9],
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
        }
    ]
    bodies.append(
        {
            "prompt": [9, 3],
            "max_tokens": 6,
            "temperature": 1,
            "seed": 4,
            "ignore_eos": True,
        }
    )

    def said(client, model):
        return [
            client.post("/v1/completions", json={"model": model, **body}).json()[
                "choices"
            ]
            for body in bodies
        ]

    alone = {}
    for one in separate(options):
        served = served_model(one)
        alone[served.name] = said(
            TestClient(application(Service(served.name, 4, served=served))), served.name
        )
        served.close()
    before = sum(x.nbytes for x in jax.live_arrays())
    models = several_models(separate(options), 1, 4)
    service = Service("both", 4, models=models)
    with TestClient(application(service)) as client:
        for model in ("one", "two", "one", "two"):
            assert said(client, model) == alone[model]
        (served,) = service.loaded
        weights = sum(
            x.nbytes for x in jax.tree.leaves(served.engine._decoding.weights)
        )
        cache = sum(x.nbytes for x in jax.tree.leaves(served.engine._state))
        assert served.engine.status.compiled == 0, "loaded again, it has its programs"
        assert (
            sum(x.nbytes for x in jax.live_arrays()) <= before + (weights + cache) * 1.2
        ), "one is freed"
        served.close()
    assert sum(x.nbytes for x in jax.live_arrays()) <= before + 1000
