"""What is drawn is what is: every part of an array on the devices that hold it, every op of a table, every byte of a
step.
"""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshtrain as mt
from meshtrain.draw import picture
from meshtrain.draw.picture import Picture
from meshtrain.hlo import Collective, CompiledCollectives, HloLine
from meshtrain.pictures.devices import colours, drawing
from meshtrain.plan import page
from meshtrain.units import size

TINY = {
    "model": {
        "layers": 3,
        "d_model": 16,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 24,
        "vocab_size": 259,
    },
    "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
    "parallel": {"microbatches": 2},
    "train": {"steps": 2, "global_batch_size": 4, "sequence_length": 16},
    "data": {"source": "synthetic"},
}


@pytest.fixture(scope="module")
def program() -> mt.Program:
    return mt.Program(mt.load(TINY))


@pytest.fixture(scope="module")
def islands() -> mt.Program:
    mesh = {"data": 4, "pipeline": 2, "islands": 2}
    return mt.Program(mt.load({**TINY, "mesh": mesh, "parallel": {"microbatches": 1}}))


def drawings(html: str) -> list[ElementTree.Element]:
    """The images in a picture, each of which is an SVG."""
    sources = [
        e.get("src") or ""
        for e in ElementTree.fromstring(f"<div>{html}</div>").iter("img")
    ]
    return [
        ElementTree.fromstring(unquote(re.fullmatch(r"data:image/svg\+xml,(.*)", s)[1]))
        for s in sources
    ]


def shown(thing) -> Picture:
    """The picture of a thing, after what must be true of each: whole HTML that fetches and runs nothing, and says no
    address.
    """
    picture = thing if isinstance(thing, Picture) else mt.show(thing)
    assert thing._repr_html_() == picture.html and repr(thing) == picture.text
    # no SVG but as an image: notebooks that were not run yet show no other
    whole = [ElementTree.tostring(e, "unicode") for e in drawings(picture.html)]
    assert not re.search(r"<script|<style|<svg|href=|url\(http|@import", picture.html)
    assert not re.search(
        r"<script|<style|<image|href=|url\(http|@import|currentColor", "".join(whole)
    )
    assert not re.search(r"0x[0-9a-f]{6}", picture.html + picture.text)
    return picture


def same(images: list[ElementTree.Element], wanted: list[str]) -> None:
    assert [*map(ElementTree.tostring, images)] == [
        ElementTree.tostring(ElementTree.fromstring(s)) for s in wanted
    ]


def elements(html: str, kind: str) -> list[ElementTree.Element]:
    return [
        e for drawing in drawings(html) for e in drawing.iter() if e.tag.endswith(kind)
    ]


def titles(html: str) -> list[str]:
    return [e.text or "" for e in elements(html, "title")]


def test_a_mesh_shows_each_device_once_where_it_is(program):
    mesh, one = mt.show(program.mesh), mt.show(mt.make_mesh(mt.load(None)))
    assert sorted(titles(shown(mesh).html)) == sorted(
        f"device {device.id}: data {d}, tensor {t}, pipeline {p}"
        for (d, t, p), device in np.ndenumerate(program.mesh.devices)
    )
    assert "= 8 devices (" in mesh.text and "= 1 device (" in one.text
    row = mesh.text.splitlines()[2].split()
    assert row == [
        "data",
        "0",
        *(str(program.mesh.devices[0, t, p].id) for p in (0, 1) for t in (0, 1)),
    ]


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 2, 2, 1),
        (8, 1, 1, 1),
        (1, 8, 1, 1),
        (1, 1, 8, 1),
        (4, 1, 2, 1),
        (4, 1, 2, 2),
        (8, 1, 1, 4),
    ],
)
def test_every_device_of_a_mesh_has_a_colour_of_its_own(sizes):
    mesh = dict(zip(("data", "tensor", "pipeline", "islands"), sizes, strict=True))
    found = colours(mt.make_mesh(mt.load({"mesh": mesh})))
    assert len(set(found.values())) == 8
    if mesh["data"] > 1:  # from the first rank's, which is pale, to the last one's
        assert {"32%", "82%"} <= {colour.split(",")[1] for colour in found.values()}


