"""A model of ours as lm-evaluation-harness asks for one: which answer is likelier, how likely a text is, how a prompt goes on.

    lm-eval ──(context, continuation)──► loglikelihood ─────────┐
            ──(text,)──────────────────► loglikelihood_rolling ─┴─► rows ──scoring──► log-probabilities
            ──(prompt, until ...)──────► generate_until ──generate.engine──► text before a stop string

What is asked becomes tokens as lm-eval's own model `hf` has it, so that the numbers are those that others publish: special tokens in a
text are themselves, what the tokenizer begins texts with (BOS) is put before a context that does not begin with it, and a context that
is too long loses its beginning. lm-eval itself (extra `evaluate`) is imported where its class is asked for, so that this needs none.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError, nearest, say, short
from meshtrain.evaluate.perplexity import begin_of
from meshtrain.evaluate.progress import Progress
from meshtrain.evaluate.scoring import Row, Scorer
from meshtrain.evaluate.windows import windows
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import Opened, open_model
from meshtrain.generate.request import Piece, Request, Sampling

NAME = "meshtrain"  # lm_eval --model
MOST_TOKENS = 256  # of an answer, where the task does not say
# How tasks call the most tokens of an answer, the first of them counts; as lm_eval.models.utils has it.
MOST_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SETTINGS = ("mesh", "precision", "step", "adapter")  # of model_args, as open_model takes them
NEEDS = "tasks need lm-evaluation-harness, which is not installed: pip install 'meshtrain[evaluate]'."


class Harness:
    """The requests of lm-eval, answered; each has `args`, a tuple."""

    def __init__(self, opened: Opened, rows: int = 8, longest: int | None = None) -> None:
        """`rows`: scored or generated at once; `longest`: positions of a context with its answer (the model's own by default)."""
        super().__init__()
        self.opened, self.scorer = opened, Scorer(opened.model, rows)
        self.longest = opened.longest if longest is None else longest

    # --- text and tokens

    @property
    def begin(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text; none where it puts nothing."""
        return getattr(self.opened.tokenizer, "begin", ())

    @property
    def prefix(self) -> int:
        """What an empty context is."""
        return begin_of(self.opened.tokenizer)

    def tokens(self, text: str, begun: bool = True) -> list[int]:
        """The tokens of a text; `begun`: behind `begin`, unless it begins with that already."""
        ids = [int(i) for i in self.opened.marked.encode([text])[0]]
        head = list(self.begin) if begun else []
        return ids if ids[: len(head)] == head else head + ids

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """A context's tokens and those that follow in the two together: spaces at its end belong to what follows."""
        if not context:
            answer = self.tokens(continuation, begun=False)
            return (answer[:1], answer[1:]) if answer[:1] == [self.prefix] else ([self.prefix], answer)
        bare = context.rstrip()
        before, whole = self.tokens(bare), self.tokens(context + continuation)
        return before, whole[len(before) :]

    # --- what lm-eval asks for

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log p(continuation | context), and whether it is what greedy decoding would say."""
        rows: list[Row | None] = []
        for context, continuation in (request.args for request in requests):
            before, answer = self.pair(context, continuation)
            if len(answer) > self.longest:
                raise ConfigError(
                    f"an answer of {len(answer)} tokens is asked for ({short(continuation)}), but the model takes {self.longest}."
                )
            kept = (before + answer)[-(self.longest + 1) :]
            rows.append(Row(np.array(kept, np.int32), len(kept) - len(answer)) if answer else None)
        with Progress("scoring", "answers", quiet=disable_tqdm) as progress:
            scored = iter(self.scorer([row for row in rows if row is not None], progress))
        nothing = (0.0, True)
        return [nothing if row is None else _total(next(scored)) for row in rows]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each (text,): log p of all its tokens, each once; a long one in rows that do not overlap but at its end."""
        rows: list[Row] = []
        ends = [0]
        for (text,) in (request.args for request in requests):
            tokens = np.array(self.tokens(text), np.int32)
            rows += windows(tokens, self.prefix, self.longest, self.longest)
            ends.append(len(rows))
        with Progress("scoring", "rows", quiet=disable_tqdm) as progress:
            totals = [_total(scores)[0] for scores in self.scorer(rows, progress)]
        return [sum(totals[begin:end]) for begin, end in pairwise(ends)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Of each (prompt, settings): what follows it, up to a stop string, an end token or as many tokens as it may have."""
        asked = [self._request(*request.args) for request in requests]
        if not asked:
            return []
        found = [""] * len(asked)
        ended = 0
        order = sorted(range(len(asked)), key=lambda k: -len(asked[k].tokens))
        length = max(len(request.tokens) + request.most for request in asked)
        engine = Engine(self.opened, self.scorer.rows, length, waiting=len(asked))
        with Progress("generating", "answers", quiet=disable_tqdm) as progress:

            def listener(k: int) -> Any:
                def told(piece: Piece) -> None:
                    nonlocal ended
                    found[k] += piece.text
                    if piece.finish == "error":
                        problems.append(piece.problem)
                    if piece.finish:
                        ended += 1
                        progress(ended, len(asked))

                return told

            problems: list[str] = []
            for k in order:
                engine.submit(asked[k], listener(k))
            while engine.step():
                pass
            engine.close()
        if problems:
            raise ConfigError(f"the model of {self.opened.name} cannot go on with a prompt: {problems[0]}")
        return found

    def _request(self, prompt: str, settings: Mapping[str, Any]) -> Request:
        most = int(next((settings[name] for name in MOST_NAMES if settings.get(name) is not None), MOST_TOKENS))
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
        """By what lm-eval's cache tells the prompts of one model from another's."""
        return f"{self.opened.tokenizer.name}-{self.opened.tokenizer.digest[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's template, for lm-eval's records; a name is of no use, since the one called default is taken."""
        if not chat_template:
            return None
        return self._conversations().found.text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt that asks for an answer to messages; without `add_generation_prompt` the last message is left open, to be gone on with."""
        text = self._conversations().text(chat_history, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)] if last in text else text

    def _conversations(self) -> Any:
        if self.opened.template is None:
            raise ConfigError(f"{short(self.opened.name)} has no chat template beside its tokenizer; ask without one.")
        return self.opened.template


def _total(scores: Any) -> tuple[float, bool]:
    return float(scores.logprobs.sum(dtype=np.float64)), bool(scores.greedy.all())


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Greedy unless a task asks for anything else."""
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
    """`MeshtrainLM`, the subclass of lm-eval's LM that `lm_eval --model meshtrain` names, registered there; ConfigError without lm-eval."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError:
        raise ConfigError(NEEDS) from None

    class MeshtrainLM(Harness, LM):
        """model_args: path=RUN, and perhaps mesh, precision, step, adapter, max_length."""

        def __init__(
            self, path: str | None = None, *, opened: Opened | None = None, batch_size: int | str = 8, max_length: int | None = None,
            **given: Any,
        ) -> None:  # fmt: skip
            # what lm-eval tells every model
            how = {name: value for name, value in given.items() if name not in ("device", "max_batch_size")}
            if unknown := [name for name in how if name not in SETTINGS]:
                near = nearest(unknown[0], ("path", "max_length", *SETTINGS))
                raise ConfigError(f"model_args has {short(unknown[0])}, which is none of meshtrain's{near or '.'}")
            rows = int(batch_size) if str(batch_size).isdecimal() else 8
            if opened is None:
                if path is None:
                    raise ConfigError("model_args lacks path=RUN, a run, a checkpoint or a Hugging Face directory.")
                opened = open_model(path, slots=rows, **how)
            super().__init__(opened, rows, max_length)

    return register_model(NAME)(MeshtrainLM)


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
