"""Folders of text with documents of all lengths; the cache is a directory of the test run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshtrain.data.shards import Descriptor

WORDS = (
    "the",
    "of",
    "mesh",
    "shard",
    "token",
    "pipeline",
    "stage",
    "tensor",
    "data",
    "gradient",
    "moment\n",
)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache directory while the tests run."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads from shards since it was cleared."""
    sizes: list[int] = []
    read = Descriptor.read
    monkeypatch.setattr(
        Descriptor,
        "read",
        lambda file, size, at: sizes.append(size) or read(file, size, at),
    )
    return sizes


def write_documents(folder: Path, count: int, mean: float, seed: int) -> None:
    """Text files of log-normal length, some far longer than a row."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number, words in enumerate(
        np.ceil(draw.lognormal(np.log(mean), 1.2, count)).astype(int)
    ):
        text = " ".join(WORDS[i] for i in draw.integers(0, len(WORDS), words))
        (folder / f"{number:04d}.txt").write_text(f"{number} {text}")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 documents, about 6 kB each at most, most much shorter."""
    folder = tmp_path_factory.mktemp("text") / "documents"
    write_documents(folder, 150, 30, seed=1)
    return folder


@pytest.fixture(scope="session")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "others"
    write_documents(folder, 40, 60, seed=2)
    return folder