def test_a_mesh_of_islands_shows_them_one_below_the_other(islands):
    devices = islands.mesh.devices
    picture = shown(mt.show(islands.mesh))
    assert sorted(titles(picture.html)) == sorted(
        f"device {device.id}: island {i}, data {d}, tensor {t}, pipeline {p}"
        for (i, d, t, p), device in np.ndenumerate(devices)
    )
    _, _, *rows = (line.split() for line in picture.text.splitlines())
    wanted = [
        [str(devices[i, d, 0, p].id) for p in (0, 1)] for i in (0, 1) for d in (0, 1)
    ]
    named = [
        ["island", "0", "data", "0"],
        ["data", "1"],
        ["island", "1", "data", "0"],
        ["data", "1"],
    ]
    assert rows == [name + numbers for name, numbers in zip(named, wanted, strict=True)]
    assert len({e.get("y") for e in elements(picture.html, "rect")}) == 4, (
        "a row a data rank, none upon another"
    )


@pytest.mark.parametrize(
    ("strategy", "chunks"),
    [
        ("ring", [": chunks 0, 3", ": chunks 1, 2"]),
        ("ulysses", [": chunk 0", ": chunk 1"]),
        (None, ["", ""]),
    ],
)
def test_the_mesh_of_a_program_with_context_says_which_chunks_of_a_row_each_of_its_ranks_has(
    strategy, chunks
):
    model = {"layers": 1, "d_model": 8, "heads": 4, "d_ff": 8, "vocab_size": 8}
    given = {
        "model": model,
        "mesh": {"data": 2, "context": 2, "tensor": 2},
        "parallel": {"context_strategy": strategy or "ring"},
    }
    program = mt.Program(mt.load(given))
    picture = shown(mt.show(program if strategy else program.mesh))
    assert sorted(titles(picture.html))[:8] == sorted(
        f"device {device.id}: data {d}, context {c}{chunks[c]}, tensor {t}, pipeline {p}"
        for (d, c, t, p), device in np.ndenumerate(program.mesh.devices)
    )
    named = [f"data {d}, context {c}{chunks[c]} " for d in (0, 1) for c in (0, 1)]
    lines = [line.strip() for line in picture.text.splitlines()]
    assert [
        next(line for line in lines if line.startswith(name)) for name in named
    ] == [
        line
        for line in lines
        if line.startswith("data ") and "context" in line and "=" not in line
    ]
    assert len(set(colours(program.mesh).values())) == 8


def test_what_lies_on_islands_is_drawn_in_the_colours_of_their_devices(islands):
    image = drawings(shown(islands.layout).html)[1]
    fills = {e.get("fill") for e in image.iter() if e.tag.endswith("rect")}
    assert fills <= {"none", *colours(islands.mesh).values()}
    leaf = max(jax.tree.leaves(islands.layout.masters), key=lambda x: x.size)
    assert "island" not in str(leaf.sharding.spec), "each island has all of it"


SPECS = [
    ((8, 8), PartitionSpec()),
    ((8,), PartitionSpec("data")),
    ((8, 6), PartitionSpec(None, "tensor")),
    ((4, 8, 6, 2), PartitionSpec("pipeline", "data", "tensor")),
    ((4, 8, 6, 2), PartitionSpec("pipeline")),
    ((16, 3), PartitionSpec(("pipeline", "tensor", "data"))),
    ((), PartitionSpec()),
    ((2, 4, 3, 8), PartitionSpec(None, "tensor", None, "data")),
]


@pytest.mark.parametrize(("shape", "spec"), SPECS)
def test_an_array_shows_each_part_on_the_devices_that_hold_it_and_the_parts_cover_it(
    shape, spec, program
):
    array = jax.device_put(jnp.zeros(shape), NamedSharding(program.mesh, spec))
    html = shown(mt.show(array)).html
    drawn, held = {}, {}
    for title in titles(html):
        bounds, devices = re.fullmatch(r"\[(.*)\] on devices? (.*)", title).groups()
        drawn[bounds] = {int(device) for device in devices.split(", ")}
    for shard in array.addressable_shards:
        bounds = ", ".join(
            "{}:{}".format(*part.indices(n)[:2])
            for part, n in zip(shard.index, shape, strict=True)
        )
        held.setdefault(bounds, set()).add(shard.device.id)
    assert drawn == held
    # the outlines, drawn without fill, together fill the panels
    (image,) = drawings(html)
    outlines = [e for e in elements(html, "rect") if e.get("fill") == "none"]
    area = sum(float(e.get("width")) * float(e.get("height")) for e in outlines)
    panels = {e.get("x") for e in elements(html, "text") if e.get("font-size") == "9"}
    wide, high = (float(image.get(name)) for name in ("width", "height"))
    top, gaps = (14, 8 * (len(panels) - 1)) if panels else (1, 0)
    assert area == pytest.approx((wide - gaps) * (high - top - 1), rel=0.02)


