"""What `python -m experiments.notebooks` refuses, and what it lets pass, without a kernel; and the committed
notebooks.
"""

import re
from pathlib import Path

import pytest
from refusals import tells

from experiments.notebooks import compare, notebook, source
from experiments.notebooks.source import Cell
from meshtrain.errors import ConfigError

SOURCE = """\
# %% [markdown]
# # 3 The title
#
# What it tells.

# %%
print("loss", 2.5)
assert 1 + 1 == 2


# %% tags=["varies"]
1.5

# %% [markdown]
# ## Things to try
# - more
"""
CELLS = [
    Cell("markdown", "# 3 The title\n\nWhat it tells."),
    Cell("code", 'print("loss", 2.5)\nassert 1 + 1 == 2'),
    Cell("code", "1.5", varies=True),
    Cell("markdown", "## Things to try\n- more"),
]


DRAWN = '<p>a</p><img alt="b" src="data:image/svg+xml,%3Csvg%3E%3Ctext%3E{}%3C/text%3E%3C/svg%3E"/>'


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shown(**data):
    kinds = {
        "png": "image/png",
        "svg": "image/svg+xml",
        "html": "text/html",
        "plain": "text/plain",
    }
    named = {kinds.get(k, k): v for k, v in data.items()}
    return {"output_type": "display_data", "data": named, "metadata": {}}


def of_cell(*outputs, varies=()):
    """The outputs of CELLS, whose second prints these."""
    return [[], list(outputs), list(varies), []]


def test_a_source_is_read():
    assert source.read(SOURCE) == CELLS
    assert source.lacks("3_title", CELLS) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "# %% [markdown]\n# # 3",
            "import os\n# %% [markdown]\n# # 3",
            "line 1: a source begins",
        ),
        ('tags=["varies"]', 'tags=["vary"]', "tag vary; did you mean varies?"),
        ('# %% tags=["varies"]', "# %% A title", "line 11: # %% A title is not one of"),
        (
            "# What it tells.",
            "What it tells.",
            "line 4: a line of Markdown is a comment",
        ),
    ],
)
def test_a_source_that_jupytext_would_read_otherwise(old, new, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        source.read(SOURCE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "where", "said"),
    [
        ("# # 3 The", "# # 4 The", "the first cell", "`# 3 ...`"),
        ("# What it tells.\n", "", "the first cell", "title"),
        (
            "## Things to try",
            "## The end",
            "the last cell",
            "`## Things to try`.",
        ),
        ("1.5", "1.5 +", "cell 3, line 1", "no Python"),
        ("1.5\n", "", "cell 3", "empty."),
    ],
)
def test_what_a_notebook_lacks(old, new, where, said):
    (found,) = source.lacks("3_title", source.read(SOURCE.replace(old, new, 1)))
    assert tells(found, where, said)


def test_a_section_that_shows_something_asserts_something():
    heading = Cell("markdown", "## Later")
    shown = [*CELLS[:2], heading, Cell("code", "x = 1\nprint(x)"), CELLS[3]]
    assert source.lacks("3_title", shown) == ["no cell of ## Later asserts anything."]
    for good in (
        "x = 1\nprint(x)\nassert x == 1",
        "def f():\n    print(1)",
        "import os",
    ):
        assert source.lacks("3_title", [*shown[:3], Cell("code", good), CELLS[3]]) == []
    # What is printed by a committed notebook is compared.
    kept = source.KEPT[0]
    title = Cell("markdown", f"# {kept.split('_')[0]} It\n\nWhat it tells.")
    assert source.lacks(kept, [title, *shown[1:]]) == []


def test_a_name_without_a_number():
    assert source.lacks("title", CELLS)[0].startswith("a name is a number and a word")


