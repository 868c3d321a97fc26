"""Of a report's page: what happened to the run, newest first where there is much: findings, faults, alerts, checkpoints."""

from collections.abc import Iterator
from html import escape

from meshtrain.config import short
from meshtrain.report import text
from meshtrain.report.elements import MOST_ROWS, rest, table
from meshtrain.report.facts import Facts
from meshtrain.report.verdict import alerts_by_rule
from meshtrain.survive import history as histories
from meshtrain.survive.life import took


def findings(facts: Facts) -> Iterator[str]:
    if facts.findings is None:
        return
    yield "<h2>Why it is slow: findings</h2>"
    found = [f for f in facts.findings if histories.text(f.get("sentence"))]
    for finding in found:
        share, settings_ = histories.number(finding.get("severity")), finding.get("settings")
        worth = f"Curing it would win {share:.0%} of a step." if share else ""
        sure = "" if finding.get("sure", True) else "This is not sure."
        given = (
            [f"--set {short(one)}" for one in settings_ if isinstance(one, str)] if isinstance(settings_, list) else []
        )
        code = f"<p><code>{escape(' '.join(given))}</code></p>" if given else ""
        advice = " ".join(filter(None, (sure, worth, histories.text(finding.get("advice")))))
        yield f'<div class="finding"><p><b>{escape(histories.text(finding.get("sentence")))}</b></p><p>{escape(advice)}</p>{code}</div>'
    if not found:
        yield "<p>None.</p>"
    unknown = facts.diagnosis.get("cannot_tell")
    lines = [histories.text(one) for one in unknown] if isinstance(unknown, list) else []
    if any(lines):
        items = "".join(f"<li>{escape(one)}</li>" for one in lines if one)
        yield f"<p>It cannot be told:</p><ul>{items}</ul>"


def faults(facts: Facts) -> Iterator[str]:
    if facts.survived is None:
        return
    told, found = facts.survived.ledger, facts.survived.reliability
    yield "<h2>Goodput and faults</h2>"
    yield (
        f"<p>Goodput {told.goodput:.1%} of {took(told.wall)}, in steps that count; effective {told.effective:.1%}, with their data, evaluations and saves. "
        f"{len(told.generations)} generation{'' if len(told.generations) == 1 else 's'}.</p>"
    )
    rows = [
        (
            took(f.time - told.began),
            f.kind,
            ", ".join(f.blamed) or "nobody",
            "-" if f.restart is None else took(f.restart),
            f.reason,
        )
        for f in found.failures[-MOST_ROWS:]
    ]
    if rows:
        yield table(("after", "kind", "blamed", "to the next step", "why"), rows)
        yield rest(len(found.failures), "faults")


def alerts(facts: Facts) -> Iterator[str]:
    if not facts.alerts:
        return
    yield "<h2>Alerts</h2>"
    counts = ", ".join(f"{n} × {rule}" for rule, n in alerts_by_rule(facts))
    yield f"<p>{escape(counts or 'None has begun')}.</p>"
    rows = []
    for alert in facts.alerts[-MOST_ROWS:]:
        time, step = histories.number(alert.get("time")), histories.whole(alert.get("step"))
        at = f"{histories.date(time):%m-%d %H:%M:%S}" if time else "-"
        words = [histories.text(alert.get(name)) for name in ("rule", "state", "sentence")]
        rows.append((at, "-" if step is None else f"{step:,}", *words))
    yield table(("time, UTC", "step", "rule", "state", ""), rows)
    yield rest(len(facts.alerts), "alerts")


def checkpoints(facts: Facts) -> Iterator[str]:
    if not facts.checkpoints:
        return
    yield "<h2>Checkpoints</h2>"
    rows = [
        (
            c.name,
            c.problem or c.saved.replace("T", " ").replace("+00:00", " UTC"),
            text.loss(c.loss),
            text.eval_loss(c),
            text.nbytes(c.nbytes),
        )
        for c in facts.checkpoints[-MOST_ROWS:]
    ]
    yield table(("step", "saved", "loss", "eval loss", "size"), rows)
    yield rest(len(facts.checkpoints), "checkpoints")
