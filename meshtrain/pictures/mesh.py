"""A mesh as blocks of devices: a block a stage, a row a data rank, a column a tensor rank.

    stage 0        stage 1
    0  1           4  5
    2  3           6  7

Each device has a colour of its own, which the pictures of arrays then use: hue by stage, light to dark by tensor rank, pale to strong by
data rank.
"""

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from meshtrain.config.schema import DATA, PIPELINE, TENSOR
from meshtrain.mesh import check_axes
from meshtrain.pictures.picture import Picture, block, chip, columns, faint, svg
from meshtrain.schedule.draw import INK, stage_hue

MOST_DEVICES = 256  # drawn: beyond that numbers are not readable
_SIDE, _GAP = 34, 26


def picture(mesh: Mesh) -> Picture:
    """ConfigError for a mesh whose axes are not data, tensor and pipeline."""
    check_axes(mesh)
    devices = f"{mesh.size} device{'s' * (mesh.size > 1)} ({mesh.devices.flat[0].device_kind})"
    words = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    chips = " × ".join(chip(axis, f"{axis} {size}") for axis, size in mesh.shape.items())
    head = f"{chips} {faint(f'= {devices}')}"
    if mesh.size > MOST_DEVICES:
        return Picture(block(head), f"{words} = {devices}")
    text = f"{words} = {devices}\n{columns(_rows(mesh), '  ')}"
    return Picture(block(head, _drawing(mesh)), text)


def colours(mesh: Mesh) -> dict[int, str]:
    """A colour for each device, by its id."""
    data, tensor, pipeline = mesh.devices.shape
    found = {}
    for (d, t, p), device in np.ndenumerate(mesh.devices):
        light = 82 - 26 * (t / max(tensor - 1, 1) if tensor > 1 else 0.4)
        strong = 32 + 50 * (d / max(data - 1, 1) if data > 1 else 0.6)
        found[device.id] = f"hsl({stage_hue(p, pipeline):.0f},{strong:.0f}%,{light:.0f}%)"
    return found


def _rows(mesh: Mesh) -> list[list[str]]:
    """Device numbers: a line a data rank, stages side by side."""
    data, tensor, pipeline = mesh.devices.shape
    heads = [""] + [f"stage {p}" if t == 0 else "" for p in range(pipeline) for t in range(tensor)]
    ranks = [
        [f"data {d}", *(str(mesh.devices[d, t, p].id) for p in range(pipeline) for t in range(tensor))]
        for d in range(data)
    ]
    return [heads, *ranks]


def _drawing(mesh: Mesh) -> str:
    data, tensor, pipeline = mesh.devices.shape
    left, top = 52, 34
    width, height = left + pipeline * (tensor * _SIDE + _GAP), top + data * _SIDE + 6
    return svg(width, height, _cells(mesh, left, top), "the devices of the mesh")


def _cells(mesh: Mesh, left: int, top: int) -> Iterator[str]:
    data, tensor, pipeline = mesh.devices.shape
    colour = colours(mesh)
    for d in range(data):
        yield f'<text x="0" y="{top + d * _SIDE + 21}">{DATA} {d}</text>'
    for p in range(pipeline):
        x = left + p * (tensor * _SIDE + _GAP)
        yield f'<text x="{x}" y="12">{"stage" if pipeline > 1 else PIPELINE} {p}</text>'
        for t in range(tensor):
            yield f'<text x="{x + t * _SIDE + 2}" y="28" font-size="9">{TENSOR[0]}{t}</text>'
            for d in range(data):
                device = mesh.devices[d, t, p]
                at_x, at_y = x + t * _SIDE, top + d * _SIDE
                yield f"<g><title>device {device.id}: {DATA} {d}, {TENSOR} {t}, {PIPELINE} {p}</title>"
                yield f'<rect x="{at_x + 1}" y="{at_y + 1}" width="{_SIDE - 2}" height="{_SIDE - 2}" rx="4" fill="{colour[device.id]}"/>'
                yield f'<text x="{at_x + _SIDE / 2}" y="{at_y + 21}" text-anchor="middle" fill="{INK}">{device.id}</text></g>'
