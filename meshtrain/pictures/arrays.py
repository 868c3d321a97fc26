"""Where live arrays lie: which devices hold which part, as the arrays themselves say.

a weight [layers, d_model, heads, head_dim] on data 2 x tensor 2 x pipeline 2 with ZeRO:

    layers 0-1      layers 2-3        along the panels the first axis that is split,
    0 │ 1           4 │ 5             down and across the next two; each part in the colours of the
    ──┼──           ──┼──             devices that hold it: stripes where several hold the same
    2 │ 3           6 │ 7
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from meshtrain.errors import ConfigError, short
from meshtrain.mesh import LEGAL_AXES, part_bytes
from meshtrain.pictures import mesh as meshes
from meshtrain.pictures.picture import Picture, block, chip, code, columns, faint, svg, table
from meshtrain.plan.report import size
from meshtrain.schedule.draw import INK

MOST_PARTS = 256  # of an array that is drawn
_STRIPES = 8  # of one part: of more holders the first and the last are told
_WIDTH, _HEIGHT = 150, 56  # of all panels together

Parts = dict[tuple[tuple[int, int], ...], list[Any]]


def picture(tree: Any) -> Picture:
    """Of a mesh, an array, or any tree of arrays or ShapeDtypeStructs with shardings; ConfigError for anything else."""
    if isinstance(tree, Mesh):
        return meshes.picture(tree)
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    if not leaves or not all(isinstance(getattr(leaf, "sharding", None), Sharding) for _, leaf in leaves):
        raise ConfigError(
            f"there is no picture of {short(repr(tree))}; mt.show takes a mesh, JAX arrays, and what meshtrain makes."
        )
    told = [words(leaf) for _, leaf in leaves]
    text = columns([[name or "array", *line] for (name, _), line in zip(leaves, told, strict=True)])
    if len(leaves) == 1 and not leaves[0][0]:
        leaf, (shape, _, part, held) = leaves[0][1], told[0]
        head = f"{code(shape)} {chips(leaf)} {faint(f'a device holds {part}, {held}')}"
        return Picture(block(head, drawing(leaf, scale=1.6)), text)
    heads = ("", "shape", "split over", "a device holds", "", "where it lies")
    rows = [
        (code(name), code(shape), chips(leaf), code(part), held, drawing(leaf))
        for (name, leaf), (shape, _, part, held) in zip(leaves, told, strict=True)
    ]
    total = f"{size(sum(part_bytes(leaf) for _, leaf in leaves))} a device"
    return Picture(block(table(heads, rows), total), f"{text}\n{total}")


def words(leaf: Any) -> tuple[str, str, str, str]:
    """Of one array: dtype and shape, what splits it, the shape of a device's part, and its bytes."""
    spec = axes_of(leaf)
    split = ", ".join(f"{i}: {'+'.join(axes)}" for i, axes in enumerate(spec) if axes) or "whole"
    part = leaf.sharding.shard_shape(leaf.shape)
    return f"{leaf.dtype}{list(leaf.shape)}", split, f"{list(part)}", size(part_bytes(leaf))


