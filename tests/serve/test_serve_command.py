"""The command: what it refuses at once, what it says when it starts, and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from meshtrain import cli
from meshtrain.serve.__main__ import main
from meshtrain.serve.listening import listening

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--port 8000", "the following arguments are required: RUN"),
        ("runs/x --prot 8000", "there is no option --prot; did you mean --port?"),
        ("runs/x --port 65536", "argument --port: '65536' is no port; ports are 0 to 65535"),
        ("runs/x --slots 0", "argument --slots: '0' is not a whole number of at least 1"),
        ("runs/x --drain nan", "argument --drain: 'nan' is no number of seconds"),
        ("runs/x --step last", "argument --step: 'last' is no step; it must be a number, best or newest"),
    ],
)
def test_wrong_usage_is_a_sentence(words, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == cli.USAGE and says in capsys.readouterr().err


def test_what_does_not_fit_together_is_refused_at_once(capsys, monkeypatch):
    assert main(["runs/x", "--cache-seconds", "5"]) == cli.USAGE
    assert "no answer is kept without --cache" in capsys.readouterr().err
    assert main(["runs/x", "--key-env", "MY_KEY"]) == cli.USAGE
    assert "--key-env names MY_KEY, but the environment has no such variable" in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", "two words")
    assert main(["runs/x", "--key-env", "MY_KEY"]) == cli.USAGE
    said = capsys.readouterr().err
    assert "the key in MY_KEY must be of printable ASCII" in said and "two words" not in said


def test_a_port_that_is_taken_ends_it_with_a_sentence(capsys):
    with listening("127.0.0.1", 0) as taken:
        assert main(["runs/x", "--port", str(taken.getsockname()[1])]) == cli.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be listened on: address already in use" in line


def test_a_model_that_cannot_be_loaded_ends_it_with_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "nothing"), "--port", "0", "--host", "0.0.0.0"]) == cli.USAGE
    address, warning, sentence = capsys.readouterr().err.splitlines()
    assert re.search(r"nothing at http://0\.0\.0\.0:\d+/v1, as soon as it is loaded\.$", address)
    assert re.match(r"meshtrain: warning: whoever reaches .* may use it; give it a key", warning)
    assert "there is no directory" in sentence and sentence.startswith("meshtrain: ")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run directory of a tiny model of bytes."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "text.txt").write_text("to be or not to be\n" * 200)
    config = {
        "run": {"directory": str(directory / "tiny")}, "data": {"source": str(directory / "text.txt")},
        "model": {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 260}, "checkpoint": {"every": 1},
        "train": {"steps": 1, "global_batch_size": 2, "sequence_length": 32}, "optimizer": {"warmup_steps": 1},
    }  # fmt: skip
    (directory / "tiny.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "meshtrain.train", "--config", str(directory / "tiny.yaml")]
    subprocess.run(
        command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, timeout=120
    )
    return directory / "tiny"


@pytest.mark.thorough
def test_a_process_says_where_it_is_answers_and_ends_on_signals(run):
    key = {"MESHTRAIN_API_KEY": "s3cret"}
    command = [sys.executable, "-m", "meshtrain.serve", str(run), "--port", "0", "--slots", "2", "--notice", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **key}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None and process.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())[0]
            assert urllib.request.urlopen(f"{address}/metrics", timeout=20).status == 200, "while it loads"
            assert re.match(r"meshtrain: tiny is ready after [\d.]+ s\.$", process.stderr.readline())
            body = json.dumps({"model": "tiny", "prompt": "to be", "max_tokens": 5, "temperature": 0}).encode()
            headers = {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}
            with urllib.request.urlopen(
                urllib.request.Request(f"{address}/v1/completions", body, headers), timeout=60
            ) as answer:
                assert json.load(answer)["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
            process.send_signal(signal.SIGTERM)
            out, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (cli.DONE, "")
    assert said == "meshtrain: ending: 0 requests to finish; a second signal ends at once.\n"


@pytest.mark.thorough
def test_a_second_signal_ends_it_at_once_and_one_while_it_loads_too(run):
    for signals, code in ((2, cli.STOPPED), (1, cli.DONE)):
        command = [sys.executable, "-m", "meshtrain.serve", str(run), "--port", "0", "--notice", "60"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                process.stderr.readline()
                if signals == 2:
                    assert "is ready" in process.stderr.readline()
                else:
                    time.sleep(0.3)
                for _ in range(signals):
                    process.send_signal(signal.SIGTERM)
                    time.sleep(1)
                assert process.wait(20) == code
            finally:
                process.kill()
