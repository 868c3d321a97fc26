"""Diagnoses a run: from its files to evidence, by rules to findings, beside the plan.

`python -m meshtrain.report RUN --diagnose`.

Files that are missing or unreadable become a sentence. RUN/findings.json keeps the diagnosis.
"""

import json
from pathlib import Path

from meshtrain.config import Config, ConfigError
from meshtrain.errors import refusal, say
from meshtrain.files import write_atomically
from meshtrain.report.diagnosis.evidence import (
    Diagnosis,
    DiagnosisPart,
    Evidence,
    Finding,
)
from meshtrain.report.diagnosis.layouts import layouts, links, remarks
from meshtrain.report.diagnosis.rules import ALWAYS, ON_OUR_OWN, shared
from meshtrain.report.diagnosis.tracing import attributed, newest_trace, trace_beside
from meshtrain.report.facts import RunFacts, config_of, gather, likely, refuse_no_run
from meshtrain.report.trace.attribution import Attribution, planned
from meshtrain.run.directory import FINDINGS
from meshtrain.run.lock import in_use


def run(directory: Path, cluster: str | None = None) -> Diagnosis:
    """Diagnoses a run, with the trace that it has or one that is made beside it, planned for a cluster as `plan
    --cluster` takes it.

    ConfigError if it is not a run. Progress goes to stderr.
    """
    refuse_no_run(directory)
    notes: list[str] = []
    config = config_of(directory, notes)
    if config is None:
        raise ConfigError(" ".join(notes))
    attribution, missing = _attribution(directory, config)
    diagnosis = diagnose(read(directory, attribution, cluster), missing)
    try:
        write_atomically(
            directory / FINDINGS,
            (json.dumps(diagnosis.as_json(), indent=1) + "\n").encode(),
        )
    # The run may be somebody else's.
    except OSError as error:
        say(
            f"{directory / FINDINGS} cannot be written: {refusal(error)}; the findings stand here alone."
        )
    return diagnosis


def _attribution(
    directory: Path, config: Config
) -> tuple[Attribution | None, tuple[str, ...]]:
    """Returns the attribution of the newest trace, or of one that is made; or why there is none."""
    trace = newest_trace(directory)
    try:
        if trace is not None:
            return attributed(trace), ()
        if in_use(directory):
            return None, (
                "where the time of a step goes: the run has no trace and is still going on, so that one made beside "
                "it would show how they "
                "disturb each other; ask for one with telemetry.trace_at.",
            )
        return trace_beside(config), ()
    except (ConfigError, RuntimeError) as problem:
        return None, (f"where the time of a step went: {problem}",)


def read(
    directory: Path, attribution: Attribution | None = None, cluster: str | None = None
) -> Evidence:
    """Returns the evidence of a run, with a trace's attribution if there is one, planned for a cluster as `plan
    --cluster` takes it.

    ConfigError if it is not a run, or has a config that cannot be read.
    """
    facts = gather(directory, cluster)
    if facts.config is None:
        raise ConfigError(" ".join(facts.notes))
    lost = None
    if facts.survived is not None and (ledger := facts.survived.ledger).wall:
        lost = (ledger.seconds["lost"] + ledger.seconds["down"]) / ledger.wall
    # For other devices than the run's a plan would be advice on another machine.
    plan = (
        facts.plan
        if cluster is not None or _devices_are_known(facts, attribution)
        else None
    )
    return Evidence(
        facts.config, facts.steps, facts.samples, facts.hosts, attribution, plan, lost
    )


def _devices_are_known(facts: RunFacts, attribution: Attribution | None) -> bool:
    assert facts.config is not None
    name = likely(facts.config, facts.steps, facts.samples)
    # A config that asks for fake devices runs on GPUs where there are some, of which a trace tells even where no row
    # does.
    return name is not None and (
        name != "cpu" or attribution is None or attribution.platform == "cpu"
    )


def diagnose(evidence: Evidence, missing: tuple[str, ...] = ()) -> Diagnosis:
    """Returns findings, the most severe first.

    On a shared machine there is no other verdict on speed, and that one comes first.

    `missing`: why there is no trace.
    """
    others = sorted(shared(evidence), key=_most_first)
    rules = ALWAYS if others else (*ALWAYS, *ON_OUR_OWN, links, layouts)
    findings = sorted(
        (finding for rule in rules for finding in rule(evidence)), key=_most_first
    )
    return Diagnosis(
        findings=(*others, *findings),
        parts=tuple(_parts(evidence)),
        mean_seconds=evidence.seconds / evidence.rows if evidence.rows else None,
        planned_seconds=evidence.plan.seconds if evidence.plan else None,
        cluster=evidence.plan.cluster.name if evidence.plan else None,
        remarks=() if others else tuple(remarks(evidence)),
        cannot_tell=tuple(_cannot_tell(evidence, missing)),
    )


def _most_first(finding: Finding) -> tuple[float, str]:
    return -finding.severity, finding.name


def _parts(evidence: Evidence) -> list[DiagnosisPart]:
    """Mean seconds of a step by what they went on. The rows know of data and checkpoints, the trace of the rest."""
    rows = evidence.rows
    if not rows or not evidence.seconds:
        return []
    step = evidence.seconds / rows
    data = evidence.total("data_wait_seconds") / rows
    saves = evidence.total("checkpoint_blocked_seconds") / rows
    expected = planned(dict(evidence.plan.time.parts())) if evidence.plan else {}
    if evidence.attribution is not None:
        scale = max(0.0, step - data - saves) / evidence.attribution.wall_seconds
        measured = evidence.attribution.parts.items()
        parts = [
            DiagnosisPart(name, seconds * scale, expected.get(name))
            for name, seconds in measured
        ]
    else:
        parts = [
            DiagnosisPart(name, None, seconds) for name, seconds in expected.items()
        ]
    return [
        *parts,
        DiagnosisPart("waiting for data", data, None),
        DiagnosisPart("held up by checkpoints", saves, None),
    ]


def _cannot_tell(evidence: Evidence, missing: tuple[str, ...]) -> list[str]:
    """Returns which evidence is missing, and what is unknown without it."""
    sentences = [*missing]
    if not evidence.rows:
        sentences.append(
            "how fast the run is: it has written less than two rows of metrics."
        )
    if not evidence.means("machine_cpu_ratio"):
        sentences.append(
            "whether others use the machine, and how near memory is to its limit: there are no samples of resources "
            "(telemetry.every is how often they are taken)."
        )
    if evidence.attribution is not None:
        sentences += evidence.attribution.cannot_tell
    elif not missing:
        sentences.append("where the time of a step went: there is no trace.")
    if evidence.plan is None:
        sentences.append(
            "whether another layout is faster: there is no plan of this config for its cluster (--cluster names one)."
        )
    return sentences
