"""Shows runs while they go on, in the terminal, until Ctrl-C or the last step of the last: python -m meshtrain.monitor RUN

A run is a block of a few lines; where there is no room for these, and where there is no terminal, a line each.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
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
    options = parser().parse_args(arguments)
    watched = [WatchedRun(run) for run in options.runs]
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    # Ctrl-C is how one leaves it.
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        if options.once:
            width = console.width if console.is_terminal else WIDE
            console.print(screen([run.look() for run in watched], width, sys.maxsize))
            return DONE
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        while True:
            looks = [run.look() for run in watched]
            if live is None:
                print("\n".join(map(line, looks)), flush=True)
            else:
                # The last line stays free for the cursor.
                live.update(screen(looks, console.width, console.height - 1), refresh=True)
            if all(look.over for look in looks):
                break
            time.sleep(options.every)
    return DONE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.monitor",
        description="Shows runs while they go on: steps, losses, speed, memory, alerts, who lags. Ctrl-C ends it.",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="a run's directory, which need not be there yet"
    )
    parser.add_argument("--every", metavar="SECONDS", type=whole_number, default=EVERY, help="between two looks")
    parser.add_argument("--once", action="store_true", help="shows it once, and ends")
    return parser


def screen(looks: Sequence[Look], width: int, height: int) -> RenderableType:
    """Returns all runs, in blocks if these fit into `height` lines."""
    blocks = [list(_block(look, width)) for look in looks]
    lines = [one for block in blocks for one in [*block, Text()]][:-1]
    if len(lines) > height:
        lines = [Text(line(look), STYLE[look.summary.state] if look.summary else "dim") for look in looks]
        more = len(lines) - height
        lines = [*lines[: height - 1], Text(f"and {more + 1} more")] if more > 0 else lines
    for one in lines:
        one.truncate(width, overflow="ellipsis")
        one.no_wrap = True
    return Group(*lines)


def line(look: Look) -> str:
    """Returns a run in one plain line."""
    summary = look.summary
    if summary is None:
        return f"{look.name}: there is no run in {look.directory} yet"
    left = f", {duration(look.left)} left" if look.left is not None else ""
    parts = [f"{summary.state}{left}", f"step {summary.step}{f'/{summary.steps}' if summary.steps else ''}"]
    if summary.loss is not None:
        parts.append(f"loss {look.columns.known('loss')[-1]:.4f}")
    parts += [*_figures(look), *(f"! {sentence}" for sentence in (*look.alerts, *look.lagging))]
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
    room = min(width - head.cell_len - len(left) - 5, 40)
    if summary.steps and room >= 8:
        done = min(summary.step / summary.steps, 1.0)
        full = round(room * done)
        head.append("━" * full, "green" if summary.state == "done" else "blue")
        head.append("━" * (room - full), "bright_black").append(f" {done:.0%}")
    yield head.append(left)
    is_alive, short = summary.state in ("going on", "stalled"), 20 if width < NARROW else 40
    losses, evals = look.columns.known("loss"), look.columns.known("eval_loss")
    if losses.size:
        words = f"  eval {evals[-1]:.4f}" if evals.size else ""
        if summary.eval_least is not None:
            words += f"  lowest {summary.eval_least:.4f}, step {summary.eval_least_step:,}"
        if summary.accuracy is not None:
            words += f"  accuracy {summary.accuracy:.1%}"
        yield Text.assemble("  loss ", (f"{losses[-1]:.4f} ", "bold"), (sparkline(losses, short), "blue"), words)
    if summary.patience_left and is_alive:
        yield Text(f"  ends after {summary.patience_left} more without a lower eval loss", "dim")
    if figures := list(_figures(look)):
        figures.insert(1, sparkline(look.columns.known("tokens_per_second"), short // 2))
        yield Text("  " + "  ".join(figures))
    if look.phases and is_alive:
        yield Text(f"  phases: {look.phases}", "dim")
    bad = [reason.sentence for reason in summary.reasons if reason.level == "bad"]
    for sentence in dict.fromkeys([*look.alerts, *look.lagging, *bad]):
        for words in wrap(sentence, width, initial_indent="  ! ", subsequent_indent="    ", max_lines=MOST_LINES):
            yield Text(words, "red")


if __name__ == "__main__":
    sys.exit(main())
