"""A program: what is trained, on which devices, what each holds between two steps, and how a step goes through the stages."""

from meshtrain.pictures import mesh as meshes
from meshtrain.pictures import schedule
from meshtrain.pictures.picture import Picture, block, faint, title
from meshtrain.plan.report import count, size
from meshtrain.reader import Model
from meshtrain.step import Program


def picture(thing: Program | Model) -> Picture:
    program, end = (thing.program, f"; the weights of step {thing.step}") if isinstance(thing, Model) else (thing, "")
    config, mesh = program.config, meshes.picture(program.mesh)
    head = f"{config.model.family} with {count(program.layout.parameters)} parameters{end}"
    state = f"ZeRO-{config.parallel.zero_stage}: {size(program.state_bytes)} of state a device"
    told = [
        state,
        f"{config.train.global_batch_size} x {config.train.sequence_length} tokens a step, {config.precision.compute}",
    ]
    told += [f"the {kind} is {name}" for kind, name in program.hooks.names.items()]
    parts, lines = [title(head), mesh.html, faint("; ".join(told))], [head, mesh.text, "; ".join(told)]
    if program.layout.table is not None:
        drawn = schedule.picture(program.layout.table)
        parts.append(drawn.html)
        lines.append(drawn.text)
    return Picture(block(*parts), "\n".join(lines))
