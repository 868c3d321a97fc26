"""A model as lm-evaluation-harness asks for one (which answer is likelier, how likely a text is, how a prompt goes on),
and its tasks.

    lm-eval ──(context, continuation)──► loglikelihood ─────────┐
            ──(text,)──────────────────► loglikelihood_rolling ─┴─► rows ──scoring──► log-probabilities
            ──(prompt, until ...)──────► generate_until ──generate.engine──► text before a stop string

Requests become tokens as in lm-eval's own model `hf`, so that the numbers are comparable with published ones. Special
tokens in a text are themselves. BOS is put before a context that does not begin with it, and a context that is too long
loses its beginning. lm-eval itself (extra `evaluate`) is imported where its class is asked for, so that this module
needs none. Its own output goes to stderr, so that stdout holds the result alone.
"""

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError, nearest, not_installed, say, short
from meshtrain.evaluate.perplexity import rows_of
from meshtrain.evaluate.scoring import Scorer, TokenRow
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import Opened, open_model
from meshtrain.generate.request import Piece, Request, Sampling
from meshtrain.telemetry.progress import EvaluationProgress

NAME = "meshtrain"  # lm_eval --model
MOST_TOKENS = 256  # of an answer, where the task does not say
# How tasks call the most tokens of an answer, the first of them counts; as lm_eval.models.utils has it.
MOST_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SETTINGS = (
    "mesh",
    "precision",
    "step",
    "adapter",
    "weights",
)  # of model_args, as open_model takes them
SHOWN = (
    "results",
    "groups",
    "n-shot",
    "versions",
    "n-samples",
)  # what --json has of lm-eval's results


