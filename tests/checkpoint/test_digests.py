import errno
import os
import random
import time

import pytest
from refusals import tells

from meshtrain.checkpoint import digests, steps
from meshtrain.errors import Unreadable

SIZES = {"empty": 0, "small": 10, "block": 64, "long": 1000}


@pytest.fixture
def step(tmp_path, monkeypatch):
    """Files of several sizes around a block of 64 bytes."""
    monkeypatch.setattr(digests, "BLOCK", 64)
    for name, size in SIZES.items():
        (tmp_path / "deep" / name).mkdir(parents=True)
        (tmp_path / "deep" / name / "file").write_bytes(
            random.Random(name).randbytes(size)
        )
    assert digests.write(tmp_path) == sum(SIZES.values())
    return tmp_path


def test_every_flipped_bit_is_found_and_its_file_named(step):
    for name, size in SIZES.items():
        path = step / "deep" / name / "file"
        whole = path.read_bytes()
        for at in range(0, 8 * size, 97):
            damaged = bytearray(whole)
            damaged[at // 8] ^= 1 << at % 8
            path.write_bytes(damaged)
            start = at // 8 // 64 * 64
            assert digests.problems(step) == [
                f"deep/{name}/file is damaged between bytes {start:,} and {start + 64:,}"
            ]
        path.write_bytes(whole)


def test_truncated_grown_and_missing_files_are_found(step):
    path = step / "deep" / "long" / "file"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    (truncated,) = digests.problems(step)
    assert tells(truncated, "deep/long/file", "999 bytes", "1,000")
    path.write_bytes(whole + b"x")
    (grown,) = digests.problems(step)
    assert tells(grown, "deep/long/file", "1,001 bytes", "1,000")
    path.unlink()
    assert digests.problems(step) == ["deep/long/file is missing"]


def test_a_file_that_cannot_be_read_is_named_and_not_called_damaged(step, monkeypatch):
    """A bad sector of the disk."""
    digest = digests.digest_of

    def failing(path, start, block):
        if path.parent.name == "block":
            raise OSError(errno.EIO, "Input/output error")
        return digest(path, start, block)

    monkeypatch.setattr(digests, "digest_of", failing)
    monkeypatch.setattr("meshtrain.files.PAUSES", ())
    with pytest.raises(Unreadable, match="/file cannot be read now: input"):
        digests.problems(step)


def test_only_the_files_asked_for_are_looked_at(step):
    for name in ("long", "small"):
        (step / "deep" / name / "file").write_bytes(b"")
    (emptied,) = digests.problems(step, only=["deep/small/file"])
    assert tells(emptied, "deep/small/file", "0 bytes", "10")


def test_processes_that_share_the_work_find_what_one_finds(step):
    path = step / "deep" / "long" / "file"
    damaged = bytearray(path.read_bytes())
    damaged[3] ^= 1
    damaged[700] ^= 1
    path.write_bytes(damaged)
    shared = [
        sentence for part in range(3) for sentence in digests.problems(step, part, 3)
    ]
    assert sorted(shared) == sorted(digests.problems(step))
    assert len(shared) == 2


def test_what_was_written_is_intact_and_the_digests_do_not_cover_themselves(step):
    steps.commit(step)
    assert digests.problems(step) == [] and digests.total_bytes(step) == sum(
        SIZES.values()
    )


def test_blocks_hashed_while_a_file_grows_are_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "BLOCK", 64)
    content = random.Random(0).randbytes(1000)
    grown = tmp_path / "part" / "grown"
    grown.parent.mkdir()
    with (
        digests.HashedAhead(tmp_path, "part/*") as ahead,
        grown.open("wb", buffering=0) as file,
    ):
        for start in range(0, 1000, 50):
            file.write(content[start : start + 50])
        _wait_for(lambda: len(ahead.known(grown)) == 15)
    read = []
    digest = digests.digest_of
    monkeypatch.setattr(
        digests, "digest_of", lambda *at: read.append(at[1]) or digest(*at)
    )
    assert digests.write(tmp_path, ahead=ahead) == 1000
    assert read == [960]
    assert digests.problems(tmp_path) == []


def test_files_replaced_or_cut_after_they_were_hashed_are_hashed_anew(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(digests, "BLOCK", 64)
    replaced = tmp_path / "part" / "replaced"
    cut = tmp_path / "part" / "cut"
    replaced.parent.mkdir()
    with digests.HashedAhead(tmp_path, "part/*") as ahead:
        for path in (replaced, cut):
            path.write_bytes(bytes(640))
            _wait_for(lambda path=path: len(ahead.known(path)) == 10)
    other = tmp_path / "other"
    other.write_bytes(bytes([1]) * 640)
    os.replace(other, replaced)
    os.truncate(cut, 100)
    digests.write(tmp_path, ahead=ahead)
    assert digests.problems(tmp_path) == []


def _wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
