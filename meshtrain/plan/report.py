"""A plan as tables for people: what a device holds, sends and takes, with bars."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshtrain.config import Config
from meshtrain.model.weights import told
from meshtrain.parallel.placement import stages
from meshtrain.plan import axes, search, traffic
from meshtrain.plan.cluster.accelerators import lender
from meshtrain.plan.cluster.algorithms import best
from meshtrain.plan.compiled import Compiled, comparison
from meshtrain.plan.estimate import PART_NAMES, Plan
from meshtrain.plan.failures import Faults, faults
from meshtrain.plan.flow import Flow


def size(nbytes: float) -> str:
    """Bytes for people: 3 digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.3g} TiB" if nbytes < 1000 else f"{nbytes:,.0f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: 3 digits and a unit."""
    for unit, factor in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3)):
        if abs(seconds) * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    if seconds < 1000:
        return f"{seconds:.3g} s"
    return f"{seconds / 3600:.3g} h" if seconds < 86400 * 3 else f"{seconds / 86400:.3g} days"


def count(number: float) -> str:
    """A large number for people: 8.03 B."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.3g}"


def render(plan: Plan) -> RenderableType:
    """The whole report for a `rich` console."""
    return Group(_headline(plan), _memory(plan), _traffic(plan), _axes(plan), _time(plan))


def headline(plan: Plan) -> str:
    """The answer in a few lines: fits or not, seconds, what bounds it."""
    config, mesh, device = plan.config, plan.config.mesh, plan.cluster.accelerator
    trained = told(config.model, config.lora, config.train.trainable)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"{count(plan.parameters)} parameters{trained} on {plan.devices} x {device.name}: {mesh}",
        f"memory  {size(plan.bytes)} of {size(device.usable_bytes)} a device: {verdict}",
        f"layers  {layers(plan)}",
        f"time    {duration(plan.seconds)} a step, {count(plan.tokens_per_second)} tokens/s, {plan.flops_per_device / 1e12:.4g} TFLOP/s a device, "
        f"MFU {plan.mfu:.1%}; bound by {plan.time.bound}",
    ]
    if plan.timeline is not None:
        lines.append(
            f"pipeline {plan.config.parallel.schedule}, {plan.ticks} ticks, at most {plan.peak_in_flight} microbatches in flight, "
            f"{plan.bubble_fraction:.1%} of the time idle"
        )
    if borrowed := lender(device):
        lines.append(f"seconds are a guess: {device.name} has its efficiencies borrowed from {borrowed}")
    lines.append(f"faults  {faults_text(faults(plan))}")
    if plan.cost:
        lines.append(f"cost    {plan.cost:,.0f} for {plan.config.train.steps:,} steps")
    return "\n".join(lines)


def _headline(plan: Plan) -> Text:
    text = Text(headline(plan))
    text.stylize("bold", 0, len(headline(plan).splitlines()[0]))
    if not plan.fits:
        text.highlight_words(["DOES NOT FIT"], "bold red")
    return text


def bar(share: float, width: int = 24) -> str:
    return "█" * round(share * width)


def layers(plan: Plan) -> str:
    """Which layers a device has room for, in words: all stages run one program, so the longest decides."""
    stage, pipeline = stages(plan.config), plan.config.mesh.pipeline
    if pipeline == 1:
        return f"all {stage.on_device} layers"
    if len(set(stage.counts)) == 1:
        return f"{stage.on_device} layers, as every stage"
    kind = "stage" if stage.chunks == 1 else "virtual stage"
    return f"room for {stage.on_device} layers: {kind} {stage.counts.index(stage.longest)} is the longest with {stage.longest}"


