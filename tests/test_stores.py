"""Requests to a store, against a real server: bounded whole, tried again, one sentence at the end."""

import time

import pytest

from meshtrain import stores
from meshtrain.errors import ConfigError
from meshtrain.files import RequestRefused

pytest.importorskip("s3fs", reason="needs the extra remote")
pytest.importorskip("moto", reason="needs moto's server")

from store_server import BUCKET, SERVERS, StoreServer, impatient, store_server


@pytest.fixture(scope="module", params=SERVERS)
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def server(scheme):
    with store_server(scheme) as server:
        yield server


@pytest.fixture
def root(scheme):
    return f"{scheme}://{BUCKET}/things"


@pytest.fixture(autouse=True)
def impatience(monkeypatch, server: StoreServer, tmp_path, root):
    with impatient(monkeypatch, server, tmp_path / "cache", root):
        yield
        monkeypatch.undo()


def test_what_is_written_is_read_in_whole_and_by_ranges_and_listed(root):
    stores.write(f"{root}/a/b", bytes(range(100)))
    assert stores.read(f"{root}/a/b") == bytes(range(100))
    assert stores.read(f"{root}/a/b", 10, 5) == bytes(range(10, 15))
    entry = stores.listing(root)["a/b"]
    assert (
        entry.size == 100
        and entry.etag
        and abs(entry.modified / 1e9 - time.time()) < 100
    )
    assert stores.status(f"{root}/a/b") == entry
    assert stores.listing(f"{root}/none") == {}
    stores.remove([f"{root}/a/b", f"{root}/never-there"])
    assert stores.listing(root) == {}


def test_an_object_is_made_once(root):
    assert stores.write_new(f"{root}/mine", b"1")
    assert stores.write_new(f"{root}/mine", b"1")  # an answer was lost
    assert not stores.write_new(f"{root}/mine", b"2")
    assert stores.read(f"{root}/mine") == b"1"


@pytest.mark.parametrize("fault", ["busy", "cut", "hang", "expired"])
def test_a_fault_that_passes_is_nobodys_business(root, server: StoreServer, fault):
    stores.write(f"{root}/a", b"x" * 1000)
    server.fail(1, fault)
    assert stores.read(f"{root}/a", 0, 1000) == b"x" * 1000


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("busy", "reduce your request rate"),
        ("expired", "the provided token has expired"),
        ("slow", "no whole answer within 3 s"),
        ("cut", "cut short|closed|payload|not enough data"),
    ],
)
def test_a_fault_that_stays_is_refused_in_bounded_time(
    root, server: StoreServer, fault, reason
):
    stores.write(f"{root}/a", b"x" * 1000)
    server.fail(1000, fault)
    began = time.monotonic()
    with pytest.raises(RequestRefused) as refused:
        stores.read(f"{root}/a", 0, 1000)
    assert time.monotonic() - began < 20
    assert refused.value.filename == f"{root}/a"
    import re

    assert re.search(reason, refused.value.strerror.lower()), refused.value


def test_a_file_is_uploaded_again_where_it_did_not_come_whole(
    root, server: StoreServer, tmp_path
):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    server.fail(1, "busy", "PUT")
    stores.upload(path, f"{root}/file")
    assert stores.read(f"{root}/file") == path.read_bytes()


def test_a_copy_is_fetched_once_and_again_when_it_has_changed(
    root, server: StoreServer
):
    stores.write(f"{root}/config.json", b"{}")
    stores.write(f"{root}/sub/weights", bytes(1000))
    copy = stores.local_copy(root)
    assert (copy / "config.json").read_bytes() == b"{}"
    assert (copy / "sub" / "weights").read_bytes() == bytes(1000)
    server.asked.clear()
    assert stores.local_copy(root) == copy
    assert not [path for _, path in server.asked if "weights" in path]
    stores.write(f"{root}/config.json", b"[]")
    assert (stores.local_copy(root) / "config.json").read_bytes() == b"[]"


def test_the_cache_stays_within_its_limit(root):
    stores.write(f"{root}/one/a", bytes(2 << 20))
    stores.write(f"{root}/two/a", bytes(2 << 20))
    first = stores.local_copy(f"{root}/one", limit=3 / 1024)
    second = stores.local_copy(f"{root}/two", limit=3 / 1024)
    assert second.is_dir() and not first.is_dir()
    with pytest.raises(ConfigError, match=r"but data.cache_gib is 0.001; give more"):
        stores.local_copy(f"{root}/one", limit=0.001)


def test_a_store_that_is_none_and_one_without_its_library_are_sentences(
    scheme, monkeypatch
):
    with pytest.raises(ConfigError, match=r"legal are s3://, gs://, hf://"):
        stores.read("ftp://there/a")
    with pytest.raises(
        ConfigError, match=f"there is nothing under {scheme}://bucket/none"
    ):
        stores.local_copy(f"{scheme}://bucket/none")
    stores.forget()
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[remote\]'"):
        stores.read(f"{scheme}://bucket/a")