SAME = [
    (stream("loss 2.5000\n"), stream("loss 2.5020\n")),  # within a thousandth
    (stream("3 from a/tensor.py:42 leave"), stream("3 from a/tensor.py:43 leave")),
    (stream("error 0.01\n"), stream("error 0.02\n")),  # one unit of the last digit
    (stream("| 9.99 |\n"), stream("|  10.00 |\n")),
    (stream("-0.00"), stream("0.00")),
    (shown(plain="[0. 0.]"), shown(plain="[0. 1.e-9]")),
    (shown(plain="1,234.56"), shown(plain="1,234.60")),
    (shown(plain="12,345.678"), shown(plain="12,346.999")),
    (shown(png="aaaa", plain="<Figure>"), shown(png="bbbb", plain="<Figure>")),
    (shown(html="<b style='top: 3px'>8</b>"), shown(html="<b style='top: 4px'>8</b>")),
    (
        shown(html="<style>b {top: 3}</style>8"),
        shown(html="<style>b {top: 4}</style>8"),
    ),
]
OTHER = [
    (
        [stream("loss 2.5")],
        [stream("lost 2.5")],
        "cell 2 printed «loss 2.5», prints «lost 2.5».",
    ),
    (
        [stream("8 devices")],
        [stream("9 devices")],
        "cell 2 printed «8 devices», prints «9 devices».",
    ),
    (
        [stream("a/tensor.py:42 leave")],
        [stream("a/zero.py:42 leave")],
        "cell 2 printed",
    ),
    ([stream("a/tensor.py:42 4")], [stream("a/tensor.py:42 5")], "cell 2 printed"),
    ([stream("100,000")], [stream("100,001")], "cell 2 printed"),
    # Beyond a thousandth, and one unit
    ([stream("2.500")], [stream("2.504")], "cell 2 printed"),
    ([stream("1000.")], [stream("1001.")], "cell 2 printed"),
    ([stream("1.")], [stream("2.")], "cell 2 printed"),
    ([stream("2")], [stream("2.0")], "cell 2 printed"),
    ([stream("jax 0.10.2")], [stream("jax 0.11.2")], "cell 2 printed"),
    ([stream("x0.50")], [stream("x0.51")], "cell 2 printed"),  # a name
    ([stream("float32 0.5")], [stream("float64 0.5")], "cell 2 printed"),
    ([stream("loss 0.5")], [stream("loss nan")], "cell 2 printed"),
    ([stream("a\nb\n")], [stream("a\n")], "cell 2 printed «b», prints «»."),
    ([stream("a b")], [stream("ab")], "cell 2 printed"),
    ([shown(png="aaaa")], [], "cell 2 gave image/png, gives nothing."),
    (
        [shown(plain="a")],
        [shown(plain="a"), shown(plain="a")],
        "cell 2 gave text/plain, gives text/plain, text/plain.",
    ),
    (
        [shown(plain="a")],
        [shown(plain="a") | {"output_type": "execute_result"}],
        "cell 2 gave text/plain, gives",
    ),
    (
        [stream("a")],
        [stream("a"), stream("careful", "stderr")],
        "cell 2 gave stdout, gives stdout, stderr.",
    ),
    (
        [shown(svg="<svg><rect/><rect/></svg>")],
        [shown(svg="<svg><rect/></svg>")],
        "cell 2 drew 2 × rect, draws 1.",
    ),
    (
        [shown(html=DRAWN.format(8))],
        [shown(html=DRAWN.format(9))],
        "cell 2 printed «8», prints «9».",
    ),
    (
        [shown(html=DRAWN.format("%3Crect/%3E"))],
        [shown(html=DRAWN.format(""))],
        "cell 2 drew 1 × rect, draws 0.",
    ),
    (
        [shown(html="<p>8</p>")],
        [shown(html="<p>9</p>")],
        "cell 2 printed «8», prints «9».",
    ),
]


@pytest.mark.parametrize(("old", "new"), SAME)
def test_what_agrees(old, new):
    assert compare.differences(CELLS, of_cell(old), of_cell(new)) == []


@pytest.mark.parametrize(("old", "new", "said"), OTHER)
def test_what_differs(old, new, said):
    (found,) = compare.differences(CELLS, of_cell(*old), of_cell(*new))
    assert found.startswith(said)


def test_a_cell_that_varies_gives_outputs_of_the_same_kinds():
    old = of_cell(varies=[shown(plain="1 s")])
    assert (
        compare.differences(CELLS, old, of_cell(varies=[shown(plain="2 minutes")]))
        == []
    )
    assert compare.differences(CELLS, old, of_cell()) == [
        "cell 3 gave text/plain, gives nothing."
    ]


