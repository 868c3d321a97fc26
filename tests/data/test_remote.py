"""Text and prepared shards in a store are those of a directory, whatever the store does meanwhile."""

import gzip
import json

import numpy as np
import pytest

from meshtrain import stores
from meshtrain.config import load
from meshtrain.data import from_config
from meshtrain.data.input_files import find
from meshtrain.data.prepare import prepare
from meshtrain.data.shards import descriptor
from meshtrain.data.unit import PrepareOptions
from meshtrain.errors import ConfigError

pytest.importorskip("s3fs", reason="needs the extra remote")
pytest.importorskip("moto", reason="needs moto's server")

from store_server import BUCKET, StoreServer, impatient, store_server

ROOT = f"s3://{BUCKET}/data"


@pytest.fixture(scope="module")
def server():
    stores.forget()
    with store_server() as server:
        yield server


@pytest.fixture(autouse=True)
def impatience(monkeypatch, server: StoreServer, tmp_path):
    monkeypatch.setattr("meshtrain.data.remote.BLOCK", 4096)
    descriptor.cache_clear()
    with impatient(monkeypatch, server, tmp_path / "cache", ROOT):
        yield


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("the first document\n" * 500)
    (folder / "deep" / "b.py").write_text("print(1)\n" * 900)
    (folder / "c.jsonl.gz").write_bytes(
        gzip.compress(
            b"".join(
                json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(99)
            )
        )
    )
    (folder / "photo.png").write_bytes(b"no text")
    return folder


def put(folder, address=ROOT):
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            stores.upload(path, f"{address}/{path.relative_to(folder)}")


def test_text_of_a_store_makes_the_shards_that_a_folder_makes(server, text, tmp_path):
    put(text)
    server.fail(1, "busy", "GET", "b.py")
    here = find([str(text)])
    there = find([ROOT])
    assert [f.name for f in there.files] == [f.name for f in here.files]
    assert there.ignored == here.ignored
    options = PrepareOptions(validation=0.2)
    local = prepare(here.files, tmp_path / "local", options)
    remote = prepare(there.files, tmp_path / "remote", options, workers=2)
    assert remote == local
    assert not remote.skipped


def test_text_that_cannot_be_read_now_is_not_left_out(server, text, tmp_path):
    put(text)
    files = find([ROOT]).files
    server.fail(1000, "busy", "GET", "b.py")
    with pytest.raises(Exception, match=r"b\.py cannot be read now"):
        prepare(files, tmp_path / "remote", PrepareOptions())


def shards(text, tmp_path):
    prepare(
        find([str(text)]).files, tmp_path / "shards", PrepareOptions(validation=0.2)
    )
    put(tmp_path / "shards", f"{ROOT}/shards")
    return tmp_path / "shards", f"{ROOT}/shards"


def opened(source, **data):
    config = load({
        "data": {"source": str(source), **data},
        "train": {"sequence_length": 32, "global_batch_size": 2, "steps": 1},
        "model": {"vocab_size": 512},
    })  # fmt: skip
    return from_config.open_data(config)[0]


@pytest.mark.parametrize("verify", [False, True])
def test_shards_in_a_store_give_the_batches_of_local_ones(
    server, text, tmp_path, verify
):
    here, there = shards(text, tmp_path)
    local = opened(here)
    server.asked.clear()
    remote = opened(there, verify=verify)
    assert remote.digest == local.digest
    tokens = lambda: [p for _, p in server.asked if p.endswith(".tokens")]
    assert bool(tokens()) == verify
    for step in range(12):
        a, b = local.batch(step), remote.batch(step)
        assert all(np.array_equal(a[name], b[name]) for name in a)
    server.asked.clear()
    again = opened(there, verify=verify)
    for step in range(12):
        again.batch(step)
    assert not tokens()


def test_a_shard_that_is_not_as_prepared_is_refused(server, text, tmp_path):
    here, there = shards(text, tmp_path)
    name = next(here.glob("train*.tokens")).name
    whole = (here / name).read_bytes()
    stores.write(f"{there}/{name}", b"\1" + whole[1:])
    with pytest.raises(ConfigError, match="digest is not the manifest's"):
        opened(there)
    stores.write(f"{there}/{name}", whole)
    opened(there)
    kept = next(
        p for p in stores.cache().iterdir() if p.is_file() and p.read_bytes() == whole
    )
    kept.write_bytes(b"\1" + whole[1:])  # a copy that has gone bad is fetched again
    opened(there)
    assert kept.read_bytes() == whole
    stores.write(f"{there}/{name}", whole[:-1])
    with pytest.raises(ConfigError, match=f"{name} has .* bytes instead of"):
        opened(there)


def test_more_shards_than_the_cache_may_hold_are_refused(server, text, tmp_path):
    _, there = shards(text, tmp_path)
    with pytest.raises(ConfigError, match=r"data\.cache_gib is 1e-06; give more"):
        opened(there, cache_gib=1e-6)


def test_an_address_with_nothing_is_a_sentence(server):
    with pytest.raises(ConfigError, match="there is no object under s3://bucket/none"):
        opened("s3://bucket/none")


def test_weights_are_taken_from_a_store(server, tmp_path):
    from tiny_models import hugging_face

    put(hugging_face(tmp_path / "model"), f"{ROOT}/model")
    here = load({"model": {"weights": str(tmp_path / "model")}})
    there = load({"model": {"weights": f"{ROOT}/model"}})
    assert (there.model.layers, there.model.d_model) == (
        here.model.layers,
        here.model.d_model,
    )
    with pytest.raises(ConfigError, match="there is nothing under s3://bucket/none"):
        load({"model": {"weights": "s3://bucket/none"}})
