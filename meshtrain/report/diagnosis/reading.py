"""From the facts of a run directory to evidence. What is not there, or cannot be read, becomes a sentence."""

from pathlib import Path

from meshtrain.config import Config, ConfigError
from meshtrain.report.cluster import likely
from meshtrain.report.diagnosis.evidence import Evidence
from meshtrain.report.facts import Facts, config_of, gather, refuse_no_run
from meshtrain.report.trace.attribution import Attribution
from meshtrain.run.directory import TRACES


def read(directory: Path, attribution: Attribution | None = None, cluster: str | None = None) -> Evidence:
    """The evidence of a run, with a trace's attribution if there is one, planned for a cluster as `plan --cluster` takes it.

    ConfigError if it is no run, or has a config that cannot be read.
    """
    facts = gather(directory, cluster)
    if facts.config is None:
        raise ConfigError(" ".join(facts.notes))
    return Evidence(
        facts.config,
        facts.steps,
        facts.samples,
        facts.hosts,
        attribution,
        facts.plan if cluster is not None or _is_known(facts, attribution) else None,
        _lost(facts),
    )


def read_config(directory: Path) -> Config:
    """The config of a run; ConfigError if it is none, or has one that cannot be read."""
    refuse_no_run(directory)
    notes: list[str] = []
    found, _ = config_of(directory, notes)
    if found is None:
        raise ConfigError(" ".join(notes))
    return found


def _is_known(facts: Facts, attribution: Attribution | None) -> bool:
    """Whether the plan is for the devices that the run had: for others it would be advice on another machine."""
    assert facts.config is not None
    name = likely(facts.config, facts.steps, facts.samples)
    # A config that asks for fake devices runs on GPUs where there are some, of which a trace tells even where no row does.
    return name is not None and (name != "cpu" or attribution is None or attribution.platform == "cpu")


def _lost(facts: Facts) -> float | None:
    """Share of a supervised run's time that went on work done again, and on waiting for processes to be there again."""
    if facts.survived is None or not facts.survived.ledger.wall:
        return None
    told = facts.survived.ledger
    return (told.seconds["lost"] + told.seconds["down"]) / told.wall


def newest_trace(directory: Path) -> Path | None:
    """The trace that a run has taken last; None if it has none."""
    # Imports JAX.
    from meshtrain.telemetry.trace import FACTS

    found = [path.parent for path in (directory / TRACES).glob(f"*/{FACTS}")]
    return max(found, key=lambda path: (path / FACTS).stat().st_mtime, default=None)


def attributed(trace: Path) -> Attribution:
    """Where the time of a trace's steps went. ConfigError if it cannot be read."""
    from meshtrain.report.trace.attribute import attribute
    from meshtrain.report.trace.read import read_trace

    return attribute(read_trace(trace))
