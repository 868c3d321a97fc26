"""Shows runs while they go on, in the terminal, until q, Ctrl-C or the last step of the last: python -m
meshtrain.monitor RUN

A run is a block of a few lines; where there is no room for these, and where there is no terminal, a line each.
"""

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from meshtrain import units
from meshtrain.cli import DONE, Parser, command, whole_number
from meshtrain.monitor.watched import Look, WatchedRun, is_run
from meshtrain.report.summary import Summary
from meshtrain.report.text import sparkline
from meshtrain.survive.history import date
from meshtrain.survive.reliability import Failure
from meshtrain.telemetry.catalogue import RECENT_ROWS
from meshtrain.units import duration

EVERY = 2  # seconds between two updates
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
MOST_FAULTS = 4  # the newest
LEAST = 8  # letters of a sparkline or a bar
SHOWN = ("MFU", "data wait", "reward", "gap")  # figures of a summary behind its speed


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    watched = [WatchedRun(run) for named in options.runs for run in _runs_in(named)]
    if options.json:
        print(json.dumps([run.look().as_json() for run in watched], indent=2))
        return DONE
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    # Ctrl-C is how one leaves it.
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        if options.once:
            width = console.width if console.is_terminal else WIDE
            console.print(
                Group(
                    head(width),
                    screen([run.look() for run in watched], width, sys.maxsize),
                )
            )
            return DONE
        live = (
            stack.enter_context(Live(console=console, auto_refresh=False))
            if console.is_terminal
            else None
        )
        ends_in = stack.enter_context(_keys()) if live else _sleep
        while True:
            looks = [run.look() for run in watched]
            if live is None:
                print("\n".join(map(line, looks)), flush=True)
            else:
                # The last line stays free for the cursor.
                shown = screen(looks, console.width, console.height - 2)
                live.update(
                    Group(head(console.width, options.every), shown), refresh=True
                )
            if all(look.ended for look in looks) or ends_in(options.every):
                break
    return DONE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.monitor",
        description="Shows runs while they train: steps, losses, speed, memory, alerts, faults, lagging "
        "processes. q or Ctrl-C ends it.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="a run directory, which need not exist yet, or a directory of runs",
    )
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=whole_number,
        default=EVERY,
        help="between two updates",
    )
    parser.add_argument(
        "--once", action="store_true", help="shows the current state and ends"
    )
    parser.add_argument(
        "--json", action="store_true", help="prints the current state as JSON and ends"
    )
    parser.add_trust()
    return parser


