"""How often a trained model writes Python that parses: `python -m experiments.evaluate.parses RUN [--show N]`.

A prompt is the signature of a function of NumPy, which the standard library does not have. The model goes on greedily.
The whole lines of its first 200 characters are kept, and stand or fall together with the prompt by `ast.parse`
(`configs/python/parses.py`, which is a reward too). An unfinished statement at the end is left out, if half of the
text remains. The mean number of different statements stands beside it: comments parse too.

`--prompts FILE` writes prompts for reinforcement learning instead: signatures of the standard library.
"""

import ast
import importlib.util
import json
import queue
import runpy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import bench
from experiments.bench import Table
from meshtrain.data.cache import stdlib_files
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import open_model
from meshtrain.generate.request import Request
from meshtrain.generate.text import text_tokens

REWARDS = runpy.run_path(str(Path(__file__).parents[2] / "configs/python/parses.py"))
PROMPTS = 100
LONGEST_PROMPT = 200  # characters
TOKENS = 128  # of an answer: 200 characters of code are about 70
SLOTS = 8


def numpy_files() -> list[Path]:
    spec = importlib.util.find_spec("numpy")
    assert spec is not None and spec.origin is not None
    paths = sorted(Path(spec.origin).parent.rglob("*.py"))
    return [path for path in paths if "tests" not in path.parts]


def signatures(paths: list[Path]) -> list[str]:
    """Returns the signature of each function at the top of these files, in their order."""
    found = []
    for path in paths:
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                # the newline and the indent behind it are one token, which the model has to write
                text = "".join(lines[node.lineno - 1 : node.body[0].lineno - 1]).rstrip("\n")
                if text and len(text) <= LONGEST_PROMPT:
                    found.append(text)
    return found


def spaced(texts: list[str]) -> list[str]:
    """Returns some of them, evenly spaced."""
    return [texts[k * len(texts) // PROMPTS] for k in range(PROMPTS)]


def greedy_answers(run: Path, prompts: list[str]) -> list[str]:
    """Returns how the newest checkpoint of a run goes on with each prompt."""
    opened = open_model(run, slots=SLOTS)
    tokens = [text_tokens(opened.tokenizer, prompt) for prompt in prompts]
    heard: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in prompts]
    length = max(map(len, tokens)) + TOKENS
    with Engine(opened, SLOTS, length, waiting=len(prompts), keep=False) as engine:
        for prompt, pieces in zip(tokens, heard, strict=True):
            engine.submit(Request(prompt, TOKENS), pieces.put)
        return ["".join(_texts(pieces)) for pieces in heard]


def _texts(pieces: "queue.SimpleQueue[Any]") -> Iterator[str]:
    finish = None
    while finish is None:
        piece = pieces.get()
        yield piece.text
        finish = piece.finish


def score(run: Path, show: int) -> None:
    prompts = spaced(signatures(numpy_files()))
    answers = greedy_answers(run, prompts)
    parsed = [REWARDS["parses"](*pair) for pair in zip(prompts, answers, strict=True)]
    code = [REWARDS["code"](*pair) for pair in zip(prompts, answers, strict=True)]
    table = Table("greedy answers", "that parse", "different statements, of four")
    statements = REWARDS["MOST"] * sum(code) / len(code)
    table.row(len(answers), f"{sum(parsed):.0f}", f"{statements:.1f}")
    shown = {1.0: 0, 0.0: 0}
    for prompt, answer, good in zip(prompts, answers, parsed, strict=True):
        shown[good] += 1
        if shown[good] <= show:
            print("--- parses" if good else "--- does not parse")
            print(prompt + REWARDS["seen"](answer))


def write_prompts(to: Path) -> None:
    paths = [Path(file.path) for file in stdlib_files().files]
    records = [json.dumps({"prompt": text}) for text in spaced(signatures(paths))]
    to.write_text("\n".join(records) + "\n")


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--show", type=int, default=0, help="so many answers of each kind")
    parser.add_argument("--prompts", type=Path)
    options = parser.parse_args()
    if options.prompts:
        write_prompts(options.prompts)
    else:
        score(options.run, options.show)


if __name__ == "__main__":
    main()
