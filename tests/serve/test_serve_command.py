"""The command: what it refuses at once, what it says when it starts, and its exit codes."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from serving_processes import serving
from tiny_models import hugging_face

from meshtrain import cli
from meshtrain.serve.__main__ import main
from meshtrain.serve.listening import listening


def test_what_does_not_fit_together_is_refused_at_once(capsys, monkeypatch):
    assert main(["runs/x", "--key-env", "MY_KEY"]) == cli.USAGE
    assert re.search("--key-env names MY_KEY, .*environment", capsys.readouterr().err)
    monkeypatch.setenv("MY_KEY", "two words")
    assert main(["runs/x", "--key-env", "MY_KEY"]) == cli.USAGE
    said = capsys.readouterr().err
    assert "MY_KEY must be of printable ASCII" in said and "two words" not in said


def test_a_port_that_is_taken_ends_it_with_a_sentence(capsys):
    with listening("127.0.0.1", 0) as taken:
        assert main(["runs/x", "--port", str(taken.getsockname()[1])]) == cli.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "address already in use" in line


def test_the_port_is_open_before_jax_is_imported():
    program = "import sys, meshtrain.serve.listening; print({'jax', 'jaxlib', 'flax', 'orbax'} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True
        ).stdout
        == "set()\n"
    )


def test_a_model_that_cannot_be_loaded_ends_it_with_a_sentence(tmp_path, capsys):
    assert (
        main([str(tmp_path / "nothing"), "--port", "0", "--host", "0.0.0.0"])
        == cli.USAGE
    )
    address, warning, sentence = capsys.readouterr().err.splitlines()
    assert re.search(r"nothing at http://0\.0\.0\.0:\d+/v1, as soon", address)
    assert re.match(r"meshtrain: warning: .*0\.0\.0\.0.* a key", warning)
    assert "there is no directory" in sentence and sentence.startswith("meshtrain: ")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.thorough
def test_a_process_says_where_it_is_answers_and_ends_on_a_signal(model):
    words = [
        "-m",
        "meshtrain.serve",
        str(model),
        "--port",
        "0",
        "--slots",
        "2",
        "--notice",
        "0",
    ]
    with serving(words, {"MESHTRAIN_API_KEY": "s3cret"}) as (process, address):
        assert urllib.request.urlopen(f"{address}/metrics", timeout=20).status == 200, (
            "while it loads"
        )
        while "compiled" in (line := process.stderr.readline()):
            pass
        assert re.match(r"meshtrain: tiny is ready after [\d.]+ s\.$", line)
        body = json.dumps(
            {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 5, "ignore_eos": True}
        ).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}
        request = urllib.request.Request(f"{address}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 5,
                "total_tokens": 8,
            }
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(30) == cli.DONE
    assert (
        said
        == "meshtrain: ending: 0 requests to finish; a second signal ends at once.\n"
    )


@pytest.mark.thorough
def test_a_signal_while_it_loads_ends_it(model):
    with serving(
        ["-m", "meshtrain.serve", str(model), "--port", "0", "--notice", "60"]
    ) as (
        process,
        address,
    ):
        urllib.request.urlopen(f"{address}/metrics", timeout=20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == cli.DONE