def _memory(plan: Plan) -> Table:
    table = Table(title="each device holds", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("", "left"), ("bytes", "right"), ("share", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for item in sorted(plan.memory, key=lambda i: -i.nbytes):
        share = item.nbytes / plan.bytes
        table.add_row(item.name, size(item.nbytes), f"{share:.1%}", bar(share))
    table.add_row("total", size(plan.bytes), "100%", "", style="bold")
    return table


def _traffic(plan: Plan) -> Table:
    table = Table(title="each device sends in a step", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("axis", "left"), ("what", "left"), ("kind", "left"), ("by", "left"), ("times", "right"), ("size", "right"), ("sent", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for flow in plan.flows:
        row = (flow.kind, algorithm(plan, flow), f"{flow.times}", size(flow.nbytes), size(flow.sent))
        table.add_row(flow.axis, flow.what, *row)
    for axis, sent in traffic.by_axis(plan.flows).items():
        if sent:
            table.add_row(axis, "total", "", "", "", "", size(sent), style="bold")
    return table


def _axes(plan: Plan) -> Table:
    cluster = plan.config.mesh.cluster
    title = (
        f"axes on links ({plan.cluster.topology}), the outermost first{f'; devices as in {cluster}' if cluster else ''}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, justify in (("axis", "left"), ("apart", "right"), ("blocks that meet", "left"), ("sent", "right"), ("takes", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for one in axes.lying(plan):
        levels = ", ".join(f"{name} {fan}" for name, fan in one.levels)
        table.add_row(f"{one.axis} {one.size}", str(one.apart), levels, size(one.sent), duration(one.seconds))
    return table


def algorithm(plan: Plan, flow: Flow) -> str:
    """What a collective is run by."""
    return best(flow.kind, plan.cluster.axis(flow.axis, plan.config.mesh), flow.nbytes).algorithm


def traffic_json(plan: Plan) -> list[dict]:
    """`plan --json`'s collectives of a step: times and bytes of the whole array (see `cluster.algorithms`)."""
    return [
        {"axis": f.axis, "what": f.what, "kind": f.kind, "algorithm": algorithm(plan, f), "times": f.count, "bytes": int(f.nbytes)}
        for f in plan.flows
    ]  # fmt: skip


def _time(plan: Plan) -> Table:
    table = Table(title="a step takes", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("", "left"), ("time", "right"), ("share", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    done = 0.0
    for name, seconds in plan.time.parts():
        if seconds:
            share = seconds / plan.seconds
            table.add_row(
                PART_NAMES[name], duration(seconds), f"{share:.1%}", " " * round(done * 40) + (bar(share, 40) or "▏")
            )
            done += share
    table.add_row("total", duration(plan.seconds), "100%", "", style="bold")
    return table


def faults_text(found: Faults) -> str:
    """Failures in a line."""
    if not found.interval_steps:
        return "none expected"
    return (
        f"one in {duration(found.between)} loses {duration(found.lost)} and a restart; a checkpoint every {found.interval_steps:,} steps, copied "
        f"in {duration(found.copy)} and written in {duration(found.write)}, leaves {found.goodput:.1%} of the time for training; "
        f"{found.spares} spare nodes last a day with 99%"
    )


def faults_json(found: Faults) -> dict:
    """`plan --json`'s faults."""
    return {
        "mean_seconds_between_failures": found.between if found.interval_steps else None,
        "checkpoint_every_steps": found.interval_steps,
        "checkpoint_copy_seconds": found.copy,
        "checkpoint_write_seconds": found.write,
        "seconds_lost_by_a_failure": found.lost,
        "goodput": found.goodput,
        "goodput_as_configured": found.configured_goodput,
        "spare_nodes_for_a_day": found.spares,
    }


def settings(config: Config) -> dict[str, object]:
    """The keys that a search decides."""
    mesh, parallel = config.mesh, config.parallel
    found: dict[str, object] = {"mesh.data": mesh.data, "mesh.tensor": mesh.tensor, "mesh.pipeline": mesh.pipeline}
    if mesh.islands > 1:
        found["mesh.islands"] = mesh.islands
    names = ("schedule", "virtual_stages", "microbatches", "zero_stage", "zero_hold", "remat", "sequence_parallel", "vocab")  # fmt: skip
    return found | {f"parallel.{name}": getattr(parallel, name) for name in names}


def compared(plan: Plan, compiled: Compiled) -> Table:
    """The planner's bytes beside the compiler's."""
    title = f"compiled for {compiled.target} in {compiled.compile_seconds:.1f} s"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, justify in (("", "left"), ("planned", "right"), ("compiled", "right"), ("off by", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for what, planned, found in comparison(plan, compiled):
        table.add_row(what, size(planned), size(found), f"{planned / found - 1:+.1%}" if found else "")
    if compiled.step_seconds:
        step = plan.seconds - plan.time.checkpoint
        by_rates = duration(step), duration(compiled.step_seconds), f"{step / compiled.step_seconds - 1:+.1%}"
        table.add_row("a step, by the cluster's rates", *by_rates)
    return table


def layout(config: Config) -> str:
    """A layout in a line."""
    mesh, parallel = config.mesh, config.parallel
    words = [str(mesh)]
    if mesh.pipeline > 1:
        chunks = f" x {parallel.virtual_stages} chunks" if parallel.virtual_stages > 1 else ""
        words.append(f"{parallel.schedule}{chunks}")
        words.append(f"vocabulary {'spread' if parallel.vocab == 'spread' else 'on the edge'}")
    words.append(f"{parallel.microbatches} microbatches" if parallel.microbatches > 1 else "1 microbatch")
    words.append(f"ZeRO-{parallel.zero_stage}{' held' if parallel.zero_hold else ''}")
    words.append(f"remat {parallel.remat}")
    if parallel.remat == "names":
        words[-1] += f" ({' + '.join(parallel.remat_keep) or 'none kept'})"
    if parallel.remat_offload:
        words.append(f"{' + '.join(parallel.remat_offload)} offloaded")
    if parallel.offload_optimizer:
        words.append("optimizer offloaded")
    if parallel.sequence_parallel:
        words.append("sequence parallel")
    return ", ".join(words)


def ranking(found: search.Found, devices: int) -> RenderableType:
    """The best layouts of a search, with the reasons."""
    lines = Text()
    lines.append(
        f"{found.legal:,} legal layouts on {devices:,} devices, {found.fitting:,} fit with {search.MARGIN:.0%} of the memory to spare; "
        f"searched in {found.seconds:.1f} s\n",
        "bold",
    )
    for place, plan in enumerate(found.plans, 1):
        lines.append(f"{place:2}  {duration(plan.seconds):>8}  {size(plan.bytes):>9}  MFU {plan.mfu:.1%}  ", "bold")
        lines.append(f"{layout(plan.config)}\n    {search.reason(plan, found.plans[0])}\n")
    lines.append(f"the fastest step, all of it: {search.made_of(found.plans[0])}")
    return lines
