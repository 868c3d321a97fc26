"""Shows runs while they go on, in the terminal, until Ctrl-C or the last step of the last: python -m meshtrain.monitor RUN

A run is a block of a few lines; where there is no room for these, and where there is no terminal, a line each.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from meshtrain import units
from meshtrain.cli import DONE, Parser, command, whole_number
from meshtrain.monitor.watched import Look, WatchedRun
from meshtrain.report.text import sparkline
from meshtrain.units import duration

EVERY = 2  # seconds between two looks
WIDE = 160  # letters of a picture that goes to a file
STYLE = {
    "done": "green",
    "going on": "bold",
    "stalled": "bold red",
    "stopped": "yellow",
    "over": "yellow",
    "not begun": "dim",
}
MOST_LINES = 3  # of a sentence
NARROW = 100  # letters of a terminal in which sparklines are short


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m meshtrain.monitor",
        description="Shows runs while they go on: steps, losses, speed, memory, alerts, who lags. Ctrl-C ends it.",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="a run's directory, which need not be there yet"
    )
    parser.add_argument(
        "--every", metavar="SECONDS", type=whole_number, default=EVERY, help=f"between two looks; default: {EVERY}"
    )
    parser.add_argument("--once", action="store_true", help="shows it once, and ends")
    options = parser.parse_args(arguments)
    watched = [WatchedRun(run) for run in options.runs]
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    width = console.width if console.is_terminal else WIDE
    # Ctrl-C is how one leaves it.
    with contextlib.suppress(KeyboardInterrupt):
        if options.once:
            console.print(screen([run.look() for run in watched], width, sys.maxsize))
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                # The last line stays free for the cursor.
                show = lambda looks: live.update(screen(looks, console.width, console.height - 1), refresh=True)  # noqa: E731
                _follow(watched, options.every, show)
        else:
            _follow(watched, options.every, lambda looks: print("\n".join(map(line, looks)), flush=True))
    return DONE


def _follow(watched: Sequence[WatchedRun], every: float, show: Callable[[Sequence[Look]], None]) -> None:
    while True:
        looks = [run.look() for run in watched]
        show(looks)
        if all(look.over for look in looks):
            return
        time.sleep(every)


def screen(looks: Sequence[Look], width: int, height: int) -> RenderableType:
    """All runs, in blocks if these fit into `height` lines."""
    blocks = [list(_block(look, width)) for look in looks]
    if sum(len(block) + 1 for block in blocks) - 1 > height:
        lines = [_styled(line(look), look) for look in looks]
        more = len(lines) - height
        lines = [*lines[: height - 1], Text(f"and {more + 1} more")] if more > 0 else lines
    else:
        lines = [one for block in blocks for one in [*block, Text()]][:-1]
    for one in lines:
        one.truncate(width, overflow="ellipsis")
        one.no_wrap = True
    return Group(*lines)


def line(look: Look) -> str:
    """A run in one plain line."""
    summary = look.summary
    if summary is None:
        return f"{look.name}: there is no run in {look.directory} yet"
    parts = [f"{summary.state}{f', {duration(look.left)} left' if look.left is not None else ''}"]
    of = f"/{summary.steps}" if summary.steps else ""
    parts.append(f"step {summary.step}{of}")
    if summary.loss is not None:
        parts.append(f"loss {look.columns.known('loss')[-1]:.4f}")
    parts += _figures(look)
    parts += [f"! {alert}" for alert in look.alerts]
    parts += [f"! {one}" for one in look.lagging]
    return f"{look.name}: {'  '.join(parts)}"


def _figures(look: Look) -> Iterator[str]:
    figures = look.summary.figures if look.summary else {}
    yield from (f"{figures[name]} {name}" for name in ("tokens/s", "a step") if name in figures)
    yield from (f"{name} {figures[name]}" for name in ("MFU", "data wait") if name in figures)
    if look.memory is not None:
        yield f"memory {units.size(look.memory)}"


def _block(look: Look, width: int) -> Iterator[Text]:
    summary = look.summary
    if summary is None:
        yield Text.assemble((look.name, "bold"), ("  there is no run here yet", "dim"))
        return
    of = f" of {summary.steps:,}" if summary.steps else ""
    head = Text.assemble(
        (look.name, "bold"), "  ", (summary.state, STYLE[summary.state]), f"  step {summary.step:,}{of}  "
    )
    left = f"  {duration(look.left)} left" if look.left is not None else ""
    if summary.steps:
        room = min(width - head.cell_len - len(left) - 5, 40)
        if room >= 8:
            done = min(summary.step / summary.steps, 1.0)
            full = round(room * done)
            head.append("━" * full, "green" if summary.state == "done" else "blue").append(
                "━" * (room - full), "bright_black"
            )
            head.append(f" {done:.0%}")
    yield head.append(left)
    short = 20 if width < NARROW else 40
    losses = look.columns.known("loss")
    if losses.size:
        evals = look.columns.known("eval_loss")
        held = f"  eval {evals[-1]:.4f}" if evals.size else ""
        if summary.eval_least is not None:
            held += f"  lowest {summary.eval_least:.4f}, step {summary.eval_least_step:,}"
        if summary.accuracy is not None:
            held += f"  accuracy {summary.accuracy:.1%}"
        yield Text.assemble("  loss ", (f"{losses[-1]:.4f} ", "bold"), (sparkline(losses, short), "blue"), held)
    if summary.patience_left and summary.state in ("going on", "stalled"):
        yield Text(f"  ends after {summary.patience_left} more without a lower eval loss", "dim")
    figures = list(_figures(look))
    if figures:
        rate = look.columns.known("tokens_per_second")
        figures.insert(1, sparkline(rate, short // 2))
        yield Text("  " + "  ".join(figures))
    if look.phases and summary.state in ("going on", "stalled"):
        yield Text(f"  phases: {look.phases}", "dim")
    sentences = [*look.alerts, *look.lagging]
    sentences += [
        reason.sentence for reason in summary.reasons if reason.level == "bad" and reason.sentence not in sentences
    ]
    for sentence in sentences:
        for words in wrap(sentence, width, initial_indent="  ! ", subsequent_indent="    ", max_lines=MOST_LINES):
            yield Text(words, "red")


def _styled(words: str, look: Look) -> Text:
    return Text(words, STYLE[look.summary.state] if look.summary else "dim")


if __name__ == "__main__":
    sys.exit(main())
