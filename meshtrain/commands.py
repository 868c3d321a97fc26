"""Every command by its name, in groups, with the line that lists it, and its parser.

A new command is a line here beside its own module, which has a `main` and a `parser`.
"""

import importlib

from meshtrain import cli

GROUPS = {
    "train": {
        "train": "trains a run from a config, or resumes it",
        "sweep": "trains a config with several values of its keys, and ranks the runs",
        "launch": "starts a run on several machines, or writes a job for a cluster's scheduler",
    },
    "survive": {
        "survive": "trains under supervisors, so that a run outlives its faults; status, stats, inject",
    },
    "plan": {
        "plan": "predicts the memory, time and best mesh of a config without a device",
        "check-gpu": "checks an accelerator against the CPU, and measures what it gives",
        "probe": "measures links and devices of a cluster and writes its YAML for the planner",
    },
    "data": {
        "data": "prepares text and images; shows and verifies what is prepared",
    },
    "weights": {
        "checkpoint": "lists, shows, verifies and compares checkpoints",
        "adopt": "brings weights and configs from and to Hugging Face, LLaMA-Factory and DeepSpeed",
    },
    "use": {
        "generate": "continues prompts and holds conversations with a trained model",
        "serve": "serves a model through OpenAI's API",
        "evaluate": "evaluates a model on validation data, text, images or lm-evaluation-harness tasks",
    },
    "watch": {
        "monitor": "shows runs in the terminal while they train",
        "report": "reports on runs as text, a page or JSON, and diagnoses why they are slow",
        "telemetry": "prints the catalogue of metrics, a dashboard for Grafana, alert rules for Prometheus",
    },
    "help": {
        "config": "explains each key of a config; prints a JSON schema for editors",
        "completion": "prints shell completion of commands, options and keys for bash or zsh",
    },
}  # fmt: skip
COMMANDS = {
    name: meaning for group in GROUPS.values() for name, meaning in group.items()
}
# Of a command whose module has another name
MODULES = {"config": "keys", "check-gpu": "check_gpu"}


def parser_of(name: str) -> cli.Parser:
    """Returns the parser of a command; none of them imports JAX."""
    if name == "train":
        return cli.train_parser()
    module = importlib.import_module(f"meshtrain.{MODULES.get(name, name)}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{module.__name__}.__main__")
    parser: cli.Parser = module.parser()
    return parser


def listed() -> str:
    """Returns the list of commands, as `meshtrain` alone prints it."""
    lines = ["usage: meshtrain COMMAND ...; see meshtrain COMMAND --help"]
    for group, commands in GROUPS.items():
        lines += [
            "",
            group,
            *(f"  {name:<11} {meaning}" for name, meaning in commands.items()),
        ]
    return "\n".join(lines)
