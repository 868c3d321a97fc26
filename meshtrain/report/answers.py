"""Samples of the answers that a run has drawn and learned from, as rows of a table.

    answers.jsonl    of each rollout the answers with the best, a median and the worst reward
    rows             those of at most `MOST_STEPS` steps, spread over the run

The texts are a model's: they may hold anything, and are cut where they are long.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import printable
from meshtrain.run.rows import RowReader
from meshtrain.survive.history import integer, number

HEADS = ("step", "", "reward", "prompt", "answer", "advantage", "rewards of its group")
MOST_STEPS = 40
MOST_VALUES = 4  # of a group, which are counted one by one
# letters of a text that are kept of its begin and of its end
BEGIN = 240
END = 120

Cells = tuple[str, ...]


@dataclass(frozen=True)
class AnswerSamples:
    """Rows of `HEADS`. `left_out`: lines of the file that are not samples."""

    rows: tuple[Cells, ...]
    left_out: int


def read(path: Path) -> AnswerSamples:
    """Returns the samples of a file; without rows where there is none. OSError if it cannot be read."""
    reader = RowReader(path)
    # A run that went on from a checkpoint draws some answers again.
    samples: dict[int, dict[str, Cells]] = {}
    left_out = 0
    for row in reader.new():
        match row:
            case {
                "step": int(step),
                "kind": "best" | "median" | "worst" as kind,
                "prompt": str() | list() as prompt,
                "answer": str(answer),
            } if integer(step) is not None:
                samples.setdefault(step, {})[kind] = (
                    f"{step:,}",
                    kind,
                    _number(row.get("reward")),
                    cut(_text(prompt)),
                    cut(answer),
                    _number(row.get("advantage")),
                    _group(row.get("group_rewards")),
                )
            case _:
                left_out += 1
    steps = sorted(samples)
    chosen = np.linspace(0, len(steps) - 1, MOST_STEPS).astype(int) if steps else ()
    shown = [samples[steps[place]] for place in np.unique(chosen)]
    rows = [of_step[kind] for of_step in shown for kind in sorted(of_step)]
    return AnswerSamples(tuple(rows), left_out + reader.torn)


def _text(prompt: str | list[Any]) -> str:
    """Returns a prompt as a text, of messages a line for each."""
    if isinstance(prompt, str):
        return prompt
    messages = [message for message in prompt if isinstance(message, dict)]
    return "\n".join(
        f"{message.get('role')}: {message.get('content')}" for message in messages
    )


def cut(text: str) -> str:
    """Returns a text in its lines, without its middle where it is long."""
    if len(text) > BEGIN + END:
        text = f"{text[:BEGIN]} … {text[-END:]}"
    return printable(text, and_also="\n")


def _number(value: object) -> str:
    known = number(value)
    return "-" if known is None else f"{known:.4g}"


def _group(rewards: object) -> str:
    """Returns how often a group has each reward, the most frequent first."""
    counts = Counter(map(_number, rewards if isinstance(rewards, list) else []))
    words = [f"{times} × {value}" for value, times in counts.most_common(MOST_VALUES)]
    return ", ".join(words + ["…"] * (len(counts) > MOST_VALUES)) or "-"
