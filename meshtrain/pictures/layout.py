"""Where each weight of a model lies on its mesh, by the names of its axes."""

import jax
from jax.sharding import Mesh

from meshtrain.mesh import part_bytes
from meshtrain.parallel.layout import Layout
from meshtrain.pictures import arrays
from meshtrain.pictures import mesh as meshes
from meshtrain.pictures.picture import Picture, block, chip, code, columns, faint, table
from meshtrain.plan.report import count, size


def picture(layout: Layout) -> Picture:
    rows, lines = [], [["weight", "shape, split over", "a device holds"]]
    masters = jax.tree.leaves(layout.masters)
    for weight, master in zip(layout.flat, masters, strict=True):
        part = " x ".join(map(str, master.sharding.shard_shape(master.shape)))
        held = size(part_bytes(master))
        split = map("+".join, arrays.axes_of(master))
        axes = list(zip(weight.axes, weight.shape, split, strict=True))
        chips = " × ".join(f"{axis} {n} {chip(over) if over else ''}" for axis, n, over in axes)
        rows.append((f"{code(weight.name)}<br/>{faint(f'{part}, {held}')}", arrays.drawing(master), chips))
        told = " x ".join(f"{axis} {n}" + (f"/{over}" if over else "") for axis, n, over in axes)
        lines.append([weight.name, told, f"{part}, {held}"])
    total = sum(map(part_bytes, masters))
    end = f"{count(layout.parameters)} parameters, {size(total)} of float32 masters a device"
    devices = meshes.picture(layout.mesh).html if isinstance(layout.mesh, Mesh) else ""
    drawn = table(("weight, what a device holds", "where it lies", "shape, split over"), rows)
    return Picture(block(devices, drawn, end), f"{columns(lines)}\n{end}")