def _runs_in(directory: Path) -> list[Path]:
    """Returns a run's directory; if it holds runs, theirs, the newest last.

    A directory that is empty or missing may become a run.
    """
    if is_run(directory):
        return [directory]
    with contextlib.suppress(OSError, ValueError):
        return sorted(
            filter(is_run, directory.iterdir()), key=lambda run: run.stat().st_mtime
        ) or [directory]
    return [directory]


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits so many seconds, or until a key is pressed, and returns whether that was q."""
    if not sys.stdin.isatty():
        yield _sleep
        return

    def pressed(seconds: float) -> bool:
        return (
            bool(select.select([sys.stdin], [], [], seconds)[0])
            and os.read(sys.stdin.fileno(), 1) in b"qQ"
        )

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def head(width: int, every: float | None = None) -> Text:
    """Returns the line above all runs: the clock, the keys, and of what the figures are."""
    keys = "" if every is None else f"  every {every:g} s  q ends, any key looks"
    words = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC{keys}"
    about = f"of the last {RECENT_ROWS} rows"
    room = width - len(words) - len(about)
    return Text(
        words + (" " * room + about if room > 1 else ""),
        "dim",
        no_wrap=True,
        overflow="ellipsis",
    )


def screen(looks: Sequence[Look], width: int, height: int) -> RenderableType:
    """Returns all runs, in blocks if these fit into `height` lines."""
    blocks = [list(_block(look, width)) for look in looks]
    lines = [one for block in blocks for one in [*block, Text()]][:-1]
    if len(lines) > height:
        lines = [
            Text(line(look), STYLE[look.summary.state] if look.summary else "dim")
            for look in looks
        ]
        more = len(lines) - height
        lines = (
            [*lines[: height - 1], Text(f"and {more + 1} more")] if more > 0 else lines
        )
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
    parts = [
        f"{summary.state}{left}",
        f"step {summary.step}{f'/{summary.steps}' if summary.steps else ''}",
    ]
    if summary.loss is not None:
        parts.append(f"loss {look.columns.known('loss')[-1]:.4f}")
    parts += [
        *_figures(look),
        *(f"! {sentence}" for sentence in (*look.alerts, *look.lagging)),
    ]
    return f"{look.name}: {'  '.join(parts)}"


def _figures(look: Look) -> Iterator[str]:
    figures = look.summary.figures if look.summary else {}
    yield from (
        f"{figures[name]} {name}" for name in ("tokens/s", "a step") if name in figures
    )
    yield from (f"{name} {figures[name]}" for name in SHOWN if name in figures)
    if look.memory is not None:
        yield f"memory {units.size(look.memory)}"


def _block(look: Look, width: int) -> Iterator[Text]:
    summary = look.summary
    if summary is None:
        yield Text.assemble((look.name, "bold"), ("  there is no run here yet", "dim"))
        return
    yield _head(look, summary, width)
    is_alive = summary.state in ("going on", "stalled")
    if look.columns.known("loss").size:
        yield _losses(look, summary, width)
    if look.sample:
        prompt, text = (" ".join(part.split()) for part in look.sample)
        yield Text.assemble("  sample ", (prompt, "dim"), " │ ", text)
    if summary.patience_left and is_alive:
        yield Text(
            f"  ends after {summary.patience_left} more without a lower eval loss",
            "dim",
        )
    if figures := list(_figures(look)):
        drawn = _drawn(
            look.columns.known("tokens_per_second"),
            width - len("  ".join(["", *figures, ""])),
        )
        yield Text("  " + "  ".join(filter(None, [figures[0], drawn, *figures[1:]])))
    if look.phases and is_alive:
        yield Text(f"  phases: {look.phases}", "dim")
    if look.life:
        yield Text(f"  {look.life}", "dim")
    for fault in look.faults[-MOST_FAULTS:]:
        yield from _wrapped(_fault(fault), width, "  fault ", "yellow")
    if (more := len(look.faults) - MOST_FAULTS) > 0:
        yield Text(f"  and {more} before these", "yellow")
    bad = [reason.sentence for reason in summary.reasons if reason.level == "bad"]
    for sentence in dict.fromkeys([*look.alerts, *look.lagging, *bad]):
        yield from _wrapped(sentence, width, "  ! ", "red")


def _head(look: Look, summary: Summary, width: int) -> Text:
    """Returns the line with a run's name, state, step and bar."""
    of = f" of {summary.steps:,}" if summary.steps else ""
    head = Text.assemble(
        (look.name, "bold"),
        "  ",
        (summary.state, STYLE[summary.state]),
        f"  step {summary.step:,}{of}  ",
    )
    left = f"  {duration(look.left)} left" if look.left is not None else ""
    room = width - head.cell_len - len(left) - 5
    if summary.steps and room >= LEAST:
        done = min(summary.step / summary.steps, 1.0)
        full = round(room * done)
        head.append("━" * full, "green" if summary.state == "done" else "blue")
        head.append("━" * (room - full), "bright_black").append(f" {done:.0%}")
    return head.append(left)


def _losses(look: Look, summary: Summary, width: int) -> Text:
    """Returns the line with the losses, of which the training loss is drawn."""
    losses = look.columns.known("loss")
    evals = look.columns.known("eval_loss")
    words = f"  eval {evals[-1]:.4f}" if evals.size else ""
    if summary.eval_least is not None:
        words += f"  lowest {summary.eval_least:.4f}, step {summary.eval_least_step:,}"
    if summary.accuracy is not None:
        words += f"  accuracy {summary.accuracy:.1%}"
    value = f"{losses[-1]:.4f} "
    drawn = _drawn(losses, width - len(f"  loss {value}{words}"))
    return Text.assemble("  loss ", (value, "bold"), (drawn, "blue"), words)


def _wrapped(sentence: str, width: int, begin: str, style: str) -> Iterator[Text]:
    indent = " " * len(begin)
    lines = wrap(
        sentence,
        width,
        initial_indent=begin,
        subsequent_indent=indent,
        max_lines=MOST_LINES,
    )
    yield from (Text(words, style) for words in lines)


def _drawn(values: np.ndarray, room: int) -> str:
    return sparkline(values, room) if room >= LEAST else ""


def _fault(fault: Failure) -> str:
    who = ", ".join(fault.blamed) or "nobody"
    return f"{date(fault.time):%m-%d %H:%M:%S}  generation {fault.generation}  {fault.kind} of {who}: {fault.reason}"


if __name__ == "__main__":
    sys.exit(main())