def test_an_array_cut_along_more_dimensions_than_there_are_on_paper_is_told_in_words_alone():
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, 2, 2, 1), ("a", "b", "c", "d"))
    wide = jax.device_put(
        jnp.zeros((2, 2, 2, 2)), NamedSharding(mesh, PartitionSpec("a", "b", "c", "d"))
    )
    assert drawing(wide), "three of the four are cut"
    mesh = Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"))
    cube = jax.device_put(
        jnp.zeros((2, 2, 2)), NamedSharding(mesh, PartitionSpec("a", "b", "c"))
    )
    assert "0: a, 1: b, 2: c" in repr(mt.show(cube))


@pytest.mark.thorough
def test_a_layout_tells_of_each_weight_what_the_live_arrays_hold(program):
    params, layout = jax.tree.leaves(program.init().params), shown(program.layout)
    lines = {line.split()[0]: line for line in layout.text.splitlines()[1:-1]}
    assert set(lines) == {weight.name for weight in program.layout.flat}
    for weight, array in zip(program.layout.flat, params, strict=True):
        part = " x ".join(map(str, array.addressable_shards[0].data.shape))
        assert f" {part}, " in lines[weight.name]
    q = lines["blocks.attention.q"]
    assert "layers 3/pipeline" in q and "heads 4/tensor" in q and "embed 16/data" in q
    assert titles(layout.html) == [
        title for one in (program.mesh, *params) for title in titles(mt.show(one).html)
    ]


@pytest.mark.thorough
def test_an_axis_of_one_device_splits_nothing():
    alone = mt.Program(mt.load({**TINY, "mesh": {"data": 2}, "parallel": {}}))
    for text in (shown(alone.layout).text, shown(mt.show(alone.init())).text):
        assert "data" in text and not re.search("tensor|pipeline", text)


@pytest.mark.thorough
def test_a_state_is_a_table_of_its_arrays_and_their_bytes_on_a_device(program):
    lines = shown(mt.show(program.init())).text.splitlines()
    assert len(lines) == len(jax.tree.leaves(program.state_shapes)) + 1
    assert lines[-1] == f"{size(program.state_bytes)} a device"


def test_a_program_shows_its_mesh_its_schedule_and_what_is_replaced(program):
    def my_loss(logits, labels, vocabulary):
        return vocabulary.log_sum_exp(logits) - vocabulary.of_label(logits, labels)

    text = shown(program).text
    assert (
        "data 2 x tensor 2 x pipeline 2 = 8 devices" in text
        and "1f1b: 2 stages, 2 microbatches" in text
    )
    assert "the loss is my_loss" in shown(mt.Program(program.config, loss=my_loss)).text


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)]
)
def test_a_table_shows_every_op_once_in_its_clock_and_stage(name, chunks):
    table = mt.schedule.make_table(name, 2, 4, chunks)
    cells = [
        [table.cell_text(clock, stage) for clock in range(table.clocks)]
        for stage in range(2)
    ]
    picture = shown(table)
    words = [e.text or "" for e in elements(picture.html, "text")]
    assert Counter(
        w for w in words if re.fullmatch(r"[FBIW]\d+(\.\d+)?", w)
    ) == Counter(word for row in cells for cell in row for word in cell.split())
    assert "clock" in words and {f"stage {stage}" for stage in range(2)} <= set(words)
    _, clocks, *rows, verdict = picture.text.splitlines()
    assert clocks.split() == [
        "clock",
        *map(str, range(table.clocks)),
    ] and verdict.startswith("legal")
    starts = [match.start() for match in re.finditer(r"\S+", clocks)][1:]
    ends = [*starts[1:], None]
    assert [
        [row[a:b].strip() for a, b in zip(starts, ends, strict=True)] for row in rows
    ] == cells


def test_an_illegal_table_is_drawn_with_what_is_wrong_with_it():
    wrong = mt.schedule.parse_csv(
        "# schedule=w stages=2 microbatches=1\nstage 0,stage 1\nF0 B0,\n,F0\n,B0\n"
    )
    with pytest.raises(mt.schedule.IllegalTable) as raised:
        mt.schedule.validate(wrong)
    assert shown(wrong).text.splitlines()[-1] == f"it cannot be run: {raised.value}"


@pytest.mark.thorough
def test_what_is_too_large_to_draw_is_told_in_words():
    large = shown(mt.schedule.make_table("1f1b", 16, 512))
    assert not drawings(large.html) and "542 clocks" in large.text


