"""`import meshtrain as mt`: values that no YAML file can hold, in every section; overrides, paths and other objects in
their place.
"""

import contextlib
import dataclasses
import datetime
import fractions
import io
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.faults.harness import Crash, Place, Silent, Unclear, fault, kind, last_line

ROOM = "library"
MOST = 700  # characters of a sentence


def refusal(call: Callable[[], object], *words: str) -> str:
    """The one sentence with which a call refuses, with these words in it."""
    from meshtrain.checkpoint import CheckpointError
    from meshtrain.config import ConfigError

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            call()
    except (ConfigError, CheckpointError) as error:
        sentence = str(error)
    except BaseException as error:
        raise Crash(f"{type(error).__name__}: {last_line(str(error))}") from None
    else:
        raise Silent(f"taken; it said: {last_line(out.getvalue() + err.getvalue())}")
    if len(sentence.splitlines()) != 1 or len(sentence) > MOST or sentence[-1:] not in ".?":
        raise Unclear(f"no one sentence: {sentence[:200]}")
    if not sentence.isprintable():
        raise Unclear(f"characters that a terminal obeys: {sentence[:200]!r}")
    for word in words:
        if not any(choice.lower() in sentence.lower() for choice in word.split("|")):
            raise Unclear(f"it does not say {word!r}: {sentence[:300]}")
    return sentence


