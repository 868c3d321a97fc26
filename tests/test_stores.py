"""Requests to a store, against a real server: bounded whole, tried again, one sentence at the end."""

import time

import pytest

from meshtrain import stores
from meshtrain.errors import ConfigError
from meshtrain.files import RequestRefused

pytest.importorskip("s3fs", reason="needs the extra remote")
pytest.importorskip("moto", reason="needs moto's server")

from store_server import BUCKET, StoreServer, impatient, store_server

ROOT = f"s3://{BUCKET}/things"


@pytest.fixture(scope="module")
def server():
    stores.forget()
    with store_server() as server:
        yield server


@pytest.fixture(autouse=True)
def impatience(monkeypatch, server: StoreServer, tmp_path):
    with impatient(monkeypatch, server, tmp_path / "cache", ROOT):
        yield
        monkeypatch.undo()


def test_what_is_written_is_read_in_whole_and_by_ranges_and_listed():
    stores.write(f"{ROOT}/a/b", bytes(range(100)))
    assert stores.read(f"{ROOT}/a/b") == bytes(range(100))
    assert stores.read(f"{ROOT}/a/b", 10, 5) == bytes(range(10, 15))
    entry = stores.listing(ROOT)["a/b"]
    assert entry.size == 100 and entry.etag and abs(entry.modified / 1e9 - time.time()) < 100
    assert stores.status(f"{ROOT}/a/b") == entry
    assert stores.listing(f"{ROOT}/none") == {}
    stores.remove([f"{ROOT}/a/b", f"{ROOT}/never-there"])
    assert stores.listing(ROOT) == {}


def test_an_object_is_made_once():
    assert stores.write_new(f"{ROOT}/mine", b"1")
    assert stores.write_new(f"{ROOT}/mine", b"1")  # an answer was lost
    assert not stores.write_new(f"{ROOT}/mine", b"2")
    assert stores.read(f"{ROOT}/mine") == b"1"


@pytest.mark.parametrize("fault", ["busy", "cut", "hang", "expired"])
def test_a_fault_that_passes_is_nobodys_business(server: StoreServer, fault):
    stores.write(f"{ROOT}/a", b"x" * 1000)
    server.fail(1, fault)
    assert stores.read(f"{ROOT}/a", 0, 1000) == b"x" * 1000


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("busy", "reduce your request rate"),
        ("expired", "the provided token has expired"),
        ("slow", "no whole answer within 3 s"),
        ("cut", "cut short|closed|payload|not enough data"),
    ],
)
def test_a_fault_that_stays_is_refused_in_bounded_time(server: StoreServer, fault, reason):
    stores.write(f"{ROOT}/a", b"x" * 1000)
    server.fail(1000, fault)
    began = time.monotonic()
    with pytest.raises(RequestRefused) as refused:
        stores.read(f"{ROOT}/a", 0, 1000)
    assert time.monotonic() - began < 20
    assert refused.value.filename == f"{ROOT}/a"
    import re

    assert re.search(reason, refused.value.strerror.lower()), refused.value


def test_a_file_is_uploaded_again_where_it_did_not_come_whole(server: StoreServer, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    server.fail(1, "busy", "PUT")
    stores.upload(path, f"{ROOT}/file")
    assert stores.read(f"{ROOT}/file") == path.read_bytes()


def test_a_copy_is_fetched_once_and_again_when_it_has_changed(server: StoreServer):
    stores.write(f"{ROOT}/config.json", b"{}")
    stores.write(f"{ROOT}/sub/weights", bytes(1000))
    copy = stores.local_copy(ROOT)
    assert (copy / "config.json").read_bytes() == b"{}"
    assert (copy / "sub" / "weights").read_bytes() == bytes(1000)
    server.asked.clear()
    assert stores.local_copy(ROOT) == copy
    assert not [path for _, path in server.asked if "weights" in path]
    stores.write(f"{ROOT}/config.json", b"[]")
    assert (stores.local_copy(ROOT) / "config.json").read_bytes() == b"[]"


def test_the_cache_stays_within_its_limit():
    stores.write(f"{ROOT}/one/a", bytes(2 << 20))
    stores.write(f"{ROOT}/two/a", bytes(2 << 20))
    first = stores.local_copy(f"{ROOT}/one", limit=3 / 1024)
    second = stores.local_copy(f"{ROOT}/two", limit=3 / 1024)
    assert second.is_dir() and not first.is_dir()
    with pytest.raises(ConfigError, match=r"but data.cache_gib is 0.001; give more"):
        stores.local_copy(f"{ROOT}/one", limit=0.001)


def test_a_store_that_is_none_and_one_without_its_library_are_sentences(monkeypatch):
    with pytest.raises(ConfigError, match=r"legal are s3://, gs://, hf://"):
        stores.read("ftp://there/a")
    with pytest.raises(ConfigError, match=r"there is nothing under s3://bucket/none"):
        stores.local_copy("s3://bucket/none")
    stores.forget()
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[remote\]'"):
        stores.read("s3://bucket/a")