def test_a_timeline_is_its_gantt_chart_and_a_plan_the_pictures_of_its_page():
    line = mt.schedule.simulate(
        mt.schedule.make_table("1f1b", 2, 4), mt.schedule.Durations()
    )
    same(drawings(shown(line).html), [mt.schedule.gantt_svg(line)])
    assert shown(line).text == mt.schedule.gantt_text(line)
    plan = mt.plan(mt.load("configs/llama3_8b.yaml"))
    same(drawings(shown(plan).html), [page.memory_bars(plan), page.waterfall(plan)])
    assert shown(plan).text.startswith("8.03 B parameters on 64 x h100")


def test_a_config_shows_what_is_not_by_default_and_can_be_loaded_again():
    odd = {
        "run": {"directory": "no: it's #1"},
        "checkpoint": {"allow": ["data.source"]},
    }
    config = mt.load({**TINY, **odd, "parallel": {"sequence_parallel": True}})
    text = shown(config).text
    assert mt.load(yaml.safe_load(text)) == config
    assert "kv_heads: 2" in text and "beta1" not in text
    assert shown(mt.load(None)).text == "{}  # the defaults"


def test_a_config_shows_the_sections_of_a_section_once_each_below_it():
    reduce, sync = (
        {"block": 64, "compression": "int8"},
        {"outer_momentum": 0.5, "outer_learning_rate": 0.25},
    )
    config = mt.load(
        {
            "mesh": {"data": 4, "islands": 2},
            "parallel": {"zero_stage": 2, "reduce": reduce, "sync": sync},
        }
    )
    text = shown(config).text
    assert mt.load(yaml.safe_load(text)) == config
    assert (
        text.count("parallel:") == text.count("  reduce:") == text.count("  sync:") == 1
    )
    assert (
        "\n  reduce:\n    compression: int8\n    block: 64\n  sync:\n    outer_learning_rate: 0.25"
        in text
    )


def test_collectives_show_each_kind_once_with_its_sum_and_its_line():
    line = HloLine("/x/site-packages/p/a.py", 5, "F.f")
    one = dict(
        ranks=2,
        dtype="f32",
        loops=(),
        conditionals=(),
        source="jit(s)/psum",
        lines=(line,),
    )
    reduce = Collective("all-reduce", ("data",), bytes=2048, **one)
    backward = one | {"source": "jit(s)/transpose(jvp())/x", "loops": (3,)}
    gather = Collective("all-gather", ("tensor",), bytes=4096, **backward)
    alone = Collective("all-reduce", (), bytes=8, **(one | {"ranks": 1}))
    picture = shown(CompiledCollectives([reduce, alone, reduce, gather]))
    _, first, second, end = picture.text.splitlines()
    assert first.split() == [
        "tensor",
        "all-gather,",
        "backward",
        "f32",
        "4",
        "KiB",
        "3",
        "6",
        "KiB",
        "p/a.py:5",
        "F.f",
    ]
    assert second.split() == [
        "data",
        "all-reduce",
        "f32",
        "2",
        "KiB",
        "2",
        "4",
        "KiB",
        "p/a.py:5",
        "F.f",
    ]
    assert end.endswith("in a step: tensor 6 KiB, data 4 KiB")
    assert shown(CompiledCollectives([])).text.endswith(
        "a device sends in a step: nothing"
    )


@pytest.mark.thorough
def test_the_collectives_of_a_step_are_those_of_its_program_each_from_a_line_of_ours(
    program,
):
    found = program.collectives()
    assert {axis for c in found for axis in c.axes} == {"data", "tensor", "pipeline"}
    assert all(c.where for c in found)
    messages = [c for c in found if c.kind == "collective-permute"]
    assert {c.lines[0].function for c in messages} == {"Execution.send"}
    # as many messages of activations as the table has clocks, whether or not a stage has something to say
    assert {c.times for c in messages} == {program.layout.table.clocks}
    assert any(c.backward for c in found) and not all(c.backward for c in found)


@pytest.mark.parametrize("thing", [3, "text", {"a": 1}, [], np.zeros(3)])
def test_what_has_no_picture_is_refused_in_a_sentence(thing):
    with pytest.raises(mt.ConfigError, match=r"no picture of .*; .* a mesh, JAX"):
        mt.show(thing)


def test_a_mesh_of_other_axes_is_refused_in_a_sentence():
    with pytest.raises(mt.ConfigError, match="the mesh has axes x; make one"):
        mt.show(Mesh(np.array(jax.devices()), ("x",)))


def test_words_in_a_picture_are_escaped():
    assert all(
        "a&lt;b" in drawn("a<b")
        for drawn in (picture.title, picture.faint, picture.code)
    )


def test_a_schedule_is_drawn_without_loading_jax():
    script = "import sys, meshtrain as mt; print(mt.schedule.make_table('1f1b', 2, 2)); print('jax' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout.splitlines()[-1] == "False"
