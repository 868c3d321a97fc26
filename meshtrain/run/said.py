"""What a run says of itself: before its first step, and at its end."""

from collections.abc import Mapping

from meshtrain.config import chosen, notes
from meshtrain.data import SplitBatches
from meshtrain.mesh import platform
from meshtrain.model.weights import told
from meshtrain.parallel import placement
from meshtrain.run.evaluation import Evaluation
from meshtrain.step import Program


def opening(program: Program, data: SplitBatches, start: int, evaluation: Evaluation) -> list[str]:
    """A sentence on the model, on the data, on what was chosen for the user, on what the config asks in vain, and on what is left to do."""
    config, mesh = program.config, program.config.mesh
    lines = [
        f"{config.model.family} with {program.layout.parameters:,} parameters{told(config.model, config.lora, config.train.trainable)} on {mesh} "
        f"({program.mesh.devices.size} {platform(program.mesh)} devices), "
        f"ZeRO-{config.parallel.zero_stage}: {program.state_bytes / 2**20:.1f} MiB of state a device",
        data.describe(),
        *([f"train.epochs {config.train.epochs:g}: {config.train.steps:,} steps"] if config.train.epochs else []),
        *chosen(config),
        *(f"note: {sentence}" for sentence in (*notes(config), *placement.notes(config))),
    ]
    if start >= config.train.steps:
        lines.append(f"step {start} is taken already and train.steps is {config.train.steps}: nothing is left to do")
    elif evaluation.ended:
        lines.append(f"{evaluation.why()}: nothing is left to do; with a larger eval.patience it goes on")
    else:
        lines += [*evaluation.opening(), *([f"going on after step {start}"] if start else [])]
    return lines


def closing(evaluation: Evaluation, step: int, last: Mapping[str, float]) -> list[str]:
    """On the saves that no row of metrics follows (`last`: their metrics), and on the evaluations."""
    lines = evaluation.closing(step)
    if last:
        size, seconds = last["checkpoint_bytes"] / 1e6, last["checkpoint_seconds"]
        blocking = last["checkpoint_blocked_seconds"]
        lines.insert(0, f"last save: {size:.1f} MB in {seconds:.2f} s, {blocking:.3f} s of them blocking")
    return lines
