"""Layouts that cost more than they need to: a part of the step that is large, and a change that the planner shows to be
faster.

    measured: tensor collectives 31% of the step ──► fewer ways over tensor, each planned ──► advice: the fastest
                                                                                              if it wins enough

A part may be large and nothing be better by the plan: that is a remark, and no advice.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from meshtrain.config import Config, ConfigError, check, replaced
from meshtrain.config.mesh import AXES, CONTEXT, DATA
from meshtrain.config.values import as_text
from meshtrain.plan.estimate import Plan, estimate
from meshtrain.report.diagnosis.evidence import Evidence, Finding
from meshtrain.report.trace.attribution import Attribution

LARGE = 0.1  # share of the step that a part must take
# Share of the step that another layout must win: the planner itself is off by 3% in the median on what it was fitted
# to, and by more on a machine that it only has described.
WORTH = 0.1
SLOW_LINK = 1.5  # times what the plan expects

Change = Mapping[str, Mapping[str, Any]]  # section → key → value

WORDS: dict[str, str] = {
    "tensor": "collectives over tensor",
    "context": "collectives over context",
    "data": "collectives over data",
    "pipeline": "messages between the pipeline's stages",
    "bubble": "slots of the pipeline in which a stage has no work",
    "recomputation": "computing activations a second time",
}


class Cure(NamedTuple):
    """A layout that the planner shows to be faster."""

    settings: tuple[str, ...]
    planned: Plan


def layouts(evidence: Evidence) -> Iterator[Finding]:
    """Yields each part of the step that another layout would make smaller."""
    for part, share, plan in _large(evidence):
        if (cure := fastest(plan, part)) is None:
            continue
        won = 1 - cure.planned.seconds / plan.seconds
        expected = min(share, dict(shares(cure.planned))[part])
        # What a part takes is all that curing it wins, whatever else the other layout makes faster by the plan.
        severity = min(won, share)
        flags = " ".join(f"--set {setting}" for setting in cure.settings)
        advice = f"Try {flags}: by the plan for {plan.cluster.name} a step then takes {1 - won:.0%} of the time."
        # Of fake devices the plan knows a machine, and not this one.
        sure = plan.cluster.accelerator.platform != "cpu"
        sentence = f"{_words(evidence, part, share)}."
        signal = f"share of the step: {part}"
        yield Finding(
            part,
            signal,
            share,
            expected,
            severity,
            sentence,
            advice,
            cure.settings,
            sure,
        )


def remarks(evidence: Evidence) -> Iterator[str]:
    """Large parts of a step that no other layout makes smaller, so that there is nothing to advise."""
    for part, share, plan in _large(evidence):
        if fastest(plan, part) is None:
            yield (
                f"{_words(evidence, part, share)}; by the plan for {plan.cluster.name} no other layout is faster by "
                f"more than {WORTH:.0%}."
            )


def links(evidence: Evidence) -> Iterator[Finding]:
    """Collectives of an axis that take longer than the described links allow.

    A machine that fakes its devices has no links.
    """
    plan = evidence.plan
    attribution = evidence.attribution
    if (
        plan is None
        or attribution is None
        or plan.cluster.accelerator.platform == "cpu"
    ):
        return
    for axis in (*AXES, CONTEXT):
        took = _took(attribution, axis)
        expected = dict(plan.time.parts())[axis]
        excess = (took - expected) / attribution.wall_seconds
        if excess < LARGE or took < SLOW_LINK * expected:
            continue
        slow = f"{took:.3f} s, where the links of {plan.cluster.name} allow for {expected:.3f} s"
        sentence = f"{_words(evidence, axis, took / attribution.wall_seconds)}, {slow}."
        advice = "Measure the links with `meshtrain probe`: one may be slow, or all of them slower than described."
        yield Finding(
            "links",
            f"seconds of a step: {axis}",
            took,
            expected,
            excess,
            sentence,
            advice,
        )


def _large(evidence: Evidence) -> Iterator[tuple[str, float, Plan]]:
    """(part, share of the step, plan) of what takes much of it."""
    if evidence.plan is not None:
        for part in WORDS:
            share = measured(evidence, part)
            if share is not None and share >= LARGE:
                yield part, share, evidence.plan


def _words(evidence: Evidence, part: str, share: float) -> str:
    what = WORDS[part]
    words = f"{what[0].upper()}{what[1:]} take{'s' * (part == 'recomputation')} {share:.0%} of the step"
    across = (
        evidence.attribution.share("island")
        if evidence.attribution is not None and part == DATA
        else 0.0
    )
    return f"{words}, {across:.0%} of it across islands" if across else words


def measured(evidence: Evidence, part: str) -> float | None:
    """The share of the step that a part took; None where it cannot be told."""
    if part == "bubble" and evidence.plan is not None:
        # The schedule's table is exact. A trace of accelerators shows compute in idle slots; of fake devices, which
        # share their cores, an idle one leaves them to the others: what is lost is at most what the cores stand idle.
        slots = evidence.plan.bubble_fraction
        if evidence.plan.cluster.accelerator.platform != "cpu":
            return slots
        return None if evidence.idle is None else min(slots, evidence.idle)
    if evidence.attribution is None:
        return None
    return _took(evidence.attribution, part) / evidence.attribution.wall_seconds


def _took(attribution: Attribution, part: str) -> float:
    """Seconds of a step, those of data with what crosses islands, as the planner has them."""
    return attribution.parts[part] + (
        attribution.seconds.get("island", 0.0) if part == DATA else 0.0
    )


def shares(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yields the planned share of each part that has a cure."""
    for part, name in (
        *((p, p) for p in ("tensor", "context", "data", "pipeline", "bubble")),
        ("recomputation", "recompute"),
    ):
        yield part, dict(plan.time.parts())[name] / plan.seconds


