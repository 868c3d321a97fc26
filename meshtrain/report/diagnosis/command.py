"""`python -m meshtrain.report RUN --diagnose`: a trace, the evidence, the findings; RUN/findings.json keeps them."""

import json
from pathlib import Path

from meshtrain.config import Config
from meshtrain.errors import ConfigError, refusal, say
from meshtrain.files import write_atomically
from meshtrain.report.diagnosis.diagnose import diagnose
from meshtrain.report.diagnosis.findings import Diagnosis, Part
from meshtrain.report.diagnosis.reading import attributed, newest_trace, read, read_config
from meshtrain.report.diagnosis.tracing import trace_beside
from meshtrain.report.trace.attribution import Attribution
from meshtrain.run.directory import FINDINGS
from meshtrain.run.lock import in_use


def run(directory: Path, cluster: str | None = None) -> Diagnosis:
    """Diagnoses a run, with the trace that it has or one that is made beside it, planned for a cluster as `plan --cluster` takes it.

    ConfigError if it is no run. What is done is said on stderr; `told` has the words for stdout.
    """
    attribution, missing = _attribution(directory, read_config(directory))
    evidence = read(directory, attribution, cluster)
    found = diagnose(evidence, missing)
    try:
        write_atomically(directory / FINDINGS, (json.dumps(found.as_json(), indent=1) + "\n").encode())
    # The run may be somebody else's.
    except OSError as error:
        say(f"{directory / FINDINGS} cannot be written: {refusal(error)}; the findings stand here alone.")
    return found


def _attribution(directory: Path, config: Config) -> tuple[Attribution | None, tuple[str, ...]]:
    """Of the newest trace, or of one that is made; or why there is none."""
    trace = newest_trace(directory)
    try:
        if trace is not None:
            return attributed(trace), ()
        if in_use(directory):
            return None, (
                "where the time of a step goes: the run has no trace and is still going on, so that one made beside it would show how they "
                "disturb each other; ask for one with telemetry.trace_at.",
            )
        return trace_beside(config), ()
    except (ConfigError, RuntimeError) as problem:
        return None, (f"where the time of a step went: {problem}",)


def told(found: Diagnosis) -> str:
    """The diagnosis for people."""
    lines = [*_table(found), ""] if found.parts else []
    if not found.findings:
        lines.append("Findings: none." if not found.cannot_tell else "Findings: none, as far as can be told.")
    for number, finding in enumerate(found.findings, 1):
        doubt = "" if finding.sure else " (not sure)"
        lines.append(f"{number}. {finding.sentence} Curing it would win {finding.severity:.0%} of the step{doubt}.")
        lines.append(f"   {finding.advice}")
    lines += [f"Note: {remark}" for remark in found.remarks]
    if found.cannot_tell:
        lines += ["", "Cannot tell:", *(f"- {sentence}" for sentence in found.cannot_tell)]
    return "\n".join(lines)


def _table(found: Diagnosis) -> list[str]:
    """Where the time of a step went, beside the plan."""
    beside = f"plan for {found.cluster}" if found.cluster else "no plan"
    lines = [f"{'a step':24}{'measured':>20}{beside:>28}"]
    for part in (*found.parts, Part("together", found.mean_seconds, found.planned_seconds)):
        if part.seconds or part.planned:
            lines.append(
                f"{part.name:24}{_share(part.seconds, found.mean_seconds):>20}{_share(part.planned, found.planned_seconds):>28}"
            )
    if found.cluster == "cpu":
        lines.append(
            "The plan is for a described machine with 2 cores, not for this one: compare shares, not seconds "
            "(plan --measure describes this one)."
        )
    return lines


def _share(seconds: float | None, whole: float | None) -> str:
    if seconds is None or not whole:
        return "-"
    return f"{1000 * seconds:,.1f} ms {seconds / whole:4.0%}"
