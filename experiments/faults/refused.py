"""A few cells of the table of refused calls (`calls.py`), of each command."""

import json

from experiments.faults.calls import COMMANDS, WRONG
from experiments.faults.harness import Crash, NotTried, Place, Silent, fault, kind

FEW = 6  # cells a command
SCALE = 0.02  # of delays and pauses

kind("call")


def refused_calls(command: str) -> None:
    @fault(f"calls of the system are refused: {command}")
    def _(p: Place) -> None:
        arguments = (
            "--command",
            command,
            "--few",
            str(FEW),
            "--scale",
            str(SCALE),
            "--jobs",
            "1",
            "--json",
        )
        ended = p.python("-m", "experiments.faults.calls", *arguments, patience=400.0)
        if "not tried" in ended.err:
            raise NotTried(ended.err.strip())
        if ended.code not in (0, 1):
            raise Crash(ended.err.strip()[-300:])
        wrong = [cell for cell in json.loads(ended.out) if cell["verdict"] in WRONG]
        if wrong:
            raise Silent(f"{len(wrong)} cells, such as {wrong[0]}")


for command in COMMANDS:
    refused_calls(command)
