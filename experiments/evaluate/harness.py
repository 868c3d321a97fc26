"""Our numbers for tasks of lm-evaluation-harness beside those computed by hand, and those of lm-eval's own model `hf`.

    pip install -e '.[evaluate]' && python -m experiments.evaluate.harness       with torch and transformers (extra parity) `hf` too

Tiny models with random weights, one of them with a BOS, on the tasks in `tasks/`, from the root of the repository and
without a download.
By hand: the text tokenized by the tokenizers library, the whole logits of one row at a time, a sum in float64;
generated without a cache.
Goal: the same accuracy, log-likelihoods within 1e-4, the same text.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from experiments import bench
from experiments.evaluate.tiny import END, FAMILIES, LENGTH, tiny
from meshtrain.evaluate.harness import model_class
from meshtrain.reader import Model, read_model

HERE = Path(__file__).parent
TASKS = HERE / "tasks"
NAMES = {"meshtrain_choice": "acc,none", "meshtrain_again": "exact_match,none"}
GOAL = 1e-4
ROLLING = [
    "Short.",
    "A text that is far longer than the model has positions for. " * 6,
    "\n",
]


class ByHand:
    """The same requests answered by the plainest means."""

    def __init__(self, directory: Path) -> None:
        import tokenizers

        self.model: Model = read_model(directory)
        self.tokenizer = tokenizers.Tokenizer.from_file(
            str(directory / "tokenizer.json")
        )
        begun = self.tokenizer.encode("a").ids[:-1]
        self.end = self.tokenizer.token_to_id(END)
        self.prefix = begun[0] if begun else self.end

    def log_p(self, tokens: Sequence[int]) -> np.ndarray:
        """log p of every token of the vocabulary behind each of these, float64 [T, V]; rows padded to one length, which
        is compiled once.
        """
        padded = np.zeros((1, LENGTH), np.int64)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(self.model(padded)[0, : len(tokens)], np.float64)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        whole, before = (
            self.tokenizer.encode(context + continuation).ids,
            self.tokenizer.encode(context).ids,
        )
        answer = whole[len(before) :]
        log_p = self.log_p(whole[:-1])[-len(answer) :]
        return float(log_p[np.arange(len(answer)), answer].sum()), bool(
            (log_p.argmax(-1) == answer).all()
        )

    def rolling(self, text: str) -> float:
        tokens, total = [self.prefix, *self.tokenizer.encode(text).ids], 0.0
        scored = 1
        while scored < len(tokens):
            end = min(scored + LENGTH, len(tokens))
            row = tokens[max(end - 1 - LENGTH, 0) : end]
            log_p = self.log_p(row[:-1])
            at = np.arange(len(row) - 1)[-(end - scored) :]
            total += log_p[at, np.array(row[1:])[at]].sum()
            scored = end
        return float(total)

    def generate(self, prompt: str, until: Sequence[str], most: int) -> str:
        tokens = self.tokenizer.encode(prompt).ids[-(LENGTH - most) :]
        said: list[int] = []
        while len(said) < most:
            said.append(int(self.log_p(tokens + said)[-1].argmax()))
            if said[-1] == self.end or any(
                stop in self.tokenizer.decode(said) for stop in until
            ):
                break
        text = self.tokenizer.decode([token for token in said if token != self.end])
        return min((text.partition(stop)[0] for stop in until), key=len)


def evaluated(model: Any) -> dict[str, Any]:
    """What lm-eval says of a model on the tasks, its answers to each request among it."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    return simple_evaluate(
        model,
        tasks=list(NAMES),
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
    )


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """(arguments, response) of each request of a task."""
    found = []
    for sample in results["samples"][task]:
        for given, response in zip(sample["arguments"], sample["resps"], strict=True):
            found.append((tuple(given), response[0]))
    return found


