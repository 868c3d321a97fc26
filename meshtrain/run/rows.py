"""metrics.jsonl after a resume: the rows of steps that will be taken again are dropped, so that each step stands there once."""

import json
from pathlib import Path

from meshtrain.files import write_atomically


def trim_metrics(path: Path, step: int) -> None:
    """Drops rows of steps after `step` and what is not a whole row (a process killed while writing leaves one), atomically."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step(line) is not None and _step(line) <= step]  # type: ignore[operator]
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept))


def _step(line: bytes) -> int | None:
    """The step of a row; None if the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row.get("step") if isinstance(row, dict) else None
