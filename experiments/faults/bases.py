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
]
PREPARE = ("prepare", "--input", "text", "--output", "shards", "--workers", "1")


def folder(place: Place) -> None:
    """A folder of text files, the same every time."""
    for number in range(16):
        draw = random.Random(number)
        text = " ".join(draw.choice(WORDS) for _ in range(120))
        place.file(f"text/{number:02d}.txt", text + ".\n")


def make(directory: Path) -> None:
    """Every base run; a failure here is no fault to be judged."""
    import_all(directory)
    for name in BASES:
        make_one(name, directory)


def make_one(name: str, directory: Path) -> Place:
    place = Place(directory / name, directory)
    place.dir.mkdir(parents=True)
    if name != "synthetic":
        folder(place)
    if name == "shards":
        succeeds(place, "data", *PREPARE)
    place.config(data=BASES[name])
    succeeds(place, "train", "--config", "config.yaml")
    for log in place.dir.glob("log-*"):
        log.unlink()
    return place


def succeeds(place: Place, *command: str) -> None:
    ended = place.command(*command)
    assert ended.code == 0, ended.said


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
    others = ("train", "plan.__main__", "data.__main__", "checkpoint.__main__")
    for name in [
        *(f"meshtrain.{other}" for other in others),
        "multiprocessing.spawn",
        "tokenizers",
        *(place.dir / "modules").read_text().split("\n"),
    ]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


BASES = {
    "synthetic": {"source": "synthetic"},
    "text": {"source": "text"},
    "packed": {"source": "text", "batching": "packed"},
    "shards": {"source": "shards"},
}
