"""How runs are shown: a block of a few lines each; where there is no room for these, and where there is no terminal, a line each."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.console import Group, RenderableType
from rich.text import Text

from meshtrain.monitor.watched import Look
from meshtrain.plan import report
from meshtrain.report.text import sparkline
from meshtrain.telemetry.progress import duration

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
    speed = look.summary.speed if look.summary else None
    if speed is not None:
        yield f"{speed.tokens_per_second:,.0f} tokens/s"
        yield f"{report.duration(speed.median)} a step"
        if speed.mfu is not None:
            yield f"MFU {speed.mfu:.1%}"
        if speed.waiting is not None:
            yield f"data wait {speed.waiting:.1%}"
    if look.memory is not None:
        yield f"memory {report.size(look.memory)}"


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
    said = [*look.alerts, *look.lagging]
    said += [reason.sentence for reason in summary.reasons if reason.level == "bad" and reason.sentence not in said]
    for sentence in said:
        for words in wrap(sentence, width, initial_indent="  ! ", subsequent_indent="    ", max_lines=MOST_LINES):
            yield Text(words, "red")


def _styled(words: str, look: Look) -> Text:
    return Text(words, STYLE[look.summary.state] if look.summary else "dim")
