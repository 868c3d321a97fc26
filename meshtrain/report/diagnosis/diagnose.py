"""From evidence, by rules, to findings; and where the time of a step went, beside the plan."""

from meshtrain.report.diagnosis.evidence import Evidence
from meshtrain.report.diagnosis.findings import Diagnosis, Finding, Part
from meshtrain.report.diagnosis.layouts import layouts, links, remarks
from meshtrain.report.diagnosis.rules import ALWAYS, ON_OUR_OWN, shared
from meshtrain.report.trace.attribution import planned


def diagnose(evidence: Evidence, missing: tuple[str, ...] = ()) -> Diagnosis:
    """Findings, the most severe first. On a shared machine there is no other verdict on speed, and that one comes first.

    `missing`: why there is no trace.
    """
    others = sorted(shared(evidence), key=_most_first)
    rules = ALWAYS if others else (*ALWAYS, *ON_OUR_OWN, links, layouts)
    found = sorted((finding for rule in rules for finding in rule(evidence)), key=_most_first)
    return Diagnosis(
        findings=(*others, *found),
        parts=tuple(parts(evidence)),
        mean_seconds=evidence.seconds / evidence.rows if evidence.rows else None,
        planned_seconds=evidence.plan.seconds if evidence.plan else None,
        cluster=evidence.plan.cluster.name if evidence.plan else None,
        remarks=() if others else tuple(remarks(evidence)),
        cannot_tell=tuple(cannot_tell(evidence, missing)),
    )


def _most_first(finding: Finding) -> tuple[float, str]:
    return -finding.severity, finding.name


def parts(evidence: Evidence) -> list[Part]:
    """Mean seconds of a step by what they went on. The rows know of data and checkpoints, the trace of the rest."""
    known = evidence.rows
    if not known or not evidence.seconds:
        return []
    step = evidence.seconds / known
    data = evidence.total("data_wait_seconds") / known
    saves = evidence.total("checkpoint_blocked_seconds") / known
    expected = planned(dict(evidence.plan.time.parts())) if evidence.plan else {}
    found = []
    if evidence.attribution is not None:
        scale = max(0.0, step - data - saves) / evidence.attribution.wall_seconds
        for name, seconds in evidence.attribution.parts.items():
            found.append(Part(name, seconds * scale, expected.get(name)))
    else:
        found += [Part(name, None, seconds) for name, seconds in expected.items()]
    return [*found, Part("waiting for data", data, None), Part("held up by checkpoints", saves, None)]


def cannot_tell(evidence: Evidence, missing: tuple[str, ...]) -> list[str]:
    """What of the evidence is missing, and what is not known for it."""
    found = [*missing]
    if not evidence.rows:
        found.append("how fast the run is: it has written less than two rows of metrics.")
    if not any(len(evidence.sampled(rank, "machine_cpu_ratio")) for rank in evidence.samples):
        found.append(
            "whether others use the machine, and how near memory is to its limit: there are no samples of resources "
            "(telemetry.every is how often they are taken)."
        )
    if evidence.attribution is not None:
        found += evidence.attribution.cannot_tell
    elif not missing:
        found.append("where the time of a step went: there is no trace.")
    if evidence.plan is None:
        found.append(
            "whether another layout is faster: there is no plan of this config for its cluster (--cluster names one)."
        )
    return found
