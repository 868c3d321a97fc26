"""Devices, and what lies on them: a mesh, the weights of a layout by the names of their axes, live arrays.

A mesh is blocks of devices: a block a stage, a row a data rank, a column a tensor rank; islands one below the other.
With context parallelism a row is a context rank, with the part of each row of the batch that a program gives it.

              stage 0     stage 1
    island 0   0  1        4  5        data 0
               2  3        6  7        data 1

    island 1   8  9       12 13
              10 11       14 15

Each device has a colour of its own: hue by stage, light to dark by tensor rank, pale to strong by data rank. An array
is drawn in the colours of the devices that hold it. Here it is a weight [layers, d_model, heads, head_dim] on data 2 x
tensor 2 x pipeline 2 with ZeRO:

    layers 0-1      layers 2-3        along the panels the first axis that is split,
    0 │ 1           4 │ 5             down and across the next two; stripes where several
    ──┼──           ──┼──             devices hold the same part
    2 │ 3           6 │ 7
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from meshtrain.config.mesh import CONTEXT, DATA, EXPERT, ISLAND, PIPELINE, TENSOR
from meshtrain.draw.picture import Picture, block, chip, code, columns, faint, table
from meshtrain.draw.svg import AXES, GREY, INK, image, stage_hue, svg
from meshtrain.errors import ConfigError, short
from meshtrain.mesh import are_axes, check_axes, part_bytes
from meshtrain.parallel.layout import Layout
from meshtrain.units import count, size

MOST_DEVICES = 256  # of a mesh that is drawn: beyond that numbers are not readable
MOST_PARTS = 256  # of an array that is drawn
# pixels of a device, and between blocks of them
_SIDE = 34
_GAP = 26
_STRIPES = 8  # of one part: of more holders the first and the last are drawn
# of all panels of an array together
_WIDTH = 150
_HEIGHT = 56

Bounds = tuple[tuple[int, int], ...]  # begin and end of a part, by dimension


def picture(thing: Any) -> Picture:
    """The picture of a mesh, a layout, an array, or any tree of arrays or ShapeDtypeStructs with shardings.

    ConfigError for anything else, and for a mesh whose axes are not data, tensor and pipeline.
    """
    if isinstance(thing, Mesh):
        return mesh_picture(thing)
    return _layout(thing) if isinstance(thing, Layout) else _arrays(thing)


def mesh_picture(mesh: Mesh, strategy: str = "") -> Picture:
    """The picture of a mesh; the strategy of context parallelism tells what its ranks have of a row."""
    check_axes(mesh)
    devices = f"{mesh.size} device{'s' * (mesh.size > 1)} ({mesh.devices.flat[0].device_kind})"
    words = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    chips = " × ".join(
        chip(axis, f"{axis} {size}") for axis, size in mesh.shape.items()
    )
    head = f"{chips} {faint(f'= {devices}')}"
    if mesh.size > MOST_DEVICES:
        return Picture(block(head), f"{words} = {devices}")
    islands, data, tensor, pipeline = _places(mesh).shape
    names = [_row(mesh, rank, strategy) for rank in range(data)]
    left = 52 if CONTEXT not in mesh.shape else 172
    top = 34
    width = left + pipeline * (tensor * _SIDE + _GAP)
    height = top + islands * (data * _SIDE + _GAP) - _GAP + 6
    label = "the devices of the mesh"
    drawing = image(svg(width, height, _cells(mesh, names, left, top), label), label)
    return Picture(
        block(head, drawing),
        f"{words} = {devices}\n{columns(_rows(mesh, names), '  ')}",
    )


def colours(mesh: Mesh) -> dict[int, str]:
    """A colour for each device, by its id."""
    places = _places(mesh)
    islands, data, tensor, pipeline = places.shape
    ranks = islands * data
    by_id = {}
    for (i, d, t, p), device in np.ndenumerate(places):
        light = 82 - 26 * (t / max(tensor - 1, 1) if tensor > 1 else 0.4)
        strong = 32 + 50 * ((i * data + d) / (ranks - 1) if ranks > 1 else 0.6)
        by_id[device.id] = (
            f"hsl({stage_hue(p, pipeline):.0f},{strong:.0f}%,{light:.0f}%)"
        )
    return by_id


def _places(mesh: Mesh) -> np.ndarray:
    """The devices by island, data and context, tensor and pipeline: a mesh without islands is one of them."""
    ranks = mesh.shape[DATA] * mesh.shape.get(EXPERT, 1) * mesh.shape.get(CONTEXT, 1)
    return mesh.devices.reshape(-1, ranks, *mesh.devices.shape[-2:])


def _row(mesh: Mesh, rank: int, strategy: str) -> str:
    """Names a row of devices: what rank of data, of expert and of context it is, and which chunks that has
    (`parallel.context`).
    """
    context = mesh.shape.get(CONTEXT, 1)
    experts = mesh.shape.get(EXPERT, 1)
    data, part = divmod(rank, context)
    name = (
        f"{DATA} {data}"
        if experts == 1
        else f"{DATA} {data // experts}, {EXPERT} {data % experts}"
    )
    if context == 1:
        return name
    chunks = {"": "", "ulysses": f": chunk {part}"}.get(
        strategy, f": chunks {part}, {2 * context - 1 - part}"
    )
    return f"{name}, {CONTEXT} {part}{chunks}"


def _rows(mesh: Mesh, names: list[str]) -> list[list[str]]:
    """Device numbers: a line a data rank, stages side by side, islands one below the other."""
    places = _places(mesh)
    islands, data, tensor, pipeline = places.shape
    rows = [
        [
            "",
            "",
            *(
                f"stage {p}" if t == 0 else ""
                for p in range(pipeline)
                for t in range(tensor)
            ),
        ]
    ]
    for i, d in np.ndindex(islands, data):
        name = f"{ISLAND} {i}" if d == 0 else ""
        rows.append(
            [name, names[d], *(str(device.id) for device in places[i, d].T.flat)]
        )
    return rows if islands > 1 else [row[1:] for row in rows]


def _cells(mesh: Mesh, names: list[str], left: int, top: int) -> Iterator[str]:
    islands, data, tensor, pipeline = _places(mesh).shape
    for i in range(islands):
        down = top + i * (data * _SIDE + _GAP)
        if islands > 1:
            yield f'<text x="0" y="{down - 6}" fill="{AXES[ISLAND]}" font-weight="bold">{ISLAND} {i}</text>'
        for d in range(data):
            yield f'<text x="0" y="{down + d * _SIDE + 21}">{names[d]}</text>'
    for p in range(pipeline):
        x = left + p * (tensor * _SIDE + _GAP)
        yield f'<text x="{x}" y="12">{"stage" if pipeline > 1 else PIPELINE} {p}</text>'
        for t in range(tensor):
            yield f'<text x="{x + t * _SIDE + 2}" y="28" font-size="9">{TENSOR[0]}{t}</text>'
    yield from _devices(mesh, names, left, top)


def _devices(mesh: Mesh, names: list[str], left: int, top: int) -> Iterator[str]:
    """Draws a square for each device, in its colour and with its number."""
    places = _places(mesh)
    colour = colours(mesh)
    islands, data, tensor, _ = places.shape
    for (i, d, t, p), device in np.ndenumerate(places):
        at_x = left + p * (tensor * _SIDE + _GAP) + t * _SIDE
        at_y = top + i * (data * _SIDE + _GAP) + d * _SIDE
        island = f"{ISLAND} {i}, " if islands > 1 else ""
        yield f"<g><title>device {device.id}: {island}{names[d]}, {TENSOR} {t}, {PIPELINE} {p}</title>"
        yield (
            f'<rect x="{at_x + 1}" y="{at_y + 1}" width="{_SIDE - 2}" height="{_SIDE - 2}" rx="4" '
            f'fill="{colour[device.id]}"/>'
        )
        yield f'<text x="{at_x + _SIDE / 2}" y="{at_y + 21}" text-anchor="middle" fill="{INK}">{device.id}</text></g>'


def _layout(layout: Layout) -> Picture:
    rows = []
    lines = [["weight", "shape, split over", "a device holds"]]
    masters = [jax.tree.leaves(layout.master(weight))[0] for weight in layout.flat]
    for weight, master in zip(layout.flat, masters, strict=True):
        part = f"{' x '.join(map(str, master.sharding.shard_shape(master.shape)))}, {size(part_bytes(master))}"
        axes = list(
            zip(
                weight.axes,
                weight.shape,
                map("+".join, _split_over(master)),
                strict=True,
            )
        )
        chips = " × ".join(
            f"{axis} {n} {chip(over) if over else ''}" for axis, n, over in axes
        )
        rows.append((f"{code(weight.name)}<br/>{faint(part)}", drawing(master), chips))
        lines.append(
            [
                weight.name,
                " x ".join(
                    f"{a} {n}" + (f"/{over}" if over else "") for a, n, over in axes
                ),
                part,
            ]
        )
    total = sum(map(part_bytes, masters))
    end = f"{count(layout.parameters)} parameters, {size(total)} of float32 masters a device"
    devices = mesh_picture(layout.mesh).html if isinstance(layout.mesh, Mesh) else ""
    weights = table(
        ("weight, what a device holds", "where it lies", "shape, split over"), rows
    )
    return Picture(block(devices, weights, end), f"{columns(lines)}\n{end}")


def _arrays(tree: Any) -> Picture:
    leaves = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not leaves or not all(
        isinstance(getattr(leaf, "sharding", None), Sharding) for _, leaf in leaves
    ):
        raise ConfigError(
            f"there is no picture of {short(repr(tree))}; mt.show takes a mesh, JAX arrays, and what meshtrain makes."
        )
    words = [_words(leaf) for _, leaf in leaves]
    text = columns(
        [
            [name or "array", *line]
            for (name, _), line in zip(leaves, words, strict=True)
        ]
    )
    if len(leaves) == 1 and not leaves[0][0]:
        leaf = leaves[0][1]
        (shape, _, part, nbytes) = words[0]
        head = (
            f"{code(shape)} {_chips(leaf)} {faint(f'a device holds {part}, {nbytes}')}"
        )
        return Picture(block(head, drawing(leaf, scale=1.6)), text)
    heads = ("", "shape", "split over", "a device holds", "", "where it lies")
    rows = [
        (code(name), code(shape), _chips(leaf), code(part), nbytes, drawing(leaf))
        for (name, leaf), (shape, _, part, nbytes) in zip(leaves, words, strict=True)
    ]
    total = f"{size(sum(part_bytes(leaf) for _, leaf in leaves))} a device"
    return Picture(block(table(heads, rows), total), f"{text}\n{total}")


def _words(leaf: Any) -> tuple[str, str, str, str]:
    split = (
        ", ".join(
            f"{i}: {'+'.join(axes)}" for i, axes in enumerate(_split_over(leaf)) if axes
        )
        or "whole"
    )
    part = leaf.sharding.shard_shape(leaf.shape)
    return (
        f"{leaf.dtype}{list(leaf.shape)}",
        split,
        f"{list(part)}",
        size(part_bytes(leaf)),
    )


def _split_over(leaf: Any) -> list[tuple[str, ...]]:
    """For each dimension the mesh axes that split it, without those of one device."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return [()] * len(leaf.shape)
    spec = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    named = [
        () if axes is None else (axes,) if isinstance(axes, str) else axes
        for axes in spec
    ]
    return [
        tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1) for axes in named
    ]


