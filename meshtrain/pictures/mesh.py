"""A mesh as blocks of devices: a block a stage, a row a data rank, a column a tensor rank; islands one below the other.

              stage 0     stage 1
    island 0   0  1        4  5        data 0
               2  3        6  7        data 1

    island 1   8  9       12 13
              10 11       14 15

Each device has a colour of its own, which the pictures of arrays then use: hue by stage, light to dark by tensor rank, pale to strong by
data rank.
"""

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from meshtrain.config.mesh import DATA, ISLAND, PIPELINE, TENSOR
from meshtrain.mesh import check_axes
from meshtrain.pictures.picture import AXES, Picture, block, chip, columns, faint, svg
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
    places = _places(mesh)
    islands, data, tensor, pipeline = places.shape
    ranks, found = islands * data, {}
    for (i, d, t, p), device in np.ndenumerate(places):
        light = 82 - 26 * (t / max(tensor - 1, 1) if tensor > 1 else 0.4)
        strong = 32 + 50 * ((i * data + d) / (ranks - 1) if ranks > 1 else 0.6)
        found[device.id] = f"hsl({stage_hue(p, pipeline):.0f},{strong:.0f}%,{light:.0f}%)"
    return found


def _places(mesh: Mesh) -> np.ndarray:
    """The devices by island, data, tensor and pipeline: a mesh without islands is one of them."""
    return mesh.devices.reshape(-1, *mesh.devices.shape[-3:])


def _rows(mesh: Mesh) -> list[list[str]]:
    """Device numbers: a line a data rank, stages side by side, islands one below the other."""
    places = _places(mesh)
    islands, data, tensor, pipeline = places.shape
    stages = [f"stage {p}" if t == 0 else "" for p in range(pipeline) for t in range(tensor)]
    ranks = [
        [f"{DATA} {d}", *(str(places[i, d, t, p].id) for p in range(pipeline) for t in range(tensor))]
        for i in range(islands)
        for d in range(data)
    ]
    if islands == 1:
        return [["", *stages], *ranks]
    named = [f"{ISLAND} {i}" if d == 0 else "" for i in range(islands) for d in range(data)]
    return [["", "", *stages], *([name, *rank] for name, rank in zip(named, ranks, strict=True))]


def _drawing(mesh: Mesh) -> str:
    islands, data, tensor, pipeline = _places(mesh).shape
    left, top = 52, 34
    width, height = left + pipeline * (tensor * _SIDE + _GAP), top + islands * (data * _SIDE + _GAP) - _GAP + 6
    return svg(width, height, _cells(mesh, left, top), "the devices of the mesh")


def _cells(mesh: Mesh, left: int, top: int) -> Iterator[str]:
    places, colour = _places(mesh), colours(mesh)
    islands, data, tensor, pipeline = places.shape
    for i in range(islands):
        down = top + i * (data * _SIDE + _GAP)
        if islands > 1:
            yield f'<text x="0" y="{down - 6}" fill="{AXES[ISLAND]}" font-weight="bold">{ISLAND} {i}</text>'
        for d in range(data):
            yield f'<text x="0" y="{down + d * _SIDE + 21}">{DATA} {d}</text>'
    for p in range(pipeline):
        x = left + p * (tensor * _SIDE + _GAP)
        yield f'<text x="{x}" y="12">{"stage" if pipeline > 1 else PIPELINE} {p}</text>'
        for t in range(tensor):
            yield f'<text x="{x + t * _SIDE + 2}" y="28" font-size="9">{TENSOR[0]}{t}</text>'
    for (i, d, t, p), device in np.ndenumerate(places):
        at_x = left + p * (tensor * _SIDE + _GAP) + t * _SIDE
        at_y = top + i * (data * _SIDE + _GAP) + d * _SIDE
        island = f"{ISLAND} {i}, " if islands > 1 else ""
        yield f"<g><title>device {device.id}: {island}{DATA} {d}, {TENSOR} {t}, {PIPELINE} {p}</title>"
        yield f'<rect x="{at_x + 1}" y="{at_y + 1}" width="{_SIDE - 2}" height="{_SIDE - 2}" rx="4" fill="{colour[device.id]}"/>'
        yield f'<text x="{at_x + _SIDE / 2}" y="{at_y + 21}" text-anchor="middle" fill="{INK}">{device.id}</text></g>'
