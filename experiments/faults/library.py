"""`import meshtrain as mt`: what is no run for read_model, no tokens for a model, a batch made by hand."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.faults.harness import (
    Crash,
    Place,
    Silent,
    Unclear,
    contains,
    fault,
    kind,
    last_line,
)

MOST = 700  # characters of a sentence


def refusal(call: Callable[[], object], *words: str) -> None:
    """A call refuses with one sentence, with these words in it."""
    from meshtrain.checkpoint import CheckpointError
    from meshtrain.config import ConfigError

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            call()
    except (ConfigError, CheckpointError) as error:
        sentence = str(error)
    except BaseException as error:
        raise Crash(f"{type(error).__name__}: {last_line(str(error))}") from None
    else:
        raise Silent(f"taken; it said: {last_line(out.getvalue())}")
    if (
        len(sentence.splitlines()) != 1
        or len(sentence) > MOST
        or sentence[-1:] not in ".?"
    ):
        raise Unclear(f"no one sentence: {sentence[:200]}")
    if not sentence.isprintable():
        raise Unclear(f"characters that a terminal obeys: {sentence[:200]!r}")
    contains(sentence, *words)


kind("library-model")


def model(name: str, arrange: Callable[[Place], Any]) -> None:
    @fault(f"read_model of {name}")
    def _(p: Place) -> None:
        import meshtrain as mt

        p.base()
        given = arrange(p)
        refusal(lambda: mt.read_model(given))


def damaged(p: Place, file: str, content: bytes) -> Path:
    for step in ("2", "4", "6"):
        (p.checkpoints / step / file).write_bytes(content)
    return p.run


model("nothing", lambda p: p.dir / "nowhere")
model("a file", lambda p: p.dir / "config.yaml")
model("an empty directory", lambda p: (p.dir / "void").mkdir() or p.dir / "void")
model("a link to itself", lambda p: (p.dir / "l").symlink_to("l") or p.dir / "l")
for name, given in (
    ("None", None),
    ("a number", 3),
    ("bytes", b"run"),
    ("a path with a NUL", "a\0b"),
    ("a path of 5,000 characters", "x" * 5000),
):
    model(name, lambda p, given=given: given)
model("a run whose steps have no manifest", lambda p: damaged(p, "manifest.json", b""))
model("a run whose manifests are lists", lambda p: damaged(p, "manifest.json", b"[]"))
model("a run whose COMMITs are zeros", lambda p: damaged(p, "COMMIT", bytes(100)))


@fault("read_model is given tokens that the model has not")
def tokens(p: Place) -> None:
    import meshtrain as mt

    p.base()
    found = mt.read_model(p.run)
    odd = (257, -1, 2**40, "a", 1.5, [1], None)
    for given in (*([[x]] for x in odd), None, [[1, 2], [3]]):
        refusal(lambda given=given: found(given))


@fault("a batch whose weights sum to less than 1 has the mean of its tokens")
def small_weights(p: Place) -> None:
    """Through the hand-made batch of a notebook."""
    import numpy as np

    import meshtrain as mt

    p.config()
    config = mt.load(str(p.dir / "config.yaml"))
    program = mt.Program(config)
    state = program.init()
    batch = mt.open_data(config)[0].batch(0)
    found = []
    for weight in (1.0, 0.1, 0.01):
        weights = np.full(batch["labels"].shape, weight, np.float32)
        placed = program.place({**batch, "weights": weights})
        found.append(float(program.eval_step(state.params, placed)))
    if max(found) - min(found) > 1e-4 * max(found):
        raise Silent(f"means of the same tokens: {found}")
