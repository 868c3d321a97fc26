"""What logs somebody in stands in no file of a run: a config that holds it is refused, and a webhook's address comes
from the environment.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

import meshtrain as mt
from meshtrain.adopt.__main__ import main as adopt
from meshtrain.config.telemetry import alert_target
from meshtrain.errors import short
from meshtrain.launch.__main__ import main as launch
from meshtrain.plan.__main__ import main as plan
from meshtrain.report.__main__ import main as report
from meshtrain.telemetry.sinks import sink
from meshtrain.train import main as train

WORD = "s3cr3tW0rd"
ALERT = {
    "rule": "loss_spike",
    "state": "firing",
    "severity": "warning",
    "sentence": "it went up.",
    "time": 0.0,
    "step": 1,
}
ALERTS = [
    f"webhook:https://me:{WORD}@example.org/x",
    f"webhook:https://{WORD}@example.org/x",
    f"webhook:https://example.org/x?token={WORD}",
    f"webhook:https://example.org/x?a=1&api_key={WORD}",
    f"webhook:https://example.org/x?key={WORD}",
    f"webhook:https://example.org/x?sig={WORD}",
    f"webhook:https://hooks.slack.com/services/T0/B0/{WORD}",
    f"webhook:https://discord.com/api/webhooks/12/{WORD}",
    f"webhook:https://team.webhook.office.com/webhookb2/{WORD}",
    f"webhook:https://mattermost.example.org/hooks/{WORD}",
    f"webhook:https://api.telegram.org/bot12:{WORD}/sendMessage",
    f"webhook:https://chat.googleapis.com/v1/spaces/{WORD}",
    f"webhook:https://example.org/{WORD}a8s7d6f5g4h3j2k1",
    f"command:curl -H 'Authorization: Bearer {WORD}' https://example.org",
    f"command:curl -u me:{WORD} https://example.org",
    f"command:notify --token {WORD}",
    f"command:notify --api-key={WORD}",
    f"command:env PASSWORD={WORD} notify",
    f"command:sh -c 'curl https://hooks.slack.com/services/T/{WORD}'",
]
PLAIN = [
    "webhook:http://127.0.0.1:9093/alert",
    "webhook:http://alertmanager:9093/api/v2/alerts",
    "webhook:https://example.org/T0/B1?x=1",
    "webhook:$ALERTS_URL",
    "command:mail -s 'a run' me@example.org",
    "command:sh -c 'curl -H \"Authorization: Bearer $TOKEN\" https://example.org'",
    "command:notify --token $T",
    "command:/opt/token-ring/notify --key-file /etc/key",
]


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alerts_place_that_holds_a_secret_is_refused_without_it(alert, capsys):
    words = [
        "--config",
        "quickstart",
        "--set",
        f"telemetry.alerts={json.dumps([alert])}",
    ]
    for main in (train, plan, lambda given: launch(["slurm", *given])):
        assert main(words) == 2
        said = capsys.readouterr()
        assert (
            "telemetry.alerts" in said.err
            and "environment" in said.err
            and WORD not in said.err + said.out
        )
        assert ("$VARIABLE" in said.err) == alert.startswith("webhook:")


@pytest.mark.parametrize("alert", PLAIN)
def test_an_alerts_place_without_one_is_taken(alert):
    assert mt.load(
        "quickstart", [f"telemetry.alerts={json.dumps([alert])}"]
    ).telemetry.alerts == (alert,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.source", "https://me:{}@example.org/text"),
        ("data.source", "s3://AKIA1234567890ABCDEF/x"),
        ("model.weights", "hf_abcdefghij0123456789abcd"),
        ("run.directory", "https://x.org/run?access_key={}"),
        ("data.tokenizer", "ghp_abcdefghij0123456789abcd"),
    ],
)
def test_any_key_that_holds_a_secret_is_refused(key, value):
    with pytest.raises(
        mt.ConfigError, match=rf"{key} holds a secret, .*environment"
    ) as refused:
        mt.load("quickstart", [f"{key}={value.format(WORD)}"])
    assert WORD not in str(refused.value) and "abcdefghij" not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        "/data/token=gpt2/text",
        "hf_models_of_mine_2024_and_more",
        "sk-learn-experiments-2024",
        "me@host:/x",
        "runs/key=3",
    ],
)
def test_a_path_that_looks_a_little_like_one_is_taken(value):
    assert mt.load("quickstart", [f"run.directory={value}"]).run.directory == value


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "hf_token",
        "wandb_api_key",
        "password",
        "aws_secret_access_key",
        "credentials",
        "auth_key",
    ],
)
@pytest.mark.parametrize("section", ["telemetry", "run", "data"])
def test_a_key_of_a_secrets_name_is_refused_with_the_way_that_there_is(
    section, name, tmp_path, capsys
):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({section: {name: WORD}}))
    for words in (
        ["--config", str(tmp_path / "x.yaml")],
        ["--config", "quickstart", "--set", f"{section}.{name}={WORD}"],
    ):
        assert train(words) == 2
        said = capsys.readouterr().err
        assert (
            f"{section}.{name}" in said and "environment" in said and WORD not in said
        )


@pytest.mark.parametrize(
    "name", ["pad_token", "eos_token", "tokens", "tokenizer_path", "sort_key"]
)
def test_another_unknown_key_is_refused_as_ever(name):
    with pytest.raises(mt.ConfigError) as refused:
        mt.load({"data": {name: "x"}})
    assert f"there is no key data.{name}" in str(
        refused.value
    ) and "environment" not in str(refused.value)


@pytest.mark.parametrize("alert", ALERTS[:11])
def test_a_sentence_on_something_else_holds_no_secret_either(alert, capsys):
    for words in (
        f"telemetry.alerts={alert}",
        f"telemetry.alert=[{alert}]",
        f"telemetry.alerts=[{alert}, {alert}]",
        f"telemetry.alerts=[x{alert}]",
    ):
        assert train(["--config", "quickstart", "--set", words]) == 2
        assert WORD not in capsys.readouterr().err, words
    with pytest.raises(mt.ConfigError) as refused:
        alert_target(alert.replace("https:", "ftp:", 1))
    assert WORD not in str(refused.value)


def test_what_holds_none_is_repeated_as_it_is():
    for text in (
        "data.tokenizer=/x/tokenizer.json",
        "optimizer.name=adam",
        "a --tokenizer b",
        "key = 3",
        "the token: x",
        "https://x.org/a?b=c",
    ):
        assert short(text) == text


@contextlib.contextmanager
def server():
    """A server that keeps the paths of what is posted to it."""
    paths = []

    class Keeps(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Keeps) as one:
        thread = threading.Thread(
            target=one.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        yield f"http://127.0.0.1:{one.server_port}/services/{WORD}", paths
        one.shutdown()
        thread.join()


def send(target, directory):
    one = sink(alert_target(target), directory)
    one.send(ALERT)
    one.close(time.monotonic() + 5)


def test_a_webhooks_address_is_read_from_its_variable_when_an_alert_is_sent(
    tmp_path, monkeypatch, capsys
):
    with server() as (url, paths):
        one = sink(alert_target("webhook:$ALERTS_URL"), tmp_path)
        assert "webhook:$ALERTS_URL" in capsys.readouterr().err  # it is not there yet
        monkeypatch.setenv("ALERTS_URL", url)
        one.send(ALERT)
        one.close(time.monotonic() + 5)
    assert paths == [f"/services/{WORD}"] and WORD not in capsys.readouterr().err


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        f"{WORD}",
        f"ftp://x.org/{WORD}",
        f"https://x.org/{WORD}\x01",
        f"https://x.org:99999/{WORD}",
        f"http://127.0.0.1:1/{WORD}",
    ],
)
def test_a_variable_that_holds_no_address_is_said_without_what_it_holds(
    value, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("ALERTS_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("ALERTS_URL", value)
    monkeypatch.setattr("meshtrain.telemetry.sinks.PAUSES", ())
    send("webhook:$ALERTS_URL", tmp_path)
    said = capsys.readouterr().err
    assert (
        "alerts are not delivered by webhook:$ALERTS_URL" in said and WORD not in said
    )


@pytest.mark.parametrize(
    "text",
    [
        "webhook:$",
        "webhook:$1",
        "webhook:$A B",
        "webhook:https://x.org/$A",
        "webhook:${A}x",
    ],
)
def test_a_variable_stands_alone(text):
    with pytest.raises(mt.ConfigError, match=r"webhook:\$VARIABLE"):
        alert_target(text)


def test_a_run_of_an_older_version_whose_config_holds_one_is_still_read(
    tmp_path, capsys
):
    run = tmp_path / "run"
    run.mkdir()
    text = mt.config.to_yaml(mt.load("quickstart", ["telemetry.alerts=[webhook:$X]"]))
    (run / "config.yaml").write_text(text.replace("webhook:$X", ALERTS[0]))
    row = {
        "step": 1,
        "loss": 5.0,
        "tokens": 10,
        "tokens_per_second": 1.0,
        "step_seconds": 1.0,
    }
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert report([str(run)]) == 0
    assert WORD not in capsys.readouterr().out
    assert report([str(run), str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert WORD not in (tmp_path / "page.html").read_text()


@pytest.mark.thorough
def test_no_file_of_a_run_holds_the_address_that_its_variable_has(tmp_path):
    root = Path(__file__).parents[2]
    with server() as (url, _):
        environment = {
            **os.environ,
            "ALERTS_URL": url,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(root),
        }
        settings = (
            "run.directory=run train.steps=2 checkpoint.every=1 "
            "telemetry.alerts=[log,file,webhook:$ALERTS_URL] telemetry.trackers=[tensorboard]"
        )
        words = [word for each in settings.split() for word in ("--set", each)]
        for command in ("train", "survive"):
            ended = subprocess.run(
                [sys.executable, "-m", "meshtrain", command, "--config", "quickstart", *words, "--set", f"run.directory={command}"],
                cwd=tmp_path, env=environment, capture_output=True, text=True,
            )  # fmt: skip
            assert ended.returncode == 0 and WORD not in ended.stdout + ended.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [
        path for path in files if WORD.encode() in path.read_bytes()
    ]
    assert "$ALERTS_URL" in (tmp_path / "train/config.yaml").read_text()


def test_a_config_of_others_is_taken_over_without_its_secrets(tmp_path, capsys):
    theirs = {
        "stage": "sft",
        "model_name_or_path": "x",
        "dataset": "a",
        "learning_rate": 1e-4,
        "cutoff_len": 128,
    }
    secrets = {
        "hf_hub_token": WORD,
        "swanlab_api_key": WORD,
        "swanlab_lark_webhook_url": f"https://x.org/{WORD}",
        "swanlab_lark_secret": WORD,
    }
    (tmp_path / "lf.yaml").write_text(yaml.safe_dump(theirs | secrets))
    assert adopt(["config", str(tmp_path / "lf.yaml")]) == 0
    said = capsys.readouterr()
    assert "hf_hub_token …" in said.out and WORD not in said.out + said.err