def _chips(leaf: Any) -> str:
    chips = [
        f"{i} {chip('+'.join(axes))}"
        for i, axes in enumerate(_split_over(leaf))
        if axes
    ]
    return ", ".join(chips) or faint("whole everywhere")


def drawing(leaf: Any, scale: float = 1.0) -> str:
    """The parts of an array as rectangles; empty for one with more dimensions or parts than can be drawn, or on no
    devices.
    """
    if isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh):
        return ""
    parts: dict[Bounds, list[Any]] = {}  # devices that hold a part
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        bounds = tuple(
            part.indices(n)[:2] for part, n in zip(index, leaf.shape, strict=True)
        )
        parts.setdefault(bounds, []).append(device)
    cut = [d for d in range(len(leaf.shape)) if len({part[d] for part in parts}) > 1]
    if len(cut) > 3 or len(parts) > MOST_PARTS:
        return ""
    # What is not cut fills up, from the last dimension: pictures of weights that lie alike look alike.
    shown = sorted(
        [
            *cut,
            *[d for d in reversed(range(len(leaf.shape))) if d not in cut][
                : max(0, 2 - len(cut))
            ],
        ]
    )
    panel = (
        shown[0]
        if len(shown) == 3
        or (len(shown) == 2 and cut == shown[:1] and len(leaf.shape) > 2)
        else None
    )
    down, across = [*[None, None], *(d for d in shown if d != panel)][-2:]
    panels = sorted({part[panel] for part in parts}) if panel is not None else [(0, 1)]
    gap = 8
    wide = (_WIDTH * scale - gap * (len(panels) - 1)) / len(panels)
    top = 14 if panel is not None else 1
    high = _HEIGHT * scale if down is not None else 18 * scale
    mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    colour = (
        colours(mesh) if isinstance(mesh, Mesh) and are_axes(mesh.axis_names) else {}
    )
    body = []
    for number, (low, end) in enumerate(panels):
        x = number * (wide + gap)
        label = str(low) if end == low + 1 else f"{low}-{end - 1}"
        if panel is not None and wide >= 5 * len(label):
            body.append(f'<text x="{x:.0f}" y="10" font-size="9">{label}</text>')
        for part, devices in parts.items():
            if panel is None or part[panel] == (low, end):
                left, right = _extent(part, across, leaf.shape)
                upper, lower = _extent(part, down, leaf.shape)
                place = (
                    x + left * wide,
                    top + upper * high,
                    (right - left) * wide,
                    (lower - upper) * high,
                )
                body += _part(part, [device.id for device in devices], place, colour)
    label = "which device holds which part"
    return image(svg(_WIDTH * scale, top + high + 1, body, label), label)


