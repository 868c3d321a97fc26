"""What a diagnosis says: findings, the parts of a step beside the plan, and what cannot be told."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that makes a run slow, or endangers it.

    `severity` is the share of a step's time (0 to 1) that curing it would win, and what findings are ordered by.
    """

    name: str  # a word for programs, of `rules.RULES`
    signal: str  # what was looked at
    value: float  # what it was
    expected: float  # what it is at most where nothing is wrong
    severity: float
    sentence: str
    advice: str
    settings: tuple[str, ...] = ()  # of the advice, as for --set; the planner has shown that they are faster
    sure: bool = True  # not where the figures allow for another reason

    @property
    def excess(self) -> float:
        return self.value - self.expected

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"excess": self.excess}


@dataclass(frozen=True)
class Part:
    """Where a part of a step's time went, beside the plan. Seconds; none: not measured, or not planned."""

    name: str
    seconds: float | None
    planned: float | None


@dataclass(frozen=True)
class Diagnosis:
    """Findings, the most severe first. None of them and nothing in `cannot_tell`: healthy, as far as a run's files can say."""

    findings: tuple[Finding, ...]
    parts: tuple[Part, ...] = ()
    mean_seconds: float | None = None  # of a step, by the rows
    planned_seconds: float | None = None
    cluster: str | None = None  # that it was planned for
    remarks: tuple[str, ...] = ()  # sentences: what is large, and nothing better is known
    cannot_tell: tuple[str, ...] = ()  # sentences, with what would cure it

    @property
    def first(self) -> str:
        """The name of the most severe finding, or none."""
        return self.findings[0].name if self.findings else "none"

    def as_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "findings": [finding.as_json() for finding in self.findings],
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "mean_seconds": self.mean_seconds,
            "planned_seconds": self.planned_seconds,
            "cluster": self.cluster,
            "remarks": list(self.remarks),
            "cannot_tell": list(self.cannot_tell),
        }
