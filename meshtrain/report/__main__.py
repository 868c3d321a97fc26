"""python -m meshtrain.report RUN: healthy or not, how fast against what is possible, why it is slow; with two runs,
what differs; of more, a table with the best first.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from meshtrain.cli import DONE, Parser, check_target, command, write_target
from meshtrain.config import ConfigError
from meshtrain.report import compare, page, ranking, text
from meshtrain.report.facts import gather
from meshtrain.report.summary import summarise, to_json

STYLE = {"good": "bold green", "note": "bold", "bad": "bold red"}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.html:
        check_target(options.html)
    runs = options.run
    if len(runs) > 2:
        return _rank(options)
    facts = [gather(run, options.cluster) for run in runs]
    if options.diagnose:
        # Traces take JAX.
        from meshtrain.report.diagnosis import diagnose

        for i, run in enumerate(runs):
            content = diagnose.run(run, options.cluster).as_json()
            facts[i] = replace(
                facts[i], diagnosis=content, findings=tuple(content["findings"])
            )
    summaries = [summarise(run) for run in facts]
    compared = compare.compare(facts[0], facts[1]) if len(facts) == 2 else None
    if options.json:
        content = to_json(facts[0], summaries[0])
        if compared is not None:
            content |= {
                "other": to_json(facts[1], summaries[1]),
                "compared": compared.as_json(),
            }
        print(json.dumps(content, indent=2))
    elif compared is not None:
        _print(Text(compare.render(compared, facts if options.diagnose else ())))
    else:
        styled = Text(text.render(facts[0], summaries[0]))
        styled.stylize(STYLE[summaries[0].level], 0, styled.plain.index("\n"))
        _print(styled)
    if options.html:
        write_target(options.html, page.page(facts, summaries, compared))
    return DONE


def _rank(options: argparse.Namespace) -> int:
    """Ranks three runs or more."""
    if options.diagnose:
        raise ConfigError(f"--diagnose takes one run or two, not {len(options.run)}.")
    ranked = ranking.rank(options.run)
    if options.json:
        print(json.dumps(ranked.as_json(), indent=2))
    else:
        _print(Text(ranking.render(ranked, Console().width)))
    if options.html:
        write_target(options.html, ranking.page(ranked, f"{len(options.run)} runs"))
    return DONE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.report",
        description="Reports whether a run is healthy, how fast it is against what is possible, and why "
        "it is slow; of two runs, what differs.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="a run directory; two are compared, three or more are ranked",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="writes the report as one page with pictures"
    )
    parser.add_argument(
        "--json", action="store_true", help="prints one JSON object instead of text"
    )
    parser.add_argument(
        "--diagnose",
        action="store_true",
        help="shows from a trace where the time went, and what to change",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE|NAME",
        help="the hardware to compare with, as for plan (default: cpu with run.fake_devices, else h100)",
    )
    parser.add_trust()
    return parser


def _print(words: Text) -> None:
    Console(highlight=False, soft_wrap=True).print(words)


if __name__ == "__main__":
    sys.exit(main())
