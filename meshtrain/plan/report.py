"""A plan as tables for people: what a device holds, sends and takes, with bars."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshtrain.cluster.accelerators import evidence
from meshtrain.cluster.algorithms import best
from meshtrain.config import Config
from meshtrain.config.follow import runs_table
from meshtrain.config.stacks import FULL, LINEAR, kinds_of_layers
from meshtrain.model.kernels import has_rule_kernel
from meshtrain.model.weights import trained_text
from meshtrain.parallel.placement import expert_nodes, expert_ranks, stages
from meshtrain.plan import activations, axes, memory, rollouts, search, shapes, traffic
from meshtrain.plan.compiled import Compiled, comparison
from meshtrain.plan.compute import DEFAULT_PROFILE
from meshtrain.plan.estimate import PART_NAMES, Plan
from meshtrain.plan.experts import rows
from meshtrain.plan.failures import FailureCosts, faults
from meshtrain.plan.gradient_traffic import Transfer
from meshtrain.plan.memory import MemoryItem
from meshtrain.units import count, duration, size


def _experts(plan: Plan) -> str:
    """Returns how a layer's experts lie, and what is assumed of their loads."""
    config = plan.config
    moe = plan.config.model.moe
    ranks = expert_ranks(plan.config)
    nodes = expert_nodes(plan.config)
    r = rows(config)
    return (
        f"experts {moe.experts // ranks} of {moe.experts} a device, {moe.top_k} a token"
        + (f", by {config.parallel.experts.dispatch}" if ranks > 1 else "")
        + (f" within nodes of {ranks // nodes}" if nodes > 1 else "")
        + f"; room for {r.room / r.here:.3g} x the rows of an even load, of which the fullest device is taken to have "
        f"{DEFAULT_PROFILE.imbalance:g} x"
    )


def headline(plan: Plan) -> str:
    """The answer in a few lines: fits or not, seconds, what bounds it."""
    config = plan.config
    mesh = plan.config.mesh
    device = plan.cluster.accelerator
    trained = trained_text(config.model, config.lora, config.train.trainable)
    moe = config.model.moe
    active = (
        f", {count(shapes.active_parameters(config.model))} active"
        if moe.experts
        else ""
    )
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"{count(plan.parameters)} parameters{active}{trained} on {plan.devices} x {device.name}: {mesh}",
        f"memory  {size(plan.bytes)} of {size(device.usable_bytes)} a device: {verdict}",
        f"layers  {layers(plan)}",
        f"time    {duration(plan.seconds)} a step; bound by {plan.time.bound}",
        f"speed   {count(plan.tokens_per_second)} tokens/s, {plan.tokens_per_second_per_device:,.0f} a device; "
        f"{plan.flops_per_device / 1e12:.4g} TFLOP/s a device, MFU {plan.mfu:.1%} "
        f"({plan.mfu_by_half:.1%} without masked scores)",
    ]
    lines += [*_rollout(plan), *_ways(plan)]
    peak = device.flops(config.precision.compute) / 1e12
    lines.append(
        f"rates   products reach up to {device.efficiency.matmul:.3g} of {peak:,.4g} TFLOP/s: {evidence(device)}"
    )
    lines.append(f"faults  {faults_text(faults(plan))}")
    if plan.cost:
        each = f"{plan.cost_per_billion_tokens:,.0f} for a billion tokens"
        lines.append(
            f"cost    {plan.cost:,.0f} for {plan.config.train.steps:,} steps, {each}"
        )
    return "\n".join(lines)


def _ways(plan: Plan) -> Iterator[str]:
    """Yields a line on linear attention, experts, a loss by chunks and the pipeline, of those that there are."""
    if LINEAR in kinds_of_layers(plan.config.model):
        yield _kernels(plan)
    if plan.config.model.moe.experts:
        yield _experts(plan)
    if (chunks := shapes.loss_chunks(plan.config)) > 1:
        tokens = shapes.loss_chunk(plan.config)
        yield f"loss    by {chunks:,} chunks of {tokens:,} tokens (train.loss_chunk)"
    if plan.timeline is not None:
        yield _pipeline(plan)


