"""How often a trained model writes Python that parses: `python -m experiments.evaluate.parses RUN [--show N]`.

A prompt is the signature of a function of NumPy and its docstring. The model goes on greedily.
The whole lines of its first 200 characters are kept, and stand or fall together with the prompt by `ast.parse`
(`configs/python/parses.py`, which is a reward too). An unfinished statement at the end is left out, if half of the
text remains. The mean number of different statements stands beside it: comments parse too.

`--every` scores all checkpoints that a run has kept; `meshtrain evaluate` with the task of configs/python/parses.yaml
scores one. `--svg FILE` draws the losses of the run instead. `--prompts DIR` writes numpy.jsonl, the prompts of both,
and prompts.jsonl for reinforcement learning: signatures of the standard library.
"""

import ast
import importlib.util
import json
import runpy
from pathlib import Path
from typing import NamedTuple

from experiments import bench
from experiments.bench import Table
from meshtrain.data.cache import stdlib_files
from meshtrain.draw import svg
from meshtrain.generate.command import PrintedAnswer
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import open_model
from meshtrain.generate.request import Request
from meshtrain.generate.text import text_tokens
from meshtrain.report.charts import figures
from meshtrain.report.facts import gather

HERE = Path(__file__).parents[2] / "configs/python"
REWARDS = runpy.run_path(str(HERE / "parses.py"))
PROMPTS = 100
LONGEST_PROMPT = 300  # characters
TOKENS = 128  # of an answer: 200 characters of code are about 70
SLOTS = 8


def numpy_files() -> list[Path]:
    spec = importlib.util.find_spec("numpy")
    assert spec is not None and spec.origin is not None
    paths = sorted(Path(spec.origin).parent.rglob("*.py"))
    return [path for path in paths if "tests" not in path.parts]


def signatures(paths: list[Path]) -> list[str]:
    """Returns the signature and the docstring of each function at the top of these files, in their order."""
    found = []
    for path in paths:
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        for node in ast.parse(source).body:
            if (
                isinstance(node, ast.FunctionDef)
                and ast.get_docstring(node)
                and node.body[1:]
            ):
                # the newline and the indent behind it are one token, which the model has to write
                text = "".join(lines[node.lineno - 1 : node.body[0].end_lineno]).rstrip(
                    "\n"
                )
                if len(text) <= LONGEST_PROMPT:
                    found.append(text)
    return found


def spaced(texts: list[str]) -> list[str]:
    """Returns some of them, evenly spaced."""
    return [texts[k * len(texts) // PROMPTS] for k in range(PROMPTS)]


class Score(NamedTuple):
    parse: int  # of the answers
    statements: float  # different ones, of an answer


def greedy_answers(run: Path, prompts: list[str], step: int) -> list[str]:
    """Returns how a checkpoint of a run goes on with each prompt."""
    opened = open_model(run, slots=SLOTS, step=step)
    tokens = [text_tokens(opened.tokenizer, prompt) for prompt in prompts]
    answers = [PrintedAnswer() for _ in prompts]
    length = max(map(len, tokens)) + TOKENS
    with Engine(opened, SLOTS, length, waiting=len(prompts), keep=False) as engine:
        for prompt, answer in zip(tokens, answers, strict=True):
            engine.submit(Request(prompt, TOKENS), answer.hear)
        return ["".join(answer) for answer in answers]


def score(prompts: list[str], answers: list[str]) -> Score:
    both = list(zip(prompts, answers, strict=True))
    code = [REWARDS["code"](*pair) for pair in both]
    parse = sum(REWARDS["parses"](*pair) for pair in both)
    return Score(int(parse), REWARDS["MOST"] * sum(code) / len(code))


def print_scores(run: Path, steps: list[int], show: int) -> None:
    """Prints a row for each step, and the first answers of the last one."""
    lines = (HERE / "numpy.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    table = Table("step  ", f"parse, of {PROMPTS}", f"statements, of {REWARDS['MOST']}")
    answers: list[str] = []
    for step in steps:
        answers = greedy_answers(run, prompts, step)
        found = score(prompts, answers)
        table.row(step, found.parse, f"{found.statements:.1f}")
    for prompt, answer in zip(prompts[:show], answers, strict=False):
        good = REWARDS["parses"](prompt, answer)
        print(
            f"--- {'parses' if good else 'does not parse'}\n{prompt}{REWARDS['seen'](answer)}"
        )


def write_prompts(to: Path) -> None:
    stdlib = [Path(file.path) for file in stdlib_files().files]
    for name, paths in (("numpy.jsonl", numpy_files()), ("prompts.jsonl", stdlib)):
        records = [json.dumps({"prompt": text}) for text in spaced(signatures(paths))]
        (to / name).write_text("\n".join(records) + "\n")


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--show", type=int, default=0, help="so many answers")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--prompts", type=Path)
    options = parser.parse_args()
    if options.prompts:
        write_prompts(options.prompts)
        return
    if options.svg:
        _, _, losses = figures([gather(options.run)])[0]
        options.svg.write_text(svg.file(losses))
        return
    steps = sorted(
        int(path.name) for path in (options.run / "checkpoints").glob("[0-9]*")
    )
    print_scores(options.run, steps if options.every else steps[-1:], options.show)


if __name__ == "__main__":
    main()
