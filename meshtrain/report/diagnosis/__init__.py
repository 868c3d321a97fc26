"""Why a run is slow, in words: what its files tell, held against rules and the plan.

    metrics.jsonl  resources/  traces/  config.yaml ──reading──► Evidence ──rules, layouts──► findings, most severe first
                                                                     ▲
                                                       plan of the config on its cluster

- `meshtrain.report.diagnosis.evidence`: what there is to judge by. `meshtrain.report.diagnosis.reading`: read from a run directory.
- `meshtrain.report.diagnosis.rules`: one function a reason. `meshtrain.report.diagnosis.layouts`: those that the planner must confirm.
- `meshtrain.report.diagnosis.diagnose`: all of it put together. `meshtrain.report.diagnosis.command`: `report RUN --diagnose`.
- `meshtrain.report.diagnosis.tracing`: a trace of a run that has none, from a short training beside it.

`python -m experiments.watch.slowdowns` makes eight slowdowns on purpose, and holds what is found against what was done.
"""

from meshtrain.report.diagnosis.diagnose import diagnose
from meshtrain.report.diagnosis.evidence import Evidence
from meshtrain.report.diagnosis.findings import Diagnosis, Finding, Part

__all__ = ["Diagnosis", "Evidence", "Finding", "Part", "diagnose"]
