"""Names of the hub where a directory is wanted: from its cache, from a server that stands in for it, and refused."""

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from refusals import tells
from tiny_models import hugging_face

from meshtrain import hub
from meshtrain.adopt.__main__ import main as adopt
from meshtrain.config import ConfigError, load
from meshtrain.generate.opened import open_model

huggingface_hub = pytest.importorskip("huggingface_hub")
NAME = "org/Tiny-Llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, which is out of reach."""
    directory = tmp_path / "hub"
    directory.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(directory))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.fixture
def tiny(cache, model):
    """The repository NAME as huggingface_hub lays it out: links into blobs."""
    root = cache / "models--org--Tiny-Llama"
    snapshot = root / "snapshots" / COMMIT
    for directory in (root / "blobs", root / "refs", snapshot):
        directory.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for path in model.iterdir():
        content = path.read_bytes()
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        os.symlink(os.path.relpath(blob, snapshot), snapshot / path.name)
    return snapshot


def test_a_name_is_org_and_name_and_nothing_that_lies_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    legal = ["org/Name", "a/b-1.5_x", "org/Name@v1.0"]
    others = [
        "runs/x",
        "Name",
        "./org/Name",
        "~/x",
        "/a/b",
        "a/b/c",
        "s3://a/b",
        "org/",
        "x.yaml",
    ]
    assert [hub.is_hub_name(name) for name in legal] == [True] * 3
    assert not any(map(hub.is_hub_name, others))
    assert hub.directory("runs/x") == Path("runs/x")


def test_a_model_in_the_cache_is_opened_trained_from_and_imported_by_its_name(
    tiny, tmp_path
):
    assert hub.directory(NAME) == tiny and hub.repository_of(tiny) == NAME
    opened = open_model(NAME)
    assert opened.name == "Tiny-Llama"
    config = load({"model": {"weights": NAME}})
    assert (
        config.model.weights == NAME
        and config.model.layers == opened.model.config.model.layers
    )
    assert adopt(["import", NAME, "imported"]) == 0
    about = json.loads((tmp_path / "imported" / "hf_config.json").read_text())
    assert about["_name_or_path"] == NAME


def test_what_cannot_be_had_is_one_sentence_with_the_command_that_fetches_it(
    cache, monkeypatch, capsys
):
    with pytest.raises(ConfigError) as error:
        load({"model": {"weights": "org/Other-8B@v2"}})
    command = "hf download org/Other-8B --revision v2 --local-dir Other-8B"
    assert tells(
        str(error.value), "no directory org/Other-8B@v2", "out of reach", command
    )
    assert adopt(["inspect", "org/Other-8B"]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "hf download org/Other-8B --local-dir Other-8B" in said
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError) as error:
        hub.directory("org/Other-8B")
    assert tells(
        str(error.value), "not installed: pip install -e '.[hub]'", "hf download"
    )


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    model: Path

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def log_message(self, *_):
        pass

    def _answer(self, with_body):
        path = self.path.partition("?")[0]
        files = {p.name: p for p in self.model.iterdir()}
        files["pytorch_model.bin"] = self.model / "config.json"
        if f"/{NAME}" not in path:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        if path.startswith("/api/models/") and "/tree/" in path:
            entries = [
                {"type": "file", "path": n, "oid": "0" * 40, "size": p.stat().st_size}
                for n, p in files.items()
            ]
            return self._send(200, json.dumps(entries).encode(), {}, with_body)
        if path.startswith("/api/models/"):
            about = {
                "id": NAME,
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in files],
            }
            return self._send(200, json.dumps(about).encode(), {}, with_body)
        content = files[path.rpartition("/")[2]].read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
        }
        return self._send(200, content, headers, with_body)

    def _send(self, status, content, headers, with_body):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


@pytest.fixture
def server(cache, model, monkeypatch):
    Hub.model = model
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template
    )
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    yield url
    server.shutdown()


def test_a_model_is_fetched_once_and_its_pickles_are_not(server, cache):
    directory = hub.directory(NAME, "config.json")
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    directory = hub.directory(NAME)
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert any(name.endswith(".safetensors") for name in names)
    assert "pytorch_model.bin" not in names
    assert open_model(NAME).name == "Tiny-Llama"


def test_a_repository_that_the_hub_does_not_show_is_told_so(server):
    with pytest.raises(ConfigError) as error:
        hub.directory("org/Hidden")
    assert tells(
        str(error.value), "404", "HF_TOKEN", "hf download org/Hidden --local-dir Hidden"
    )


# --- what goes there


@pytest.fixture
def exported(cache, model, tmp_path):
    assert adopt(["import", str(model), "run"]) == 0
    assert adopt(["export", "run", "mine"]) == 0
    return tmp_path / "mine"


def test_an_export_has_a_card_with_the_fields_that_the_hub_reads(exported, model):
    text = (exported / "README.md").read_text()
    _, fields, body = text.split("---\n", 2)
    fields = yaml.safe_load(fields)
    assert fields["library_name"] == "transformers"
    assert fields["pipeline_tag"] == "text-generation" and "llama" in fields["tags"]
    assert "base_model" not in fields
    assert body.startswith("\n# mine\n") and "parameters in float32" in body
    # no path of this machine
    assert str(model.parent) not in text and "Training" not in text


class Api:
    """HfApi, as far as a push goes. `refuses`: what it raises."""

    calls: ClassVar[list[tuple]] = []
    refuses: Exception | None = None

    def create_repo(self, name, private, exist_ok):
        if self.refuses:
            raise self.refuses
        self.calls.append(("create_repo", name, private, exist_ok))
        return f"https://hub/{name}"

    def upload_folder(self, repo_id, folder_path, commit_message):
        names = {path.name for path in Path(folder_path).iterdir()}
        self.calls.append(("upload_folder", repo_id, names))


def test_push_makes_the_repository_and_uploads_the_directory(
    exported, monkeypatch, capsys
):
    monkeypatch.setattr(Api, "calls", [])
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    capsys.readouterr()
    assert adopt(["push", str(exported), "me/mine", "--private"]) == 0
    assert capsys.readouterr().out == "https://hub/me/mine\n"
    made, uploaded = Api.calls
    assert made == ("create_repo", "me/mine", True, True)
    assert {"README.md", "config.json"} <= uploaded[2]


def test_what_cannot_be_pushed_is_one_sentence(exported, monkeypatch, capsys):
    def refused(*words):
        assert adopt(["push", *words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    capsys.readouterr()
    assert tells(refused("run", "me/mine"), "nothing to push", "config.json")
    assert tells(refused(str(exported), "mine"), "write ORG/NAME")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(Api, "refuses", ConnectionError("the network is down"))
    assert tells(refused(str(exported), "me/mine"), "network is down", "HF_TOKEN")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert tells(refused(str(exported), "me/mine"), "not installed", "[hub]")
