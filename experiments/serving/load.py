"""A server under load by OpenAI's client, held against its engine alone: python -m experiments.serving.load

200 requests, 8 at once, streams and whole answers by turns      each answered as a prompt was answered before; latencies
1,000 more, short ones                                           memory of the process before and after
the 200 by the engine itself, without HTTP                        tokens a second, as a ratio
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import openai
import psutil

from experiments import bench
from experiments.serving.servers import (
    LENGTH,
    SLOTS,
    Server,
    made_run,
    servers,
    serving,
)
from meshtrain.draw.picture import columns

AT_ONCE = 8
TOKENS, SHORT = 32, 8
PROMPTS = (
    tuple(
        f"{word} = {number}"
        for number, word in enumerate(
            ("import os", "def main():", "class", "return", "x")
        )
    )
    * 2
)
WARM = 100  # requests before memory is looked at


class Answer(NamedTuple):
    """Seconds to the first piece and between pieces (of streams), tokens by the server's own count, and the text."""

    first: float
    between: tuple[float, ...]
    seconds: float
    tokens: int
    text: str
    finish: str


class Client:
    """OpenAI's, as it comes but for its retries, which would hide what fails."""

    def __init__(self, server: Server) -> None:
        self.openai = openai.OpenAI(
            base_url=server.url("/v1"), api_key="none", max_retries=0, timeout=120
        )
        self.model = self.openai.models.list().data[0].id

    def whole(self, prompt: str, most: int = TOKENS) -> Answer:
        began = time.monotonic()
        answer = self.openai.completions.create(
            model=self.model, prompt=prompt, max_tokens=most, temperature=0
        )
        assert answer.usage is not None
        (choice,) = answer.choices
        seconds = time.monotonic() - began
        return Answer(
            0.0,
            (),
            seconds,
            answer.usage.completion_tokens,
            choice.text,
            choice.finish_reason,
        )

    def stream(self, prompt: str, most: int = TOKENS) -> Answer:
        began, arrived, text, tokens, finish = time.monotonic(), [], "", 0, ""
        asked = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": most,
            "temperature": 0,
        }
        usage = {"include_usage": True}
        with self.openai.completions.create(
            **asked, stream=True, stream_options=usage
        ) as pieces:
            for piece in pieces:
                arrived.append(time.monotonic())
                if piece.usage is not None:
                    tokens = piece.usage.completion_tokens
                for choice in piece.choices:
                    text, finish = text + choice.text, choice.finish_reason or finish
        between = tuple(b - a for a, b in pairwise(arrived))
        return Answer(
            arrived[0] - began, between, time.monotonic() - began, tokens, text, finish
        )


class Figures(NamedTuple):
    answers: list[Answer]
    seconds: float  # of all
    different: int  # answers that are not what the same prompt was answered before
    memory: tuple[int, int]  # bytes before and after
    alone: float  # tokens a second of the engine itself

    @property
    def rate(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


def all_of(
    tasks: Sequence[Callable[[], Answer]], at_once: int = AT_ONCE
) -> tuple[list[Answer], float]:
    """Their answers in order, and the seconds that all took."""
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        answers = [future.result() for future in [pool.submit(task) for task in tasks]]
    return answers, time.monotonic() - began


def measure(work: Path, requests: int, short: int) -> Figures:
    run = made_run(work)
    with servers(serving(run), work, 1) as (server,):
        client = Client(server)
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(requests)]
        # compiles
        all_of([lambda prompt=prompt: client.whole(prompt) for prompt in PROMPTS])
        ways = client.whole, client.stream
        answers, seconds = all_of(
            [lambda way=ways[k % 2], p=p: way(p) for k, p in enumerate(prompts)]
        )
        usual = {prompt: client.whole(prompt).text for prompt in PROMPTS}
        different = sum(
            answer.text != usual[prompt]
            for prompt, answer in zip(prompts, answers, strict=True)
        )
        process = psutil.Process(server.process.pid)
        shorts = [
            lambda k=k: client.whole(PROMPTS[k % len(PROMPTS)], SHORT)
            for k in range(short)
        ]
        all_of(shorts[:WARM])
        before = process.memory_info().rss
        all_of(shorts)
        memory = before, process.memory_info().rss
    alone = engine_rate(run, prompts)
    return Figures(answers, seconds, different, memory, alone)


def engine_rate(run: Path, prompts: Sequence[str]) -> float:
    """Tokens a second of the same requests, as many at once, by an engine in this process."""
    from meshtrain.generate.engine import Engine
    from meshtrain.generate.opened import open_model
    from meshtrain.generate.request import Piece, Request
    from meshtrain.generate.text import text_tokens

    opened = open_model(run, length=LENGTH, slots=SLOTS)
    with Engine(opened, SLOTS, LENGTH) as engine:

        def ask(prompt: str) -> Answer:
            began, last = time.monotonic(), Future[Piece]()
            asked = Request(text_tokens(opened.tokenizer, prompt), TOKENS)
            engine.submit(
                asked, lambda piece: last.set_result(piece) if piece.finish else None
            )
            return Answer(
                0.0,
                (),
                time.monotonic() - began,
                last.result().tokens,
                "",
                last.result().finish or "",
            )

        all_of([lambda prompt=prompt: ask(prompt) for prompt in PROMPTS])  # compiles
        answers, seconds = all_of(
            [lambda prompt=prompt: ask(prompt) for prompt in prompts]
        )
    return sum(answer.tokens for answer in answers) / seconds


def table(figures: Figures) -> str:
    streams = [answer for answer in figures.answers if answer.between]
    between = [pause for answer in streams for pause in answer.between]
    rows = [
        ["requests", f"{len(figures.answers)}, {AT_ONCE} at once"],
        ["answered as before", f"{len(figures.answers) - figures.different}"],
        ["first piece", _ms([answer.first for answer in streams])],
        ["between pieces", _ms(between)],
        [
            "whole answers",
            _ms([answer.seconds for answer in figures.answers if not answer.between]),
        ],
        [
            "tokens a second",
            f"{figures.rate:.0f}; the engine alone {figures.alone:.0f}",
        ],
        [
            "memory",
            f"{figures.memory[0] / 2**20:.1f} MiB, then {figures.memory[1] / 2**20:.1f}",
        ],
    ]
    return columns(rows)


def _ms(seconds: Sequence[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"median {cuts[49] * 1e3:.1f} ms, 95% within {cuts[94] * 1e3:.1f} ms"


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--short", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        figures = measure(Path(work), options.requests, options.short)
    print(table(figures))
    return int(figures.different > 0)


if __name__ == "__main__":
    sys.exit(main())
