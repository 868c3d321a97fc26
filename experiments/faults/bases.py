"""The runs that nothing disturbs, made once and copied for each fault; and the text that they read."""

import random
from pathlib import Path

from experiments.faults.harness import Place, digest_of, files_of

WORDS = "mesh train data tensor stage pipe batch token loss step shard rank gather scatter reduce tick".split()


def text(seed: int, words: int = 120) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words)) + ".\n"


def folder(place: Place, name: str = "text", files: int = 16) -> Path:
    """A folder of text files, the same every time."""
    for k in range(files):
        place.file(f"{name}/{k:02d}.txt", text(k))
    return place.dir / name


def make(directory: Path) -> None:
    """Every base run; a failure here is no fault to be judged."""
    for name, make_one in BASES.items():
        place = Place(directory / name, directory)
        place.dir.mkdir(parents=True)
        make_one(place)
        for log in place.dir.glob("log-*"):
            log.unlink()


def _trained(place: Place, **sections: dict) -> None:
    place.config(**sections)
    ended = place.train()
    assert ended.code == 0, ended.said


def _text(place: Place, **data: object) -> None:
    folder(place)
    _trained(place, data={"source": "text", **data})


def _shards(place: Place) -> None:
    folder(place)
    ended = place.command("data.__main__", "prepare", "--input", "text", "--output", "shards", "--workers", "1")
    assert ended.code == 0, ended.said
    _trained(place, data={"source": "shards"})


BASES = {
    "synthetic": _trained,
    "text": _text,
    "packed": lambda place: _text(place, batching="packed"),
    "shards": _shards,
}
__all__ = ["BASES", "digest_of", "files_of", "folder", "make", "text"]
