"""Pipeline schedules as data, without JAX: tables, the formulas that make them, proof, memory, time and pictures.

    table = mt.schedule.make_table("1f1b", stages=4, microbatches=8)    # or mt.schedule.read_csv("mine.csv")
    mt.schedule.validate(table)                                         # IllegalTable says where and why
    mt.schedule.simulate(table, mt.schedule.Durations(head=0.5))        # makespan, bubble_fraction, peak_in_flight

Which stage does what in which clock is a table, and all that is to be known of a schedule follows from it. So a new one
is a formula for its clocks, and memory, bubble, plan, picture and execution come with it. The planner and the compiled
step read the same table.

    generators ─┐                 ┌─► validate    proof that it can be run
    CSV file ───┴─► table.Table ──┼─► buffers     where each value waits, and how deep that is
                                  ├─► simulation ──► draw     when everything happens, and a picture of it
                                  └─► phases ──► meshtrain.parallel.pipeline.execute

- `meshtrain.schedule.table`: what a table is, and its CSV; with a drawing of 1F1B.
- `meshtrain.schedule.generators`: the named schedules with their papers, and how to add one.
- `meshtrain.schedule.facts`: the same without a table, for searches over thousands.
- `meshtrain.schedule.validate`: what legal means.
- `meshtrain.schedule.phases`, `meshtrain.schedule.buffers`: for the executor, together a `CompiledTable`.
- `meshtrain.schedule.simulation`: the two models of execution; `meshtrain.schedule.draw`.

Compared by simulation, with no device: `experiments/4_pipelines.ipynb`. That the executor holds what is said here is
held by `tests/parallel/pipeline/test_execute.py`.
"""

from typing import TYPE_CHECKING, Any

from meshtrain.schedule.generators import SCHEDULES, Schedule, make_table
from meshtrain.schedule.table import B, F, IllegalTable, Table, W, parse_csv, read_csv
from meshtrain.schedule.validate import validate

__all__ = [
    "SCHEDULES",
    "B",
    "Durations",
    "F",
    "IllegalTable",
    "Schedule",
    "Table",
    "Timeline",
    "W",
    "gantt_svg",
    "gantt_text",
    "make_table",
    "parse_csv",
    "read_csv",
    "simulate",
    "validate",
]

if TYPE_CHECKING:
    from meshtrain.schedule.draw import gantt_svg, gantt_text
    from meshtrain.schedule.simulation import Durations, Timeline, simulate
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # No run draws, and few simulate.
        from meshtrain.schedule import draw, simulation

        # Kept, since the reference shows what stands in the module.
        value = globals()[name] = getattr(
            draw if name.startswith("gantt_") else simulation, name
        )
        return value