def axes_of(leaf: Any) -> list[tuple[str, ...]]:
    """For each dimension the mesh axes that split it, those of one device left out."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return [()] * len(leaf.shape)
    given = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    named = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in given]
    return [tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1) for axes in named]


def chips(leaf: Any) -> str:
    found = [f"{i} {chip('+'.join(axes))}" for i, axes in enumerate(axes_of(leaf)) if axes]
    return ", ".join(found) or faint("whole everywhere")


def drawing(leaf: Any, scale: float = 1.0) -> str:
    """Its parts as rectangles; empty for one with more dimensions or parts than can be drawn, or on no devices."""
    if isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh):
        return ""
    parts = _parts(leaf)
    cut = [d for d in range(len(leaf.shape)) if len({part[d] for part in parts}) > 1]
    if len(cut) > 3 or len(parts) > MOST_PARTS:
        return ""
    # What is not cut fills up, from the last dimension: pictures of weights that lie alike look alike.
    shown = sorted([*cut, *[d for d in reversed(range(len(leaf.shape))) if d not in cut][: max(0, 2 - len(cut))]])
    panel = shown[0] if len(shown) == 3 or (len(shown) == 2 and cut == shown[:1] and len(leaf.shape) > 2) else None
    down, across = [*[None, None], *(d for d in shown if d != panel)][-2:]
    return _svg(leaf, parts, (panel, down, across), scale)


def _parts(leaf: Any) -> Parts:
    """{bounds of a part, by dimension: the devices that hold it}."""
    found: Parts = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        bounds = tuple(part.indices(n)[:2] for part, n in zip(index, leaf.shape, strict=True))
        found.setdefault(bounds, []).append(device)
    return found


def _svg(leaf: Any, parts: Parts, dims: Sequence[int | None], scale: float) -> str:
    panel, down, across = dims
    panels = sorted({part[panel] for part in parts}) if panel is not None else [(0, 1)]
    gap = 8
    wide = (_WIDTH * scale - gap * (len(panels) - 1)) / len(panels)
    top = 14 if panel is not None else 1
    high = _HEIGHT * scale if down is not None else 18 * scale
    mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    colour = meshes.colours(mesh) if isinstance(mesh, Mesh) and mesh.axis_names in LEGAL_AXES else {}
    body = []
    for number, bounds in enumerate(panels):
        x = number * (wide + gap)
        if panel is not None and wide >= 5 * len(_range(bounds)):
            body.append(f'<text x="{x:.0f}" y="10" font-size="9">{_range(bounds)}</text>')
        inside = {part: held for part, held in parts.items() if panel is None or part[panel] == bounds}
        for part, held in inside.items():
            left, right = _share(part, across, leaf.shape)
            upper, lower = _share(part, down, leaf.shape)
            place = (x + left * wide, top + upper * high, (right - left) * wide, (lower - upper) * high)
            body += _part(part, held, place, colour)
    return svg(_WIDTH * scale, top + high + 1, body, "which device holds which part")


def _share(part: tuple[tuple[int, int], ...], dim: int | None, shape: Sequence[int]) -> tuple[float, float]:
    """Where a part begins and ends along a dimension, as shares of it."""
    if dim is None:
        return 0.0, 1.0
    return part[dim][0] / shape[dim], part[dim][1] / shape[dim]


def _part(
    part: tuple[tuple[int, int], ...], held: list[Any], place: Sequence[float], colour: Mapping[int, str]
) -> Iterator[str]:
    """One part: a stripe for each device that holds it."""
    x, y, wide, high = place
    ids = [device.id for device in held]
    told = ", ".join(map(str, ids))
    yield f"<g><title>[{', '.join(f'{low}:{end}' for low, end in part)}] on device{'s' * (len(ids) > 1)} {told}</title>"
    stripes = ids if len(ids) <= _STRIPES else [ids[0], ids[-1]]
    for i, device in enumerate(stripes):
        stripe = wide / len(stripes)
        yield (
            f'<rect x="{x + i * stripe:.1f}" y="{y:.1f}" width="{stripe:.1f}" height="{high:.1f}" '
            f'fill="{colour.get(device, "#b4bcc6")}"/>'
        )
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="none" stroke="{INK}" stroke-opacity="0.6" stroke-width="0.8"/>'
    label = " ".join(map(str, ids)) if len(ids) <= _STRIPES else f"{ids[0]} … {ids[-1]}"
    if wide >= 6 * len(label) and high >= 11:
        yield f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle" font-size="10" fill="{INK}">{label}</text>'
    yield "</g>"


def _range(bounds: tuple[int, int]) -> str:
    low, end = bounds
    return str(low) if end == low + 1 else f"{low}-{end - 1}"