def _extent(part: Bounds, dim: int | None, shape: Sequence[int]) -> tuple[float, float]:
    if dim is None:
        return (0.0, 1.0)
    return (part[dim][0] / shape[dim], part[dim][1] / shape[dim])


def _part(
    part: Bounds, ids: list[int], place: Sequence[float], colour: Mapping[int, str]
) -> Iterator[str]:
    """One part: a stripe for each device that holds it."""
    x, y, wide, high = place
    holders = ", ".join(map(str, ids))
    yield (
        f"<g><title>[{', '.join(f'{low}:{end}' for low, end in part)}] on device{'s' * (len(ids) > 1)} "
        f"{holders}</title>"
    )
    stripes = ids if len(ids) <= _STRIPES else [ids[0], ids[-1]]
    stripe = wide / len(stripes)
    for i, device in enumerate(stripes):
        fill = colour.get(device, GREY)
        yield f'<rect x="{x + i * stripe:.1f}" y="{y:.1f}" width="{stripe:.1f}" height="{high:.1f}" fill="{fill}"/>'
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="none" stroke="{INK}" '
        'stroke-opacity="0.6" stroke-width="0.8"/>'
    )
    label = " ".join(map(str, ids)) if len(ids) <= _STRIPES else f"{ids[0]} … {ids[-1]}"
    if wide >= 6 * len(label) and high >= 11:
        yield (
            f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle" font-size="10" '
            f'fill="{INK}">{label}</text>'
        )
    yield "</g>"