def fastest(plan: Plan, part: str) -> Cure | None:
    """Returns the change that makes a part smaller with the shortest step that fits; None if none wins enough."""
    cures = []
    for change in changes(plan.config, part):
        # Not legal for this batch or model, or not for a schedule that came as a table.
        with contextlib.suppress(ConfigError):
            config = replaced(plan.config, **change)
            check(config)
            cures.append(
                Cure(
                    _settings(plan.config, config, change),
                    estimate(config, plan.cluster),
                )
            )
    best = min(
        (cure for cure in cures if cure.planned.fits),
        key=lambda cure: cure.planned.seconds,
        default=None,
    )
    return best if best and best.planned.seconds <= (1 - WORTH) * plan.seconds else None


def changes(config: Config, part: str) -> Iterator[Change]:
    """Yields what makes a part smaller, on the same number of devices."""
    mesh = config.mesh
    parallel = config.parallel
    more = [m * parallel.microbatches for m in (2, 4, 8)]
    if part == "tensor":
        if not parallel.sequence_parallel:
            yield {"parallel": {"sequence_parallel": True}}
        for change in _onto_data(config, "tensor"):
            # Without tensor parallelism there is no sequence to split.
            unsplit = parallel.sequence_parallel and change["mesh"]["tensor"] == 1
            yield {
                **change,
                "parallel": {
                    **change["parallel"],
                    **({"sequence_parallel": False} if unsplit else {}),
                },
            }
    if part == "context":
        for strategy in ("ring", "all_gather", "ulysses"):
            if strategy != parallel.context_strategy:
                yield {"parallel": {"context_strategy": strategy}}
        yield from _onto_data(config, "context")
    if part == "data":
        for stage in range(parallel.zero_stage):
            yield {"parallel": {"zero_stage": stage}}
        if parallel.zero_stage == 3 and not parallel.zero_hold:
            yield {"parallel": {"zero_hold": True}}
        for by in _powers(mesh.data // mesh.islands):
            yield {"mesh": {"islands": mesh.islands * by}}
    if part == "bubble":
        for microbatches in more:
            yield {"parallel": {"microbatches": microbatches}}
        for chunks in (2, 4, 8):
            for microbatches in (parallel.microbatches, *more):
                yield {
                    "parallel": {
                        "schedule": "interleaved",
                        "virtual_stages": chunks,
                        "microbatches": microbatches,
                    }
                }
    if part == "pipeline":
        for fewer in _powers(parallel.microbatches):
            yield {"parallel": {"microbatches": parallel.microbatches // fewer}}
    if part in ("bubble", "pipeline"):
        yield from _onto_data(config, "pipeline")
    if part == "recomputation":
        unnamed = {
            name: ()
            for name in ("remat_keep", "remat_offload")
            if getattr(parallel, name)
        }
        for remat in ("none", "selective", "dots"):
            if remat != parallel.remat:
                yield {"parallel": {"remat": remat, **unnamed}}


def _onto_data(config: Config, axis: str) -> Iterator[Change]:
    """Yields meshes with fewer ranks over an axis and more over data, with as many microbatches or fewer."""
    ranks = getattr(config.mesh, axis)
    microbatches = config.parallel.microbatches
    for by in _powers(ranks):
        for m in {microbatches, max(1, microbatches // by)}:
            yield {
                "mesh": {axis: ranks // by, "data": config.mesh.data * by},
                "parallel": {"microbatches": m},
            }


def _powers(size: int) -> Iterator[int]:
    by = 2
    while size % by == 0:
        yield by
        by *= 2


def _settings(before: Config, after: Config, change: Change) -> tuple[str, ...]:
    """Returns the changed keys whose values differ, as --set takes them."""
    values = {
        f"{section}.{key}": [
            getattr(getattr(config, section), key) for config in (before, after)
        ]
        for section, keys in change.items()
        for key in keys
    }
    return tuple(
        f"{path}={as_text(new)}" for path, (old, new) in values.items() if new != old
    )