def _kernels(plan: Plan) -> str:
    """Returns the line on what computes layers of linear attention, and those of attention beside them."""
    linear = plan.config.model.linear
    platform = plan.cluster.accelerator.platform
    widths = linear.key_dim, linear.value_dim
    has_kernel = has_rule_kernel(platform, linear.chunk, widths, linear.kind == "kda")
    chunks = "a kernel of chunks" if has_kernel else "products"
    mixed = f"kernels linear attention by {chunks} and lax.scan"
    if FULL not in kinds_of_layers(plan.config.model):
        return mixed
    how = activations.kernel(plan.config, platform)
    return f"{mixed}, attention by {how}"


def _rollout(plan: Plan) -> list[str]:
    """Returns the line on the answers that a step learns from, if it does: its shares of seconds, and what a device
    holds then.
    """
    if not rollouts.draws(plan.config):
        return []
    time = plan.time
    shares = [part / time.total for part in (time.synchronise, time.draw, time.train)]
    received = sum(t.sent for t in rollouts.synchronisation(plan.config))
    drawing = size(memory.total(memory.drawing(plan.config)))
    return [
        f"rollout {shares[0]:.1%} of a step synchronises weights ({size(received)} to a device), {shares[1]:.1%} draws "
        f"answers ({count(plan.drawn_per_second)} tokens/s, {drawing} a device), {shares[2]:.1%} trains; prompts and "
        "answers as long as a row holds, without rewards"
    ]


def _pipeline(plan: Plan) -> str:
    """Returns the line on the pipeline: its schedule and how long its stages idle."""
    flight = f"at most {plan.peak_in_flight} microbatches in flight"
    idle = f"{plan.bubble_fraction:.1%} of the time idle"
    return f"pipeline {plan.config.parallel.schedule}, {plan.clocks} clocks, {flight}, {idle}"


def layers(plan: Plan) -> str:
    """Which layers a device has room for, in words: all stages run one program, so the longest decides."""
    stage = stages(plan.config)
    pipeline = plan.config.mesh.pipeline
    if pipeline == 1:
        return f"all {stage.on_device} layers"
    if len(set(stage.counts)) == 1:
        return f"{stage.on_device} layers, as every stage"
    kind = "stage" if stage.chunks == 1 else "virtual stage"
    most = max(stage.counts)
    return (
        f"room for {stage.on_device} layers: {kind} {stage.counts.index(most)} is the longest with "
        f"{most}"
    )


def sort_items(plan: Plan) -> list[MemoryItem]:
    """Lists the items that a device holds, the largest first."""
    return sorted(plan.memory, key=lambda item: -item.nbytes)


def waterfall(plan: Plan) -> Iterator[tuple[str, float, float, float]]:
    """(part, seconds, where it starts, its share) of a step, each part where the one before ends."""
    start = 0.0
    for name, seconds in plan.time.parts():
        if seconds:
            yield name, seconds, start, seconds / plan.seconds
            start += seconds / plan.seconds


def algorithm(plan: Plan, transfer: Transfer) -> str:
    """Names the algorithm that runs a collective."""
    group = transfer.group(plan.cluster, plan.config.mesh)
    return best(transfer.kind, group, transfer.nbytes).algorithm


def table(title: str, *columns: str) -> Table:
    """An empty table; a column whose name begins with > is set flush right."""
    rows = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        rows.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left"
        )
    return rows


def render(plan: Plan) -> RenderableType:
    """The whole report for a `rich` console."""
    first, *rest = headline(plan).splitlines()
    lines = Table.grid(padding=(0, 2))
    for line in rest:
        name, words = line.split(maxsplit=1)
        text = Text(words)
        text.highlight_words(["DOES NOT FIT"], "bold red")
        lines.add_row(name, text)
    tables = _memory(plan), _traffic(plan), _axes(plan), _time(plan)
    return Group(
        Text(first, "bold"),
        lines,
        *(part for table in tables for part in (Text(), table)),
        Text(),
    )


