"""The rooms, each a module that registers its faults when it is imported."""

import importlib

ROOMS = (
    "controls",
    "checkpoints",
    "run",
    "sources",
    "prepare",
    "config",
    "planning",
    "requests",
    "starved",
    "surroundings",
    "numbers",
)


def load() -> None:
    for room in ROOMS:
        importlib.import_module(f"experiments.faults.{room}")
