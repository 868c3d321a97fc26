"""python -m meshtrain.monitor RUN: runs while they go on, in the terminal, until Ctrl-C or the last step of the last."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from meshtrain.cli import DONE, Parser, command, whole_number
from meshtrain.monitor.screen import line, screen
from meshtrain.monitor.watched import Watched

EVERY = 2  # seconds between two looks
WIDE = 160  # letters of a picture that goes to a file


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
    watched = [Watched(run) for run in options.runs]
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        if options.once:
            width = console.width if console.is_terminal else WIDE
            console.print(screen([one.look() for one in watched], width, sys.maxsize))
        elif console.is_terminal:
            _live(watched, console, options.every)
        else:
            _lines(watched, options.every)
    except KeyboardInterrupt:
        # How one leaves it.
        return DONE
    return DONE


def _live(watched: Sequence[Watched], console: Console, every: float) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            looks = [one.look() for one in watched]
            # The last line stays free for the cursor.
            live.update(screen(looks, console.width, console.height - 1), refresh=True)
            if all(look.over for look in looks):
                return
            time.sleep(every)


def _lines(watched: Sequence[Watched], every: float) -> None:
    while True:
        looks = [one.look() for one in watched]
        for look in looks:
            print(line(look), flush=True)
        if all(look.over for look in looks):
            return
        time.sleep(every)


if __name__ == "__main__":
    sys.exit(main())
