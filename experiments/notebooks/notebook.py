"""The notebook of a source and its outputs: the same bytes whenever the outputs are the same; and what no reader should
find in it.

The format is nbformat 4.5 as JupyterLab writes it (https://nbformat.readthedocs.io, "The Notebook file format"),
without what changes from one execution or machine to the next. It is plain JSON here, so that nothing but Python is
needed to check it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from experiments.notebooks.source import NOTEBOOKS, Cell

LARGEST = 1_000_000  # bytes of a notebook
SHOWN = {
    "text/plain",
    "text/html",
    "text/markdown",
    "text/latex",
    "image/png",
    "image/jpeg",
    "image/svg+xml",
}
BINARY = {"image/png", "image/jpeg"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# No closing tag: </root> is none of a path.
_PATH = re.compile(
    r"(?<![\w.<])/(?:home|root|work|tmp|usr|opt|mnt|Users)\b[^\s'\"<>)]*|\S*site-packages\S*"
)
_ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]+")

Output = dict[str, Any]


def make(cells: list[Cell], outputs: list[list[Output]]) -> str:
    """The file's text. `outputs`: of each cell, in order; Markdown has none."""
    made, count = [], 0
    for position, (cell, shown) in enumerate(zip(cells, outputs, strict=True), 1):
        metadata = {"tags": ["varies"]} if cell.varies else {}
        fields = {
            "cell_type": cell.kind,
            "id": f"cell-{position}",
            "metadata": metadata,
            "source": _lines(cell.text),
        }
        if cell.kind == "code":
            count += 1
            fields |= {
                "execution_count": count,
                "outputs": [_written(output, count) for output in shown],
            }
        made.append(fields)
    whole = {"cells": made, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def read(text: str) -> tuple[list[Cell], list[list[Output]]]:
    """The cells of a notebook's file and the outputs of each, texts joined."""
    notebook = json.loads(text)
    cells = [
        Cell(
            c["cell_type"],
            _joined(c["source"]),
            "varies" in c["metadata"].get("tags", []),
        )
        for c in notebook["cells"]
    ]
    outputs = [
        [_read(output) for output in c.get("outputs", [])] for c in notebook["cells"]
    ]
    return cells, outputs


def merged(outputs: list[Output]) -> list[Output]:
    """Streams of one name that follow each other as one: how many pieces a kernel sends them in is chance."""
    found: list[Output] = []
    for output in outputs:
        if (
            found
            and output["output_type"] == "stream"
            and output.get("name") == found[-1].get("name")
        ):
            found[-1] = found[-1] | {"text": found[-1]["text"] + output["text"]}
        else:
            found.append(output)
    return found


def stale(committed: str, cells: list[Cell]) -> list[str]:
    """How the committed file's text differs, apart from its outputs, from what the source makes; a sentence at most."""
    try:
        of_file, outputs = read(committed)
    except (ValueError, KeyError, TypeError):
        return ["what is committed is no notebook; write it again with --write."]
    if len(of_file) != len(cells):
        return [
            f"stale: {len(of_file)} cells, the source has {len(cells)}; write it again with --write."
        ]
    for position, (old, new) in enumerate(zip(of_file, cells, strict=True), 1):
        if old != new:
            return [
                f"stale: cell {position} is not the source's; write it again with --write."
            ]
    if make(cells, outputs) != committed:
        return [
            "its form is not what --write gives it (ids, counts, metadata); write it again with --write."
        ]
    return []


def unfit(cells: list[Cell], outputs: list[list[Output]]) -> list[str]:
    """What a reader should not find in cells and their outputs: a sentence each."""
    found = []
    for position, (cell, shown) in enumerate(zip(cells, outputs, strict=True), 1):
        for output in shown:
            if (
                output["output_type"] == "stream"
                and output["name"] == "stderr"
                and not cell.varies
            ):
                found.append(
                    f"cell {position} writes to stderr: {_start(output['text'])}"
                )
            for kind in output.get("data", {}).keys() - SHOWN:
                found.append(
                    f"cell {position} gives {kind}, which shows nothing where no kernel runs."
                )
        for text in [cell.text, *_texts(shown)]:
            for what, hit in [
                ("a path of this machine", _path(text)),
                ("an address", _ADDRESS.search(text)),
            ]:
                if hit:
                    found.append(f"cell {position} shows {what}: {_start(hit[0])}")
    if (size := len(make(cells, outputs).encode())) > LARGEST:
        found.append(f"{size:,} bytes, more than {LARGEST:,}.")
    return found


def _path(text: str) -> re.Match | None:
    return _PATH.search(text) or re.search(re.escape(str(NOTEBOOKS.parent)), text)


def _texts(outputs: list[Output]) -> Iterator[str]:
    for output in outputs:
        yield output.get("text", "")
        yield from (
            text
            for kind, text in output.get("data", {}).items()
            if kind in SHOWN - BINARY
        )


def _start(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 100 else f"{line[:100]}…"


def _written(output: Output, count: int) -> Output:
    if output["output_type"] == "stream":
        return {
            "name": output["name"],
            "output_type": "stream",
            "text": _lines(output["text"]),
        }
    data = {
        kind: value if kind in BINARY else _lines(value)
        for kind, value in output["data"].items()
    }
    written = {
        "data": data,
        "metadata": output.get("metadata", {}),
        "output_type": output["output_type"],
    }
    return written | (
        {"execution_count": count} if output["output_type"] == "execute_result" else {}
    )


def _read(output: Output) -> Output:
    if output["output_type"] == "stream":
        return output | {"text": _joined(output["text"])}
    return output | {
        "data": {kind: _joined(value) for kind, value in output["data"].items()}
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
