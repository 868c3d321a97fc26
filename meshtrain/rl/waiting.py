"""Rollouts that wait to be learned from when a checkpoint is written (`rl.lag`, `rl.epochs`).

They are kept in a file beside the run's checkpoints, since the weights that drew them are gone after a resume. Its
first line is a digest of the rest.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshtrain.checkpoint.steps import committed_in
from meshtrain.errors import refusal, say
from meshtrain.files import write_atomically
from meshtrain.rl.episodes import Episode
from meshtrain.rl.prompts import Prompts
from meshtrain.run.directory import CHECKPOINTS, WAITING
from meshtrain.run.processes import first_decides

ARRAYS: dict[str, Any] = {
    "tokens": np.int32,
    "drawn": np.bool_,
    "logprobs": np.float32,
    "experts": np.int32,
}


class Rollout(Protocol):
    @property
    def groups(self) -> list[list[Episode]]: ...


def write(directory: Path, step: int, rollouts: Mapping[int, Rollout]) -> None:
    """Writes the rollouts that wait behind a step, and removes those that are older than all checkpoints."""
    there = directory / WAITING
    content = {
        str(number): [
            [_plain(episode) for episode in group] for group in rollout.groups
        ]
        for number, rollout in rollouts.items()
    }
    body = json.dumps(content).encode()
    try:
        there.mkdir(exist_ok=True)
        write_atomically(there / f"{step}.json", _digest(body) + b"\n" + body)
    except OSError as error:
        say(
            f"answers that wait cannot be written to {there}: {refusal(error)}; a resume from step {step} has them "
            "drawn anew."
        )
    # The step before this one may still be on its way to its checkpoint.
    oldest = min(committed_in(directory / CHECKPOINTS), default=0)
    for file in there.glob("*.json"):
        if file.stem.isdecimal() and int(file.stem) < oldest:
            with suppress(FileNotFoundError):
                file.unlink()


def read(
    directory: Path, step: int, prompts: Prompts
) -> dict[int, list[list[Episode]]]:
    """Returns the rollouts that waited behind a step by their numbers, on every process; none if it has no file: they
    are drawn anew then.
    """
    content = first_decides(lambda: _content(directory / WAITING / f"{step}.json"))
    return {
        int(number): [[_episode(each, prompts) for each in group] for group in groups]
        for number, groups in content.items()
    }


def _content(file: Path) -> dict[str, Any]:
    """Returns what a file holds; nothing, with a word, if it is damaged."""
    if not file.is_file():
        return {}
    digest, _, body = file.read_bytes().partition(b"\n")
    if digest != _digest(body):
        say(
            f"{file} is damaged; the answers that waited there are drawn anew, by other weights."
        )
        return {}
    return dict(json.loads(body))


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _plain(episode: Episode) -> dict[str, Any]:
    arrays = {
        name: x.tolist() for name in ARRAYS if (x := getattr(episode, name)) is not None
    }
    others = {name: getattr(episode, name) for name in ("given", "answer", "ended")}
    return {
        "prompt": episode.prompt.number,
        "seed": int(episode.seed),
        **arrays,
        **others,
    }


def _episode(plain: dict[str, Any], prompts: Prompts) -> Episode:
    arrays = {
        name: np.array(plain[name], kind)
        for name, kind in ARRAYS.items()
        if name in plain
    }
    others = {name: plain[name] for name in ("given", "answer", "ended")}
    return Episode(
        prompts.all[plain["prompt"]], np.uint32(plain["seed"]), **{**others, **arrays}
    )
