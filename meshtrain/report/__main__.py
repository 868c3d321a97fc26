"""python -m meshtrain.report RUN: healthy or not, how fast against what is possible, why it is slow; of two runs, what differs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from meshtrain.cli import DONE, Parser, check_target, command, write_target
from meshtrain.report import compare, page, text
from meshtrain.report.facts import Facts, gather
from meshtrain.report.summary import Summary, summarise, to_json

STYLE = {"good": "bold green", "note": "bold", "bad": "bold red"}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m meshtrain.report",
        description="What became of a run: healthy or not, how fast against what is possible, and why it is slow; of two runs, what differs.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("other", metavar="RUN2", type=Path, nargs="?", help="another run's directory, to compare with")
    parser.add_argument("--html", metavar="FILE", help="writes it all as one page with pictures")
    parser.add_argument("--json", action="store_true", help="prints one JSON object in place of text")
    parser.add_argument(
        "--diagnose", action="store_true", help="tells from a trace where the time went, and what to change"
    )
    parser.add_argument("--cluster", metavar="FILE|NAME", help="what it is held against, as plan takes it; default: cpu with run.fake_devices, else h100")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.html:
        check_target(options.html)
    runs = [run for run in (options.run, options.other) if run is not None]
    facts = [gather(run, options.cluster) for run in runs]
    told = [""] * len(runs)
    if options.diagnose:
        for i, run in enumerate(runs):
            facts[i], told[i] = _diagnosed(run, options.cluster, facts[i])
    summaries = [summarise(one) for one in facts]
    compared = compare.compare(facts[0], facts[1]) if len(facts) == 2 else None
    if options.json:
        found = to_json(facts[0], summaries[0])
        if compared is not None:
            found |= {"other": to_json(facts[1], summaries[1]), "compared": compared.as_json()}
        print(json.dumps(found, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        if compared is not None:
            console.print(Text(compare.render(compared, told)))
        else:
            console.print(_styled(text.render(facts[0], summaries[0], told[0]), summaries[0]))
    if options.html:
        write_target(options.html, page.page(facts, summaries, compared))
    return DONE


def _diagnosed(run: Path, cluster: str | None, facts: Facts) -> tuple[Facts, str]:
    """The facts with a diagnosis that is made now, and its words."""
    # Traces take JAX.
    from meshtrain.report.diagnosis import command as diagnosis

    found = diagnosis.run(run, cluster)
    said = found.as_json()
    return replace(facts, diagnosis=said, findings=tuple(said["findings"])), diagnosis.told(found)


def _styled(told: str, summary: Summary) -> Text:
    """The verdict in its colour."""
    styled = Text(told)
    styled.stylize(STYLE[summary.level], 0, told.index("\n"))
    return styled


if __name__ == "__main__":
    sys.exit(main())