def accuracy(task: str, said: Sequence[Any], results: dict[str, Any]) -> float:
    """By hand, of answers in the order of the requests."""
    samples = results["samples"][task]
    if task == "meshtrain_again":
        return float(
            np.mean(
                [
                    text == sample["target"]
                    for text, sample in zip(said, samples, strict=True)
                ]
            )
        )
    sums = np.array([total for total, _ in said]).reshape(len(samples), -1)
    return float(
        np.mean(sums.argmax(1) == [int(sample["target"]) for sample in samples])
    )


def main() -> int:
    bench.parser(__doc__).parse_args()
    model = model_class()
    print(
        f"{'model':7} {'against':8} {'task':17} {'ours':>7} {'theirs':>7} {'largest difference':>19}"
    )
    missed = 0
    with tempfile.TemporaryDirectory() as made:
        for family in FAMILIES:
            directory = tiny(
                Path(made), family, (HERE.parent.parent / "README.md").read_text()
            )
            ours, hand = model(str(directory), batch_size=4), ByHand(directory)
            results = evaluated(ours)

            def row(
                against: str,
                task: str,
                mine: float,
                theirs: float,
                difference: float,
                family: str = family,
            ) -> None:
                nonlocal missed
                missed += mine != theirs or not difference <= GOAL
                print(
                    f"{family:7} {against:8} {task:17} {mine:7.4f} {theirs:7.4f} {difference:19.1e}",
                    flush=True,
                )

            for task, metric in NAMES.items():
                asked = answers(results, task)
                said = [by_hand(hand, arguments) for arguments, _ in asked]
                score = results["results"][task][metric]
                row(
                    "by hand",
                    task,
                    score,
                    accuracy(task, said, results),
                    apart([mine for _, mine in asked], said),
                )
            texts = [_Request((text,)) for text in ROLLING]
            rolled = ours.loglikelihood_rolling(texts, disable_tqdm=True)
            row(
                "by hand",
                "rolling",
                1,
                1,
                apart(rolled, [hand.rolling(text) for text in ROLLING]),
            )
            if (hf := theirs(directory)) is not None:
                other = evaluated(hf)
                for task, metric in NAMES.items():
                    mine, their = (
                        [response for _, response in answers(each, task)]
                        for each in (results, other)
                    )
                    scores = [
                        each["results"][task][metric] for each in (results, other)
                    ]
                    row("hf", task, *scores, apart(mine, their))
                row(
                    "hf",
                    "rolling",
                    1,
                    1,
                    apart(rolled, hf.loglikelihood_rolling(texts, disable_tqdm=True)),
                )
    print(
        f"goal: the same score, differences within {GOAL:.0e}, the same text: {'missed' if missed else 'met'}"
    )
    return min(missed, 1)


class _Request:
    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args


def by_hand(hand: ByHand, arguments: tuple[str, Any]) -> Any:
    before, asked = arguments
    return (
        hand.loglikelihood(before, asked)
        if isinstance(asked, str)
        else hand.generate(before, asked["until"], asked["max_gen_toks"])
    )


def apart(mine: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest difference between numbers; infinite where a text, or whether an answer is greedy, is another."""

    def one(a: Any, b: Any) -> float:
        if isinstance(a, str):
            return 0.0 if a == b else np.inf
        (x, *greedy), (y, *other) = (
            list(np.atleast_1d(v)) if not isinstance(v, tuple | list) else list(v)
            for v in (a, b)
        )
        return abs(float(x) - float(y)) if greedy == other else np.inf

    return max(one(a, b) for a, b in zip(mine, theirs, strict=True))


def theirs(directory: Path) -> Any:
    """lm-eval's own model of the same directory; None without torch and transformers."""
    if not all(
        importlib.util.find_spec(name)
        for name in ("torch", "transformers", "accelerate")
    ):
        return None
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=str(directory),
        dtype="float32",
        device="cpu",
        batch_size=4,
        max_length=LENGTH,
    )


if __name__ == "__main__":
    sys.exit(main())