def _bar(share: float, width: int) -> str:
    return "█" * round(share * width)


def _memory(plan: Plan) -> Table:
    rows = table("each device holds", "", ">bytes", ">share", "")
    for item in sort_items(plan):
        share = item.nbytes / plan.bytes
        rows.add_row(item.name, size(item.nbytes), f"{share:.1%}", _bar(share, 24))
    rows.add_row("total", size(plan.bytes), "100%", "", style="bold")
    return rows


def _traffic(plan: Plan) -> Table:
    rows = table("each device sends in a step", "", ">times", ">size", ">sent")
    rows.columns[0].no_wrap = True
    alike: dict[tuple[str, str], list[Transfer]] = {}
    for t in plan.transfers:
        alike.setdefault(
            (t.axis, f"{t.axis}: {t.kind}, {algorithm(plan, t)}"), []
        ).append(t)
    for axis, sent in traffic.by_axis(plan.transfers).items():
        for (_, name), transfers in (
            (key, found) for key, found in alike.items() if key[0] == axis
        ):
            rows.add_row(name)
            for t in transfers:
                rows.add_row(f"  {t.what}", f"{t.times}", size(t.nbytes), size(t.sent))
        if sent:
            rows.add_row(f"{axis}: total", "", "", size(sent), style="bold")
    return rows


def _axes(plan: Plan) -> Table:
    file = plan.config.mesh.cluster
    order = f"; devices as in {file}" if file else ""
    title = f"axes on links ({plan.cluster.topology}), the outermost first{order}"
    rows = table(title, "axis", ">apart", "blocks that meet", ">sent", ">takes")
    for axis in axes.axes_on_links(plan):
        levels = ", ".join(f"{name} {fan}" for name, fan in axis.levels)
        rows.add_row(
            f"{axis.axis} {axis.size}",
            str(axis.apart),
            levels,
            size(axis.sent),
            duration(axis.seconds),
        )
    return rows


def _time(plan: Plan) -> Table:
    rows = table("a step takes", "", ">time", ">share", "")
    for name, seconds, start, share in waterfall(plan):
        bar = " " * round(start * 32) + (_bar(share, 32) or "▏")
        rows.add_row(PART_NAMES[name], duration(seconds), f"{share:.1%}", bar)
    rows.add_row("total", duration(plan.seconds), "100%", "", style="bold")
    return rows


def compared(plan: Plan, compiled: Compiled) -> Table:
    """The planner's bytes beside the compiler's."""
    title = f"compiled for {compiled.target} in {compiled.compile_seconds:.1f} s"
    rows = table(title, "", ">planned", ">compiled", ">off by")
    for what, planned, by_xla in comparison(plan, compiled):
        rows.add_row(
            what,
            size(planned),
            size(by_xla),
            f"{planned / by_xla - 1:+.1%}" if by_xla else "",
        )
    return rows


def faults_text(costs: FailureCosts) -> str:
    """Failures in a line."""
    if not costs.interval_steps:
        return "none expected"
    return (
        f"one in {duration(costs.between)} loses {duration(costs.lost)} and a restart; a checkpoint every "
        f"{costs.interval_steps:,} steps, copied "
        f"in {duration(costs.copy)} and written in {duration(costs.write)} ({size(costs.bytes_a_day)} a day), leaves "
        f"{costs.goodput:.1%} of the time for training; "
        f"{costs.spares} spare node{'s last' if costs.spares != 1 else ' lasts'} a day with 99%"
    )