def path(cell: int, path: str) -> str:
    """Returns the sentence about a path of this machine in a cell."""
    return f"cell {cell} shows a path of this machine: {path}"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (stream("careful", "stderr"), "cell 2 writes to stderr: careful"),
        (stream("in /tmp/abc/run now"), path(2, "/tmp/abc/run")),
        (
            shown(html="<a href='/home/me/x'>x</a>"),
            path(2, "/home/me/x"),
        ),
        (
            stream("of site-packages/jax/x.py"),
            path(2, "site-packages/jax/x.py"),
        ),
        (shown(plain="<object at 0x7f00aa>"), "cell 2 shows an address: at 0x7f00aa"),
        (
            shown(**{"application/javascript": "x"}),
            "cell 2 gives application/javascript",
        ),
        (shown(png="a" * 1_000_000), "1,00"),
    ],
)
def test_what_no_reader_should_find(output, said):
    (found,) = notebook.unfit(CELLS, of_cell(output))
    assert found.startswith(said)


def test_where_the_notebooks_lie(monkeypatch):
    monkeypatch.setattr(notebook, "NOTEBOOKS", Path("/srv/checkout/experiments"))
    assert notebook.unfit(CELLS, of_cell(stream("in /srv/checkout/runs"))) == [
        path(2, "/srv/checkout")
    ]


def test_a_path_in_a_source():
    cells = [*CELLS[:2], Cell("code", "open('/work/x')"), CELLS[3]]
    assert notebook.unfit(cells, of_cell()) == [path(3, "/work/x")]


def test_what_a_reader_may_find():
    outputs = [
        stream("data/tmp, GPU/work, 2 / 3 <root></root>"),
        shown(png="/tmp/"),
        shown(html="<b>a</b>"),
    ]
    assert (
        notebook.unfit(CELLS, of_cell(*outputs, varies=[stream("compiling", "stderr")]))
        == []
    )


def test_a_notebook_is_read_as_it_was_made():
    outputs = of_cell(
        stream("a\nb\n"), shown(png="aaaa", plain="x\ny"), varies=[shown(plain="1.5")]
    )
    text = notebook.make(CELLS, outputs)
    assert notebook.read(text) == (CELLS, outputs)
    assert notebook.stale(text, CELLS) == []


def test_stale_notebooks():
    text = notebook.make(CELLS, of_cell())
    for position, cell in enumerate(CELLS, 1):
        changed = [
            *CELLS[: position - 1],
            Cell(cell.kind, cell.text + " ", cell.varies),
            *CELLS[position:],
        ]
        (said,) = notebook.stale(text, changed)
        assert tells(said, f"stale: cell {position} is not the source's", "--write.")
    (said,) = notebook.stale(text[:-9], CELLS)
    assert tells(said, "no notebook", "--write.")
    (said,) = notebook.stale(text, CELLS[:3])
    assert tells(said, "stale: 4 cells", "the source has 3", "--write.")
    for old, new in [
        ("cell-2", "a1b2"),
        ('"execution_count": 1', '"execution_count": 7'),
        ('"name": "python3"', '"name": "x"'),
    ]:
        assert notebook.stale(text.replace(old, new), CELLS)[0].startswith(
            "its form is not what --write"
        )


def test_streams_come_in_pieces():
    pieces = [
        stream("a"),
        stream("b"),
        stream("c", "stderr"),
        stream("d"),
        shown(plain="x"),
        stream("e"),
    ]
    merged = [
        stream("ab"),
        stream("c", "stderr"),
        stream("d"),
        shown(plain="x"),
        stream("e"),
    ]
    assert notebook.merged(pieces) == merged


@pytest.mark.parametrize("name", source.names())
def test_sources(name):
    """What can be said of a notebook without executing it."""
    cells = source.read((source.SOURCES / f"{name}.py").read_text(encoding="utf-8"))
    assert source.lacks(name, cells) == []
    assert notebook.unfit(cells, [[] for _ in cells]) == []


@pytest.mark.parametrize("name", source.KEPT)
def test_committed(name):
    cells = source.read((source.SOURCES / f"{name}.py").read_text(encoding="utf-8"))
    committed = (source.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert notebook.stale(committed, cells) == []
    assert notebook.unfit(cells, notebook.read(committed)[1]) == []
