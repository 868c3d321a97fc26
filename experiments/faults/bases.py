"""The runs that nothing disturbs, made once and copied for each fault; and the text that they read."""

import contextlib
import importlib
import random
import sys
from pathlib import Path

from experiments.faults.harness import Place

WORDS = [
    "mesh",
    "train",
    "data",
    "tensor",
    "stage",
    "pipe",
    "batch",
    "token",
    "loss",
    "step",
    "shard",
    "rank",
    "gather",
    "scatter",
    "reduce",
    "tick",
]
PREPARE = ("prepare", "--input", "text", "--output", "shards", "--workers", "1")


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
    import_all(directory)
    for name, make_one in BASES.items():
        place = Place(directory / name, directory)
        place.dir.mkdir(parents=True)
        make_one(place)
        for log in place.dir.glob("log-*"):
            log.unlink()


def import_all(directory: Path) -> None:
    """Imports here what a run imports on its way, so that no forked process has to: it may not be able to read it."""
    place = Place(directory / "imports", directory)
    place.dir.mkdir(parents=True)
    folder(place)
    place.config(data={"source": "text"})

    def run() -> int:
        from meshtrain.train import main

        code = main(["--config", "config.yaml"])
        Path("modules").write_text("\n".join(sys.modules))
        return code

    ended = place.start("", call=run).end()
    assert ended.code == 0, ended.said
    others = [
        f"meshtrain.{name}"
        for name in ("train", "plan.__main__", "data.__main__", "checkpoint.__main__")
    ]
    for name in [
        *others,
        "multiprocessing.spawn",
        "tokenizers",
        *(place.dir / "modules").read_text().split("\n"),
    ]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _trained(place: Place, **sections: dict) -> None:
    place.config(**sections)
    ended = place.train()
    assert ended.code == 0, ended.said


def _text(place: Place, **data: object) -> None:
    folder(place)
    _trained(place, data={"source": "text", **data})


def _shards(place: Place) -> None:
    folder(place)
    ended = place.command("data", *PREPARE)
    assert ended.code == 0, ended.said
    _trained(place, data={"source": "shards"})


BASES = {
    "synthetic": _trained,
    "text": _text,
    "packed": lambda place: _text(place, batching="packed"),
    "shards": _shards,
}