def as_json(plan: Plan) -> dict:
    """The object of `plan --json` but for what changes it: the plan, its failures, collectives (bytes of the whole
    array) and axes.
    """
    costs = faults(plan)
    return plan.as_json() | {
        "faults": {
            "mean_seconds_between_failures": costs.between
            if costs.interval_steps
            else None,
            "checkpoint_every_steps": costs.interval_steps,
            "checkpoint_copy_seconds": costs.copy,
            "checkpoint_write_seconds": costs.write,
            "checkpoint_bytes_a_day": int(costs.bytes_a_day),
            "seconds_lost_by_a_failure": costs.lost,
            "goodput": costs.goodput,
            "goodput_as_configured": costs.configured_goodput,
            "spare_nodes_for_a_day": costs.spares,
        },
        "traffic": [
            {
                "axis": t.axis,
                "what": t.what,
                "kind": t.kind,
                "algorithm": algorithm(plan, t),
                "times": t.count,
                "bytes": int(t.nbytes),
            }
            for t in plan.transfers
        ],
        "axes": axes.as_json(plan),
    }


def settings(config: Config) -> dict[str, object]:
    """The keys that a search decides: a config with them is this one."""
    axes = "data", "tensor", "pipeline", "islands", "expert", "context"
    names = (
        "schedule", "virtual_stages", "layer_split", "vocab", "microbatches", "zero_stage", "zero_hold",
        "offload_optimizer", "remat", "remat_keep", "remat_offload", "sequence_parallel", "context_strategy",
    )  # fmt: skip
    return (
        {f"mesh.{name}": getattr(config.mesh, name) for name in axes}
        | {f"parallel.{name}": getattr(config.parallel, name) for name in names}
        | {
            "parallel.experts.dispatch": config.parallel.experts.dispatch,
            "parallel.experts.ranks_per_node": config.parallel.experts.ranks_per_node,
            "precision.matmul": config.precision.matmul,
        }
    )


def layout(config: Config) -> str:
    """A layout in a line."""
    mesh = config.mesh
    parallel = config.parallel
    words = [str(mesh)]
    words += [f"context by {parallel.context_strategy}"] * (mesh.context > 1)
    if runs_table(config):
        chunks = (
            f" x {parallel.virtual_stages} chunks"
            if parallel.virtual_stages > 1
            else ""
        )
        words.append(f"{parallel.schedule}{chunks}")
        words.append(
            f"vocabulary {'spread' if parallel.vocab == 'spread' else 'on the edge'}"
        )
    words.append(
        f"{parallel.microbatches} microbatches"
        if parallel.microbatches > 1
        else "1 microbatch"
    )
    words += ["float8"] * (config.precision.matmul == "float8")
    words.append(f"ZeRO-{parallel.zero_stage}{' held' if parallel.zero_hold else ''}")
    kept = (
        f" ({' + '.join(parallel.remat_keep) or 'none kept'})"
        if parallel.remat == "names"
        else ""
    )
    words.append(f"remat {parallel.remat}{kept}")
    if parallel.remat_offload:
        words.append(f"{' + '.join(parallel.remat_offload)} offloaded")
    words += ["optimizer offloaded"] * parallel.offload_optimizer
    words += ["sequence parallel"] * parallel.sequence_parallel
    return ", ".join(words)


def ranking(result: search.SearchResult, devices: int) -> RenderableType:
    """The best layouts of a search, with the reasons."""
    head = (
        f"{result.legal:,} legal layouts on {devices:,} devices, {result.fitting:,} fit with {memory.MARGIN:.0%} of "
        "the memory to spare; "
        f"searched in {result.seconds:.1f} s"
    )
    lines: list[RenderableType] = [Text(head, "bold")]
    for place, plan in enumerate(result.plans, 1):
        lines.append(
            Text(
                f"{place:2}  {duration(plan.seconds):>8}  {size(plan.bytes):>9}  MFU {plan.mfu:.1%}",
                "bold",
            )
        )
        lines += [
            Padding(words, (0, 0, 0, 4))
            for words in (layout(plan.config), search.reason(plan, result.plans[0]))
        ]
    lines.append(f"the fastest step, all of it: {search.made_of(result.plans[0])}")
    if sentence := search.expert_reason(result):
        lines.append(sentence)
    return Group(*lines)