def sections(declared: type, prefix: str = "") -> dict[str, list[tuple[str, Any]]]:
    """The keys of each section with their types."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for name, hint in typing.get_type_hints(declared).items():
        if dataclasses.is_dataclass(hint):
            found |= sections(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found.setdefault(prefix[:-1], []).append((name, hint))
    return found


def is_text(hint: Any) -> bool:
    """Whether a key takes any text, and so that of a number."""
    return str in (hint, *typing.get_args(hint)) or tuple[str, ...] in (
        hint,
        *typing.get_args(hint),
    )


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def holds_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


# What is no value of any key; then what is none but for a text.
NEVER: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"run",
    "a set": lambda: {1, 2},
    "a mapping of a mapping": lambda: {"a": {"b": 1}},
    "nested 3,000 deep": lambda: deep(3000),
    "a list that holds itself": holds_itself,
    "an object": object,
    "a function": lambda: len,
    "a complex number": lambda: 1 + 2j,
    "a text with a NUL": lambda: "a\0b",
    "a list of bytes": lambda: [b"a"],
    "a generator": lambda: (n for n in ()),
}
NO_NUMBER: dict[str, Callable[[], Any]] = {
    "a number of 5,000 digits": lambda: 10**5000,
    "not a number": lambda: float("nan"),
    "a date": lambda: datetime.date(2024, 1, 1),
    "a fraction": lambda: fractions.Fraction(1, 3),
}


def of_section(section: str, name: str, make: Callable[[], Any], texts: bool) -> None:
    """Each key of the section in turn has the value; each time it is refused."""

    @fault(ROOM, f"section {section}, every key is {name}")
    def _(p: Place) -> None:
        import meshtrain as mt
        from meshtrain.config.schema import Config

        for key, hint in sections(Config)[section]:
            if not texts and is_text(hint):
                continue
            value: Any = {key: make()}
            for outer in reversed(section.split(".")):
                value = {outer: value}
            try:
                refusal(lambda value=value: mt.load(value))
            except (Silent, Unclear, Crash) as verdict:
                raise type(verdict)(f"{section}.{key}: {verdict}") from None


kind(
    "library-value",
    "config/test_load.py::test_what_no_config_holds_is_one_sentence",
    "config/test_load.py::test_what_yaml_has_no_word_for_is_refused_when_given_from_python",
)
SECTIONS = (
    "run", "model", "mesh", "parallel", "parallel.reduce", "parallel.sync", "data", "data.images", "train", "optimizer", "lora",
    "precision", "checkpoint", "eval", "log", "telemetry", "survive",
)  # fmt: skip
for section in SECTIONS:
    for name, make in NEVER.items():
        of_section(section, name, make, texts=True)
for section in ("model", "mesh", "train", "optimizer", "data.images"):
    for name, make in NO_NUMBER.items():
        of_section(section, name, make, texts=False)

# --- in the place of a whole config

kind(
    "library-config",
    "config/test_load.py::test_what_is_no_config_at_all_is_told_what_may_be",
    "config/test_load.py::test_what_no_config_holds_is_one_sentence",
)


def config(name: str, make: Callable[[], Any], *words: str) -> None:
    @fault(ROOM, f"a config that is {name}")
    def _(p: Place) -> None:
        import meshtrain as mt

        refusal(lambda: mt.load(make()), *words)


config("a mapping with a key of bytes", lambda: {b"run": 1})
config("a mapping with a key that is None", lambda: {None: 1})
config("a mapping with a key that is a tuple", lambda: {("run", "seed"): 1})
config("a section of bytes", lambda: {"run": b"seed: 1"})
config("a section of None in a list", lambda: {"run": [None]})
config("nested 3,000 deep", lambda: deep(3000))
config("nested in a section 3,000 deep", lambda: {"run": deep(3000)})
config("a mapping that holds itself", lambda: (lambda d: d.update(run=d) or d)({}))
config("a number", lambda: 3)
config("bytes", lambda: b"config.yaml")
config("a list", lambda: [{"run": {}}])
config("an open file", lambda: open(os.devnull))  # noqa: SIM115
config("a number of 5,000 digits for the steps", lambda: {"train": {"steps": 10**5000}})
config("with right-to-left characters in a key", lambda: {"\u202emesh": {"data": 2}})
config("with right-to-left characters in a value", lambda: {"optimizer": {"name": "adamw\u202e"}})

kind(
    "library-overrides",
    "config/test_load.py::test_overrides_of_another_shape_are_told_how_they_are_written",
    "test_config.py::test_bad_input_is_refused_in_one_sentence",
)


def overrides(name: str, make: Callable[[], Any]) -> None:
    @fault(ROOM, f"overrides that are {name}")
    def _(p: Place) -> None:
        import meshtrain as mt

        refusal(lambda: mt.load(None, make()))


overrides("one text", lambda: "mesh.data=2")
overrides("bytes", lambda: b"mesh.data=2")
overrides("a list of bytes", lambda: [b"mesh.data=2"])
overrides("a mapping", lambda: {"mesh.data": 2})
overrides("a set", lambda: {"mesh.data=2"})
overrides("a list with None", lambda: [None])
overrides("a number", lambda: 2)
overrides("a text nested 3,000 deep", lambda: ["mesh.data=" + "[" * 3000])
overrides("a text with a NUL", lambda: ["run.directory=a\0b"])
overrides("a list of a list", lambda: [["mesh.data=2"]])

# --- a checkpoint's weights

kind("library-model")


def model(name: str, arrange: Callable[[Place], Any]) -> None:
    @fault(ROOM, f"read_model of {name}")
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
model("None", lambda p: None)
model("a number", lambda p: 3)
model("bytes", lambda p: b"run")
model("a path with a NUL", lambda p: "a\0b")
model("a path of 5,000 characters", lambda p: "x" * 5000)
model("a link to itself", lambda p: (p.dir / "l").symlink_to("l") or p.dir / "l")
model("a run whose steps have no manifest", lambda p: damaged(p, "manifest.json", b""))
model("a run whose manifests are lists", lambda p: damaged(p, "manifest.json", b"[]"))
model("a run whose COMMITs are zeros", lambda p: damaged(p, "COMMIT", bytes(100)))


@fault(ROOM, "read_model is given tokens that the model has not")
def tokens(p: Place) -> None:
    import meshtrain as mt

    p.base()
    found = mt.read_model(p.run)
    for given in (
        [[257]],
        [[-1]],
        [[2**40]],
        [["a"]],
        [[1.5]],
        [[[1]]],
        None,
        [[1, 2], [3]],
        [[None]],
    ):
        refusal(lambda given=given: found(given))


@fault(ROOM, "a batch whose weights sum to less than 1 has the mean of its tokens")
def small_weights(p: Place) -> None:
    """Through the hand-made batch of a notebook."""
    import numpy as np

    import meshtrain as mt

    p.config()
    config = mt.load(str(p.dir / "config.yaml"))
    program = mt.Program(config)
    state = program.init()
    batch = mt.open_data(config)[0].batch(0)
    found = [
        float(
            program.eval_step(
                state.params,
                program.place(
                    {**batch, "weights": np.full(batch["labels"].shape, weight, np.float32)}
                ),
            )
        )
        for weight in (1.0, 0.1, 0.01)
    ]
    if max(found) - min(found) > 1e-4 * max(found):
        raise Silent(f"means of the same tokens: {found}")