class Harness:
    """The requests of lm-eval, answered; each has `args`, a tuple."""

    def __init__(
        self, opened: Opened, rows: int = 8, longest: int | None = None
    ) -> None:
        """`rows`: scored or generated at once; `longest`: positions of a context with its answer (the model's own by
        default).
        """
        super().__init__()
        self.opened = opened
        self.scorer = Scorer(opened.model, rows)
        self.longest = opened.longest if longest is None else longest
        self.begin = opened.tokenizer.begin  # what a text begins with
        marks = opened.tokenizer.boundaries
        self.prefix = (
            marks.bos or marks.end
        ).id  # the empty context, which lm-eval's `hf` has alike

    def tokens(self, text: str, begun: bool = True) -> list[int]:
        """The tokens of a text; `begun`: behind `begin`, unless it begins with that already."""
        ids = [int(i) for i in self.opened.marked.encode([text])[0]]
        head = list(self.begin) if begun else []
        return ids if ids[: len(head)] == head else head + ids

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """A context's tokens and those that follow in the two together: spaces at its end belong to what follows."""
        if not context:
            answer = self.tokens(continuation, begun=False)
            if answer[:1] == [self.prefix]:
                return (answer[:1], answer[1:])
            return ([self.prefix], answer)
        bare = context.rstrip()
        before = self.tokens(bare)
        both = self.tokens(context + continuation)
        return before, both[len(before) :]

    # --- the methods that lm-eval calls

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns log p(continuation | context) of each (context, continuation), and whether greedy decoding would give
        it.
        """
        rows: list[TokenRow | None] = []
        for context, continuation in (request.args for request in requests):
            before, answer = self.pair(context, continuation)
            if len(answer) > self.longest:
                raise ConfigError(
                    f"an answer of {len(answer)} tokens is asked for ({short(continuation)}), but the model takes "
                    f"{self.longest}."
                )
            ids = (before + answer)[-(self.longest + 1) :]
            rows.append(
                TokenRow(np.array(ids, np.int32), len(ids) - len(answer))
                if answer
                else None
            )
        with EvaluationProgress("scoring", "answers", quiet=disable_tqdm) as progress:
            scored = iter(
                self.scorer([row for row in rows if row is not None], progress)
            )
        nothing = (0.0, True)
        return [nothing if row is None else _total(next(scored)) for row in rows]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns log p of all tokens of each (text,), each once; a long one in rows that do not overlap but at its
        end.
        """
        rows: list[TokenRow] = []
        ends = [0]
        for (text,) in (request.args for request in requests):
            tokens = np.array(self.tokens(text), np.int32)
            rows += rows_of(tokens, (self.prefix,), self.longest, self.longest)
            ends.append(len(rows))
        with EvaluationProgress("scoring", "rows", quiet=disable_tqdm) as progress:
            totals = [_total(scores)[0] for scores in self.scorer(rows, progress)]
        return [sum(totals[begin:end]) for begin, end in pairwise(ends)]

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Returns the text that follows each (prompt, settings), up to a stop string, an end token or as many tokens as
        it may have.
        """
        asked = [self._request(*request.args) for request in requests]
        if not asked:
            return []
        answers = [""] * len(asked)
        problems: list[str] = []
        ended = 0
        length = max(len(request.tokens) + request.most for request in asked)
        engine = Engine(self.opened, self.scorer.rows, length, waiting=len(asked))
        with EvaluationProgress(
            "generating", "answers", quiet=disable_tqdm
        ) as progress:

            def receive(k: int, piece: Piece) -> None:
                nonlocal ended
                answers[k] += piece.text
                if piece.finish == "error":
                    problems.append(piece.problem)
                if piece.finish:
                    ended += 1
                    progress(ended, len(asked))

            for k in sorted(range(len(asked)), key=lambda k: -len(asked[k].tokens)):
                engine.submit(asked[k], partial(receive, k))
            while engine.step():
                pass
            engine.close()
        if problems:
            raise ConfigError(
                f"the model of {self.opened.name} cannot go on with a prompt: {problems[0]}"
            )
        return answers

    def _request(self, prompt: str, settings: Mapping[str, Any]) -> Request:
        most = int(
            next(
                (
                    settings[name]
                    for name in MOST_NAMES
                    if settings.get(name) is not None
                ),
                MOST_TOKENS,
            )
        )
        if most >= self.longest:
            raise ConfigError(
                f"a task asks for answers of {most} tokens, but the model takes {self.longest} with its prompt."
            )
        until = settings.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(until)
        tokens = self.tokens(prompt)[-(self.longest - most) :] or [self.prefix]
        return Request(np.array(tokens, np.int32), most, _sampling(settings), stop)

    # --- conversations

    @property
    def tokenizer_name(self) -> str:
        """Returns a name that keeps models apart in lm-eval's cache."""
        return f"{self.opened.tokenizer.name}-{self.opened.tokenizer.digest[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's template, for lm-eval's records; a name is of no use, since the one called default is taken."""
        if not chat_template:
            return None
        return self._conversations().source.text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt that asks for an answer to messages; without `add_generation_prompt` the last message is left
        open, to be gone on with.
        """
        text = self._conversations().text(chat_history, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)] if last in text else text

    def _conversations(self) -> Any:
        if self.opened.template is None:
            raise ConfigError(
                f"{short(self.opened.name)} has no chat template beside its tokenizer; ask without one."
            )
        return self.opened.template


def _total(scores: Any) -> tuple[float, bool]:
    return float(scores.logprobs.sum(dtype=np.float64)), bool(scores.greedy.all())


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    temperature = float(settings.get("temperature") or 0.0)
    if settings.get("do_sample") is False:
        temperature = 0.0
    elif settings.get("do_sample") and "temperature" not in settings:
        temperature = 1.0
    return Sampling(
        temperature,
        int(settings.get("top_k") or 0),
        float(settings.get("top_p") or 1.0),
        int(settings.get("seed") or 0),
    )


@cache
def model_class() -> type[Any]:
    """`MeshtrainLM`, the subclass of lm-eval's LM that `lm_eval --model meshtrain` names, registered there; ConfigError
    without lm-eval.
    """
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError:
        raise not_installed("tasks need lm-evaluation-harness", "evaluate") from None

    class MeshtrainLM(Harness, LM):
        """model_args: path=RUN, and perhaps mesh, precision, step, adapter, weights, max_length."""

        def __init__(
            self,
            path: str | None = None,
            *,
            opened: Opened | None = None,
            batch_size: int | str = 8,
            max_length: int | None = None,
            **options: Any,
        ) -> None:
            # what lm-eval tells every model
            how = {
                name: value
                for name, value in options.items()
                if name not in ("device", "max_batch_size")
            }
            if unknown := [name for name in how if name not in SETTINGS]:
                near = nearest(unknown[0], ("path", "max_length", *SETTINGS))
                raise ConfigError(
                    f"model_args has {short(unknown[0])}, which is none of meshtrain's{near or '.'}"
                )
            rows = int(batch_size) if str(batch_size).isdecimal() else 8
            if opened is None:
                if path is None:
                    raise ConfigError(
                        "model_args lacks path=RUN, a run, a checkpoint or a Hugging Face directory."
                    )
                opened = open_model(path, slots=rows, **how)
            super().__init__(opened, rows, max_length)

    return register_model(NAME)(MeshtrainLM)


def run_tasks(
    opened: Opened,
    names: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    rows: int = 8,
    longest: int | None = None,
) -> dict[str, Any]:
    """Returns lm-eval's results of a model on its tasks, and on those whose YAML files are in `include`.

    `shots`: examples before a question (the task's own by default), `limit`: questions of a task, `chat`: by the
    model's template. ConfigError without lm-eval, and for a task that is not there or cannot be loaded.
    """
    model = model_class()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        own = (
            None
            if include is None
            else TaskManager(include_path=str(include), include_defaults=False)
        )
        # lm-eval's own tasks are thousands of files, which take long to go through
        if own is not None and set(names) <= set(own.all_tasks):
            manager = own
        else:
            manager = TaskManager(
                include_path=None if include is None else str(include)
            )
        for name in names:
            # A pattern or a file is lm-eval's to judge.
            if name not in manager.all_tasks and not set(name) & set("*?[/"):
                where = f" in {short(include)} or" if include is not None else ""
                raise ConfigError(
                    f"there is no task {short(name)}{where} in "
                    f"lm-eval{nearest(name, manager.all_tasks) or '; lm-eval ls tasks lists them.'}"
                )
        return simple_evaluate(
            model(opened=opened, batch_size=rows, max_length=longest),
            tasks=list(names),
            num_fewshot=shots,
            limit=limit,
            task_manager=_Manager(manager),
            apply_chat_template=chat,
            log_samples=False,
        )


class _Manager:
    """A TaskManager whose tasks fail with a sentence where a dataset or a file of theirs keeps them from loading."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def load(self, tasks: Any) -> Any:
        try:
            return self._manager.load(tasks)
        # datasets, requests and YAML each raise their own
        except Exception as error:
            raise ConfigError(
                f"the tasks {', '.join(map(short, tasks))} cannot be loaded "
                f"({short(str(error) or type(error).__name__)})."
            ) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def table(results: dict[str, Any]) -> str:
    """Returns the tables that lm-eval prints itself."""
    from lm_eval.utils import make_table

    groups = make_table(results, "groups") if results.get("groups") else ""
    return "\n".join(filter(None, (make_table(results), groups)))


def __getattr__(name: str) -> Any:
    """`from meshtrain.evaluate.harness import MeshtrainLM` is where lm-eval is first needed."""
    if name == "MeshtrainLM":
        return model_class()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def main() -> None:
    """lm-eval's own command, which then knows `--model meshtrain`."""
    model_class()
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ConfigError as error:
        say(error)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
