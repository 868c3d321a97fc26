"""The list of commands: `meshtrain train` runs the module `meshtrain.train`, and so does Python with `-m meshtrain train`.

A new command is a line here beside its own module.
"""

import runpy
import sys
from collections.abc import Sequence

from meshtrain.errors import nearest, say, short
from meshtrain.run import early

COMMANDS = {
    "train": "trains a run, or the rest of one, by a config",
    "plan": "predicts memory, seconds and the best mesh of a config before a device is needed",
    "data": "prepares text and images; shows and verifies what is prepared",
    "checkpoint": "lists, shows, verifies and compares checkpoints",
    "launch": "starts a run on several machines, or writes what a cluster's scheduler starts",
    "survive": "trains under supervisors, so that a run outlives its faults; status, stats, inject",
    "monitor": "shows runs in the terminal while they go on",
    "report": "reports on runs as text, page or JSON, and diagnoses what makes them slow",
    "telemetry": "prints the catalogue of metrics, a dashboard for Grafana, alert rules for Prometheus",
    "probe": "measures links and devices of a cluster and writes its YAML for the planner",
    "adopt": "brings weights and configs from and to Hugging Face, LLaMA-Factory and DeepSpeed",
    "generate": "continues prompts and holds conversations with a trained model",
    "serve": "serves a model by OpenAI's API",
    "evaluate": "evaluates a model on validation data, text, images or lm-evaluation-harness tasks",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; without one prints the list."""
    early.hear()
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if name in ("", "-h", "--help"):
        print("usage: meshtrain COMMAND ...; see meshtrain COMMAND --help\n")
        print("\n".join(f"  {command:<11} {meaning}" for command, meaning in COMMANDS.items()))
        return 0
    if name == "--version":
        from meshtrain.run.versions import versions

        print(f"meshtrain {versions()['meshtrain']}")
        return 0
    if name not in COMMANDS:
        ending = nearest(name, COMMANDS) or f"; legal are {', '.join(COMMANDS)}."
        say(f"there is no command {short(name)}{ending}")
        return 2
    sys.argv = [f"meshtrain.{name}", *rest[:-1]]
    # Ends by the command's own exit code.
    runpy.run_module(f"meshtrain.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
