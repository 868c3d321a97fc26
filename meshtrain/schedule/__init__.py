"""Pipeline schedules as data, without JAX: tables, the formulas that make them, proof, memory, time and pictures.

table = mt.schedule.make_table("1f1b", stages=4, microbatches=8)    # or mt.schedule.read_csv("mine.csv")
mt.schedule.validate(table)                                         # IllegalTable says where and why
mt.schedule.simulate(table, mt.schedule.Durations(head=0.5))        # makespan, bubble_fraction, peak_in_flight
"""

from meshtrain.schedule.draw import gantt_svg, gantt_text
from meshtrain.schedule.generators import SCHEDULES, Schedule, make_table
from meshtrain.schedule.simulate import Durations, Timeline, simulate
from meshtrain.schedule.table import B, F, IllegalTable, Table, W, parse_csv, read_csv
from meshtrain.schedule.validate import validate

__all__ = [
    "SCHEDULES", "B", "Durations", "F", "IllegalTable", "Schedule", "Table", "Timeline", "W", "gantt_svg", "gantt_text", "make_table",
    "parse_csv", "read_csv", "simulate", "validate",
]  # fmt: skip
